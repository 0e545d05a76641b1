//! The socket of a device: awaited by the thread of all sockets, or served by a thread of its own.

use std::io::{self, Write as _};
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::DupFlags;
use rustix::net::Shutdown;
use vhost::vhost_user::{
    BackendReqHandler, Error, VhostUserBackendReqHandler as _, VhostUserBackendReqHandlerMut as _,
};

use super::early::Early;
use super::front_ends::{Awaited, FrontEndSocket, SocketState, Wake};
use super::{Connection, DeviceInfo, early};
use crate::engine::{EngineHandle, QueueCommand};
use crate::log::Refusals;

/// Time without a message after which a front end is awaited by the thread of all sockets.
const SILENCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
/// Pause after a connection that could not be accepted.
const RETRY: Duration = Duration::from_millis(50);

/// A connection to a front end.
struct Session<C: From<QueueCommand>> {
    stream: Arc<UnixStream>,
    connection: Arc<Mutex<Connection<C>>>,
    handler: BackendReqHandler<Mutex<Connection<C>>>,
    has_begun: bool,
}

/// Threads may change; a session is in one place.
enum Phase<C: From<QueueCommand>> {
    /// Awaited by the thread of all sockets: a message of a session, or else a connection.
    Awaited(Option<Session<C>>),
    /// A thread for it is being started.
    Claimed(Option<Session<C>>),
    /// A thread has the session.
    Served,
    /// Closed, and nothing of the VM is in flight.
    Ended,
}

/// The socket of a device, shared by the threads that wait for it and serve it.
pub(super) struct Socket<C: From<QueueCommand>> {
    device: DeviceInfo,
    engine: EngineHandle<C>,
    listener: Arc<UnixListener>,
    stop: AtomicBool,
    stream: Mutex<Option<Arc<UnixStream>>>,
    /// Whether a queue is served.
    in_use: Arc<AtomicBool>,
    refusals: Arc<Refusals>,
    phase: Mutex<Phase<C>>,
    ended: Condvar,
    wake: Wake,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<C: From<QueueCommand>> Socket<C> {
    pub(super) fn new(
        device: DeviceInfo,
        engine: EngineHandle<C>,
        listener: UnixListener,
        wake: Wake,
    ) -> Self {
        Self {
            device,
            engine,
            listener: Arc::new(listener),
            stop: AtomicBool::new(false),
            stream: Mutex::new(None),
            in_use: Arc::new(AtomicBool::new(false)),
            refusals: Arc::new(Refusals::default()),
            phase: Mutex::new(Phase::Awaited(None)),
            ended: Condvar::new(),
            wake,
        }
    }

    pub(super) fn device(&self) -> &DeviceInfo {
        &self.device
    }

    pub(super) fn refusals(&self) -> &Refusals {
        &self.refusals
    }

    pub(super) fn is_in_use(&self) -> bool {
        self.in_use.load(Ordering::Relaxed)
    }

    /// The connection to a front end, if there is one.
    pub(super) fn stream(&self) -> Option<Arc<UnixStream>> {
        lock(&self.stream).clone()
    }

    pub(super) fn has_ended(&self) -> bool {
        matches!(*lock(&self.phase), Phase::Ended)
    }

    pub(super) fn wait_until_ended(&self) {
        let not_ended = |phase: &mut Phase<C>| !matches!(phase, Phase::Ended);
        drop(self.ended.wait_while(lock(&self.phase), not_ended));
    }

    /// Ends the connection and the listener, soon.
    pub(super) fn close(&self) {
        self.stop.store(true, Ordering::Release);
        if let Some(stream) = self.stream() {
            let _ = rustix::net::shutdown(&*stream, Shutdown::Both);
        }
        // A thread may wait for a queue to stop, which takes as long as the guest's requests: they
        // are cancelled, and QEMU keeps them in flight. A thread that waits for the last of them
        // waits on.
        let _ = self.engine.send(QueueCommand::Disconnect { vm: self.device.vm, reply: None });
        // Wakes a thread that waits for a connection, also when the socket's name was removed.
        let _ = rustix::net::shutdown(&*self.listener, Shutdown::Both);
        self.wake.wake();
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    fn set_phase(&self, phase: Phase<C>) {
        *lock(&self.phase) = phase;
        self.ended.notify_all();
        self.wake.wake();
    }
}

impl<C: From<QueueCommand> + Send> Socket<C> {
    /// Accepts a connection; `None` where that fails.
    fn accept(&self) -> Option<Session<C>> {
        let accepted = self.listener.accept().and_then(|(stream, _)| Ok((stream.try_clone()?, stream)));
        let Ok((copy, stream)) = accepted else {
            // Out of descriptors, for instance: temporary, and QEMU retries.
            if !self.is_stopped() {
                std::thread::sleep(RETRY);
            }
            return None;
        };
        let copy = Arc::new(copy);
        // Stored before `stop` is read: either this thread sees `stop`, or `close` the connection.
        *lock(&self.stream) = Some(Arc::clone(&copy));
        let (device, engine) = (self.device.clone(), self.engine.clone());
        let connection = Arc::new(Mutex::new(Connection::new(device, engine, Arc::clone(&self.in_use))));
        let handler = BackendReqHandler::from_stream(stream, Arc::clone(&connection));
        Some(Session { stream: copy, connection, handler, has_begun: false })
    }

    /// Handles a message. `None` when the connection ends; a panic ends this connection only.
    fn handle(&self, session: Session<C>) -> Option<Session<C>> {
        let handled = catch_unwind(AssertUnwindSafe(|| session.handle(&self.device.name)));
        let session = handled.unwrap_or_else(|_| {
            crate::log::line(&self.device.name, "a defect ended the connection");
            None
        });
        if session.is_none() {
            *lock(&self.stream) = None;
        }
        session
    }
}

impl<C: From<QueueCommand> + Send> FrontEndSocket for Socket<C> {
    fn thread_name(&self) -> String {
        format!("vm-{}", self.device.name).chars().take(15).collect()
    }

    fn state(&self) -> SocketState {
        let mut phase = lock(&self.phase);
        if matches!(*phase, Phase::Awaited(None)) && self.is_stopped() {
            *phase = Phase::Ended;
            self.ended.notify_all();
        }
        match &*phase {
            Phase::Awaited(Some(_)) if self.is_stopped() => SocketState::Due,
            Phase::Awaited(None) => SocketState::Awaits(Awaited::Connection(Arc::clone(&self.listener))),
            Phase::Awaited(Some(session)) => {
                SocketState::Awaits(Awaited::Message(Arc::clone(&session.stream)))
            }
            Phase::Claimed(_) | Phase::Served => SocketState::Served,
            Phase::Ended => SocketState::Ended,
        }
    }

    fn set_claimed(&self, claimed: bool) {
        let mut phase = lock(&self.phase);
        *phase = match (std::mem::replace(&mut *phase, Phase::Served), claimed) {
            (Phase::Awaited(session), true) => Phase::Claimed(session),
            (Phase::Claimed(session), false) => Phase::Awaited(session),
            (phase, _) => phase,
        };
    }

    fn serve(&self) {
        crate::log::keep_refusals(Arc::clone(&self.refusals));
        // Dropped after the session, which ends its connection.
        let _restores = RestoreAfterPanic(self);
        let mut session = match std::mem::replace(&mut *lock(&self.phase), Phase::Served) {
            Phase::Claimed(session) | Phase::Awaited(session) => session,
            Phase::Served | Phase::Ended => None,
        };
        loop {
            if self.is_stopped() {
                // The connection waits here until nothing of the VM is in flight.
                drop(session);
                *lock(&self.stream) = None;
                return self.set_phase(Phase::Ended);
            }
            let sends = match &session {
                Some(session) => sends_soon(&*session.stream),
                None => sends_soon(&*self.listener),
            };
            if !sends {
                return self.set_phase(Phase::Awaited(session));
            }
            session = match session {
                Some(session) => self.handle(session),
                None => self.accept(),
            };
        }
    }
}

/// After a panic beyond the handling of a message the socket is awaited again.
struct RestoreAfterPanic<'a, C: From<QueueCommand>>(&'a Socket<C>);

impl<C: From<QueueCommand>> Drop for RestoreAfterPanic<'_, C> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            *lock(&self.0.stream) = None;
            self.0.set_phase(Phase::Awaited(None));
        }
    }
}

