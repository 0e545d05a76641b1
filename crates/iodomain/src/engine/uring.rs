//! The ring, and what its answers mean.

use std::io;
use std::os::fd::RawFd;

use io_uring::register::Restriction;
use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue};
use rtvirtio_units::Nanos;

/// What an answer of the kernel is about; packed into the 64 bits that go with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum About {
    /// The command doorbell.
    Doorbell,
    /// A queue was kicked: VM, queue, and the low bits of its generation.
    Kick(u16, u16, u16),
    /// A call was written.
    Call(u16, u16, u16),
    /// A piece is back.
    Piece(u32),
    /// Nothing to do.
    Nothing,
}

impl About {
    pub fn pack(self) -> u64 {
        let queue = |kind: u64, vm: u16, q: u16, generation: u16| {
            kind << 56 | u64::from(vm) << 32 | u64::from(q) << 16 | u64::from(generation)
        };
        match self {
            Self::Doorbell => 1 << 56,
            Self::Kick(vm, q, g) => queue(2, vm, q, g),
            Self::Call(vm, q, g) => queue(3, vm, q, g),
            Self::Piece(i) => 4 << 56 | u64::from(i),
            Self::Nothing => 0,
        }
    }

    pub fn unpack(v: u64) -> Self {
        let (vm, q, g) = ((v >> 32) as u16, (v >> 16) as u16, v as u16);
        match v >> 56 {
            1 => Self::Doorbell,
            2 => Self::Kick(vm, q, g),
            3 => Self::Call(vm, q, g),
            4 => Self::Piece(v as u32),
            _ => Self::Nothing,
        }
    }
}

/// One answer.
#[derive(Clone, Copy, Debug)]
pub struct Answer {
    pub about: About,
    pub result: i32,
    /// The kernel will answer again by itself.
    pub more: bool,
}

/// All that the engine ever asks of the ring. What goes through a ring passes no seccomp filter, so the kernel is told here (`IORING_REGISTER_RESTRICTIONS`, Linux 5.10): nothing else,
/// no flags, no registering.
const OPCODES: [u8; 7] = [
    opcode::Readv::CODE,
    opcode::Writev::CODE,
    opcode::Write::CODE,
    opcode::Fsync::CODE,
    opcode::Fallocate::CODE,
    opcode::PollAdd::CODE,
    opcode::PollRemove::CODE,
];

/// io_uring, with the few things that the engine does.
pub struct Uring {
    ring: IoUring,
    /// The kernel refuses everything but [`OPCODES`].
    pub restricted: bool,
}

/// Written to a guest's call descriptor.
static ONE: u64 = 1;

impl Uring {
    pub fn new(entries: u32) -> io::Result<Self> {
        let entries = entries.clamp(64, 4_096).next_power_of_two();
        // From the best that a kernel can do to the least: each feature is younger than the one behind it.
        for (own, restricted) in [(true, true), (false, true), (true, false)] {
            if let Ok(ring) = build(entries, own, restricted) {
                return Ok(Self { ring, restricted });
            }
        }
        Ok(Self { ring: build(entries, false, false)?, restricted: false })
    }

    /// Queues an entry, handing what is queued to the kernel first when there is no room.
    pub fn push(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        loop {
            // SAFETY: whoever makes an entry keeps what it points to until its answer is there: iovecs and bounce memory in the table of pieces, ONE for ever.
            match unsafe { self.ring.submission().push(entry) } {
                Ok(()) => return Ok(()),
                Err(_) => {
                    self.ring.submit().map(|_| ()).or_else(quiet)?;
                }
            }
        }
    }

    /// Tells whenever the descriptor becomes readable.
    pub fn watch(&mut self, fd: RawFd, about: About) -> io::Result<()> {
        let entry = opcode::PollAdd::new(Fd(fd), libc::POLLIN as u32).multi(true).build();
        self.push(&entry.user_data(about.pack()))
    }

    /// Ends a watch.
    pub fn forget(&mut self, about: About) -> io::Result<()> {
        let entry = opcode::PollRemove::new(about.pack()).build();
        self.push(&entry.user_data(About::Nothing.pack()))
    }

    /// Adds one to an eventfd. The kernel waits in our place should it be full.
    pub fn ring(&mut self, fd: RawFd, about: About) -> io::Result<()> {
        let entry = opcode::Write::new(Fd(fd), std::ptr::from_ref(&ONE).cast(), 8).build();
        self.push(&entry.user_data(about.pack()))
    }

