//! Threads that are added to the plan in force, over a simulated kernel: killed at every point,
//! everything is put back all the same.

mod support;

use std::cell::Cell;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use rtvirtio_apply::points::{CountedSteps, Intercept, InterceptedHost, Points};
use rtvirtio_apply::{
    Amended, ApplyError, Form, KnownJournal, Machine, NoGuests, Observer, OnConflict, Silent, Step, Target,
    Write, syncs,
};
use rtvirtio_kernel::sched::Attr;
use rustix::io::Errno;
use support::Sim;
use support::inject::{Fails, Injector};
use support::sim::SimKernel;
use support::tasks::{CPU, VMS, cgroup, group, policy};

/// Simulated kernel in which a thread ends just before the call of a number.
struct Ending<'a> {
    kernel: &'a SimKernel,
    thread: (u32, u32),
    calls_left: &'a Cell<u32>,
}

impl Intercept for Ending<'_> {
    fn intercept<T>(&self, _: &Path, _: Option<&str>, call: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        match self.calls_left.get() {
            0 => {}
            left => {
                if left == 1 {
                    self.kernel.end(self.thread.0, self.thread.1);
                }
                self.calls_left.set(left - 1);
            }
        }
        call()
    }
}

/// VM under contract: a main loop whose children inherit its policy, and a vCPU that was
/// hot-plugged after the contract, so that it was started in the VM's cgroup at the main loop's
/// priority. Thread 40 is a kernel thread, elsewhere.
fn in_force() -> Sim {
    let (sim, writes, main) = before();
    sim.session().apply(&writes, &sim.machine(), &mut Silent).unwrap();
    sim.kernel.thread(7, 30, &main, "/rtvirtio-vm");
    sim
}

/// State before the contract, the contract's writes, and the main loop's policy under it.
fn before() -> (Sim, Vec<Write>, Attr) {
    let sim = Sim::new().with_cpu();
    sim.kernel.v1(&["/lab"]);
    sim.kernel.thread(7, 7, &Attr::other(-2), "/vms");
    sim.kernel.thread(7, 8, &Attr::other(0), "/vms");
    sim.kernel.thread(40, 40, &Attr::other(3), "/");
    let main = Attr { reset_on_fork: false, ..Attr::fifo(2) };
    let dir = Path::new(CPU).join("rtvirtio-vm");
    let budget = [("cpu.rt_period_us", "20000"), ("cpu.rt_runtime_us", "4000")];
    let mut writes = group(&dir, Path::new(VMS), "other nice -2", &budget);
    writes.extend([
        cgroup(7, 7, "/rtvirtio-vm"),
        cgroup(7, 8, "/rtvirtio-vm"),
        policy(7, 7, &main),
        policy(7, 8, &Attr::fifo(1)),
    ]);
    (sim, writes, main)
}

/// Writes of `keep` for the two threads.
fn new_threads() -> [Write; 4] {
    [
        cgroup(7, 30, "/rtvirtio-vm"),
        cgroup(40, 40, "/rtvirtio-vm"),
        policy(7, 30, &Attr::fifo(1)),
        policy(40, 40, &Attr::fifo(2)),
    ]
}

impl Sim {
    fn amend(&self, writes: &[Write]) -> Amended {
        self.session().amend(writes, &self.machine(), &mut Silent).unwrap()
    }

    /// Amends, and stops at the point of this number; returns whether it ended before that.
    fn amend_cut(&self, wanted: &[Write], at: u64) -> bool {
        let counted = Points::new(at, || panic!("cut"));
        let host = InterceptedHost(&self.kernel, counted.clone());
        let machine = Machine::with_host(&self.root, &host, &NoGuests);
        let amend = || self.session().amend(wanted, &machine, &mut CountedSteps(counted)).map(drop).unwrap();
        catch_unwind(AssertUnwindSafe(amend)).is_ok()
    }

    /// Policy and cgroup of a thread.
    fn of(&self, pid: u32, tid: u32) -> (String, String) {
        let cgroups = self.kernel.get(format!("/proc/{pid}/task/{tid}/cgroup"));
        let cpu = cgroups.lines().next().unwrap().rsplit_once(':').unwrap().1.to_owned();
        (self.kernel.policy(tid).unwrap().to_string(), cpu)
    }

