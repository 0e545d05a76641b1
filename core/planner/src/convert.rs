//! Conversion between a configuration (input of the models) and settings (written to the host), in
//! the kernel's units.

use std::ops::RangeInclusive;

use rtvirtio_model::{Bfq, Config, Elevator};
use rtvirtio_spec::{Reach, Spec, Task, Vm};
use rtvirtio_units::io_cost::CostQos;
use rtvirtio_units::{Bytes, Iops, Nanos, blk_throttle};

use crate::{BfqTunable, Enforcement, IoCostFile, Knob, LimitKind, Placements, PlanError, Setting};

/// Bytes per sector, the unit of `max_budget` (block/bfq-iosched.c counts budgets in 512 B
/// sectors).
const SECTOR: u64 = 512;

const TUNABLES: [BfqTunable; 5] = [
    BfqTunable::StrictGuarantees,
    BfqTunable::SliceIdle,
    BfqTunable::TimeoutSync,
    BfqTunable::LowLatency,
    BfqTunable::MaxBudget,
];

/// Settings that change `start` into `config`, in write order, without reasons.
///
/// The elevator comes first: the kernel makes new tunables with default values when it changes, so
/// tunables are compared with the defaults then, and with `start` otherwise. Tunables of an
/// elevator that is not chosen are not settings.
#[must_use]
pub fn settings_of(spec: &Spec, start: &Config, config: &Config) -> Vec<Setting> {
    let mut out = Vec::new();
    let mut push = |knob, value: String| {
        let strength =
            if matches!(knob, Knob::VmLimit { .. }) { Enforcement::Cap } else { Enforcement::Hint };
        out.push(Setting { knob, value, reason: String::new(), strength });
    };
    if config.elevator != start.elevator {
        push(Knob::HostElevator, config.elevator.name().to_owned());
    }
    for (tunable, value) in changed((start.elevator, &start.bfq), (config.elevator, &config.bfq)) {
        push(Knob::HostBfq(tunable), value);
    }
    for ((vm, old), new) in spec.vms.iter().zip(&start.vms).zip(&config.vms) {
        if new.weight != old.weight {
            push(Knob::VmWeight { vm: vm.name.clone() }, new.weight.to_string());
        }
    }
    for ((vm, old), new) in spec.vms.iter().zip(&start.vms).zip(&config.vms) {
        if new.cap != old.cap {
            for (limit, value) in limits(vm, new.cap) {
                push(Knob::VmLimit { vm: vm.name.clone(), limit }, value);
            }
        }
    }
    for ((vm, old), new) in spec.vms.iter().zip(&start.vms).zip(&config.vms) {
        if new.guest_elevator != old.guest_elevator {
            push(Knob::GuestElevator { vm: vm.name.clone() }, new.guest_elevator.name().to_owned());
        }
        for (tunable, value) in
            changed((old.guest_elevator, &old.guest_bfq), (new.guest_elevator, &new.guest_bfq))
        {
            push(Knob::GuestBfq { vm: vm.name.clone(), tunable }, value);
        }
    }
    out.sort_by_key(|s| s.knob.write_order());
    out
}

