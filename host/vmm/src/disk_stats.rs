//! Counters of QEMU for each disk of a guest: requests, bytes, time, and latency histograms. The
//! guest is not involved (`query-block`, `query-blockstats` and `block-latency-histogram-set` in
//! QEMU's `qapi/block-core.json` and `qapi/block.json`).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::block_node::BlockNode;
use crate::{Qmp, VmmError};

/// Direction of a request. QEMU counts discards separately, under other names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// Requests of the guest that read.
    Read,
    /// Requests of the guest that write.
    Write,
    /// Flushes, as a guest's fsync makes them.
    Flush,
}

/// Histogram of the latencies of completed requests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Histogram {
    /// Limits between the bins, in nanoseconds, rising.
    pub boundaries: Vec<u64>,
    /// Number of requests below the first limit, between two limits, and above the last: one bin
    /// more than limits.
    pub bins: Vec<u64>,
}

impl Histogram {
    /// Number of requests in all bins.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.bins.iter().sum()
    }

    /// Upper limit, in nanoseconds, of the bin with the request of this rank; `None` for an empty
    /// histogram, or a request above the last limit. `share` is 0.9999 for p99.99.
    #[must_use]
    pub fn quantile(&self, share: f64) -> Option<u64> {
        let rank = ((self.count() as f64 * share).ceil() as u64).max(1);
        let mut seen = 0;
        for (bin, limit) in self.bins.iter().zip(&self.boundaries) {
            seen += bin;
            if seen >= rank {
                return Some(*limit);
            }
        }
        None
    }

    /// Sum with another histogram; `None` where their bins differ.
    #[must_use]
    pub fn and(&self, other: &Self) -> Option<Self> {
        let same = self.boundaries == other.boundaries && self.bins.len() == other.bins.len();
        let bins = self.bins.iter().zip(&other.bins).map(|(a, b)| a.saturating_add(*b));
        same.then(|| Self { boundaries: self.boundaries.clone(), bins: bins.collect() })
    }

    /// Difference to `earlier`; `None` when the histogram was reset in between.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Option<Self> {
        let same = self.boundaries == earlier.boundaries && self.bins.len() == earlier.bins.len();
        let pairs = self.bins.iter().zip(&earlier.bins);
        let bins: Option<Vec<u64>> = pairs.map(|(now, then)| now.checked_sub(*then)).collect();
        same.then_some(bins?).map(|bins| Self { boundaries: self.boundaries.clone(), bins })
    }
}

/// Counters of one direction since QEMU started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// Number of requests completed without an error.
    pub ops: u64,
    /// Number of their bytes; 0 for flushes.
    pub bytes: u64,
    /// Sum of their latencies, in nanoseconds.
    pub time_ns: u64,
    /// Histogram of their latencies, where one was requested.
    pub histogram: Option<Histogram>,
}

/// Disk of a guest, with its counters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DiskStats {
    /// Path of its device, such as `/machine/peripheral/disk0/virtio-backend`, which
    /// [`Qmp::set_latency_histogram`] takes; or the name of a drive without a device, which only
    /// older commands such as `block_set_io_throttle` take.
    pub id: String,
    /// File or block device on the host; `None` for an empty drive.
    pub file: Option<String>,
    /// Format of the image, such as `raw` or `qcow2`.
    pub format: Option<String>,
    /// Whether it is read-only for the guest.
    pub read_only: bool,
    pub read: Counters,
    pub write: Counters,
    pub flush: Counters,
}

impl DiskStats {
    #[must_use]
    pub fn counters(&self, direction: Direction) -> &Counters {
        match direction {
            Direction::Read => &self.read,
            Direction::Write => &self.write,
            Direction::Flush => &self.flush,
        }
    }
}

/// Entry in `query-block`'s answer.
#[derive(Deserialize)]
struct Backend {
    #[serde(default)]
    device: String,
    qdev: Option<String>,
    inserted: Option<Inserted>,
}

