//! The disks that the I/O domain serves, as it counts them itself.

use std::path::{Path, PathBuf};

use rtvirtio_kernel::ProcessId;
use rtvirtio_vmm::disk_stats::{Counters, DiskStats, Histogram};
use rtvirtio_workflow::Dirs;
use rtvirtio_workflow::domain::{client, process};
use serde::Deserialize;

/// Where the domain answers; `None` where none runs.
pub(super) fn control(dirs: &Dirs) -> Result<Option<PathBuf>, String> {
    let recorded = process::control(&dirs.state).map_err(|e| format!("{e:#}"))?;
    let control = recorded.unwrap_or_else(|| dirs.run.join("iod.sock"));
    match client::listener(&control) {
        Ok(listener) => Ok(listener.map(|_| control)),
        Err(e) => Err(format!("{e:#}")),
    }
}

/// One direction of a disk, since it is served.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub(super) struct DomainDirection {
    pub requests: u64,
    pub bytes: u64,
    pub cap_hits: u64,
    latencies: Vec<(u64, u64)>,
}

/// One disk of the domain.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(super) struct DomainDisk {
    pub device: String,
    pub name: String,
    peer: Option<u32>,
    /// Whether reads or writes have a cap.
    pub capped: [bool; 2],
    pub read: DomainDirection,
    pub write: DomainDirection,
}

#[derive(Deserialize)]
struct Reply {
    disks: Option<Vec<DomainDisk>>,
    error: Option<String>,
}

/// All disks of the domain at a control socket.
pub(super) fn disks(control: &Path) -> Result<Vec<DomainDisk>, String> {
    let reply = client::send_command(control, "histograms").map_err(|e| format!("{e:#}"))?;
    let reply: Reply = serde_json::from_value(reply).map_err(|e| format!("{}: {e}", control.display()))?;
    let older = || "the I/O domain is older than this service: start it again".to_owned();
    reply.disks.ok_or_else(|| reply.error.map_or_else(older, |error| format!("{}: {error}", older())))
}

impl DomainDisk {
    /// Whether it is a disk of this VM: its QEMU is connected, or where that is not known it has
    /// the VM's name.
    pub fn is_of(&self, vm: &str, processes: &[ProcessId]) -> bool {
        match self.peer {
            Some(peer) => processes.iter().any(|process| process.pid == peer),
            None => self.name == vm,
        }
    }

    /// Names it among the disks of a VM.
    pub fn id(&self) -> String {
        format!("I/O domain {}/{}", self.device, self.name)
    }

    /// Its counters in the form of QEMU's, with these limits between the bins.
    pub fn stats(&self, limits: &[u64]) -> DiskStats {
        DiskStats {
            id: self.id(),
            file: None,
            format: None,
            read_only: false,
            read: self.read.counters(limits),
            write: self.write.counters(limits),
            // Among the writes.
            flush: Counters::default(),
        }
    }
}

impl DomainDirection {
    fn counters(&self, limits: &[u64]) -> Counters {
        let mut bins = vec![0; limits.len() + 1];
        let mut time_ns: u64 = 0;
        for (latency, n) in &self.latencies {
            bins[limits.partition_point(|limit| limit <= latency)] += n;
            time_ns = time_ns.saturating_add(latency.saturating_mul(*n));
        }
        let histogram = Some(Histogram { boundaries: limits.to_vec(), bins });
        Counters { ops: self.requests, bytes: self.bytes, time_ns, histogram }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_that_cannot_be_read_is_not_the_same_as_no_domain() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let dirs = Dirs { state: dir.path().join("state"), run: dir.path().join("run") };
        assert_eq!(control(&dirs), Ok(None));
        std::fs::create_dir(&dirs.state).unwrap();
        assert_eq!(control(&dirs), Ok(None));
        std::fs::write(dirs.state.join("iod.json"), "{").unwrap();
        assert!(control(&dirs).unwrap_err().contains("iod.json"));
    }

    #[test]
    fn a_reply_becomes_counters_with_exact_limits() {
        let reply = serde_json::json!({ "version": 1, "disks": [{
            "device": "d", "name": "plc", "peer": 7, "capped": [false, true],
            "read": { "requests": 13, "bytes": 53248, "cap_hits": 0, "latencies": [[900, 10], [1000, 2], [5000, 1]] },
            "write": { "requests": 0, "bytes": 0, "cap_hits": 3, "latencies": [] },
        }] });
        let reply: Reply = serde_json::from_value(reply).unwrap();
        let disk = reply.disks.unwrap().remove(0);
        let stats = disk.stats(&[1_000, 2_000]);
        // A request of exactly the limit is in the bin above it, as QEMU counts.
        assert_eq!(stats.read.histogram.unwrap().bins, [10, 2, 1]);
        assert_eq!((stats.read.ops, stats.read.time_ns), (13, 16_000));
        let process = |pid| ProcessId { pid, start_time: 0 };
        assert!(disk.is_of("other", &[process(7)]) && !disk.is_of("plc", &[process(8)]));
        assert!(DomainDisk { peer: None, ..disk }.is_of("plc", &[]));
    }
}
