use std::fs;
use std::time::Duration;

use rtvirtio_cpu::{Grant, KernelMechanism, Level, Order};
use rtvirtio_kernel::sched::Policy;
use rtvirtio_units::{Nanos, Ratio};

use super::*;
use crate::error::Kind;
pub use crate::fixtures::put;
use crate::fixtures::put_thread;

/// Two nodes with a cache each, two cores of two CPUs on each.
pub fn host() -> (tempfile::TempDir, Root) {
    let (dir, root) = crate::fixtures::root();
    let cpus = "/sys/devices/system/cpu";
    put(&root, format!("{cpus}/online"), "0-7\n");
    for (node, list) in [("node0", "0-3\n"), ("node1", "4-7\n")] {
        put(&root, format!("/sys/devices/system/node/{node}/cpulist"), list);
    }
    for cpu in 0..8u32 {
        let core = cpu / 2 * 2;
        put(&root, format!("{cpus}/cpu{cpu}/topology/core_cpus_list"), &format!("{core}-{}\n", core + 1));
        let node = cpu / 4 * 4;
        put(&root, format!("{cpus}/cpu{cpu}/cache/index3/level"), "3\n");
        let shared = format!("{node}-{}\n", node + 3);
        put(&root, format!("{cpus}/cpu{cpu}/cache/index3/shared_cpu_list"), &shared);
    }
    put(&root, "/proc/self/mountinfo", "38 31 0:35 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
    (dir, root)
}

pub fn probe() -> Probe {
    let grant = Grant { limit: Ratio(0.95), fair_server: Ratio(0.0), taken: Vec::new() };
    let found = vec![KernelMechanism { backend: Backend::RtGroup, grant }];
    Probe { found, missing: Vec::new(), cpus: 8, cgroups: None }
}

pub fn threads(pid: u32, vcpus: u32) -> Vec<Thread> {
    let thread = |tid: u32, role: Role| Thread {
        pid,
        tid,
        start: 1,
        name: String::new(),
        role,
        kernel: false,
        policy: Some(Policy::Other),
        priority: 0,
        nice: 0,
        reservation: None,
        reset_on_fork: None,
        affinity: "0-7".to_owned(),
        cgroups: Vec::new(),
        cpu_time: Duration::ZERO,
    };
    let vcpu = |n: u32| thread(pid + 1 + n, Role::Vcpu(vec![n]));
    std::iter::once(thread(pid, Role::Emulator)).chain((0..vcpus).map(vcpu)).collect()
}

pub fn one(vm: &str, budget_ms: u64, cores: rtvirtio_spec::Cores) -> Contracted {
    Contracted {
        vm: vm.to_owned(),
        contract: Contract::new(Nanos::from_millis(budget_ms), Nanos::from_millis(20)).unwrap(),
        order: Order::Contract,
        level: Level::ALONE,
        backend: Backend::RtGroup,
        found: None,
        urgency: None,
        cores: Some(cores),
        notes: Vec::new(),
    }
}

/// Whole vCPUs on these CPUs.
pub fn placed(cpus: &[u32]) -> Cores {
    let vcpus = u32::try_from(cpus.len()).unwrap();
    let request = Request { vcpus, each: Use::Whole, service: 0, service_share: 200, node: None };
    let placement =
        Placement { request, vcpus: cpus.to_vec(), service: Vec::new(), nodes: 1, domains: 1, beyond: 0 };
    Cores { vcpus: (0..vcpus).collect(), placement, among: None, siblings: BTreeSet::new() }
}

pub fn in_force(one: &Contracted, cores: Cores) -> InForce {
    InForce::planned(one, Some(cores))
}

pub fn auto() -> rtvirtio_spec::Cores {
    rtvirtio_spec::Cores::default()
}

pub fn whole() -> rtvirtio_spec::Cores {
    rtvirtio_spec::Cores { whole: true, ..auto() }
}

fn choose_one(
    root: &Root,
    one: &Contracted,
    threads: &[Thread],
    beside: &[(InForce, Vec<u32>)],
) -> Result<Cores> {
    let ask = CoresAsk::from_contract(one, threads);
    Ok(choose(root, &probe(), ask.as_slice(), beside, &[])?.remove(&one.vm).unwrap())
}

#[test]
fn vms_of_a_spec_get_cpus_next_to_each_other_the_largest_first() {
    let (_dir, root) = host();
    let (small, large) = (one("small", 8, auto()), one("large", 8, whole()));
    let (of_small, of_large) = (threads(100, 1), threads(200, 3));
    let asks = [
        CoresAsk::from_contract(&small, &of_small).unwrap(),
        CoresAsk::from_contract(&large, &of_large).unwrap(),
    ];
    let chosen = choose(&root, &probe(), &asks, &[], &[]).unwrap();
    let large = &chosen["large"];
    let node = |cpu: &u32| cpu / 4;
    assert_eq!(large.placement.nodes, 1);
    assert_eq!(large.vcpus, [0, 1, 2]);
    let of_large: BTreeSet<u32> = large.placement.vcpus.iter().copied().collect();
    assert_eq!(of_large.len(), 3);
    let other = &chosen["small"].placement;
    assert!(other.vcpus.iter().all(|cpu| node(cpu) != node(&large.placement.vcpus[0])), "{other:?}");
    assert!(other.service.iter().all(|cpu| !of_large.contains(cpu)), "{other:?}");
    let none = choose(&root, &probe(), &[], &[], &[]).unwrap();
    assert!(none.is_empty());
}

#[test]
fn cpus_in_force_and_pinned_ones_are_not_given_again() {
    let (_dir, root) = host();
    let (a, b) = (one("a", 15, whole()), one("b", 15, whole()));
    let first = choose_one(&root, &a, &threads(100, 3), &[]).unwrap();
    let beside = [(in_force(&a, first.clone()), vec![100])];
    let second = choose_one(&root, &b, &threads(200, 3), &beside).unwrap();
    let cpus = |cores: &Cores| cores.placement.vcpus.iter().copied().collect::<BTreeSet<u32>>();
    assert!(cpus(&first).is_disjoint(&cpus(&second)), "{first} {second}");
    // A VM without a contract has CPU 5.
    for (tid, name, list) in [(900, "qemu", "0-7"), (901, "CPU 0/KVM", "5")] {
        put_thread(&root, (900, tid), name, list);
    }
    put(&root, "/proc/900/status", "Name:\tqemu\nUid:\t0\t0\t0\t0\n");
    // No program of that name has it.
    choose_one(&root, &b, &threads(200, 3), &beside).unwrap();
    std::os::unix::fs::symlink("/usr/bin/qemu-system-x86_64", root.at("/proc/900/exe")).unwrap();
    let error = choose_one(&root, &b, &threads(200, 3), &beside).unwrap_err();
    assert_eq!(error.kind(), Kind::Infeasible);
    let text = format!("{error:#}");
    assert!(text.contains("CPU 5 has a vCPU of process 900") && text.contains("2 vCPUs would fit"), "{text}");
    // Its contract is the one to be replaced.
    let leaving = [ProcessId { pid: 900, start_time: 1 }];
    let of_b = threads(200, 3);
    let ask = CoresAsk::from_contract(&b, &of_b);
    choose(&root, &probe(), ask.as_slice(), &beside, &leaving).unwrap();
    // Placements are exact: a part of a CPU in force leaves the rest of it.
    let c = one("c", 8, auto());
    let shares = choose_one(&root, &c, &threads(300, 1), &[]).unwrap();
    let next =
        choose_one(&root, &one("d", 8, auto()), &threads(400, 1), &[(in_force(&c, shares), vec![300])])
            .unwrap();
    assert!(!next.placement.vcpus.contains(&5), "{next}");
}

#[test]
fn only_cpus_of_the_list_and_of_the_cpuset_are_given() {
    let (_dir, root) = host();
    let listed = |list: &str| rtvirtio_spec::Cores { cpus: rtvirtio_cores::cpu_list(list), ..auto() };
    let cores = choose_one(&root, &one("a", 8, listed("2,6-7")), &threads(100, 2), &[]).unwrap();
    assert_eq!(cores.placement.vcpus, [6, 7], "two on one node");
    let error = choose_one(&root, &one("a", 8, listed("2")), &threads(100, 2), &[]).unwrap_err();
    let text = format!("{error:#}");
    assert!(text.contains("1 vCPUs would fit") && text.contains("it may use CPUs 2"), "{text}");
    put(&root, "/sys/fs/cgroup/vms/cpuset.cpus.effective", "3-5\n");
    let mut of_group = threads(100, 2);
    for thread in &mut of_group {
        let own = rtvirtio_kernel::task::Membership { controllers: String::new(), path: "/vms/a".into() };
        thread.cgroups = vec![own];
    }
    let cores = choose_one(&root, &one("a", 8, auto()), &of_group, &[]).unwrap();
    assert_eq!(cores.placement.vcpus, [4, 5]);
    // Threads of one VM in cpusets of their own, as libvirt's.
    put(&root, "/sys/fs/cgroup/vms/b/cpuset.cpus.effective", "0-1\n");
    let own = rtvirtio_kernel::task::Membership { controllers: String::new(), path: "/vms/b".into() };
    of_group[0].cgroups = vec![own];
    let error = choose_one(&root, &one("a", 8, auto()), &of_group, &[]).unwrap_err();
    assert!(format!("{error:#}").contains("by their cpusets"), "{error:#}");
    for thread in &mut of_group {
        thread.role = Role::Vcpu(Vec::new());
    }
    let error = choose_one(&root, &one("a", 8, auto()), &of_group, &[]).unwrap_err();
    assert!(format!("{error:#}").contains("debug-threads=on"), "{error:#}");
    put(&root, "/sys/devices/system/cpu/isolated", "4-7\n");
    let error = choose_one(&root, &one("a", 8, listed("4-7")), &threads(100, 2), &[]).unwrap_err();
    assert!(format!("{error:#}").contains("4-7 are isolated and take whole vCPUs only"), "{error:#}");
}

#[test]
fn where_no_cpu_is_left_for_other_threads_they_use_those_of_the_vcpus() {
    let (_dir, root) = host();
    let cores = choose_one(&root, &one("a", 19, auto()), &threads(100, 8), &[]).unwrap();
    assert_eq!((cores.placement.vcpus.len(), cores.placement.service.len()), (8, 0));
    assert_eq!(cpu_ranges(&cores.service()), "0-7");
}

#[test]
fn hotplugged_vcpus_are_placed_next_to_all_others_and_within_the_list() {
    let (_dir, root) = host();
    let listed = rtvirtio_spec::Cores { cpus: rtvirtio_cores::cpu_list("0-2,6"), ..auto() };
    let (a, b) = (
        one("a", 15, listed),
        one("b", 15, rtvirtio_spec::Cores { cpus: rtvirtio_cores::cpu_list("2"), ..auto() }),
    );
    let first = choose_one(&root, &a, &threads(100, 1), &[]).unwrap();
    let of_b = choose_one(&root, &b, &threads(200, 1), &[]).unwrap();
    let beside = [(in_force(&b, of_b), vec![200])];
    let later = |cores: &Cores, threads: &[Thread]| {
        with_hotplugged_vcpus(&root, &probe(), (cores, Backend::RtGroup), threads, [100].into(), &beside)
            .unwrap()
    };
    // Three more at once find one CPU: of the list one is another VM's, and one has its main loop.
    let all = threads(100, 4);
    let (cores, without) = later(&first, &all);
    assert_eq!((&cores.vcpus[..], &cores.placement.vcpus[..]), (&[0, 1][..], &[0, 6][..]));
    assert_eq!(cores.placement.service, first.placement.service);
    let tids: Vec<u32> = without.iter().map(|(of, _)| of.0).collect();
    assert!(tids == [103, 104] && without[0].1.contains("it may use CPUs 0-2,6"), "{without:?}");
    // Nothing is chosen again for what has a CPU.
    assert_eq!(later(&cores, &all), (cores.clone(), without));
    assert_eq!(later(&cores, &threads(100, 2)), (cores, Vec::new()));
}

#[test]
fn cpus_that_a_user_of_the_host_pins_to_are_not_taken() {
    let (_dir, root) = host();
    let a = one("a", 15, whole());
    let pin = |pid: u32, user: u32| {
        for (tid, name, list) in [(pid, "qemu", "0-7"), (pid + 1, "CPU 0/KVM", "5")] {
            put_thread(&root, (pid, tid), name, list);
        }
        put(
            &root,
            format!("/proc/{pid}/status"),
            &format!("Name:\tq\nUid:\t{user}\t{user}\t{user}\t{user}\n"),
        );
        let exe = root.at(format!("/proc/{pid}/exe"));
        let _ = fs::remove_file(&exe);
        std::os::unix::fs::symlink("/home/mallory/qemu-system-x86_64", exe).unwrap();
    };
    let chosen = |of: &[Thread]| choose_one(&root, &a, of, &[]);
    pin(900, 1000);
    chosen(&threads(100, 8)).unwrap();
    // The user of our VM's own process may pin others of its own.
    put(&root, "/proc/100/status", "Name:\tq\nUid:\t1000\t1000\t1000\t1000\n");
    // Another program may have the number of a process of a VM by now.
    chosen(&threads(100, 8)).unwrap();
    std::os::unix::fs::symlink("/usr/bin/qemu-system-x86_64", root.at("/proc/100/exe")).unwrap();
    assert!(
        format!("{:#}", chosen(&threads(100, 8)).unwrap_err()).contains("CPU 5 has a vCPU of process 900")
    );
    put(&root, "/proc/100/status", "Name:\tq\nUid:\t64055\t64055\t64055\t64055\n");
    chosen(&threads(100, 8)).unwrap();
    pin(900, 0);
    assert!(chosen(&threads(100, 8)).is_err());
    fs::remove_file(root.at("/proc/900/status")).unwrap();
    chosen(&threads(100, 8)).unwrap();
}

/// A CPU goes offline while a VM has its core whole: no other VM gets the sibling.
#[test]
fn the_core_of_a_cpu_that_is_offline_stays_taken() {
    let (_dir, root) = host();
    let mut cores = placed(&[4]);
    cores.siblings = siblings(&Host::new(topology(&root).unwrap(), 950).unwrap(), &cores.placement);
    assert_eq!(cores.siblings, BTreeSet::from([4, 5]));
    let read: Cores = serde_json::from_str(&serde_json::to_string(&cores).unwrap()).unwrap();
    assert_eq!(read, cores);
    put(&root, "/sys/devices/system/cpu/online", "0-3,5-7\n");
    let a = (in_force(&one("a", 15, whole()), cores), vec![100]);
    let b = one("b", 15, whole());
    let fits = |vcpus: u32| choose_one(&root, &b, &threads(200, vcpus), std::slice::from_ref(&a));
    assert!(fits(7).is_err(), "three cores of two CPUs are left");
    let found = fits(6).unwrap();
    assert!(!found.placement.vcpus.contains(&5), "{found}");
}