    /// Reverts; returns differences from the state before.
    fn differences(&self) -> Vec<String> {
        let reverted = self.revert(OnConflict::Report);
        assert!(reverted.done, "{}", reverted.summary());
        let expected = [
            (7, 7, "other nice -2", "/vms"),
            (7, 8, "other nice 0", "/vms"),
            // Policy and cgroup of the main loop: inherited by the thread, had we changed nothing.
            (7, 30, "other nice -2", "/vms"),
            (40, 40, "other nice 3", "/"),
        ];
        let mut wrong: Vec<String> = expected
            .into_iter()
            .map(|(pid, tid, policy, cgroup)| {
                (tid, self.of(pid, tid), (policy.to_owned(), cgroup.to_owned()))
            })
            .filter(|(_, now, before)| now != before)
            .map(|w| format!("{w:?}"))
            .collect();
        if self.kernel.at(Path::new(CPU).join("rtvirtio-vm")).exists() {
            wrong.push("the group is there".to_owned());
        }
        wrong
    }
}

#[test]
fn new_threads_are_taken_in_and_put_back() {
    let sim = in_force();
    let amended = sim.amend(&new_threads());
    // The first thread was started in the cgroup.
    assert_eq!(amended.written.len(), 3, "{amended:?}");
    assert!(amended.failed.is_empty() && amended.left.is_empty(), "{amended:?}");
    assert_eq!(sim.of(7, 30), ("fifo 1 reset-on-fork".to_owned(), "/rtvirtio-vm".to_owned()));
    assert_eq!(sim.of(40, 40), ("fifo 2 reset-on-fork".to_owned(), "/rtvirtio-vm".to_owned()));
    // Amended again: there is nothing to do.
    assert_eq!(sim.amend(&new_threads()), Amended::default());
    assert_eq!(sim.differences(), Vec::<String>::new());
}

#[test]
fn the_disk_is_waited_for_twice_before_the_first_write_and_once_after_the_last() {
    /// Waits of this thread at each step.
    struct Waits(Vec<(Step, u64)>);
    impl Observer for Waits {
        fn step(&mut self, step: Step) {
            self.0.push((step, syncs()));
        }
    }
    let (sim, writes, main) = before();
    let begin = syncs();
    let at = |waits: &Waits, which: fn(&Step) -> bool| {
        let seen = waits.0.iter().filter(|(step, _)| which(step)).map(|(_, n)| n - begin);
        (seen.clone().min(), seen.max())
    };
    let wrote = |step: &Step| matches!(step, Step::Wrote { .. });
    let mut waits = Waits(Vec::new());
    sim.session().apply(&writes, &sim.machine(), &mut waits).unwrap();
    assert!(writes.len() > 3, "{writes:?}");
    // The journal and its name, however many writes follow.
    assert_eq!(at(&waits, |step| *step == Step::Journaled), (Some(2), Some(2)));
    assert_eq!(at(&waits, wrote), (Some(2), Some(2)));
    assert_eq!(syncs() - begin, 3, "that all is written");
    sim.kernel.thread(7, 30, &main, "/rtvirtio-vm");
    let mut waits = Waits(Vec::new());
    sim.session().amend(&new_threads(), &sim.machine(), &mut waits).unwrap();
    assert_eq!(at(&waits, wrote), (Some(5), Some(5)));
    assert_eq!(syncs() - begin, 6);
}

/// The journal has what a later addition needs before the first write.
#[test]
fn where_nothing_is_to_be_forgotten_the_journal_is_written_once() {
    let sim = in_force();
    let begin = syncs();
    sim.amend(&[cgroup(40, 40, "/rtvirtio-vm"), policy(40, 40, &Attr::fifo(2))]);
    assert_eq!(syncs() - begin, 2);
    assert_eq!(sim.differences(), Vec::<String>::new());
}

/// Additions in a row, with the journal kept in memory, each cut at any point.
#[test]
fn additions_in_a_row_lose_nothing_wherever_they_are_cut() {
    let pieces = || {
        let [group, other_group, policy, other_policy] = new_threads();
        [vec![group, policy], vec![other_group, other_policy], vec![self::policy(7, 8, &Attr::fifo(4))]]
    };
    let mut points = 0;
    for at in 1.. {
        let sim = in_force();
        let counted = Points::new(at, || panic!("cut"));
        let host = InterceptedHost(&sim.kernel, counted.clone());
        let machine = Machine::with_host(&sim.root, &host, &NoGuests);
        let mut known = KnownJournal::default();
        let mut all = || {
            for piece in pieces() {
                let mut steps = CountedSteps(counted.clone());
                let amended = sim.session().amend_known(&mut known, &piece, &machine, &mut steps).unwrap();
                assert!(amended.failed.is_empty() && amended.left.is_empty(), "{amended:?}");
            }
        };
        let done = catch_unwind(AssertUnwindSafe(&mut all)).is_ok();
        // Another process adds the rest, from the file alone.
        if at % 2 == 0 {
            pieces().iter().for_each(|piece| drop(sim.amend(piece)));
            assert_eq!(sim.of(7, 8).0, "fifo 4 reset-on-fork", "cut at {at}");
        }
        assert_eq!(sim.differences(), Vec::<String>::new(), "cut at {at}");
        if done {
            points = at - 1;
            break;
        }
    }
    assert!(points >= 15, "{points}");
}