/// Configuration after `settings` are written over `start`. Those of io.cost and io.latency are
/// checked and not in it: no model covers them.
///
/// # Errors
/// [`PlanError::NoSuchVm`] and [`PlanError::BadValue`] for settings that do not belong to the spec
/// or the knob.
pub fn config_of(spec: &Spec, start: &Config, settings: &[Setting]) -> Result<Config, PlanError> {
    let mut config = start.clone();
    // A cap consists of up to two limits: a VM's first one replaces the cap of `start`.
    let mut capped = vec![false; spec.vms.len()];
    for s in settings {
        let index = |vm: &String| {
            spec.vms
                .iter()
                .position(|v| v.name == *vm)
                .filter(|&i| i < config.vms.len())
                .ok_or_else(|| PlanError::NoSuchVm { setting: describe(&s.knob), vm: vm.clone() })
        };
        match &s.knob {
            Knob::HostElevator => {
                let new = elevator(s)?;
                if new == Elevator::Bfq && config.elevator != Elevator::Bfq {
                    config.bfq = Bfq::default();
                }
                config.elevator = new;
            }
            Knob::HostBfq(tunable) => set(&mut config.bfq, *tunable, s)?,
            Knob::VmWeight { vm } => {
                let i = index(vm)?;
                config.vms[i].weight = number(s, 1..=1_000, "a whole number from 1 to 1000")? as u32;
            }
            Knob::HostIoCost(file) => {
                file.canonical(&s.value).map_err(|e| PlanError::BadValue {
                    setting: describe(&s.knob),
                    value: s.value.clone(),
                    remedy: e.to_string(),
                })?;
            }
            Knob::VmIoWeight { vm } => {
                index(vm)?;
                number(s, 1..=10_000, "a whole number from 1 to 10000")?;
            }
            Knob::VmIoLatency { vm } => {
                index(vm)?;
                if s.value != "max" {
                    number(s, 1..=u64::MAX, "a whole number of us above 0, or max")?;
                }
            }
            Knob::VmLimit { vm, limit: LimitKind::ReadIops | LimitKind::WriteIops } => {
                let i = index(vm)?;
                let before = if capped[i] { config.vms[i].cap } else { None };
                capped[i] = true;
                config.vms[i].cap = match s.value.as_str() {
                    "max" => before,
                    _ => {
                        let more = number(s, 0..=u64::MAX, "a whole number per second, or max")? as f64;
                        Some(Iops(before.map_or(0.0, |c| c.0) + more))
                    }
                };
            }
            Knob::VmLimit { vm, .. } => {
                index(vm)?;
                return Err(bad_value(s, "the models know limits on requests only, not on bytes"));
            }
            Knob::GuestElevator { vm } => {
                let i = index(vm)?;
                let new = elevator(s)?;
                if new == Elevator::Bfq && config.vms[i].guest_elevator != Elevator::Bfq {
                    config.vms[i].guest_bfq = Bfq::default();
                }
                config.vms[i].guest_elevator = new;
            }
            Knob::GuestBfq { vm, tunable } => {
                let i = index(vm)?;
                set(&mut config.vms[i].guest_bfq, *tunable, s)?;
            }
        }
    }
    Ok(config)
}

/// Refuses settings that the kernel would accept without any effect.
///
/// # Errors
/// [`PlanError::CannotAct`] with the reason; the errors of [`config_of`].
pub fn check_actable(
    spec: &Spec,
    placements: &Placements,
    start: &Config,
    settings: &[Setting],
) -> Result<(), PlanError> {
    let end = config_of(spec, start, settings)?;
    let idles = end.bfq.slice_idle.0 > 0 || end.bfq.strict_guarantees;
    let index = |name: &String| spec.vms.iter().position(|vm| vm.name == *name);
    let enables_io_cost = |s: &Setting| {
        s.knob == Knob::HostIoCost(IoCostFile::Qos) && s.value.parse::<CostQos>().is_ok_and(|qos| qos.enable)
    };
    for s in settings {
        // The VM whose cgroup the setting is of.
        let of_cgroup = match &s.knob {
            Knob::VmWeight { vm }
            | Knob::VmIoWeight { vm }
            | Knob::VmIoLatency { vm }
            | Knob::VmLimit { vm, .. } => index(vm),
            _ => None,
        };
        // The weight of a spec's only VM counts against cgroups that the spec does not name.
        let is_alone = spec.vms.len() > 1 && of_cgroup.is_some_and(|i| !placements.weights_compare(i));
        let why = match &s.knob {
            Knob::VmIoLatency { .. }
                if placements.is_under_io_cost() || settings.iter().any(enables_io_cost) =>
            {
                "io.cost is on for the device and holds the same requests back; choose one of the two"
            }
            _ if of_cgroup.is_some_and(|i| placements.writes_escape(i)) => {
                "what the VM writes goes through the host's page cache and reaches the device outside of its cgroup, \
                 where no weight or limit acts; set cache=none for its disk"
            }
            _ if of_cgroup.is_some_and(|i| !placements.limits_act(i)) => {
                "the VM has no I/O cgroup of its own, and weights and limits act only between cgroups; \
                 give each VM its own, or use I/O classes"
            }
            Knob::VmWeight { .. } | Knob::VmIoWeight { .. } if is_alone => {
                "weights compare only cgroups with one parent, and no other VM's has the same; \
                 move the VMs below one parent cgroup, such as machine.slice"
            }
            Knob::VmIoLatency { .. } if is_alone => {
                "io.latency holds back only cgroups with the same parent, and no other VM's has it; \
                 move the VMs below one parent cgroup, such as machine.slice"
            }
            Knob::VmWeight { .. } if end.elevator != Elevator::Bfq => {
                "the weight is BFQ's and the plan's elevator is another; choose bfq"
            }
            Knob::VmWeight { .. } if !idles => {
                "with slice_idle=0 BFQ serves every VM that has a request, whatever its weight; \
                 raise slice_idle, or cap the neighbour"
            }
            Knob::HostIoCost(_) if end.elevator == Elevator::Bfq && enables_io_cost(s) => {
                "BFQ divides the device too, and of the two neither share would hold; choose none or mq-deadline"
            }
            Knob::HostBfq(_) if end.elevator != Elevator::Bfq => {
                "it is a tunable of BFQ and the plan's elevator is another; choose bfq"
            }
            Knob::GuestElevator { vm } | Knob::GuestBfq { vm, .. }
                if spec.vm(vm).is_some_and(|vm| !guest_reachable(vm)) =>
            {
                "the VM has no guest agent through which its kernel could be reached: run qemu-guest-agent in it, and name its \
                 socket by `agent` where the spec has no `domain` or `proxmox`"
            }
            Knob::GuestBfq { vm, .. }
                if index(vm).is_some_and(|i| end.vms[i].guest_elevator != Elevator::Bfq) =>
            {
                "it is a tunable of BFQ and the guest's elevator is another; choose bfq in the guest"
            }
            _ => continue,
        };
        return Err(PlanError::CannotAct { setting: describe(&s.knob), why: why.to_owned() });
    }
    Ok(())
}

