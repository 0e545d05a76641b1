use super::*;
use crate::Root;
use crate::test_root::TestRoot;

#[test]
fn every_attribute_survives_its_text() {
    let reservation = Some(Reservation { runtime: 1_500_000, deadline: 9_000_000, period: 10_000_000 });
    let all = [
        Attr::other(-5),
        Attr { slice: 3_000_000, ..Attr::other(19) },
        Attr::fifo(98),
        Attr { nice: -3, reset_on_fork: false, ..Attr::fifo(1) },
        Attr { policy: Policy::Rr, priority: 99, ..Attr::other(0) },
        Attr { policy: Policy::Batch, ..Attr::other(3) },
        Attr { policy: Policy::Idle, reset_on_fork: true, ..Attr::other(0) },
        Attr::deadline(4_000_000, 20_000_000),
        Attr { reservation, flags: 6, ..Attr::deadline(1, 1) },
    ];
    for attr in all {
        assert_eq!(attr.to_string().parse::<Attr>().unwrap(), attr, "{attr}");
    }
    assert_eq!(Attr::fifo(97).to_string(), "fifo 97 reset-on-fork");
    assert_eq!(Attr::other(0).to_string(), "other nice 0");
    let deadline = "deadline 4000000/20000000/20000000 reset-on-fork";
    assert_eq!(Attr::deadline(4_000_000, 20_000_000).to_string(), deadline);
}

#[test]
fn what_is_no_attribute_is_refused() {
    for text in [
        "",
        "fifo",
        "fifo 0",
        "fifo 100",
        "fifo 97 98",
        "real 1",
        "other nice 20",
        "other nice",
        "deadline 1/2",
        "deadline 1/2/3/4",
        "other slice x",
        "other flags 1",
    ] {
        assert!(text.parse::<Attr>().is_err(), "{text}");
    }
}

#[test]
fn a_slice_counts_only_when_asked_for() {
    let found = Attr { slice: 2_800_000, ..Attr::other(0) };
    assert!(found.is(&Attr::other(0)));
    assert!(!found.is(&Attr { slice: 1_000_000, ..Attr::other(0) }));
    assert!(!found.is(&Attr::other(1)) && !Attr::fifo(97).is(&Attr::fifo(98)));
    // The kernel does not report a real-time thread's nice value.
    assert!(Attr::fifo(97).is(&Attr { nice: -5, ..Attr::fifo(97) }));
}

/// Without privileges a thread may raise its nice value, and never lower it again unless root.
#[test]
fn this_thread_is_set_and_read_back() {
    let spawned = std::thread::spawn(|| {
        let tid = rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs();
        let before = get(tid).unwrap();
        let wanted = Attr { reset_on_fork: true, ..Attr::other(before.nice.max(0) + 1) };
        set(tid, &wanted).unwrap();
        assert!(get(tid).unwrap().is(&wanted), "{}", get(tid).unwrap());
        if rustix::process::geteuid().is_root() {
            set(tid, &before).unwrap();
            assert_eq!(get(tid).unwrap(), before);
            let policy = Attr { policy: Policy::Batch, ..before };
            set(tid, &policy).unwrap();
            assert_eq!(get(tid).unwrap().policy, Policy::Batch);
        }
    });
    spawned.join().unwrap();
}

#[test]
fn a_thread_that_is_gone_is_reported_as_such() {
    // Beyond the kernel's PID_MAX_LIMIT.
    assert_eq!(get(1 << 23).unwrap_err().raw_os_error(), Some(libc::ESRCH));
    let error = set(1 << 23, &Attr::other(0)).unwrap_err();
    let refusal = explain(&Root::default(), 1 << 23, 1 << 23, &Attr::other(0), error);
    assert!(refusal.to_string().contains("it has ended"), "{refusal}");
}

fn perm() -> io::Error {
    io::Error::from_raw_os_error(libc::EPERM)
}

