//! Errors of reading and changing the host, each with the path and a remedy.

use std::io;
use std::path::PathBuf;

use rustix::io::Errno;

/// Error of reading or changing the host.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// A file could not be read.
    #[error("cannot read {path}: {source}{}", hint(source))]
    Read { path: PathBuf, source: io::Error },
    /// A file could not be written.
    #[error("cannot write `{value}` to {path}: {source}{}", hint(source))]
    Write { path: PathBuf, value: String, source: io::Error },
    /// A directory could not be made or removed.
    #[error("cannot {action} {path}: {source}{}", hint(source))]
    Directory {
        /// Verb of the operation: `create` or `remove`.
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    /// A file has a content that is not understood.
    #[error("{path} holds `{text}`, which is not {expected}; please report this kernel's form")]
    Form {
        path: PathBuf,
        /// Content of the file, or the part in question.
        text: String,
        /// Description of the expected content, such as `a number`.
        expected: &'static str,
    },
    /// No such block device.
    #[error("no block device `{name}`: {why}; `lsblk` lists those that exist")]
    NoDevice {
        /// The name as given.
        name: String,
        /// Reason, such as a path that does not exist.
        why: String,
    },
    /// An elevator that this device does not offer now.
    #[error("{device} does not offer the I/O scheduler `{wanted}` (it offers: {offered}); {remedy}")]
    NoElevator {
        /// Kernel name of the device.
        device: String,
        wanted: String,
        offered: String,
        remedy: String,
    },
    /// No hierarchy holds the block I/O controller.
    #[error("no cgroup hierarchy has the block I/O controller: {why}")]
    NoIoController {
        /// State of the hierarchies, and the remedy.
        why: String,
    },
    /// No hierarchy holds the CPU controller.
    #[error("no cgroup hierarchy has the CPU controller: {why}")]
    NoCpuController {
        /// State of the hierarchies, and the remedy.
        why: String,
    },
    /// A path that may not be used as a cgroup.
    #[error("`{path}` is not a cgroup path: {why}")]
    BadCgroup {
        /// The path as given.
        path: PathBuf,
        why: &'static str,
    },
}

impl HostError {
    /// Error of a file whose text is not what is expected.
    #[must_use]
    pub fn form(path: impl Into<PathBuf>, text: &str, expected: &'static str) -> Self {
        Self::Form { path: path.into(), text: text.trim().to_owned(), expected }
    }

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

    /// Whether the kernel has no such operation there (`EOPNOTSUPP`), as for a read of
    /// `cgroup.procs` of a threaded cgroup.
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

/// Whether an I/O error means that the object itself is gone: `ENOENT`, `ESRCH` of a task, or
/// `ENODEV` from an open kernel file. After any other error it may be there.
#[must_use]
pub fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound
        || [Errno::NODEV, Errno::SRCH].iter().any(|e| error.raw_os_error() == Some(e.raw_os_error()))
}

/// The value; `None` when the file, or the task or device that it belongs to, is gone, which is no
/// error: tasks end and devices leave between two reads.
///
/// # Errors
/// Any other error.
pub fn unless_gone<T, E: Gone>(result: Result<T, E>) -> Result<Option<T>, E> {
    match result {
        Err(e) if e.is_gone() => Ok(None),
        other => other.map(Some),
    }
}

/// Errors that may mean that the requested object does not exist (any more).
pub trait Gone {
    /// Whether this error means so.
    fn is_gone(&self) -> bool;
}

impl Gone for HostError {
    fn is_gone(&self) -> bool {
        Self::is_gone(self)
    }
}

impl Gone for io::Error {
    fn is_gone(&self) -> bool {
        is_gone(self)
    }
}

/// Remedy for an error number, to be appended; may be empty.
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