/// A journal in memory is used only where the file is still the same.
#[test]
fn a_journal_in_memory_gives_way_to_what_another_program_has_written() {
    let sim = in_force();
    let mut known = KnownJournal::default();
    let mut add = |write: Write| sim.session().amend_known(&mut known, &[write], &sim.machine(), &mut Silent);
    add(policy(7, 8, &Attr::fifo(4))).unwrap();
    sim.amend(&new_threads());
    add(policy(7, 8, &Attr::fifo(5))).unwrap();
    assert_eq!(sim.differences(), Vec::<String>::new(), "the threads between are in the journal");
    let error = add(policy(7, 8, &Attr::fifo(6))).unwrap_err();
    assert!(matches!(error, ApplyError::NothingInForce), "{error}");
}

#[test]
fn a_cut_at_any_point_loses_nothing() {
    let mut points = 0;
    for at in 1.. {
        let sim = in_force();
        let done = sim.amend_cut(&new_threads(), at);
        // More can be added, and a revert finds all of it.
        if at % 2 == 0 {
            sim.amend(&new_threads());
            assert_eq!(sim.of(7, 30).0, "fifo 1 reset-on-fork", "cut at {at}");
        }
        assert_eq!(sim.differences(), Vec::<String>::new(), "cut at {at}");
        if done {
            points = at - 1;
            break;
        }
    }
    println!("cut at {points} points: 0 differences");
    assert!(points >= 10, "{points}");
}

/// A value that is amended twice: the intermediate one is ours too.
#[test]
fn a_value_that_changes_again_is_ours_before_and_after() {
    let wanted = |priority| [policy(7, 8, &Attr::fifo(priority))];
    for at in 1.. {
        let sim = in_force();
        let done = sim.amend_cut(&wanted(5), at);
        assert_eq!(sim.differences(), Vec::<String>::new(), "cut at {at}");
        if done {
            assert!(at > 3);
            break;
        }
    }
    let sim = in_force();
    assert_eq!(sim.amend(&wanted(5)).written.len(), 1);
    assert_eq!(sim.amend(&wanted(6)).written.len(), 1);
    // The value before the last is not ours any more: another program must have set it.
    sim.kernel.set_policy(8, &Attr::fifo(5)).unwrap();
    let amended = sim.amend(&wanted(7));
    assert_eq!(amended.left, [("policy".to_owned(), "fifo 5 reset-on-fork".to_owned())]);
    assert_eq!(sim.kernel.policy(8).unwrap(), Attr::fifo(5));
}

/// A setting that another program has changed stays in the journal, and is no contract in force.
#[test]
fn nothing_is_added_to_what_putting_back_has_left() {
    let sim = in_force();
    sim.kernel.set_policy(8, &Attr::fifo(9)).unwrap();
    let reverted = sim.revert(OnConflict::Report);
    assert!(!reverted.done);
    let error = sim.session().amend(&new_threads(), &sim.machine(), &mut Silent).unwrap_err();
    assert!(matches!(error, ApplyError::NotWhole { .. }), "{error}");
    assert_eq!(sim.of(40, 40), ("other nice 3".to_owned(), "/".to_owned()));
}

#[test]
fn a_thread_that_ends_or_is_refused_is_reported_and_stops_no_other() {
    let sim = in_force();
    sim.amend(&new_threads());
    sim.kernel.end(40, 40);
    // Not in a cgroup with a budget: SCHED_FIFO is EPERM.
    sim.kernel.thread(50, 50, &Attr::other(1), "/vms");
    let amended = sim.amend(&[
        policy(40, 40, &Attr::fifo(3)),
        policy(50, 50, &Attr::fifo(1)),
        policy(7, 8, &Attr::fifo(4)),
    ]);
    assert_eq!((amended.written.len(), amended.failed.len()), (1, 1), "{amended:?}");
    assert_eq!(sim.kernel.policy(50).unwrap(), Attr::other(1));
    let reverted = sim.revert(OnConflict::Report);
    // A thread that has ended is forgotten when something is added.
    assert!(
        reverted.done && reverted.outcomes.iter().all(|o| !o.path.contains("/proc/40/")),
        "{reverted:#?}"
    );
}

