//! Errors of a disk's backing.

use std::io;
use std::path::PathBuf;

use rtvirtio_kernel::HostError;

/// Causes for which a disk cannot be served; `path` is that of its file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackingError {
    /// A system call failed.
    #[error("{}: {what}: {source}", path.display())]
    Io {
        path: PathBuf,
        /// Operation that failed, with its verb.
        what: &'static str,
        source: io::Error,
    },
    /// The disk ends beyond its file.
    #[error("{}: the disk would end at byte {end}, and the file has {len}", path.display())]
    Short {
        path: PathBuf,
        /// End of the disk in the file, in bytes.
        end: u64,
        len: u64,
    },
    /// Not a multiple of the block size.
    #[error("{}: {what} {value} is not a multiple of the {block}-byte blocks", path.display())]
    Alignment {
        path: PathBuf,
        /// Name of the value, `offset` or `size`.
        what: &'static str,
        /// The value in bytes.
        value: u64,
        /// Block size in bytes.
        block: u32,
    },
    /// Writes of parts of blocks beside those of other programs.
    #[error("{}: other programs write it too (`shared`), so its blocks of {block} bytes cannot be written in parts: without `block_size`, or with `cached = true`", path.display())]
    SharedBlocks {
        path: PathBuf,
        /// Block size of the device, in bytes.
        block: u32,
    },
    /// Neither a file nor a block device.
    #[error("{}: neither a regular file nor a block device", path.display())]
    Kind { path: PathBuf },
    /// The file is open or locked by another user.
    #[error("{}: in use, and two writers on one image destroy it: {by}. Stop the other one, or set `shared = true` if both coordinate their writes", path.display())]
    InUse {
        path: PathBuf,
        /// The user, in words; several separated by semicolons.
        by: String,
        /// Processes that use the file, as far as they are visible.
        processes: Vec<u32>,
    },
    /// Shorter than one sector of 512 bytes.
    #[error("{}: it has {len} bytes, less than one sector of 512", path.display())]
    TooShort { path: PathBuf, len: u64 },
    /// Not a whole number of sectors.
    #[error("{}: its length of {len} bytes is no multiple of 512, so the last {} bytes would be lost; is it a raw image? Make it longer (`truncate -s %512`), or give the disk a `size`", path.display(), len % 512)]
    Length { path: PathBuf, len: u64 },
    /// An image of another format.
    #[error("{}: it is an image of format {format}, and disks are served raw: the guest would see the container and destroy it. Make a raw copy (`qemu-img convert -O raw`; unpack a compressed file), or set `format = \"raw\"` for a raw disk whose guest has written such bytes", path.display())]
    Format {
        path: PathBuf,
        /// Name of the image format.
        format: &'static str,
    },
    /// The path leads to another file than the locked one.
    #[error("{}: it was replaced while it was opened; start again", path.display())]
    Replaced { path: PathBuf },
    /// The host's state cannot be read.
    #[error(transparent)]
    Host(#[from] HostError),
}
