//! Contracts on the threads of a real QEMU whose guest spins forever: set, read back, measured, put
//! back.

use std::collections::BTreeMap;
use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use rtvirtio_apply::{Machine as Host, NoGuests, OnConflict, Session, Silent, Write, append};
use rtvirtio_cpu::{
    Ask, Backend, Contract, Level, Order, Probe, admit, choose, control, domain_of, levels, probe,
    release_ending, resplit, settings, take_in,
};
use rtvirtio_kernel::sched::{self, Policy};
use rtvirtio_kernel::{Hierarchy, Root, task};
use rtvirtio_testkit::{Machine, Need, has, skip};
use rtvirtio_units::Nanos;
use rtvirtio_vmm::threads::{Named, discover};
use rtvirtio_vmm::{Qmp, Role, Thread, VmHandle};

const LIMIT: Duration = rtvirtio_testkit::HANG;

/// Guest that computes without end.
struct Spinner {
    machine: Machine,
    dir: tempfile::TempDir,
    vm: String,
}

impl Spinner {
    fn start(test: &str) -> Option<Self> {
        if !has(test, &[Need::Root, Need::QEMU]) {
            return None;
        }
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let options = ["-smp", "1,maxcpus=2", "-object", "iothread,id=io0"];
        let machine = Machine::spinning(dir.path(), "spinner", &options);
        let spinner = Self { machine, dir, vm: rtvirtio_testkit::unique(test) };
        let start = Instant::now();
        while spinner.threads().iter().all(|t| t.role != Role::Vcpu(vec![0])) {
            assert!(start.elapsed() < LIMIT, "QEMU did not start its vCPU");
            thread::sleep(Duration::from_millis(20));
        }
        Some(spinner)
    }

    fn threads(&self) -> Vec<Thread> {
        discover(&Root::default(), &VmHandle::of_pid(self.machine.pid())).unwrap_or_default()
    }

    fn monitor(&self) -> Qmp {
        Qmp::connect(self.machine.qmp(), LIMIT).unwrap()
    }

    /// CPU time of all threads.
    fn used(&self) -> Duration {
        self.threads().iter().map(|t| t.cpu_time).sum()
    }

    /// Settings that must be restored: policy and cgroups of every thread.
    fn snapshot(&self) -> BTreeMap<u32, String> {
        let look = |t: &Thread| (t.tid, format!("{} {:?}", sched::get(t.tid).unwrap(), t.cgroups));
        self.threads().iter().map(look).collect()
    }

    fn writes(&self, probe: &Probe, backend: Backend, order: Order, budget_ms: u64) -> Vec<Write> {
        let contract = contract(budget_ms, 20);
        let found = choose(probe, Some(backend), false).unwrap();
        admit(&found.grant, &[(self.vm.clone(), contract)]).unwrap();
        let threads = self.threads();
        let ask = Ask { vm: &self.vm, threads: &threads, contract, order, level: Level::ALONE, used: &[] };
        settings(&Root::default(), probe, backend, &ask).unwrap().writes
    }

    /// Hot-plugs a second vCPU; returns its thread, once the monitor reports it.
    fn plug(&self) -> u32 {
        self.machine.plug_vcpu();
        let mut qmp = self.monitor();
        let start = Instant::now();
        loop {
            let named = Named::ask(&mut qmp).unwrap();
            if let Some((tid, _)) = named.vcpus.iter().find(|v| v.1.contains(&1)) {
                return *tid;
            }
            assert!(start.elapsed() < LIMIT, "the vCPU was not plugged in");
            thread::sleep(Duration::from_millis(20));
        }
    }

    fn thread(&self, tid: u32) -> Thread {
        self.threads().into_iter().find(|t| t.tid == tid).unwrap()
    }

    /// Thread of the first vCPU.
    fn vcpu(&self) -> Thread {
        self.threads().into_iter().find(|t| t.role == Role::Vcpu(vec![0])).unwrap()
    }

    fn session(&self) -> Session {
        Session::open(self.dir.path().join("state")).unwrap()
    }

