//! The vhost-user back end of one VM's disk: a socket, its thread, and one connection at a time.
//!
//! Everything here is between one QEMU and this process. Whatever a QEMU sends, or delays, concerns
//! its own disk.

mod connection;

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use vhost::vhost_user::{BackendReqHandler, Error};

use self::connection::Connection;
use crate::blk::Limits;
use crate::confine::{Confine, Role};
use crate::engine::{Command, EngineHandle};
use crate::listen::SocketListener;

/// What a control thread knows of the disk.
#[derive(Clone, Debug)]
pub struct DiskInfo {
    /// For logs and the thread's name.
    pub name: String,
    /// Number of the VM in its engine.
    pub vm: usize,
    /// What may be asked of it.
    pub limits: Limits,
    /// Bytes of a block.
    pub block: u32,
    /// Queues offered.
    pub queues: u16,
    /// Its QEMU may bring huge pages.
    pub hugepages: bool,
}

/// A socket that is served by a thread of its own, one QEMU after the other.
#[derive(Debug)]
pub struct VhostUserServer {
    stop: Arc<AtomicBool>,
    connection: Arc<Mutex<Option<UnixStream>>>,
    socket: SocketListener,
    engine: EngineHandle,
    vm: usize,
    thread: Option<JoinHandle<()>>,
}

impl VhostUserServer {
    /// Serves a disk's socket by a thread, which is confined when this returns.
    ///
    /// # Errors
    /// When the thread cannot be made or confined.
    pub fn start(
        disk: DiskInfo,
        socket: SocketListener,
        engine: EngineHandle,
        confine: &Confine,
    ) -> io::Result<Self> {
        let listener = socket.listener().try_clone()?;
        let stop = Arc::new(AtomicBool::new(false));
        let connection = Arc::new(Mutex::new(None));
        let (stopped, current) = (Arc::clone(&stop), Arc::clone(&connection));
        let (vm, handle) = (disk.vm, engine.clone());
        let name: String = format!("vm-{}", disk.name).chars().take(15).collect();
        let thread = confine.spawn(&name, Role::VhostUser, move || {
            while !stopped.load(Ordering::Acquire) {
                let Ok((stream, _)) = listener.accept() else {
                    if stopped.load(Ordering::Acquire) {
                        break;
                    }
                    // Out of descriptors, say: that passes, and QEMU tries again.
                    std::thread::sleep(std::time::Duration::from_millis(50));
                    continue;
                };
                // Known before it is asked whether to stop: either this thread or the one that
                // closes sees the other.
                let Ok(copy) = stream.try_clone() else {
                    // Nothing could end this connection later. Its QEMU tries again.
                    std::thread::sleep(std::time::Duration::from_millis(50));
                    continue;
                };
                if let Ok(mut current) = current.lock() {
                    *current = Some(copy);
                }
                if stopped.load(Ordering::Acquire) {
                    break;
                }
                // A defect that one QEMU can reach is between it and us: its connection ends, and
                // the next one is served.
                if catch_unwind(AssertUnwindSafe(|| serve(stream, &disk, &engine))).is_err() {
                    crate::log::line(&disk.name, "a defect ended the connection");
                }
                if let Ok(mut current) = current.lock() {
                    *current = None;
                }
            }
        })?;
        Ok(Self { stop, connection, socket, engine: handle, vm, thread: Some(thread) })
    }
}

fn serve(stream: UnixStream, disk: &DiskInfo, engine: &EngineHandle) {
    let connection = Arc::new(Mutex::new(Connection::new(disk.clone(), engine.clone())));
    let mut handler = BackendReqHandler::from_stream(stream, connection);
    loop {
        match handler.handle_request() {
            Ok(()) => {}
            // A message that is refused is layout to QEMU where it asked for an answer; the
            // connection goes on.
            Err(Error::ReqHandlerError(_) | Error::InvalidParam | Error::InvalidOperation(_)) => {}
            Err(Error::Disconnected) => break,
            Err(e) => {
                crate::log::line(&disk.name, format_args!("connection ends: {e}"));
                break;
            }
        }
    }
}

impl VhostUserServer {
    /// Ends the connection and the listener; the thread ends soon. Dropping waits for it, so
    /// several are closed first and then dropped.
    pub fn close(&self) {
        self.stop.store(true, Ordering::Release);
        if let Ok(current) = self.connection.lock() {
            if let Some(stream) = current.as_ref() {
                let _ = rustix::net::shutdown(stream.as_fd(), rustix::net::Shutdown::Both);
            }
        }
        // The thread may wait for a queue to stop, which takes as long as the guest's requests:
        // they are dropped, and their QEMU keeps what was in flight.
        let (reply, _) = std::sync::mpsc::sync_channel(1);
        let _ = self.engine.send(Command::Disconnect { vm: self.vm, reply });
        // Wakes the thread that accepts, also when the socket's name was removed.
        let _ = rustix::net::shutdown(self.socket.listener().as_fd(), rustix::net::Shutdown::Both);
    }
}

impl Drop for VhostUserServer {
    fn drop(&mut self) {
        self.close();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
