//! Probing and settings over simulated hosts: cgroup v1 and v2, with and without each mechanism.

use std::fs;
use std::path::Path;

use rtvirtio_apply::Write;
use rtvirtio_cpu::{
    Ask, Backend, Contract, CpuError, Level, Order, Probe, Settings, choose, control, probe, room, settings,
};
use rtvirtio_kernel::sched::Reservation;
use rtvirtio_kernel::{Cgroups, Root};
use rtvirtio_planner::Enforcement;
use rtvirtio_units::Nanos;
use rtvirtio_vmm::threads::discover;
use rtvirtio_vmm::{Role, Thread, VmHandle};

struct Host {
    _dir: tempfile::TempDir,
    root: Root,
}

const V1: &str = "38 31 0:35 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n";
const V2: &str = "38 31 0:35 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
const C: &str = "/sys/fs/cgroup/cpu";

impl Host {
    fn new(mountinfo: &str, kernel: &str) -> Self {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let host = Self { root: Root::new(dir.path()), _dir: dir };
        host.put("/proc/self/mountinfo", mountinfo);
        host.put("/proc/sys/kernel/osrelease", kernel);
        host.put("/proc/sys/kernel/sched_rt_runtime_us", "950000\n");
        host.put("/proc/sys/kernel/sched_rt_period_us", "1000000\n");
        host.put("/sys/devices/system/cpu/online", "0-1\n");
        if mountinfo == V2 {
            host.put("/sys/fs/cgroup/cgroup.controllers", "cpu io\n");
            host.put("/sys/fs/cgroup/cgroup.procs", "1\n");
        } else {
            host.put(&format!("{C}/cpu.cfs_quota_us"), "-1\n");
        }
        host
    }

