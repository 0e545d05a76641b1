//! The levels among which a guest may move its vCPUs, within their contract.

use rtvirtio_apply::{Form, Place, Write};
use rtvirtio_kernel::sched::{Attr, Policy};
use rtvirtio_units::Nanos;
use rtvirtio_vmm::{Role, Thread};
use serde::{Deserialize, Serialize};

use crate::{Backend, CpuError};

/// The range in which a guest moves its vCPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UrgencyRange {
    /// Highest real-time priority; `None` for the one that the contract gives vCPUs.
    pub ceiling: Option<u32>,
    /// Priority while nothing urgent runs, 0 for an ordinary thread.
    pub floor: u32,
    /// CPU time above the floor in each second.
    pub budget: Nanos,
    /// Whether the guest reports what it runs.
    #[serde(default = "reports")]
    pub reports: bool,
}

fn reports() -> bool {
    true
}

/// Adds to the writes of vCPUs all values between floor and ceiling, so that they are journaled as
/// ours and as in force ([`rtvirtio_apply::Levels`]). Returns the ceiling.
///
/// The contract's own priority is the highest one allowed: what serves a vCPU stands above it by
/// the contract's order, and must stay there.
///
/// # Errors
/// [`CpuError::CannotHold`] for a mechanism that gives vCPUs no priority, and for a range that the
/// contract does not allow.
pub fn with_levels(
    vm: &str,
    threads: &[Thread],
    backend: Backend,
    range: &UrgencyRange,
    writes: &mut [Write],
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
        write.levels =
            levels(contract, thread.nice, range.floor, ceiling).iter().map(Attr::to_string).collect();
        found = Some(ceiling);
    }
    Ok(found)
}

/// All values of a vCPU's thread.
fn levels(contract: Attr, nice: i32, floor: u32, ceiling: u32) -> Vec<Attr> {
    let ordinary = (floor == 0).then_some(Attr { policy: Policy::Other, priority: 0, nice, ..contract });
    let real_time = (floor.max(1)..=ceiling)
        .flat_map(|priority| [Policy::Fifo, Policy::Rr].map(|policy| Attr { policy, priority, ..contract }));
    ordinary.into_iter().chain(real_time).collect()
}
