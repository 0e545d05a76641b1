//! The control socket: one command and one answer per line.

use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use rtvirtio_domain_protocol::{Changed, Command, Failure, Signalled, Stop};
use rtvirtio_domain_resources::handover::Passed;
use rtvirtio_domain_resources::listen::SocketListener;
use rtvirtio_domain_resources::socket_group;
use rtvirtio_engine::confine::{Confine, Role};
use rtvirtio_engine::engine::EngineHandle;
use rtvirtio_engine::line_server::{Limits, Reply, Request, serve};
use rtvirtio_engine::log::write_line;
use rtvirtio_engine::running::Running;
use serde::Serialize;
use signal_hook::iterator::Handle;

use crate::trace::TraceServer;

/// Bound socket; its path is removed on drop.
pub struct Control {
    socket: SocketListener,
}

/// Engines, configuration and end of the process, as the control socket needs them.
pub struct Served {
    pub engines: Vec<(String, EngineHandle)>,
    pub running: Running,
    /// The configuration file, absolute.
    pub config: PathBuf,
    /// Handle that ends the process.
    pub end: Handle,
}

impl Control {
    /// Binds the socket now, so that no path is opened later.
    pub fn bind(path: &Path, group: Option<&str>) -> anyhow::Result<Self> {
        let group = socket_group::resolve(group).context("`control_group`")?;
        if let Some(dir) = path.parent() {
            make_directory(dir).with_context(|| format!("cannot create {}", dir.display()))?;
        }
        Ok(Self { socket: SocketListener::bind_for_group(path, group).context("`control`")? })
    }

    /// Serves requests in a new thread, which is confined when this returns.
    pub fn serve(&mut self, served: Served, confine: &Confine) -> anyhow::Result<()> {
        let listener = self.socket.listener().try_clone()?;
        let traces = TraceServer::start(served.engines.clone(), served.running.networks(), confine)?;
        listener.set_nonblocking(true)?;
        let limits = Limits { owner: rustix::process::geteuid().as_raw(), ..Limits::default() };
        let serve = move || {
            if let Err(e) = serve(&listener, limits, |request| handle_request(request, &served, &traces)) {
                write_line(format_args!("the control socket is served no more: {e}"));
            }
        };
        confine.spawn("iod-control", Role::Control, serve).context("cannot confine the control thread")?;
        Ok(())
    }
}

/// Creates a directory that other users may enter, regardless of the umask: its sockets have their
/// own modes.
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

/// A reply as a line.
fn line(reply: &impl Serialize) -> String {
    let text = serde_json::to_value(reply).map(|reply| format!("{reply}\n"));
    text.unwrap_or_else(|e| failure(&e))
}

fn failure(error: &dyn std::fmt::Display) -> String {
    line(&Failure { error: error.to_string(), config: None })
}

fn reply_or_failure(reply: Result<impl Serialize, impl std::fmt::Display>) -> String {
    match reply {
        Ok(reply) => line(&reply),
        Err(error) => failure(&error),
    }
}

/// Commands refused to members of `control_group`: they open, close or end something.
fn needs_owner(what: &str) -> String {
    failure(&format!("only root and the user of the I/O domain may {what}; try again with sudo"))
}

fn handle_request(request: Request<'_>, served: &Served, traces: &TraceServer) -> Reply {
    let Request { line: text, mut stream, descriptors, is_owner } = request;
    let Served { running, config, .. } = served;
    let command = match Command::parse(text) {
        Ok(command) => command,
        Err(e) => return Reply::Line(stream, failure(&e)),
    };
    let reply = match command {
        Command::Status => line(&running.status()),
        Command::Histograms => line(&running.histograms()),
        Command::Preview => match running.preview(config) {
            Ok(preview) => line(&preview),
            Err(e) => line(&Failure { error: e.to_string(), config: Some(config.clone()) }),
        },
        Command::Reload { force, disks, ports } => match Passed::pair(disks, ports, descriptors) {
            None => failure(&"there are not three descriptors for each disk and two for each port"),
            Some(passed) if !is_owner && (force || !passed.is_empty()) => {
                needs_owner("attach and detach disks and ports")
            }
            Some(passed) => {
                let changed = reload(running, config, passed, force && is_owner);
                reply_or_failure(changed.map(|changed| Changed { changed }))
            }
        },
        Command::SignalUrgent { .. } if !is_owner => needs_owner("follow urgent requests"),
        Command::SignalUrgent { disks, ports } => {
            let done = signal_urgent(running, &disks, &ports, descriptors);
            reply_or_failure(done.map(|()| Signalled { signalled: disks, signalled_ports: ports }))
        }
        Command::Stop { .. } if !is_owner => needs_owner("stop it"),
        Command::Stop { force } => {
            let guests = running.connected();
            if guests.is_empty() || force {
                write_line("stopped by a command");
                // Sent before the process ends; a disconnected peer needs no answer.
                let _ = stream.write_all(line(&Stop::Ends { stopping: true }).as_bytes());
                served.end.close();
                return Reply::Detached;
            }
            line(&Stop::Serves { guests })
        }
        Command::Trace { for_ms } => match traces.attach(stream, for_ms.map(Duration::from_millis)) {
            Ok(()) => return Reply::Detached,
            Err(refused) => {
                stream = refused;
                failure(&"another listener traces this domain; wait until it ends")
            }
        },
    };
    Reply::Line(stream, reply)
}

/// Sets the disks and ports whose urgent completions and frames are signalled on the eventfd of the
/// request; without an eventfd clears them.
fn signal_urgent(
    running: &Running,
    disks: &[String],
    ports: &[String],
    descriptors: Vec<OwnedFd>,
) -> Result<(), String> {
    let mut descriptors = descriptors.into_iter();
    let (eventfd, other) = (descriptors.next(), descriptors.next());
    if other.is_some() {
        return Err("one eventfd at most is signalled".to_owned());
    }
    running.signal_urgent(disks, ports, eventfd).map_err(|e| e.to_string())
}

/// Reloads the configuration, and logs the result.
pub fn reload(running: &Running, config: &Path, passed: Passed, force: bool) -> Result<Vec<String>, String> {
    match running.reload(config, passed, force) {
        Ok(changed) if changed.is_empty() => {
            write_line("reload: nothing is new");
            Ok(changed)
        }
        Ok(changed) => {
            write_line(format_args!("reload: in force: {}", changed.join(", ")));
            Ok(changed)
        }
        Err(e) => {
            write_line(format_args!("reload: {e}"));
            Err(e.to_string())
        }
    }
}
