//! io_uring and its completion tokens.

mod buffers;
mod setup;

use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{EnterFlags, IoUring, cqueue, opcode, squeue};
use rtvirtio_sched::VmId;
use rtvirtio_units::Nanos;

pub use self::buffers::BufferRow;
use self::buffers::BufferTable;
use self::setup::{build, reason};
use super::kick::KickFd;
use super::queue_id::QueueToken;
use crate::memory::Pinner;

/// The operation that a completion belongs to, as the 64-bit `user_data` of its entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompletionToken {
    /// The eventfd of commands.
    Doorbell,
    /// The kick descriptor of a queue.
    Kick(QueueToken),
    /// A write to the call descriptor of a queue.
    Call(QueueToken),
    /// The piece in this slot.
    Piece(u32),
    /// The poll of a network port's uplink.
    Uplink(VmId),
    /// An operation whose result does not matter.
    Ignored,
}

impl CompletionToken {
    pub fn to_user_data(self) -> u64 {
        match self {
            Self::Doorbell => 1 << 56,
            Self::Kick(token) => 2 << 56 | token.to_bits(),
            Self::Call(token) => 3 << 56 | token.to_bits(),
            Self::Piece(i) => 4 << 56 | u64::from(i),
            Self::Uplink(port) => 5 << 56 | u64::from(port.0),
            Self::Ignored => 0,
        }
    }

    pub fn from_user_data(v: u64) -> Self {
        match v >> 56 {
            1 => Self::Doorbell,
            2 => Self::Kick(QueueToken::from_bits(v)),
            3 => Self::Call(QueueToken::from_bits(v)),
            4 => Self::Piece(v as u32),
            5 => Self::Uplink(VmId(v as u16)),
            _ => Self::Ignored,
        }
    }
}

/// A completion queue entry.
#[derive(Clone, Copy, Debug)]
pub struct Completion {
    pub token: CompletionToken,
    pub result: i32,
    /// Multishot: more completions follow.
    pub more: bool,
}

/// Time for which the kernel may refuse submissions before the ring counts as failed.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause between two tries.
const BUSY_RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// io_uring, reduced to what the engine uses.
pub struct Uring {
    ring: IoUring,
    /// Whether the kernel refuses all operations but those of the engine.
    pub restricted: bool,
    /// Completions taken from the kernel to make room, in order, until [`Uring::next_completion`]
    /// returns them.
    reaped: VecDeque<cqueue::Entry>,
    /// Number of busy results so far.
    busy: u64,
    /// Time since which the kernel accepts nothing.
    busy_since: Option<Instant>,
    /// Number of pieces that were pushed and not yet returned as completed.
    on_disk: usize,
    buffers: BufferTable,
}

/// The value written to call descriptors.
static ONE: u64 = 1;

/// Size of the buffer into which bytes of stream kicks are read and discarded.
const DISCARDED: usize = 256;

/// Memory that bytes of kicks are read into.
struct Discard([libc::iovec; 1]);

// SAFETY: only the kernel writes to the memory, and nothing reads it.
unsafe impl Sync for Discard {}

static DISCARD: Discard =
    Discard([libc::iovec { iov_base: (&raw mut DISCARDED_BYTES).cast(), iov_len: DISCARDED }]);

static mut DISCARDED_BYTES: [u8; DISCARDED] = [0; DISCARDED];

impl Uring {
    /// Makes a ring with room for so many operations and registered buffers; for no buffers where
    /// the kernel has no such ones: before Linux 6.13.
    pub fn new(entries: u32, buffers: u32) -> io::Result<Self> {
        let entries = entries.clamp(64, 4_096).next_power_of_two();
        // From the newest features to the oldest: each needs a newer kernel than the next.
        for (deferred, restricted) in [(true, true), (false, true), (true, false)] {
            if let Ok(built) = build(entries, buffers, deferred, restricted) {
                return Ok(Self::from_ring(built, restricted));
            }
        }
        Ok(Self::from_ring(build(entries, buffers, false, false).map_err(reason)?, false))
    }

    fn from_ring((ring, buffers): (IoUring, u32), restricted: bool) -> Self {
        // The kernel holds no more operations than it has room for completions.
        let reaped = VecDeque::with_capacity(ring.params().cq_entries() as usize);
        let buffers = BufferTable::new(buffers);
        Self { ring, restricted, reaped, busy: 0, busy_since: None, on_disk: 0, buffers }
    }

