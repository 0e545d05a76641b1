//! Elevator and tunables inside guests.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rtvirtio_kernel::block::RESET_BY_ELEVATOR;
use rtvirtio_kernel::text;
use rtvirtio_planner::{BfqTunable, Knob};
use rtvirtio_vmm::AgentAddress;

use super::{Binding, Write, cannot, push_tunables};
use crate::error::ApplyError;
use crate::machine::{Fault, Machine};
use crate::target::{Form, Place, Target};

/// Tunables by elevator. An agent cannot list a directory; files that a guest's kernel does not
/// have are left out.
const TUNABLES: [(&str, &[&str]); 3] = [
    (
        "bfq",
        &[
            "back_seek_max",
            "back_seek_penalty",
            "fifo_expire_async",
            "fifo_expire_sync",
            "low_latency",
            "max_budget",
            "slice_idle",
            "slice_idle_us",
            "strict_guarantees",
            "timeout_sync",
        ],
    ),
    (
        "mq-deadline",
        &[
            "async_depth",
            "fifo_batch",
            "front_merges",
            "prio_aging_expire",
            "read_expire",
            "write_expire",
            "writes_starved",
        ],
    ),
    ("kyber", &["read_lat_nsec", "write_lat_nsec"]),
];

pub(super) fn queues(
    values: &BTreeMap<Knob, String>,
    binding: &Binding,
    machine: &Machine<'_>,
    writes: &mut Vec<Write>,
) -> Result<(), ApplyError> {
    let mut vms: BTreeMap<&str, (Option<&String>, BTreeMap<BfqTunable, &String>)> = BTreeMap::new();
    for (knob, value) in values {
        match knob {
            Knob::GuestElevator { vm } => vms.entry(vm).or_default().0 = Some(value),
            Knob::GuestBfq { vm, tunable } => {
                vms.entry(vm).or_default().1.insert(*tunable, value);
            }
            _ => {}
        }
    }
    for (vm, (elevator, tunables)) in vms {
        let bound = binding.vms.get(vm);
        let Some(agent) = bound.and_then(|b| b.agent.as_ref()) else {
            return Err(cannot(
                &format!("elevator in {vm}"),
                "the VM has no guest agent",
                "run qemu-guest-agent in it; for a VM that is not named by `domain` or `proxmox` give its socket as `agent` in the spec",
            ));
        };
        // Without any disk, the empty name leads to the error that asks for one in the spec.
        let disks = bound.map(|b| b.guest_disks.as_slice()).filter(|d| !d.is_empty());
        for disk in disks.unwrap_or(&[String::new()]) {
            queue((vm, agent, disk), elevator, &tunables, machine, writes)?;
        }
    }
    Ok(())
}

/// Writes for one disk inside a guest.
fn queue(
    (vm, agent, disk): (&str, &AgentAddress, &str),
    elevator: Option<&String>,
    tunables: &BTreeMap<BfqTunable, &String>,
    machine: &Machine<'_>,
    writes: &mut Vec<Write>,
) -> Result<(), ApplyError> {
    let knob = format!("elevator of {disk} in {vm}");
    if disk.is_empty() || disk.contains('/') || disk == "." || disk == ".." {
        return Err(cannot(
            &knob,
            format!("`{disk}` is not a disk's name inside the guest"),
            "give it in the spec, e.g. disk = \"/dev/vda\"",
        ));
    }
    let place = Place::Guest { vm: vm.to_owned(), agent: agent.clone() };
    let queue: PathBuf = Path::new("/sys/block").join(disk).join("queue");
    let at = |file: &str, form| Target { place: place.clone(), path: queue.join(file), form };
    let scheduler = at("scheduler", Form::Elevator);
    let line = machine.read(&scheduler).map_err(|fault| match fault {
        Fault::Gone(e) => cannot(
            &knob,
            format!("{scheduler} cannot be reached: {e}"),
            "is the guest running, with this disk?",
        ),
        Fault::Io(e) => cannot(&knob, format!("{scheduler} cannot be read: {e}"), "is its agent answering?"),
    })?;
    let Some(offered) = text::elevators(&line) else {
        return Err(ApplyError::Form { label: scheduler.to_string(), text: line.trim().to_owned() });
    };
    let mut current = offered.current.clone();
    let mut created_by = None;
    if let Some(wanted) = elevator {
        if !offered.available.contains(wanted) {
            return Err(cannot(
                &knob,
                format!(
                    "the guest does not offer `{wanted}` for {disk} (it offers: {})",
                    offered.available.join(", ")
                ),
                format!("load it in the guest, e.g. `modprobe {wanted}`"),
            ));
        }
        let mut write = Write::new(&knob, scheduler, wanted);
        if *wanted != current {
            created_by = Some(writes.len());
            let known =
                TUNABLES.iter().find(|(name, _)| *name == current).map_or(&[][..], |(_, files)| files);
            write.side_effects.extend(RESET_BY_ELEVATOR.iter().map(|f| at(f, Form::Plain)));
            write.side_effects.extend(known.iter().map(|f| at(&format!("iosched/{f}"), Form::Plain)));
        }
        current.clone_from(wanted);
        writes.push(write);
    }
    if let (false, Some(first)) = (current == "bfq", tunables.keys().next()) {
        return Err(cannot(
            &format!("{} in {vm}", first.file_name()),
            format!("it is a tunable of BFQ, and the guest's elevator is `{current}`"),
            "let the plan set the guest's elevator to `bfq`, or drop the tunable",
        ));
    }
    let name = format!("{disk} in {vm}");
    push_tunables(tunables, &name, |file| at(&format!("iosched/{file}"), Form::Plain), created_by, writes)
}
