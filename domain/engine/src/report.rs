//! The status report, for people and programs.

use rtvirtio_sched::{WATCHED, Waits};
use rtvirtio_units::Percentile;
use serde::Serialize;

use crate::blk::Refused;
use crate::config::{Disk, ReservationConfig};
use crate::engine::{Command, Faults, PromiseCounters, RefusedRequests, VmStatus};
use crate::log::Refusals;
use crate::network_report::{self, NetworkReport, PortReport};
use crate::running::{Member, Running};

/// Counters and latencies of one direction of a VM.
#[derive(Clone, Debug, Serialize)]
pub struct DirectionReport {
    /// Number of completed requests.
    pub requests: u64,
    /// Bytes of completed requests.
    pub bytes: u64,
    /// Median latency in ns, from fetch to completion.
    pub p50_ns: u64,
    /// 99th percentile, in ns.
    pub p99_ns: u64,
    /// 99.99th percentile in ns; the maximum where there are fewer than 10 000.
    pub p9999_ns: u64,
    /// Longest latency, in ns.
    pub max_ns: u64,
    /// alpha: bytes per second while backlogged.
    pub alpha_bytes_per_second: f64,
    /// Delta: longest time between two pieces while backlogged, in ns.
    pub delta_ns: u64,
    /// Pieces that waited for a cap.
    pub cap_hits: u64,
}

/// A reservation, with the requests that it covered.
#[derive(Clone, Debug, Serialize)]
pub struct PromiseReport {
    /// `"reserve"` or `"urgent"`, the key of the file.
    pub key: &'static str,
    /// Promised share of the device's time, 0 to 1.
    pub share: f64,
    /// Promised burst of device time, in ns.
    pub burst_ns: u64,
    /// Promised longest time of a request within share and burst, in ns.
    pub deadline_ns: u64,
    /// Completed requests within share and burst.
    pub requests: u64,
    /// Longest time of such a request from when the reservation covered it, in ns.
    pub worst_ns: u64,
    /// Requests that took longer than the deadline.
    pub missed: u64,
}

/// Causes for which requests of a VM waited in its queue, since it is served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WaitsReport {
    /// Time in which the VM had requests that were not wholly submitted, in ns.
    pub queued_ns: u64,
    /// Part of `queued_ns` in which nothing was at the device: caps and pacing.
    pub idle_ns: u64,
    /// Part of `queued_ns` in which pieces of the VM itself were at the device.
    pub own_ns: u64,
    /// Part of `queued_ns` in which pieces of another VM were at the device, for each such VM.
    pub neighbours: Vec<NeighbourReport>,
}

/// Time in which a VM had requests queued while pieces of another were at the device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NeighbourReport {
    /// Name of the other VM; `"others"` for those beyond 64 on a device, not told apart.
    pub name: String,
    /// Time in ns. With pieces of several VMs at the device it counts for each.
    pub ns: u64,
}

impl WaitsReport {
    /// Names the counters by place; `names` has the VM of each place, `None` for a vacant one.
    fn new(vm: usize, waits: &Waits, names: &[Option<&str>]) -> Self {
        let at = |place: usize| waits.by.get(place).map_or(0, |ns| ns.0);
        let is_shared = |place: usize| place + 1 == WATCHED && names.len() > WATCHED;
        let name = |place: usize| match names.get(place) {
            _ if is_shared(place) => Some("others"),
            Some(name) => *name,
            None => None,
        };
        let others = (0..waits.by.len()).filter(|place| *place != vm && at(*place) > 0);
        let neighbours =
            others.filter_map(|place| Some(NeighbourReport { name: name(place)?.to_owned(), ns: at(place) }));
        Self {
            queued_ns: waits.queued.0,
            idle_ns: waits.idle.0,
            own_ns: at(vm),
            neighbours: neighbours.collect(),
        }
    }
}

/// The last message or connection of a QEMU that was refused.
#[derive(Clone, Debug, Serialize)]
pub struct RefusalReport {
    /// Reason, as in the log.
    pub why: String,
    /// Seconds since the refusal.
    pub seconds_ago: u64,
    /// Refusals since the disk is served.
    pub count: u64,
}

