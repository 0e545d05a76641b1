//! The backing of a disk: a file, a block device, or a part of one.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

pub use crate::backing_error::BackingError;
use crate::disk_lock::{DiskLock, DiskUse, LOCK_TIMEOUT, identity};

/// Bytes in a sector of virtio-blk, whatever the device's sector size is.
pub const SECTOR: u64 = 512;
/// Largest alignment of direct I/O, in bytes.
pub const LARGEST_BLOCK: u32 = 65_536;

/// Size and operations of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Size of the disk in bytes.
    pub size: u64,
    /// Writes, discards and zeroing are refused.
    pub read_only: bool,
    /// Discards and zeroing are offered.
    pub discard: bool,
}

/// Path, range and mode of a disk's backing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BackingConfig {
    /// File or block device.
    pub path: PathBuf,
    /// Offset of the disk in the file or device, in bytes.
    pub offset: u64,
    /// Size of the disk in bytes; the rest of the file when `None`.
    pub size: Option<u64>,
    /// Opened for reading only.
    pub read_only: bool,
    /// Bypasses the host's page cache (`O_DIRECT`). Otherwise the page cache, not the device,
    /// serves and orders requests.
    pub direct: bool,
    /// Expects other writers: the file is not locked exclusively.
    pub shared: bool,
    /// Block size that the guest sees, in bytes; the device's when `None`.
    pub block_size: Option<u32>,
}

impl From<&rtvirtio_domain_config::Disk> for BackingConfig {
    fn from(disk: &rtvirtio_domain_config::Disk) -> Self {
        Self {
            path: disk.path.clone(),
            offset: disk.offset.0,
            size: disk.size.map(|s| s.0),
            read_only: disk.read_only,
            direct: !disk.cached,
            shared: disk.allows_other_writers(),
            block_size: disk.block_size.map(|size| size.0 as u32),
        }
    }
}

/// The open file of a disk, with the disk's range in it.
#[derive(Debug)]
pub struct Backing {
    /// The file or device.
    pub file: File,
    /// Offset of the disk, in bytes.
    pub start: u64,
    /// Size and operations of the disk.
    pub limits: Limits,
    /// Alignment of memory, offsets and lengths, in bytes.
    pub block: u32,
    /// Block size that the guest sees, in bytes: requests may be smaller than `block`.
    pub guest_block: u32,
    /// Length of the whole file or device, in bytes.
    pub len: u64,
    /// Whether requests bypass the page cache.
    pub direct: bool,
    /// Device and inode of the file, or the number of the block device: disks with the same one
    /// share it.
    pub identity: (u64, u64),
    /// Locks of a disk that is opened alone.
    _lock: Option<DiskLock>,
}

/// Properties of a file or device, measured when it is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Geometry {
    /// Length of the whole file or device, in bytes.
    pub(crate) len: u64,
    /// Alignment of direct I/O, in bytes.
    pub(crate) block: u32,
    /// Whether it supports discards.
    pub(crate) discard: bool,
}

const BLKGETSIZE64: rustix::ioctl::Opcode = rustix::ioctl::opcode::read::<usize>(0x12, 114);
const BLKSSZGET: rustix::ioctl::Opcode = rustix::ioctl::opcode::none(0x12, 104);

impl Backing {
    /// Opens a disk and takes its locks.
    pub fn open(config: &BackingConfig) -> Result<Self, BackingError> {
        let wanted = DiskUse { read_only: config.read_only, shared: config.shared };
        let lock = DiskLock::acquire(&config.path, wanted, LOCK_TIMEOUT)?;
        let opened = Self::open_locked(config, &lock)?;
        Ok(Self { _lock: Some(lock), ..opened })
    }

    /// Opens a disk whose file is locked.
    pub(crate) fn open_locked(config: &BackingConfig, lock: &DiskLock) -> Result<Self, BackingError> {
        let path = &config.path;
        let io = |what| move |source: io::Error| BackingError::Io { path: path.clone(), what, source };
        let flags = if config.direct { libc::O_DIRECT } else { 0 };
        // disk
        let file = OpenOptions::new()
            .read(true)
            .write(!config.read_only)
            .custom_flags(flags | libc::O_CLOEXEC)
            .open(path)
            .map_err(io(if config.direct { "cannot open for direct I/O" } else { "cannot open" }))?;
        let meta = file.metadata().map_err(io("cannot read its size"))?;
        if identity(&meta) != lock.identity {
            return Err(BackingError::Replaced { path: path.clone() });
        }
        let (len, block) = if meta.file_type().is_block_device() {
            block_geometry(&file).map_err(io("cannot read its size"))?
        } else if meta.is_file() {
            (meta.len(), direct_alignment(&file, config.direct))
        } else {
            return Err(BackingError::Kind { path: path.clone() });
        };
        lock.extend(&file).map_err(io("cannot lock"))?;
        let discard = !config.read_only && can_discard(&file, &meta);
        Self::with_geometry(config, file, Geometry { len, block, discard })
    }

