//! From knobs to files: path, text and order of the writes, and whether they can act at all.

mod guest;
mod io_cost;
mod vm;

use std::collections::BTreeMap;
use std::path::PathBuf;

use rtvirtio_kernel::block::RESET_BY_ELEVATOR;
use rtvirtio_kernel::{BlockDevice, Cgroups, Stack, text};
use rtvirtio_planner::{BfqTunable, Knob, Plan};
use rtvirtio_vmm::AgentAddress;
use serde::{Deserialize, Serialize};

use crate::error::ApplyError;
use crate::machine::Machine;
use crate::target::{Form, Target};

/// BFQ holds `slice_idle` in 32 bits of nanoseconds and truncates it without an error (measured on
/// 6.18: 100000 reads as 1215).
const SLICE_IDLE_MAX_MS: u64 = 4294;

/// Devices, cgroups and VMs that a plan's names refer to on this machine.
#[derive(Clone, Debug)]
pub struct Binding {
    /// The shared device, with the disks on which its requests are scheduled.
    pub stack: Stack,
    /// The hierarchy of the block I/O controller; needed for weights and limits.
    pub cgroups: Option<Cgroups>,
    /// The VMs by name.
    pub vms: BTreeMap<String, VmBinding>,
}

/// Cgroup, agent and disks of a VM.
#[derive(Clone, Debug, Default)]
pub struct VmBinding {
    /// Path of its cgroup below the hierarchy's root.
    pub cgroup: Option<PathBuf>,
    /// Address of its guest agent.
    pub agent: Option<AgentAddress>,
    /// Kernel names, inside the guest, of its disks on the device, such as `vda`.
    pub guest_disks: Vec<String>,
}

/// Write of one value to one file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Write {
    /// The setting as users know it, such as `slice_idle of loop3` or `weight of vm0`.
    pub knob: String,
    /// File or thread that is written.
    pub target: Target,
    /// The value; what is written is `target.form.text(value)`.
    pub value: String,
    /// Position of an earlier write that brings the file into being, such as the elevator whose
    /// tunable this is.
    pub created_by: Option<usize>,
    /// Further values that the file may have because of another of our writes.
    pub also_ours: Vec<String>,
    /// Values among which a program moves a thread's setting while it is in force
    /// ([`crate::Levels`]). Each counts as in force, and as ours.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub levels: Vec<String>,
    /// Files that the kernel changes along with this one; they are captured too and put back after
    /// it.
    pub side_effects: Vec<Target>,
    /// Whether it takes what earlier writes of the same call give: [`crate::Session::amend`] leaves
    /// it out when one of these was not done. Another that takes does not count.
    pub takes: bool,
}

impl Write {
    /// A write that depends on no other and changes no other file.
    #[must_use]
    pub fn new(knob: impl Into<String>, target: Target, value: impl Into<String>) -> Self {
        Self {
            knob: knob.into(),
            target,
            value: value.into(),
            created_by: None,
            also_ours: Vec::new(),
            levels: Vec::new(),
            side_effects: Vec::new(),
            takes: false,
        }
    }
}

/// Appends writes that were resolved on their own, with their references shifted.
pub fn append(writes: &mut Vec<Write>, more: Vec<Write>) {
    let offset = writes.len();
    writes.extend(more.into_iter().map(|w| Write { created_by: w.created_by.map(|i| i + offset), ..w }));
}

/// Appends the writes of another device to those before. A file that both set to one value, as the
/// I/O control of a cgroup above the VMs, is written once.
///
/// # Errors
/// [`ApplyError::CannotAct`] when they set a file to different values.
pub fn merge(writes: &mut Vec<Write>, more: Vec<Write>) -> Result<(), ApplyError> {
    let mut places: Vec<usize> = Vec::with_capacity(more.len());
    for write in more {
        let created_by = write.created_by.and_then(|by| places.get(by).copied());
        match writes.iter().position(|w| w.target == write.target) {
            Some(place) if writes[place].value == write.value => places.push(place),
            Some(_) => {
                return Err(cannot(
                    &write.knob,
                    format!("another device of the spec sets {} to another value", write.target),
                    "this setting acts on all devices: give the VM the same one on each, or leave one out",
                ));
            }
            None => {
                places.push(writes.len());
                writes.push(Write { created_by, ..write });
            }
        }
    }
    Ok(())
}