    /// Takes over what is pinned.
    pub fn take_buffers(&mut self, pinner: &Pinner) -> io::Result<BufferRow> {
        self.buffers.take_over(&self.ring, pinner)
    }

    /// Gives up what was taken over.
    pub fn release_buffers(&mut self, row: &BufferRow) -> io::Result<()> {
        self.buffers.release(&self.ring, row)
    }

    /// Queues an entry; submits first when the queue is full.
    pub fn push(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        let token = CompletionToken::from_user_data(entry.get_user_data());
        loop {
            // SAFETY: what an entry points to outlives its completion: iovecs and bounce buffers
            // are in the table of pieces, descriptors in that of files, ONE is static.
            match unsafe { self.ring.submission().push(entry) } {
                Ok(()) => {
                    self.on_disk += usize::from(matches!(token, CompletionToken::Piece(_)));
                    return Ok(());
                }
                Err(_) => {
                    let done = self.ring.submit().map(|_| ());
                    self.handle_enter_result(done)?;
                }
            }
        }
    }

    /// Polls a descriptor for reading, multishot.
    pub fn arm_poll(&mut self, fd: RawFd, token: CompletionToken) -> io::Result<()> {
        let entry = opcode::PollAdd::new(Fd(fd), libc::POLLIN as u32).multi(true).build();
        self.push(&entry.user_data(token.to_user_data()))
    }

    /// Polls a descriptor for reading, once.
    pub fn arm_poll_once(&mut self, fd: RawFd, token: CompletionToken) -> io::Result<()> {
        let entry = opcode::PollAdd::new(Fd(fd), libc::POLLIN as u32).build();
        self.push(&entry.user_data(token.to_user_data()))
    }

    /// Waits for kicks: by a multishot poll, or by one read of a socket or pipe, which would be
    /// full some day.
    pub fn arm_kick(&mut self, kick: KickFd, token: CompletionToken) -> io::Result<()> {
        if !kick.is_stream {
            return self.arm_poll(kick.fd, token);
        }
        let entry = opcode::Readv::new(Fd(kick.fd), DISCARD.0.as_ptr(), 1).offset(u64::MAX).build();
        self.push(&entry.user_data(token.to_user_data()))
    }

    /// Cancels a poll or a write, which ends with a completion of its own.
    ///
    /// `IORING_OP_POLL_REMOVE` is not enough for polls: it leaves one armed whose descriptor has
    /// just become readable.
    pub fn cancel(&mut self, token: CompletionToken) -> io::Result<()> {
        let entry = opcode::AsyncCancel::new(token.to_user_data()).build();
        self.push(&entry.user_data(CompletionToken::Ignored.to_user_data()))
    }

    /// Adds one to an eventfd. When it is full, the kernel waits, not the engine.
    pub fn signal_eventfd(&mut self, fd: RawFd, token: CompletionToken) -> io::Result<()> {
        let entry = opcode::Write::new(Fd(fd), std::ptr::from_ref(&ONE).cast(), 8).build();
        self.push(&entry.user_data(token.to_user_data()))
    }

    /// Submits the queue, and waits for a completion if `wait`: until `until` at most.
    pub fn enter(&mut self, wait: bool, now: Nanos, until: Nanos) -> io::Result<()> {
        let done = if !wait || !self.reaped.is_empty() {
            // With deferred task work the kernel only reaps completions on request.
            self.ring.submitter().submit_and_wait(0)
        } else {
            let rest = until.0.saturating_sub(now.0);
            let time = Timespec::new().sec(rest / 1_000_000_000).nsec((rest % 1_000_000_000) as u32);
            self.wait((until.0 != u64::MAX).then_some(&time))
        };
        self.handle_enter_result(done.map(|_| ()))
    }

    /// Submits the queue and sleeps until a completion exists, or for `time`.
    ///
    /// Waiting for guests is no waiting for a disk. Linux before 6.15 counts it as that: its
    /// `/proc/pressure/io` is near 100 % while an engine is idle.
    fn wait(&mut self, time: Option<&Timespec>) -> io::Result<usize> {
        let none = SubmitArgs::new();
        let args = match time {
            Some(time) => none.timespec(time),
            None => none,
        };
        if self.waits_for_guests() {
            let queued = self.ring.submission().len() as u32;
            let flags = EnterFlags::EXT_ARG | EnterFlags::GETEVENTS | EnterFlags::NO_IOWAIT;
            // SAFETY: EXT_ARG takes a structure of the type of `args`, which outlives the call.
            return unsafe { self.ring.submitter().enter(queued, 1, flags.bits(), Some(&args)) };
        }
        match time {
            Some(_) => self.ring.submitter().submit_with_args(1, &args),
            None => self.ring.submit_and_wait(1),
        }
    }

