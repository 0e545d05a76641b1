//! The control socket: one command a line, one answer a line.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use anyhow::Context;
use rtvirtio_engine::confine::{Confine, Role};
use rtvirtio_engine::engine::EngineHandle;
use rtvirtio_engine::line_server::{Limits, Reply, serve};
use rtvirtio_engine::listen::SocketListener;
use rtvirtio_engine::reload::Reloader;
use rtvirtio_engine::report::report;
use rtvirtio_engine::socket_group;

use crate::trace::TraceServer;

/// The socket; its name goes when this is dropped.
pub struct Control {
    socket: SocketListener,
}

/// What the control socket serves.
pub struct Served {
    pub engines: Vec<(String, EngineHandle)>,
    pub reloader: Reloader,
    pub config: PathBuf,
}

impl Control {
    /// Listens, so that no path is opened later.
    pub fn bind(path: &Path, group: Option<&str>) -> anyhow::Result<Self> {
        let group = socket_group::resolve(group).context("`control_group`")?;
        if let Some(dir) = path.parent() {
            make_directory(dir).with_context(|| format!("cannot create {}", dir.display()))?;
        }
        Ok(Self { socket: SocketListener::bind_for_group(path, group).context("`control`")? })
    }

    /// Serves in a thread, which is confined when this returns.
    pub fn serve(&mut self, served: Served, confine: &Confine) -> anyhow::Result<()> {
        let listener = self.socket.listener().try_clone()?;
        let traces = TraceServer::start(served.engines.clone(), confine)?;
        listener.set_nonblocking(true)?;
        let serve = move || {
            if let Err(e) =
                serve(&listener, Limits::default(), |line, s| handle_request(line, s, &served, &traces))
            {
                eprintln!("rtvirtio-iod: the control socket is served no more: {e}");
            }
        };
        confine.spawn("iod-control", Role::Control, serve).context("cannot confine the control thread")?;
        Ok(())
    }
}

/// Creates a directory that other users may enter, whatever the umask: its sockets have their own
/// modes.
fn make_directory(dir: &Path) -> std::io::Result<()> {
    if dir.as_os_str().is_empty() || dir.is_dir() {
        return Ok(());
    }
    if let Some(parent) = dir.parent() {
        make_directory(parent)?;
    }
    match std::fs::create_dir(dir) {
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists && dir.is_dir() => Ok(()),
        Err(e) => Err(e),
        Ok(()) => std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o755)),
    }
}

fn handle_request(line: &str, mut stream: UnixStream, served: &Served, traces: &TraceServer) -> Reply {
    let request: serde_json::Value = serde_json::from_str(line).unwrap_or_default();
    let reply = match request.get("command").and_then(|c| c.as_str()) {
        Some("status") => serde_json::to_value(report(&served.engines))
            .unwrap_or_else(|e| serde_json::json!({ "error": e.to_string() })),
        Some("reload") => match reload(&served.reloader, &served.config) {
            Ok(changed) => serde_json::json!({ "changed": changed }),
            Err(error) => serde_json::json!({ "error": error }),
        },
        Some("trace") => match traces.attach(stream, &request) {
            Ok(()) => return Reply::Detached,
            Err(refused) => {
                stream = refused;
                serde_json::json!({ "error": "another listener traces this domain; wait until it ends" })
            }
        },
        _ => serde_json::json!({ "error": "there are the commands \"status\", \"reload\" and \"trace\"" }),
    };
    Reply::Line(stream, format!("{reply}\n"))
}

/// Reloads the configuration, and logs the result.
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
