//! HTTP with JSON and server-sent events on a Unix socket; on TCP only when asked, on loopback
//! addresses, and there read-only.

mod answers;
mod arrivals;
mod client;
#[cfg(test)]
mod described;
mod metrics;
mod places;
mod routes;

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use tokio::net::{TcpListener, UnixListener};
use tokio::sync::oneshot;

use crate::error::DaemonError;
use crate::shared::Shared;
use places::Places;

use rtvirtio_kernel::trusted::DATA_LIMIT;

pub use client::{Client, ClientError};
pub use routes::OPENAPI;

/// Most connections of each listener at a time; others wait.
const MOST_CONNECTIONS: usize = 64;

/// Addresses on which the service listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listeners {
    /// Path of the Unix socket.
    pub socket: PathBuf,
    /// Group that may use it besides root; left to root where there is none of this name.
    pub group: Option<String>,
    /// A loopback address, read-only.
    pub tcp: Option<SocketAddr>,
}

/// A running server, which ends when this is dropped.
pub struct Running {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    socket: PathBuf,
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic of the thread loses no state.
            let _ = thread.join();
        }
        let _ = fs::remove_file(&self.socket);
    }
}

/// Begins to listen, in a thread of its own.
///
/// # Errors
/// [`DaemonError::NotLoopback`]; when a socket cannot be bound.
pub fn serve(listeners: &Listeners, shared: Arc<Shared>) -> Result<Running, DaemonError> {
    if let Some(address) = listeners.tcp.filter(|a| !a.ip().is_loopback()) {
        return Err(DaemonError::NotLoopback { address: address.to_string() });
    }
    let path = listeners.socket.clone();
    let failed = |action| {
        let path = path.clone();
        move |source| DaemonError::Io { action, path, source }
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(failed("make a runtime for"))?;
    let _entered = runtime.enter();
    let unix = bind(&listeners.socket, listeners.group.as_deref()).map_err(failed("listen on"))?;
    let tcp = match listeners.tcp {
        None => None,
        Some(address) => {
            let path = PathBuf::from(address.to_string());
            let failed = |source| DaemonError::Io { action: "listen on", path, source };
            let listener = std::net::TcpListener::bind(address)
                .and_then(|l| l.set_nonblocking(true).map(|()| l))
                .and_then(TcpListener::from_std);
            Some(listener.map_err(failed)?)
        }
    };
    drop(_entered);
    let (stop, stopped) = oneshot::channel::<()>();
    let thread = std::thread::Builder::new().name("api".to_owned()).spawn(move || {
        runtime.block_on(async move {
            let unix = Places::new(unix, MOST_CONNECTIONS);
            let local = axum::serve(unix, routes::all(Arc::clone(&shared)));
            let remote = async {
                match tcp {
                    Some(listener) => {
                        let listener = Places::new(listener, MOST_CONNECTIONS);
                        let _ = axum::serve(listener, routes::read_only(shared)).await;
                    }
                    None => std::future::pending::<()>().await,
                }
            };
            // Open streams end with the runtime: nothing waits for a client.
            tokio::select! {
                _ = stopped => {}
                _ = local => {}
                () = remote => {}
            }
        });
    });
    match thread {
        Ok(thread) => {
            Ok(Running { stop: Some(stop), thread: Some(thread), socket: listeners.socket.clone() })
        }
        Err(source) => Err(failed("start a thread for")(source)),
    }
}

/// Binds the socket so that no other user can connect between bind(2) and chmod(2).
fn bind(path: &Path, group: Option<&str>) -> io::Result<UnixListener> {
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir)?;
    }
    // The service's lock is held: a socket here is left of one that has ended.
    match fs::symlink_metadata(path) {
        Ok(meta) if meta.file_type().is_socket() => fs::remove_file(path)?,
        Ok(_) => {
            let why = "it exists and is no socket: check what it is, and remove it";
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, why));
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(e),
    }
    let before = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o177));
    let listener = std::os::unix::net::UnixListener::bind(path);
    rustix::process::umask(before);
    let listener = listener?;
    if let Some(gid) = group.and_then(group_id) {
        chown(path, None, Some(gid))?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o660))?;
    }
    listener.set_nonblocking(true)?;
    UnixListener::from_std(listener)
}

/// GID of a group in `/etc/group`; `None` if it is not there.
fn group_id(name: &str) -> Option<u32> {
    let groups = rtvirtio_kernel::trusted::read_config_text("/etc/group", DATA_LIMIT).ok()?;
    let line = groups.lines().find(|line| line.split(':').next() == Some(name))?;
    line.split(':').nth(2)?.parse().ok()
}