#[derive(Deserialize)]
struct Inserted {
    file: String,
    drv: String,
    ro: bool,
    image: Option<Image>,
}

/// QEMU's type `ImageInfo`, in part.
#[derive(Deserialize)]
struct Image {
    filename: String,
}

/// Entry in `query-blockstats`'s answer.
#[derive(Deserialize)]
struct Entry {
    #[serde(default)]
    device: String,
    qdev: Option<String>,
    stats: Stats,
}

#[derive(Deserialize)]
struct Stats {
    rd_operations: u64,
    rd_bytes: u64,
    rd_total_time_ns: u64,
    rd_latency_histogram: Option<Histogram>,
    wr_operations: u64,
    wr_bytes: u64,
    wr_total_time_ns: u64,
    wr_latency_histogram: Option<Histogram>,
    flush_operations: u64,
    flush_total_time_ns: u64,
    flush_latency_histogram: Option<Histogram>,
}

/// Identifier of a disk: the path of the guest's device, which an old `-drive` has too; for a drive
/// without a device its own name.
fn id(device: &str, qdev: Option<&str>) -> Option<String> {
    qdev.filter(|q| !q.is_empty()).or(Some(device).filter(|d| !d.is_empty())).map(str::to_owned)
}

impl Qmp {
    /// Disks of the guest with their counters, in QEMU's order, empty drives included.
    pub fn disk_stats(&mut self) -> Result<Vec<DiskStats>, VmmError> {
        let backends: Vec<Backend> = self.drives("query-block")?;
        let entries: Vec<Entry> = self.drives("query-blockstats")?;
        Ok(join(&backends, entries))
    }

    /// Makes QEMU keep a latency histogram of a disk, with these limits in nanoseconds, for reads,
    /// writes and flushes; an earlier one is lost. Without limits it stops. `id` is the path or id
    /// of a device; a drive's name is not accepted.
    ///
    /// # Errors
    /// As [`Qmp::execute`]: `Device 'd0' not found` for the name of a drive; QEMU before 4.0 has no
    /// such command.
    pub fn set_latency_histogram(&mut self, id: &str, boundaries: &[u64]) -> Result<(), VmmError> {
        let arguments = if boundaries.is_empty() {
            json!({ "id": id })
        } else {
            json!({ "id": id, "boundaries": boundaries })
        };
        self.execute("block-latency-histogram-set", Some(arguments)).map(|_: Value| ())
    }
}

/// Path in a file name of QEMU's; the name itself where it has none.
fn plain(name: &str) -> String {
    BlockNode::parse(name).file.map_or_else(|| name.to_owned(), |path| path.display().to_string())
}

fn join(backends: &[Backend], entries: Vec<Entry>) -> Vec<DiskStats> {
    let mut disks = Vec::new();
    let mut of_id = BTreeMap::new();
    for backend in backends {
        // The first of a name is used.
        if let Some(id) = id(&backend.device, backend.qdev.as_deref()) {
            of_id.entry(id).or_insert(backend);
        }
    }
    for entry in entries {
        let Some(id) = id(&entry.device, entry.qdev.as_deref()) else { continue };
        let inserted = of_id.get(&id).and_then(|b| b.inserted.as_ref());
        let s = entry.stats;
        let counters = |ops, bytes, time_ns, histogram| Counters { ops, bytes, time_ns, histogram };
        disks.push(DiskStats {
            id,
            file: inserted.map(|i| plain(i.image.as_ref().map_or(&i.file, |image| &image.filename))),
            format: inserted.map(|i| i.drv.clone()),
            read_only: inserted.is_some_and(|i| i.ro),
            read: counters(s.rd_operations, s.rd_bytes, s.rd_total_time_ns, s.rd_latency_histogram),
            write: counters(s.wr_operations, s.wr_bytes, s.wr_total_time_ns, s.wr_latency_histogram),
            flush: counters(s.flush_operations, 0, s.flush_total_time_ns, s.flush_latency_histogram),
        });
    }
    disks
}

#[cfg(test)]
mod tests;
