//! Why a disk cannot be served.

use std::io;
use std::path::PathBuf;

use rtvirtio_kernel::HostError;

/// Why a disk cannot be served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackingError {
    /// A system call.
    #[error("{}: {what}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What failed.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
    /// The part does not lie in the file.
    #[error("{}: the disk would end at byte {end}, and the file has {there}", path.display())]
    Short {
        /// The file.
        path: PathBuf,
        /// Where the disk would end.
        end: u64,
        /// What there is.
        there: u64,
    },
    /// Not a multiple of the block size.
    #[error("{}: {what} {value} is not a multiple of the {block}-byte blocks", path.display())]
    Alignment {
        /// The file.
        path: PathBuf,
        /// Which number.
        what: &'static str,
        /// As given.
        value: u64,
        /// The block size.
        block: u32,
    },
    /// Neither a file nor a block device.
    #[error("{}: neither a regular file nor a block device", path.display())]
    Kind {
        /// The file.
        path: PathBuf,
    },
    /// It is used by something else.
    #[error("{}: in use, and two writers on one image destroy it: {by}. Stop the other one, or say `shared = true` if both know of each other", path.display())]
    InUse {
        /// The file.
        path: PathBuf,
        /// What uses it, in words.
        by: String,
        /// The processes among it that were seen.
        processes: Vec<u32>,
    },
    /// Less than a disk.
    #[error("{}: it has {there} bytes, less than one sector of 512", path.display())]
    TooShort {
        /// The file.
        path: PathBuf,
        /// Its length.
        there: u64,
    },
    /// Not a whole number of sectors.
    #[error("{}: its length of {there} bytes is no multiple of 512, so the last {} bytes would be lost; is it a raw image? Make it longer (`truncate -s %512`), or give the disk a `size`", path.display(), there % 512)]
    Length {
        /// The file.
        path: PathBuf,
        /// Its length.
        there: u64,
    },
    /// It is the container of another format.
    #[error("{}: it is an image of format {format}, and disks are served raw: the guest would see the container and destroy it. Make a raw copy (`qemu-img convert -O raw`; unpack a compressed file), or say `format = \"raw\"` for a raw disk whose guest has written such bytes", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// Which.
        format: &'static str,
    },
    /// Another file has taken its place between two looks.
    #[error("{}: it was replaced while it was opened; start again", path.display())]
    Replaced {
        /// The file.
        path: PathBuf,
    },
    /// The machine cannot be read.
    #[error(transparent)]
    Host(#[from] HostError),
}
