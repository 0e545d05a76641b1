//! Locks of a file or block device, exclusive or shared as configured.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rtvirtio_kernel::holders::image_lock::{Sharing, hold_image, lock_image};
use rtvirtio_kernel::{Holder, Holders};
use rustix::fs::FlockOperation::{NonBlockingLockExclusive, NonBlockingLockShared};
use rustix::io::Errno;

use crate::backing_error::BackingError;
use crate::image_format;

/// Longest wait for the locks of a dead I/O domain: its last requests hold them.
pub const LOCK_TIMEOUT: Duration = Duration::from_secs(3);

/// Device and inode of a file, or the number of a block device: disks with the same one share it.
pub type Identity = (u64, u64);

/// The identity of an open file or device.
#[must_use]
pub fn identity(meta: &std::fs::Metadata) -> Identity {
    if meta.file_type().is_block_device() { (u64::MAX, meta.rdev()) } else { (meta.dev(), meta.ino()) }
}

/// Access of a file's disks, for the kind of the locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskUse {
    /// Whether no disk on the file is writable.
    pub read_only: bool,
    /// Whether other writers are expected.
    pub shared: bool,
}

impl DiskUse {
    fn sharing(self) -> Sharing {
        Sharing { writes: !self.read_only, others_write: self.shared }
    }
}

/// The locks on one file or device. There are three kinds, because no other program checks all of
/// them: `O_EXCL` (mounts, device mapper, other exclusive users), `flock` (other I/O domains), and
/// QEMU's image locks.
#[derive(Debug)]
pub struct DiskLock {
    path: PathBuf,
    file: File,
    held: Option<DiskUse>,
    /// The locked file or device.
    pub identity: Identity,
}

/// User of the file that prevents a lock.
enum Busy {
    Kernel(Vec<Holder>),
    Exclusive,
    Flock,
    Image,
}

