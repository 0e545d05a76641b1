//! Every spec in `examples/` is valid, explained, and says what its name promises.

use std::path::{Path, PathBuf};

use rtvirtio_spec::{
    Arrival, Device, HostHandle, HostSpec, LabKind, LibvirtDomain, Op, Pattern, Reach, Spec, SyncKind,
    TWIN_PROFILES, Target, VmDisk, parse,
};
use rtvirtio_units::{Bytes, Iops, Nanos, Percentile, Ratio};

const DIRECTORY: &str = "../../examples";

fn host(name: &str) -> HostSpec {
    let path = Path::new(DIRECTORY).join(name);
    let text = std::fs::read_to_string(&path).unwrap();
    HostSpec::parse(&path.display().to_string(), &text).unwrap_or_else(|errors| panic!("{errors}"))
}

fn example(name: &str) -> Spec {
    host(name).single().cloned().unwrap_or_else(|errors| panic!("{errors}"))
}

/// Rate and target in ms of every task of a VM.
fn rates_and_targets(spec: &Spec, vm: usize) -> Vec<(f64, u64)> {
    let target_ms = |t: rtvirtio_spec::Target| {
        assert_eq!(t.percentile, Percentile::P9999);
        t.latency.0 / 1_000_000
    };
    spec.vms[vm].tasks.iter().map(|t| (t.rate.unwrap().0, target_ms(t.targets[0]))).collect()
}

fn assert_random_reads(spec: &Spec) {
    for (_, task) in spec.tasks() {
        assert_eq!((task.op, task.block, task.pattern), (Op::Read, Bytes(4096), Pattern::Random));
        assert_eq!((task.arrival, task.depth), (Arrival::Closed, if task.rate.is_some() { 1 } else { 32 }));
    }
}

#[test]
fn all_examples_are_valid_and_explained() {
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(DIRECTORY).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|e| e == "toml"));
    assert!(files.len() >= 7, "{files:?}");
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        let comment = text.lines().take_while(|line| line.starts_with('#')).count();
        assert!(comment >= 3, "{} does not explain itself", file.display());
        HostSpec::parse(&file.display().to_string(), &text).unwrap_or_else(|errors| panic!("{errors}"));
    }
}

#[test]
fn several_disks_are_on_two_devices() {
    let host = host("several-disks.toml");
    let names: Vec<_> = host.parts().iter().map(|part| (part.name.as_deref(), part.spec.vms.len())).collect();
    assert_eq!(names, [(Some("fast"), 1), (Some("big"), 2)]);
    assert_eq!(host.vms().len(), 2);
}

#[test]
fn fig7_is_the_papers_case_in_both_forms() {
    for (name, kind) in [("fig7.toml", LabKind::Qemu), ("fig7-process.toml", LabKind::Process)] {
        let spec = example(name);
        assert_eq!(spec.device, Device::Twin { profile: "qlc-nvme".to_owned(), size: Bytes(1 << 30) });
        assert_eq!(spec.lab_kind(), Some(kind));
        assert_eq!(spec.vms.iter().map(|vm| vm.name.as_str()).collect::<Vec<_>>(), ["vm0", "vm1", "vm2"]);
        assert_random_reads(&spec);
        assert_eq!(rates_and_targets(&spec, 0), [(100.0, 400), (500.0, 300)]);
        assert_eq!(rates_and_targets(&spec, 1), [(100.0, 800), (500.0, 500)]);
        assert_eq!(rates_and_targets(&spec, 2), [(100.0, 900), (500.0, 700)]);
        assert_eq!(spec.vms[0].tightest_target(), Some(Nanos::from_millis(300)));
    }
}

#[test]
fn heavy_process_is_four_loaded_machines() {
    let spec = example("heavy-process.toml");
    assert_eq!((spec.vms.len(), spec.lab_kind()), (4, Some(LabKind::Process)));
    assert_random_reads(&spec);
    let p99 = Percentile(99.0);
    for (vm, heavy) in [250, 400, 600, 800].into_iter().enumerate() {
        let tasks = [(100.0, p99, 100), (500.0, p99, 100), (1500.0, Percentile::P9999, heavy)];
        let found: Vec<_> = spec.vms[vm].tasks.iter().map(|t| (t.rate.unwrap().0, t.targets[0])).collect();
        assert_eq!(
            found,
            tasks.map(|(rate, percentile, ms)| {
                (rate, Target { percentile, latency: Nanos::from_millis(ms) })
            })
        );
        // In 25 s each can be shown to hold at 95 %: (p/100)^n <= 5 %.
        for (rate, target) in found {
            assert!((1.0 - target.percentile.exceedance()).powf(25.0 * rate) <= 0.05, "{rate} {target:?}");
        }
    }
    assert_eq!(spec.tasks().map(|(_, t)| t.rate.unwrap().0).sum::<f64>(), 8400.0);
}

