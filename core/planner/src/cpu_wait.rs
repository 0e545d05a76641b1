//! Time that a VM's requests wait for a CPU, added to what their disk takes.

use std::collections::BTreeMap;

use rtvirtio_model::tail_of_waits;
use rtvirtio_spec::{HostSpec, Spec, Vm};
use rtvirtio_units::{Nanos, Percentile};
use serde::{Deserialize, Serialize};

use crate::cpu_room::{CpuRoom, is_counted};

/// Wait of a VM's requests for a CPU, estimated from the run delay of its threads or from the use
/// of the host's CPUs, whichever is longer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CpuWait {
    /// Estimated wait at the target's percentile; `None` where the requests may need more CPU
    /// time than others leave, or than one CPU of the guest has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_ns: Option<Nanos>,
    /// Mean of the observed waits; `None` where the estimate is from the use of the CPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mean_ns: Option<Nanos>,
    /// Number of observed waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub n: Option<u64>,
}

impl CpuWait {
    /// Whether the wait may be longer than so much.
    #[must_use]
    pub fn exceeds(&self, room: Nanos) -> bool {
        self.wait_ns.is_none_or(|wait| wait > room)
    }
}

/// Waits of the thread of a VM that waited longest for its CPU, over a time of observation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunDelay {
    /// Mean wait.
    pub mean_ns: Nanos,
    /// Number of waits.
    pub n: u64,
}

/// Facts that the waits of a host's VMs follow from.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CpuWaits {
    /// Longest turn of a program while others wait for its CPU.
    pub turn: Nanos,
    /// Run delay by VM, of those that were observed.
    pub delays: BTreeMap<String, RunDelay>,
}

impl CpuWaits {
    /// Wait of the requests of a VM's task; `None` of a VM with a contract, whose budget decides,
    /// and where neither was observed.
    #[must_use]
    pub fn wait_of(
        &self,
        vm: &Vm,
        task: &str,
        percentile: Percentile,
        room: Option<&CpuRoom>,
    ) -> Option<CpuWait> {
        if !is_counted(vm) {
            return None;
        }
        let rate = vm.tasks.iter().find(|of| of.name == task).and_then(|of| of.rate);
        let by_use = room.zip(rate).map(|(room, rate)| {
            let wait_ns = room.load(self.turn).wait(rate.0, percentile);
            CpuWait { wait_ns, mean_ns: None, n: None }
        });
        let by_delay = self.delays.get(&vm.name).map(|RunDelay { mean_ns, n }| {
            let wait_ns = Some(tail_of_waits(*mean_ns, percentile));
            CpuWait { wait_ns, mean_ns: Some(*mean_ns), n: Some(*n) }
        });
        let length = |wait: &CpuWait| (wait.wait_ns.is_none(), wait.wait_ns);
        by_use.into_iter().chain(by_delay).max_by_key(length)
    }
}

/// Debt of CPU budgets on a host with so many contracts: a tick of the VM's own, and one for each
/// other VM whose tick may run into its time.
#[must_use]
pub fn debt(tick: Nanos, contracts: u32) -> Nanos {
    Nanos(tick.0.saturating_mul(u64::from(contracts.max(1))))
}

/// Number of VMs with a CPU contract.
#[must_use]
pub fn contracts(host: &HostSpec) -> u32 {
    u32::try_from(host.vms().iter().filter(|vm| vm.cpu.need.is_some()).count()).unwrap_or(u32::MAX)
}

/// Adds the waits to the tasks of the VMs that have them, which have the host's CPU time already.
pub fn add_cpu_waits(tasks: &mut [crate::TaskOutlook], spec: &Spec, waits: &CpuWaits) {
    for task in tasks {
        let vm = spec.vms.iter().find(|vm| vm.name == task.vm);
        task.cpu_wait = vm.and_then(|vm| waits.wait_of(vm, &task.task, task.percentile, task.cpu.as_ref()));
    }
}

#[cfg(test)]
mod tests {
    use rtvirtio_spec::{CpuNeed, LabKind};

    use super::*;
    use crate::TaskOutlook;
    use crate::tests::{self, task};

    /// Outlook of a task with a target of 60 ms, predicted at 20 ms.
    fn outlook(has_contract: bool, mean_us: u64) -> TaskOutlook {
        let mut spec = tests::spec(LabKind::Qemu, &[vec![task("control", 600.0, Some(60))]]);
        let ms = Nanos::from_millis;
        spec.vms[0].cpu.need = has_contract.then(|| CpuNeed::Contract { budget: ms(4), period: ms(20) });
        let delay = RunDelay { mean_ns: Nanos::from_micros(mean_us), n: 100 };
        let delays = BTreeMap::from([(spec.vms[0].name.clone(), delay)]);
        let forecast =
            rtvirtio_model::Forecast { latency_ns: ms(20), rate_kept: 1.0, terms: Vec::new(), upper: None };
        let mut tasks = crate::outlook(&spec, vec![forecast]);
        add_cpu_waits(&mut tasks, &spec, &CpuWaits { turn: ms(1), delays });
        tasks.remove(0)
    }

    #[test]
    fn waits_decide_what_the_disk_leaves_of_the_target() {
        // p99.99 is 9.21 means.
        for (has_contract, mean, wait, lacks) in [
            (false, 1_000, Some(9_210_340), false),
            (false, 5_000, Some(46_051_702), true),
            (true, 5_000, None, false),
        ] {
            let task = outlook(has_contract, mean);
            let found = task.cpu_wait.and_then(|of| of.wait_ns).map(|of| of.0);
            assert_eq!((found, task.lacks_cpu()), (wait, lacks), "{mean}");
            let text = serde_json::to_string(&task).unwrap();
            assert_eq!(serde_json::from_str::<TaskOutlook>(&text).unwrap(), task, "{text}");
        }
    }
}
