//! Memory that is shared with a backend, as QEMU's `memory-backend-memfd`.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicU16, Ordering};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

/// A sealed memfd, mapped. "Guest" addresses begin at [`SharedMemory::BASE`].
#[derive(Debug)]
pub struct SharedMemory {
    file: File,
    at: *mut u8,
    len: usize,
}

// SAFETY: the mapping is plain memory; whoever shares it between threads goes through `&self` and
// the atomics below.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// First guest address: 0 would mean "no ring" to some backends.
    pub const BASE: u64 = 1 << 20;

    /// `len` bytes of zeroes; `sealed` as QEMU makes them.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn new(len: usize, sealed: bool) -> io::Result<Self> {
        let file = File::from(rustix::fs::memfd_create("rtvirtio-client", MemfdFlags::ALLOW_SEALING)?);
        file.set_len(len as u64)?;
        if sealed {
            rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        }
        // SAFETY: a new shared mapping of a file of this length; nobody else knows its address.
        let at = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &file,
                0,
            )?
        };
        Ok(Self { file, at: at.cast(), len })
    }

    /// Its descriptor.
    #[must_use]
    pub fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Where it lies in this process.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.at as u64
    }

    /// Its length.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn place(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "{offset} + {len} of {}",
            self.len
        );
        // SAFETY: the offset lies within the mapping.
        unsafe { self.at.add(offset) }
    }

    /// Writes bytes.
    ///
    /// # Panics
    /// Outside of the memory.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        let to = self.place(offset, bytes.len());
        // SAFETY: the place has room for the bytes and does not overlap them.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    /// Reads bytes.
    ///
    /// # Panics
    /// Outside of the memory.
    #[must_use]
    pub fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        let from = self.place(offset, len);
        let mut out = vec![0; len];
        // SAFETY: the place holds as many bytes.
        unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), len) };
        out
    }

    /// One byte.
    ///
    /// # Panics
    /// Outside of the memory.
    #[must_use]
    pub fn byte(&self, offset: usize) -> u8 {
        // SAFETY: within the mapping; the backend may write it at any time, hence volatile.
        unsafe { self.place(offset, 1).read_volatile() }
    }

    /// A 16-bit index that both sides use.
    ///
    /// # Panics
    /// Outside of the memory, or at an odd place.
    #[must_use]
    pub fn shared_index(&self, offset: usize) -> &AtomicU16 {
        assert!(offset % 2 == 0, "indices lie at even places");
        // SAFETY: within the mapping, aligned, and the mapping lives as long as `self`.
        unsafe { AtomicU16::from_ptr(self.place(offset, 2).cast()) }
    }

    /// Publishes an index.
    ///
    /// # Panics
    /// As [`SharedMemory::shared_index`].
    pub fn publish(&self, offset: usize, value: u16) {
        self.shared_index(offset).store(value, Ordering::Release);
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: it was mapped with this length and nothing refers to it any more.
        let _ = unsafe { rustix::mm::munmap(self.at.cast(), self.len) };
    }
}