/// Turns a plan into writes, in the order in which they must happen: elevator, its tunables,
/// io.cost, cgroup controllers, weights, latency targets and limits, guests.
///
/// # Errors
/// [`ApplyError::CannotAct`] for a plan that would have no effect or another one than meant.
/// Nothing is written.
pub fn resolve(plan: &Plan, binding: &Binding, machine: &Machine<'_>) -> Result<Vec<Write>, ApplyError> {
    let mut values = BTreeMap::new();
    for setting in &plan.settings {
        if values.insert(setting.knob.clone(), setting.value.trim().to_owned()).is_some() {
            return Err(cannot(
                &format!("{:?}", setting.knob),
                "the plan sets it twice",
                "remove one of the two settings from the plan",
            ));
        }
    }
    let mut writes = Vec::new();
    let elevators = host_queues(&values, binding, machine, &mut writes)?;
    let io_cost_acts = io_cost::host_io_cost(&values, binding, machine, &elevators, &mut writes)?;
    io_cost::bfq_is_alone(&values, binding, machine, &elevators)?;
    io_cost::io_latency_is_alone(&values, binding, machine)?;
    let on = vm::Acting { elevators: &elevators, io_cost: io_cost_acts };
    vm::weights_and_limits(&values, binding, machine, on, &mut writes)?;
    guest::queues(&values, binding, machine, &mut writes)?;
    Ok(writes)
}

/// The writes that change the elevator of the shared device, or of the disks below it, and nothing
/// else.
///
/// # Errors
/// When the kernel does not offer it, or the device's settings cannot be read.
pub fn elevator_writes(
    elevator: &str,
    binding: &Binding,
    machine: &Machine<'_>,
) -> Result<Vec<Write>, ApplyError> {
    let values = BTreeMap::from([(Knob::HostElevator, elevator.to_owned())]);
    let mut writes = Vec::new();
    host_queues(&values, binding, machine, &mut writes)?;
    Ok(writes)
}

/// Settings of VMs while they are raised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Raised {
    /// BFQ weight of each VM.
    pub weight: u32,
    /// BFQ's `slice_idle` of the device, in ms: how long it waits for the next request of a VM that
    /// has its turn. `None` to leave it as it is.
    pub slice_idle: Option<u32>,
}

/// Writes that allow VMs of a device to be raised.
#[derive(Clone, Debug)]
pub struct RaiseWrites {
    /// The VMs' weights, after the writes that these depend on.
    pub of_vms: Vec<Write>,
    /// The `slice_idle` of each disk below the device, which all its VMs share.
    pub of_device: Vec<Write>,
}

