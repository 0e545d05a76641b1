//! Whether this host would guarantee the CPU contracts of a spec: the bound of a path rests on it.

use rtvirtio_cpu::{Backend, Contract, Level, Order, choose, going_before, interference_us};
use rtvirtio_spec::{HostSpec, PathPart, Vm};
use rtvirtio_units::Nanos;

use crate::contracts::{Admitted, of_vms};
use crate::dirs::Dirs;
use crate::progress::Progress;

/// Remedy where no mechanism of the host gives a budget to all threads of a VM together.
const REMEDY: &str = "a kernel with CONFIG_RT_GROUP_SCHED on cgroup v1 (`cpu.rt_runtime_us`) or with `cpu.rt.max` \
    guarantees a budget for all of its threads together";

/// The contracts of a spec as this host would hold them; the reason where that is not known.
pub(super) struct CpuGuarantees(Result<Option<Admitted>, String>);

impl CpuGuarantees {
    /// Reads what this host offers, where a path of the spec has a CPU part.
    pub fn read(host: &HostSpec, dirs: &Dirs, progress: &dyn Progress) -> Self {
        let has_cpu = |i| host.paths(i).iter().flat_map(|p| &p.parts).any(|p| matches!(p, PathPart::Cpu(_)));
        if !(0..host.vms().len()).any(has_cpu) {
            return Self(Ok(None));
        }
        Self(of_vms(host.vms(), &[], dirs, progress).map_err(|e| format!("{e:#}")))
    }

    /// Whether all threads of a VM together would get the budget of its contract in each period.
    ///
    /// # Errors
    /// The reason why they may not, and what would make it provable.
    pub fn check(&self, vm: &Vm) -> Result<(), String> {
        match &self.0 {
            Ok(Some(admitted)) => guaranteed(admitted, &vm.name),
            Ok(None) => Err("no contract is admitted on this host".to_owned()),
            Err(why) => Err(format!("whether this host guarantees its budget is not known: {why}")),
        }
    }
}