    /// Puts everything back; all threads of `before` must be as they were. Returns all threads.
    fn put_back(&self, before: &BTreeMap<u32, String>, machine: &Host<'_>) -> BTreeMap<u32, String> {
        let reverted = self.session().revert(OnConflict::Report, machine, &mut Silent).unwrap().unwrap();
        assert!(reverted.done, "{}", reverted.summary());
        let after = self.snapshot();
        for (tid, state) in before {
            assert_eq!(Some(state), after.get(tid));
        }
        after
    }
}

/// Contract of this many milliseconds in each period of the other number.
fn contract(budget: u64, period: u64) -> Contract {
    Contract::new(Nanos::from_millis(budget), Nanos::from_millis(period)).unwrap()
}

impl Drop for Spinner {
    fn drop(&mut self) {
        self.machine.kill();
        rtvirtio_testkit::remove_vm_group(&self.vm);
    }
}

/// Mechanism on this machine, or a skip.
fn with(test: &str, backend: Backend) -> Option<(Spinner, Probe)> {
    let probe = probe(&Root::default()).unwrap();
    let v2 = probe.cgroups.as_ref().is_some_and(|c| c.hierarchy == Hierarchy::V2);
    if let Some((_, why)) = probe.missing.iter().find(|m| m.0 == backend) {
        skip(test, why);
        return None;
    }
    if v2 && backend == Backend::CpuMax {
        skip(test, "on cgroup v2 it takes a unit of systemd");
        return None;
    }
    let spinner = Spinner::start(test)?;
    let online = fs::read_to_string("/sys/devices/system/cpu/online").unwrap();
    let affinity = task::affinity(&Root::default(), spinner.machine.pid(), spinner.machine.pid()).unwrap();
    // The kernel refuses it to a thread with a smaller mask.
    if backend == Backend::Deadline && affinity != online.trim() {
        skip(test, "this process may not run on all CPUs");
        return None;
    }
    Some((spinner, probe))
}

/// Applies, checks, and puts back; all threads must be as before.
fn round(spinner: &Spinner, writes: &[Write], check: impl FnOnce()) {
    let root = Root::default();
    let machine = Host::new(&root, &NoGuests);
    let before = spinner.snapshot();
    spinner.session().apply(writes, &machine, &mut Silent).unwrap();
    check();
    spinner.put_back(&before, &machine);
}

/// Share of one CPU that the VM used in `length`.
fn load(spinner: &Spinner, length: Duration) -> f64 {
    let (start, used) = (Instant::now(), spinner.used());
    thread::sleep(length);
    (spinner.used() - used).as_secs_f64() / start.elapsed().as_secs_f64()
}

/// Binds all threads of a VM to CPU 0.
fn bind(spinner: &Spinner) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(0);
    for t in spinner.threads() {
        let pid = rustix::thread::Pid::from_raw(t.tid.try_into().unwrap());
        rustix::thread::sched_setaffinity(pid, &set).unwrap();
    }
}

/// A VM that needs its budget often must not wait until one with a long budget has used it up: its
/// threads have higher priorities than the other's. The effect is measured by
/// `rtvirtio-bench reservation`; here neither gets more than its budget, ranked or not.
#[test]
fn a_short_period_is_ranked_above_a_long_one() {
    let test = "a_short_period_is_ranked_above_a_long_one";
    let Some((short, probe)) = with(test, Backend::RtGroup) else { return };
    let long = Spinner::start(&format!("{test}-long")).unwrap();
    let of = [contract(50, 100), contract(2, 10)].map(|it| (Backend::RtGroup, Order::Contract, it));
    let both = [&long, &short];
    both.into_iter().for_each(bind);
    let shares = |levels: &[Level]| {
        let mut writes = Vec::new();
        for ((spinner, (backend, order, contract)), level) in both.iter().zip(of).zip(levels) {
            let threads = spinner.threads();
            let ask = Ask { vm: &spinner.vm, threads: &threads, contract, order, level: *level, used: &[] };
            append(&mut writes, settings(&Root::default(), &probe, backend, &ask).unwrap().writes);
        }
        let (mut seen, mut priorities) = ([0.0; 2], [0; 2]);
        round(&short, &writes, || {
            let held = both.map(Spinner::vcpu);
            assert!(held.iter().all(|t| t.policy == Some(Policy::Fifo)), "{held:?}");
            priorities = [held[0].priority, held[1].priority];
            // The window of the CPU time lies inside that of the clock, wherever this waits.
            let start = Instant::now();
            let before = both.map(Spinner::used);
            thread::sleep(Duration::from_secs(2));
            let used = [0, 1].map(|i| (both[i].used() - before[i]).as_secs_f64());
            seen = used.map(|used| used / start.elapsed().as_secs_f64());
        });
        (seen, priorities)
    };
    let (ranked, above) = shares(&levels(&of));
    let (alike, same) = shares(&[Level::ALONE; 2]);
    println!("of a CPU: 50 ms in 100 ms, 2 ms in 10 ms; ranked {ranked:.3?}, at one priority {alike:.3?}");
    assert!(above[1] > above[0] && same[0] == same[1], "{above:?} {same:?}");
    for seen in [ranked, alike] {
        assert!(seen[0] < 0.56 && seen[1] < 0.25, "{seen:?}");
    }
}

