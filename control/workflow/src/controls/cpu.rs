//! Limits on the CPU time of VMs: what waits for a CPU submits no I/O, and no prediction knows of
//! it.

use std::path::{Path, PathBuf};

use rtvirtio_cpu::group_name;
use rtvirtio_kernel::cgroup::CpuLimit;
use rtvirtio_kernel::{Cgroups, Root, unless_gone};
use rtvirtio_vmm::threads::discover;
use rtvirtio_vmm::{Thread, VmHandle};

use super::{Control, ControlKind, Placed, absolute};
use crate::error::Result;

/// A limit with the threads below it.
struct LimitedThreads {
    limit: CpuLimit,
    threads: Vec<String>,
}

/// The limits on a VM's ordinary threads, those of a contract of its own left out.
pub(super) fn limits(root: &Root, cpu: &Cgroups, vm: &Placed<'_>) -> Result<Vec<Control>> {
    let Some(pids) = vm.pids.as_ref().ok().filter(|pids| !pids.is_empty()) else { return Ok(Vec::new()) };
    let handle = VmHandle { pids: pids.iter().copied().collect(), ..VmHandle::default() };
    let threads = unless_gone(discover(root, &handle))?.unwrap_or_default();
    // A quota does not act on real-time threads.
    let ordinary = |t: &&Thread| !t.policy.is_some_and(|p| p.is_real_time());
    let mut held: Vec<LimitedThreads> = Vec::new();
    let mut all = 0;
    for thread in threads.iter().filter(ordinary) {
        let Some(cgroup) = cpu.of_thread(&thread.cgroups) else { continue };
        all += 1;
        let unit = Cgroups::unit_of(cgroup);
        for limit in cpu.cpu_limits_on_path(root, cgroup)? {
            if is_of_contract(vm, &limit.cgroup, &unit) {
                continue;
            }
            match held.iter_mut().find(|h| h.limit == limit) {
                Some(known) => known.threads.push(thread.role.to_string()),
                None => held.push(LimitedThreads { limit, threads: vec![thread.role.to_string()] }),
            }
        }
    }
    Ok(held.into_iter().map(|h| h.control(vm, all)).collect())
}

/// Whether a limit is that of a contract of the spec.
fn is_of_contract(vm: &Placed<'_>, cgroup: &Path, unit: &Path) -> bool {
    let own = PathBuf::from(group_name(&vm.vm.name));
    vm.vm.cpu.need.is_some() && (absolute(cgroup) == absolute(&own) || absolute(cgroup) == absolute(unit))
}

impl LimitedThreads {
    fn control(mut self, vm: &Placed<'_>, all: usize) -> Control {
        let subject = if self.threads.len() == all {
            "its threads get".to_owned()
        } else {
            self.threads.sort();
            self.threads.dedup();
            format!("{} {}", self.threads.join(", "), if self.threads.len() == 1 { "gets" } else { "get" })
        };
        let (limit, cgroup) = (&self.limit, self.limit.cgroup.display());
        Control {
            kind: ControlKind::NotCounted,
            vm: Some(vm.vm.name.clone()),
            text: format!(
                "{subject} at most {} us of CPU time in {} us ({:.2} CPUs) by {cgroup} ({}): waits for a CPU are not in the predictions",
                limit.quota_us,
                limit.period_us,
                limit.cpus(),
                limit.file
            ),
        }
    }
}
