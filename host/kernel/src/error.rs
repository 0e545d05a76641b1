//! What can go wrong at the edge, always with the path and a remedy.

use std::io;
use std::path::PathBuf;

use rustix::io::Errno;

/// A failed look at, or change of, the host.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// A file could not be read.
    #[error("cannot read {path}: {source}{}", hint(source))]
    Read {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// A file could not be written.
    #[error("cannot write `{value}` to {path}: {source}{}", hint(source))]
    Write {
        /// The file.
        path: PathBuf,
        /// What was to be written.
        value: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// A directory could not be made or removed.
    #[error("cannot {action} {path}: {source}{}", hint(source))]
    Directory {
        /// `create` or `remove`.
        action: &'static str,
        /// The directory.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// A file holds something that is not understood.
    #[error("{path} holds `{text}`, which is not {expected}; please report this kernel's form")]
    Form {
        /// The file.
        path: PathBuf,
        /// Its content, shortened.
        text: String,
        /// What was expected.
        expected: &'static str,
    },
    /// No such block device.
    #[error("no block device `{name}`: {why}; `lsblk` lists those that exist")]
    NoDevice {
        /// The name as given.
        name: String,
        /// What was looked for.
        why: String,
    },
    /// An elevator that this device does not offer now.
    #[error("{device} does not offer the I/O scheduler `{wanted}` (it offers: {offered}); {remedy}")]
    NoElevator {
        /// Kernel name of the device.
        device: String,
        /// What was asked for.
        wanted: String,
        /// What `queue/scheduler` lists.
        offered: String,
        /// What to do.
        remedy: String,
    },
    /// No hierarchy holds the block I/O controller.
    #[error("no cgroup hierarchy has the block I/O controller: {why}")]
    NoIoController {
        /// What was found instead, and the remedy.
        why: String,
    },
    /// No hierarchy holds the CPU controller.
    #[error("no cgroup hierarchy has the CPU controller: {why}")]
    NoCpuController {
        /// What was found instead, and the remedy.
        why: String,
    },
    /// A path that may not be used as a cgroup.
    #[error("`{path}` is not a cgroup path: {why}")]
    BadCgroup {
        /// The path as given.
        path: PathBuf,
        /// What is wrong with it.
        why: &'static str,
    },
}

impl HostError {
    /// The I/O error below, if there is one.
    #[must_use]
    pub fn io(&self) -> Option<&io::Error> {
        match self {
            Self::Read { source, .. } | Self::Write { source, .. } | Self::Directory { source, .. } => {
                Some(source)
            }
            _ => None,
        }
    }

    /// The I/O error below; a failure without one becomes an error of kind `Other` with the same
    /// text.
    #[must_use]
    pub fn into_io(self) -> io::Error {
        match self {
            Self::Read { source, .. } | Self::Write { source, .. } | Self::Directory { source, .. } => source,
            other => io::Error::other(other),
        }
    }

    /// Whether the kernel answered with this error number.
    pub(crate) fn is_errno(&self, errno: Errno) -> bool {
        self.io().is_some_and(|e| e.raw_os_error() == Some(errno.raw_os_error()))
    }

    /// Whether the kernel has no such operation there, as reading `cgroup.procs` of a threaded
    /// cgroup.
    #[must_use]
    pub fn is_unsupported(&self) -> bool {
        self.is_errno(Errno::OPNOTSUPP)
    }

    /// Whether the file, or the device or cgroup that it belongs to, does not exist (any more).
    #[must_use]
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::NoDevice { .. }) || self.io().is_some_and(is_gone)
    }
}

/// Whether an I/O error says that the thing itself is gone: `ENOENT`, `ESRCH` of a task, or
/// `ENODEV` from an open kernel file. After any other error it may be there.
#[must_use]
pub fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound
        || [Errno::NODEV, Errno::SRCH].iter().any(|e| error.raw_os_error() == Some(e.raw_os_error()))
}

/// The remedy that an error number suggests, ready to be appended.
fn hint(error: &io::Error) -> &'static str {
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::ACCESS | Errno::PERM) => " (run as root)",
        Some(Errno::ROFS) => " (mounted read-only: run outside the container, or remount it rw)",
        Some(Errno::INVAL | Errno::RANGE) => " (the kernel refuses this value)",
        Some(Errno::NOSPC) => " (free some space)",
        Some(Errno::BUSY) => " (in use: stop the processes in it first)",
        _ => "",
    }
}