impl crate::Plan {
    /// The configuration that this plan leads to from `start`.
    pub fn config(&self, spec: &Spec, start: &Config) -> Result<Config, PlanError> {
        config_of(spec, start, &self.settings)
    }
}

/// Whether knobs inside the VM can be reached.
pub(crate) fn guest_reachable(vm: &Vm) -> bool {
    match &vm.reach {
        Reach::Lab(kind) => *kind == rtvirtio_spec::LabKind::Qemu,
        Reach::Existing { agent, .. } => agent.is_some(),
    }
}

/// Name of a knob for the user, such as `weight of vm0`.
pub(crate) fn describe(knob: &Knob) -> String {
    match knob {
        Knob::HostElevator => "the host's elevator".to_owned(),
        Knob::HostBfq(t) => format!("{} on the host", t.file_name()),
        Knob::HostIoCost(file) => format!("{} on the host", file.file_name()),
        Knob::VmWeight { vm } => format!("the weight of {vm}"),
        Knob::VmIoWeight { vm } => format!("io.weight of {vm}"),
        Knob::VmIoLatency { vm } => format!("io.latency of {vm}"),
        Knob::VmLimit { vm, .. } => format!("the cap on {vm}"),
        Knob::GuestElevator { vm } => format!("the elevator inside {vm}"),
        Knob::GuestBfq { vm, tunable } => format!("{} inside {vm}", tunable.file_name()),
    }
}

/// Limits that make up a cap. A VM that only reads needs one on reads, one that only writes one on
/// writes; with both, the cap is divided by the share of writes in the VM's load, weighted by rates
/// where all tasks have one, so that the two sum to it.
fn limits(vm: &Vm, cap: Option<Iops>) -> Vec<(LimitKind, String)> {
    let all_rated = vm.tasks.iter().all(|t| t.rate.is_some_and(|r| r.0 > 0.0));
    let part = |t: &Task| t.rate.filter(|_| all_rated).map_or(1.0, |r| r.0);
    let asked: f64 = vm.tasks.iter().map(part).sum();
    let share =
        vm.tasks.iter().map(|t| part(t) * t.op.write_share()).sum::<f64>() / asked.max(f64::MIN_POSITIVE);
    let whole = cap.map(|c| c.0.floor().max(1.0));
    let text = |v: Option<f64>| v.map_or("max".to_owned(), |v| format!("{v:.0}"));
    if share <= 0.0 {
        return vec![(LimitKind::ReadIops, text(whole))];
    }
    if share >= 1.0 {
        return vec![(LimitKind::WriteIops, text(whole))];
    }
    // Both parts are what the kernel holds exactly where the cap is.
    let part = |w: f64| {
        if blk_throttle::let_through(w) == w && w >= 2.0 * blk_throttle::STEP {
            blk_throttle::STEP
        } else {
            1.0
        }
    };
    let writes = whole.map(|w| {
        let part = part(w);
        ((w * share / part).round() * part).clamp(part, (w - part).max(part))
    });
    let reads = whole.zip(writes).map(|(w, x)| (w - x).max(1.0));
    vec![(LimitKind::ReadIops, text(reads)), (LimitKind::WriteIops, text(writes))]
}

