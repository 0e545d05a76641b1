//! The control socket: one command and one answer per line.

use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use rtvirtio_engine::confine::{Confine, Role};
use rtvirtio_engine::engine::EngineHandle;
use rtvirtio_engine::handover::{DiskFacts, Passed};
use rtvirtio_engine::handover_port::PortFacts;
use rtvirtio_engine::line_server::{Limits, Reply, Request, serve};
use rtvirtio_engine::listen::SocketListener;
use rtvirtio_engine::log::write_line;
use rtvirtio_engine::running::Running;
use rtvirtio_engine::socket_group;
use serde_json::{Value, json};
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

/// Commands refused to members of `control_group`: they open, close or end something.
fn needs_owner(what: &str) -> Value {
    let text = format!("only root and the user of the I/O domain may {what}; try again with sudo");
    json!({ "error": text })
}

fn handle_request(request: Request<'_>, served: &Served, traces: &TraceServer) -> Reply {
    let Request { line, mut stream, descriptors, is_owner } = request;
    let request: Value = serde_json::from_str(line).unwrap_or_default();
    let force = request.get("force").and_then(Value::as_bool).unwrap_or(false);
    let reply = match request.get("command").and_then(|c| c.as_str()) {
        Some("status") => serde_json::to_value(served.running.report())
            .unwrap_or_else(|e| json!({ "error": e.to_string() })),
        Some("histograms") => serde_json::to_value(served.running.histograms())
            .unwrap_or_else(|e| json!({ "error": e.to_string() })),
        Some("preview") => preview(served),
        Some("reload") => match passed_files(&request, descriptors) {
            Err(error) => json!({ "error": error }),
            Ok(passed) if !is_owner && (force || !passed.is_empty()) => {
                needs_owner("attach and detach disks and ports")
            }
            Ok(passed) => match reload(&served.running, &served.config, passed, force && is_owner) {
                Ok(changed) => json!({ "changed": changed }),
                Err(error) => json!({ "error": error }),
            },
        },
        Some("signal_urgent") if !is_owner => needs_owner("follow urgent requests"),
        Some("signal_urgent") => match signal_urgent(&served.running, &request, descriptors) {
            Ok(()) => json!({ "signalled": request["disks"], "signalled_ports": request["ports"] }),
            Err(error) => json!({ "error": error }),
        },
        Some("stop") if !is_owner => needs_owner("stop it"),
        Some("stop") => {
            let guests = served.running.connected();
            if guests.is_empty() || force {
                write_line("stopped by a command");
                // Sent before the process ends; a disconnected peer needs no answer.
                let _ = writeln!(&stream, "{}", json!({ "stopping": true }));
                served.end.close();
                return Reply::Detached;
            }
            json!({ "guests": guests })
        }
        Some("trace") => match traces.attach(stream, &request) {
            Ok(()) => return Reply::Detached,
            Err(refused) => {
                stream = refused;
                json!({ "error": "another listener traces this domain; wait until it ends" })
            }
        },
        _ => {
            json!({ "error": "there are the commands status, histograms, preview, reload, signal_urgent, stop and trace" })
        }
    };
    Reply::Line(stream, format!("{reply}\n"))
}

/// Effect of a reload, and the configuration file's path.
fn preview(served: &Served) -> Value {
    let config = served.config.display().to_string();
    match served.running.preview(&served.config) {
        Ok(found) => {
            let going = |list: &[(String, bool)]| -> Vec<Value> {
                let one =
                    |(name, connected): &(String, bool)| json!({ "name": name, "connected": connected });
                list.iter().map(one).collect()
            };
            let (detach, detach_ports) = (going(&found.detach), going(&found.detach_ports));
            json!({
                "config": config, "attach": found.attach, "detach": detach,
                "attach_ports": found.attach_ports, "detach_ports": detach_ports
            })
        }
        Err(e) => json!({ "config": config, "error": e.to_string() }),
    }
}

fn passed_files(request: &Value, descriptors: Vec<OwnedFd>) -> Result<Passed, String> {
    let disks: Vec<DiskFacts> = list_of(request, "disks")?;
    let ports: Vec<PortFacts> = list_of(request, "ports")?;
    Passed::pair(disks, ports, descriptors)
        .ok_or_else(|| "there are not three descriptors for each disk and two for each port".to_owned())
}

/// Sets the disks and ports whose urgent completions and frames are signalled on the eventfd of the
/// request; without an eventfd clears them.
fn signal_urgent(running: &Running, request: &Value, descriptors: Vec<OwnedFd>) -> Result<(), String> {
    let disks: Vec<String> = list_of(request, "disks")?;
    let ports: Vec<String> = list_of(request, "ports")?;
    let mut descriptors = descriptors.into_iter();
    let (eventfd, other) = (descriptors.next(), descriptors.next());
    if other.is_some() {
        return Err("one eventfd at most is signalled".to_owned());
    }
    running.signal_urgent(&disks, &ports, eventfd).map_err(|e| e.to_string())
}

/// List under a key; empty without the key.
fn list_of<T: serde::de::DeserializeOwned>(request: &Value, key: &str) -> Result<Vec<T>, String> {
    match request.get(key) {
        None => Ok(Vec::new()),
        Some(list) => serde_json::from_value(list.clone()).map_err(|e| format!("`{key}`: {e}")),
    }
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
