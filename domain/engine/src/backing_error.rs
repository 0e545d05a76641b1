//! Why a disk cannot be served.

use std::io;
use std::path::PathBuf;

use rtvirtio_kernel::HostError;

/// Why a disk cannot be served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackingError {
    /// A system call failed.
    #[error("{}: {what}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What failed.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
    /// The disk ends beyond its file.
    #[error("{}: the disk would end at byte {end}, and the file has {len}", path.display())]
    Short {
        /// The file.
        path: PathBuf,
        /// Where the disk would end, in bytes.
        end: u64,
        /// Length of the file, in bytes.
        len: u64,
    },
    /// Not a multiple of the block size.
    #[error("{}: {what} {value} is not a multiple of the {block}-byte blocks", path.display())]
    Alignment {
        /// The file.
        path: PathBuf,
        /// Which number.
        what: &'static str,
        /// The value.
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
    /// Another user holds it.
    #[error("{}: in use, and two writers on one image destroy it: {by}. Stop the other one, or set `shared = true` if both coordinate their writes", path.display())]
    InUse {
        /// The file.
        path: PathBuf,
        /// The user, in words.
        by: String,
        /// Its processes, as far as they are visible.
        processes: Vec<u32>,
    },
    /// Smaller than a sector.
    #[error("{}: it has {len} bytes, less than one sector of 512", path.display())]
    TooShort {
        /// The file.
        path: PathBuf,
        /// Its length, in bytes.
        len: u64,
    },
    /// Not a whole number of sectors.
    #[error("{}: its length of {len} bytes is no multiple of 512, so the last {} bytes would be lost; is it a raw image? Make it longer (`truncate -s %512`), or give the disk a `size`", path.display(), len % 512)]
    Length {
        /// The file.
        path: PathBuf,
        /// Its length, in bytes.
        len: u64,
    },
    /// An image of another format.
    #[error("{}: it is an image of format {format}, and disks are served raw: the guest would see the container and destroy it. Make a raw copy (`qemu-img convert -O raw`; unpack a compressed file), or set `format = \"raw\"` for a raw disk whose guest has written such bytes", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// Which.
        format: &'static str,
    },
    /// The path leads to another file than the locked one.
    #[error("{}: it was replaced while it was opened; start again", path.display())]
    Replaced {
        /// The file.
        path: PathBuf,
    },
    /// The host's state cannot be read.
    #[error(transparent)]
    Host(#[from] HostError),
}