#[test]
fn flood_has_three_targets_and_one_best_effort_task() {
    let spec = example("flood.toml");
    assert_eq!((spec.vms.len(), spec.lab_kind()), (4, Some(LabKind::Process)));
    assert_random_reads(&spec);
    for vm in 0..3 {
        assert_eq!(rates_and_targets(&spec, vm), [(500.0, 20)]);
    }
    let flood = &spec.vm("flood").unwrap().tasks[0];
    assert_eq!((flood.depth, flood.rate, flood.targets.len()), (32, None, 0));
}

#[test]
fn infeasible_asks_for_a_millisecond_of_a_disk_with_an_arm() {
    let spec = example("infeasible.toml");
    assert!(matches!(&spec.device, Device::Twin { profile, .. } if profile == "disk-1.8in"));
    assert_eq!(rates_and_targets(&spec, 0), [(20.0, 1)]);
    assert!(spec.vms.len() > 1);
}

#[test]
fn emmc_has_two_machines_with_small_rates() {
    let spec = example("emmc.toml");
    assert_eq!(spec.device, Device::Twin { profile: "emmc".to_owned(), size: Bytes(512 << 20) });
    assert_eq!((spec.vms.len(), spec.lab_kind()), (2, Some(LabKind::Process)));
    assert!(spec.tasks().all(|(_, t)| t.rate.unwrap() <= Iops(20.0)));
    assert_eq!(spec.vms[0].tasks[1].op, Op::Mixed { write_share: Ratio(0.3) });
}

#[test]
fn existing_vms_are_reached_in_three_ways() {
    let spec = example("existing-vms.toml");
    assert_eq!(spec.device, Device::Path("/dev/nvme0n1".into()));
    assert_eq!(spec.lab_kind(), None);
    let cgroup = HostHandle::Cgroup(r"/machine.slice/machine-qemu\x2d1\x2ddatabase.scope".into());
    let on_host = |name: &str| Some(VmDisk::Path(format!("/dev/vg0/{name}").into()));
    assert_eq!(spec.vms[0].reach, Reach::Existing { host: cgroup, agent: None, disk: on_host("database") });
    let qmp = Reach::Existing {
        host: HostHandle::Qmp("/run/plc.qmp".into()),
        agent: Some("/run/plc.qga".into()),
        disk: Some(VmDisk::Path("/dev/vdb".into())),
    };
    assert_eq!(spec.vms[1].reach, qmp);
    let pid = HostHandle::Pid(4242);
    assert_eq!(spec.vms[2].reach, Reach::Existing { host: pid, agent: None, disk: on_host("build") });
    let events = &spec.vms[1].tasks[1];
    assert_eq!((events.arrival, events.depth, events.rate), (Arrival::Open, 16, Some(Iops(50.0))));
    assert_eq!(events.targets[0].percentile, Percentile(99.9));
}

#[test]
fn libvirt_vms_are_reached_by_domain() {
    let spec = example("libvirt.toml");
    assert_eq!(spec.lab_kind(), None);
    let plc = LibvirtDomain { domain: "plc".to_owned(), uri: None };
    assert_eq!(plc.uri(), "qemu:///system");
    let disk = Some(VmDisk::Target("vdb".to_owned()));
    assert_eq!(spec.vms[0].reach, Reach::Existing { host: HostHandle::Domain(plc), agent: None, disk });
}

