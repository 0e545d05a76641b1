//! The status of the disks.

use std::collections::BTreeMap;

use rtvirtio_domain_config::{Disk, ReservationConfig};
use rtvirtio_domain_protocol::status::{
    DeviceStatus, DirectionStatus, DiskStatus, Neighbour, PromiseStatus, Status, VERSION, Waits,
};
use rtvirtio_sched::{self as sched, Idx, VmId, WATCHED};

use crate::blk::Refused;
use crate::disk::Member;
use crate::engine::{Command, Faults, PromiseCounters, RefusedRequests, VmStatus};
use crate::network_report;
use crate::running::Running;
use crate::service_report::{last_refusal, regulators, service};

/// For whom a VM has waited; `names` are those of the places.
fn waits_of(vm: VmId, waits: &sched::Waits, names: &[Option<&str>]) -> Waits {
    let vm = vm.index();
    let at = |place: usize| waits.by.get(place).map_or(0, |ns| ns.0);
    let is_shared = |place: usize| place + 1 == WATCHED && names.len() > WATCHED;
    let name = |place: usize| match names.get(place) {
        _ if is_shared(place) => Some("others"),
        Some(name) => *name,
        None => None,
    };
    let others = (0..waits.by.len()).filter(|place| *place != vm && at(*place) > 0);
    let neighbours =
        others.filter_map(|place| Some(Neighbour { name: name(place)?.to_owned(), ns: at(place) }));
    Waits {
        queued_ns: waits.queued.0,
        idle_ns: waits.idle.0,
        own_ns: at(vm),
        neighbours: neighbours.collect(),
    }
}

/// Error of a failed piece, in words.
fn error_text(result: i32) -> String {
    if result < 0 {
        return std::io::Error::from_raw_os_error(-result).to_string();
    }
    format!("it ended after {result} bytes: is the file or device shorter than the disk by now?")
}

fn by_reason(refused: RefusedRequests) -> BTreeMap<String, u64> {
    Refused::ALL.into_iter().map(|why| (why.name().to_owned(), refused.count_of(why))).collect()
}

fn disk_status(
    device: &str,
    disk: Option<&Disk>,
    member: &Member,
    waits: Option<Waits>,
    vm: VmStatus,
) -> DiskStatus {
    let direction = |i: usize| DirectionStatus {
        requests: Some(vm.counters.completed[i]),
        service: service(&vm.latencies[i], vm.contracts[i], vm.counters.bytes[i], vm.counters.cap_hits[i]),
    };
    let refused = last_refusal(member.server.refusals());
    let Faults { malformed, refused: refused_requests, errors, last_error, broken_queues } = vm.faults;
    let promise = |key: &str, reservation: Option<ReservationConfig>, seen: &PromiseCounters| {
        reservation.map(|r| PromiseStatus {
            key: String::from(key),
            share: Some(r.share.0),
            burst_ns: Some(r.burst.0),
            deadline_ns: Some(r.deadline.0),
            requests: Some(seen.requests),
            worst_ns: Some(seen.worst.0),
            missed: Some(seen.missed),
        })
    };
    let promises = [
        promise("urgent", disk.and_then(|d| d.urgent), &vm.promises[0]),
        promise("reserve", disk.and_then(|d| d.reserve), &vm.promises[1]),
    ];
    DiskStatus {
        device: device.to_owned(),
        socket: disk.map(|d| d.socket.display().to_string()).unwrap_or_default(),
        size: Some(member.part.size()),
        connected: member.server.is_connected(),
        peer: member.server.peer(),
        promises: promises.into_iter().flatten().collect(),
        urgent_signals: vm.urgent_signals,
        waits,
        refused,
        attached: vm.queues > 0,
        trusted: disk.map(|d| d.trust),
        outstanding: Some(vm.outstanding as u64),
        read: direction(0),
        write: direction(1),
        reserved: Some(vm.counters.reserved),
        shared: Some(vm.counters.shared),
        errors: Some(errors),
        last_error: last_error.map(error_text),
        refused_requests: by_reason(refused_requests),
        malformed: Some(malformed),
        broken: Some(broken_queues),
        waiting_for_room: Some(vm.waiting_for_room),
        waited_for_room: Some(vm.waited_for_room),
        name: vm.name,
    }
}

impl Running {
    /// Snapshot of all counters. Each VM is a command of its own: an engine serves
    /// guests in between, and shares its histograms instead of copying them.
    #[must_use]
    pub fn status(&self) -> Status {
        let mut all = Status { version: VERSION, ..Status::default() };
        (all.networks, all.ports) = network_report::networks(self);
        let state = self.state();
        let devices = self.engines().iter().zip(&state.places).zip(&state.file.devices);
        for (((name, handle), places), device) in devices {
            let Ok(status) = handle.ask(|reply| Command::Status { reply }) else { continue };
            all.devices.push(DeviceStatus {
                name: name.clone(),
                policy: device.policy.name().to_owned(),
                window: Some(status.window),
                regulators: regulators(&status.regulator_lateness),
                discard_pieces: Some(status.deallocations.pieces),
                discard_longest_ns: Some(status.deallocations.longest.0),
                discard_overruns: Some(status.deallocations.overruns),
            });
            let names: Vec<Option<&str>> =
                places.iter().map(|member| member.as_ref().map(|m| m.name())).collect();
            for (vm, member) in places.iter_enumerated() {
                let Some(member) = member else { continue };
                let asked = handle.ask(|reply| Command::VmStatus { vm, reply });
                let Ok(Some(status)) = asked else { continue };
                let disk = device.disks.iter().find(|disk| disk.name == member.name());
                let waits = status.waits.as_ref().map(|waits| waits_of(vm, waits, &names));
                all.vms.push(disk_status(name, disk, member, waits, *status));
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
        let waits = sched::Waits {
            queued: Nanos(100),
            idle: Nanos(5),
            by: [10, 0, 70, 30].into_iter().map(Nanos).collect(),
        };
        let report = waits_of(VmId(0), &waits, &[Some("plc"), Some("hmi"), Some("bulk"), None]);
        let bulk = Neighbour { name: "bulk".to_owned(), ns: 70 };
        let expected = Waits { queued_ns: 100, idle_ns: 5, own_ns: 10, neighbours: vec![bulk] };
        assert_eq!(report, expected);
        // Of more places than are told apart the last one stands for the rest.
        let names = vec![Some("x"); WATCHED + 1];
        let by = (0..WATCHED as u64).map(|i| Nanos(u64::from(i + 1 == WATCHED as u64))).collect();
        let report = waits_of(VmId(0), &sched::Waits { by, ..waits }, &names);
        assert_eq!(report.neighbours, [Neighbour { name: "others".to_owned(), ns: 1 }]);
    }
}
