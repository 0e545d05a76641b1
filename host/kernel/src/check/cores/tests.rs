use std::os::unix::fs::PermissionsExt;

use super::super::Level;
use super::*;
use crate::test_root::TestRoot;

fn host(isolated: &str) -> TestRoot {
    let root = TestRoot::new(&[]);
    root.put("/sys/devices/system/cpu/isolated", isolated);
    root.put("/proc/irq/default_smp_affinity", "ff\n");
    for (irq, on) in [(9, "0"), (24, "2"), (25, "5")] {
        root.put(&format!("/proc/irq/{irq}/effective_affinity_list"), on);
    }
    root
}

/// A VM's thread, by its name, the number of its policy, its CPUs, and the CPU where it last ran.
fn thread(root: &TestRoot, pid: u32, tid: u32, of: (&str, u32, &str, u32)) {
    let (name, policy, cpus, on) = of;
    let zeros = |n| " 0".repeat(n);
    let stat = format!("{tid} ({name}) S 1{} {on} 0 {policy}{}\n", zeros(34), zeros(11));
    root.put(&format!("/proc/{pid}/task/{tid}/stat"), &stat);
    root.put(&format!("/proc/{pid}/task/{tid}/status"), &format!("Cpus_allowed_list:\t{cpus}\n"));
}

#[test]
fn interrupts_on_isolated_cpus_are_counted() {
    let of = |root: &Root| {
        let mut found = Vec::new();
        check(root, &mut found);
        found
    };
    assert_eq!(of(&host("\n")), [], "no CPU is isolated");
    let root = host("2-5\n");
    let found = of(&root);
    assert!(found.len() == 1 && found[0].level == Level::Warn, "{found:?}");
    assert!(found[0].what.contains("may use 2-5, and 2 interrupts"), "{found:?}");
    root.put("/proc/irq/default_smp_affinity", "00000000,00000003\n");
    assert!(of(&root)[0].what.contains("may use none, and 2 interrupts"));
    for irq in [24, 25] {
        root.put(&format!("/proc/irq/{irq}/effective_affinity_list"), "1\n");
    }
    assert_eq!(of(&root)[0].level, Level::Ok);
    for (file, text) in [
        ("/proc/irq/24/effective_affinity_list", "2,x"),
        ("/proc/irq/default_smp_affinity", "xyz"),
        ("/sys/devices/system/cpu/isolated", "2-"),
    ] {
        root.put(file, text);
        assert!(of(&root)[0].what.starts_with("not known"), "{file}");
    }
}

#[test]
fn interrupts_that_only_the_kernel_moves_are_told_apart() {
    let of = |root: &Root| {
        let mut found = Vec::new();
        check(root, &mut found);
        found.remove(0)
    };
    let root = host("2-5\n");
    root.put("/proc/irq/default_smp_affinity", "3\n");
    root.put("/proc/cmdline", "quiet isolcpus=domain,2-5\n");
    let remedy = of(&root).remedy;
    assert!(remedy.starts_with("boot with irqaffinity=") && remedy.contains("before 6.11"), "{remedy}");
    // As kernels from 6.11 on show it, and as debugfs does.
    let list = "/proc/irq/24/smp_affinity_list";
    root.put(list, "2\n");
    std::fs::set_permissions(root.at(list), PermissionsExt::from_mode(0o444)).unwrap();
    let found = of(&root);
    assert!(found.what.contains("2 interrupts are set to some; 1 of these cannot be moved"), "{found:?}");
    assert!(found.remedy.contains("irqaffinity=") && found.remedy.contains("isolcpus=managed_irq,CPUS"));
    root.put("/sys/kernel/debug/irq/irqs/25", "dstate: 0x1\n   IRQD_AFFINITY_MANAGED\n");
    let found = of(&root);
    assert!(found.what.contains("; 2 of these") && !found.remedy.contains("irqaffinity"), "{found:?}");
    // The remedy was taken, for all isolated CPUs or for some.
    root.put("/proc/cmdline", "isolcpus=managed_irq,domain,2-4 quiet\n");
    assert!(of(&root).what.contains("1 interrupts are set to some; 1 of these"), "{:?}", of(&root));
    root.put("/sys/devices/system/cpu/possible", "0-5\n");
    for taken in ["isolcpus=managed_irq,domain,2-5", "isolcpus=managed_irq,2-N", "isolcpus=managed_irq,all"] {
        root.put("/proc/cmdline", taken);
        let found = of(&root);
        assert!(
            found.level == Level::Ok && found.what.contains("2 interrupts of device queues"),
            "{found:?}"
        );
    }
    for other in ["isolcpus=domain,2-5 foo=managed_irq,2-5\n", "isolcpus=managed_irq,5-N\n"] {
        root.put("/proc/cmdline", other);
        assert_eq!(of(&root).level, Level::Warn, "{other}");
    }
    std::fs::remove_file(root.at("/proc/cmdline")).unwrap();
    assert!(of(&root).what.starts_with("not known"), "{:?}", of(&root));
}

