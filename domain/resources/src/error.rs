//! Why the resources of a configuration are refused.

use std::io;
use std::path::PathBuf;

use rtvirtio_domain_config::{Disk, Port};

use crate::backing::BackingError;
use crate::uplink::UplinkError;

/// Why a disk, uplink or socket is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// A disk cannot be opened.
    #[error("disk \"{disk}\": {source}")]
    Disk {
        /// Name of the disk.
        disk: String,
        /// The cause.
        source: BackingError,
    },
    /// Two disks overlap.
    #[error(
        "disks \"{first}\" and \"{second}\" lie on the same part of one file, and at least one of them is written; give each its own part, or set `shared = true` for both if their guests coordinate their writes"
    )]
    Overlap {
        /// The first one.
        first: String,
        /// The second one.
        second: String,
    },
    /// Two paths of the configuration lead to the same file.
    #[error("{first} and {second} lead to the same file, {}; give each its own", path.display())]
    Collision {
        /// The first one.
        first: String,
        /// The second one.
        second: String,
        /// The second path.
        path: PathBuf,
    },
    /// An unusable path.
    #[error("{what}: {source}")]
    Path {
        /// Key and disk.
        what: String,
        /// The cause, with the path.
        source: io::Error,
    },
    /// The uplink of a port cannot be opened.
    #[error("port \"{port}\": {source}")]
    Uplink {
        /// Name of the port.
        port: String,
        /// The cause.
        source: UplinkError,
    },
}

impl OpenError {
    /// A path of a disk, by its key.
    #[must_use]
    pub fn disk_path(disk: &Disk, key: &str, source: io::Error) -> Self {
        Self::Path { what: format!("`{key}` of disk \"{}\"", disk.name), source }
    }

    /// A path of a port, by its key.
    #[must_use]
    pub fn port_path(port: &Port, key: &str, source: io::Error) -> Self {
        Self::Path { what: format!("`{key}` of port \"{}\"", port.name), source }
    }
}