/// Writes by which VMs can be raised while they are in force: each VM keeps the weight that it has,
/// and the raised one is a [level](Write::levels) of it. So with the device's `slice_idle`.
///
/// # Errors
/// As [`resolve`] for a weight, such as when BFQ is not the elevator or the VM has no cgroup of its
/// own.
pub fn raise_writes(
    vms: &[&str],
    raised: Raised,
    binding: &Binding,
    machine: &Machine<'_>,
) -> Result<RaiseWrites, ApplyError> {
    let (mut of_vms, mut of_device) = (Vec::new(), Vec::new());
    let mut values = BTreeMap::new();
    let weight = raised.weight.to_string();
    for vm in vms {
        values.insert(Knob::VmWeight { vm: (*vm).to_owned() }, weight.clone());
    }
    let elevators = host_queues(&values, binding, machine, &mut of_vms)?;
    let on = vm::Acting { elevators: &elevators, io_cost: false };
    vm::weights_and_limits(&values, binding, machine, on, &mut of_vms)?;
    for write in of_vms.iter_mut().filter(|w| w.value == weight) {
        let level = std::mem::replace(&mut write.value, vm::weight_now(&write.target, machine)?);
        write.levels.push(level);
    }
    let Some(idle) = raised.slice_idle else { return Ok(RaiseWrites { of_vms, of_device }) };
    let file = format!("iosched/{}", BfqTunable::SliceIdle.file_name());
    for (disk, _) in binding.stack.disks.iter().zip(&elevators).filter(|(_, elevator)| *elevator == "bfq") {
        let target = Target::host(disk.queue("scheduler"), Form::Plain).sibling(&file);
        let now = machine.root().read(&target.path)?.trim().to_owned();
        // The file in ms would lose a fraction of a millisecond.
        let us = machine.root().read_optional(target.sibling("slice_idle_us").path)?;
        let is_whole = |us: String| us.trim().parse() == now.parse().map(|ms: u64| ms * 1000);
        if !us.is_none_or(is_whole) {
            continue;
        }
        let knob = format!("{} of {}", BfqTunable::SliceIdle.file_name(), disk.name);
        of_device.push(Write { levels: vec![idle.to_string()], ..Write::new(knob, target, now) });
    }
    Ok(RaiseWrites { of_vms, of_device })
}

pub(crate) fn cannot(knob: &str, why: impl Into<String>, remedy: impl Into<String>) -> ApplyError {
    ApplyError::CannotAct { knob: knob.to_owned(), why: why.into(), remedy: remedy.into() }
}

/// The host's elevator and tunables, on each disk that schedules; returns the elevators that will
/// be in use, disk by disk.
fn host_queues(
    values: &BTreeMap<Knob, String>,
    binding: &Binding,
    machine: &Machine<'_>,
    writes: &mut Vec<Write>,
) -> Result<Vec<String>, ApplyError> {
    let stack = &binding.stack;
    if stack.disks.is_empty() {
        if let Some(wanted) = values.get(&Knob::HostElevator) {
            stack.offers(machine.root(), wanted)?;
        }
        if values.keys().any(|knob| matches!(knob, Knob::HostBfq(_))) {
            stack.offers(machine.root(), "bfq")?;
        }
    }
    stack.disks.iter().map(|disk| host_queue(disk, values, binding, machine, writes)).collect()
}

/// Elevator and tunables of one disk; returns the elevator that will be in use.
fn host_queue(
    device: &BlockDevice,
    values: &BTreeMap<Knob, String>,
    binding: &Binding,
    machine: &Machine<'_>,
    writes: &mut Vec<Write>,
) -> Result<String, ApplyError> {
    let root = machine.root();
    let current = device.elevators(root)?.current;
    let tunables: BTreeMap<BfqTunable, &String> = values
        .iter()
        .filter_map(|(knob, value)| match knob {
            Knob::HostBfq(t) => Some((*t, value)),
            _ => None,
        })
        .collect();
    let mut elevator = current.clone();
    let mut created_by = None;
    if let Some(wanted) = values.get(&Knob::HostElevator) {
        device.offers(root, wanted)?;
        elevator.clone_from(wanted);
        let target = Target::host(device.queue("scheduler"), Form::Elevator);
        let mut write = Write::new(format!("elevator of {}", device.name), target, wanted);
        if *wanted != current {
            created_by = Some(writes.len());
            write.side_effects = reset_by_elevator(device, binding, machine, &current)?;
        }
        writes.push(write);
    }
    if let (false, Some(first)) = (elevator == "bfq", tunables.keys().next()) {
        return Err(cannot(
            &format!("{} of {}", first.file_name(), device.name),
            format!("it is a tunable of BFQ, and the elevator is `{elevator}`"),
            "let the plan set the elevator to `bfq`, or drop the tunable",
        ));
    }
    let at = Target::host(device.queue("scheduler"), Form::Plain);
    push_tunables(
        &tunables,
        &device.name,
        |file| at.sibling(&format!("iosched/{file}")),
        created_by,
        writes,
    )?;
    Ok(elevator)
}

