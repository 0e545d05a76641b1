//! Levels among which a guest may move its vCPUs, within their contract.

use std::path::Path;

use rtvirtio_apply::{Form, MovableFile, Place, Target, Write};
use rtvirtio_kernel::Root;
use rtvirtio_kernel::sched::{Attr, Policy};
use rtvirtio_units::Nanos;
use rtvirtio_vmm::{Role, Thread};
use serde::{Deserialize, Serialize};

use crate::{Backend, CpuError};

/// Range of priorities in which a guest moves its vCPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UrgencyRange {
    /// Highest real-time priority; `None` for the one of the contract.
    pub ceiling: Option<u32>,
    /// Priority while nothing urgent runs; 0 is an ordinary thread.
    pub floor: u32,
    /// CPU time above the floor that is allowed in each second.
    pub budget: Nanos,
    /// Whether the guest reports the priority of its running task.
    #[serde(default = "reports")]
    pub reports: bool,
    /// Whether interrupts that KVM makes pending raise vCPUs.
    #[serde(default)]
    pub interrupts: bool,
}

fn reports() -> bool {
    true
}

/// Default `cpu.shares` of a new cgroup of v1.
const NEW_SHARES: u64 = 1024;
/// Nice value with the least weight.
const LAST_NICE: i32 = 19;
/// Ratio of each weight at the floor to the one before.
const STEP: f64 = 0.917;
/// Number of weights below the VM's own, down to less than 1/32 of it.
const STEPS: i32 = 40;

/// Adds to the writes of vCPUs all values between floor and ceiling, so that they are journaled as
/// ours and as in force ([`rtvirtio_apply::Levels`]). Where the floor is an ordinary thread, also
/// all weights that the VM may have at it: of the cgroup that has its budget, else of its threads.
/// Returns the ceiling, `None` without a vCPU.
///
/// The contract's own priority is the highest one allowed: threads that serve a vCPU must stay
/// above it.
///
/// # Errors
/// [`CpuError::CannotHold`] for a mechanism that gives vCPUs no priority, and for a range that the
/// contract does not allow.
pub fn with_levels(
    root: &Root,
    vm: &str,
    threads: &[Thread],
    backend: Backend,
    range: &UrgencyRange,
    writes: &mut Vec<Write>,
) -> Result<Option<u32>, CpuError> {
    let cannot = |why: String, remedy: &str| CpuError::CannotHold {
        vm: vm.to_owned(),
        backend,
        why: format!("its guest's urgency: {why}"),
        remedy: remedy.to_owned(),
    };
    if !matches!(backend, Backend::RtGroup | Backend::Hcbs | Backend::Throttle) {
        return Err(cannot(
            "this mechanism has no priorities between which vCPUs could move".to_owned(),
            "remove [vm.urgency], or add priorities = \"rt\"",
        ));
    }
    let mut found = None;
    let by_threads = backend == Backend::Throttle;
    for write in writes.iter_mut().filter(|w| w.target.form == Form::Scheduling) {
        let Place::Thread { tid, start, .. } = write.target.place else { continue };
        let is = |t: &&Thread| (t.tid, t.start) == (tid, start) && matches!(t.role, Role::Vcpu(_));
        let Some(thread) = threads.iter().find(is) else { continue };
        let Some(contract) = write.value.parse::<Attr>().ok().filter(|a| a.policy == Policy::Fifo) else {
            return Err(cannot(
                format!("its {} is `{}` by the contract", thread.role, write.value),
                "remove [vm.urgency]",
            ));
        };
        let ceiling = range.ceiling.unwrap_or(contract.priority);
        if ceiling > contract.priority || range.floor >= ceiling {
            return Err(cannot(
                format!(
                    "ceiling {ceiling} and floor {} do not fit to priority {} of its vCPUs by the contract",
                    range.floor, contract.priority
                ),
                "write a ceiling of at most that and a floor below it, or priorities = \"rt\"",
            ));
        }
        write.levels = levels(contract, thread.nice, range.floor, ceiling, by_threads)
            .iter()
            .map(Attr::to_string)
            .collect();
        found = Some(ceiling);
    }
    if range.floor == 0 {
        let weight = weight(root, vm, writes)?;
        writes.extend(weight);
    }
    Ok(found)
}

/// Weight of the cgroup that gets the VM's budget, with the values that it may have; `None` where
/// no cgroup gets one, or it has no weight.
fn weight(root: &Root, vm: &str, writes: &[Write]) -> Result<Option<Write>, CpuError> {
    let file_of = |write: &Write| match write.target.path.file_name()?.to_str()? {
        "cpu.rt_runtime_us" => Some("cpu.shares"),
        "cpu.rt.max" => Some("cpu.weight"),
        _ => None,
    };
    let Some((budget, file)) = writes.iter().find_map(|write| Some((write, file_of(write)?))) else {
        return Ok(None);
    };
    let dir = budget.target.path.parent().unwrap_or(Path::new("/"));
    let of_group = budget.created_by;
    let own = if of_group.is_some() {
        // The group above shows whether this kernel has weights.
        let is_there = root.exists(dir.parent().unwrap_or(dir).join(file))?;
        is_there.then_some(NEW_SHARES)
    } else {
        rtvirtio_kernel::unless_gone(root.read(dir.join(file)))?.and_then(|text| text.trim().parse().ok())
    };
    let Some(own) = own else { return Ok(None) };
    let of = |step: i32| (own as f64 * STEP.powi(step)).round().max(2.0).to_string();
    let mut levels: Vec<String> = (1..=STEPS).map(of).collect();
    levels.dedup();
    let write = Write::new(
        MovableFile::weight_knob(file, vm),
        Target::host(dir.join(file), Form::Plain),
        own.to_string(),
    );
    Ok(Some(Write { created_by: of_group, levels, ..write }))
}

/// All values of a vCPU's thread; with all weights of an ordinary one where no cgroup has the VM's
/// weight.
fn levels(contract: Attr, nice: i32, floor: u32, ceiling: u32, with_weights: bool) -> Vec<Attr> {
    let last = if with_weights { LAST_NICE.max(nice) } else { nice };
    let ordinary = (nice..=last).filter(|_| floor == 0);
    let ordinary = ordinary.map(|nice| Attr { policy: Policy::Other, priority: 0, nice, ..contract });
    let real_time = (floor.max(1)..=ceiling)
        .flat_map(|priority| [Policy::Fifo, Policy::Rr].map(|policy| Attr { policy, priority, ..contract }));
    ordinary.chain(real_time).collect()
}
