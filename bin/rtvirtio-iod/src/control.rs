//! The control socket: one command a line, one answer a line.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use rtvirtio_iodomain::confine::{Confine, Role};
use rtvirtio_iodomain::engine::EngineHandle;
use rtvirtio_iodomain::reload::Reloader;
use rtvirtio_iodomain::report::report;

use crate::trace::Desk;

/// Who asks and then says nothing keeps nobody else waiting for longer.
const PATIENCE: Duration = Duration::from_secs(2);

/// The socket; its name goes when this is dropped.
pub struct Control {
    path: PathBuf,
    listener: Option<UnixListener>,
}

/// What is asked about.
pub struct Subject {
    pub engines: Vec<(String, EngineHandle)>,
    pub reloader: Reloader,
    pub config: PathBuf,
}

impl Control {
    /// Listens, so that nothing has to be opened later.
    pub fn bind(path: &Path) -> anyhow::Result<Self> {
        if let Some(dir) = path.parent() {
            std::fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
        }
        if UnixStream::connect(path).is_ok() {
            anyhow::bail!("{}: another I/O domain answers there", path.display());
        }
        let _ = std::fs::remove_file(path);
        let listener = UnixListener::bind(path).with_context(|| path.display().to_string())?;
        Ok(Self { path: path.to_owned(), listener: Some(listener) })
    }

    /// Answers by a thread of its own, which is confined when this returns.
    pub fn serve(&mut self, subject: Subject, confine: &Confine) -> anyhow::Result<()> {
        let Some(listener) = self.listener.take() else { return Ok(()) };
        let desk = Desk::start(subject.engines.clone(), confine)?;
        let serve = move || {
            for stream in listener.incoming().flatten() {
                let _ = answer(stream, &subject, &desk);
            }
        };
        confine.spawn("iod-control", Role::Control, serve).context("cannot confine the control thread")?;
        Ok(())
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

fn answer(stream: UnixStream, subject: &Subject, desk: &Desk) -> anyhow::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut line = String::new();
    BufReader::new((&stream).take(4_096)).read_line(&mut line)?;
    let asked: serde_json::Value = serde_json::from_str(&line).unwrap_or_default();
    let mut stream = stream;
    let reply = match asked.get("command").and_then(|c| c.as_str()) {
        Some("status") => serde_json::to_value(report(&subject.engines))?,
        Some("reload") => match reload(&subject.reloader, &subject.config) {
            Ok(changed) => serde_json::json!({ "changed": changed }),
            Err(error) => serde_json::json!({ "error": error }),
        },
        Some("trace") => match desk.take(stream, &asked) {
            Ok(()) => return Ok(()),
            Err(refused) => {
                stream = refused;
                serde_json::json!({ "error": "somebody else traces this domain; wait until he is done" })
            }
        },
        _ => serde_json::json!({ "error": "there are the commands \"status\", \"reload\" and \"trace\"" }),
    };
    writeln!(stream, "{reply}")?;
    Ok(())
}

/// Reads the configuration again; the log has it too, whoever asked.
pub fn reload(reloader: &Reloader, config: &Path) -> Result<Vec<String>, String> {
    match reloader.reload(config) {
        Ok(changed) if changed.is_empty() => {
            eprintln!("rtvirtio-iod: reload: nothing is new");
            Ok(changed)
        }
        Ok(changed) => {
            eprintln!("rtvirtio-iod: reload: in force: {}", changed.join(", "));
            Ok(changed)
        }
        Err(e) => {
            eprintln!("rtvirtio-iod: reload: {e}");
            Err(e.to_string())
        }
    }
}
