//! Disks and ports that are passed to a running I/O domain: properties that their descriptors do
//! not show, and the limits of one reload.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Descriptors of each disk: its file, its lock, its socket.
pub const DISK_DESCRIPTORS: usize = 3;
/// Most disks of one reload.
pub const MOST_DISKS: usize = 256;

/// Properties of a passed disk that its descriptors do not show.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskFacts {
    /// Name of the disk in the configuration.
    pub name: String,
    /// Path with which its file was opened.
    pub path: PathBuf,
    /// Path at which its socket was bound.
    pub socket: PathBuf,
    /// Length of the whole file or device, in bytes.
    pub len: u64,
    /// Alignment of direct I/O, in bytes.
    pub block: u32,
    /// Discards are supported.
    pub discard: bool,
    /// Opened with `O_DIRECT`.
    pub direct: bool,
    /// Opened for reading only.
    pub read_only: bool,
    /// Locks that are passed; `None` where the I/O domain holds them already.
    pub lock: Option<LockFacts>,
}

/// Locks of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LockFacts {
    /// No disk on the file is writable.
    pub read_only: bool,
    /// Other writers are expected.
    pub shared: bool,
}

/// Descriptors of each port: its uplink, its socket.
pub const PORT_DESCRIPTORS: usize = 2;
/// Most ports of one reload.
pub const MOST_PORTS: usize = 128;

/// Properties of a passed port that its descriptors do not show.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PortFacts {
    /// Name of the port in the configuration.
    pub name: String,
    /// Interface of the uplink: the port's tap, or the network's interface.
    pub interface: String,
    /// MAC address that the uplink's filter accepts.
    pub mac: String,
    /// Path at which its socket was bound.
    pub socket: PathBuf,
}