/// Requests that were answered with an error without the device, by reason.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct RefusedReport {
    /// Header, data or status outside of the memory that the VM's QEMU has shared.
    pub outside_memory: u64,
    /// Sectors beyond the end of the disk.
    pub outside_disk: u64,
    /// Writes to a disk that is read-only.
    pub read_only: u64,
    /// Types, flags and numbers of ranges that were not offered, or that the device does not do.
    pub unsupported: u64,
    /// Contradictory requests: data in the wrong direction, parts of sectors, too many segments.
    pub invalid: u64,
}

impl From<RefusedRequests> for RefusedReport {
    fn from(refused: RefusedRequests) -> Self {
        Self {
            outside_memory: refused.of(Refused::OutsideMemory),
            outside_disk: refused.of(Refused::OutsideDisk),
            read_only: refused.of(Refused::ReadOnly),
            unsupported: refused.of(Refused::Unsupported),
            invalid: refused.of(Refused::Invalid),
        }
    }
}

/// Error of a failed piece, in words.
fn error_text(result: i32) -> String {
    if result < 0 {
        return std::io::Error::from_raw_os_error(-result).to_string();
    }
    format!("it ended after {result} bytes: is the file or device shorter than the disk by now?")
}

/// State and counters of a VM's disk.
#[derive(Clone, Debug, Serialize)]
pub struct VmReport {
    /// Name of the device.
    pub device: String,
    /// Name of the disk.
    pub name: String,
    /// Path of the vhost-user socket.
    pub socket: String,
    /// Size in bytes that the guest is told.
    pub size: u64,
    /// Whether a QEMU is connected.
    pub connected: bool,
    /// Process of that QEMU; `null` where it is not known.
    pub peer: Option<u32>,
    /// Whether the guest uses the disk: a queue is served.
    pub attached: bool,
    /// Requests that are fetched and not completed.
    pub outstanding: usize,
    /// Reads of the disk.
    pub read: DirectionReport,
    /// Writes, flushes and discards.
    pub write: DirectionReport,
    /// Reservations of the VM; empty without any.
    pub promises: Vec<PromiseReport>,
    /// Signals of completed real-time requests, for the program that raises the VM's vCPUs; `null`
    /// while none is asked for.
    pub urgent_signals: Option<u64>,
    /// Causes of waiting; `null` where they are not told apart.
    pub waits: Option<WaitsReport>,
    /// Last refused message or connection; `null` without any.
    pub refused: Option<RefusalReport>,
    /// Pieces submitted under a reservation.
    pub reserved: u64,
    /// Pieces submitted without one, as a share of the rest.
    pub shared: u64,
    /// Requests that the device failed.
    pub errors: u64,
    /// Error of the last failed request; `null` without any.
    pub last_error: Option<String>,
    /// Requests that were answered with an error, and did not reach the device.
    pub refused_requests: RefusedReport,
    /// Chains that are no valid requests.
    pub malformed: u64,
    /// Queues that are no longer served because the guest corrupted them.
    pub broken: u64,
}

/// State of a device.
#[derive(Clone, Debug, Serialize)]
pub struct DeviceReport {
    /// Name of the device.
    pub name: String,
    /// Scheduling policy. Deadlines are kept under `"edf"` only.
    pub policy: &'static str,
    /// Current window, in pieces.
    pub window: u32,
    /// Pieces that a regulator delayed.
    pub held: u64,
    /// Median delay of these pieces beyond their exact moment, in ns.
    pub late_p50_ns: u64,
    /// 99.99th percentile in ns; the maximum where there are fewer than 10 000.
    pub late_p9999_ns: u64,
    /// Number of pieces of discards and zeroing.
    pub discard_pieces: u64,
    /// Longest time of such a piece, in ns.
    pub discard_longest_ns: u64,
    /// Such pieces that took longer than declared: bounds do not cover them.
    pub discard_overruns: u64,
}

/// Version of the report: fields may be added, none is removed or changes its meaning.
pub const VERSION: u32 = 1;

/// All devices, VMs, networks and ports.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// The [`VERSION`] of this report.
    pub version: u32,
    /// Devices of the configuration.
    pub devices: Vec<DeviceReport>,
    /// Disks of all devices.
    pub vms: Vec<VmReport>,
    /// Networks of the configuration.
    pub networks: Vec<NetworkReport>,
    /// Ports of all networks.
    pub ports: Vec<PortReport>,
}

/// The last refusal of a disk or port.
pub(crate) fn last_refusal(refusals: &Refusals) -> Option<RefusalReport> {
    refusals.last().map(|last| RefusalReport {
        why: last.why,
        seconds_ago: last.at.elapsed().as_secs(),
        count: last.count,
    })
}

