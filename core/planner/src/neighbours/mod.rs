//! From the targets of some VMs to the limits of the others: the largest rate, with its burst and
//! peak, at which the targets hold in the worst case.
//!
//! Network calculus ([`rtvirtio_traffic::Service`]) gives the service left by limited traffic, on
//! the device's profile, in units of device time and for any order of service; or on a measured
//! curve of one victim and one neighbour ([`VictimCurve`]), in requests.

mod by_curve;
mod by_profile;
mod error;

use rtvirtio_model::Profile;
use rtvirtio_spec::{Arrival as Loop, Op, Spec, Task, Vm};
use rtvirtio_traffic::{
    Actuator, Arrival, CompileError, Direction, Place, Service, ServiceTarget, Tspec, Unit, VictimCurve,
    compile,
};
use rtvirtio_units::{Bytes, blk_throttle};
use serde::Serialize;

pub use error::NeighbourError;

/// Usual bound on late wake-ups of a regulator, s: a burst of this length keeps the rate.
const LATE: f64 = 0.01;
/// Largest rate that a spec takes, per second.
const MAX_RATE: f64 = 10e6;

/// Service that a VM must get, whatever targets its tasks have.
#[derive(Clone, Debug, PartialEq)]
pub struct AskedService {
    pub vm: String,
    /// alpha in requests per second of its largest size, and Delta.
    pub service: ServiceTarget,
}

/// Inputs of the choice beyond spec and profile.
#[derive(Clone, Debug)]
pub struct NeighbourOptions<'a> {
    /// Services of VMs beyond their tasks' targets.
    pub asked: &'a [AskedService],
    /// A measured curve in place of the profile's numbers.
    pub curve: Option<&'a VictimCurve>,
    /// The regulator that will enforce the limits: its own burst counts.
    pub actuator: Actuator,
}

/// Chosen limits and the resulting bounds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NeighbourPlan {
    /// Source of the bounds: `profile` or `curve`.
    pub basis: &'static str,
    /// The regulator that the bounds are for.
    pub actuator: Actuator,
    /// Limits in the order of the spec.
    pub limits: Vec<NeighbourLimit>,
    /// Worst case of each target under these limits.
    pub victims: Vec<VictimOutlook>,
    /// Assumptions of the bounds, one sentence each.
    pub notes: Vec<String>,
}

/// The limit of one direction of a VM.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NeighbourLimit {
    pub vm: String,
    /// Direction that is limited, reads or writes.
    pub direction: Direction,
    /// Size of the VM's largest request, for which the limit is computed.
    pub block: Bytes,
    /// Requests: rate, burst, peak.
    pub tspec: Tspec,
    /// Arrivals that the regulator lets through in the worst case.
    pub kept: Arrival,
    /// Whether the spec declares the limit; else it is chosen.
    pub given: bool,
}

/// A need and its service in the worst case.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct VictimOutlook {
    pub vm: String,
    /// The task; `None` for alpha and Delta of the whole VM.
    pub task: Option<String>,
    /// Requests per second of the task, or alpha as asked.
    pub rate: f64,
    /// Shortest target of the task, or Delta as asked, in seconds.
    pub within: f64,
    /// Longest latency of a request, or Delta, in the worst case; `None` without a bound, in
    /// seconds.
    pub bound: Option<f64>,
    /// Requests per second that are left to the victim in the worst case.
    pub alpha: f64,
    /// Service by the measured curve at these limits; `None` without a curve.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expected: Option<Service>,
}

impl VictimOutlook {
    fn is_held(&self) -> bool {
        self.alpha >= self.rate && self.bound.is_some_and(|bound| bound <= self.within)
    }
}

/// A target of a task, or a service asked for a whole VM.
#[derive(Clone, Debug)]
struct Need<'a> {
    vm: &'a Vm,
    /// `None` for alpha and Delta of the whole VM, of which `largest` is the largest task.
    task: Option<&'a Task>,
    largest: &'a Task,
    rate: f64,
    within: f64,
    /// Requests that may come at once.
    burst: f64,
}

impl Need<'_> {
    fn outlook(&self, bound: Option<f64>, alpha: f64, expected: Option<Service>) -> VictimOutlook {
        let task = self.task.map(|task| task.name.clone());
        let (rate, within) = (self.rate, self.within);
        VictimOutlook { vm: self.vm.name.clone(), task, rate, within, bound, alpha, expected }
    }
}

