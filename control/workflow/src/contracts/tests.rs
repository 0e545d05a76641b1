use std::collections::BTreeSet;
use std::process::Command;

use rtvirtio_cpu::{Grant, KernelMechanism, Load, Over};
use rtvirtio_kernel::sched::{self, Attr};
use rtvirtio_testkit::{ChildGuard, Need, has};
use rtvirtio_units::Nanos;
use rtvirtio_vmm::VmHandle;

use super::*;
use crate::contracts::cores_tests::{auto, one};
use crate::fixtures::{READS, dirs, spec};
use crate::progress::Quiet;

/// Else a contract that SCHED_DEADLINE holds is refused for its own reservation.
#[test]
fn what_a_vms_threads_have_reserved_is_no_load_of_others() {
    if !has("what_a_vms_threads_have_reserved_is_no_load_of_others", &[Need::Root]) {
        return;
    }
    let sleeper = ChildGuard(Command::new("sleep").arg("600").spawn().unwrap());
    let pid = sleeper.id();
    sched::set(pid, &Attr::deadline(5_000_000, 50_000_000)).unwrap();

    let of_sleeper = |probe: &Probe| {
        let loads = probe.found.iter().flat_map(|found| found.grant.taken.clone());
        loads.filter(|load| load.pid == Some(pid)).collect::<Vec<Load>>()
    };
    let mut probe = probe(&Root::default()).unwrap();
    let loads = of_sleeper(&probe);
    let is_right = |load: &Load| {
        let cpus = match &load.over {
            Over::Every => probe.cpus as usize,
            Over::Rest(cpus) | Over::Partition(cpus) => cpus.len(),
        };
        (load.share.0 * cpus as f64 - 0.1).abs() < 1e-9
    };
    assert!(!loads.is_empty() && loads.iter().all(is_right), "{loads:?}");
    assert_eq!(loads[0].name, "deadline threads of sleep");
    forget_own(&mut probe, std::iter::empty(), &ActiveContracts::default()).unwrap();
    assert_eq!(of_sleeper(&probe).len(), loads.len());
    let ours = ActiveContracts {
        processes: vec![ProcessId::find(pid).unwrap().unwrap()],
        ..ActiveContracts::default()
    };
    forget_own(&mut probe, std::iter::empty(), &ours).unwrap();
    assert_eq!(of_sleeper(&probe), []);
}

fn vm(name: &str, budget: &str) -> Vm {
    let cpu = format!("cpu = {{ budget = \"{budget}\", period = \"20ms\" }}");
    spec(&format!("name = \"{name}\"\npid = 7\n{cpu}"), READS).vms()[0].clone()
}

#[test]
fn cpus_that_cannot_be_counted_refuse_only_what_replaces_settings() {
    if !has("cpus_that_cannot_be_counted_refuse_only_what_replaces_settings", &[Need::Root, Need::RT_GROUPS])
    {
        return;
    }
    let (_temp, dirs) = dirs();
    let sleeper = ChildGuard(Command::new("sleep").arg("600").spawn().unwrap());
    // No thread of it is known to run a vCPU.
    let running = |_: &str| Some(VmHandle::of_pid(sleeper.id()));
    let mut plc = vm("plc", "4ms");
    plc.cpu.cores = Some(rtvirtio_spec::Cores::default());
    let admitted = |replaces: bool| {
        let now = VmsNow { running: &running, replaces: &|_| replaces, in_force: &[] };
        let all =
            of_vms_in_turn([&plc].into_iter(), &ActiveContracts::default(), &now, &dirs, &Quiet::default());
        let all = all.unwrap();
        (all.admitted.contracts.len(), all.refused.len(), all.uncounted.len())
    };
    assert_eq!(admitted(false), (1, 0, 1));
    assert_eq!(admitted(true), (0, 1, 0));
}

#[test]
fn what_is_in_force_is_admitted_where_what_replaces_it_is_too_much() {
    if !has("what_is_in_force_is_admitted_where_what_replaces_it_is_too_much", &[Need::Root, Need::RT_GROUPS])
    {
        return;
    }
    let (_temp, dirs) = dirs();
    let contract = |ms: u64| Contract::new(Nanos::from_millis(ms), Nanos::from_millis(20)).unwrap();
    let of = |vm: &str, ms: u64| InForce::planned(&one(vm, ms, auto()), None);
    let admitted = |vms: &[Vm], in_force: Vec<InForce>| {
        let ours = ActiveContracts { contracts: in_force, processes: Vec::new() };
        let now = VmsNow { running: &|_| None, replaces: &|_| false, in_force: &[] };
        let all = of_vms_in_turn(vms.iter(), &ours, &now, &dirs, &Quiet::default()).unwrap();
        let names = |all: &[(String, Error)]| all.iter().map(|(vm, _)| vm.clone()).collect::<Vec<_>>();
        let contracts: Vec<_> = all.admitted.contracts.iter().map(|c| (c.vm.clone(), c.contract)).collect();
        (contracts, names(&all.kept), names(&all.refused))
    };
    let owned = |vm: &str| vm.to_owned();
    let big = [vm("plc", "19999us"), vm("hmi", "1ms")];
    let (contracts, kept, refused) = admitted(&big, vec![of("plc", 2)]);
    assert_eq!(contracts, [(owned("plc"), contract(2)), (owned("hmi"), contract(1))]);
    assert_eq!((kept, refused.len()), (vec![owned("plc")], 0));
    // Without one in force, or with one that does not fit either, nothing of it is.
    for in_force in [Vec::new(), vec![of("plc", 20)]] {
        let (contracts, kept, refused) = admitted(&big, in_force);
        assert_eq!(contracts, [(owned("hmi"), contract(1))]);
        assert_eq!((kept.len(), refused), (0, vec![owned("plc")]));
    }
}

