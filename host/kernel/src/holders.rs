//! Users of a block device or a file, and the claim that has to be taken before its data is
//! overwritten.
//!
//! The same bytes can be reached by several names: a disk and its partitions, a device-mapper or md
//! device above it, a loop device and its backing file. All of them are checked for processes that
//! have them open, mounts, swap space, devices above, and the locks of QEMU ([`image_lock`]) and of
//! `flock`.

pub mod image_lock;
mod processes;
mod target;

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use rustix::io::Errno;

use self::image_lock::{Sharing, lock_image};
use self::target::Target;
use crate::HostError;

/// Time within which a transient holder, such as udev's `blkid`, may go.
const TRANSIENT_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(100);

/// User of a device or file.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Holder {
    /// A process has it open or mapped.
    Process {
        /// Process id of the holder.
        pid: u32,
        /// Name of its program, as in `/proc/PID/comm`.
        program: String,
        /// Path that it has open: `/dev/loop0`, a partition, an image.
        what: String,
        /// Whether it may write by that descriptor.
        writes: bool,
    },
    /// A file system on it is mounted.
    Mount {
        /// Device of the file system.
        device: String,
        /// Mount point of the file system.
        point: PathBuf,
    },
    /// The device or file is swap space.
    Swap {
        /// Path of the device or file.
        what: String,
    },
    /// A device-mapper, md or other device is built on it.
    Stacked {
        /// Device that is a part of the other one.
        device: String,
        /// Device that is built on it.
        by: String,
    },
    /// A loop device shows the same bytes.
    Loop {
        /// Backing file of the loop device.
        file: String,
        /// Path of the loop device.
        device: String,
    },
    /// The kernel refuses an exclusive open, and no other holder explains it.
    Exclusive {
        /// Path of the device.
        device: String,
    },
    /// An open file of another process has locked it by `flock`, as `rtvirtio-iod` does.
    FileLock {
        /// Path of the device or file.
        what: String,
    },
    /// An open file of another process has QEMU's image locks on it.
    ImageLock {
        /// Path of the device or file.
        what: String,
    },
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process { pid, program, what, writes } => {
                let how = if *writes { "for writing" } else { "for reading" };
                write!(f, "process {pid} ({program}) has {what} open {how}")
            }
            Self::Mount { device, point } => write!(f, "{device} is mounted on {}", point.display()),
            Self::Swap { what } => write!(f, "{what} is swap space"),
            Self::Stacked { device, by } => write!(f, "{device} is part of {by}"),
            Self::Loop { file, device } => {
                write!(f, "{file} is the backing file of {device} (`losetup -d {device}` detaches it)")
            }
            Self::Exclusive { device } => write!(f, "the kernel or another process has {device} exclusively"),
            Self::FileLock { what } => write!(f, "another process has locked {what} (flock)"),
            Self::ImageLock { what } => write!(f, "another process has QEMU's image locks on {what}"),
        }
    }
}

/// Process whose open files cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unseen {
    /// Process id in this namespace.
    pub pid: u32,
    /// Name of its program, `?` if unknown.
    pub program: String,
}

/// All users of a device or file, as far as they are visible.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holders {
    /// Users that were found.
    pub found: Vec<Holder>,
    /// Processes that could not be inspected: any of them may use it.
    pub unseen: Vec<Unseen>,
}

impl Holders {
    /// Searches this machine. Processes of `except`, and this one, do not count.
    pub fn find(path: &Path, except: &[u32]) -> Result<Self, HostError> {
        let target = Target::find(path)?;
        let mut found = target.kernel_uses()?;
        let unseen = processes::holding(&target, except, &mut found)?;
        Ok(Self { found, unseen })
    }

    /// Users in the kernel: mounts, swap, devices above, loop devices. Needs no privileges, and
    /// finds no processes.
    pub fn of_kernel(path: &Path) -> Result<Vec<Holder>, HostError> {
        Target::find(path)?.kernel_uses()
    }

    /// All users, and the processes that could not be inspected, in one line; empty for none.
    #[must_use]
    pub fn describe(&self) -> String {
        let found = self.found.iter().map(Holder::to_string);
        found.chain(describe_unseen(&self.unseen)).collect::<Vec<_>>().join("; ")
    }
}

/// Sentence on processes that could not be inspected, for users; `None` when there are none.
#[must_use]
pub fn describe_unseen(unseen: &[Unseen]) -> Option<String> {
    const NAMED: usize = 3;
    let mut names: Vec<String> =
        unseen.iter().take(NAMED).map(|u| format!("{} ({})", u.pid, u.program)).collect();
    if unseen.len() > NAMED {
        names.push("...".into());
    }
    let remedy = if rustix::process::geteuid().is_root() {
        "they have privileges that this process lacks, so run outside of the container, or look by yourself"
    } else {
        "run as root"
    };
    (!unseen.is_empty()).then(|| {
        format!("cannot see the open files of {} processes: {}; {remedy}", unseen.len(), names.join(", "))
    })
}

