//! Requests and pieces under way: tables of fixed size.

use std::sync::Arc;

use hdrhistogram::Histogram;
use rtvirtio_sched::{Op, Piece};
use rtvirtio_units::Nanos;
use vm_memory::GuestAddress;

use crate::blk::{SEGMENTS, Segment};
use crate::memory::GuestMem;

/// A request of a VM, taken from a queue and not answered.
#[derive(Debug)]
pub struct Taken {
    /// The queue, and which life of it: answers to a queue that was stopped meanwhile are dropped.
    pub vring: u16,
    pub generation: u32,
    pub head: u16,
    pub op: Op,
    /// On the backing, in bytes.
    pub offset: u64,
    pub len: u64,
    pub unmap: bool,
    pub status: GuestAddress,
    /// Data in the guest's memory; never more than [`SEGMENTS`].
    pub segments: Vec<Segment>,
    pub failed: bool,
    pub unsupported: bool,
    pub write_through: bool,
    /// When its first piece went to the device; 0 before.
    pub given: Nanos,
    /// That piece went by its reservation's deadline.
    pub reserved: bool,
    /// What the segments lie in: it stays mapped for as long as the kernel may write there, also when the VM is gone.
    pub mem: Option<Arc<GuestMem>>,
    pub used: bool,
}

impl Taken {
    fn new() -> Self {
        Self {
            vring: 0,
            generation: 0,
            head: 0,
            op: Op::Flush,
            offset: 0,
            len: 0,
            unmap: false,
            status: GuestAddress(0),
            segments: Vec::with_capacity(SEGMENTS),
            failed: false,
            unsupported: false,
            write_through: false,
            given: Nanos(0),
            reserved: false,
            mem: None,
            used: false,
        }
    }

    /// A piece goes to the device; the first one counts.
    pub fn goes(&mut self, time: Nanos, piece: &Piece) {
        if self.given == Nanos(0) {
            (self.given, self.reserved) = (time, piece.reserved);
        }
    }
}

/// The requests of one VM.
#[derive(Debug)]
pub struct Requests {
    slots: Vec<Taken>,
    free: Vec<u32>,
}

impl Requests {
    /// Room for `depth`.
    pub fn new(depth: u32) -> Self {
        Self { slots: (0..depth).map(|_| Taken::new()).collect(), free: (0..depth).rev().collect() }
    }

    /// A free place, which stays free until it is marked as used.
    pub fn free(&mut self) -> Option<(u32, &mut Taken)> {
        let i = *self.free.last()?;
        self.slots.get_mut(i as usize).map(|s| (i, s))
    }

    /// The place that [`Requests::free`] named is used now.
    pub fn take(&mut self) {
        if let Some(i) = self.free.pop() {
            self.slots[i as usize].used = true;
        }
    }

    /// A place that is in use.
    pub fn get(&mut self, i: u32) -> Option<&mut Taken> {
        self.slots.get_mut(i as usize).filter(|s| s.used)
    }

    /// A place is free again.
    pub fn release(&mut self, i: u32) {
        if let Some(slot) = self.slots.get_mut(i as usize).filter(|s| s.used) {
            slot.used = false;
            slot.mem = None;
            self.free.push(i);
        }
    }
}

/// A piece at the device.
#[derive(Debug)]
pub struct Running {
    pub piece: Option<Piece>,
    /// What io_uring was given; it reads this until the piece is back.
    pub iovecs: Vec<libc::iovec>,
    /// Aligned memory for guests whose own is not.
    pub bounce: Bounce,
    pub bounced: bool,
}

/// Latencies of one direction.
#[derive(Clone, Debug)]
pub struct Latencies {
    hist: Histogram<u64>,
    max: u64,
}

impl Latencies {
    pub(super) fn new() -> Self {
        // 1 ns to 1000 s at two digits: some 40 kB that never grow. The bounds are constants within the type's range.
        let hist = Histogram::new_with_bounds(1, 1_000_000_000_000, 2);
        Self { hist: hist.unwrap_or_else(|_| unreachable!("constant bounds")), max: 0 }
    }

    pub(super) fn add(&mut self, latency: Nanos) {
        self.hist.saturating_record(latency.0);
        self.max = self.max.max(latency.0);
    }

    /// How many.
    #[must_use]
    pub fn n(&self) -> u64 {
        self.hist.len()
    }

    /// A percentile; zero without samples.
    #[must_use]
    pub fn at(&self, percentile: f64) -> Nanos {
        Nanos(self.hist.value_at_percentile(percentile).min(self.max))
    }

    /// The longest.
    #[must_use]
    pub fn max(&self) -> Nanos {
        Nanos(self.max)
    }
}

/// Aligned memory of our own.
#[derive(Debug)]
pub struct Bounce {
    at: *mut u8,
    len: usize,
}

// SAFETY: it owns its memory, and only the engine's thread uses it.
unsafe impl Send for Bounce {}

impl Bounce {
    /// `len` bytes, on a page boundary.
    pub fn new(len: usize) -> std::io::Result<Self> {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        // SAFETY: a new private mapping that nobody else knows of.
        let at = unsafe {
            mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)?
        };
        Ok(Self { at: at.cast(), len })
    }

    pub fn at(&self) -> *mut u8 {
        self.at
    }

    /// Its bytes.
    pub fn bytes(&mut self, len: usize) -> &mut [u8] {
        // SAFETY: the mapping has `self.len` bytes, lives as long as `self`, and no piece is at the device with it while we look.
        unsafe { std::slice::from_raw_parts_mut(self.at, len.min(self.len)) }
    }
}

impl Drop for Bounce {
    fn drop(&mut self) {
        // SAFETY: it was mapped with this length by `new`, and nothing refers to it any more.
        let _ = unsafe { rustix::mm::munmap(self.at.cast(), self.len) };
    }
}
