//! Pinned guest memory: buffers that are registered with io_uring.
//!
//! The kernel looks the pages of a registered buffer up once, not for each request. It takes up to
//! a second for a gigabyte, and an engine serves other VMs meanwhile. So each disk has a ring
//! without operations, with which the thread of its connection registers memory; the engine's ring
//! takes the registered buffers over, which takes the same time for memory of any size.
//!
//! Registered pages stay in RAM, and stay the memory of requests even when the front end takes them
//! from the guest (a balloon). Pages that nobody has touched are allocated by this process. So
//! memory is pinned only where the configuration says so, and no more than it says.

use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::{fmt, io};

use io_uring::IoUring;
use io_uring::register::Restriction;
use rtvirtio_units::Bytes;
use rustix::mm::Advice;
use rustix::process::Resource;

use crate::places::Places;

/// Largest buffer that the kernel registers, in bytes.
const CHUNK: usize = 1 << 30;
/// Bytes that are brought into RAM at a time: changes of the process's mappings wait meanwhile.
const POPULATED: usize = 16 << 20;
/// Buffers of an engine: `IORING_MAX_REG_BUFFERS` of the kernel.
const MOST_BUFFERS: u32 = 1 << 14;
/// Buffers of a disk beyond one for each GiB: the last one of a region may be a part of a GiB.
const SPARE_BUFFERS: u64 = 64;
/// Smallest region that is pinned, in bytes. Requests hardly use smaller ones, and a front end
/// could take all buffers with them.
pub(super) const SMALLEST: u64 = 2 << 20;
/// `IORING_REGISTER_BUFFERS_UPDATE` of `linux/io_uring.h`.
pub const BUFFERS_UPDATE: u8 = 16;
/// `IORING_REGISTER_CLONE_BUFFERS` of `linux/io_uring.h`.
pub const CLONE_BUFFERS: u8 = 30;

const NO_BUFFER: libc::iovec = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };

/// Reasons for which memory is not pinned.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PinError {
    /// More memory than the configuration says.
    #[error("its guest has {all} in all, and `pin` is {most}")]
    Size {
        /// Most memory that is pinned.
        most: Bytes,
        /// All regions that would be.
        all: Bytes,
    },
    /// More regions than a disk has buffers for.
    #[error("{0} parts of at most 1 GiB are all that can be pinned")]
    Places(u32),
    /// More than the process may lock.
    #[error("the process may lock {0} bytes; raise LimitMEMLOCK")]
    Limit(u64),
    /// The memory cannot be brought into RAM.
    #[error("it cannot be brought into RAM: {0}")]
    Populate(#[source] io::Error),
    /// The kernel refuses to register it.
    #[error("io_uring does not register it: {0}{remedy}", remedy = remedy(.0))]
    Register(#[source] io::Error),
}

fn remedy(error: &io::Error) -> &'static str {
    if error.raw_os_error() == Some(libc::ENOMEM) { "; raise LimitMEMLOCK" } else { "" }
}

/// Registers the memory of a disk's guest.
pub struct Pinner {
    ring: IoUring,
    places: Mutex<Places>,
    /// Most memory that is pinned.
    most: Bytes,
    /// First place of the disk in its engine's table.
    row: u32,
    /// Number of places, here and there.
    n: u32,
    /// Bytes that the process may lock, where the kernel limits them.
    limit: Option<u64>,
}

impl fmt::Debug for Pinner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pinner").field("limit", &self.limit).finish_non_exhaustive()
    }
}

impl Pinner {
    /// A ring that registers buffers and does nothing else, for so much memory. The disk has places
    /// of its own in its engine's table, from `row` on: what other VMs pin takes none of them.
    ///
    /// # Errors
    /// The kernel has no such ring, or an engine's table has no such places.
    pub fn new(most: Bytes, row: u32) -> io::Result<Self> {
        let n = most.0.div_ceil(CHUNK as u64).saturating_add(SPARE_BUFFERS);
        let n = u32::try_from(n).ok().filter(|n| row.checked_add(*n).is_some_and(|end| end <= MOST_BUFFERS));
        let too_large = "the disks of a device may pin less than 16 TiB in sum";
        let n = n.ok_or_else(|| io::Error::other(too_large))?;
        let ring = IoUring::builder().setup_r_disabled().build(1)?;
        ring.submitter().register_buffers_sparse(n)?;
        let mut allowed = [Restriction::register_op(BUFFERS_UPDATE)];
        ring.submitter().register_restrictions(&mut allowed)?;
        ring.submitter().register_enable_rings()?;
        // The kernel asks for the capability when the ring is made.
        let is_exempt = rustix::thread::capabilities(None)
            .is_ok_and(|sets| sets.effective.contains(rustix::thread::CapabilitySet::IPC_LOCK));
        let limit = rustix::process::getrlimit(Resource::Memlock).current;
        let (places, limit) = (Mutex::new(Places::new(n)), limit.filter(|_| !is_exempt));
        Ok(Self { ring, places, most, row, n, limit })
    }