/// Waits for a message or connection. `false` when none came for [`SILENCE`].
fn sends_soon(fd: &impl AsFd) -> bool {
    loop {
        match poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&SILENCE)) {
            Ok(0) => return false,
            Err(rustix::io::Errno::INTR) => {}
            // An error shows again when the message is read.
            Ok(_) | Err(_) => return true,
        }
    }
}

impl<C: From<QueueCommand> + Send> Session<C> {
    /// Handles a message; `None` when the connection ends.
    fn handle(mut self, name: &str) -> Option<Self> {
        match self.begin().and_then(|()| self.handle_early()) {
            Ok(true) => return Some(self),
            Ok(false) => {}
            Err(e) => {
                crate::log::line(name, format_args!("connection ends: {e}"));
                return None;
            }
        }
        match self.handler.handle_request() {
            // A refused message is reported to QEMU if it asked for a reply; the connection
            // continues.
            Ok(()) | Err(Error::ReqHandlerError(_) | Error::InvalidParam | Error::InvalidOperation(_)) => {
                Some(self)
            }
            Err(Error::Disconnected) => None,
            Err(e) => {
                crate::log::line(name, format_args!("connection ends: {e}"));
                None
            }
        }
    }

    /// Before the first message: negotiates in the place of a front end that does not.
    ///
    /// QEMU before 9.1 does so whose connection was lost before its guest used the disk: while the
    /// guest is paused, in firmware, or arrives by a migration. It keeps what it had negotiated.
    fn begin(&mut self) -> io::Result<()> {
        if std::mem::replace(&mut self.has_begun, true) || !early::is_negotiated(&self.stream)? {
            return Ok(());
        }
        let offered = self.connection.get_protocol_features().map_err(io::Error::other)?;
        let (ours, theirs) = UnixStream::pair()?;
        // SAFETY: the handler owns this descriptor, and outlives `own`, which does not close it.
        let mut own = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(self.handler.as_raw_fd()) });
        rustix::io::dup3(&theirs, &mut own, DupFlags::CLOEXEC)?;
        let all = early::negotiation(offered.bits());
        let negotiated = all.iter().try_for_each(|message| {
            (&ours).write_all(message)?;
            self.handler.handle_request().map_err(io::Error::other)
        });
        rustix::io::dup3(&*self.stream, &mut own, DupFlags::CLOEXEC)?;
        negotiated
    }

    /// Handles a message that the crate does not handle; `false` for any other.
    fn handle_early(&self) -> io::Result<bool> {
        let Ok(mut connection) = self.connection.lock() else { return Ok(false) };
        let Some(message) = early::take(&self.stream, !connection.has_features())? else { return Ok(false) };
        let is_done = match message.what {
            Early::Enable { index, enable } => connection.set_vring_enable(index, enable).is_ok(),
            Early::Channel(fd) => connection.set_channel(fd),
            Early::Announce(mac) => connection.announce(mac).is_ok(),
            Early::LogSignal => connection.refuse_log_signal(),
        };
        message.reply.send(&self.stream, is_done)?;
        Ok(true)
    }
}
