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

/// A reservation, and what came of it.
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
    /// Requests that were within share and burst, completed.
    pub requests: u64,
    /// The longest of them, from when the reservation covered it, in ns.
    pub worst_ns: u64,
    /// Those that took longer than the deadline.
    pub missed: u64,
}

/// For whom requests of a VM have waited in its queue, since it is served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WaitsReport {
    /// Time in which it had requests that were not wholly submitted, in ns.
    pub queued_ns: u64,
    /// Of it, time in which nothing was at the device, in ns: caps and pacing.
    pub idle_ns: u64,
    /// Of it, time in which pieces of its own were at the device, in ns.
    pub own_ns: u64,
    /// The same of each VM that it has waited for.
    pub neighbours: Vec<NeighbourReport>,
}

/// Time in which a VM had requests queued while pieces of another were at the device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NeighbourReport {
    /// The other VM; `"others"` for those of a device with more than 64 that are not told apart.
    pub name: String,
    /// The time, in ns. With pieces of several at the device it counts for each.
    pub ns: u64,
}

impl WaitsReport {
    /// `names` are those of the places.
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
    /// Why, as in the log.
    pub why: String,
    /// Seconds since.
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
    /// Contradictory ones: data in the wrong direction, parts of sectors, too many segments.
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

/// What the kernel gave for a piece that failed, in words.
fn error_text(result: i32) -> String {
    if result < 0 {
        return std::io::Error::from_raw_os_error(-result).to_string();
    }
    format!("it ended after {result} bytes: is the file or device shorter than the disk by now?")
}

/// One VM.
#[derive(Clone, Debug, Serialize)]
pub struct VmReport {
    /// Its device.
    pub device: String,
    /// Its name.
    pub name: String,
    /// Its socket.
    pub socket: String,
    /// Its size in bytes, as its guest is told.
    pub size: u64,
    /// A QEMU is connected.
    pub connected: bool,
    /// The process of that QEMU; `null` where it is not known.
    pub peer: Option<u32>,
    /// Its guest uses the disk: a queue is served.
    pub attached: bool,
    /// Outstanding requests.
    pub outstanding: usize,
    /// Reads.
    pub read: DirectionReport,
    /// Writes, flushes, discards.
    pub write: DirectionReport,
    /// Its reservations; none for a VM without.
    pub promises: Vec<PromiseReport>,
    /// Signals of completed real-time requests to what follows the VM's urgency; `null` while none
    /// asks for them.
    pub urgent_signals: Option<u64>,
    /// For whom it has waited; `null` where that is not told apart.
    pub waits: Option<WaitsReport>,
    /// What was refused last; `null` without any.
    pub refused: Option<RefusalReport>,
    /// Pieces under a reservation.
    pub reserved: u64,
    /// Pieces as a share of the rest.
    pub shared: u64,
    /// Requests that the device failed.
    pub errors: u64,
    /// Why the last of them failed; `null` without any.
    pub last_error: Option<String>,
    /// Requests that were answered with an error, and did not reach the device.
    pub refused_requests: RefusedReport,
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
    /// Its policy. Deadlines are kept under `"edf"` only.
    pub policy: &'static str,
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

/// Version of the report: fields may be added, none is removed or changes its meaning.
pub const VERSION: u32 = 1;

/// All devices and VMs.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// [`VERSION`].
    pub version: u32,
    /// The devices.
    pub devices: Vec<DeviceReport>,
    /// Their VMs.
    pub vms: Vec<VmReport>,
    /// The networks.
    pub networks: Vec<NetworkReport>,
    /// Their ports.
    pub ports: Vec<PortReport>,
}

/// What was refused last.
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
