//! Errors of opening the resources of a configuration.

use std::io;
use std::path::PathBuf;

use rtvirtio_domain_config::{Disk, Port};

use crate::backing::BackingError;
use crate::uplink::UplinkError;

/// Reason why a disk, uplink or socket is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// A disk cannot be opened.
    #[error("disk \"{disk}\": {source}")]
    Disk { disk: String, source: BackingError },
    /// Two disks overlap on one file, and at least one is written.
    #[error(
        "disks \"{first}\" and \"{second}\" lie on the same part of one file, and at least one of them is written; give each its own part, or set `shared = true` for both if their guests coordinate their writes"
    )]
    Overlap { first: String, second: String },
    /// Two paths of the configuration lead to the same file.
    #[error("{first} and {second} lead to the same file, {}; give each its own", path.display())]
    Collision {
        /// Key and disk or port of the first path.
        first: String,
        /// Key and disk or port of the second path.
        second: String,
        /// Second path, as configured.
        path: PathBuf,
    },
    /// A path that cannot be used.
    #[error("{what}: {source}")]
    Path {
        /// Purpose of the path, such as its key and disk.
        what: String,
        /// The cause, with the path.
        source: io::Error,
    },
    /// The uplink of a port cannot be opened.
    #[error("port \"{port}\": {source}")]
    Uplink { port: String, source: UplinkError },
}

impl OpenError {
    #[must_use]
    pub fn disk_path(disk: &Disk, key: &str, source: io::Error) -> Self {
        Self::Path { what: format!("`{key}` of disk \"{}\"", disk.name), source }
    }

    #[must_use]
    pub fn port_path(port: &Port, key: &str, source: io::Error) -> Self {
        Self::Path { what: format!("`{key}` of port \"{}\"", port.name), source }
    }
}