/// Traffic of a VM without a target in one direction.
#[derive(Clone, Debug)]
struct Neighbour<'a> {
    vm: &'a Vm,
    direction: Direction,
    /// Sizes of the smallest and the largest request.
    blocks: (Bytes, Bytes),
    depth: u32,
    /// Limit that the spec declares.
    given: Option<Tspec>,
}

impl Neighbour<'_> {
    fn limit(&self, tspec: Tspec, actuator: Actuator) -> Result<NeighbourLimit, NeighbourError> {
        let compiled = compile(&tspec, self.direction, &place(actuator)?)?;
        let missing = || CompileError::Missing {
            actuator,
            what: "a rate that it bounds: no less than 10 requests/s".to_owned(),
        };
        Ok(NeighbourLimit {
            vm: self.vm.name.clone(),
            direction: self.direction,
            block: self.blocks.1,
            tspec,
            kept: compiled.kept.ok_or_else(missing)?,
            given: self.given.is_some(),
        })
    }
}

/// Checks that a regulator can hold the limits that are chosen.
pub fn check_actuator(actuator: Actuator) -> Result<(), NeighbourError> {
    place(actuator).map(drop)
}

/// Chooses the limits.
///
/// # Errors
/// [`NeighbourError`]: a missing input, or the victim that no limit satisfies.
pub fn neighbours(
    spec: &Spec,
    profile: Option<&Profile>,
    options: &NeighbourOptions<'_>,
) -> Result<NeighbourPlan, NeighbourError> {
    place(options.actuator)?;
    let needs = needs(spec, options.asked)?;
    let is_victim = |vm: &Vm| needs.iter().any(|need| need.vm.name == vm.name);
    let all: Vec<Neighbour<'_>> = spec.vms.iter().filter(|vm| !is_victim(vm)).flat_map(directions).collect();
    if all.iter().all(|one| one.given.is_some()) {
        return Err(NeighbourError::NoNeighbour);
    }
    let mut plan = match (options.curve, profile) {
        (Some(curve), _) => by_curve::choose(curve, &needs, &all, options.actuator)?,
        (None, Some(profile)) => by_profile::choose(profile, &needs, &all, options.actuator)?,
        (None, None) => return Err(NeighbourError::NoBasis),
    };
    for limit in plan.limits.iter().filter(|limit| !limit.given) {
        let has = |d: Direction| all.iter().any(|one| one.vm.name == limit.vm && one.direction == d);
        for (other, says) in [(Direction::Read, "reads"), (Direction::Write, "writes")] {
            if !has(other) {
                plan.notes.push(format!(
                    "vm {}: no task of it {says}; if it may, give it traffic.{} too",
                    limit.vm,
                    other.name()
                ));
            }
        }
    }
    plan.notes.push("a limit counts requests: each of at most the size that is shown".to_owned());
    plan.notes.dedup();
    Ok(plan)
}

/// Place of a regulator without cgroup and device, on which its limit does not depend.
fn place(actuator: Actuator) -> Result<Place, NeighbourError> {
    let (cgroup, dev) = (String::new(), String::new());
    match actuator {
        Actuator::IoDomain => Ok(Place::IoDomain),
        Actuator::IoMax => Ok(Place::IoMax { cgroup, dev }),
        Actuator::ThrottleV1 => Ok(Place::ThrottleV1 { cgroup, dev }),
        // libvirt sets QEMU's.
        Actuator::Qemu | Actuator::Libvirt => Err(NeighbourError::Joins { actuator }),
        _ => Err(NeighbourError::NotOfDisks { actuator }),
    }
}