#[test]
fn vcpus_that_cannot_leave_a_cpu_are_named() {
    let (other, fifo, deadline) = (0, 1, 6);
    // Isolated CPUs, the vCPUs of VM 7 and of VM 8, and what is found.
    type Case<'a> = (&'a str, [&'a [(u32, &'a str, u32)]; 2], &'a [&'a str]);
    let cases: &[Case<'_>] = &[
        ("", [&[(other, "0-3", 0), (other, "0-3", 0)], &[(fifo, "0-3", 1)]], &[]),
        ("", [&[(other, "1", 1), (other, "1", 1)], &[]], &["vm.cores.7"]),
        ("", [&[(other, "1", 1), (other, "2", 2)], &[(other, "1", 1)]], &[]),
        ("", [&[(fifo, "1", 1), (fifo, "2", 2)], &[(fifo, "2", 2)]], &["cpu.real_time.2"]),
        ("", [&[(fifo, "1", 1), (fifo, "1", 1)], &[]], &["vm.cores.7", "cpu.real_time.1"]),
        ("2-5", [&[(other, "2-5", 2), (other, "2-5", 2)], &[(other, "0", 0)]], &["vm.cores.7"]),
        ("2-5", [&[(other, "2-5", 2), (other, "2-5", 3)], &[]], &[]),
        ("2-5", [&[(fifo, "2-5", 2), (deadline, "2-5", 2)], &[]], &[]),
        ("2-5", [&[(other, "1-5", 2), (other, "1-5", 2)], &[]], &[]),
    ];
    for (isolated, of_vms, ids) in cases {
        let root = host(isolated);
        for (pid, vcpus) in [7, 8].into_iter().zip(of_vms) {
            thread(&root, pid, pid, ("qemu-system-x86", other, "0", 0));
            for (n, &(policy, cpus, on)) in (0..).zip(vcpus.iter()) {
                thread(&root, pid, pid * 10 + n, (&format!("CPU {n}/KVM"), policy, cpus, on));
            }
        }
        // VM 9 has ended.
        let found = vms(&root, &[7, 8, 9]);
        let found_ids: Vec<&str> = found.iter().map(|finding| finding.id.as_str()).collect();
        assert_eq!(found_ids, *ids, "{of_vms:?}: {found:?}");
        assert!(found.iter().all(|finding| finding.level == Level::Warn));
    }
    let root = host("");
    root.put("/proc/7/task/7/stat", "garbage");
    assert!(vms(&root, &[7])[0].what.starts_with("not known"));
}

#[test]
fn free_cpus_are_proposed_by_the_topology() {
    let root = host("");
    // Two cores of two threads; VM 8 has CPU 2, and so the core of 2 and 3.
    root.put("/sys/devices/system/cpu/online", "0-3\n");
    for cpu in 0..4 {
        let core = format!("{}-{}\n", cpu & !1, cpu | 1);
        root.put(&format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"), &core);
    }
    let run = |pid: u32, cpus: &[&str]| {
        thread(&root, pid, pid, ("qemu-system-x86", 0, "0", 0));
        for (n, cpus) in (0..).zip(cpus) {
            thread(&root, pid, pid * 10 + n, (&format!("CPU {n}/KVM"), 0, cpus, 2));
        }
    };
    run(7, &["3", "3"]);
    run(8, &["2"]);
    let remedies = |pids: &[u32]| vms(&root, pids).into_iter().map(|of| of.remedy).collect::<Vec<_>>();
    let of = remedies(&[7, 8]);
    assert!(of[0].contains("CPUs 0, 1, if its cpuset"), "{of:?}");
    // Another VM on one CPU is offered no CPU twice.
    run(9, &["1", "1"]);
    let of = remedies(&[7, 8, 9]);
    assert!(of.iter().all(|remedy| !remedy.contains("free by core")), "one CPU is free: {of:?}");
}