#[test]
fn each_reason_of_eperm_is_reported_from_the_others() {
    let root = TestRoot::new(&[]);
    let all = "CapEff:\t000001ffffffffff\n";
    root.put("/proc/self/status", all);
    root.put("/proc/self/mountinfo", "38 31 0:35 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n");
    root.put("/proc/7/task/7/cgroup", "1:cpu:/vms/a\n0::/\n");
    root.put("/proc/7/task/7/status", "Cpus_allowed_list:\t0\n");
    root.put("/sys/devices/system/cpu/online", "0-1\n");
    root.put("/sys/fs/cgroup/cpu/vms/a/cpu.rt_runtime_us", "0\n");
    let reported = |attr: &Attr| explain(&root, 7, 7, attr, perm()).to_string();

    let budget = reported(&Attr::fifo(97));
    assert!(budget.contains("/vms/a has a real-time budget of 0"), "{budget}");
    assert!(budget.contains("echo 400000 >/sys/fs/cgroup/cpu/vms/a/cpu.rt_runtime_us"), "{budget}");
    let mask = reported(&Attr::deadline(1_000_000, 2_000_000));
    assert!(mask.contains("affinity 0 is narrower") && mask.contains("cpuset"), "{mask}");

    root.put("/sys/fs/cgroup/cpu/vms/a/cpu.rt_runtime_us", "400000\n");
    root.put("/proc/7/task/7/status", "Cpus_allowed_list:\t0-1\n");
    let other = reported(&Attr::fifo(97));
    assert!(other.contains("the kernel does not allow it"), "{other}");
    let tail = "0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 17";
    root.put(
        "/proc/7/task/7/stat",
        &format!("7 (IO) S 1 1 1 0 -1 0 0 0 0 0 5 5 0 0 20 0 1 0 7 {tail} 3 0 0 0\n"),
    );
    let asleep = reported(&Attr::deadline(1_000_000, 2_000_000));
    assert!(
        asleep.contains("it has not run since its CPUs were changed") && asleep.contains("CPU 3"),
        "{asleep}"
    );
    root.put("/proc/self/status", "CapEff:\t0000000000000000\n");
    for attr in [Attr::fifo(97), Attr::deadline(1_000_000, 2_000_000), Attr::other(-5)] {
        let text = reported(&attr);
        assert!(text.contains("CAP_SYS_NICE") && text.contains("run as root"), "{text}");
    }
    let busy = explain(&root, 7, 7, &Attr::deadline(1, 2), io::Error::from_raw_os_error(libc::EBUSY));
    assert!(busy.to_string().contains("no deadline bandwidth left"), "{busy}");
    assert!(!busy.to_string().contains("ext_server"), "{busy}");
}

/// A second server takes bandwidth while a sched_ext scheduler is loaded.
#[test]
fn a_loaded_sched_ext_scheduler_is_a_holder_of_bandwidth() {
    let root = TestRoot::new(&[]);
    let busy = || {
        let error = io::Error::from_raw_os_error(libc::EBUSY);
        explain(&root, 7, 7, &Attr::deadline(1, 2), error).why
    };
    root.put("/sys/kernel/sched_ext/state", "disabled\n");
    root.put("/sys/kernel/debug/sched/ext_server/cpu0/runtime", "50000000\n");
    assert!(busy().ends_with("and the fair server)"), "{}", busy());
    root.put("/sys/kernel/sched_ext/state", "enabled\n");
    root.put("/sys/kernel/sched_ext/root/ops", "simple\n");
    assert!(busy().contains("ext_server of the sched_ext scheduler simple"), "{}", busy());
    std::fs::remove_dir_all(root.at("/sys/kernel/debug")).unwrap();
    assert!(busy().contains("perhaps ext_server: a sched_ext scheduler is loaded"), "{}", busy());
}

