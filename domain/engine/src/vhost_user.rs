//! The vhost-user back end of one VM's device: a socket, its thread, and one connection at a time.
//!
//! A connection is between one QEMU and this process: whatever a QEMU sends, or delays, concerns
//! its own device.

mod config_space;
mod connection;
mod descriptors;
mod early;

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use rtvirtio_domain_resources::listen::SocketListener;
use rtvirtio_domain_resources::use_lock::UseLock;
use vhost::vhost_user::{BackendReqHandler, Error, VhostUserBackendReqHandlerMut as _};

pub use self::config_space::ConfigSpace;
use self::connection::Connection;
use self::early::Early;
use crate::confine::{Role, StartThread};
use crate::engine::{Command, EngineHandle, QueueCommand};
use crate::log::Refusals;
use crate::memory::Trust;

/// The vhost-user properties of a device.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// Name in logs, and of the thread.
    pub name: String,
    /// Index of the VM in its engine.
    pub vm: usize,
    /// Offered features of virtio.
    pub features: u64,
    /// The configuration space; empty where the VMM provides it, as for network devices.
    pub config: ConfigSpace,
    /// Virtqueues offered to the guest.
    pub queues: u16,
    /// Largest number of descriptors of a queue.
    pub largest_queue: u16,
    /// Trust in the front end.
    pub trust: Trust,
    /// Whether requests in flight are tracked in memory that outlives this process. QEMU has it for
    /// disks only.
    pub has_inflight: bool,
    /// Lock that is held while a queue is served; `None` for a device that does not move.
    pub use_lock: Option<Arc<UseLock>>,
}

/// A socket with its thread; serves one QEMU at a time.
#[derive(Debug)]
pub struct VhostUserServer<C: From<QueueCommand> = Command> {
    stop: Arc<AtomicBool>,
    connection: Arc<Mutex<Option<UnixStream>>>,
    /// Whether a queue is served.
    in_use: Arc<AtomicBool>,
    socket: SocketListener,
    engine: EngineHandle<C>,
    vm: usize,
    refusals: Arc<Refusals>,
    config: ConfigSpace,
    thread: Option<JoinHandle<()>>,
}

impl<C: From<QueueCommand> + Send + 'static> VhostUserServer<C> {
    /// Serves a device's socket; the thread is confined when this returns.
    ///
    /// # Errors
    /// The thread cannot be started or confined.
    pub fn start(
        device: DeviceInfo,
        socket: SocketListener,
        engine: EngineHandle<C>,
        threads: &dyn StartThread,
    ) -> io::Result<Self> {
        let listener = socket.listener().try_clone()?;
        let stop = Arc::new(AtomicBool::new(false));
        let connection = Arc::new(Mutex::new(None));
        let in_use = Arc::new(AtomicBool::new(false));
        let (stopped, current, used) = (Arc::clone(&stop), Arc::clone(&connection), Arc::clone(&in_use));
        let (vm, handle, config) = (device.vm, engine.clone(), device.config.clone());
        let name: String = format!("vm-{}", device.name).chars().take(15).collect();
        let refusals = Arc::new(Refusals::default());
        let seen = Arc::clone(&refusals);
        let body = move || {
            crate::log::keep_refusals(seen);
            while !stopped.load(Ordering::Acquire) {
                let Ok((stream, _)) = listener.accept() else {
                    if stopped.load(Ordering::Acquire) {
                        break;
                    }
                    // Out of descriptors, for instance: temporary, and QEMU retries.
                    std::thread::sleep(std::time::Duration::from_millis(50));
                    continue;
                };
                // Stored before `stop` is read: either this thread sees `stop`, or `close` sees the
                // connection.
                let Ok(copy) = stream.try_clone() else {
                    // Without a copy, `close` could not end this connection. QEMU retries.
                    std::thread::sleep(std::time::Duration::from_millis(50));
                    continue;
                };
                if let Ok(mut current) = current.lock() {
                    *current = Some(copy);
                }
                if stopped.load(Ordering::Acquire) {
                    break;
                }
                // A panic in message handling ends this connection only; the next one is served.
                if catch_unwind(AssertUnwindSafe(|| serve(stream, &device, &engine, &used))).is_err() {
                    crate::log::line(&device.name, "a defect ended the connection");
                }
                if let Ok(mut current) = current.lock() {
                    *current = None;
                }
            }
        };
        let thread = threads.start_thread(&name, Role::VhostUser, Box::new(body))?;
        Ok(Self {
            stop,
            connection,
            in_use,
            socket,
            engine: handle,
            vm,
            refusals,
            config,
            thread: Some(thread),
        })
    }
}

