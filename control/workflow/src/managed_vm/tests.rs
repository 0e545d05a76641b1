use rtvirtio_cpu::{Grant, KernelMechanism, Partition};
use rtvirtio_units::Ratio;

use super::*;
use crate::contracts::cores_tests::{auto, host, in_force, one, placed, put};
use crate::fixtures::put_thread;

const SCOPE: &str = "/sys/fs/cgroup/machine.slice/plc.scope";

/// A main loop and a vCPU without reservations, in a group with a valid partition; the files show
/// no thread's reservation.
fn partitioned() -> (tempfile::TempDir, Root, InForce) {
    let (dir, root) = host();
    for (tid, name) in [(100, "qemu-system-x86"), (101, "CPU 0/KVM")] {
        put_thread(&root, (100, tid), name, "4-5");
        put(&root, format!("/proc/100/task/{tid}/cgroup"), "0::/machine.slice/plc.scope\n");
    }
    put(&root, format!("{SCOPE}/cpuset.cpus.partition"), "root\n");
    put(&root, format!("{SCOPE}/cpuset.cpus.effective"), "4-5\n");
    let cpus = BTreeSet::from([4, 5]);
    let partition = Some(Partition { group: "/machine.slice/plc.scope".into(), cpus });
    let of = in_force(&one("plc", 10, auto()), placed(&[4]));
    (dir, root, InForce { partition, cores: None, backend: Backend::Deadline, ..of })
}

fn probe() -> Probe {
    let grant = Grant { limit: Ratio(0.95), fair_server: Ratio(0.0), taken: Vec::new() };
    let found = vec![KernelMechanism { backend: Backend::Deadline, grant }];
    Probe { found, missing: Vec::new(), cpus: 8, cgroups: None }
}

fn scan(kept: &mut ManagedVm, root: &Root) -> Option<TakeIn> {
    kept.scan(root, &probe(), &BTreeSet::new(), &mut || None).unwrap()
}

#[test]
fn threads_of_a_partition_are_outside_of_the_contract_until_each_has_its_part() {
    let (_dir, root, of) = partitioned();
    let mut kept = ManagedVm::start(of, VmHandle::of_pid(100), &root, Duration::from_secs(3600));
    assert_eq!(kept.outside(), None);
    // Their use has not been observed for long enough to split the budget by it.
    kept.split_at = Instant::now() + Duration::from_secs(3600);
    for _ in 0..3 {
        assert!(scan(&mut kept, &root).is_none());
        assert_eq!((kept.outside(), kept.lacks_parts()), (Some(2), true));
    }
    // A write is no proof: the kernel may refuse a reservation.
    (kept.split_at, kept.split_every) = (Instant::now(), Duration::ZERO);
    let split = scan(&mut kept, &root).unwrap();
    assert_eq!(split.settings.writes.len(), 2);
    kept.written(split);
    assert_eq!(kept.outside(), Some(2));
    assert_eq!(scan(&mut kept, &root).unwrap().settings.writes.len(), 2, "tried again");
}

#[test]
fn a_budget_is_not_split_over_other_cpus_while_the_partition_is_not_valid() {
    let (_dir, root, of) = partitioned();
    let mut kept = ManagedVm::start(of, VmHandle::of_pid(100), &root, Duration::ZERO);
    let file = format!("{SCOPE}/cpuset.cpus.partition");
    for kind in ["member\n", "root invalid (Parent unable to distribute cpu downstream)\n"] {
        put(&root, &file, kind);
        assert!(scan(&mut kept, &root).is_none(), "{kind}");
    }
    put(&root, &file, "root\n");
    assert!(scan(&mut kept, &root).is_some());
    // A CPU that goes offline leaves the others.
    put(&root, format!("{SCOPE}/cpuset.cpus.effective"), "4\n");
    assert!(scan(&mut kept, &root).is_some());
}