/// The kernel loses the bandwidth of a thread that is asleep when it leaves DEADLINE; three times
/// 40 % would be refused.
#[test]
fn a_sleeping_thread_that_leaves_deadline_gives_its_bandwidth_back() {
    let test = "a_sleeping_thread_that_leaves_deadline_gives_its_bandwidth_back";
    let sleeper =
        rtvirtio_testkit::ChildGuard(std::process::Command::new("sleep").arg("60").spawn().unwrap());
    let tid = sleeper.0.id();
    let asleep = || crate::task::stat(&Root::default(), tid, tid).unwrap().state == 'S';
    let cpus = std::thread::available_parallelism().unwrap().get() as u64;
    for round in 0..2 * cpus + 1 {
        if let Err(e) = set(tid, &Attr::deadline(8_000_000, 20_000_000)) {
            assert_eq!(round, 0, "{}", explain(&Root::default(), tid, tid, &Attr::deadline(1, 2), e));
            return rtvirtio_testkit::skip(test, &format!("no SCHED_DEADLINE: {e}"));
        }
        let start = std::time::Instant::now();
        while !asleep() {
            assert!(start.elapsed() < rtvirtio_testkit::HANG, "it does not sleep");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        // After its deadline, when nothing would give the bandwidth back later.
        std::thread::sleep(std::time::Duration::from_millis(60));
        let attr = Attr { nice: 3, ..Attr::other(0) };
        set(tid, &attr).unwrap();
        assert!(get(tid).unwrap().is(&attr));
    }
}

/// The reservation stays as it was where the new policy is refused.
#[test]
fn a_refused_policy_leaves_the_reservation() {
    let sleeper =
        rtvirtio_testkit::ChildGuard(std::process::Command::new("sleep").arg("60").spawn().unwrap());
    let (tid, held) = (sleeper.0.id(), Attr::deadline(1_000_000, 20_000_000));
    if let Err(e) = set(tid, &held) {
        return rtvirtio_testkit::skip("a_refused_policy_leaves_the_reservation", &e.to_string());
    }
    let impossible = Attr { priority: 100, ..Attr::fifo(1) };
    assert_eq!(set(tid, &impossible).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    assert_eq!(get(tid).unwrap(), held);
    assert_eq!(held.released().unwrap().to_string(), "deadline 1024/2000000000/2000000000 reset-on-fork");
    assert_eq!(Attr::fifo(7).released(), None);
    set(tid, &Attr::other(0)).unwrap();
}

/// The mark of a throttled thread does not outlive its reservation, whether it is ready or sleeps.
#[test]
fn a_thread_that_was_throttled_runs_again_under_a_later_reservation() {
    let test = "a_thread_that_was_throttled_runs_again_under_a_later_reservation";
    let loops = [
        "while :; do :; done",
        "while :; do i=0; while [ $i -lt 3000 ]; do i=$((i+1)); done; sleep 0.02; done",
    ];
    for of in loops {
        let shell = std::process::Command::new("sh").args(["-c", of]).spawn().unwrap();
        let shell = rtvirtio_testkit::ChildGuard(shell);
        let (root, tid) = (Root::default(), shell.0.id());
        let used = || crate::task::cpu_time(&root, tid, tid).unwrap();
        let runs = |of: &str| {
            let (start, before) = (std::time::Instant::now(), used());
            while used() < before + std::time::Duration::from_millis(10) {
                if start.elapsed() > rtvirtio_testkit::HANG {
                    // Stuck, it cannot even be killed.
                    set_raw(tid, &Attr::other(0)).unwrap();
                    panic!("it does not run: {of}");
                }
                std::thread::sleep(std::time::Duration::from_millis(10));
            }
        };
        for round in 0..6 {
            let runtime = if round % 2 == 0 { 100_000 } else { 8_000_000 };
            let first = Attr::deadline(runtime, 20_000_000);
            if let Err(e) = set(tid, &first) {
                return rtvirtio_testkit::skip(test, &format!("no SCHED_DEADLINE: {e}"));
            }
            std::thread::sleep(std::time::Duration::from_millis(50 + 7 * round));
            set(tid, &Attr::other(0)).unwrap();
            settle();
            runs("as an ordinary thread");
            // As a program does that knows nothing of the first.
            set_raw(tid, &Attr::deadline(8_000_000, 20_000_000)).unwrap();
            runs("under a later reservation");
            set(tid, &Attr::other(0)).unwrap();
            settle();
        }
    }
}