/// A guest that spins at real-time priority gets its budget and no more, and the threads that serve
/// it have higher priorities.
#[test]
fn a_spinning_guest_stays_inside_its_real_time_budget() {
    let test = "a_spinning_guest_stays_inside_its_real_time_budget";
    let Some((spinner, probe)) = with(test, Backend::RtGroup) else { return };
    for order in [Order::Rt, Order::Contract] {
        let writes = spinner.writes(&probe, Backend::RtGroup, order, 4);
        round(&spinner, &writes, || {
            let threads = spinner.threads();
            let of = |role: &Role| threads.iter().find(|t| t.role == *role).unwrap();
            let (vcpu, main) = (of(&Role::Vcpu(vec![0])), of(&Role::Emulator));
            assert_eq!((vcpu.policy, main.policy), (Some(Policy::Fifo), Some(Policy::Fifo)));
            assert_eq!(main.priority, vcpu.priority + 1);
            let held = control(&Root::default(), probe.cgroups.as_ref(), vcpu).unwrap();
            assert_eq!((held.by, held.what.as_str()), (Some(Backend::RtGroup), "4ms in 20ms"));
            // At most 4 ms of 20 ms on each CPU, whatever else runs; two periods more for the ends
            // of the measurement.
            let most = 0.2 * f64::from(probe.cpus) + 0.04;
            let load = load(&spinner, Duration::from_secs(2));
            assert!(load <= most, "{load} of a CPU, at most {most}");
            // The VM's monitor answers although the guest spins.
            let mut qmp = spinner.monitor();
            assert!(qmp.query_status().unwrap().running);
            // Threads that are created now are in the group from the start.
            let object = |name: &str| serde_json::json!({ "qom-type": "iothread", "id": name });
            qmp.execute("object-add", Some(object("late"))).unwrap();
            let named = Named::ask(&mut qmp).unwrap();
            let (tid, _) = named.iothreads.iter().find(|t| t.1 == "late").unwrap();
            let late = spinner.threads().into_iter().find(|t| t.tid == *tid).unwrap();
            assert!(late.cgroup("cpu").unwrap().to_string_lossy().contains(&spinner.vm));
            let inherits = order == Order::Contract;
            assert_eq!(late.policy == Some(Policy::Fifo), inherits, "{late:?}");
            qmp.execute("object-del", Some(serde_json::json!({ "id": "late" }))).unwrap();
        });
    }
}

/// The kernel counts a removed group's budget for some milliseconds more, unless it was set to 0
/// before.
#[test]
fn a_budget_that_was_put_back_can_be_given_again_at_once() {
    let test = "a_budget_that_was_put_back_can_be_given_again_at_once";
    let Some((spinner, probe)) = with(test, Backend::RtGroup) else { return };
    for _ in 0..10 {
        // Twice that is more than a CPU; beside the other tests it is not.
        let writes = spinner.writes(&probe, Backend::RtGroup, Order::Contract, 12);
        round(&spinner, &writes, || ());
    }
}