#[test]
fn a_cgroup_keeps_its_backslashes() {
    let at = |cgroup: &str| {
        let text = format!(
            "[device]\npath = \"/dev/sda\"\n[[vm]]\nname = \"a\"\ncgroup = {cgroup}\n[[vm.task]]\n\
             name = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n"
        );
        parse("s.toml", &text)
    };
    let want = HostHandle::Cgroup(r"/machine.slice/machine-qemu\x2d1\x2dplc.scope".into());
    for right in [
        r"'/machine.slice/machine-qemu\x2d1\x2dplc.scope'",
        r#""/machine.slice/machine-qemu\\x2d1\\x2dplc.scope""#,
    ] {
        let spec = at(right).unwrap();
        assert_eq!(spec.vms[0].reach, Reach::Existing { host: want.clone(), agent: None, disk: None });
    }
    let wrong = at(r#""/machine.slice/machine-qemu\x2d1\x2dplc.scope""#).unwrap_err();
    assert_eq!(wrong.errors().len(), 1, "{wrong}");
    assert_eq!(
        wrong.errors()[0].help,
        r"write it in single quotes: cgroup = '/machine.slice/machine-qemu\x2d1\x2dplc.scope'"
    );
}

const MINIMAL: &str =
    "[[vm]]\nname = \"a\"\nlab = \"qemu\"\n[[vm.task]]\nname = \"t\"\nop = \"write\"\nblock = \"512B\"\n";

#[test]
fn what_is_left_out_gets_its_default() {
    for profile in TWIN_PROFILES {
        let spec = parse("s.toml", &format!("[device]\ntwin = \"{profile}\"\n{MINIMAL}")).unwrap();
        assert_eq!(spec.device, Device::Twin { profile: profile.to_owned(), size: Bytes(1 << 30) });
        let task = &spec.vms[0].tasks[0];
        assert_eq!((task.pattern, task.arrival, task.depth), (Pattern::Random, Arrival::Closed, 1));
        assert_eq!((task.rate, task.tightest_target(), task.sync), (None, None, None));
    }
    let open = format!(
        "[device]\npath = \"/dev/sdb\"\n{MINIMAL}loop = \"open\"\nrate = \"5/s\"\ntarget.latency = \"1h\"\n"
    );
    let spec = parse("s.toml", &open).unwrap();
    assert_eq!(spec.device, Device::Path("/dev/sdb".into()), "a lab VM on a real device is allowed");
    let task = &spec.vms[0].tasks[0];
    assert_eq!((task.arrival, task.depth), (Arrival::Open, 64));
    assert_eq!(task.targets[0].percentile, Percentile::P9999);
}

#[test]
fn a_profile_file_is_relative_to_the_spec() {
    for (file, twin, expected) in [
        ("specs/s.toml", "./my.toml", "specs/my.toml"),
        ("specs/s.toml", "my.toml", "specs/my.toml"),
        ("specs/s.toml", "/etc/my.toml", "/etc/my.toml"),
        ("s.toml", "my.toml", "./my.toml"),
    ] {
        let spec = parse(file, &format!("[device]\ntwin = \"{twin}\"\nsize = \"64GiB\"\n{MINIMAL}")).unwrap();
        assert_eq!(spec.device, Device::Twin { profile: expected.to_owned(), size: Bytes(64 << 30) });
    }
}

#[test]
fn limits_are_inclusive() {
    let mut text = String::from("[device]\ntwin = \"emmc\"\nsize = \"16MiB\"\n");
    for vm in 0..64 {
        text += &format!("[[vm]]\nname = \"{}{vm:02}\"\nlab = \"process\"\n", "v".repeat(30));
        for task in 0..64 {
            text +=
                &format!("[[vm.task]]\nname = \"t{task}\"\nop = \"read\"\nblock = \"16MiB\"\ndepth = 1024\n");
        }
    }
    text += "target = { percentile = \"p99.9999\", latency = \"1us\" }\n";
    let spec = parse("s.toml", &text).unwrap();
    assert_eq!(spec.tasks().count(), 64 * 64);
    let last = &spec.vms[63].tasks[63];
    assert_eq!(last.targets[0].latency, Nanos(1000));
    let fast =
        MINIMAL.to_owned() + "rate = \"10000000/s\"\ntarget = { percentile = \"p50\", latency = \"1h\" }\n";
    let slow = MINIMAL.to_owned() + "rate = \"1/min\"\n";
    for vm in [fast, slow] {
        parse("s.toml", &format!("[device]\ntwin = \"emmc\"\n{vm}")).unwrap();
    }
}

#[test]
fn several_targets_are_sorted_and_one_is_the_same_as_a_list_of_one() {
    let of = |text: &str| {
        let spec = parse("s.toml", &format!("[device]\ntwin = \"emmc\"\n{MINIMAL}{text}\n")).unwrap();
        spec.vms[0].tasks[0].targets.clone()
    };
    let two = of(
        "targets = [{ percentile = \"p99.99\", latency = \"20ms\" }, { percentile = \"p99\", latency = \"2ms\" }]",
    );
    let found: Vec<_> = two.iter().map(|t| (t.percentile.0, t.latency)).collect();
    assert_eq!(found, [(99.0, Nanos::from_millis(2)), (99.99, Nanos::from_millis(20))]);
    assert_eq!(of("target = { latency = \"5ms\" }"), of("targets = [{ latency = \"5ms\" }]"));
    assert!(of("").is_empty());
}

#[test]
fn goals_name_every_target_and_every_task_without_one() {
    let text = format!(
        "[device]\ntwin = \"emmc\"\n{MINIMAL}targets = [{{ percentile = \"p99\", latency = \"2ms\" }}, {{ latency = \"20ms\" }}]\n\
         [[vm.task]]\nname = \"free\"\nop = \"read\"\nblock = \"4KiB\"\n"
    );
    let spec = parse("s.toml", &text).unwrap();
    let goals: Vec<_> =
        spec.goals().map(|(_, t, target)| (t.name.as_str(), target.map(|t| t.percentile.0))).collect();
    assert_eq!(goals, [("t", Some(99.0)), ("t", Some(99.99)), ("free", None)]);
    assert_eq!(spec.vms[0].tightest_target(), Some(Nanos::from_millis(2)));
}

#[test]
fn a_mix_of_sizes_has_a_largest_and_a_mean() {
    let mix = MINIMAL.replace(
        "block = \"512B\"",
        "block = [{ size = \"64KiB\", share = \"20%\" }, { size = \"4KiB\", share = \"80%\" }]",
    );
    let spec = parse("s.toml", &format!("[device]\ntwin = \"emmc\"\n{mix}")).unwrap();
    let task = &spec.vms[0].tasks[0];
    assert_eq!(task.block, Bytes::from_kib(64));
    let sizes: Vec<_> = task.mix.iter().map(|m| (m.size.0, m.share.0)).collect();
    assert_eq!(sizes, [(4096, 0.8), (65536, 0.2)]);
    assert!((task.mean_block() - 16384.0).abs() < 1e-9, "{}", task.mean_block());
}

#[test]
fn a_task_that_syncs_names_the_call() {
    for (word, kind) in [("fdatasync", SyncKind::Fdatasync), ("fsync", SyncKind::Fsync)] {
        let task = MINIMAL.replace("512B", "4KiB") + &format!("sync = \"{word}\"\n");
        let spec = parse("s.toml", &format!("[device]\ntwin = \"emmc\"\n{task}")).unwrap();
        assert_eq!(spec.vms[0].tasks[0].sync, Some(kind));
    }
}

#[test]
fn durable_has_a_log_with_two_targets_and_a_database_of_two_sizes() {
    let spec = example("durable.toml");
    let names = |vm: usize| spec.vms[vm].tasks[0].name.as_str();
    assert_eq!([names(0), names(1), names(2)], ["wal", "tables", "copy"]);
    let wal = &spec.vms[0].tasks[0];
    assert_eq!((wal.op, wal.sync, wal.depth), (Op::Write, Some(SyncKind::Fdatasync), 1));
    let targets: Vec<_> = wal.targets.iter().map(|t| (t.percentile.0, t.latency)).collect();
    assert_eq!(targets, [(99.0, Nanos::from_millis(10)), (99.9, Nanos::from_millis(50))]);
    let tables = &spec.vms[1].tasks[0];
    let sizes: Vec<_> = tables.mix.iter().map(|m| (m.size, m.share.0)).collect();
    assert_eq!(sizes, [(Bytes::from_kib(8), 0.9), (Bytes::from_kib(128), 0.1)]);
    assert_eq!(tables.block, Bytes::from_kib(128));
    assert!(spec.vms[2].tasks[0].targets.is_empty() && spec.goals().count() == 4);
}
