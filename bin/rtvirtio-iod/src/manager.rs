//! The service manager that started the process, where there is one: systemd with `Type=notify`.

use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use anyhow::Context as _;
use rtvirtio_engine::confine::{Confine, Role};
use rtvirtio_engine::liveness::Liveness;
use rtvirtio_engine::log::write_line;
use sd_notify::NotifyState;

/// Longest wait for room in the manager's queue.
const LONGEST_SEND: Duration = Duration::from_secs(1);

/// The socket of the service manager, and the interval of its watchdog.
pub struct Manager {
    socket: Option<UnixDatagram>,
    watchdog: Option<Duration>,
}

impl Manager {
    /// Connects to the socket that `NOTIFY_SOCKET` names; later the sandbox allows no path and no
    /// new socket. A socket that cannot be used is logged: guests are served without it too.
    pub fn connect() -> Self {
        let socket = match open() {
            Ok(socket) => socket,
            Err(e) => {
                write_line(format_args!("NOTIFY_SOCKET: {e}; the service manager is not notified"));
                None
            }
        };
        let mut timeout = 0;
        let is_watched = sd_notify::watchdog_enabled(false, &mut timeout) && timeout > 0;
        // Often, so that an engine has nearly all of the time to answer.
        let watchdog = is_watched.then(|| Duration::from_micros(timeout) / 6);
        Self { socket, watchdog }
    }

    /// Sends states; the manager may be absent, and need not be notified each time.
    pub fn notify(&self, states: &[NotifyState<'_>]) {
        if let Some(socket) = &self.socket {
            send(socket, states);
        }
    }

    /// Notifies the watchdog, in a new thread, as long as every engine answers. An engine that does
    /// not answer leaves its guests without a disk, and systemd ends the process then: QEMU
    /// connects to the next one.
    pub fn watch(&self, engines: Liveness, confine: &Confine) -> anyhow::Result<()> {
        let (Some(socket), Some(interval)) = (&self.socket, self.watchdog) else { return Ok(()) };
        let socket = socket.try_clone()?;
        let watch = move || {
            while engines.wait().is_ok() {
                send(&socket, &[NotifyState::Watchdog]);
                std::thread::sleep(interval);
            }
        };
        confine
            .spawn("iod-watchdog", Role::Control, watch)
            .context("cannot confine the watchdog's thread")?;
        Ok(())
    }
}

/// The socket of the environment; `None` without one.
fn open() -> std::io::Result<Option<UnixDatagram>> {
    let Some(name) = std::env::var_os("NOTIFY_SOCKET") else { return Ok(None) };
    let address = match name.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(&name)?,
    };
    let socket = UnixDatagram::unbound()?;
    socket.connect_addr(&address)?;
    // A busy manager still gets READY; one that never reads delays the start by this time at most.
    socket.set_write_timeout(Some(LONGEST_SEND))?;
    Ok(Some(socket))
}

fn send(socket: &UnixDatagram, states: &[NotifyState<'_>]) {
    let text: String = states.iter().map(|state| format!("{state}\n")).collect();
    let _ = socket.send(text.as_bytes());
}