    /// A disk on an open file with a known geometry.
    pub(crate) fn with_geometry(
        config: &BackingConfig,
        file: File,
        geometry: Geometry,
    ) -> Result<Self, BackingError> {
        let path = &config.path;
        let io = |what| move |source: io::Error| BackingError::Io { path: path.clone(), what, source };
        let meta = file.metadata().map_err(io("cannot read its size"))?;
        let Geometry { len, block, discard } = geometry;
        let guest_block = config.block_size.unwrap_or(block);
        if !meta.is_file() && !meta.file_type().is_block_device() {
            return Err(BackingError::Kind { path: path.clone() });
        }
        if len < SECTOR {
            return Err(BackingError::TooShort { path: path.clone(), len });
        }
        if len % SECTOR != 0 && config.size.is_none() {
            return Err(BackingError::Length { path: path.clone(), len });
        }
        let size = match config.size {
            Some(size) => size,
            None => len.saturating_sub(config.offset) / SECTOR * SECTOR,
        };
        let aligned = |what, value: u64, block: u32| {
            if value % u64::from(block) == 0 {
                return Ok(());
            }
            Err(BackingError::Alignment { path: path.clone(), what, value, block })
        };
        aligned("offset", config.offset, block)?;
        aligned("size", size, block.max(SECTOR as u32))?;
        aligned("size", size, guest_block.max(SECTOR as u32))?;
        if config.shared && !config.read_only && config.direct && guest_block < block {
            return Err(BackingError::SharedBlocks { path: path.clone(), block });
        }
        let end = config.offset.saturating_add(size);
        if end > len || size == 0 {
            return Err(BackingError::Short { path: path.clone(), end, len });
        }
        let limits = Limits { size, read_only: config.read_only, discard: discard && !config.read_only };
        let (start, direct, identity) = (config.offset, config.direct, identity(&meta));
        Ok(Self { file, start, limits, block, guest_block, len, direct, identity, _lock: None })
    }

    /// Whether the guest's requests may be parts of the device's blocks.
    #[must_use]
    pub fn has_partial_blocks(&self) -> bool {
        self.guest_block < self.block
    }

    /// Whether two disks lie on the same file or device and overlap there.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        self.identity == other.identity
            && self.start < other.start + other.limits.size
            && other.start < self.start + self.limits.size
    }
}

pub(crate) fn block_geometry(file: &File) -> io::Result<(u64, u32)> {
    // SAFETY: BLKGETSIZE64 writes a u64; the type says so.
    let size: u64 = unsafe {
        let get = rustix::ioctl::Getter::<BLKGETSIZE64, u64>::new();
        rustix::ioctl::ioctl(file, get)?
    };
    // SAFETY: BLKSSZGET writes an int.
    let block: libc::c_int = unsafe {
        let get = rustix::ioctl::Getter::<BLKSSZGET, libc::c_int>::new();
        rustix::ioctl::ioctl(file, get)?
    };
    Ok((size, u32::try_from(block).unwrap_or(512).clamp(512, LARGEST_BLOCK)))
}

/// Alignment of direct I/O on a regular file: as the file system reports, or 512.
pub(crate) fn direct_alignment(file: &File, direct: bool) -> u32 {
    if !direct {
        return SECTOR as u32;
    }
    let mut out = std::mem::MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: the file is open, the path is an empty string with AT_EMPTY_PATH, and `out` has room
    // for the answer.
    let done = unsafe {
        libc::statx(
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            out.as_mut_ptr(),
        )
    };
    // SAFETY: all bytes were zero before the call, which is a valid value of the type.
    let stat = unsafe { out.assume_init() };
    if done != 0 || stat.stx_mask & libc::STATX_DIOALIGN == 0 {
        return SECTOR as u32;
    }
    stat.stx_dio_offset_align.max(stat.stx_dio_mem_align).clamp(512, LARGEST_BLOCK)
}