    /// Descriptor of the ring, from which another one takes buffers over.
    #[must_use]
    pub fn fd(&self) -> RawFd {
        self.ring.as_raw_fd()
    }

    /// Number of places up to the last registered buffer.
    #[must_use]
    pub fn end(&self) -> u32 {
        self.places().end()
    }

    /// First place of the disk in its engine's table, and the first place after its own.
    #[must_use]
    pub fn row(&self) -> Range<u32> {
        self.row..self.row + self.n
    }

    /// Reason for which a guest with so many bytes is not pinned, if there is one: to be known
    /// before any of them is touched.
    pub(super) fn refuse(&self, all: u64) -> Option<PinError> {
        (all > self.most.0).then_some(PinError::Size { most: self.most, all: Bytes(all) })
    }

    fn places(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Brings memory of this process into RAM and registers it.
    ///
    /// # Safety
    /// The memory stays mapped as long as the result lives.
    pub(super) unsafe fn pin(self: &Arc<Self>, start: *mut u8, len: usize) -> Result<Pinned, PinError> {
        if let Some(limit) = self.limit.filter(|limit| len as u64 > *limit) {
            return Err(PinError::Limit(limit));
        }
        let buffers = u32::try_from(len.div_ceil(CHUNK)).map_err(|_| PinError::Places(self.n))?;
        let first = self.places().take(buffers).ok_or(PinError::Places(self.n))?;
        // Given back by its end, also after an error.
        let pinned = Pinned { pinner: Arc::clone(self), first, buffers, start: start as usize, len };
        for (place, from) in (first..).zip((0..len).step_by(CHUNK)) {
            let (at, len) = (start.wrapping_add(from), CHUNK.min(len - from));
            populate(at, len).map_err(PinError::Populate)?;
            let buffer = libc::iovec { iov_base: at.cast(), iov_len: len };
            // SAFETY: the memory is mapped as long as `pinned` lives.
            unsafe { self.ring.submitter().register_buffers_update(place, &[buffer], None) }
                .map_err(PinError::Register)?;
        }
        Ok(pinned)
    }
}

/// Brings pages into RAM. An error of the memory is returned here, and raises no signal.
fn populate(start: *mut u8, len: usize) -> io::Result<()> {
    let page = rustix::param::page_size();
    let skip = start as usize % page;
    let (start, len) = (start.wrapping_sub(skip), (len + skip).next_multiple_of(page));
    for from in (0..len).step_by(POPULATED) {
        let part = POPULATED.min(len - from);
        // SAFETY: whole pages of a mapping of ours, which keep their contents.
        unsafe { rustix::mm::madvise(start.wrapping_add(from).cast(), part, Advice::LinuxPopulateWrite)? };
    }
    Ok(())
}

/// Memory that is registered until this is dropped.
#[derive(Debug)]
pub(super) struct Pinned {
    pinner: Arc<Pinner>,
    first: u32,
    buffers: u32,
    start: usize,
    len: usize,
}

impl Pinned {
    /// Bytes.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    fn contains(&self, start: usize) -> bool {
        start.wrapping_sub(self.start) < self.len
    }

    /// The buffer in which some bytes lie that begin in this memory.
    fn buffer(&self, start: usize, len: usize) -> Option<u32> {
        let from = start - self.start;
        let end = from.checked_add(len).filter(|end| *end <= self.len)?;
        let chunk = from / CHUNK;
        (len > 0 && (end - 1) / CHUNK == chunk).then(|| self.first + chunk as u32)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let none = vec![NO_BUFFER; self.buffers as usize];
        // SAFETY: empty places.
        let done = unsafe { self.pinner.ring.submitter().register_buffers_update(self.first, &none, None) };
        match done {
            Ok(()) => self.pinner.places().release(self.first, self.buffers),
            // The places are not used again.
            Err(e) => crate::log::write_line(format_args!("pinned memory is not given back: {e}")),
        }
    }
}

/// The registered buffers of a guest's memory, by address.
#[derive(Debug)]
pub struct Pins {
    pinner: Arc<Pinner>,
    /// Start and place of each part, in order of their addresses.
    parts: Box<[Arc<Pinned>]>,
}

impl Pins {
    pub(super) fn new(pinner: &Arc<Pinner>, mut parts: Vec<Arc<Pinned>>) -> Self {
        parts.sort_by_key(|part| part.start);
        Self { pinner: Arc::clone(pinner), parts: parts.into() }
    }

