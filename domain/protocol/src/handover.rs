//! The files of disks and ports that are passed to a running domain: what cannot be seen from
//! their descriptors, and the limits of one reload.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Descriptors of each disk: its file, its lock, its socket.
pub const DISK_DESCRIPTORS: usize = 3;
/// Most disks of one reload.
pub const MOST_DISKS: usize = 256;

/// What cannot be seen from the descriptors of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskFacts {
    /// The disk's name.
    pub name: String,
    /// Its path, as it was opened.
    pub path: PathBuf,
    /// Its socket, as it was bound.
    pub socket: PathBuf,
    /// Length of the whole file or device, in bytes.
    pub len: u64,
    /// Alignment of direct I/O, in bytes.
    pub block: u32,
    /// It can discard.
    pub discard: bool,
    /// It is opened for direct I/O and for reading only.
    pub direct: bool,
    /// It is opened for reading only.
    pub read_only: bool,
    /// The locks that are passed on; `None` where the running domain holds them already.
    pub lock: Option<LockFacts>,
}

/// Locks of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LockFacts {
    /// Those of readers.
    pub read_only: bool,
    /// Other writers are expected.
    pub shared: bool,
}

/// Descriptors of each port: its uplink, its socket.
pub const PORT_DESCRIPTORS: usize = 2;
/// Most ports of one reload.
pub const MOST_PORTS: usize = 128;

/// What cannot be seen from the descriptors of a port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PortFacts {
    /// The port's name.
    pub name: String,
    /// Its interface: a tap, or that of its network.
    pub interface: String,
    /// Its address, for which the uplink filters.
    pub mac: String,
    /// Its socket, as it was bound.
    pub socket: PathBuf,
}