/// Tunables whose value changes, with the new value.
fn changed(old: (Elevator, &Bfq), new: (Elevator, &Bfq)) -> Vec<(BfqTunable, String)> {
    if new.0 != Elevator::Bfq {
        return Vec::new();
    }
    let fresh = Bfq::default();
    let before = if old.0 == Elevator::Bfq { old.1 } else { &fresh };
    TUNABLES
        .into_iter()
        .map(|t| (t, value(before, t), value(new.1, t)))
        .filter(|(_, before, after)| before != after)
        .map(|(t, _, after)| (t, after))
        .collect()
}

/// A tunable's value as the kernel reads it.
fn value(bfq: &Bfq, tunable: BfqTunable) -> String {
    // Milliseconds, rounded up so that a short idle never becomes 0.
    let ms = |n: Nanos| n.0.div_ceil(1_000_000).to_string();
    match tunable {
        BfqTunable::SliceIdle => ms(bfq.slice_idle),
        BfqTunable::TimeoutSync => ms(bfq.timeout_sync),
        BfqTunable::LowLatency => u8::from(bfq.low_latency).to_string(),
        BfqTunable::MaxBudget => bfq.max_budget.map_or(0, |b| b.0.div_ceil(SECTOR)).to_string(),
        BfqTunable::StrictGuarantees => u8::from(bfq.strict_guarantees).to_string(),
    }
}

fn set(bfq: &mut Bfq, tunable: BfqTunable, s: &Setting) -> Result<(), PlanError> {
    let flag = || match s.value.as_str() {
        "0" => Ok(false),
        "1" => Ok(true),
        _ => Err(bad_value(s, "0 or 1")),
    };
    // The kernel holds these in 32 bits; the bound also keeps the conversions below from
    // overflowing.
    let whole = |what| number(s, 0..=i32::MAX as u64, what);
    match tunable {
        BfqTunable::SliceIdle => bfq.slice_idle = Nanos::from_millis(whole("whole milliseconds")?),
        BfqTunable::TimeoutSync => bfq.timeout_sync = Nanos::from_millis(whole("whole milliseconds")?),
        BfqTunable::LowLatency => bfq.low_latency = flag()?,
        BfqTunable::MaxBudget => {
            let sectors = whole("whole sectors of 512 B, 0 for automatic")?;
            bfq.max_budget = (sectors > 0).then_some(Bytes(sectors * SECTOR));
        }
        BfqTunable::StrictGuarantees => bfq.strict_guarantees = flag()?,
    }
    Ok(())
}

fn elevator(s: &Setting) -> Result<Elevator, PlanError> {
    [Elevator::None, Elevator::MqDeadline, Elevator::Kyber, Elevator::Bfq]
        .into_iter()
        .find(|&e| e.name() == s.value)
        .ok_or_else(|| bad_value(s, "one of none, mq-deadline, kyber, bfq"))
}

fn number(s: &Setting, range: RangeInclusive<u64>, what: &str) -> Result<u64, PlanError> {
    let number = s.value.parse::<u64>().ok().filter(|number| range.contains(number));
    number.ok_or_else(|| bad_value(s, what))
}

fn bad_value(s: &Setting, remedy: &str) -> PlanError {
    PlanError::BadValue {
        setting: describe(&s.knob),
        value: s.value.clone(),
        remedy: format!("expected {remedy}"),
    }
}

#[cfg(test)]
mod tests;