/// Threads may end at any moment, between two reads of them too.
#[test]
fn a_thread_that_ends_at_any_moment_fails_nothing() {
    let ended = |sim: &Sim, thread: (u32, u32), calls: u32, change: &dyn Fn(&Machine<'_>)| {
        let calls_left = &Cell::new(calls);
        let host = InterceptedHost(&sim.kernel, Ending { kernel: &sim.kernel, thread, calls_left });
        change(&Machine::with_host(&sim.root, &host, &NoGuests));
        calls_left.get() == 0
    };
    let mut calls = 1..;
    while calls.next().is_some_and(|calls| {
        let (sim, writes, _) = before();
        ended(&sim, (7, 8), calls, &|machine| {
            sim.session().apply(&writes, machine, &mut Silent).unwrap();
            assert_eq!(sim.of(7, 7), ("fifo 2".to_owned(), "/rtvirtio-vm".to_owned()), "after {calls} calls");
        })
    }) {}
    assert!(calls.start > 20, "{calls:?}");
    let mut calls = 1..;
    while calls.next().is_some_and(|calls| {
        let sim = in_force();
        ended(&sim, (7, 30), calls, &|machine| {
            let amended = sim.session().amend(&new_threads(), machine, &mut Silent).unwrap();
            assert!(amended.failed.is_empty() && amended.left.is_empty(), "after {calls} calls: {amended:?}");
            assert_eq!(sim.of(40, 40).0, "fifo 2 reset-on-fork", "after {calls} calls");
        })
    }) {}
    assert!(calls.start > 20, "{calls:?}");
}

/// Under SCHED_DEADLINE a thread gets what another one gave up.
#[test]
fn nothing_is_taken_that_was_not_given() {
    let sim = in_force();
    sim.amend(&new_threads());
    sim.kernel.thread(50, 50, &Attr::other(1), "/vms");
    let refused = policy(50, 50, &Attr::fifo(1));
    let takes = Write { takes: true, ..policy(7, 8, &Attr::fifo(4)) };
    let fresh = Write { takes: true, ..policy(7, 30, &Attr::fifo(4)) };
    let amended = sim.amend(&[refused.clone(), takes.clone(), fresh.clone()]);
    assert_eq!((amended.written.len(), amended.failed.len()), (0, 3), "{amended:?}");
    assert_eq!(sim.of(7, 8).0, "fifo 1 reset-on-fork");
    // What is refused to one that takes holds up no other.
    let other = Write { takes: true, ..policy(7, 30, &Attr::fifo(5)) };
    let amended = sim.amend(&[Write { takes: true, ..refused }, other]);
    assert_eq!((amended.written.len(), amended.failed.len()), (1, 1), "{amended:?}");
    let amended = sim.amend(&[policy(7, 7, &Attr::fifo(3)), takes, fresh]);
    assert_eq!((amended.written.len(), amended.failed.len()), (3, 0), "{amended:?}");
    // Intermediate values are not ours once the next one was taken.
    sim.kernel.set_policy(8, &Attr::fifo(1)).unwrap();
    let amended = sim.amend(&[policy(7, 8, &Attr::fifo(5))]);
    assert_eq!(amended.left.len(), 1, "{amended:?}");
}

#[test]
fn only_to_what_is_in_force_can_be_added() {
    let sim = in_force();
    let error = |writes: &[Write]| sim.session().amend(writes, &sim.machine(), &mut Silent).unwrap_err();
    let file = Target::host(PathBuf::from("/sys/block/loop0/queue/scheduler"), Form::Elevator);
    assert!(matches!(error(&[Write::new("elevator", file, "bfq")]), ApplyError::CannotAct { .. }));
    assert_eq!(sim.session().applied_by().unwrap(), Some(std::process::id()));
    sim.kernel.boot("two\n");
    let start =
        |tid: u32, start: u32| sim.kernel.put(format!("/proc/7/task/{tid}/start"), &format!("{start}\n"));
    [7, 8, 30].iter().for_each(|tid| start(*tid, 5000));
    assert!(matches!(error(&new_threads()), ApplyError::NotWhole { .. }));
    sim.kernel.boot("one\n");
    [7, 8, 30].iter().for_each(|tid| start(*tid, 1000 + tid));
    sim.differences();
    assert!(matches!(error(&new_threads()), ApplyError::NothingInForce));
    assert_eq!(sim.session().applied_by().unwrap(), None);
}