    /// The ring with which the buffers are registered.
    #[must_use]
    pub fn pinner(&self) -> &Pinner {
        &self.pinner
    }

    /// The registered buffer in which some bytes lie; `None` where not all lie in one.
    #[must_use]
    pub fn buffer(&self, start: *const u8, len: usize) -> Option<u32> {
        let start = start as usize;
        let after = self.parts.partition_point(|part| part.start <= start);
        let part = self.parts.get(after.checked_sub(1)?).filter(|part| part.contains(start))?;
        part.buffer(start, len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parts of this many bytes at these addresses, which are registered nowhere.
    fn pins(parts: &[(usize, usize, u32)]) -> Option<Pins> {
        let pinner = Arc::new(Pinner::new(Bytes(16 << 30), 0).ok()?);
        let part = |(start, len, first): &(usize, usize, u32)| {
            let buffers = len.div_ceil(CHUNK) as u32;
            Arc::new(Pinned { pinner: Arc::clone(&pinner), first: *first, buffers, start: *start, len: *len })
        };
        Some(Pins::new(&pinner, parts.iter().map(part).collect()))
    }

    #[test]
    fn bytes_are_found_in_one_buffer_only() {
        let Some(pins) = pins(&[(8 << 30, (2 << 30) + 4_096, 4), (1 << 30, 8_192, 2)]) else {
            let why = "this kernel registers no buffers with io_uring";
            return rtvirtio_testkit::skip("bytes_are_found_in_one_buffer_only", why);
        };
        let at = |start: usize, len| pins.buffer(start as *const u8, len);
        assert_eq!((at(1 << 30, 8_192), at((1 << 30) + 8_191, 1)), (Some(2), Some(2)));
        assert_eq!(
            (at((1 << 30) + 1, 8_192), at((1 << 30) + 8_192, 1), at((1 << 30) - 1, 1)),
            (None, None, None)
        );
        assert_eq!((at(8 << 30, 1 << 30), at(9 << 30, 1), at(10 << 30, 4_096)), (Some(4), Some(5), Some(6)));
        // Across two buffers, beyond the end, nothing, more than there are addresses.
        assert_eq!((at((9 << 30) - 1, 2), at(10 << 30, 4_097)), (None, None));
        assert_eq!(
            (at(9 << 30, 0), at(9 << 30, usize::MAX), at(0, 1), at(usize::MAX, 1)),
            (None, None, None, None)
        );
    }

    #[test]
    fn a_limit_is_respected_and_named() {
        let Ok(mut pinner) = Pinner::new(Bytes(1 << 30), 0) else {
            let why = "this kernel registers no buffers with io_uring";
            return rtvirtio_testkit::skip("a_limit_is_respected_and_named", why);
        };
        pinner.limit = Some(8_191);
        let pinner = Arc::new(pinner);
        let mut memory = vec![0_u8; 16_384];
        // SAFETY: refused before the memory is used.
        let refused = unsafe { pinner.pin(memory.as_mut_ptr(), 8_192) }.unwrap_err();
        assert!(refused.to_string().contains("8191 bytes; raise LimitMEMLOCK"), "{refused}");
        assert_eq!(pinner.end(), 0);
        // SAFETY: dropped before the memory.
        let pinned = unsafe { pinner.pin(memory.as_mut_ptr(), 8_191) }.unwrap();
        assert_eq!((pinner.end(), pinned.len()), (1, 8_191));
        drop(pinned);
        assert_eq!(pinner.end(), 0);
        // Memory that is not there is an error, which leaves nothing behind.
        // SAFETY: no memory is at the address.
        let refused = unsafe { pinner.pin(std::ptr::without_provenance_mut(1 << 46), 4_096) }.unwrap_err();
        assert!(matches!(refused, PinError::Populate(_)), "{refused}");
        assert_eq!(pinner.end(), 0);
    }

    #[test]
    fn disks_have_places_of_their_own_as_many_as_the_kernel_has() {
        // Refused before a ring is made.
        for (most, row) in [(u64::MAX, 0), (1 << 44, 0), (0, u32::MAX), (0, MOST_BUFFERS - 63)] {
            let refused = Pinner::new(Bytes(most), row).unwrap_err();
            assert!(refused.to_string().contains("16 TiB"), "{refused}");
        }
        let Ok(pinner) = Pinner::new(Bytes(3 << 30), 7) else {
            let why = "this kernel registers no buffers with io_uring";
            return rtvirtio_testkit::skip("disks_have_places_of_their_own", why);
        };
        assert_eq!(pinner.row(), 7..7 + 67);
        let said = pinner.refuse((3 << 30) + 1).unwrap().to_string();
        assert!(said.contains("3221225473B in all") && said.contains("`pin` is 3GiB"), "{said}");
        assert!(pinner.refuse(3 << 30).is_none());
    }
}
