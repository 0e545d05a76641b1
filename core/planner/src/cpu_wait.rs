//! Time that a VM's requests wait for a CPU, added to what their disk takes.

use std::collections::BTreeMap;

use rtvirtio_model::{Profile, is_guest, stream_response, tail_of_waits};
use rtvirtio_spec::{Burst, CpuNeed, HostSpec, Spec, Vm};
use rtvirtio_units::{Nanos, Percentile};
use serde::{Deserialize, Serialize};

/// Wait of a VM's requests for a CPU.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum CpuWait {
    /// Bound by the VM's CPU contract, while its requests need no more than the budget.
    Contract {
        /// Longest wait; `None` where no mechanism of the host guarantees the budget to all threads
        /// together, and where the requests need more than the contract has of one CPU.
        bound_ns: Option<Nanos>,
        /// Whether the host has such a mechanism.
        guaranteed: bool,
        /// CPU time of the requests that may come at once, as measured in a VM.
        work_ns: Nanos,
        /// CPUs that the requests need at their rates.
        needed: f64,
        /// Share that the contract has of each CPU.
        share: f64,
        /// CPUs of the host.
        cpus: u32,
    },
    /// Estimate from the run delay of the VM's threads.
    Estimate {
        /// Estimated wait at the target's percentile.
        wait_ns: Nanos,
        /// Observed waits.
        #[serde(flatten)]
        delay: RunDelay,
    },
}

/// Waits of the thread of a VM that waited longest for its CPU, over a time of observation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunDelay {
    /// Mean wait.
    pub mean_ns: Nanos,
    /// Number of waits.
    pub n: u64,
}

impl CpuWait {
    /// Wait to add to the disk's latency; `None` where there is no bound.
    #[must_use]
    pub fn wait(&self) -> Option<Nanos> {
        match self {
            Self::Contract { bound_ns, .. } => *bound_ns,
            Self::Estimate { wait_ns, .. } => Some(*wait_ns),
        }
    }

    /// Whether requests would wait without end: they need more than the contract has of all CPUs.
    #[must_use]
    pub fn is_too_much(&self) -> bool {
        matches!(self, Self::Contract { needed, share, cpus, .. } if *needed > share * f64::from(*cpus))
    }
}

/// Facts that the waits of a host's VMs follow from.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CpuWaits {
    /// CPUs of the host.
    pub cpus: u32,
    /// Length of the kernel's tick, at which it detects that a budget is used up.
    pub tick: Nanos,
    /// VMs of the host with a CPU contract.
    pub contracts: u32,
    /// Whether the host's mechanism guarantees a budget to all threads of a VM together.
    pub guaranteed: bool,
    /// Run delay by VM, of those that were observed.
    pub delays: BTreeMap<String, RunDelay>,
}

impl CpuWaits {
    /// Debt of budgets on this host: a tick of the VM itself, and one of each other contract.
    #[must_use]
    pub fn debt(&self) -> Nanos {
        debt(self.tick, self.contracts)
    }

    /// Wait of one VM's requests; `None` where neither a contract nor an observation tells of it.
    #[must_use]
    pub fn wait_of(&self, vm: &Vm, profile: &Profile, percentile: Percentile) -> Option<CpuWait> {
        if !is_guest(vm) {
            return None;
        }
        let Some(need) = vm.cpu.need else {
            let delay = *self.delays.get(&vm.name)?;
            return Some(CpuWait::Estimate { wait_ns: tail_of_waits(delay.mean_ns, percentile), delay });
        };
        // The budget of a demand is found when it is applied.
        let CpuNeed::Contract { budget, period } = need else { return None };
        let each = profile.guest.as_ref().filter(|guest| guest.is_of_guest())?.cpu_per_request.max(0.0);
        let rate: f64 = vm.tasks.iter().filter_map(|task| task.rate).map(|rate| rate.0).sum();
        let at_once: u32 = vm.tasks.iter().map(at_once).sum();
        let work_ns = Nanos::from_secs_f64(each * f64::from(at_once));
        let (needed, share) = (each * rate, budget.0 as f64 / period.0.max(1) as f64);
        // Without a rate a task takes what it gets, also of the budget.
        let is_within = self.guaranteed && needed <= share && vm.tasks.iter().all(|task| task.rate.is_some());
        let longest = stream_response(work_ns, self.debt(), budget, period);
        let own = Nanos::from_secs_f64(each);
        let bound_ns = is_within.then(|| Nanos(longest.0.saturating_sub(own.0)));
        Some(CpuWait::Contract {
            bound_ns,
            guaranteed: self.guaranteed,
            work_ns,
            needed,
            share,
            cpus: self.cpus,
        })
    }
}

