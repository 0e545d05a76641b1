//! Free CPU time, of fixtures and of real VMs.

use rtvirtio_testkit::{Machine, Need, has, tempdir};

use super::*;
use crate::fixtures::{put, put_thread};
use crate::progress::Quiet;

#[test]
fn what_its_own_processes_use_counts_as_free() {
    let of = cpu_use(&[std::process::id()], &Quiet::default()).unwrap();
    assert!(of.used >= 0.0 && of.free >= of.used && of.cpus > 0, "{of}");
    let said = CpuUse { cpus: 2, used: 1.03, free: 1.4 };
    assert_eq!(said.to_string(), "VMs need 1.03 of 2 CPUs for what they do now, 1.40 of these are free");
    assert!(!said.is_short() && CpuUse { free: 1.1, ..said }.is_short());
    // One that ended before uses nothing, and is no error.
    let mut child = std::process::Command::new("true").spawn().unwrap();
    child.wait().unwrap();
    cpu_use(&[child.id()], &Quiet::default()).unwrap();
}

#[test]
fn what_a_process_used_that_has_ended_is_not_known() {
    let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
    let watch = CpuWatch::start(&[child.id(), std::process::id()]).unwrap();
    assert_eq!(watch.own.len(), 2);
    child.kill().unwrap();
    child.wait().unwrap();
    let said = format!("{:#}", watch.so_far().unwrap_err());
    assert!(said.contains("has ended meanwhile"), "{said}");
    assert_eq!(CpuWatch::start(&[child.id()]).unwrap().own.len(), 0);
}

/// A host with two VMs, 7 and 8, each of one thread that may use these CPUs.
fn host(cpus: [&str; 2]) -> (tempfile::TempDir, Root) {
    let (dir, root) = crate::fixtures::root();
    put(&root, "/proc/self/mountinfo", "30 1 0:26 / /cg rw - cgroup2 cgroup2 rw\n");
    put(&root, "/cg/cgroup.controllers", "cpu io\n");
    for (pid, cpus) in [7, 8].into_iter().zip(cpus) {
        put_thread(&root, (pid, pid), "q", cpus);
        put(&root, format!("/proc/{pid}/cgroup"), &format!("0::/s/vm{pid}\n"));
        put(&root, format!("/cg/s/vm{pid}/cpu.max"), "max 100000\n");
    }
    (dir, root)
}

#[test]
fn what_is_free_for_some_vms_only_is_said() {
    let own: BTreeMap<String, Vec<u32>> = [("a".to_owned(), vec![7]), ("b".to_owned(), vec![8])].into();
    let (_dir, alike) = host(["0-1", "0-1"]);
    let why = |root: &Root| why_not_for_each(root, &own, 1.5).unwrap();
    assert_eq!(cpus_of(&alike, &[7, 8]).unwrap(), Some([0, 1].into()));
    assert_eq!(cpus_of(&alike, &[9]).unwrap(), None, "it has ended");
    assert_eq!(why(&alike), None);
    std::fs::write(alike.at("/cg/s/cpu.max"), "160000 100000\n").unwrap();
    assert_eq!((why(&alike), quota_of(&alike, &[8]).unwrap()), (None, Some(1.6)), "more than is free");
    std::fs::write(alike.at("/cg/s/vm8/cpu.max"), "50000 100000\n").unwrap();
    assert_eq!(why(&alike).unwrap(), "a quota gives b no more than 0.50 CPUs");
    assert_eq!(sharing(&alike, &own, &[]), [Sharing { vms: None, pids: vec![7, 8] }]);
    let (_dir, overlapping) = host(["0-1", "1-3"]);
    assert_eq!(sharing(&overlapping, &own, &[]).len(), 1);
    let (_dir, apart) = host(["0", "1-3"]);
    let groups = sharing(&apart, &own, &[]);
    let of = |vm: &str, pid| Sharing { vms: Some(BTreeSet::from([vm.to_owned()])), pids: vec![pid] };
    assert_eq!(groups, [of("a", 7), of("b", 8)]);
    assert_eq!(sharing(&apart, &own, &["c".to_owned()]).len(), 1, "it may use any CPU");
    assert_eq!(why(&apart).unwrap(), "a and b may use different CPUs");
    std::fs::write(apart.at("/proc/8/task/8/status"), "Cpus_allowed_list:\tx\n").unwrap();
    assert!(why_not_for_each(&apart, &own, 1.5).is_err(), "what cannot be read is no absence");
}