impl<C: From<QueueCommand>> VhostUserServer<C> {
    /// Whether a QEMU is connected, whatever its guest does.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.connection.lock().is_ok_and(|current| current.is_some())
    }

    /// Whether a QEMU is connected whose guest uses the device. QEMU keeps the connection of a
    /// device that was removed (`device_del`), and stops its queues.
    #[must_use]
    pub fn is_in_use(&self) -> bool {
        self.is_connected() && self.in_use.load(Ordering::Relaxed)
    }

    /// The process that is connected; `None` without one, or where the kernel does not know it in
    /// this PID namespace.
    #[must_use]
    pub fn peer(&self) -> Option<u32> {
        let current = self.connection.lock().ok()?;
        let peer = rustix::net::sockopt::socket_peercred(current.as_ref()?).ok()?;
        u32::try_from(peer.pid.as_raw_nonzero().get()).ok()
    }

    /// Configuration space of the device.
    #[must_use]
    pub fn config(&self) -> &ConfigSpace {
        &self.config
    }

    /// Messages and connections that were refused.
    #[must_use]
    pub fn refusals(&self) -> &Refusals {
        &self.refusals
    }

    /// Whether the thread has ended, after [`VhostUserServer::close`]: nothing of the VM is in
    /// flight then.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

fn serve<C>(stream: UnixStream, device: &DeviceInfo, engine: &EngineHandle<C>, in_use: &Arc<AtomicBool>)
where
    C: From<QueueCommand> + Send,
{
    let connection =
        Arc::new(Mutex::new(Connection::new(device.clone(), engine.clone(), Arc::clone(in_use))));
    let Ok(early) = stream.try_clone() else { return };
    let mut handler = BackendReqHandler::from_stream(stream, Arc::clone(&connection));
    loop {
        match serve_early(&early, &connection) {
            Ok(true) => continue,
            Ok(false) => {}
            Err(e) => {
                crate::log::line(&device.name, format_args!("connection ends: {e}"));
                break;
            }
        }
        match handler.handle_request() {
            Ok(()) => {}
            // A refused message is reported to QEMU if it asked for a reply; the connection
            // continues.
            Err(Error::ReqHandlerError(_) | Error::InvalidParam | Error::InvalidOperation(_)) => {}
            Err(Error::Disconnected) => break,
            Err(e) => {
                crate::log::line(&device.name, format_args!("connection ends: {e}"));
                break;
            }
        }
    }
}

/// Serves a message that the crate does not handle; `false` for any other.
fn serve_early<C: From<QueueCommand>>(
    stream: &UnixStream,
    connection: &Mutex<Connection<C>>,
) -> io::Result<bool> {
    let Ok(mut connection) = connection.lock() else { return Ok(false) };
    let Some(message) = early::take(stream, !connection.has_features())? else { return Ok(false) };
    let is_done = match message.what {
        Early::Enable { index, enable } => connection.set_vring_enable(index, enable).is_ok(),
        Early::Channel(fd) => connection.set_channel(fd),
        Early::Announce(mac) => connection.announce(mac).is_ok(),
        Early::LogSignal => connection.refuse_log_signal(),
    };
    message.reply.send(stream, is_done)?;
    Ok(true)
}

impl<C: From<QueueCommand>> VhostUserServer<C> {
    /// Ends the connection and the listener; the thread ends soon. Dropping joins it, so several
    /// are closed first and then dropped.
    pub fn close(&self) {
        self.stop.store(true, Ordering::Release);
        if let Ok(current) = self.connection.lock() {
            if let Some(stream) = current.as_ref() {
                let _ = rustix::net::shutdown(stream.as_fd(), rustix::net::Shutdown::Both);
            }
        }
        // The thread may wait for a queue to stop, which takes as long as the guest's requests:
        // they are cancelled, and QEMU keeps them in flight.
        let (reply, _) = std::sync::mpsc::sync_channel(1);
        let _ = self.engine.send(QueueCommand::Disconnect { vm: self.vm, reply });
        // Wakes the accepting thread, also when the socket's name was removed.
        let _ = rustix::net::shutdown(self.socket.listener().as_fd(), rustix::net::Shutdown::Both);
    }
}

impl<C: From<QueueCommand>> Drop for VhostUserServer<C> {
    fn drop(&mut self) {
        self.close();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