#[test]
fn a_profile_of_another_kernel_or_of_other_cpus_is_named() {
    let setup = Setup {
        vm: "plc".to_owned(),
        kernel: "6.18.3".to_owned(),
        cpu_model: "Xeon".to_owned(),
        cpus: 8,
        vcpus: 2,
        backend: Backend::RtGroup,
        order: Order::Contract,
        period_us: 20_000,
        seconds: 1.0,
        load: "true".to_owned(),
        neighbour: None,
        budgets: vec![20],
        repeat: 2,
    };
    let on = |kernel: &str, model: &str| of_another_host("plc", &setup, (kernel, model));
    assert_eq!(on("6.18.3", "Xeon"), Vec::<String>::new());
    let lines = on("6.18.3", "EPYC");
    assert!(lines.len() == 1 && lines[0].contains("of CPU model Xeon, this is EPYC"), "{lines:?}");
    assert_eq!(on("6.1.0", "EPYC").len(), 2);
}

/// Name of a VM, its share of each CPU in percent, and the CPUs of its partition.
type Wanted = (&'static str, u64, &'static [u32]);

/// Number of contracts that SCHED_DEADLINE admits on 16 CPUs next to these loads.
fn admitted_by_deadline(taken: &[Load], all: &[Wanted]) -> std::result::Result<usize, String> {
    let grant = Grant { limit: Ratio(0.95), fair_server: Ratio(0.05), taken: taken.to_vec() };
    let found = vec![KernelMechanism { backend: Backend::Deadline, grant }];
    let probe = Probe { found, missing: Vec::new(), cpus: 16, cgroups: None };
    let contract =
        |percent: u64| Contract::new(Nanos::from_micros(200 * percent), Nanos::from_millis(20)).unwrap();
    let partition = |cpus: &[u32]| rtvirtio_spec::Cores {
        cpus: Some(cpus.iter().copied().collect()),
        partition: true,
        ..rtvirtio_spec::Cores::default()
    };
    let need = |&(vm, percent, cpus): &Wanted| VmNeed {
        vm,
        order: Order::Contract,
        backend: Backend::Deadline,
        need: super::Need::Contract(contract(percent)),
        urgency: None,
        cores: (!cpus.is_empty()).then(|| partition(cpus)),
    };
    let needs: Vec<VmNeed<'_>> = all.iter().map(need).collect();
    let admitted = fitting(&probe, &needs.iter().collect::<Vec<_>>());
    admitted.map(|all| all.len()).map_err(|e| e.to_string())
}

#[test]
fn deadlines_are_admitted_in_each_partition_alone() {
    let fits = admitted_by_deadline;
    let load = |share: f64, over: Over| {
        let name = "deadline threads of jackd".to_owned();
        Load { name, share: Ratio(share), over, pid: None }
    };
    let rest = |share: f64| load(share, Over::Rest((0..16).collect()));
    let (plc, hmi): (Wanted, Wanted) = (("plc", 80, &[2, 3]), ("hmi", 80, &[4, 5]));
    // 20 % of 16 CPUs are 26.7 % of the 12 that are left.
    assert_eq!(fits(&[rest(0.2)], &[plc, hmi, ("web", 60, &[])]), Ok(3));
    let error = fits(&[rest(0.2)], &[plc, hmi, ("web", 65, &[])]).unwrap_err();
    assert!(
        error.starts_with("web: its contract") && error.contains("26.7 % by deadline threads of jackd"),
        "{error}"
    );
    // VMs without a partition are in one root domain, and so are two with a CPU in common.
    fits(&[], &[("a", 50, &[]), ("b", 50, &[])]).unwrap_err();
    fits(&[], &[plc, ("hmi", 80, &[3, 4])]).unwrap_err();
    // Threads that are in the partition already count in it, and nowhere else.
    let in_it = load(0.4, Over::Partition(BTreeSet::from([2, 3])));
    assert!(fits(std::slice::from_ref(&in_it), &[plc]).unwrap_err().starts_with("plc: its contract"));
    assert_eq!(fits(&[in_it], &[hmi, ("web", 80, &[])]), Ok(2));
    // A partition that leaves others' threads too few CPUs.
    let error = fits(&[rest(0.8)], &[plc, hmi]).unwrap_err();
    assert!(error.starts_with("a partition of CPUs 2-5 would leave"), "{error}");
}