    /// Whether nothing is with the disk, and the kernel takes note of that.
    fn waits_for_guests(&self) -> bool {
        self.on_disk == 0 && self.ring.params().is_feature_no_iowait()
    }

    /// Timeouts and signals are no errors. A busy kernel (`EBUSY`: completions wait; `EAGAIN`: no
    /// memory for a request) is retried after its completions are taken; one that stays busy has
    /// failed.
    fn handle_enter_result(&mut self, done: io::Result<()>) -> io::Result<()> {
        let Err(e) = done else {
            self.busy_since = None;
            return Ok(());
        };
        match e.raw_os_error() {
            Some(libc::ETIME | libc::EINTR) => {
                self.busy_since = None;
                Ok(())
            }
            Some(libc::EBUSY | libc::EAGAIN) => {
                let begin = *self.busy_since.get_or_insert_with(Instant::now);
                if begin.elapsed() > BUSY_TIMEOUT {
                    return Err(e);
                }
                self.busy += 1;
                if self.busy.is_power_of_two() {
                    crate::log::write_line(format_args!(
                        "io_uring is busy ({e}), {} times so far",
                        self.busy
                    ));
                }
                let before = self.reaped.len();
                // No more than there is room for: the rest stays with the kernel.
                let room = self.reaped.capacity() - before;
                self.reaped.extend(self.ring.completion().take(room));
                if self.reaped.len() == before {
                    std::thread::sleep(BUSY_RETRY_INTERVAL);
                }
                Ok(())
            }
            _ => Err(e),
        }
    }

