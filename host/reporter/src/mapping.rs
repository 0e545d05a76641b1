//! Shared memory as words.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Memory of a device, a file or a map of the kernel, mapped until this is dropped.
#[derive(Debug)]
pub struct Mapping {
    at: NonNull<AtomicU32>,
    bytes: usize,
}

// SAFETY: the mapping belongs to this value alone, and its words are atomic.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `bytes` of a file that stays as long.
    ///
    /// # Errors
    /// As mmap(2); kind `InvalidInput` for a length that is not a whole number of pages.
    pub fn new(file: &File, bytes: usize) -> io::Result<Self> {
        Self::of_descriptor(file.as_fd(), bytes)
    }

    pub(crate) fn of_descriptor(fd: impl AsFd, bytes: usize) -> io::Result<Self> {
        if bytes == 0 || bytes % rustix::param::page_size() != 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses touches no memory of ours.
        let at = unsafe { mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, fd, 0) }?;
        let at = NonNull::new(at.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { at, bytes })
    }

    /// Its words.
    #[must_use]
    pub fn words(&self) -> &[AtomicU32] {
        // SAFETY: `bytes` are mapped at a page's start until this is dropped, and other writers of
        // shared memory are what atomics are for.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.bytes / 4) }
    }

    /// Its first address.
    pub(crate) fn address(&self) -> usize {
        self.at.as_ptr() as usize
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: it was mapped with this length, and no reference outlives this value.
        let _ = unsafe { munmap(self.at.as_ptr().cast(), self.bytes) };
    }
}
