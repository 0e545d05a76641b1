//! A listener with a limited number of connections. One that waits costs the service one
//! descriptor: clients never exhaust those that contracts need.
//!
//! A connection that sends no request is closed when another needs its place, the longest idle
//! first, and one whose request head is not complete in time is closed. Event streams are closed
//! last; a page opens its stream again by itself.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Sleep;

/// Timeout of the head of a request, after which the connection is closed.
const HEAD_TIME: Duration = Duration::from_secs(5);
/// Least time for which a connection keeps its place: the request of one that was just opened is on
/// its way.
const SETTLING: Duration = Duration::from_millis(100);
/// An answer of the service begins within this time. Bytes that only look like the end of a head
/// get none, and keep no place.
const ANSWER_TIME: Duration = Duration::from_secs(10);

/// A listener with a limited number of connections.
pub(super) struct Places<L> {
    listener: L,
    free: Arc<Semaphore>,
    open: Vec<Weak<Mutex<Activity>>>,
    head_time: Duration,
}

impl<L> Places<L> {
    /// Allows `most` connections at a time.
    pub fn new(listener: L, most: usize) -> Self {
        Self { listener, free: Arc::new(Semaphore::new(most)), open: Vec::new(), head_time: HEAD_TIME }
    }

    /// A place; where none is free another connection is closed for it.
    async fn place(&mut self) -> Option<OwnedSemaphorePermit> {
        loop {
            if let Ok(place) = Arc::clone(&self.free).try_acquire_owned() {
                return Some(place);
            }
            self.open.retain(|of| of.strong_count() > 0);
            let now = Instant::now();
            let all = self.open.iter().filter_map(Weak::upgrade);
            let idle = all.filter_map(|of| {
                let key = lock(&of).gives_way(now)?;
                Some((key, of))
            });
            let idle = idle.min_by_key(|(key, _)| *key);
            if let Some((_, of)) = idle {
                lock(&of).close();
            }
            // The semaphore is never closed: looks again where no connection gave way in time.
            let place = Arc::clone(&self.free).acquire_owned();
            if let Ok(place) = tokio::time::timeout(SETTLING, place).await {
                return place.ok();
            }
        }
    }
}

impl<L: Listener> Listener for Places<L> {
    type Io = Placed<L::Io>;
    type Addr = L::Addr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        let (io, address) = self.listener.accept().await;
        let place = self.place().await;
        let activity = Arc::new(Mutex::new(Activity::new(Instant::now())));
        self.open.retain(|of| of.strong_count() > 0);
        self.open.push(Arc::downgrade(&activity));
        let deadline = Box::pin(tokio::time::sleep(self.head_time));
        (Placed { io, activity, deadline, head_time: self.head_time, _place: place }, address)
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}

/// Progress of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The head of a request is not complete.
    Head,
    /// The connection waits for another request.
    Idle,
    /// A request is being answered.
    Answer,
    /// Events are sent as they come.
    Stream,
}

/// State of a connection, derived from the bytes that pass.
#[derive(Debug)]
struct Activity {
    phase: Phase,
    /// Start of the phase; of `Idle` the last write.
    since: Instant,
    /// Start of the time in which writes block; `None` while they do not.
    blocked: Option<Instant>,
    /// Length of the prefix of `\r\n\r\n` that was read last.
    end: usize,
    /// Whether the present head has a byte that is no empty line.
    has_begun: bool,
    is_closed: bool,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

impl Activity {
    fn new(now: Instant) -> Self {
        Self {
            phase: Phase::Head,
            since: now,
            blocked: None,
            end: 0,
            has_begun: false,
            is_closed: false,
            reader: None,
            writer: None,
        }
    }

    fn begin(&mut self, phase: Phase) {
        if self.phase != phase {
            (self.phase, self.since) = (phase, Instant::now());
        }
    }