    /// Hands over what is queued, and waits for an answer if `wait`: until `until` at most.
    pub fn enter(&mut self, wait: bool, now: Nanos, until: Nanos) -> io::Result<()> {
        if !wait {
            // With deferred work the kernel only looks for answers when it is asked to.
            return self.ring.submitter().submit_and_wait(0).map(|_| ()).or_else(quiet);
        }
        if until.0 == u64::MAX {
            return self.ring.submit_and_wait(1).map(|_| ()).or_else(quiet);
        }
        let rest = until.0.saturating_sub(now.0);
        let time = Timespec::new().sec(rest / 1_000_000_000).nsec((rest % 1_000_000_000) as u32);
        let args = SubmitArgs::new().timespec(&time);
        self.ring.submitter().submit_with_args(1, &args).map(|_| ()).or_else(quiet)
    }

    /// The next answer.
    pub fn answer(&mut self) -> Option<Answer> {
        let entry = self.ring.completion().next()?;
        Some(Answer {
            about: About::unpack(entry.user_data()),
            result: entry.result(),
            more: cqueue::more(entry.flags()),
        })
    }
}

fn build(entries: u32, own: bool, restricted: bool) -> io::Result<IoUring> {
    let mut builder = IoUring::builder();
    builder.setup_cqsize(entries * 4);
    if own {
        // Work of the kernel for this ring is done when we ask for it, in our own time (kernel 6.1); older kernels interrupt us.
        builder.setup_single_issuer().setup_defer_taskrun();
        // Says that work waits: looking for answers without waiting then has it done.
        builder.setup_taskrun_flag();
        // One entry that the kernel refuses does not hold back those behind it.
        builder.setup_submit_all();
    }
    if !restricted {
        return builder.build(entries);
    }
    let ring = builder.setup_r_disabled().build(entries)?;
    let mut allowed = OPCODES.map(Restriction::sqe_op);
    ring.submitter().register_restrictions(&mut allowed)?;
    ring.submitter().register_enable_rings()?;
    Ok(ring)
}

/// A timeout, a signal and a full completion queue are no errors: there is something to look at, or nothing.
fn quiet(e: io::Error) -> io::Result<()> {
    match e.raw_os_error() {
        Some(libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN) => Ok(()),
        _ => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An operation that the engine never asks for is refused by the kernel itself, and so is lifting that.
    #[test]
    fn the_ring_does_nothing_else() {
        let mut uring = Uring::new(64).unwrap();
        if !uring.restricted {
            // RTVIRTIO_NO_SKIP: see crates/testkit; this crate's tests need it nowhere else.
            assert!(std::env::var_os("RTVIRTIO_NO_SKIP").is_none(), "io_uring cannot be restricted here");
            return eprintln!("SKIP the_ring_does_nothing_else: this kernel cannot restrict io_uring");
        }
        let path = c"/etc/passwd";
        let open = opcode::OpenAt::new(Fd(libc::AT_FDCWD), path.as_ptr()).build();
        let socket = opcode::Socket::new(libc::AF_INET, libc::SOCK_STREAM, 0).build();
        for entry in [open, socket] {
            uring.push(&entry.user_data(About::Piece(1).pack())).unwrap();
            uring.enter(true, Nanos(0), Nanos(u64::MAX)).unwrap();
            assert_eq!(uring.answer().unwrap().result, -libc::EACCES);
        }
        let again = uring.ring.submitter().register_restrictions(&mut []);
        assert!(again.is_err());
        assert!(uring.ring.submitter().register_files(&[0]).is_err());
        // And what it does ask for is done.
        uring.push(&opcode::Fsync::new(Fd(-1)).build().user_data(About::Piece(2).pack())).unwrap();
        uring.enter(true, Nanos(0), Nanos(u64::MAX)).unwrap();
        assert_eq!(uring.answer().unwrap().result, -libc::EBADF);
    }

    #[test]
    fn what_is_packed_comes_back() {
        for about in [
            About::Doorbell,
            About::Kick(7, 3, 65_535),
            About::Call(65_535, 0, 1),
            About::Piece(u32::MAX),
            About::Nothing,
        ] {
            assert_eq!(About::unpack(about.pack()), about);
        }
    }
}
