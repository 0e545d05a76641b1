//! A mapped part of a file that a front end shares, and what mappings of all VMs share.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::fault::{MOST_WATCHED, Watched};

/// Mappings beyond the first ones of each VM that the process may have. The kernel has 65 530 for a
/// process (`vm.max_map_count`), and one VM must not use up another's.
const SHARED_MAPPINGS: usize = 32_768;

static SHARED: AtomicUsize = AtomicUsize::new(0);

/// Claim on one of [`SHARED_MAPPINGS`], given back when dropped.
#[derive(Debug)]
pub(super) struct SharedMapping(());

impl SharedMapping {
    /// Takes one; `None` when all are in use.
    pub(super) fn take() -> Option<Self> {
        let take = |n: usize| (n < SHARED_MAPPINGS).then_some(n + 1);
        SHARED.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).ok().map(|_| Self(()))
    }
}

impl Drop for SharedMapping {
    fn drop(&mut self) {
        SHARED.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Bytes beyond the first ones of each VM that the process may have mapped: a process has 128 TiB
/// of addresses, and a sparse file may be as large as it likes.
const SHARED_BYTES: u64 = 32 << 40;

static BYTES: AtomicU64 = AtomicU64::new(0);

/// Claim on a part of [`SHARED_BYTES`], given back when dropped.
#[derive(Debug)]
pub(super) struct SharedBytes(u64);

impl SharedBytes {
    /// Takes so many; `None` when there are not as many left.
    pub(super) fn take(bytes: u64) -> Option<Self> {
        let take = |taken: u64| taken.checked_add(bytes).filter(|sum| *sum <= SHARED_BYTES);
        BYTES.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).ok().map(|_| Self(bytes))
    }
}

impl Drop for SharedBytes {
    fn drop(&mut self) {
        BYTES.fetch_sub(self.0, Ordering::Relaxed);
    }
}

/// Claims of a region on what all VMs share.
#[derive(Debug, Default)]
pub(super) struct Claims {
    pub(super) mapping: Option<SharedMapping>,
    pub(super) bytes: Option<SharedBytes>,
}

/// The part of a file that a region consists of, and where a guest sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    /// Guest address of the first byte.
    pub(super) base: u64,
    /// Bytes.
    pub(super) size: u64,
    /// Offset in the file.
    pub(super) offset: u64,
    /// Size of the file's pages, in bytes: what can be mapped is a multiple of it.
    pub(super) page: u64,
}

/// A mapped part of a file, with the pages around it. No descriptor stays open.
#[derive(Debug)]
pub(super) struct Mapping {
    /// Start and length of the mapping, in whole pages.
    mapped: (*mut u8, usize),
    /// First byte of the part.
    at: *mut u8,
    len: usize,
    /// Known to the handler of SIGBUS; `None` for memory that cannot be taken away.
    watched: Option<Watched>,
    _claims: Claims,
}

// SAFETY: the mapping is plain memory, reached by volatile and atomic accesses only.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps a part of a file. `watched` for a file that can be truncated, or whose pages can be
    /// taken away.
    pub(super) fn new(
        file: Option<&File>,
        extent: Extent,
        watched: bool,
        claims: Claims,
    ) -> io::Result<Self> {
        let Extent { base, size, offset, page } = extent;
        let too_large = || io::Error::other("it ends beyond the address space");
        let start = offset - offset % page;
        let end = offset.checked_add(size).and_then(|end| end.checked_next_multiple_of(page));
        let whole = end.and_then(|end| usize::try_from(end - start).ok()).ok_or_else(too_large)?;
        let len = usize::try_from(size).map_err(|_| too_large())?;
        if size == 0 || base.checked_add(size).is_none() {
            return Err(too_large());
        }
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let mapped = unsafe {
            match file {
                Some(file) => {
                    let flags = MapFlags::SHARED | MapFlags::NORESERVE;
                    rustix::mm::mmap(std::ptr::null_mut(), whole, access, flags, file, start)?
                }
                None => {
                    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
                    rustix::mm::mmap_anonymous(std::ptr::null_mut(), whole, access, flags)?
                }
            }
        };
        // A core file contains no guest memory, and is written without delaying the restart.
        // SAFETY: the whole of a mapping of ours; only what a dump contains changes.
        let _ = unsafe { rustix::mm::madvise(mapped, whole, Advice::LinuxDontDump) };
        let mapped: *mut u8 = mapped.cast();
        // SAFETY: the part lies in the pages that were mapped around it.
        let at = unsafe { mapped.add((offset - start) as usize) };
        let mut mapping = Self { mapped: (mapped, whole), at, len, watched: None, _claims: claims };
        if watched {
            let watched = Watched::new(mapped as usize, whole, page as usize).ok_or_else(|| {
                let text = format!("{MOST_WATCHED} regions of trusted front ends are mapped already");
                io::Error::other(text)
            });
            mapping.watched = Some(watched?);
        }
        Ok(mapping)
    }

    /// Bytes of the part.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The address of the first byte.
    pub(super) fn start(&self) -> *mut u8 {
        self.at
    }

    /// The address of a byte; `None` beyond the part.
    pub(super) fn at(&self, offset: usize) -> Option<*mut u8> {
        (offset < self.len).then(|| self.at.wrapping_add(offset))
    }

    /// Whether the memory was taken away, and reads as zeroes since.
    pub(super) fn is_lost(&self) -> bool {
        self.watched.as_ref().is_some_and(Watched::is_lost)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // Nobody reads the mapping any more; its address may be another one's after this.
        self.watched = None;
        let (at, len) = self.mapped;
        // SAFETY: it was mapped with this length, and no reference to it is left.
        let _ = unsafe { rustix::mm::munmap(at.cast(), len) };
    }
}