impl DiskLock {
    /// Takes all locks; waits up to `timeout` for those of a dead process, which stay until the
    /// kernel has completed its io_uring requests. A late write of the dead process would overwrite
    /// newer data.
    pub(crate) fn acquire(path: &Path, wanted: DiskUse, timeout: Duration) -> Result<Self, BackingError> {
        let begin = Instant::now();
        loop {
            let busy = match Self::try_acquire(path, wanted)? {
                Ok(lock) => return Ok(lock),
                Err(busy) => busy,
            };
            if begin.elapsed() >= timeout {
                return Err(in_use(path, busy));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn try_acquire(path: &Path, wanted: DiskUse) -> Result<Result<Self, Busy>, BackingError> {
        let io = |what| move |source: io::Error| BackingError::Io { path: path.to_owned(), what, source };
        let meta = std::fs::metadata(path).map_err(io("cannot inspect it"))?;
        let is_block = meta.file_type().is_block_device();
        if !is_block && !meta.is_file() {
            return Err(BackingError::Kind { path: path.to_owned() });
        }
        let exclusive = is_block && !wanted.shared;
        let flags = if exclusive { libc::O_EXCL } else { 0 };
        // disk
        let file = match OpenOptions::new().read(true).custom_flags(flags | libc::O_CLOEXEC).open(path) {
            Err(e) if exclusive && e.raw_os_error() == Some(libc::EBUSY) => return Ok(Err(Busy::Exclusive)),
            other => other.map_err(io("cannot open"))?,
        };
        if !wanted.shared {
            let how = if wanted.read_only { NonBlockingLockShared } else { NonBlockingLockExclusive };
            match rustix::fs::flock(&file, how) {
                Err(Errno::WOULDBLOCK) => return Ok(Err(Busy::Flock)),
                other => other.map_err(|e| io("cannot lock")(e.into()))?,
            }
        }
        let locked = lock_image(&file, wanted.sharing()).map_err(io("cannot lock"))?;
        if locked.is_err() {
            return Ok(Err(Busy::Image));
        }
        // Kernel users, also of a shared device and of a file below a loop device.
        let mut holders = Holders::of_kernel(path)?;
        if wanted.shared {
            // `shared` covers loop devices, but no mounts on them.
            holders.retain(|holder| !matches!(holder, Holder::Loop { .. }));
        }
        if !holders.is_empty() {
            return Ok(Err(Busy::Kernel(holders)));
        }
        let identity = identity(&file.metadata().map_err(io("cannot inspect it"))?);
        Ok(Ok(Self { path: path.to_owned(), file, held: Some(wanted), identity }))
    }

    /// Opens without locks, to check the disks of a running I/O domain.
    pub(crate) fn open_unlocked(path: &Path) -> Result<Self, BackingError> {
        let io = |what| move |source: io::Error| BackingError::Io { path: path.to_owned(), what, source };
        // disk
        let opened = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
        let file = opened.map_err(io("cannot open"))?;
        let identity = identity(&file.metadata().map_err(io("cannot inspect it"))?);
        Ok(Self { path: path.to_owned(), file, held: None, identity })
    }

    /// Takes over the locks of another process, which come with its open file.
    pub(crate) fn adopt(path: &Path, file: File, held: DiskUse) -> io::Result<Self> {
        let identity = identity(&file.metadata()?);
        Ok(Self { path: path.to_owned(), file, held: Some(held), identity })
    }

    /// Open file that holds the locks, for another process.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Access under the locks; `None` without locks.
    #[must_use]
    pub fn held(&self) -> Option<DiskUse> {
        self.held
    }

    pub(crate) fn is_held(&self) -> bool {
        self.held.is_some()
    }

    /// Length of the file or device, in bytes.
    pub(crate) fn len(&self) -> Result<u64, BackingError> {
        let io = |source| BackingError::Io { path: self.path.clone(), what: "cannot read its size", source };
        (&self.file).seek(SeekFrom::End(0)).map_err(io)
    }

    /// Locks another open file of the same disk, so that the locks last until its last io_uring
    /// request completes.
    pub(crate) fn extend(&self, file: &File) -> io::Result<()> {
        match self.held {
            Some(held) if !held.shared => hold_image(file, held.sharing()),
            _ => Ok(()),
        }
    }

    /// Refuses the signature of an image format at a disk's start, and before `end` if given.
    pub(crate) fn refuse_format(&self, start: u64, end: Option<u64>) -> Result<(), BackingError> {
        let io = |source| BackingError::Io { path: self.path.clone(), what: "cannot read", source };
        let mut found = image_format::at_start(&self.file, start).map_err(io)?;
        if let (None, Some(end)) = (found, end) {
            found = image_format::at_end(&self.file, end).map_err(io)?;
        }
        match found {
            Some(format) => Err(BackingError::Format { path: self.path.clone(), format }),
            None => Ok(()),
        }
    }
}

/// Names the user that holds the file, as far as it is visible.
fn in_use(path: &Path, busy: Busy) -> BackingError {
    let (held, seen) = match busy {
        Busy::Kernel(holders) => {
            let list: Vec<String> = holders.iter().map(Holder::to_string).collect();
            return BackingError::InUse { path: path.to_owned(), by: list.join("; "), processes: Vec::new() };
        }
        Busy::Exclusive => ("another user has it exclusively", Holders::find(path, &[])),
        Busy::Flock => ("another process has locked it (flock)", Holders::find(path, &[])),
        Busy::Image => ("another process has QEMU's image locks on it", Holders::find(path, &[])),
    };
    let seen = seen.unwrap_or_default();
    let processes = seen.found.iter().filter_map(|h| match h {
        Holder::Process { pid, .. } => Some(*pid),
        _ => None,
    });
    let processes = processes.collect();
    let by = if seen.found.is_empty() { held.to_owned() } else { format!("{held}: {}", seen.describe()) };
    BackingError::InUse { path: path.to_owned(), by, processes }
}
