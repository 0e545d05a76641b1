//! The log of a live migration: a bit of each page that this process has written.
//!
//! A front end shares the log before it copies the guest's memory, clears the bits of pages that it
//! is about to copy, and copies pages again that were written after that. Every write goes through
//! [`super::Region`], which marks it here; the kernel's own writes, of reads from the device, are
//! marked when they have completed.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use arc_swap::ArcSwapOption;
use vm_memory::bitmap::{Bitmap, BitmapSlice, WithBitmapSlice};

use super::mapping::{Claims, Extent, Mapping};
use super::{GuestMem, MemoryError, PAGE, Trust, check_backing_file};

/// Bytes of guest memory for which a byte of the log has bits.
const BYTE_COVERS: u64 = 8 * PAGE;

/// Largest log, in bytes: that of 128 TiB of addresses.
const LARGEST_LOG: u64 = 4 << 30;

/// Reasons for which a log is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LogError {
    /// Memory in which no log may be.
    #[error("the log of written pages cannot be used: {0}")]
    Memory(#[from] MemoryError),
    /// A log that is not as large as it is said to be.
    #[error("the log of written pages ends beyond its file, which has {0} bytes")]
    Short(u64),
    /// An empty log, or one of more addresses than a guest has.
    #[error("the log of written pages has {0} bytes; it may have {LARGEST_LOG} at most, and none is too few")]
    Size(u64),
    /// A log of less than the guest's memory.
    #[error("the log of written pages has {log} bytes, and the guest's memory needs {needed}")]
    Covers {
        /// Bytes of the log.
        log: u64,
        /// Bytes that the memory needs.
        needed: u64,
    },
}

/// A log that a front end shares.
#[derive(Debug)]
pub struct LogMemory {
    bytes: Mapping,
    /// A bit of each page of the log in which this process has marked something: the others may be
    /// holes of the file, which a read would fill.
    marked: Box<[AtomicU64]>,
}

impl LogMemory {
    /// Maps a log, under the conditions of guest memory: one that is not trusted cannot be
    /// truncated afterwards.
    pub fn map(file: &File, size: u64, offset: u64, trust: Trust) -> Result<Self, LogError> {
        let fail = |source| LogError::Memory(MemoryError::Map { size, source });
        if size == 0 || size > LARGEST_LOG {
            return Err(LogError::Size(size));
        }
        let page = check_backing_file(file, trust)?;
        let file_len = file.metadata().map_err(fail)?.len();
        if offset.checked_add(size).is_none_or(|end| end > file_len) {
            return Err(LogError::Short(file_len));
        }
        let extent = Extent { base: 0, size, offset, page };
        let mapping = Mapping::new(Some(file), extent, trust != Trust::None, Claims::default());
        let marked = (0..size.div_ceil(64 * PAGE)).map(|_| AtomicU64::new(0)).collect();
        mapping.map(|bytes| Self { bytes, marked }).map_err(fail)
    }

    /// Refuses a log without bits for a part of the memory.
    ///
    /// # Errors
    /// [`LogError::Covers`].
    pub fn check_covers(&self, mem: &GuestMem) -> Result<(), LogError> {
        let (log, needed) = (self.bytes.len() as u64, mem.end().div_ceil(BYTE_COVERS));
        if log < needed { Err(LogError::Covers { log, needed }) } else { Ok(()) }
    }

    /// Whether the log was taken away, so that marks are lost.
    fn is_lost(&self) -> bool {
        self.bytes.is_lost()
    }

    /// Marks the pages of `len` bytes at a guest address. The front end clears bits meanwhile, and
    /// other back ends set them.
    fn mark(&self, address: u64, len: usize) {
        let Some(last) = (len as u64).checked_sub(1) else { return };
        let (first, last) = (address / PAGE, address.saturating_add(last) / PAGE);
        for byte in first / 8..=last / 8 {
            let from = first.max(byte * 8) % 8;
            let to = last.min(byte * 8 + 7) % 8;
            let bits = (0xff_u8 << from) & (0xff_u8 >> (7 - to));
            // Beyond the log there is no memory: it was checked to cover all.
            let Some(at) = usize::try_from(byte).ok().and_then(|byte| self.bytes.at(byte)) else { return };
            self.note_marked(byte);
            // SAFETY: a byte of the mapping, which lives as long as `self`, and which this process
            // reaches by atomic accesses only.
            // Also where the bit is set already: the order makes the data visible before it.
            unsafe { AtomicU8::from_ptr(at) }.fetch_or(bits, Ordering::SeqCst);
        }
    }

