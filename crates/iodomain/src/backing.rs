//! What a disk is made of: a file, a block device, or a part of one.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::blk::{Limits, SECTOR};

/// How long a file may still be locked by a domain that is gone: the longest time that its last requests take.
const LOCK_PATIENCE: Duration = Duration::from_secs(3);

/// How to open it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackingConfig {
    /// File or block device.
    pub path: PathBuf,
    /// Where the disk begins in it, in bytes.
    pub offset: u64,
    /// How much of it is the disk; the rest when `None`.
    pub size: Option<u64>,
    /// Nobody writes it.
    pub read_only: bool,
    /// Past the host's page cache. Without, the host's memory answers and orders, not the device.
    pub direct: bool,
    /// Others write it too, and that is meant.
    pub shared: bool,
}

impl From<&rtvirtio_iodconfig::Disk> for BackingConfig {
    fn from(disk: &rtvirtio_iodconfig::Disk) -> Self {
        Self {
            path: disk.path.clone(),
            offset: disk.offset.0,
            size: disk.size.map(|s| s.0),
            read_only: disk.read_only,
            direct: !disk.cached,
            shared: disk.shared,
        }
    }
}

/// A disk that is open.
#[derive(Debug)]
pub struct Backing {
    /// What it is read from.
    pub file: File,
    /// Where the disk begins, in bytes.
    pub start: u64,
    /// What a guest may ask of it.
    pub limits: Limits,
    /// Bytes that addresses, lengths and places must be multiples of.
    pub block: u32,
    /// Past the page cache.
    pub direct: bool,
    /// The file system and file, or the block device, that it lies on: two disks with the same one share it.
    pub identity: (u64, u64),
}

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
    /// Somebody else has it.
    #[error("{}: in use by another process; two writers on one image destroy it. Stop the other one, or say `shared = true` if both know of each other", path.display())]
    InUse {
        /// The file.
        path: PathBuf,
    },
}

const BLKGETSIZE64: rustix::ioctl::Opcode = rustix::ioctl::opcode::read::<usize>(0x12, 114);
const BLKSSZGET: rustix::ioctl::Opcode = rustix::ioctl::opcode::none(0x12, 104);

impl Backing {
    /// Opens a disk, and takes the file's lock unless it is shared.
    ///
    /// # Errors
    /// [`BackingError`].
    pub fn open(config: &BackingConfig) -> Result<Self, BackingError> {
        let path = &config.path;
        let io = |what| move |source: io::Error| BackingError::Io { path: path.clone(), what, source };
        let flags = if config.direct { libc::O_DIRECT } else { 0 };
        let file = OpenOptions::new()
            .read(true)
            .write(!config.read_only)
            .custom_flags(flags | libc::O_CLOEXEC)
            .open(path)
            .map_err(io(if config.direct { "cannot open for direct I/O" } else { "cannot open" }))?;
        let meta = file.metadata().map_err(io("cannot read its size"))?;
        let (there, block, identity) = if meta.file_type().is_block_device() {
            let (size, block) = block_geometry(&file).map_err(io("cannot read its size"))?;
            (size, block, (u64::MAX, meta.rdev()))
        } else if meta.is_file() {
            (meta.len(), direct_alignment(&file, config.direct), (meta.dev(), meta.ino()))
        } else {
            return Err(BackingError::Kind { path: path.clone() });
        };
        if !config.shared {
            lock(&file, config.read_only).map_err(|source| match source.kind() {
                io::ErrorKind::WouldBlock => BackingError::InUse { path: path.clone() },
                _ => BackingError::Io { path: path.clone(), what: "cannot lock", source },
            })?;
        }
        let size = match config.size {
            Some(size) => size,
            None => there.saturating_sub(config.offset) / SECTOR * SECTOR,
        };
        let aligned = |what, value: u64, block: u32| {
            if value % u64::from(block) == 0 {
                return Ok(());
            }
            Err(BackingError::Alignment { path: path.clone(), what, value, block })
        };
        aligned("offset", config.offset, block)?;
        aligned("size", size, block.max(SECTOR as u32))?;
        let end = config.offset.saturating_add(size);
        if end > there || size == 0 {
            return Err(BackingError::Short { path: path.clone(), end, there });
        }
        let discard = !config.read_only && can_discard(&file, &meta);
        let limits = Limits { size, read_only: config.read_only, discard };
        Ok(Self { file, start: config.offset, limits, block, direct: config.direct, identity })
    }

    /// Whether two disks lie on the same file or device and overlap there.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        self.identity == other.identity
            && self.start < other.start + other.limits.size
            && other.start < self.start + self.limits.size
    }
}

fn block_geometry(file: &File) -> io::Result<(u64, u32)> {
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
    Ok((size, u32::try_from(block).unwrap_or(512).max(512)))
}

/// What direct I/O on a regular file must be aligned to: what the file system says, or 512.
fn direct_alignment(file: &File, direct: bool) -> u32 {
    if !direct {
        return SECTOR as u32;
    }
    let mut out = std::mem::MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: the file is open, the path is an empty string with AT_EMPTY_PATH, and `out` has room for the answer.
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
    stat.stx_dio_offset_align.max(stat.stx_dio_mem_align).clamp(512, 65_536)
}

