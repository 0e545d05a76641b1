//! Latency histograms of every disk, for a program that judges targets over windows of its own: the
//! difference of two replies is what came in between.

use serde::{Deserialize, Serialize};

/// Version of the reply: fields may be added, none is removed or changes its meaning.
pub const VERSION: u32 = 1;

/// Requests of one direction of one disk, since it is served.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectionHistogram {
    /// Number of completed requests.
    pub requests: u64,
    /// Bytes of completed requests.
    pub bytes: u64,
    /// Pieces that waited for a cap.
    pub cap_hits: u64,
    /// Latencies from fetch to completion in ns, rising, each with its requests; rounded up by less
    /// than 1 %.
    pub latencies: Vec<(u64, u64)>,
}

/// Histograms of one disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskHistograms {
    /// Name of the device.
    pub device: String,
    /// Name of the disk.
    pub name: String,
    /// The process of the QEMU that is connected; `null` where it is not known.
    pub peer: Option<u32>,
    /// Whether its reads or writes have a cap.
    pub capped: [bool; 2],
    /// Histogram of reads.
    pub read: DirectionHistogram,
    /// Histogram of writes, flushes and discards.
    pub write: DirectionHistogram,
}

/// Histograms of all disks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Histograms {
    /// Version of the reply, [`VERSION`].
    pub version: u32,
    /// Histograms of each disk.
    pub disks: Vec<DiskHistograms>,
}
