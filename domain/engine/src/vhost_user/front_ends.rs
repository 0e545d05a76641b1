//! One thread that waits for the front ends of all disks and ports.
//!
//! The thread reads nothing that a front end sends: a message may never end, and its answer may
//! wait for a guest's requests. A front end that connects or sends gets a thread of its own, which
//! ends when the front end is silent. So threads are as many as front ends that are sending.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use super::FirstUses;
use crate::confine::{Confine, Role, StartThread};

/// Pause after a thread could not be started.
const RETRY: Duration = Duration::from_millis(50);

/// Descriptor on which a front end is awaited.
pub(super) enum Awaited {
    Connection(Arc<UnixListener>),
    Message(Arc<UnixStream>),
}

impl AsFd for Awaited {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Connection(listener) => listener.as_fd(),
            Self::Message(stream) => stream.as_fd(),
        }
    }
}

/// State of a socket, from the view of the waiting thread.
pub(super) enum SocketState {
    /// The front end is awaited on this descriptor.
    Awaits(Awaited),
    /// A thread is due at once: the socket is being closed.
    Due,
    /// A thread serves it.
    Served,
    /// Nothing will come any more.
    Ended,
}

/// A socket that is served by a thread when its front end sends.
pub(super) trait FrontEndSocket: Send + Sync {
    fn thread_name(&self) -> String;

    /// State of the socket, from which the waiting thread tells what to do.
    fn state(&self) -> SocketState;

    /// Reserves the socket for a thread, or gives it back when none could be started.
    fn set_claimed(&self, claimed: bool);

    /// Serves until the front end is silent.
    fn serve(&self);
}

/// Wakes the waiting thread.
#[derive(Clone, Debug)]
pub(super) struct Wake(Arc<OwnedFd>);

impl Wake {
    /// Makes the thread look at all sockets again.
    pub(super) fn wake(&self) {
        // A full counter wakes as well.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }
}

/// The waiting thread; it ends when this is dropped, after all sockets have ended.
#[derive(Debug)]
pub struct FrontEnds {
    added: Option<Sender<Arc<dyn FrontEndSocket>>>,
    wake: Wake,
    thread: Option<JoinHandle<()>>,
    first_uses: Arc<FirstUses>,
}

impl FrontEnds {
    /// Starts the thread, which starts others by `threads`.
    pub fn start(threads: Box<dyn StartThread + Send>, confine: &Confine) -> io::Result<Self> {
        let wake = Wake(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?));
        let (added, next) = channel();
        let waiter = Waiter { added: next, all: Vec::new(), wake: wake.clone(), threads };
        let thread = confine.spawn("iod-front-ends", Role::VhostUser, move || waiter.run_or_abort())?;
        Ok(Self { added: Some(added), wake, thread: Some(thread), first_uses: Arc::default() })
    }

    /// Devices that front ends have begun to use.
    pub(crate) fn first_uses(&self) -> &Arc<FirstUses> {
        &self.first_uses
    }

    pub(super) fn waker(&self) -> Wake {
        self.wake.clone()
    }

    /// Awaits the front end of another socket.
    pub(super) fn add(&self, socket: Arc<dyn FrontEndSocket>) -> io::Result<()> {
        let ended = || io::Error::other("the thread that waits for front ends has ended");
        self.added.as_ref().ok_or_else(ended)?.send(socket).map_err(|_| ended())?;
        self.wake.wake();
        Ok(())
    }
}