fn guaranteed(admitted: &Admitted, vm: &str) -> Result<(), String> {
    let all = &admitted.contracts;
    let Some(place) = all.iter().position(|one| one.vm == vm) else {
        return Err("its contract is not admitted on this host".to_owned());
    };
    let own = &all[place];
    let by =
        |why: &str| Err(format!("this host would enforce its contract by {} ({why}): {REMEDY}", own.backend));
    if own.urgency.is_some() {
        return Err("its guest moves its vCPUs below the priorities of the contract (`urgency`), where the budget promises nothing: \
             leave `urgency` out for a VM with such a path"
            .to_owned());
    }
    match own.backend {
        // Servers by deadline: what is admitted gets its budget.
        Backend::Hcbs => return Ok(()),
        Backend::RtGroup => {}
        Backend::Deadline => return by("each thread gets a part of the budget, not all together the whole"),
        Backend::CpuMax => return by("a cap, which keeps no CPU time for it"),
        Backend::Throttle => return by("a hint, without a budget of its own"),
    }
    // Groups of other programs run at priorities that are not known.
    let taken = choose(&admitted.probe, Some(Backend::RtGroup), false).map(|found| &found.grant.taken);
    if let Some(other) = taken.and_then(|taken| taken.iter().find(|load| load.share.0 > 1e-9)) {
        return Err(format!(
            "{} has a real-time budget of {} too, and may go before it: take that away, or add it to the spec if it is a VM's",
            other.name, other.share
        ));
    }
    let ranked: Vec<(Backend, Order, Level, Contract)> =
        all.iter().map(|one| (one.backend, one.order, one.level, one.contract)).collect();
    let before = going_before(&ranked, place);
    let takes =
        interference_us(own.contract, &before.iter().map(|other| ranked[*other].3).collect::<Vec<_>>());
    if takes + own.contract.budget_us() > own.contract.period_us() {
        let names: Vec<&str> = before.iter().map(|other| all[*other].vm.as_str()).collect();
        let (takes, period) = (Nanos(takes * 1000), Nanos(own.contract.period_us() * 1000));
        return Err(format!(
            "the contracts that go before it ({}) may take {takes} of its period of {period}, and a part of its budget comes in the next one: give it a shorter \
             period than theirs",
            names.join(", ")
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use rtvirtio_cpu::{Grant, KernelMechanism, Load, Over, Probe, UrgencyRange, levels};
    use rtvirtio_units::Ratio;

    use super::*;
    use crate::contracts::Contracted;
    use crate::contracts::cores_tests::{auto, one};
    use crate::fixtures::{READS, spec};

    /// Contracts of budget and period in ms, all held by one mechanism, next to other loads.
    fn admitted(backend: Backend, contracts: &[(&str, u64, u64)], taken: &[(&str, f64)]) -> Admitted {
        let taken = taken.iter().map(|(name, share)| Load {
            name: (*name).to_owned(),
            share: Ratio(*share),
            over: Over::Every,
            pid: None,
        });
        let grant = Grant { limit: Ratio(0.95), fair_server: Ratio(0.0), taken: taken.collect() };
        let found = vec![KernelMechanism { backend, grant }];
        let probe = Probe { found, missing: Vec::new(), cpus: 2, cgroups: None };
        let of =
            |budget, period| Contract::new(Nanos::from_millis(budget), Nanos::from_millis(period)).unwrap();
        let ranked: Vec<_> =
            contracts.iter().map(|(_, q, p)| (backend, Order::Contract, of(*q, *p))).collect();
        let contracts = contracts.iter().zip(levels(&ranked)).map(|((vm, q, p), level)| Contracted {
            contract: of(*q, *p),
            level,
            backend,
            cores: None,
            ..one(vm, *q, auto())
        });
        Admitted { probe, contracts: contracts.collect() }
    }

    fn why(admitted: &Admitted, vm: &str) -> String {
        guaranteed(admitted, vm).unwrap_err()
    }

    #[test]
    fn only_a_budget_of_all_threads_together_is_a_guarantee() {
        let one = |backend| admitted(backend, &[("plc", 4, 20)], &[]);
        assert_eq!(guaranteed(&one(Backend::RtGroup), "plc"), Ok(()));
        assert_eq!(guaranteed(&one(Backend::Hcbs), "plc"), Ok(()));
        for (backend, word) in [
            (Backend::Deadline, "SCHED_DEADLINE (each thread gets a part"),
            (Backend::CpuMax, "cpu.max (a cap"),
            (Backend::Throttle, "priorities (a hint"),
        ] {
            let why = why(&one(backend), "plc");
            assert!(why.contains(word) && why.contains("CONFIG_RT_GROUP_SCHED"), "{why}");
        }
        assert!(why(&one(Backend::RtGroup), "web").contains("not admitted"));
        // Its guest moves its vCPUs out of what the budget holds.
        for backend in [Backend::RtGroup, Backend::Hcbs] {
            let mut moved = one(backend);
            let budget = Nanos::from_millis(500);
            let range = UrgencyRange { ceiling: None, floor: 0, budget, reports: true, interrupts: false };
            moved.contracts[0].urgency = Some(range);
            assert!(why(&moved, "plc").contains("`urgency`"));
        }
    }

    #[test]
    fn a_budget_that_contracts_above_it_may_push_into_the_next_period_is_none() {
        // In 20 ms the one above takes its 10 ms twice.
        let two = admitted(Backend::RtGroup, &[("plc", 10, 15), ("web", 4, 20)], &[]);
        assert_eq!(guaranteed(&two, "plc"), Ok(()));
        assert!(
            why(&two, "web").starts_with("the contracts that go before it (plc) may take 20ms"),
            "{}",
            why(&two, "web")
        );
        let room = admitted(Backend::RtGroup, &[("plc", 2, 10), ("web", 4, 20)], &[]);
        assert_eq!(guaranteed(&room, "web"), Ok(()));
        // Groups that are ordered by deadline have no ranks.
        assert_eq!(
            guaranteed(&admitted(Backend::Hcbs, &[("plc", 10, 15), ("web", 4, 20)], &[]), "web"),
            Ok(())
        );
        let other = admitted(Backend::RtGroup, &[("plc", 4, 20)], &[("cgroup /audio", 0.1)]);
        assert!(
            why(&other, "plc").starts_with("cgroup /audio has a real-time budget of 10"),
            "{}",
            why(&other, "plc")
        );
    }

    #[test]
    fn a_host_that_is_not_known_guarantees_nothing() {
        let cpu = "cpu = { budget = \"4ms\", period = \"20ms\" }";
        let host = spec(&format!("name = \"plc\"\npid = 7\n{cpu}"), READS);
        let unknown = CpuGuarantees(Err("no cpu controller".to_owned()));
        assert!(unknown.check(&host.vms()[0]).unwrap_err().ends_with("is not known: no cpu controller"));
        assert!(CpuGuarantees(Ok(None)).check(&host.vms()[0]).is_err());
    }
}
