//! The status report, for people and programs.

use rtvirtio_units::Percentile;
use serde::Serialize;

use crate::engine::{Command, EngineHandle, VmStatus};

/// One direction of one VM.
#[derive(Clone, Debug, Serialize)]
pub struct DirectionReport {
    /// Requests completed.
    pub requests: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// Median latency in ns, from fetch to completion.
    pub p50_ns: u64,
    /// 99th percentile, in ns.
    pub p99_ns: u64,
    /// 99.99th percentile in ns; the maximum where there are fewer than 10 000.
    pub p9999_ns: u64,
    /// The longest, in ns.
    pub max_ns: u64,
    /// alpha: bytes per second while backlogged.
    pub alpha_bytes_per_second: f64,
    /// Delta: longest time between two pieces while backlogged, in ns.
    pub delta_ns: u64,
    /// Pieces that waited for a cap.
    pub cap_hits: u64,
}

/// One VM.
#[derive(Clone, Debug, Serialize)]
pub struct VmReport {
    /// Its device.
    pub device: String,
    /// Its name.
    pub name: String,
    /// Whether a guest is attached.
    pub attached: bool,
    /// Outstanding requests.
    pub outstanding: usize,
    /// Reads.
    pub read: DirectionReport,
    /// Writes, flushes, discards.
    pub write: DirectionReport,
    /// Pieces under a reservation.
    pub reserved: u64,
    /// Pieces as a share of the rest.
    pub shared: u64,
    /// Requests that the device failed.
    pub errors: u64,
    /// Chains that are no valid requests.
    pub malformed: u64,
    /// Queues that are no longer served because the guest corrupted them.
    pub broken: u64,
}

/// One device.
#[derive(Clone, Debug, Serialize)]
pub struct DeviceReport {
    /// Its name.
    pub name: String,
    /// The current window, in pieces.
    pub window: u32,
    /// Pieces that a regulator delayed.
    pub held: u64,
    /// Median delay of these beyond their exact moment, in ns.
    pub late_p50_ns: u64,
    /// 99.99th percentile in ns; the maximum where there are fewer than 10 000.
    pub late_p9999_ns: u64,
    /// Pieces of discards and zeroing.
    pub discard_pieces: u64,
    /// The longest of them, in ns.
    pub discard_longest_ns: u64,
    /// Those that took longer than declared: bounds do not cover them.
    pub discard_overruns: u64,
}

/// All devices and VMs.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// The devices.
    pub devices: Vec<DeviceReport>,
    /// Their VMs.
    pub vms: Vec<VmReport>,
}

fn vm_report(device: &str, vm: VmStatus) -> VmReport {
    let direction = |i: usize| {
        let (l, c) = (&vm.latencies[i], &vm.contracts[i]);
        DirectionReport {
            requests: vm.counters.completed[i],
            bytes: vm.counters.bytes[i],
            p50_ns: l.at(Percentile(50.0)).0,
            p99_ns: l.at(Percentile(99.0)).0,
            p9999_ns: l.tail().0,
            max_ns: l.max().0,
            alpha_bytes_per_second: c.bytes_per_second,
            delta_ns: c.longest_gap_ns,
            cap_hits: vm.counters.cap_hits[i],
        }
    };
    VmReport {
        device: device.to_owned(),
        attached: vm.queues > 0,
        outstanding: vm.outstanding,
        read: direction(0),
        write: direction(1),
        reserved: vm.counters.reserved,
        shared: vm.counters.shared,
        errors: vm.errors,
        malformed: vm.malformed,
        broken: vm.broken_queues,
        name: vm.name,
    }
}

/// Snapshot of all counters.
#[must_use]
pub fn report(handles: &[(String, EngineHandle)]) -> Report {
    let mut all = Report::default();
    for (name, handle) in handles {
        let Ok(status) = handle.ask(|reply| Command::Status { reply }) else { continue };
        all.devices.push(DeviceReport {
            name: name.clone(),
            window: status.window,
            held: status.regulator_lateness.n(),
            late_p50_ns: status.regulator_lateness.at(Percentile(50.0)).0,
            late_p9999_ns: status.regulator_lateness.tail().0,
            discard_pieces: status.deallocations.pieces,
            discard_longest_ns: status.deallocations.longest.0,
            discard_overruns: status.deallocations.overruns,
        });
        all.vms.extend(status.vms.into_iter().map(|vm| vm_report(name, vm)));
    }
    all
}