#[test]
fn the_thread_with_the_longest_mean_counts() {
    let at = |of: &[(u32, u64, u64)]| -> BTreeMap<u32, (Duration, u64)> {
        of.iter().map(|(tid, us, n)| (*tid, (Duration::from_micros(*us), *n))).collect()
    };
    let then = at(&[(1, 0, 0), (2, 500, 10), (3, 0, 0)]);
    // The third got a CPU too few times, the fourth began meanwhile.
    let now = at(&[(1, 9_000, 900), (2, 5_500, 60), (3, 90_000, 29), (4, 90_000, 90)]);
    assert_eq!(delay(&then, &now), Some(RunDelay { mean_ns: Nanos(100_000), n: 50 }));
    assert_eq!(delay(&now, &then), None, "the counters began anew");
}

#[test]
fn waits_of_own_threads_are_read() {
    assert!(!waits_of(&[std::process::id()]).is_empty(), "no thread of this process has schedstat");
    assert!(waits_of(&[u32::MAX]).is_empty());
}

/// Gives all threads of a machine this CPU.
fn pin(machine: &Machine, cpu: u32) {
    let args = ["-a", "-p", "-c", &cpu.to_string(), &machine.pid().to_string()];
    let out = std::process::Command::new("taskset").args(args).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
}

#[test]
fn real_vms_on_cpus_of_their_own_are_summed_apart() {
    let test = "real_vms_on_cpus_of_their_own_are_summed_apart";
    if !has(test, &[Need::QEMU, Need::Cpus(2)]) {
        return;
    }
    let all = cpus_of(&Root::default(), &[std::process::id()]).unwrap().unwrap();
    let dir = tempdir().unwrap();
    let place = |name: &str| {
        let place = dir.path().join(name);
        std::fs::create_dir(&place).unwrap();
        place
    };
    let machines = ["a", "b"].map(|name| Machine::spinning(&place(name), name, &[]));
    let (disk, dirs) = (place("disk"), Dirs { state: place("state"), run: place("run") });
    let vm = |(name, machine): (&str, &Machine)| {
        format!(
            "[[vm]]\nname = \"{name}\"\npid = {}\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n\
             rate = \"{}/s\"\n",
            machine.pid(),
            if name == "a" { 300 } else { 200 }
        )
    };
    let vms: String = ["a", "b"].into_iter().zip(&machines).map(vm).collect();
    let text = format!("[device]\npath = \"{}\"\n{vms}", disk.display());
    let (host, spec) = (HostSpec::parse("x", &text).unwrap(), rtvirtio_spec::parse("x", &text).unwrap());
    let mut profile =
        rtvirtio_measure::profile::load(std::path::Path::new(rtvirtio_testkit::site::PROFILE)).unwrap();
    let point = profile.read[0].clone();
    profile.guest = Some(GuestPoint { kind: "qemu-tcg".to_owned(), point, cpu_per_request: 500e-6 });
    profile.cpus = cpus_online(&Root::default()).unwrap();
    let rooms = || {
        let found = measure(&host, [(&spec, &profile)].into_iter(), &dirs, &Quiet::default()).unwrap();
        found.rooms.into_iter().map(|of| (of.vms, of.room)).collect::<Vec<_>>()
    };
    let together = rooms();
    assert_eq!(together.len(), 1, "{together:?}");
    assert_eq!((&together[0].0, together[0].1.rate), (&None, 500.0));
    let cpus: Vec<u32> = all.into_iter().take(2).collect();
    machines.iter().zip(&cpus).for_each(|(machine, cpu)| pin(machine, *cpu));
    let apart = rooms();
    assert_eq!(apart.len(), 2, "{apart:?}");
    for ((vms, room), (name, rate)) in apart.iter().zip([("a", 300.0), ("b", 200.0)]) {
        assert_eq!(vms, &Some(BTreeSet::from([name.to_owned()])));
        assert_eq!((room.cpus, room.rate), (1, rate), "{room:?}");
        assert!((room.needed - rate * 500e-6).abs() < 1e-9 && room.free <= 1.05, "{room:?}");
        // Its own computing counts as free.
        assert!(room.free > 0.0, "{room:?}");
    }
    pin(&machines[1], cpus[0]);
    assert_eq!(rooms().len(), 1, "both share one");
}
