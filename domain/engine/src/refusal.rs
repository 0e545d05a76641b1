//! Errors of a reload.

use std::collections::BTreeSet;
use std::path::PathBuf;

use rtvirtio_domain_config::FileError;
use rtvirtio_domain_resources::OpenError;

use crate::engine::{AttachError, ReconfigureError};
use crate::error::DomainError;

/// Reason why a configuration is refused. The old one stays in force, unless the message names what
/// was changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReloadError {
    /// The file is invalid.
    #[error("nothing is changed: {0}")]
    File(#[from] FileError),
    /// Changes that guests would notice, or that need new files.
    #[error("nothing is changed: {} needs a restart of the I/O domain (guests wait and lose nothing); a disk or a port can also be detached and attached again{}", list.join(", "), of_size(list))]
    Restart {
        /// The changes, each with its place.
        list: Vec<String>,
    },
    /// Disks and ports that no process has opened for the I/O domain.
    #[error(
        "nothing is changed: {} would be added, and the I/O domain's process opens no files: `rtvirtio iod reload` opens them for it",
        names.join(", ")
    )]
    NotPassed {
        /// Kinds and names of these disks and ports.
        names: Vec<String>,
    },
    /// Guests are attached to disks or ports that would be detached.
    #[error(
        "nothing is changed: {} would be removed, and a guest is attached to it: remove it from the guest first (QEMU's `device_del`, then `netdev_del` for a port and `chardev-remove`, for QEMU keeps the connection until then), or use `--force`, after which that guest's requests wait for \
         ever, and its link is down",
        names.join(", ")
    )]
    Attached {
        /// Kinds and names of these disks and ports.
        names: Vec<String>,
    },
    /// A disk or port cannot be served.
    #[error("nothing is changed: {0}")]
    Serve(#[from] DomainError),
    /// A disk or port is not as a start needs it.
    #[error("nothing is changed: {0}")]
    Open(#[from] OpenError),
    /// A socket that the I/O domain could not remove at its end.
    #[error(
        "nothing is changed: `socket` of {what}: the I/O domain removes sockets only in the directories of its start ({}); put it there",
        list(directories)
    )]
    Directory {
        /// Kind and name of the disk or port.
        what: String,
        /// Directories in which it may remove sockets.
        directories: BTreeSet<PathBuf>,
    },
    /// The lock of a file with other disks does not cover the new one.
    #[error(
        "nothing is changed: disk \"{disk}\": its file is locked for its other disks, which {held}; restart the I/O domain (guests wait and lose nothing)"
    )]
    Lock {
        disk: String,
        /// The use that is locked, in words.
        held: &'static str,
    },
    /// An engine has no room for a disk.
    #[error("nothing is changed: disk \"{disk}\": {source}")]
    Attach { disk: String, source: AttachError },
    /// Requests of a disk do not end: its device does not answer. Or frames of a port: its link is
    /// slow.
    #[error(
        "{what} is not removed: its requests in flight have not completed after {seconds} s. Its guest is disconnected; all others are unchanged. Try again"
    )]
    Draining {
        /// Kind and name of the disk or port.
        what: String,
        /// Time waited, in seconds.
        seconds: u64,
    },
    /// A network's engine refuses what was checked, a defect. Changes before it are in force.
    #[error("network \"{network}\": {message}")]
    Network {
        network: String,
        /// Reason of the engine, in words.
        message: String,
    },
    /// An engine refuses what was checked, a defect. Changes before it are in force.
    #[error("device \"{device}\": {source}")]
    Engine { device: String, source: ReconfigureError },
    /// A disk or port cannot be added or removed, after other changes.
    #[error("{why}. In force by now: {}", changes.join(", "))]
    Partly {
        /// Reason, in words.
        why: String,
        /// Changes before it, each with its place.
        changes: Vec<String>,
    },
}

impl ReloadError {
    /// The error after these changes: not all is as it was before.
    pub(crate) fn after(self, changes: &[String]) -> Self {
        if changes.is_empty() {
            return self;
        }
        let why = match self {
            Self::Serve(e) => e.to_string(),
            Self::Attach { disk, source } => format!("disk \"{disk}\": {source}"),
            Self::Draining { what, seconds } => format!(
                "{what} is not removed: its requests in flight have not completed after {seconds} s. Its guest is disconnected. Try again"
            ),
            other => return other,
        };
        Self::Partly { why, changes: changes.to_vec() }
    }
}

/// A disk or port in a message.
pub(crate) fn named(kind: &str, name: &str) -> String {
    format!("{kind} \"{name}\"")
}

/// Hint for a smaller size of a disk; else empty.
fn of_size(list: &[String]) -> &'static str {
    if list.iter().any(|change| change.starts_with("disk ") && change.ends_with(": size")) {
        ". A disk does not shrink under its guest: detach and attach it while its VM is off"
    } else {
        ""
    }
}

fn list(directories: &BTreeSet<PathBuf>) -> String {
    directories.iter().map(|d| d.display().to_string()).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_changed_is_said() {
        let serve = || {
            let source = std::io::ErrorKind::NotFound.into();
            ReloadError::Serve(DomainError::Socket { device: named("disk", "b"), source })
        };
        let drain = || ReloadError::Draining { what: named("disk", "b"), seconds: 10 };
        assert!(serve().after(&[]).to_string().starts_with("nothing is changed: "));
        assert!(drain().after(&[]).to_string().contains("all others are unchanged"));
        for error in [serve(), drain()] {
            let text = error.after(&["disk \"a\": detached".to_owned()]).to_string();
            assert!(text.contains("disk \"b\"") && !text.contains("changed"), "{text}");
            assert!(text.ends_with(". In force by now: disk \"a\": detached"), "{text}");
        }
    }
}
