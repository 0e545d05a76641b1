//! Buffers that are registered with a ring: memory that is pinned.

use std::io;

use io_uring::IoUring;
use io_uring::types::CloneBuffersFlags;

use crate::memory::Pinner;
use crate::places::Places;

/// A row of a ring's table of buffers.
#[derive(Debug)]
pub struct BufferRow {
    first: u32,
    n: u32,
}

/// The table of buffers of a ring.
pub struct BufferTable {
    places: Places,
    /// Contents of empty places.
    none: Box<[libc::iovec]>,
}

impl BufferRow {
    /// The first place.
    pub fn first(&self) -> u32 {
        self.first
    }

    /// Number of places.
    pub fn len(&self) -> u32 {
        self.n
    }
}

impl BufferTable {
    /// So many empty places.
    pub fn new(n: u32) -> Self {
        let none = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        Self { places: Places::new(n), none: vec![none; n as usize].into() }
    }

    /// Takes the registered buffers of another ring over, in a row. They stay registered there too,
    /// and their pages are unpinned when no ring, and no request, uses them.
    ///
    /// Costs about the same for memory of any size.
    pub fn take_over(&mut self, ring: &IoUring, pinner: &Pinner) -> io::Result<BufferRow> {
        let n = pinner.end().max(1);
        let first = self.places.take(n).ok_or_else(|| match self.places.len() {
            0 => io::Error::other("the kernel takes no registered buffers of another ring"),
            all => io::Error::other(format!("all VMs of its device may have {all} parts of 1 GiB pinned")),
        })?;
        let flags = CloneBuffersFlags::DST_REPLACE;
        let done = ring.submitter().register_buffers_clone_offset(pinner.fd(), 0, first, n, flags);
        if let Err(e) = done {
            self.places.release(first, n);
            return Err(e);
        }
        Ok(BufferRow { first, n })
    }

    /// Empties a row. Requests in flight keep the buffers that they use. After an error the places
    /// are not used again.
    pub fn release(&mut self, ring: &IoUring, row: &BufferRow) -> io::Result<()> {
        let none = &self.none[..row.n as usize];
        // SAFETY: empty places refer to no memory.
        unsafe { ring.submitter().register_buffers_update(row.first, none, None)? };
        self.places.release(row.first, row.n);
        Ok(())
    }
}