#[test]
fn a_cap_holds_a_spinning_guest_down() {
    let Some((spinner, probe)) = with("a_cap_holds_a_spinning_guest_down", Backend::CpuMax) else { return };
    let writes = spinner.writes(&probe, Backend::CpuMax, Order::Contract, 3);
    round(&spinner, &writes, || {
        let most = 0.15 * f64::from(probe.cpus) + 0.04;
        let load = load(&spinner, Duration::from_secs(2));
        assert!(load <= most, "{load} of a CPU, at most {most}");
    });
}

#[test]
fn deadline_reservations_are_set_and_hold() {
    let test = "deadline_reservations_are_set_and_hold";
    let Some((spinner, probe)) = with(test, Backend::Deadline) else { return };
    // Until the vCPU has spun for longer than QEMU took to start.
    let spun = || {
        spinner
            .threads()
            .iter()
            .find(|t| t.role == Role::Vcpu(vec![0]))
            .map_or(Duration::ZERO, |t| t.cpu_time)
    };
    let start = Instant::now();
    while spun() * 4 < spinner.used() * 3 {
        assert!(start.elapsed() < LIMIT, "the guest does not spin");
        thread::sleep(Duration::from_millis(50));
    }
    let writes = spinner.writes(&probe, Backend::Deadline, Order::Contract, 4);
    round(&spinner, &writes, || {
        let threads = spinner.threads();
        let reserved: Vec<_> =
            threads.iter().filter_map(|t| Some((t.role.clone(), t.reservation?))).collect();
        assert_eq!(reserved.len(), writes.len());
        let sum: u64 = reserved.iter().map(|r| r.1.runtime).sum();
        assert!(sum <= 4_000_000 * u64::from(probe.cpus), "{sum}");
        // The vCPU has spun, so it gets nearly the whole budget.
        let vcpu = reserved.iter().find(|r| r.0 == Role::Vcpu(vec![0])).unwrap().1;
        assert!(vcpu.runtime * 2 > sum, "{reserved:?}");
        let load = load(&spinner, Duration::from_secs(2));
        let most = sum as f64 / 20e6 + 0.04;
        assert!(load <= most, "{load} of a CPU, at most {most}");
        assert!(spinner.monitor().query_status().unwrap().running);
    });
}

/// The threads of a killed VM give back its memory within their parts of the budget, unless they
/// are taken out of it.
#[test]
fn threads_that_are_ending_are_taken_out_of_their_reservations() {
    // A VM may have ended before it is looked at.
    for _ in 0..5 {
        if released_while_ending().is_none_or(|n| n > 0) {
            return;
        }
    }
    panic!("no thread was taken out of its reservation");
}

/// Kills a VM with little CPU time, and returns how many of its threads were released meanwhile;
/// `None` where the test is skipped.
fn released_while_ending() -> Option<u32> {
    let test = "threads_that_are_ending_are_taken_out_of_their_reservations";
    let (spinner, _) = with(test, Backend::Deadline)?;
    let (root, pid) = (Root::default(), spinner.machine.pid());
    let threads = spinner.threads();
    // A thousandth of a CPU: what takes 1 ms else takes a second.
    let little = sched::Attr::deadline(100_000, 100_000_000);
    threads.iter().for_each(|t| sched::set(t.tid, &little).unwrap());
    assert_eq!(release_ending(&root, pid).unwrap(), 0, "none is ending");
    let process = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::KILL).unwrap();
    let (start, mut released) = (Instant::now(), 0);
    let is_over =
        || task::tids(&root, pid).unwrap() == [pid] && task::stat(&root, pid, pid).unwrap().state == 'Z';
    while !is_over() {
        released += release_ending(&root, pid).unwrap();
        assert!(start.elapsed() < LIMIT, "{:?}", spinner.threads());
        thread::sleep(Duration::from_millis(5));
    }
    Some(released)
}