/// Reason why a device or file may not be overwritten.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClaimError {
    /// The device or file is in use.
    #[error(
        "{} is in use, and writing to it would destroy data: {}. Stop what uses it first, or choose another device",
        path.display(),
        describe(holders)
    )]
    InUse {
        path: PathBuf,
        /// Users that were found.
        holders: Vec<Holder>,
    },
    /// Some processes cannot be inspected.
    #[error(
        "it is not known whether {} is in use: {}",
        path.display(),
        describe_unseen(processes).unwrap_or_default()
    )]
    Unseen {
        path: PathBuf,
        /// Processes whose open files cannot be read.
        processes: Vec<Unseen>,
    },
    /// Opening or locking it failed.
    #[error("{}: cannot {what}: {source}", path.display())]
    Io {
        path: PathBuf,
        /// Operation that failed, such as `open it`.
        what: &'static str,
        source: io::Error,
    },
    /// The machine cannot be read.
    #[error(transparent)]
    Host(#[from] HostError),
}

fn describe(holders: &[Holder]) -> String {
    holders.iter().map(Holder::to_string).collect::<Vec<_>>().join("; ")
}

/// Exclusive claim on a device or file. While this lives, a mount, another exclusive open, a QEMU
/// with its default locking and another I/O domain are refused.
#[derive(Debug)]
pub struct Claim {
    path: PathBuf,
    _file: File,
    unseen: Vec<Unseen>,
}

impl Claim {
    /// Claims a device or file, to be called right before its data is overwritten. Holders that go
    /// within 2 s are waited for. Processes of `except` may have it open; they must not have locked
    /// it.
    ///
    /// Without root, processes that cannot be inspected are an error. Root may lack a privilege of
    /// one of them, as in a container: then [`Self::unseen`] names them.
    ///
    /// # Errors
    /// [`ClaimError`]; nothing is held then.
    pub fn take(path: &Path, except: &[u32]) -> Result<Self, ClaimError> {
        let begin = Instant::now();
        loop {
            let holders = match Self::try_take(path, except)? {
                Ok(claim) => return Ok(claim),
                Err(holders) => holders,
            };
            if begin.elapsed() >= TRANSIENT_TIMEOUT {
                return Err(ClaimError::InUse { path: path.to_owned(), holders });
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn try_take(path: &Path, except: &[u32]) -> Result<Result<Self, Vec<Holder>>, ClaimError> {
        let look = || -> Result<Holders, ClaimError> {
            let holders = Holders::find(path, except)?;
            let is_root = rustix::process::geteuid().is_root();
            if holders.found.is_empty() && !holders.unseen.is_empty() && !is_root {
                return Err(ClaimError::Unseen { path: path.to_owned(), processes: holders.unseen });
            }
            Ok(holders)
        };
        let before = look()?;
        if !before.found.is_empty() {
            return Ok(Err(before.found));
        }
        let file = match exclusive(path)? {
            Ok(file) => file,
            Err(holder) => return Ok(Err(vec![holder])),
        };
        // Processes that have opened it meanwhile, without a lock.
        let Holders { found, unseen } = look()?;
        let path = path.to_owned();
        Ok(if found.is_empty() { Ok(Self { path, _file: file, unseen }) } else { Err(found) })
    }

    /// Claims a device that this program has made itself, such as a lab's, whose content may be
    /// lost whichever process has it open: only a mount or another exclusive use is refused.
    ///
    /// # Errors
    /// [`ClaimError`]; nothing is held then.
    pub fn of_made(path: &Path) -> Result<Self, ClaimError> {
        match open_exclusively(path)? {
            Ok(file) => Ok(Self { path: path.to_owned(), _file: file, unseen: Vec::new() }),
            Err(holder) => Err(ClaimError::InUse { path: path.to_owned(), holders: vec![holder] }),
        }
    }

    /// Path of the claimed device or file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Processes that could not be inspected, for a warning ([`describe_unseen`]).
    #[must_use]
    pub fn unseen(&self) -> &[Unseen] {
        &self.unseen
    }
}

fn failed<'a>(path: &'a Path, what: &'static str) -> impl FnOnce(io::Error) -> ClaimError + 'a {
    move |source| ClaimError::Io { path: path.to_owned(), what, source }
}

/// Opens it exclusively (block devices), and takes `flock` and QEMU's locks.
fn exclusive(path: &Path) -> Result<Result<File, Holder>, ClaimError> {
    let what = path.display().to_string();
    let file = match open_exclusively(path)? {
        Ok(file) => file,
        holder => return Ok(holder),
    };
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => return Ok(Err(Holder::FileLock { what })),
        other => other.map_err(|e| failed(path, "lock it")(e.into()))?,
    }
    let sharing = Sharing { writes: true, others_write: false };
    let locked = lock_image(&file, sharing).map_err(failed(path, "lock it"))?;
    Ok(if locked.is_ok() { Ok(file) } else { Err(Holder::ImageLock { what }) })
}

fn open_exclusively(path: &Path) -> Result<Result<File, Holder>, ClaimError> {
    let meta = std::fs::metadata(path).map_err(failed(path, "inspect it"))?;
    // Without O_CREAT, O_EXCL claims a block device: a mount or another claim is refused (open(2)).
    let flags = if meta.file_type().is_block_device() { libc::O_EXCL } else { 0 };
    // For reading: closing a block device that was open for writing makes udev probe it.
    // disk
    match OpenOptions::new().read(true).custom_flags(flags | libc::O_NONBLOCK).open(path) {
        Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {
            Ok(Err(Holder::Exclusive { device: path.display().to_string() }))
        }
        other => other.map(Ok).map_err(failed(path, "open it")),
    }
}

#[cfg(test)]
mod tests;