/// Needs of tasks with targets and of VMs with an asked service.
fn needs<'a>(spec: &'a Spec, asked: &[AskedService]) -> Result<Vec<Need<'a>>, NeighbourError> {
    let mut all = Vec::new();
    for vm in &spec.vms {
        if !is_asked(vm, asked) {
            continue;
        }
        let service = asked.iter().find(|one| one.vm == vm.name);
        for task in &vm.tasks {
            if task.sync.is_some() {
                return Err(NeighbourError::Synced { vm: vm.name.clone(), task: task.name.clone() });
            }
            let Some(target) = task.tightest_target() else {
                // Next to other VMs with a target, the load of its tasks must be known.
                let alone = || spec.vms.iter().all(|v| v.name == vm.name || !is_asked(v, asked));
                if service.is_some() && alone() {
                    continue;
                }
                return Err(NeighbourError::Mixed { vm: vm.name.clone(), task: task.name.clone() });
            };
            all.push(Need {
                vm,
                task: Some(task),
                largest: task,
                rate: task.rate.map_or(0.0, |rate| rate.0),
                within: target.latency.as_secs_f64(),
                burst: if task.rate.is_some() { f64::from(task.at_once()) } else { f64::from(task.depth) },
            });
        }
        if let (Some(one), Some(largest)) = (service, vm.tasks.iter().max_by_key(|task| task.block)) {
            let (rate, within) = (one.service.alpha, one.service.delta);
            all.push(Need { vm, task: None, largest, rate, within, burst: 1.0 });
        }
    }
    if let Some(one) = asked.iter().find(|one| spec.vm(&one.vm).is_none()) {
        return Err(NeighbourError::NoSuchVm { vm: one.vm.clone() });
    }
    if all.is_empty() { Err(NeighbourError::NoVictim) } else { Ok(all) }
}

fn is_asked(vm: &Vm, asked: &[AskedService]) -> bool {
    vm.tightest_target().is_some() || asked.iter().any(|one| one.vm == vm.name)
}

/// The directions in which a VM's tasks move data.
fn directions(vm: &Vm) -> Vec<Neighbour<'_>> {
    // Of two limits either is a bound; where all requests are alike, this one is the tighter.
    let given = |direction: Direction, largest: Bytes| {
        let limits = Tspec::all(&vm.traffic).filter(|(way, _)| *way == direction);
        limits.map(|(_, tspec)| tspec).min_by_key(|tspec| match tspec.unit {
            Unit::Bytes => tspec.rate,
            Unit::Requests => tspec.rate.saturating_mul(largest.0),
        })
    };
    let of = |direction: Direction| {
        let tasks: Vec<&Task> = vm.tasks.iter().filter(|task| goes(task.op, direction)).collect();
        let smallest = |task: &&Task| task.mix.first().map_or(task.block, |one| one.size);
        let blocks = (tasks.iter().map(smallest).min()?, tasks.iter().map(|task| task.block).max()?);
        Some(Neighbour {
            vm,
            direction,
            blocks,
            depth: tasks.iter().map(|task| task.depth).sum(),
            given: given(direction, blocks.1),
        })
    };
    [Direction::Read, Direction::Write].into_iter().filter_map(of).collect()
}

/// A limit in requests, with a burst that makes up for late wake-ups of the regulator.
fn requests(actuator: Actuator, rate: f64, peak: Option<f64>) -> Tspec {
    let rate = match actuator {
        // The kernel bounds no smaller rate, and lets no rates between its steps through.
        Actuator::IoMax | Actuator::ThrottleV1 => {
            blk_throttle::let_through(rate.clamp(blk_throttle::STEP, MAX_RATE))
        }
        _ => rate.clamp(1.0, MAX_RATE),
    };
    let rate = rate as u64;
    let peak = peak.map(|peak| peak.min(MAX_RATE) as u64).filter(|peak| *peak > rate);
    let burst = 1 + (rate as f64 * LATE).ceil() as u64;
    Tspec { unit: Unit::Requests, rate, burst, peak, largest: 1 }
}

/// Whether the next request of a task waits for the one before.
fn is_closed(task: &Task) -> bool {
    task.arrival == Loop::Closed
}

/// Whether some requests of an operation go in this direction.
fn goes(op: Op, direction: Direction) -> bool {
    match direction {
        Direction::Read => op.write_share() < 1.0,
        _ => op.write_share() > 0.0,
    }
}

/// Error with the first victim whose need is not met.
fn refused(victims: Vec<VictimOutlook>, limits: &[NeighbourLimit]) -> NeighbourError {
    let rates: Vec<String> = limits.iter().map(|l| format!("{} {}/s", l.vm, l.kept.rate)).collect();
    match victims.into_iter().find(|victim| !victim.is_held()) {
        Some(victim) => NeighbourError::OutOfReach { victim: Box::new(victim), rates: rates.join(", ") },
        None => NeighbourError::NoBasis,
    }
}

#[cfg(test)]
mod tests;
