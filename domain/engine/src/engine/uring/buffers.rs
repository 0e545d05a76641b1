//! Buffers that are registered with a ring: memory that is pinned.

use std::io;
use std::ops::Range;

use io_uring::IoUring;
use io_uring::types::CloneBuffersFlags;

use crate::memory::Pinner;

/// A row of a ring's table of buffers.
#[derive(Debug)]
pub struct BufferRow {
    first: u32,
    n: u32,
}

/// The table of buffers of a ring. Each disk whose memory is pinned has a row of its own.
pub struct BufferTable {
    /// Contents of empty places, as many as there are.
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
        Self { none: vec![none; n as usize].into() }
    }

    /// Takes the registered buffers of another ring over, into the row of its disk. They stay
    /// registered there too, and their pages are unpinned when no ring, and no request, uses them.
    ///
    /// Costs about the same for memory of any size.
    pub fn take_over(&mut self, ring: &IoUring, pinner: &Pinner) -> io::Result<BufferRow> {
        let n = pinner.end().max(1);
        let Range { start: first, end } = pinner.row();
        if end as usize > self.none.len() {
            return Err(io::Error::other("the kernel takes no registered buffers of another ring"));
        }
        let flags = CloneBuffersFlags::DST_REPLACE;
        ring.submitter().register_buffers_clone_offset(pinner.fd(), 0, first, n, flags)?;
        Ok(BufferRow { first, n })
    }

    /// Empties a row. Requests in flight keep the buffers that they use.
    pub fn release(&mut self, ring: &IoUring, row: &BufferRow) -> io::Result<()> {
        let none = &self.none[..row.n as usize];
        // SAFETY: empty places refer to no memory.
        unsafe { ring.submitter().register_buffers_update(row.first, none, None) }
    }
}
