//! The descriptor by which a guest announces new requests.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};

/// A kick descriptor.
#[derive(Debug)]
pub struct Kick {
    file: File,
    /// Whether it is a socket or pipe, which is read: it would be full some day. An eventfd is only
    /// polled.
    is_stream: bool,
}

impl Kick {
    /// A socket or pipe, of a front end that is trusted.
    #[must_use]
    pub fn stream(file: File) -> Self {
        Self { file, is_stream: true }
    }

    /// The descriptor, for the kernel to wait at.
    pub(crate) fn fd(&self) -> KickFd {
        KickFd { fd: self.file.as_raw_fd(), is_stream: self.is_stream }
    }

    /// Duplicates the descriptor.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { file: self.file.try_clone()?, is_stream: self.is_stream })
    }
}

/// An eventfd.
impl From<File> for Kick {
    fn from(file: File) -> Self {
        Self { file, is_stream: false }
    }
}

/// The descriptor of a [`Kick`] that stays open.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KickFd {
    pub(crate) fd: RawFd,
    pub(crate) is_stream: bool,
}