    fn put(&self, path: &str, text: &str) {
        let path = self.root.at(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn rt_group(&self, group: &str, runtime: &str, period: &str) {
        self.put(&format!("{C}{group}/cpu.rt_runtime_us"), runtime);
        self.put(&format!("{C}{group}/cpu.rt_period_us"), period);
    }

    /// A VM of five threads, all in `cgroup`.
    fn vm(&self, cgroup: &str, policy: u32, cpus: &str) -> Vec<Thread> {
        self.named(
            ["qemu-system-x86", "qemu-system-x86", "IO io0", "CPU 0/KVM", "worker"],
            cgroup,
            policy,
            cpus,
        )
    }

    /// VM of five threads with these names, all in `cgroup`.
    fn named(&self, names: [&str; 5], cgroup: &str, policy: u32, cpus: &str) -> Vec<Thread> {
        for (tid, name) in (100..).zip(names) {
            let dir = format!("/proc/100/task/{tid}");
            let tail = "0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 17 0";
            let priority = if policy == 0 { 0 } else { 50 };
            self.put(
                &format!("{dir}/stat"),
                &format!("{tid} ({name}) S 1 1 1 0 -1 64 0 0 0 0 5 5 0 0 20 0 1 0 {tid} {tail} {priority} {policy} 0\n"),
            );
            self.put(&format!("{dir}/status"), &format!("Cpus_allowed_list:\t{cpus}\n"));
            self.put(&format!("{dir}/cgroup"), &format!("1:cpu:{cgroup}\n0::{cgroup}\n"));
        }
        self.put("/proc/100/comm", "qemu-system-x86\n");
        self.put("/proc/100/status", "VmLck:\t0 kB\nVmRSS:\t102400 kB\n");
        discover(&self.root, &VmHandle::of_pid(100)).unwrap()
    }

    fn probe(&self) -> Probe {
        probe(&self.root).unwrap()
    }

    fn settings(&self, backend: Backend, ask: &Ask<'_>) -> Result<Settings, CpuError> {
        settings(&self.root, &self.probe(), backend, ask)
    }

    fn chosen(&self, real_time: bool) -> Option<Backend> {
        choose(&self.probe(), None, real_time).map(|f| f.backend)
    }
}

fn ask(threads: &[Thread], order: Order) -> Ask<'_> {
    let contract = Contract::new(Nanos::from_millis(4), Nanos::from_millis(20)).unwrap();
    Ask { vm: "plc", threads, contract, order, level: Level::ALONE, used: &[] }
}

/// Paths of writes, with their values.
fn shown(writes: &[Write]) -> Vec<String> {
    writes.iter().map(|w| format!("{} {}", w.target.path.display(), w.value)).collect()
}

fn why(probe: &Probe, backend: Backend) -> String {
    probe.missing.iter().find(|m| m.0 == backend).unwrap().1.clone()
}

#[test]
fn v1_with_rt_groups_counts_what_others_have() {
    let host = Host::new(V1, "6.18.1\n");
    host.rt_group("", "950000\n", "1000000\n");
    host.rt_group("/web", "30000\n", "100000\n");
    host.rt_group("/idle", "0\n", "1000000\n");
    host.rt_group("/web/inner", "10000\n", "100000\n");
    let probe = host.probe();
    let found = choose(&probe, None, true).unwrap();
    assert_eq!((found.backend, found.backend.strength()), (Backend::RtGroup, Enforcement::Guarantee));
    assert_eq!(found.grant.taken.len(), 1, "{found:?}");
    assert!((found.grant.free() - 0.65).abs() < 1e-9 && found.grant.taken[0].name == "cgroup web");
    assert_eq!(probe.cpus, 2);
    assert!(why(&probe, Backend::Hcbs).contains("not merged"));
}

#[test]
fn a_distributions_kernel_has_deadlines_and_a_cap() {
    let host = Host::new(V2, "6.12.9-amd64\n");
    let probe = host.probe();
    assert!(why(&probe, Backend::RtGroup).contains("cgroup v2"));
    let deadline = choose(&probe, None, false).unwrap();
    assert_eq!(deadline.backend, Backend::Deadline);
    assert!((deadline.grant.free() - 0.90).abs() < 1e-9, "the fair server counts: {deadline:?}");
    // Priorities need a mechanism that holds FIFO threads; only the kernel's own share for ordinary
    // threads is available.
    assert_eq!(host.chosen(true), Some(Backend::Throttle));
    let cap = choose(&probe, Some(Backend::CpuMax), false).unwrap();
    assert_eq!((cap.backend.strength(), cap.grant.limit.0), (Enforcement::Cap, 1.0));

    let old = Host::new(V1, "5.10.0\n");
    old.put("/proc/sys/kernel/sched_rt_runtime_us", "-1\n");
    let probe = old.probe();
    assert!(why(&probe, Backend::Throttle).contains("would stop the host"));
    assert!(why(&probe, Backend::RtGroup).contains("CONFIG_RT_GROUP_SCHED"));
    assert_eq!(old.chosen(true), None);
}

/// Linux 7 refuses a limit below the share of the fair server.
#[test]
fn a_limit_that_leaves_nothing_beside_the_fair_server_makes_a_cap_of_a_contract() {
    for (release, limit, said) in [
        ("6.1.0\n", "0\n", "leaves reservations nothing; sysctl"),
        ("7.2.13\n", "50000\n", "leaves reservations nothing beside the fair server; sysctl"),
    ] {
        let host = Host::new(V2, release);
        host.put("/proc/sys/kernel/sched_rt_runtime_us", limit);
        assert_eq!(host.chosen(false), Some(Backend::CpuMax), "{release}");
        let why = why(&host.probe(), Backend::Deadline);
        assert!(why.contains(said), "{why}");
        host.put("/proc/sys/kernel/sched_rt_runtime_us", "60000\n");
        assert_eq!(host.chosen(false), Some(Backend::Deadline), "{release}");
    }
}

/// `sched_rt_runtime_us` stops FIFO threads before Linux 6.12, and from then on only with
/// CONFIG_RT_GROUP_SCHED: what is granted next to ordinary threads is what is kept from them.
#[test]
fn a_limit_that_the_kernel_does_not_enforce_grants_nothing() {
    let of = |host: &Host| {
        let found = host.probe().found;
        found.into_iter().find(|f| f.backend == Backend::Throttle).map(|f| f.grant.limit.0)
    };
    let server = |host: &Host, cpu: u32, runtime: &str| {
        let dir = format!("/sys/kernel/debug/sched/fair_server/cpu{cpu}");
        host.put(&format!("{dir}/runtime"), runtime);
        host.put(&format!("{dir}/period"), "1000000000\n");
    };
    for (release, limit) in [("6.7.0\n", 0.9), ("6.8.0\n", 0.9), ("6.11.0\n", 0.9), ("6.12.0\n", 0.95)] {
        let host = Host::new(V2, release);
        host.put("/proc/sys/kernel/sched_rt_runtime_us", "900000\n");
        assert_eq!(of(&host), Some(limit), "{release}");
    }
    let host = Host::new(V2, "6.12.0\n");
    server(&host, 0, "0\n");
    server(&host, 1, "50000000\n");
    assert_eq!(of(&host), None, "CPU 0 is shared, and nothing stops a thread there");
    assert!(why(&host.probe(), Backend::Throttle).contains("stops no real-time thread"));
    assert_eq!(host.chosen(true), None);
    // Reservations of deadline threads are still bounded by it, less the fair server's share.
    let deadline = host.probe().found.into_iter().find(|f| f.backend == Backend::Deadline).unwrap();
    assert!((deadline.grant.free() - 0.9).abs() < 1e-9, "{deadline:?}");
    host.put("/sys/devices/system/cpu/isolated", "0\n");
    assert_eq!(of(&host), Some(0.95), "CPU 0 is set apart");
    // Groups have budgets, and so has the root: threads in it are stopped after all.
    let groups = Host::new(V1, "6.12.0\n");
    for cpu in 0..2 {
        server(&groups, cpu, "0\n");
    }
    assert_eq!(of(&groups), None);
    groups.rt_group("", "950000\n", "1000000\n");
    assert_eq!(of(&groups), Some(0.95));
    // A fair server that takes more than RT throttling leaves.
    for cpu in 0..2 {
        server(&groups, cpu, "100000000\n");
    }
    let found = groups.probe().found;
    let limits: Vec<_> = found.iter().map(|f| (f.backend, f.grant.limit.0)).collect();
    assert!(
        limits.contains(&(Backend::RtGroup, 0.9)) && limits.contains(&(Backend::Throttle, 0.9)),
        "{limits:?}"
    );
    groups.put("/proc/sys/kernel/sched_rt_runtime_us", "0\n");
    assert!(why(&groups.probe(), Backend::Throttle).contains("no time at all"));
}

/// A kernel whose root group has no `cpu.rt.max`, but those below it.
#[test]
fn hierarchical_cbs_is_seen_by_any_group() {
    let host = Host::new(V2, "7.2.0\n");
    host.put("/sys/fs/cgroup/web.scope/cgroup.procs", "");
    assert!(why(&host.probe(), Backend::Hcbs).contains("not merged"));
    host.put("/sys/fs/cgroup/web.scope/cpu.rt.max", "20000 100000\n");
    host.put("/sys/fs/cgroup/plc.scope/cpu.rt.max", "max 100000\n");
    let probe = host.probe();
    let found = choose(&probe, None, true).unwrap();
    assert_eq!(found.backend, Backend::Hcbs);
    // 95 % less the fair server's 5 % and what the other group has.
    assert!((found.grant.free() - 0.7).abs() < 1e-9, "{found:?}");
}

#[test]
fn hierarchical_cbs_is_taken_where_it_is() {
    let host = Host::new(V2, "7.2.0\n");
    host.put("/sys/fs/cgroup/cpu.rt.max", "max 100000\n");
    assert!(why(&host.probe(), Backend::Hcbs).contains("`max 100000`: the server is off"));
    host.put("/sys/fs/cgroup/cpu.rt.max", "90000 100000\n");
    host.put("/sys/fs/cgroup/web.scope/cpu.rt.max", "20000 100000\n");
    host.put("/sys/fs/cgroup/plc.scope/cpu.rt.max", "max 100000\n");
    host.put("/sys/fs/cgroup/plc.scope/cgroup.procs", "100\n");
    let probe = host.probe();
    let found = choose(&probe, None, true).unwrap();
    assert_eq!(found.backend, Backend::Hcbs);
    assert!((found.grant.free() - 0.7).abs() < 1e-9);
    let threads = host.vm("/plc.scope", 0, "0-1");
    let made = host.settings(Backend::Hcbs, &ask(&threads, Order::Rt)).unwrap();
    let first = &made.writes[0];
    assert_eq!(
        (first.target.path.as_path(), first.value.as_str()),
        (Path::new("/sys/fs/cgroup/plc.scope/cpu.rt.max"), "4000 20000")
    );
    let policies: Vec<_> = made.writes[1..].iter().map(|w| w.value.as_str()).collect();
    assert_eq!(policies, ["fifo 98 reset-on-fork", "fifo 98 reset-on-fork", "fifo 97 reset-on-fork"]);
    let outside: Vec<_> = made.outside.iter().map(|o| o.0).collect();
    assert_eq!(outside, [101, 104], "RCU and the worker");
    assert!(
        made.notes[0].contains("0 MiB of 100 MiB") && made.notes[0].contains("mem-lock=on"),
        "{:?}",
        made.notes
    );
}

/// On v2 a process cannot be taken out of its unit, so the unit must have no other process.
#[test]
fn a_shared_or_missing_unit_is_refused_with_the_remedy() {
    let host = Host::new(V2, "6.12.9\n");
    host.put("/sys/fs/cgroup/plc.scope/cgroup.procs", "100\n200\n");
    host.put("/proc/200/comm", "postgres\n");
    let refused = |cgroup: &str| {
        let threads = host.vm(cgroup, 0, "0-1");
        host.settings(Backend::CpuMax, &ask(&threads, Order::Contract)).unwrap_err().to_string()
    };
    let shared = refused("/plc.scope/emulator");
    assert!(
        shared.contains("process 200 (postgres) runs in its cgroup /plc.scope too")
            && shared.contains("systemd-run"),
        "{shared}"
    );
    assert!(shared.contains("name the VM by `cgroup = '/plc.scope'`"), "{shared}");
    assert!(refused("/").contains("root cgroup"));
    // A helper that a manager starts for the VM is no reason to refuse; a note names it.
    host.put("/proc/200/comm", "swtpm\n");
    let exe = host.root.at("/proc/200/exe");
    std::os::unix::fs::symlink("/usr/bin/qemu-system-x86_64", &exe).unwrap();
    assert!(refused("/plc.scope").contains("process 200 (swtpm)"), "a VM with `-name process=swtpm`");
    fs::remove_file(&exe).unwrap();
    std::os::unix::fs::symlink("/usr/bin/swtpm (deleted)", &exe).unwrap();
    assert!(refused("/plc.scope").contains("echo +cpu"));
    host.put("/sys/fs/cgroup/plc.scope/cpu.max", "max 100000\n");
    let threads = host.vm("/plc.scope", 0, "0-1");
    let made = host.settings(Backend::CpuMax, &ask(&threads, Order::Contract)).unwrap();
    assert!(made.notes[0].contains("swtpm (200) in its cgroup /plc.scope"), "{:?}", made.notes);
    assert_eq!(
        (made.writes.len(), made.writes[0].value.as_str()),
        (1, "8000 20000"),
        "4 ms on each of two CPUs"
    );
}

#[test]
fn a_v1_group_gets_its_budget_before_its_threads_and_these_before_their_policies() {
    let host = Host::new(V1, "6.18.1\n");
    host.rt_group("", "950000\n", "1000000\n");
    let threads = host.vm("/vms/plc", 0, "0");
    let made = host.settings(Backend::RtGroup, &ask(&threads, Order::Contract)).unwrap();
    let text = shown(&made.writes);
    assert_eq!(
        text[..3],
        [
            format!("{C}/rtvirtio-plc present"),
            format!("{C}/rtvirtio-plc/cpu.rt_period_us 20000"),
            format!("{C}/rtvirtio-plc/cpu.rt_runtime_us 4000"),
        ]
    );
    assert!(text[3..8].iter().all(|t| t.ends_with("/cgroup /rtvirtio-plc")), "{text:#?}");
    let policies: Vec<_> = text[8..].iter().map(|t| t.rsplit_once("sched ").unwrap().1).collect();
    assert_eq!(policies, ["fifo 2", "fifo 2", "fifo 1", "fifo 1", "fifo 1"], "services first; {text:#?}");
    assert!(made.outside.is_empty());
    // Left from another run.
    host.put(&format!("{C}/rtvirtio-plc/tasks"), "");
    let error = host.settings(Backend::RtGroup, &ask(&threads, Order::Rt)).unwrap_err();
    assert!(matches!(error, CpuError::GroupExists { .. }), "{error}");
}

/// Threads as libvirt keeps them: QEMU's main loop and internal threads in `emulator`, each of the
/// others in a group of its own.
fn of_libvirt(host: &Host, vm: &str) -> Vec<Thread> {
    host.vm(vm, 0, "0-1");
    for (tid, group) in
        [(100, "emulator"), (101, "emulator"), (102, "iothread1"), (103, "vcpu0"), (104, "emulator")]
    {
        let text = format!("2:blkio:{vm}\n1:cpu:{vm}/{group}\n0::{vm}\n");
        host.put(&format!("/proc/100/task/{tid}/cgroup"), &text);
    }
    discover(&host.root, &VmHandle::of_pid(100)).unwrap()
}

#[test]
fn a_vm_of_libvirt_keeps_its_cgroup_which_gets_the_budget() {
    let host = Host::new(V1, "6.18.1\n");
    host.rt_group("", "950000\n", "1000000\n");
    host.rt_group("/machine", "0\n", "1000000\n");
    let vm = "/machine/qemu-1-plc.libvirt-qemu";
    host.rt_group(vm, "0\n", "1000000\n");
    let threads = of_libvirt(&host, vm);
    let made = host.settings(Backend::RtGroup, &ask(&threads, Order::Contract)).unwrap();
    assert_eq!(made.group.as_deref(), Some(Path::new(vm)));
    let text = shown(&made.writes);
    let files = [format!("{C}{vm}/cpu.rt_period_us 20000"), format!("{C}{vm}/cpu.rt_runtime_us 4000")];
    assert_eq!(text[..2], files);
    assert!(text[2..7].iter().all(|t| t.ends_with(&format!("/cgroup {vm}"))), "{text:#?}");
    // A hot-plugged thread goes into a group without a budget.
    assert!(text[7..].iter().all(|t| t.ends_with("reset-on-fork")), "{text:#?}");
    assert!(made.notes.iter().any(|n| n.contains("rtvirtio keep")), "{:?}", made.notes);

    // A quota limits the groups below: no thread is moved.
    let cap = host.settings(Backend::CpuMax, &ask(&threads, Order::Contract)).unwrap();
    let text = shown(&cap.writes);
    assert_eq!(
        text,
        [format!("{C}{vm}/cpu.cfs_period_us 20000"), format!("{C}{vm}/cpu.cfs_quota_us 8000")],
        "4 ms on each of two CPUs"
    );
}

#[test]
fn groups_above_vms_of_libvirt_have_room_for_all_of_them() {
    let host = Host::new(V1, "6.18.1\n");
    host.rt_group("", "950000\n", "1000000\n");
    host.rt_group("/machine", "10000\n", "1000000\n");
    host.rt_group("/machine/prod.partition", "0\n", "1000000\n");
    let contract =
        |budget, period| Contract::new(Nanos::from_millis(budget), Nanos::from_millis(period)).unwrap();
    let (plc, hmi) = (contract(4, 20), contract(10, 100));
    let groups =
        [(Path::new("/machine/prod.partition/qemu-1-plc"), plc), (Path::new("/machine/qemu-2-hmi"), hmi)];
    let probe = host.probe();
    let values = |groups: &[(&Path, Contract)]| -> Vec<String> {
        shown(&room(&host.root, &probe, groups, Backend::RtGroup).unwrap())
    };
    // In a second 4 ms in each of 50 periods and in two more, 10 ms in each of 10 and in two more;
    // the budget of others there stays.
    assert_eq!(
        values(&groups),
        [
            format!("{C}/machine/cpu.rt_runtime_us {}", 10_000 + 208_000 + 120_000),
            format!("{C}/machine/prod.partition/cpu.rt_runtime_us 208000"),
        ]
    );
    // No more than the root has: the kernel would refuse it.
    let most = [(Path::new("/machine/qemu-1-plc"), contract(850, 1000))];
    assert_eq!(values(&most), [format!("{C}/machine/cpu.rt_runtime_us 950000")]);
    assert!(room(&host.root, &probe, &groups, Backend::CpuMax).unwrap().is_empty());
}

#[test]
fn deadlines_need_threads_that_may_run_everywhere() {
    let host = Host::new(V2, "6.12.9\n");
    let pinned = host.vm("/", 0, "0");
    let error = host.settings(Backend::Deadline, &ask(&pinned, Order::Contract));
    let text = error.unwrap_err().to_string();
    assert!(text.contains("CPUs 0 only") && text.contains("cpuset.cpus.partition"), "{text}");
    let threads = host.vm("/", 0, "0-1");
    let made = host.settings(Backend::Deadline, &ask(&threads, Order::Contract)).unwrap();
    // 8 ms on two CPUs over three threads with the same use; the worker and RCU stay outside.
    let values: Vec<_> = made.writes.iter().map(|w| w.value.as_str()).collect();
    assert_eq!(values, ["deadline 2666666/20000000/20000000 reset-on-fork"; 3]);
    assert_eq!(made.outside.iter().map(|o| o.0).collect::<Vec<_>>(), [101, 104]);
    // The threads must be allowed on the single CPU of a partition, and have no other.
    let mine = "/sys/fs/cgroup/machine.slice";
    host.put(&format!("{mine}/cpuset.cpus.partition"), "root\n");
    host.put(&format!("{mine}/cpuset.cpus.effective"), "1\n");
    let pinned = host.vm("/machine.slice/plc.scope", 0, "1");
    let made = host.settings(Backend::Deadline, &ask(&pinned, Order::Contract)).unwrap();
    let values: Vec<_> = made.writes.iter().map(|w| w.value.as_str()).collect();
    assert_eq!(values, ["deadline 1333333/20000000/20000000 reset-on-fork"; 3]);
    // One thread uses all of a large budget: it gets no whole CPU, where it would never be
    // preempted.
    let contract = Contract::new(Nanos::from_millis(18), Nanos::from_millis(20)).unwrap();
    let used = [(threads[0].tid, std::time::Duration::from_secs(1))];
    let large = Ask { contract, used: &used, ..ask(&threads, Order::Contract) };
    let made = host.settings(Backend::Deadline, &large).unwrap();
    assert_eq!(
        made.writes[0].value, "deadline 18000000/20000000/20000000 reset-on-fork",
        "95 %, less the fair server's 5 %"
    );
}

#[test]
fn every_thread_says_what_holds_it() {
    let host = Host::new(V1, "6.18.1\n");
    host.rt_group("", "950000\n", "1000000\n");
    let held = |cgroup: &str, policy: u32| {
        let threads = host.vm(cgroup, policy, "0-1");
        let cpu = Cgroups::detect_cpu(&host.root).unwrap();
        let control = control(&host.root, Some(&cpu), &threads[0]).unwrap();
        (control.by, control.what)
    };
    assert_eq!(held("/", 0), (None, "shares the root group".to_owned()));
    // The root's 95 % belongs to all tasks, not to this VM.
    assert_eq!(held("/", 1), (None, "real-time without a budget of its own".to_owned()));
    host.rt_group("/vm", "4000\n", "20000\n");
    host.rt_group("/vm/vcpu0", "0\n", "20000\n");
    assert_eq!(held("/vm", 1), (Some(Backend::RtGroup), "4ms in 20ms".to_owned()));
    let none = (None, "no limit in vm or above".to_owned());
    assert_eq!(held("/vm", 0), none, "a real-time budget does not hold ordinary threads");
    assert_eq!(held("/gone", 1).0, None);
    host.put(&format!("{C}/vm/cpu.cfs_quota_us"), "-1\n");
    host.put(&format!("{C}/vm/cpu.cfs_period_us"), "100000\n");
    assert_eq!(held("/vm/vcpu0", 0).0, None, "no quota");
    host.put(&format!("{C}/vm/cpu.cfs_quota_us"), "50000\n");
    assert_eq!(held("/vm/vcpu0", 0), (Some(Backend::CpuMax), "50ms in 100ms".to_owned()), "the group above");
}

/// libvirt has a group for each vCPU, below that of the VM.
#[test]
fn a_thread_without_a_limit_is_shown_in_its_group() {
    let host = Host::new(V2, "6.12.9\n");
    let what = |cpu: Option<&Cgroups>, cgroup: &str| {
        control(&host.root, cpu, &host.vm(cgroup, 0, "0-1")[0]).unwrap().what
    };
    let cpu = Cgroups::detect_cpu(&host.root).unwrap();
    let scope = "/machine.slice/machine-qemu-1-plc.scope/libvirt";
    host.put(&format!("/sys/fs/cgroup{scope}/cpu.max"), "max 100000\n");
    assert_eq!(what(Some(&cpu), &format!("{scope}/vcpu0")), "no limit in vcpu0 or above");
    assert_eq!(what(Some(&cpu), "/"), "shares the root group");
    assert_eq!(what(None, &format!("{scope}/vcpu0")), "no CPU controller");
    host.put(&format!("/sys/fs/cgroup{scope}/cpu.max"), "50000 100000\n");
    assert_eq!(what(Some(&cpu), &format!("{scope}/vcpu0")), "50ms in 100ms");
}

#[test]
fn a_vm_without_threads_is_reported() {
    let host = Host::new(V1, "6.18.1\n");
    let error = host.settings(Backend::CpuMax, &ask(&[], Order::Rt)).unwrap_err();
    assert!(matches!(error, CpuError::NoThreads { .. }), "{error}");
}

/// A QEMU whose threads all have its own name shows no vCPU: nothing is promised, and its main loop
/// gets no real-time priority.
#[test]
fn a_vm_without_a_known_vcpu_is_refused_with_the_remedy() {
    for mount in [V1, V2] {
        let host = Host::new(mount, "6.18.1\n");
        host.rt_group("", "950000\n", "1000000\n");
        let threads = host.named(["qemu-system-x86"; 5], "/plc.scope", 0, "0-1");
        for backend in
            [Backend::RtGroup, Backend::CpuMax, Backend::Hcbs, Backend::Deadline, Backend::Throttle]
        {
            for order in [Order::Contract, Order::Rt] {
                let error = host.settings(backend, &ask(&threads, order)).unwrap_err();
                assert!(matches!(&error, CpuError::NoVcpu { pid: 100, threads: 5, .. }), "{error}");
                let text = error.to_string();
                assert!(text.contains("`qmp` or `domain`") && text.contains("debug-threads=on"), "{text}");
            }
        }
    }
}

/// A contract that does not hold a vCPU is no guarantee, whatever the mechanism.
#[test]
fn a_vcpu_outside_of_the_contract_weakens_it() {
    let host = Host::new(V1, "6.18.1\n");
    host.rt_group("", "950000\n", "1000000\n");
    let mut threads = host.vm("/vms/plc", 0, "0");
    let made = host.settings(Backend::RtGroup, &ask(&threads, Order::Rt)).unwrap();
    assert_eq!(made.strength, Enforcement::Guarantee);
    let vcpu = threads.iter_mut().find(|t| t.role == Role::Vcpu(vec![0])).unwrap();
    vcpu.reservation = Some(Reservation { runtime: 1_000_000, deadline: 20_000_000, period: 20_000_000 });
    let made = host.settings(Backend::RtGroup, &ask(&threads, Order::Rt)).unwrap();
    assert_eq!(made.strength, Enforcement::Hint);
    assert!(made.notes.iter().any(|n| n.contains("vcpu 0 of thread 103 is outside")), "{:?}", made.notes);
}

/// Helpers in the VM's cgroup are limited with it where the VM is named by that cgroup.
#[test]
fn helpers_in_the_vms_cgroup_are_held_with_it() {
    let host = Host::new(V2, "6.12.9\n");
    host.put("/sys/fs/cgroup/plc.scope/cgroup.procs", "100\n200\n");
    host.put("/sys/fs/cgroup/plc.scope/cpu.max", "max 100000\n");
    host.vm("/plc.scope", 0, "0-1");
    let task = "/proc/200/task/200";
    host.put(
        &format!("{task}/stat"),
        "200 (swtpm) S 1 1 1 0 -1 64 0 0 0 0 5 5 0 0 20 0 1 0 9 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 17 0 0 0 0\n",
    );
    host.put(&format!("{task}/status"), "Cpus_allowed_list:\t0-1\n");
    host.put(&format!("{task}/cgroup"), "0::/plc.scope\n");
    let handle = VmHandle { pids: [100, 200].into(), ..VmHandle::default() };
    let threads = discover(&host.root, &handle).unwrap();
    assert_eq!(threads.len(), 6);
    let made = host.settings(Backend::CpuMax, &ask(&threads, Order::Contract)).unwrap();
    assert_eq!((made.strength, made.writes.len()), (Enforcement::Cap, 1));
    assert!(made.outside.is_empty(), "{:?}", made.outside);
}