fn vm_report(
    device: &str,
    disk: Option<&Disk>,
    member: &Member,
    waits: Option<WaitsReport>,
    vm: VmStatus,
) -> VmReport {
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
    let refused = last_refusal(member.server().refusals());
    let Faults { malformed, refused: refused_requests, errors, last_error, broken_queues } = vm.faults;
    let promise = |key, reservation: Option<ReservationConfig>, seen: &PromiseCounters| {
        reservation.map(|r| PromiseReport {
            key,
            share: r.share.0,
            burst_ns: r.burst.0,
            deadline_ns: r.deadline.0,
            requests: seen.requests,
            worst_ns: seen.worst.0,
            missed: seen.missed,
        })
    };
    let promises = [
        promise("urgent", disk.and_then(|d| d.urgent), &vm.promises[0]),
        promise("reserve", disk.and_then(|d| d.reserve), &vm.promises[1]),
    ];
    VmReport {
        device: device.to_owned(),
        socket: disk.map(|d| d.socket.display().to_string()).unwrap_or_default(),
        size: member.part.size(),
        connected: member.server().is_connected(),
        peer: member.server().peer(),
        promises: promises.into_iter().flatten().collect(),
        urgent_signals: vm.urgent_signals,
        waits,
        refused,
        attached: vm.queues > 0,
        outstanding: vm.outstanding,
        read: direction(0),
        write: direction(1),
        reserved: vm.counters.reserved,
        shared: vm.counters.shared,
        errors,
        last_error: last_error.map(error_text),
        refused_requests: refused_requests.into(),
        malformed,
        broken: broken_queues,
        name: vm.name,
    }
}

impl Running {
    /// Snapshot of all counters. Each VM is a command of its own: an engine copies the histograms
    /// of one at a time, and serves guests in between.
    #[must_use]
    pub fn report(&self) -> Report {
        let mut all = Report { version: VERSION, ..Report::default() };
        (all.networks, all.ports) = network_report::networks(self);
        let state = self.state();
        let devices = self.engines().iter().zip(&state.places).zip(&state.file.devices);
        for (((name, handle), places), device) in devices {
            let Ok(status) = handle.ask(|reply| Command::Status { reply }) else { continue };
            all.devices.push(DeviceReport {
                name: name.clone(),
                policy: device.policy.name(),
                window: status.window,
                held: status.regulator_lateness.n(),
                late_p50_ns: status.regulator_lateness.at(Percentile(50.0)).0,
                late_p9999_ns: status.regulator_lateness.tail().0,
                discard_pieces: status.deallocations.pieces,
                discard_longest_ns: status.deallocations.longest.0,
                discard_overruns: status.deallocations.overruns,
            });
            let names: Vec<Option<&str>> =
                places.iter().map(|member| member.as_ref().map(|m| m.name())).collect();
            for (vm, member) in places.iter().enumerate() {
                let Some(member) = member else { continue };
                let asked = handle.ask(|reply| Command::VmStatus { vm, reply });
                let Ok(Some(status)) = asked else { continue };
                let disk = device.disks.iter().find(|disk| disk.name == member.name());
                let waits = status.waits.as_ref().map(|waits| WaitsReport::new(vm, waits, &names));
                all.vms.push(vm_report(name, disk, member, waits, *status));
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use rtvirtio_units::Nanos;

    use super::*;

    #[test]
    fn waits_are_named_by_place_and_vacant_places_have_none() {
        let waits = Waits {
            queued: Nanos(100),
            idle: Nanos(5),
            by: [10, 0, 70, 30].into_iter().map(Nanos).collect(),
        };
        let report = WaitsReport::new(0, &waits, &[Some("plc"), Some("hmi"), Some("bulk"), None]);
        let bulk = NeighbourReport { name: "bulk".to_owned(), ns: 70 };
        let expected = WaitsReport { queued_ns: 100, idle_ns: 5, own_ns: 10, neighbours: vec![bulk] };
        assert_eq!(report, expected);
        // Of more places than are told apart the last one stands for the rest.
        let names = vec![Some("x"); WATCHED + 1];
        let by = (0..WATCHED as u64).map(|i| Nanos(u64::from(i + 1 == WATCHED as u64))).collect();
        let report = WaitsReport::new(0, &Waits { by, ..waits }, &names);
        assert_eq!(report.neighbours, [NeighbourReport { name: "others".to_owned(), ns: 1 }]);
    }
}
