//! Memory shared with a back end, as QEMU's `memory-backend-memfd`.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicU8, AtomicU16, Ordering};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use vhost::VhostUserMemoryRegionInfo;

/// A mapped memfd. Guest addresses start at [`SharedMemory::BASE`].
#[derive(Debug)]
pub struct SharedMemory {
    file: File,
    at: *mut u8,
    len: usize,
}

// SAFETY: the mapping is plain memory; threads that share it use `&self` and the atomics below.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// First guest address: some back ends treat 0 as "no ring".
    pub const BASE: u64 = 1 << 20;

    /// Allocates `len` bytes of zeroes; `sealed` as by QEMU.
    pub fn new(len: usize, sealed: bool) -> io::Result<Self> {
        let file = File::from(rustix::fs::memfd_create("rtvirtio-client", MemfdFlags::ALLOW_SEALING)?);
        file.set_len(len as u64)?;
        if sealed {
            rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        }
        // SAFETY: a new shared mapping of a file of this length, without other references.
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

    /// Descriptor of the memfd, for the memory table.
    #[must_use]
    pub fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Start of the mapping in this process.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.at as u64
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the length is 0.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A part of the memory as a region for a back end, at its guest address.
    #[must_use]
    pub fn region(&self, offset: usize, len: usize) -> VhostUserMemoryRegionInfo {
        VhostUserMemoryRegionInfo {
            guest_phys_addr: Self::BASE + offset as u64,
            memory_size: len as u64,
            userspace_addr: self.address() + offset as u64,
            mmap_offset: offset as u64,
            mmap_handle: self.fd(),
        }
    }

    /// All memory as regions of `each` bytes, the last one of what is left; none for 0.
    #[must_use]
    pub fn slots(&self, each: usize) -> Vec<VhostUserMemoryRegionInfo> {
        let starts = (0..self.len).step_by(each.max(1)).take_while(|_| each > 0);
        starts.map(|at| self.region(at, each.min(self.len - at))).collect()
    }

    /// Cuts the file off, after which an access ends a process that is not prepared for it, also
    /// this one.
    ///
    /// # Errors
    /// The memory is sealed.
    pub fn truncate(&self) -> io::Result<()> {
        self.file.set_len(0)
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

    /// Reads one byte.
    ///
    /// # Panics
    /// Outside of the memory.
    #[must_use]
    pub fn byte(&self, offset: usize) -> u8 {
        // SAFETY: within the mapping; volatile because the back end may write it at any time.
        unsafe { self.place(offset, 1).read_volatile() }
    }

    /// A byte of which both sides change bits.
    pub(crate) fn shared_byte(&self, offset: usize) -> &AtomicU8 {
        // SAFETY: within the mapping, which lives as long as `self`.
        unsafe { AtomicU8::from_ptr(self.place(offset, 1)) }
    }

    /// A 16-bit index shared by both sides.
    ///
    /// # Panics
    /// Outside of the memory, or unaligned.
    #[must_use]
    pub fn shared_index(&self, offset: usize) -> &AtomicU16 {
        assert!(offset % 2 == 0, "indices lie at even places");
        // SAFETY: within the mapping, aligned, and the mapping lives as long as `self`.
        unsafe { AtomicU16::from_ptr(self.place(offset, 2).cast()) }
    }

    /// Writes an index with release ordering.
    ///
    /// # Panics
    /// As [`SharedMemory::shared_index`].
    pub fn publish(&self, offset: usize, value: u16) {
        self.shared_index(offset).store(value, Ordering::Release);
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: it was mapped with this length, and no reference to it is left.
        let _ = unsafe { rustix::mm::munmap(self.at.cast(), self.len) };
    }
}