    /// Notes that a byte of the log has marks of this process.
    fn note_marked(&self, byte: u64) {
        let (page, bit) = (byte / PAGE, 1_u64 << (byte / PAGE % 64));
        let Some(word) = self.marked.get((page / 64) as usize) else { return };
        if word.load(Ordering::Relaxed) & bit == 0 {
            word.fetch_or(bit, Ordering::Relaxed);
        }
    }

    /// Copies the marks of a log that was in use before, and that gets no more of them. A front end
    /// that stops and starts its queues may have given that one up before it shares this one, and
    /// the queues have written in between.
    pub fn add_marks_of(&self, before: &Self) {
        let has_marks = |page: &u64| {
            let word = before.marked.get((page / 64) as usize);
            word.is_some_and(|word| word.load(Ordering::Relaxed) >> (page % 64) & 1 == 1)
        };
        for page in (0..before.marked.len() as u64 * 64).filter(has_marks) {
            for byte in page * PAGE..(page + 1) * PAGE {
                let at = |log: &Self| usize::try_from(byte).ok().and_then(|byte| log.bytes.at(byte));
                let (Some(from), Some(to)) = (at(before), at(self)) else { break };
                // SAFETY: bytes of the mappings, which live as long as both logs, and which this
                // process reaches by atomic accesses only.
                let (from, to) = unsafe { (AtomicU8::from_ptr(from), AtomicU8::from_ptr(to)) };
                let bits = from.load(Ordering::SeqCst);
                if bits != 0 {
                    self.note_marked(byte);
                    to.fetch_or(bits, Ordering::SeqCst);
                }
            }
        }
    }
}

/// The log that is in use for a VM's memory, if any. Regions share it, so that it changes while
/// they are in use.
#[derive(Debug, Default)]
pub struct DirtyLog {
    current: ArcSwapOption<LogMemory>,
    /// Whether there is one: without, a mark is this one read.
    is_on: AtomicBool,
}

impl DirtyLog {
    /// Replaces the log, and returns the old one: a thread that is writing may still mark there.
    pub fn replace(&self, log: Option<Arc<LogMemory>>) -> Option<Arc<LogMemory>> {
        let is_on = log.is_some();
        if is_on {
            self.is_on.store(true, Ordering::Release);
        }
        let old = self.current.swap(log);
        self.is_on.store(is_on, Ordering::Release);
        old
    }

    pub(super) fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Acquire)
    }

    /// Whether the log was taken away by a front end that is trusted not to do that.
    pub(super) fn is_lost(&self) -> bool {
        self.current.load().as_ref().is_some_and(|log| log.is_lost())
    }

    /// Marks `len` bytes at a guest address, after they were written.
    pub fn mark(&self, address: u64, len: usize) {
        if !self.is_on() {
            return;
        }
        if let Some(log) = self.current.load().as_ref() {
            log.mark(address, len);
        }
    }
}

/// The log from a guest address on, as the memory crate asks for it.
#[derive(Clone, Copy, Debug)]
pub struct LogSlice<'a> {
    log: &'a DirtyLog,
    address: u64,
}

impl<'a> LogSlice<'a> {
    pub(super) fn new(log: &'a DirtyLog, address: u64) -> Self {
        Self { log, address }
    }
}

impl WithBitmapSlice<'_> for LogSlice<'_> {
    type S = Self;
}

impl BitmapSlice for LogSlice<'_> {}

impl Bitmap for LogSlice<'_> {
    fn mark_dirty(&self, offset: usize, len: usize) {
        self.log.mark(self.address.wrapping_add(offset as u64), len);
    }

    /// Nothing asks for it here: the front end reads and clears its bits.
    fn dirty_at(&self, _: usize) -> bool {
        false
    }

    fn slice_at(&self, offset: usize) -> Self {
        Self { log: self.log, address: self.address.wrapping_add(offset as u64) }
    }
}

/// The kind of log of a region: names the type of its slices.
#[derive(Debug)]
pub struct RegionLog {
    pub(super) log: Arc<DirtyLog>,
    pub(super) base: u64,
}

impl<'a> WithBitmapSlice<'a> for RegionLog {
    type S = LogSlice<'a>;
}

impl Bitmap for RegionLog {
    fn mark_dirty(&self, offset: usize, len: usize) {
        self.slice_at(0).mark_dirty(offset, len);
    }

    fn dirty_at(&self, offset: usize) -> bool {
        self.slice_at(0).dirty_at(offset)
    }

    fn slice_at(&self, offset: usize) -> LogSlice<'_> {
        LogSlice::new(&self.log, self.base.wrapping_add(offset as u64))
    }
}