/// An error at any call: a value of ours is never taken for what a thread had before us.
#[test]
fn an_error_at_any_call_of_an_amend_loses_nothing() {
    let mut at = 1;
    loop {
        let sim = in_force();
        let injector =
            Injector::new(Fails::At(vec![at]), [Errno::IO, Errno::MFILE][at as usize % 2], at % 3 == 0);
        let host = InterceptedHost(&sim.kernel, injector.clone());
        let machine = Machine::with_host(&sim.root, &host, &NoGuests);
        let result = sim.session().amend(&new_threads(), &machine, &mut Silent);
        if let Ok(amended) = &result {
            let all = amended.failed.is_empty() && amended.left.is_empty();
            let set = sim.of(7, 30).0 == "fifo 1 reset-on-fork" && sim.of(40, 40).0 == "fifo 2 reset-on-fork";
            assert!(!all || set, "call {at}: {amended:?}");
        }
        // In half of the cases the program goes on.
        if at % 2 == 0 {
            let again = sim.amend(&new_threads());
            assert!(again.failed.is_empty() && again.left.is_empty(), "call {at}: {again:?}");
        }
        assert_eq!(sim.differences(), Vec::<String>::new(), "error at call {at}: {result:?}");
        if injector.hits() == 0 {
            break;
        }
        at += 1;
    }
    println!("errors at {} calls: 0 differences", at - 1);
    assert!(at > 30, "{at}");
}

/// A container may hide the boot id, and a restored checkpoint has another: threads that still run
/// show that there was no restart.
#[test]
fn another_boot_id_with_threads_that_still_run_is_no_restart() {
    let sim = in_force();
    sim.kernel.boot("two\n");
    let status = sim.status().unwrap();
    assert!(status.is_whole() && !status.rebooted, "{status:?}");
    assert!(sim.amend(&new_threads()).failed.is_empty());
    assert_eq!(sim.differences(), Vec::<String>::new());
    // An unreadable thread shows neither.
    let sim = in_force();
    sim.kernel.boot("two\n");
    let unreadable = Injector::new(Fails::Path("task/8/stat".into()), Errno::IO, false);
    let host = InterceptedHost(&sim.kernel, unreadable);
    let machine = Machine::with_host(&sim.root, &host, &NoGuests);
    assert!(sim.session().revert(OnConflict::Force, &machine, &mut Silent).is_err());
    assert_eq!(sim.differences(), Vec::<String>::new());
}

/// A thread's values to write again are in the journal already: that needs no space on the disk.
#[test]
fn a_thread_is_put_back_into_its_group_although_the_journal_cannot_be_written() {
    let sim = in_force();
    sim.amend(&new_threads());
    sim.kernel.put("/proc/7/task/8/cgroup", "1:cpu:/vms\n0::/\n");
    assert_eq!(sim.of(7, 8).1, "/vms");
    // Instead of a full disk: the temporary file cannot be created.
    let new = sim.case.state.join(format!("{}.new", rtvirtio_apply::JOURNAL_FILE));
    std::fs::create_dir(&new).unwrap();
    sim.kernel.thread(7, 31, &Attr::fifo(2), "/rtvirtio-vm");
    let wanted = [cgroup(7, 8, "/rtvirtio-vm"), policy(7, 31, &Attr::fifo(1))];
    // A new setting has to be journaled first, and so is tried again.
    let error = sim.session().amend(&wanted, &sim.machine(), &mut Silent).unwrap_err();
    assert!(matches!(error, ApplyError::State { .. }), "{error}");
    assert_eq!(sim.of(7, 8).1, "/rtvirtio-vm");
    assert_eq!(sim.of(7, 31).0, Attr::fifo(2).to_string());
    let error = sim.session().amend(&wanted[1..], &sim.machine(), &mut Silent).unwrap_err();
    assert!(matches!(error, ApplyError::State { .. }), "{error}");
    std::fs::remove_dir(&new).unwrap();
    assert_eq!(sim.differences(), Vec::<String>::new());
}