    fn on_read(&mut self, bytes: &[u8]) {
        for byte in bytes {
            // Empty lines before a request are none (RFC 9112, section 2.2).
            if !self.has_begun && matches!(byte, b'\r' | b'\n') {
                continue;
            }
            self.has_begun = true;
            self.end = match (*byte, self.end) {
                (b'\r', 0 | 2) | (b'\n', 1 | 3) => self.end + 1,
                (b'\r', _) => 1,
                _ => 0,
            };
            if self.end == 4 {
                (self.end, self.has_begun) = (0, false);
                if self.phase != Phase::Stream {
                    self.begin(Phase::Answer);
                }
            } else if self.phase == Phase::Idle {
                self.begin(Phase::Head);
            }
        }
    }

    fn on_write(&mut self, head: &[u8]) {
        self.blocked = None;
        if self.phase == Phase::Answer {
            const STREAM: &[u8] = b"text/event-stream";
            let is_stream = head.windows(STREAM.len()).any(|of| of == STREAM);
            self.begin(if is_stream { Phase::Stream } else { Phase::Idle });
        } else if self.phase == Phase::Idle {
            self.since = Instant::now();
        }
    }

    /// Closing order, least first: idle or blocked ones, then streams; `None` keeps its place.
    fn gives_way(&self, now: Instant) -> Option<(bool, Instant)> {
        let (is_stream, since) = match (self.phase, self.blocked) {
            _ if self.is_closed => return None,
            (_, Some(since)) => (false, since),
            (Phase::Head | Phase::Idle, None) => (false, self.since),
            (Phase::Stream, None) => (true, self.since),
            (Phase::Answer, None) if now.saturating_duration_since(self.since) < ANSWER_TIME => return None,
            (Phase::Answer, None) => (false, self.since),
        };
        (now.saturating_duration_since(since) >= SETTLING).then_some((is_stream, since))
    }

    fn close(&mut self) {
        self.is_closed = true;
        for waker in [self.reader.take(), self.writer.take()].into_iter().flatten() {
            waker.wake();
        }
    }
}

/// Ignores poisoning: no code panics while it holds the lock.
fn lock(of: &Mutex<Activity>) -> MutexGuard<'_, Activity> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A connection, with its place until it is closed.
pub(super) struct Placed<I> {
    io: I,
    activity: Arc<Mutex<Activity>>,
    /// Timer for the end of a request's head.
    deadline: Pin<Box<Sleep>>,
    head_time: Duration,
    _place: Option<OwnedSemaphorePermit>,
}

fn gave_way() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionAborted, "closed in favour of another connection")
}

impl<I> Placed<I> {
    /// Records the result of a write of data that begin with `head`.
    fn written(&self, head: &[u8], result: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        let mut activity = lock(&self.activity);
        match &result {
            Poll::Ready(_) => activity.on_write(head),
            Poll::Pending => activity.blocked = activity.blocked.or_else(|| Some(Instant::now())),
        }
        result
    }

    /// Whether the connection has to give way; if not, the writer is woken when it has to.
    fn is_closed(&self, writer: Option<&Context<'_>>) -> bool {
        let mut activity = lock(&self.activity);
        if let Some(context) = writer {
            activity.writer = Some(context.waker().clone());
        }
        activity.is_closed
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for Placed<I> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let filled = into.filled().len();
        let result = Pin::new(&mut this.io).poll_read(context, into);
        let mut activity = lock(&this.activity);
        activity.reader = Some(context.waker().clone());
        if activity.is_closed {
            return Poll::Ready(Err(gave_way()));
        }
        activity.on_read(&into.filled()[filled..]);
        if activity.phase == Phase::Head {
            let until = tokio::time::Instant::from_std(activity.since + this.head_time);
            if this.deadline.deadline() != until {
                this.deadline.as_mut().reset(until);
            }
            if this.deadline.as_mut().poll(context).is_ready() {
                let why = "the header of a request did not arrive in time";
                return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, why)));
            }
        }
        result
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for Placed<I> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, from: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if this.is_closed(Some(context)) {
            return Poll::Ready(Err(gave_way()));
        }
        let result = Pin::new(&mut this.io).poll_write(context, from);
        this.written(from, result)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        from: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if this.is_closed(Some(context)) {
            return Poll::Ready(Err(gave_way()));
        }
        let result = Pin::new(&mut this.io).poll_write_vectored(context, from);
        this.written(from.first().map_or(&[][..], |head| &head[..]), result)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests;