impl Drop for FrontEnds {
    fn drop(&mut self) {
        self.added = None;
        self.wake.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Waiter {
    added: Receiver<Arc<dyn FrontEndSocket>>,
    all: Vec<Arc<dyn FrontEndSocket>>,
    wake: Wake,
    threads: Box<dyn StartThread + Send>,
}

impl Waiter {
    /// A panic here is a defect after which no front end would be served; QEMU connects to the
    /// process that is started next.
    fn run_or_abort(mut self) {
        if catch_unwind(AssertUnwindSafe(|| self.run())).is_err() {
            crate::log::write_line("a defect ended the thread that waits for front ends");
            std::process::abort();
        }
    }

    fn run(&mut self) {
        loop {
            let is_last = loop {
                match self.added.try_recv() {
                    Ok(socket) => self.all.push(socket),
                    Err(TryRecvError::Empty) => break false,
                    Err(TryRecvError::Disconnected) => break true,
                }
            };
            let (mut due, mut awaited) = (Vec::new(), Vec::new());
            self.all.retain(|socket| {
                match socket.state() {
                    SocketState::Awaits(on) => awaited.push((Arc::clone(socket), on)),
                    SocketState::Due => due.push(Arc::clone(socket)),
                    SocketState::Served => {}
                    SocketState::Ended => return false,
                }
                true
            });
            if is_last && self.all.is_empty() {
                return;
            }
            if due.is_empty() {
                due = self.wait(&awaited);
            }
            let failed = due.into_iter().filter(|socket| !self.start(socket)).count();
            if failed > 0 {
                std::thread::sleep(RETRY);
            }
        }
    }

    /// Waits; returns sockets whose front ends send, or have gone.
    fn wait(&self, awaited: &[(Arc<dyn FrontEndSocket>, Awaited)]) -> Vec<Arc<dyn FrontEndSocket>> {
        let mut polled: Vec<PollFd<'_>> =
            awaited.iter().map(|(_, on)| PollFd::new(on, PollFlags::IN)).collect();
        polled.push(PollFd::new(&self.wake.0, PollFlags::IN));
        if let Err(e) = poll(&mut polled, None) {
            if e != rustix::io::Errno::INTR {
                crate::log::write_line(format_args!("front ends cannot be waited for: {e}"));
                std::thread::sleep(RETRY);
            }
            return Vec::new();
        }
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.wake.0, &mut count);
        let ready = awaited.iter().zip(&polled).filter(|(_, polled)| !polled.revents().is_empty());
        ready.map(|((socket, _), _)| Arc::clone(socket)).collect()
    }

    /// Starts a thread for a socket. `false` when that is not possible now.
    fn start(&self, socket: &Arc<dyn FrontEndSocket>) -> bool {
        socket.set_claimed(true);
        let served = Arc::clone(socket);
        let name = socket.thread_name();
        let Err(e) = self.threads.start_thread(&name, Role::VhostUser, Box::new(move || served.serve()))
        else {
            return true;
        };
        socket.set_claimed(false);
        crate::log::line(&name, format_args!("no thread for its front end: {e}"));
        false
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Instant;

    use super::*;
    use crate::confine::Body;

    /// Starts threads, but for the first ones.
    struct FailsAtFirst(AtomicU32);

    impl StartThread for FailsAtFirst {
        fn start_thread(&self, name: &str, role: Role, body: Body) -> io::Result<JoinHandle<()>> {
            if self.0.load(Ordering::Relaxed) > 0 {
                self.0.fetch_sub(1, Ordering::Relaxed);
                return Err(io::ErrorKind::WouldBlock.into());
            }
            Confine::none().start_thread(name, role, body)
        }
    }

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Phase {
        Awaited,
        Claimed,
        Ended,
    }

    /// A socket that serves one connection.
    struct Once {
        listener: Arc<UnixListener>,
        phase: Mutex<Phase>,
    }

    impl FrontEndSocket for Once {
        fn thread_name(&self) -> String {
            "once".to_owned()
        }

        fn state(&self) -> SocketState {
            match *self.phase.lock().unwrap() {
                Phase::Awaited => SocketState::Awaits(Awaited::Connection(Arc::clone(&self.listener))),
                Phase::Claimed => SocketState::Served,
                Phase::Ended => SocketState::Ended,
            }
        }

        fn set_claimed(&self, claimed: bool) {
            *self.phase.lock().unwrap() = if claimed { Phase::Claimed } else { Phase::Awaited };
        }

        fn serve(&self) {
            drop(self.listener.accept().unwrap());
            *self.phase.lock().unwrap() = Phase::Ended;
        }
    }

    #[test]
    fn threads_that_cannot_be_started_are_tried_again() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let threads = Box::new(FailsAtFirst(AtomicU32::new(3)));
        let front_ends = FrontEnds::start(threads, &Confine::none()).unwrap();
        let sockets = ["a", "b"].map(|name| {
            let listener = Arc::new(UnixListener::bind(dir.path().join(name)).unwrap());
            Arc::new(Once { listener, phase: Mutex::new(Phase::Awaited) })
        });
        sockets.iter().for_each(|socket| front_ends.add(Arc::clone(socket) as _).unwrap());
        let clients = ["a", "b"].map(|name| UnixStream::connect(dir.path().join(name)).unwrap());
        let begin = Instant::now();
        while sockets.iter().any(|socket| *socket.phase.lock().unwrap() != Phase::Ended) {
            assert!(begin.elapsed() < rtvirtio_testkit::HANG, "a connection is not served");
            std::thread::sleep(Duration::from_millis(5));
        }
        drop(clients);
        // Ends when all sockets have.
        drop(front_ends);
    }
}
