//! Shared memory, read and written as atomic words.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Memory of a device, a file or a BPF map, mapped until this is dropped.
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
    /// Maps the first `bytes` of a file, which must not shrink meanwhile.
    ///
    /// # Errors
    /// As mmap(2); kind `InvalidInput` for a length that is not a whole number of pages.
    pub fn new(file: &File, bytes: usize) -> io::Result<Self> {
        Self::of_descriptor(file.as_fd(), bytes)
    }

    /// Maps the first `bytes` of a BPF map's descriptor.
    pub fn of_descriptor(fd: impl AsFd, bytes: usize) -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        Self::part(fd, 0, bytes, access)
    }

    /// Part of a descriptor's memory, from byte `from` on.
    pub(crate) fn part(fd: impl AsFd, from: u64, bytes: usize, access: ProtFlags) -> io::Result<Self> {
        if bytes == 0 || bytes % rustix::param::page_size() != 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: a new mapping at an address that the kernel chooses touches no memory of ours.
        let at = unsafe { mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, fd, from) }?;
        let at = NonNull::new(at.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { at, bytes })
    }

    #[must_use]
    pub fn as_words(&self) -> &[AtomicU32] {
        // SAFETY: `bytes` are mapped at a page's start until this is dropped, and other writers of
        // shared memory are what atomics are for.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.bytes / 4) }
    }

    /// The eight bytes at byte offset `at`, which the kernel reads and writes as one number.
    ///
    /// # Panics
    /// When they are beyond the end, or `at` is no multiple of 8.
    #[must_use]
    pub fn double(&self, at: usize) -> &AtomicU64 {
        assert!(at % 8 == 0 && at + 8 <= self.bytes, "byte {at} of {}", self.bytes);
        // SAFETY: it lies within the mapping, which begins at a page and lives as long as the
        // result; other writers of shared memory are what atomics are for. What is mapped to be
        // read is only loaded, relaxed.
        unsafe { AtomicU64::from_ptr(self.at.as_ptr().cast::<u64>().add(at / 8)) }
    }

    /// Address of the first byte.
    #[must_use]
    pub fn address(&self) -> usize {
        self.at.as_ptr() as usize
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: it was mapped with this length, and no reference outlives this value.
        let _ = unsafe { munmap(self.at.as_ptr().cast(), self.bytes) };
    }
}