/// Requests of a task that may come at the same time.
fn at_once(task: &rtvirtio_spec::Task) -> u32 {
    match task.burst {
        Some(Burst::Requests { requests }) => requests,
        _ => 1,
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

/// Adds the waits to the tasks of the VMs that have them.
pub fn add_cpu_waits(tasks: &mut [crate::TaskOutlook], spec: &Spec, profile: &Profile, waits: &CpuWaits) {
    for task in tasks {
        let vm = spec.vms.iter().find(|vm| vm.name == task.vm);
        task.cpu_wait = vm.and_then(|vm| waits.wait_of(vm, profile, task.percentile));
    }
}

#[cfg(test)]
mod tests {
    use rtvirtio_model::GuestPoint;
    use rtvirtio_spec::LabKind;

    use super::*;
    use crate::TaskOutlook;
    use crate::tests::{self, task};

    /// Outlook of a task of 600 requests a second with a target of 60 ms, predicted at 20 ms.
    fn outlook(need: Option<(u64, u64)>, each: f64, mean_us: u64) -> TaskOutlook {
        let mut spec = tests::spec(LabKind::Qemu, &[vec![task("control", 600.0, Some(60))]]);
        let ms = Nanos::from_millis;
        spec.vms[0].cpu.need = need.map(|(q, p)| CpuNeed::Contract { budget: ms(q), period: ms(p) });
        let mut profile = tests::profile();
        let point = profile.read[0].clone();
        profile.guest = Some(GuestPoint { kind: "qemu-kvm".to_owned(), point, cpu_per_request: each });
        let delay = RunDelay { mean_ns: Nanos::from_micros(mean_us), n: 100 };
        let delays = BTreeMap::from([(spec.vms[0].name.clone(), delay)]);
        let waits = CpuWaits { cpus: 2, tick: ms(1), contracts: 1, guaranteed: true, delays };
        let forecast =
            rtvirtio_model::Forecast { latency_ns: ms(20), rate_kept: 1.0, terms: Vec::new(), upper: None };
        let mut tasks = crate::outlook(&spec, vec![forecast]);
        add_cpu_waits(&mut tasks, &spec, &profile, &waits);
        tasks.remove(0)
    }

    #[test]
    fn waits_decide_what_the_disk_leaves_of_the_target() {
        // Contract, CPU time of a request, mean wait in us; wait, too long, without end.
        let cases = [
            // 2 (P - Q) + (C + tick) P / Q - C.
            ((Some((4, 20)), 100e-6, 9_000), (Some(37_400_000), false, false)),
            ((Some((4, 22)), 100e-6, 0), (Some(41_950_000), true, false)),
            // 0.3 CPUs of 0.2 of each of two: perhaps; 0.6 are more than both have.
            ((Some((4, 20)), 500e-6, 0), (None, true, false)),
            ((Some((4, 20)), 1e-3, 0), (None, true, true)),
            // p99.99 is 9.21 means.
            ((None, 100e-6, 1_000), (Some(9_210_340), false, false)),
            ((None, 100e-6, 5_000), (Some(46_051_702), true, false)),
        ];
        for ((need, each, mean), expected) in cases {
            let task = outlook(need, each, mean);
            let wait = task.cpu_wait.unwrap().wait().map(|wait| wait.0);
            assert_eq!((wait, task.lacks_cpu(), task.exceeds_cpus()), expected, "{need:?} {each} {mean}");
            let text = serde_json::to_string(&task).unwrap();
            assert_eq!(serde_json::from_str::<TaskOutlook>(&text).unwrap(), task, "{text}");
        }
    }
}
