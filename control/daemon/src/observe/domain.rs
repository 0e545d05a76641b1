//! The disks that the I/O domain serves, as it counts them itself.

use std::path::{Path, PathBuf};

use rtvirtio_domain_protocol::Command;
use rtvirtio_domain_protocol::histograms::{DirectionHistogram, DiskHistograms, Histograms};
use rtvirtio_kernel::ProcessId;
use rtvirtio_vmm::disk_stats::{Counters, DiskStats, Histogram};
use rtvirtio_workflow::domain::{client, process};
use rtvirtio_workflow::{Dirs, Error, Kind};

/// Control socket of the I/O domain; `None` where none runs.
pub(super) fn control(dirs: &Dirs) -> Result<Option<PathBuf>, String> {
    let recorded = process::control(&dirs.state).map_err(|e| format!("{e:#}"))?;
    let control = recorded.unwrap_or_else(|| dirs.run.join("iod.sock"));
    match client::listener(&control) {
        Ok(listener) => Ok(listener.map(|_| control)),
        Err(e) => Err(format!("{e:#}")),
    }
}

/// All disks of the I/O domain at a control socket.
pub(super) fn disks(control: &Path) -> Result<Vec<DiskHistograms>, String> {
    let reply: Result<Histograms, Error> = client::send_command(control, &Command::Histograms);
    match reply {
        Ok(reply) => Ok(reply.disks),
        Err(e) if e.kind() == Kind::Guarded => {
            Err(format!("the I/O domain is older than this service: start it again: {e}"))
        }
        Err(e) => Err(format!("{e:#}")),
    }
}

/// Whether the disk is this VM's: the VM's QEMU is connected to it, or, where the peer is not
/// known, it has the VM's name.
pub(super) fn is_of(disk: &DiskHistograms, vm: &str, processes: &[ProcessId]) -> bool {
    match disk.peer {
        Some(peer) => processes.iter().any(|process| process.pid == peer),
        None => disk.name == vm,
    }
}

/// Identifier of a disk among those of a VM.
pub(super) fn id(disk: &DiskHistograms) -> String {
    format!("I/O domain {}/{}", disk.device, disk.name)
}

/// Counters of a disk in the form of QEMU's, with `limits` as bounds between bins.
pub(super) fn stats(disk: &DiskHistograms, limits: &[u64]) -> DiskStats {
    DiskStats {
        id: id(disk),
        file: None,
        format: None,
        read_only: false,
        read: counters(&disk.read, limits),
        write: counters(&disk.write, limits),
        // Among the writes.
        flush: Counters::default(),
    }
}

fn counters(direction: &DirectionHistogram, limits: &[u64]) -> Counters {
    let mut bins = vec![0; limits.len() + 1];
    let mut time_ns: u64 = 0;
    for (latency, n) in &direction.latencies {
        bins[limits.partition_point(|limit| limit <= latency)] += n;
        time_ns = time_ns.saturating_add(latency.saturating_mul(*n));
    }
    let histogram = Some(Histogram { boundaries: limits.to_vec(), bins });
    Counters { ops: direction.requests, bytes: direction.bytes, time_ns, histogram }
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
        let mut reply: Histograms = serde_json::from_value(reply).unwrap();
        let disk = reply.disks.remove(0);
        let stats = stats(&disk, &[1_000, 2_000]);
        // A request of exactly the limit is in the bin above it, as QEMU counts.
        assert_eq!(stats.read.histogram.unwrap().bins, [10, 2, 1]);
        assert_eq!((stats.read.ops, stats.read.time_ns), (13, 16_000));
        let process = |pid| ProcessId { pid, start_time: 0 };
        assert!(is_of(&disk, "other", &[process(7)]) && !is_of(&disk, "plc", &[process(8)]));
        assert!(is_of(&DiskHistograms { peer: None, ..disk }, "plc", &[]));
    }
}