fn can_discard(file: &File, meta: &std::fs::Metadata) -> bool {
    if meta.file_type().is_block_device() {
        let (major, minor) = (rustix::fs::major(meta.rdev()), rustix::fs::minor(meta.rdev()));
        let dir = Path::new("/sys/dev/block").join(format!("{major}:{minor}"));
        // A partition uses its parent's queue.
        return ["queue", "../queue"].iter().any(|q| {
            // kernel file
            std::fs::read_to_string(dir.join(q).join("discard_max_bytes"))
                .is_ok_and(|s| s.trim().parse::<u64>().is_ok_and(|v| v > 0))
        });
    }
    // ext4, xfs, btrfs, tmpfs: known to support hole punching.
    rustix::fs::fstatfs(file).is_ok_and(|fs| {
        [0xef53, 0x5846_5342, 0x9123_683e, 0x0102_1994].contains(&(fs.f_type as u64 & 0xffff_ffff))
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn backing_file(size: u64) -> (tempfile::TempDir, BackingConfig) {
        let dir = rtvirtio_testkit::disk_dir().unwrap();
        let path = dir.path().join("disk");
        File::create(&path).unwrap().set_len(size).unwrap();
        (dir, BackingConfig { path, ..BackingConfig::default() })
    }

    #[test]
    fn a_part_of_a_file() {
        let (_dir, config) = backing_file(1 << 20);
        let config = BackingConfig { shared: true, ..config };
        let b =
            Backing::open(&BackingConfig { offset: 65_536, size: Some(131_072), ..config.clone() }).unwrap();
        assert_eq!((b.start, b.limits.size), (65_536, 131_072));
        let whole = Backing::open(&config).unwrap();
        assert_eq!(whole.limits.size, 1 << 20);
        assert!(whole.overlaps(&b));
        let rest = BackingConfig { offset: 196_608, ..config };
        assert!(!Backing::open(&rest).unwrap().overlaps(&b));
    }

    #[test]
    fn invalid_backings_are_refused() {
        let (_dir, config) = backing_file(1 << 20);
        let long = BackingConfig { offset: 1 << 19, size: Some(1 << 20), ..config.clone() };
        assert!(matches!(Backing::open(&long), Err(BackingError::Short { .. })));
        let odd = BackingConfig { offset: 100, ..config.clone() };
        assert!(matches!(Backing::open(&odd), Err(BackingError::Alignment { .. })));
        let with_length = |len: u64| {
            OpenOptions::new().write(true).open(&config.path).unwrap().set_len(len).unwrap();
            Backing::open(&config).unwrap_err()
        };
        assert!(matches!(with_length(1_000), BackingError::Length { len: 1_000, .. }));
        assert!(with_length(1_000).to_string().contains("the last 488 bytes would be lost"));
        assert!(matches!(with_length(100), BackingError::TooShort { len: 100, .. }));
        assert!(matches!(with_length(0), BackingError::TooShort { len: 0, .. }));
        OpenOptions::new().write(true).open(&config.path).unwrap().set_len(1_000).unwrap();
        let sized = BackingConfig { size: Some(512), ..config.clone() };
        assert_eq!(Backing::open(&sized).unwrap().limits.size, 512);
        let missing = BackingConfig { path: "/nowhere/disk".into(), ..config };
        let missing_error = Backing::open(&missing).unwrap_err();
        assert!(
            matches!(&missing_error, BackingError::Io { path, source, .. }
                if path == &missing.path && source.kind() == io::ErrorKind::NotFound),
            "{missing_error}"
        );
        let dir = BackingConfig { path: "/".into(), read_only: true, ..missing };
        assert!(matches!(Backing::open(&dir), Err(BackingError::Kind { .. })));
    }

    #[test]
    fn a_lock_of_a_dying_process_is_waited_for() {
        let (_dir, config) = backing_file(1 << 20);
        let first = Backing::open(&config).unwrap();
        let dying = std::thread::spawn(move || {
            // Much shorter than `LOCK_TIMEOUT`.
            std::thread::sleep(Duration::from_millis(50));
            drop(first);
        });
        assert!(Backing::open(&config).is_ok());
        dying.join().unwrap();
    }

    #[test]
    fn two_writers_are_refused_unless_shared() {
        let (_dir, config) = backing_file(1 << 20);
        let first = Backing::open(&config).unwrap();
        assert!(matches!(Backing::open(&config), Err(BackingError::InUse { .. })));
        let shared = BackingConfig { shared: true, ..config.clone() };
        assert!(Backing::open(&shared).is_err(), "one of them is not declared `shared`");
        drop(first);
        let first = Backing::open(&shared).unwrap();
        assert!(Backing::open(&shared).is_ok());
        assert!(Backing::open(&config).is_err());
        drop(first);
        assert!(Backing::open(&config).is_ok());
    }
}
