//! `rtvirtio-iod`: the I/O domain's process.

mod trace;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::Parser;
use rtvirtio_iodomain::config::File;
use rtvirtio_iodomain::domain::{Domain, report};
use rtvirtio_iodomain::engine::EngineHandle;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// Serves the disks of VMs over vhost-user-blk and schedules every request.
#[derive(Debug, Parser)]
#[command(
    name = "rtvirtio-iod",
    version,
    after_help = "EXAMPLES\n  rtvirtio-iod --config /etc/rtvirtio/iod.toml --check     is the file right?\n  rtvirtio-iod --config /etc/rtvirtio/iod.toml\n\n\
    QEMU connects with\n  -object memory-backend-memfd,id=mem,size=1G,share=on -machine memory-backend=mem\n  -chardev socket,id=c0,path=/run/vm0.sock,reconnect=1 -device vhost-user-blk-pci,chardev=c0"
)]
struct Args {
    /// The configuration file
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Read the file, say whether it is right, and end
    #[arg(long)]
    check: bool,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("rtvirtio-iod: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> anyhow::Result<()> {
    let file = File::load(&args.config)?;
    if args.check {
        let disks: usize = file.devices.iter().map(|d| d.disks.len()).sum();
        println!("{}: {} devices, {disks} disks", args.config.display(), file.devices.len());
        return Ok(());
    }
    // Signals are waited for before threads exist, so that all of them leave these to this one.
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("signals")?;
    // Each guest brings descriptors: memory, kicks, calls.
    let mut files = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    files.current = files.maximum;
    let _ = rustix::process::setrlimit(rustix::process::Resource::Nofile, files);
    let domain = Domain::start(&file)?;
    // All that depends on guests' requests is there by now.
    if let Err(e) = rustix::mm::mlockall(rustix::mm::MlockAllFlags::CURRENT) {
        eprintln!("rtvirtio-iod: memory is not locked and may be swapped out ({e}); raise LimitMEMLOCK");
    }
    let control = Control::start(&file.control, domain.handles())?;
    println!("ready");
    std::io::stdout().flush()?;
    signals.forever().next();
    drop(control);
    drop(domain);
    Ok(())
}

/// Answers `{"command": "status"}`, one line each, and hands who wants a trace to the [`trace::Desk`].
struct Control {
    path: PathBuf,
}

impl Control {
    fn start(path: &Path, handles: Vec<(String, EngineHandle)>) -> anyhow::Result<Self> {
        if let Some(dir) = path.parent() {
            std::fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
        }
        if UnixStream::connect(path).is_ok() {
            anyhow::bail!("{}: another I/O domain answers there", path.display());
        }
        let _ = std::fs::remove_file(path);
        let desk = trace::Desk::start(handles.clone())?;
        let listener = UnixListener::bind(path).with_context(|| path.display().to_string())?;
        std::thread::Builder::new().name("iod-control".into()).spawn(move || {
            for stream in listener.incoming().flatten() {
                let _ = answer(stream, &handles, &desk);
            }
        })?;
        Ok(Self { path: path.to_owned() })
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

fn answer(stream: UnixStream, handles: &[(String, EngineHandle)], desk: &trace::Desk) -> anyhow::Result<()> {
    // Who asks and then says nothing keeps nobody else waiting for long.
    stream.set_read_timeout(Some(Duration::from_secs(2)))?;
    stream.set_write_timeout(Some(Duration::from_secs(2)))?;
    let mut line = String::new();
    std::io::Read::take(BufReader::new(&stream), 4_096).read_line(&mut line)?;
    let asked: serde_json::Value = serde_json::from_str(&line).unwrap_or_default();
    let mut stream = stream;
    let reply = match asked.get("command").and_then(|c| c.as_str()) {
        Some("status") => serde_json::to_value(report(handles))?,
        Some("trace") => match desk.take(stream, &asked) {
            Ok(()) => return Ok(()),
            Err(refused) => {
                stream = refused;
                serde_json::json!({ "error": "somebody else traces this domain; wait until he is done" })
            }
        },
        _ => serde_json::json!({ "error": "there are the commands \"status\" and \"trace\"" }),
    };
    writeln!(stream, "{reply}")?;
    Ok(())
}
