//! Ring buffer by which BPF programs wake this process.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{Ordering, fence};

use rustix::mm::ProtFlags;

use crate::Mapping;
use crate::kernel::ring;

/// BPF ring buffer (`Documentation/bpf/ringbuf.rst`). Its records are not read: their presence is
/// the signal, and the data are in a map of its own. Readable by poll(2) while there are any.
#[derive(Debug)]
pub struct Ring {
    /// Consumer position, written by this process.
    taken: Mapping,
    /// Producer position, written by the kernel.
    written: Mapping,
    descriptor: OwnedFd,
}

impl Ring {
    /// Ring buffer with a page for records.
    ///
    /// # Errors
    /// As bpf(2) reports, without the right to BPF or before Linux 5.8.
    pub fn new() -> io::Result<Self> {
        let page = rustix::param::page_size();
        let descriptor = ring(u32::try_from(page).map_err(io::Error::other)?)?;
        let taken = Mapping::part(&descriptor, 0, page, ProtFlags::READ | ProtFlags::WRITE)?;
        let written = Mapping::part(&descriptor, page as u64, page, ProtFlags::READ)?;
        Ok(Self { taken, written, descriptor })
    }

    /// Map descriptor, for the programs that write records.
    #[must_use]
    pub fn descriptor(&self) -> &OwnedFd {
        &self.descriptor
    }

    /// Consumes all records; returns whether there were any.
    pub fn take(&self) -> bool {
        // Read-only memory may only be loaded relaxed (`std::sync::atomic`).
        let now = self.written.double(0).load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        self.taken.double(0).swap(now, Ordering::AcqRel) != now
    }
}

impl AsFd for Ring {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}