/// Settings that the kernel resets when the elevator of a disk changes from `old`.
fn reset_by_elevator(
    device: &BlockDevice,
    binding: &Binding,
    machine: &Machine<'_>,
    old: &str,
) -> Result<Vec<Target>, ApplyError> {
    let root = machine.root();
    // The files of the queue first, nr_requests before all: writing it changes async_depth, which
    // is a file of the queue or a tunable of some elevators.
    let mut targets: Vec<_> =
        RESET_BY_ELEVATOR.iter().map(|f| Target::host(device.queue(f), Form::Plain)).collect();
    for file in device.tunables(root)?.into_keys() {
        targets.push(Target::host(device.tunable(&file), Form::Plain));
    }
    // Leaving BFQ drops the weights that any cgroup has for this device.
    if let (true, Some(cgroups)) = (old == "bfq", &binding.cgroups) {
        let form = || Form::DeviceWeight { dev: device.dev.clone() };
        for dir in cgroups.all_dirs(root)? {
            for name in ["io.bfq.weight", "blkio.bfq.weight_device"] {
                let path = dir.join(name);
                let Some(file) = root.read_optional(&path)? else { continue };
                let weights = text::weights(&file)
                    .ok_or_else(|| ApplyError::Form { label: path.display().to_string(), text: file })?;
                if weights.devices.contains_key(&device.dev) {
                    targets.push(Target::host(path, form()));
                }
            }
        }
    }
    Ok(targets)
}

/// Tunables of one BFQ instance, on the host or in a guest.
pub(crate) fn push_tunables(
    tunables: &BTreeMap<BfqTunable, &String>,
    disk: &str,
    at: impl Fn(&str) -> Target,
    created_by: Option<usize>,
    writes: &mut Vec<Write>,
) -> Result<(), ApplyError> {
    let strict = tunables.contains_key(&BfqTunable::StrictGuarantees);
    // In the order of `BfqTunable`, which is that of writing.
    for (tunable, value) in tunables {
        let knob = format!("{} of {disk}", tunable.file_name());
        validate(*tunable, value, &knob)?;
        let mut target = at(tunable.file_name());
        if *tunable == BfqTunable::TimeoutSync {
            target.form = Form::Jiffies;
        }
        let mut write = Write { created_by, ..Write::new(knob, target, *value) };
        match tunable {
            // The file in ms truncates; the one in us restores a fraction exactly.
            BfqTunable::SliceIdle => {
                write.side_effects.push(at("slice_idle_us"));
                if strict {
                    write.also_ours.push("8".to_owned());
                }
            }
            // Setting it, now or when it is put back, raises a short slice_idle. Where the plan has
            // that knob too, its fraction of a millisecond is still only in the other file, and is
            // not captured along with a knob that has its value already.
            BfqTunable::StrictGuarantees => {
                if !tunables.contains_key(&BfqTunable::SliceIdle) {
                    write.side_effects.push(at("slice_idle"));
                }
                write.side_effects.push(at("slice_idle_us"));
            }
            _ => {}
        }
        writes.push(write);
    }
    Ok(())
}

fn validate(tunable: BfqTunable, value: &str, knob: &str) -> Result<(), ApplyError> {
    let largest = match tunable {
        BfqTunable::LowLatency | BfqTunable::StrictGuarantees => 1,
        BfqTunable::SliceIdle => SLICE_IDLE_MAX_MS,
        BfqTunable::TimeoutSync | BfqTunable::MaxBudget => i32::MAX.unsigned_abs().into(),
    };
    if value.parse::<u64>().is_ok_and(|v| v <= largest) {
        return Ok(());
    }
    Err(cannot(
        knob,
        format!("`{value}` is not a whole number from 0 to {largest}"),
        "correct it in the plan",
    ))
}