    /// Takes the next completion, first of those that were reaped.
    pub fn next_completion(&mut self) -> Option<Completion> {
        let entry = self.reaped.pop_front().or_else(|| self.ring.completion().next())?;
        let token = CompletionToken::from_user_data(entry.user_data());
        self.on_disk -= usize::from(matches!(token, CompletionToken::Piece(_)));
        Some(Completion { token, result: entry.result(), more: cqueue::more(entry.flags()) })
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::engine::QueueId;

    /// The kernel refuses all other operations, and lifting the restrictions.
    #[test]
    fn other_operations_are_refused() {
        let mut uring = Uring::new(64, 0).unwrap();
        if !uring.restricted {
            let why = "this kernel cannot restrict io_uring";
            return rtvirtio_testkit::skip("other_operations_are_refused", why);
        }
        let path = c"/etc/passwd";
        let open = opcode::OpenAt::new(Fd(libc::AT_FDCWD), path.as_ptr()).build();
        let socket = opcode::Socket::new(libc::AF_INET, libc::SOCK_STREAM, 0).build();
        for entry in [open, socket] {
            uring.push(&entry.user_data(CompletionToken::Piece(1).to_user_data())).unwrap();
            uring.enter(true, Nanos(0), Nanos(u64::MAX)).unwrap();
            assert_eq!(uring.next_completion().unwrap().result, -libc::EACCES);
        }
        let relaxed = uring.ring.submitter().register_restrictions(&mut []);
        assert!(relaxed.is_err());
        assert!(uring.ring.submitter().register_files(&[0]).is_err());
        // The engine's operations are accepted.
        uring
            .push(&opcode::Fsync::new(Fd(-1)).build().user_data(CompletionToken::Piece(2).to_user_data()))
            .unwrap();
        uring.enter(true, Nanos(0), Nanos(u64::MAX)).unwrap();
        assert_eq!(uring.next_completion().unwrap().result, -libc::EBADF);
    }

    fn wait_for_completion(uring: &mut Uring, token: CompletionToken) -> i32 {
        loop {
            while let Some(answer) = uring.next_completion() {
                if answer.token == token && !answer.more {
                    return answer.result;
                }
            }
            uring.enter(true, Nanos(0), Nanos(1_000_000_000)).unwrap();
        }
    }

    /// Cancelling ends a write to a full eventfd, and a poll that was just woken.
    #[test]
    fn cancelled_operations_complete() {
        let flags = rustix::event::EventfdFlags::CLOEXEC;
        let full = rustix::event::eventfd(0, flags).unwrap();
        rustix::io::write(&full, &0xffff_ffff_ffff_fffe_u64.to_ne_bytes()).unwrap();
        let mut uring = Uring::new(64, 0).unwrap();
        let call = CompletionToken::Call(QueueToken::new(VmId(0), QueueId(0), 1));
        uring.signal_eventfd(full.as_raw_fd(), call).unwrap();
        uring.enter(false, Nanos(0), Nanos(0)).unwrap();
        uring.cancel(call).unwrap();
        assert!(wait_for_completion(&mut uring, call) < 0);
        let kick = rustix::event::eventfd(0, flags).unwrap();
        let token = CompletionToken::Kick(QueueToken::new(VmId(0), QueueId(0), 1));
        for _ in 0..1_000 {
            uring.arm_poll(kick.as_raw_fd(), token).unwrap();
            uring.enter(false, Nanos(0), Nanos(0)).unwrap();
            rustix::io::write(&kick, &1u64.to_ne_bytes()).unwrap();
            uring.cancel(token).unwrap();
            wait_for_completion(&mut uring, token);
        }
    }

    /// The kernel counts a wait as one for I/O only while a piece is under way, where it can tell.
    #[test]
    fn an_idle_wait_is_no_wait_for_io() {
        let mut uring = Uring::new(64, 0).unwrap();
        if !uring.ring.params().is_feature_no_iowait() {
            let why = "this kernel counts each wait in io_uring as one for I/O (Linux 6.15 does not)";
            return rtvirtio_testkit::skip("an_idle_wait_is_no_wait_for_io", why);
        }
        let (from, to) = rustix::pipe::pipe().unwrap();
        let mut byte = [0_u8];
        let vector = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
        let read = opcode::Readv::new(Fd(from.as_raw_fd()), &raw const vector, 1).build();
        let piece = CompletionToken::Piece(3);
        uring.arm_poll_once(from.as_raw_fd(), CompletionToken::Doorbell).unwrap();
        uring.enter(true, Nanos(0), Nanos(1_000_000)).unwrap();
        assert!(uring.waits_for_guests());
        uring.push(&read.clone().user_data(piece.to_user_data())).unwrap();
        assert!(!uring.waits_for_guests());
        rustix::io::write(&to, b"x").unwrap();
        assert_eq!(wait_for_completion(&mut uring, piece), 1);
        assert!(uring.waits_for_guests());
        assert_eq!(byte, *b"x");
        // A full queue of completions that were taken early counts the same.
        uring.push(&read.user_data(piece.to_user_data())).unwrap();
        uring.enter(false, Nanos(0), Nanos(0)).unwrap();
        rustix::io::write(&to, b"y").unwrap();
        uring.enter(true, Nanos(0), Nanos(u64::MAX)).unwrap();
        uring.handle_enter_result(Err(io::Error::from_raw_os_error(libc::EBUSY))).unwrap();
        assert!(!uring.waits_for_guests());
        assert_eq!(wait_for_completion(&mut uring, piece), 1);
        assert!(uring.waits_for_guests());
    }

    /// A kernel that stays busy is a failure after some time; completions are not lost meanwhile.
    #[test]
    fn a_busy_kernel_is_retried() {
        let mut uring = Uring::new(64, 0).unwrap();
        let fsync = opcode::Fsync::new(Fd(-1)).build();
        uring.push(&fsync.user_data(CompletionToken::Piece(7).to_user_data())).unwrap();
        uring.enter(true, Nanos(0), Nanos(u64::MAX)).unwrap();
        let busy = || Err(io::Error::from_raw_os_error(libc::EBUSY));
        uring.handle_enter_result(busy()).unwrap();
        uring.handle_enter_result(busy()).unwrap();
        assert_eq!((uring.busy, uring.reaped.len()), (2, 1));
        assert_eq!(uring.next_completion().unwrap().token, CompletionToken::Piece(7));
        uring.busy_since = Instant::now().checked_sub(BUSY_TIMEOUT * 2);
        assert!(uring.handle_enter_result(busy()).is_err());
        assert!(uring.handle_enter_result(Err(io::Error::from_raw_os_error(libc::EBADF))).is_err());
    }

    #[test]
    fn tokens_round_trip() {
        for token in [
            CompletionToken::Doorbell,
            CompletionToken::Kick(QueueToken::new(VmId(7), QueueId(3), 65_535)),
            CompletionToken::Call(QueueToken::new(VmId(65_535), QueueId(0), 1)),
            CompletionToken::Piece(u32::MAX),
            CompletionToken::Uplink(VmId(u16::MAX)),
            CompletionToken::Ignored,
        ] {
            assert_eq!(CompletionToken::from_user_data(token.to_user_data()), token);
        }
    }
}
