//! A ring by which programs in the kernel wake this process.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{Ordering, fence};

use rustix::mm::ProtFlags;

use crate::Mapping;
use crate::kernel::ring;

/// A ring (`Documentation/bpf/ringbuf.rst`). Its records are not read: that there are some is
/// what it says, and a map of their own has what they are about. Readable by poll(2) while there
/// are any.
#[derive(Debug)]
pub struct Ring {
    /// How far this process has read.
    taken: Mapping,
    /// How far the kernel has written.
    written: Mapping,
    descriptor: OwnedFd,
}

impl Ring {
    /// One with a page for records.
    ///
    /// # Errors
    /// The kernel's, without the right to BPF or before Linux 5.8.
    pub fn new() -> io::Result<Self> {
        let page = rustix::param::page_size();
        let descriptor = ring(u32::try_from(page).map_err(io::Error::other)?)?;
        let taken = Mapping::part(&descriptor, 0, page, ProtFlags::READ | ProtFlags::WRITE)?;
        let written = Mapping::part(&descriptor, page as u64, page, ProtFlags::READ)?;
        Ok(Self { taken, written, descriptor })
    }

    /// For programs.
    #[must_use]
    pub fn descriptor(&self) -> &OwnedFd {
        &self.descriptor
    }

    /// Takes all records that are there; whether there were any.
    pub fn take(&self) -> bool {
        // Memory that may only be read is only to be loaded relaxed (`std::sync::atomic`).
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