/// A vCPU that is hot-plugged while the contract is in force gets its role's policy, inside the
/// budget, and is put back with the others.
#[test]
fn a_vcpu_that_is_plugged_in_is_taken_in_and_put_back() {
    let test = "a_vcpu_that_is_plugged_in_is_taken_in_and_put_back";
    let root = Root::default();
    for (order, priority, born) in [(Order::Rt, 97, Policy::Other), (Order::Contract, 1, Policy::Fifo)] {
        let Some((spinner, probe)) = with(test, Backend::RtGroup) else { return };
        let before = spinner.snapshot();
        let writes = spinner.writes(&probe, Backend::RtGroup, order, 4);
        let machine = Host::new(&root, &NoGuests);
        spinner.session().apply(&writes, &machine, &mut Silent).unwrap();
        let tid = spinner.plug();
        let late = spinner.thread(tid);
        assert_eq!(late.role, Role::Vcpu(vec![1]), "by its name");
        assert_eq!(late.policy, Some(born));
        let contract = contract(4, 20);
        let ask = Ask { vm: &spinner.vm, threads: &[late], contract, order, level: Level::ALONE, used: &[] };
        let taken = take_in(&probe, Backend::RtGroup, None, &ask);
        let amended = spinner.session().amend(&taken.writes, &machine, &mut Silent).unwrap();
        assert!(amended.failed.is_empty() && amended.left.is_empty(), "{amended:?}");
        let late = spinner.thread(tid);
        assert_eq!((late.policy, late.priority), (Some(Policy::Fifo), priority));
        let held = control(&root, probe.cgroups.as_ref(), &late).unwrap();
        assert_eq!((held.by, held.what.as_str()), (Some(Backend::RtGroup), "4ms in 20ms"));
        let after = spinner.put_back(&before, &machine);
        // As the first vCPU, a thread of the same role.
        assert_eq!(after[&tid], after[&spinner.vcpu().tid]);
    }
}

/// A new thread has no part of the budget until it is split again; then the parts follow the use,
/// and the kernel admits each step.
#[test]
fn a_budget_of_single_threads_is_split_again_by_use() {
    let test = "a_budget_of_single_threads_is_split_again_by_use";
    let Some((spinner, probe)) = with(test, Backend::Deadline) else { return };
    let root = Root::default();
    let before = spinner.snapshot();
    let machine = Host::new(&root, &NoGuests);
    let writes = spinner.writes(&probe, Backend::Deadline, Order::Contract, 4);
    spinner.session().apply(&writes, &machine, &mut Silent).unwrap();
    let tid = spinner.plug();
    assert_eq!(spinner.thread(tid).reservation, None, "a deadline thread's children start ordinary");
    let contract = contract(4, 20);
    let total = 4_000_000 * u64::from(probe.cpus);
    let split = |busy: u32| {
        let threads = spinner.threads();
        let used: Vec<(u32, Duration)> = threads
            .iter()
            .map(|t| (t.tid, Duration::from_millis(if t.tid == busy { 500 } else { 0 })))
            .collect();
        let (vm, order, level) = (&spinner.vm, Order::Contract, Level::ALONE);
        let ask = Ask { vm, threads: &threads, contract, order, level, used: &used };
        let writes = resplit(&probe, &domain_of(&root, &threads).unwrap(), &ask).writes;
        let amended = spinner.session().amend(&writes, &machine, &mut Silent).unwrap();
        assert!(amended.failed.is_empty() && amended.left.is_empty(), "{amended:?}");
        let sum: u64 = spinner.threads().iter().filter_map(|t| t.reservation).map(|r| r.runtime).sum();
        assert!(sum <= total, "{sum}");
        spinner.thread(busy).reservation.map_or(0, |r| r.runtime)
    };
    let first = spinner.vcpu().tid;
    let (new, mut last) = (split(tid), 0);
    assert!(new * 3 > total, "a new thread that works gets its part at once: {new}");
    // The load moves to the other vCPU: its part grows at each split, to the whole budget of one
    // CPU.
    for _ in 0..20 {
        let now = split(first);
        assert!(now >= last, "{now} {last}");
        last = now;
    }
    assert_eq!(last, 4_000_000);
    spinner.put_back(&before, &machine);
    assert_eq!(spinner.thread(tid).reservation, None);
}