/// A file that is only locked, for disks that are parts of it.
pub(crate) fn lock_file(path: &Path, read_only: bool) -> Result<File, BackingError> {
    let io = |what| move |source: io::Error| BackingError::Io { path: path.to_owned(), what, source };
    let file = File::open(path).map_err(io("cannot open"))?;
    lock(&file, read_only).map_err(|source| match source.kind() {
        io::ErrorKind::WouldBlock => BackingError::InUse { path: path.to_owned() },
        _ => io("cannot lock")(source),
    })?;
    Ok(file)
}

/// `flock`: other I/O domains see it, and it goes with the file. QEMU's own locks are of another kind and do not see it, nor it them.
///
/// The lock of a domain that was killed stays until the kernel has ended what it had in its io_uring, which is after the process is gone. That is waited for: a write of the dead one that
/// landed after ours would undo it.
fn lock(file: &File, read_only: bool) -> io::Result<()> {
    use rustix::fs::FlockOperation::{NonBlockingLockExclusive, NonBlockingLockShared};
    let how = if read_only { NonBlockingLockShared } else { NonBlockingLockExclusive };
    let begin = Instant::now();
    loop {
        match rustix::fs::flock(file.as_fd(), how) {
            Err(rustix::io::Errno::WOULDBLOCK) if begin.elapsed() < LOCK_PATIENCE => {
                std::thread::sleep(Duration::from_millis(5));
            }
            other => return other.map_err(Into::into),
        }
    }
}

fn can_discard(file: &File, meta: &std::fs::Metadata) -> bool {
    if meta.file_type().is_block_device() {
        let (major, minor) = (rustix::fs::major(meta.rdev()), rustix::fs::minor(meta.rdev()));
        let dir = Path::new("/sys/dev/block").join(format!("{major}:{minor}"));
        // A partition's queue is its parent's.
        return ["queue", "../queue"].iter().any(|q| {
            std::fs::read_to_string(dir.join(q).join("discard_max_bytes"))
                .is_ok_and(|s| s.trim().parse::<u64>().is_ok_and(|v| v > 0))
        });
    }
    // ext4, xfs, btrfs, tmpfs: those that are known to punch holes.
    rustix::fs::fstatfs(file).is_ok_and(|fs| {
        [0xef53, 0x5846_5342, 0x9123_683e, 0x0102_1994].contains(&(fs.f_type as u64 & 0xffff_ffff))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(size: u64) -> (tempfile::TempDir, BackingConfig) {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = dir.path().join("disk");
        File::create(&path).unwrap().set_len(size).unwrap();
        let config =
            BackingConfig { path, offset: 0, size: None, read_only: false, direct: false, shared: false };
        (dir, config)
    }

    #[test]
    fn a_part_of_a_file() {
        let (_dir, config) = file(1 << 20);
        let b =
            Backing::open(&BackingConfig { offset: 65_536, size: Some(131_072), ..config.clone() }).unwrap();
        assert_eq!((b.start, b.limits.size), (65_536, 131_072));
        let whole = Backing::open(&BackingConfig { shared: true, ..config.clone() }).unwrap();
        assert_eq!(whole.limits.size, 1 << 20);
        assert!(whole.overlaps(&b));
        let rest = BackingConfig { offset: 196_608, shared: true, ..config };
        assert!(!Backing::open(&rest).unwrap().overlaps(&b));
    }

    #[test]
    fn mistakes_are_named() {
        let (_dir, config) = file(1 << 20);
        let long = BackingConfig { offset: 1 << 19, size: Some(1 << 20), ..config.clone() };
        assert!(matches!(Backing::open(&long), Err(BackingError::Short { .. })));
        let odd = BackingConfig { offset: 100, ..config.clone() };
        assert!(matches!(Backing::open(&odd), Err(BackingError::Alignment { .. })));
        let missing = BackingConfig { path: "/nowhere/disk".into(), ..config };
        assert!(Backing::open(&missing).unwrap_err().to_string().contains("/nowhere/disk"));
        let dir = BackingConfig { path: "/".into(), read_only: true, ..missing };
        assert!(Backing::open(&dir).is_err());
    }

    #[test]
    fn a_lock_that_goes_is_waited_for() {
        let (_dir, config) = file(1 << 20);
        let first = Backing::open(&config).unwrap();
        let dying = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(200));
            drop(first);
        });
        assert!(Backing::open(&config).is_ok());
        dying.join().unwrap();
    }

    #[test]
    fn two_writers_are_refused_unless_they_are_meant() {
        let (_dir, config) = file(1 << 20);
        let first = Backing::open(&config).unwrap();
        assert!(matches!(Backing::open(&config), Err(BackingError::InUse { .. })));
        assert!(Backing::open(&BackingConfig { shared: true, ..config.clone() }).is_ok());
        drop(first);
        assert!(Backing::open(&config).is_ok());
    }
}
