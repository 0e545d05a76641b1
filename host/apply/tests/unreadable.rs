//! An error of the kernel is not absence: after any error at any call, a setting reported as put
//! back is back, and the rest is still in the journal.

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use rtvirtio_apply::points::InterceptedHost;
use rtvirtio_apply::{
    ApplyError, Fate, Form, HostFiles as _, KnobState, Machine, NoGuests, OnConflict, Reverted, Session,
    Silent, Target, Write, status, unkept,
};
use rtvirtio_kernel::Root;
use rtvirtio_kernel::sched::Attr;
use rtvirtio_planner::{BfqTunable, Knob, LimitKind, Plan};
use rustix::io::Errno;
use support::inject::{Fails, Injector, InterceptedGuests};
use support::sim::SimGuests;
use support::tasks::{CPU, VMS, cgroup, group, policy};
use support::{Sim, assert_same, full_plan, limit, plan, weight};

const GROUPS: [&str; 5] = ["/lab", "/lab/vm0", "/lab/vm1", "/lab/vm2", "/other"];
const ERRORS: [Errno; 4] = [Errno::IO, Errno::ACCESS, Errno::MFILE, Errno::NXIO];
const SCHEDULER: &str = "/sys/block/loop0/queue/scheduler";
const WEIGHTS: &str = "/sys/fs/cgroup/blkio/lab/vm0/blkio.bfq.weight_device";

type Files = BTreeMap<PathBuf, Vec<u8>>;
type Make = Box<dyn Fn() -> Sim>;

/// Simulated machine before a plan.
fn lab(v2: bool, elevator: &str, plan: Plan, before: &[(&str, &str)]) -> Sim {
    // Journals are synced often: on a disk that would take most of the time.
    let memory = Path::new("/dev/shm");
    let dir =
        if memory.is_dir() { rtvirtio_testkit::tempdir_in(memory) } else { rtvirtio_testkit::tempdir() };
    let lab = Sim::within(dir.unwrap()).with_disk(v2, &GROUPS, elevator);
    let mut lab = lab.with_guests(&["mq-deadline", "bfq", "none"]);
    fs::create_dir_all(lab.kernel.at("/sys/dev/block/259:1")).unwrap();
    for (path, value) in before {
        lab.kernel.write(Path::new(path), value).unwrap();
    }
    lab.case.plan = plan;
    lab
}

/// Adds a contract: a cgroup of ours with a budget, threads moved into it, and their policies.
fn with_contract(lab: Sim) -> Sim {
    let mut lab = lab.with_cpu();
    lab.kernel.thread(7, 7, &Attr::other(-2), "/vms");
    lab.kernel.thread(7, 8, &Attr::other(5), "/vms");
    lab.kernel.thread(7, 9, &Attr::other(0), "/");
    let budget = [("cpu.rt_period_us", "20000"), ("cpu.rt_runtime_us", "4000")];
    let dir = Path::new(CPU).join("rtvirtio-vm");
    lab.case.cpu = group(&dir, Path::new(VMS), "other nice -2", &budget);
    lab.case.cpu.extend([7, 8, 9].map(|tid| cgroup(7, tid, "/rtvirtio-vm")));
    lab.case.cpu.extend([7, 8].map(|tid| policy(7, tid, &Attr::fifo(tid))));
    lab
}

impl Sim {
    fn with<T>(&self, injector: &Injector, action: impl FnOnce(&Machine<'_>) -> T) -> T {
        let host = InterceptedHost(&self.kernel, injector.clone());
        let guests = InterceptedGuests(&SimGuests, injector.clone());
        action(&Machine::with_host(&self.root, &host, &guests))
    }

    fn apply_with(&self, injector: &Injector) -> Result<(), ApplyError> {
        self.with(injector, |machine| self.apply_on(machine))
    }

    fn revert_with(&self, injector: &Injector) -> Result<Option<Reverted>, ApplyError> {
        let session = Session::open(&self.case.state)?;
        self.with(injector, |machine| session.revert(OnConflict::Report, machine, &mut Silent))
    }

    fn state_of(&self, injector: &Injector) -> Result<Vec<KnobState>, ApplyError> {
        let status = self.with(injector, |machine| status(&self.case.state, machine))?;
        Ok(status.unwrap().knobs.into_iter().map(|knob| knob.state).collect())
    }

    fn has_journal(&self) -> bool {
        self.journal().exists()
    }

    /// Path in the snapshot of a path in a report.
    fn file(&self, path: &str) -> PathBuf {
        match path.split_once(":/") {
            Some((vm, path)) => self.dir.path().join("guests").join(vm).join(path),
            None => self.case.root.join(path.trim_start_matches('/')),
        }
    }

    /// Settings that a report claims to be back and that are not.
    fn wrong_claims(&self, before: &Files, reverted: &Reverted) -> Vec<String> {
        let mut wrong = Vec::new();
        let now = self.snapshot();
        let paths: BTreeSet<&str> = reverted.outcomes.iter().map(|o| o.path.as_str()).collect();
        for path in paths {
            let of = || reverted.outcomes.iter().filter(|o| o.path == path);
            let back =
                of().all(|o| matches!(o.fate, Fate::Restored { .. } | Fate::Untouched | Fate::Gone { .. }));
            let (then, now) = (before.get(&self.file(path)), now.get(&self.file(path)));
            // A file of a cgroup that did not exist sets nothing.
            let is_unset = then.is_none() && now.is_some_and(|n| n.is_empty() || n == b"default 100\n");
            if back && then != now && !is_unset {
                let fates: Vec<_> = of().map(|o| &o.fate).collect();
                wrong.push(format!("{path}: {fates:?}, but {then:?} -> {now:?}"));
            }
            // Nothing ended or was removed in this test.
            wrong.extend(of().filter(|o| matches!(o.fate, Fate::Gone { .. })).map(|o| format!("{o:?}")));
        }
        wrong
    }

    /// After a revert with errors: no wrong claim, and one without errors puts everything back.
    fn assert_honest(&self, before: &Files, result: &Result<Option<Reverted>, ApplyError>, what: &str) {
        match result {
            Ok(Some(reverted)) if reverted.done => {
                assert_same(before, &self.snapshot(), &format!("{what}: done"));
                assert!(!self.has_journal(), "{what}");
            }
            Ok(Some(reverted)) => {
                assert!(self.has_journal(), "{what}: {}", reverted.summary());
                assert!(!reverted.summary().starts_with("everything was put back"), "{what}: {reverted:?}");
                let wrong = self.wrong_claims(before, reverted);
                assert!(wrong.is_empty(), "{what}: wrong claims: {wrong:#?}");
            }
            Ok(None) => panic!("{what}: the journal is lost"),
            Err(e) => assert!(self.has_journal(), "{what}: {e}"),
        }
        if self.has_journal() {
            let again = self.revert(OnConflict::Report);
            assert!(again.done, "{what}: the second revert: {}", again.summary());
        }
        assert_same(before, &self.snapshot(), &format!("{what}: reverted again"));
    }
}

/// Every kind of setting, in the directions that are hard to put back.
fn scenarios() -> Vec<(&'static str, Make)> {
    let strict = Knob::HostBfq(BfqTunable::StrictGuarantees);
    let idle = Knob::HostBfq(BfqTunable::SliceIdle);
    let both = [(strict.clone(), "0"), (idle, "3")];
    let tuned = [
        ("/sys/block/loop0/queue/iosched/strict_guarantees", "1"),
        ("/sys/block/loop0/queue/iosched/slice_idle_us", "1500"),
    ];
    vec![
        (
            "v1, another elevator, guests",
            Box::new(|| {
                let before = [
                    ("/sys/block/loop0/queue/iosched/read_expire", "780"),
                    ("/sys/block/loop0/queue/nr_requests", "100"),
                    (WEIGHTS, "259:1 40"),
                    ("/sys/fs/cgroup/blkio/lab/vm2/blkio.throttle.read_iops_device", "7:0 77"),
                ];
                lab(false, "mq-deadline", full_plan(true), &before)
            }),
        ),
        (
            "v1, BFQ tuned before",
            Box::new(|| {
                let before = [
                    ("/sys/block/loop0/queue/iosched/slice_idle_us", "1500"),
                    ("/sys/block/loop0/queue/iosched/timeout_sync", "60"),
                    (WEIGHTS, "200"),
                    (WEIGHTS, "259:1 40"),
                    ("/sys/fs/cgroup/blkio/lab/vm1/blkio.bfq.weight_device", "7:0 55"),
                ];
                lab(false, "bfq", full_plan(false), &before)
            }),
        ),
        (
            "v1, leaving BFQ",
            Box::new(|| {
                let before = [
                    ("/sys/block/loop0/queue/iosched/slice_idle_us", "2500"),
                    ("/sys/fs/cgroup/blkio/other/blkio.bfq.weight_device", "7:0 900"),
                    ("/sys/fs/cgroup/blkio/other/blkio.bfq.weight_device", "259:1 30"),
                ];
                let settings = [(Knob::HostElevator, "none"), (limit(0, LimitKind::ReadBps), "4096")];
                lab(false, "bfq", plan(&settings), &before)
            }),
        ),
        ("strict mode and slice_idle", Box::new(move || lab(false, "bfq", plan(&both), &tuned))),
        ("strict mode", Box::new(move || lab(false, "bfq", plan(&[(strict.clone(), "0")]), &tuned))),
        ("v2", Box::new(|| lab(true, "none", full_plan(true), &[]))),
        (
            "threads",
            Box::new(|| {
                let settings = [(Knob::HostElevator, "bfq"), (weight(0), "7")];
                with_contract(lab(false, "none", plan(&settings), &[]))
            }),
        ),
    ]
}

#[test]
fn one_error_at_each_call_of_a_revert_is_never_a_wrong_put_back() {
    let mut tried = 0;
    for (name, make) in scenarios() {
        for after in [false, true] {
            let mut at = 1;
            loop {
                // Each call meets each error in one of the scenarios, and all of them in the first.
                let errors = if at % 4 == 0 || name.starts_with("threads") {
                    &ERRORS[..]
                } else {
                    &ERRORS[(at % 4) as usize..][..1]
                };
                let mut calls = 0;
                for &errno in errors {
                    let lab = make();
                    let before = lab.snapshot();
                    lab.apply().unwrap();
                    let injector = Injector::new(Fails::At(vec![at]), errno, after);
                    let result = lab.revert_with(&injector);
                    let what = format!("{name}: {errno:?} at call {at} (change made: {after})");
                    lab.assert_honest(&before, &result, &what);
                    calls = injector.calls();
                    tried += injector.hits();
                }
                if calls < at {
                    break;
                }
                at += 1;
            }
            assert!(at > 10, "{name}: {at} calls");
        }
    }
    println!("{tried} errors injected: 0 wrong claims, 0 differences after the second revert");
}

#[test]
fn a_file_that_cannot_be_touched_at_all_stays_in_the_journal() {
    let mut tried = 0;
    for (name, make) in scenarios() {
        let paths: BTreeSet<String> = {
            let lab = make();
            lab.apply().unwrap();
            let reverted = lab.revert(OnConflict::Report);
            reverted.outcomes.into_iter().map(|o| o.path).collect()
        };
        for path in paths {
            let end: PathBuf = path.rsplit('/').take(2).collect::<Vec<_>>().into_iter().rev().collect();
            let lab = make();
            let before = lab.snapshot();
            lab.apply().unwrap();
            let injector = Injector::new(Fails::Path(end), Errno::IO, false);
            let result = lab.revert_with(&injector);
            if injector.hits() > 0 {
                assert!(!result.as_ref().unwrap().as_ref().unwrap().done, "{name}: {path}");
            }
            tried += injector.hits();
            lab.assert_honest(&before, &result, &format!("{name}: {path} unreadable"));
        }
        // The kernel refuses every call from one moment on.
        let mut from = 1;
        loop {
            let lab = make();
            let before = lab.snapshot();
            lab.apply().unwrap();
            let injector = Injector::new(Fails::From(from), Errno::MFILE, false);
            let result = lab.revert_with(&injector);
            lab.assert_honest(&before, &result, &format!("{name}: nothing from call {from} on"));
            tried += injector.hits();
            if injector.hits() == 0 {
                break;
            }
            from += 3;
        }
    }
    println!("{tried} errors injected: 0 wrong claims, 0 differences after the second revert");
}

#[test]
fn one_error_at_each_call_of_an_apply_leaves_nothing_behind() {
    for (name, make) in scenarios() {
        let mut at = 1;
        loop {
            let lab = make();
            let before = lab.snapshot();
            let errno = ERRORS[(at % 4) as usize];
            let injector = Injector::new(Fails::At(vec![at]), errno, at % 2 == 0);
            let what = format!("{name}: {errno:?} at call {at} of apply");
            match lab.apply_with(&injector) {
                Ok(()) => assert!(lab.has_journal(), "{what}"),
                Err(ApplyError::RolledBack { rollback, .. }) => {
                    assert_eq!(lab.has_journal(), !rollback.done, "{what}");
                    if rollback.done {
                        assert_same(&before, &lab.snapshot(), &what);
                    }
                }
                Err(ApplyError::RollbackFailed { .. }) => assert!(lab.has_journal(), "{what}"),
                Err(e) => assert!(!lab.has_journal(), "{what}: {e}"),
            }
            if lab.has_journal() {
                let reverted = lab.revert(OnConflict::Report);
                assert!(reverted.done, "{what}: {}", reverted.summary());
            }
            assert_same(&before, &lab.snapshot(), &what);
            if injector.hits() == 0 {
                assert!(at > 5, "{name}: {at}");
                break;
            }
            at += 1;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, failure_persistence: None, ..ProptestConfig::default() })]

    /// Errors in several reverts one after the other, several in each.
    #[test]
    fn any_errors_in_any_number_of_reverts_lose_nothing(
        scenario in 0..7usize,
        errors in prop::collection::vec((prop::collection::vec(1..200u64, 1..4), 0..4usize, any::<bool>()), 1..4),
    ) {
        let lab = scenarios()[scenario].1();
        let before = lab.snapshot();
        lab.apply().unwrap();
        for (at, errno, after) in errors {
            if !lab.has_journal() {
                break;
            }
            let result = lab.revert_with(&Injector::new(Fails::At(at), ERRORS[errno], after));
            if let Ok(Some(reverted)) = &result {
                prop_assert_eq!(reverted.done, !lab.has_journal());
                if !reverted.done {
                    let wrong = lab.wrong_claims(&before, reverted);
                    prop_assert!(wrong.is_empty(), "{:#?}", wrong);
                }
            } else {
                prop_assert!(lab.has_journal());
            }
        }
        if lab.has_journal() {
            let last = lab.revert(OnConflict::Report);
            prop_assert!(last.done, "{}", last.summary());
        }
        assert_same(&before, &lab.snapshot(), "in the end");
    }
}

/// The stat of a cgroup's directory fails with EIO: the limit in it is still in force.
#[test]
fn a_limit_whose_cgroup_cannot_be_looked_at_is_not_gone() {
    let file = "/sys/fs/cgroup/blkio/lab/vm0/blkio.throttle.read_iops_device";
    let lab = lab(false, "none", plan(&[(limit(0, LimitKind::ReadIops), "50")]), &[]);
    let before = lab.snapshot();
    lab.apply().unwrap();
    for path in ["lab/vm0", "block/7:0"] {
        let injector = Injector::new(Fails::Path(path.into()), Errno::IO, false);
        let reverted = lab.revert_with(&injector).unwrap().unwrap();
        assert!(!reverted.done && matches!(reverted.outcomes[0].fate, Fate::Failed { .. }), "{reverted:?}");
        assert!(reverted.summary().starts_with("not put back:"), "{}", reverted.summary());
        assert_eq!(lab.kernel.get(file), "7:0 50\n");
        let states = lab.state_of(&injector).unwrap();
        assert!(matches!(states[0], KnobState::Unknown { .. }), "{states:?}");
    }
    assert!(lab.revert(OnConflict::Report).done);
    assert_same(&before, &lab.snapshot(), "put back");
}

/// Without the boot id it is not known whether the names are still those of the same devices.
#[test]
fn without_a_boot_id_nothing_is_applied_or_put_back() {
    let lab = lab(false, "none", plan(&[(Knob::HostElevator, "bfq")]), &[]);
    let untouched = lab.snapshot();
    for errno in [Errno::IO, Errno::NOENT] {
        let unreadable = Injector::new(Fails::Path("random/boot_id".into()), errno, false);
        let error = lab.apply_with(&unreadable).unwrap_err().to_string();
        assert!(error.contains("boot_id") && error.contains("is /proc mounted?"), "{error}");
        assert!(!lab.has_journal());
        lab.apply().unwrap();
        let applied = lab.snapshot();
        assert!(lab.revert_with(&unreadable).is_err() && lab.has_journal());
        assert_same(&applied, &lab.snapshot(), "not put back");
        assert!(lab.state_of(&unreadable).is_err());
        assert!(lab.revert(OnConflict::Report).done);
    }
    assert_same(&untouched, &lab.snapshot(), "put back");
    assert!(lab.kernel.get(SCHEDULER).contains("[none]"));
}

/// A guest whose agent breaks off may be running; one whose socket has no listener has ended.
#[test]
fn a_guest_that_breaks_off_is_not_gone() {
    let settings = [(Knob::GuestElevator { vm: "vm0".into() }, "bfq")];
    let lab = lab(false, "none", plan(&settings), &[]);
    let before = lab.snapshot();
    lab.apply().unwrap();
    for errno in [Errno::CONNRESET, Errno::PIPE, Errno::CONNREFUSED, Errno::NXIO, Errno::TIMEDOUT] {
        let reverted = lab
            .revert_with(&Injector::new(Fails::Path("queue/scheduler".into()), errno, false))
            .unwrap()
            .unwrap();
        assert!(!reverted.done && matches!(reverted.outcomes[0].fate, Fate::Failed { .. }), "{reverted:?}");
    }
    for errno in [Errno::CONNRESET, Errno::PIPE, Errno::AGAIN, Errno::ACCESS] {
        let reverted =
            lab.revert_with(&Injector::new(Fails::Path("vm0.sock".into()), errno, false)).unwrap().unwrap();
        assert!(!reverted.done && matches!(reverted.outcomes[0].fate, Fate::Failed { .. }), "{reverted:?}");
    }
    assert!(lab.revert(OnConflict::Report).done);
    assert_same(&before, &lab.snapshot(), "put back");
    lab.apply().unwrap();
    let refused = Injector::new(Fails::Path("vm0.sock".into()), Errno::CONNREFUSED, false);
    let reverted = lab.revert_with(&refused).unwrap().unwrap();
    assert!(reverted.done && matches!(reverted.outcomes[0].fate, Fate::Gone { .. }), "{reverted:?}");
}

/// Each wait for the agent of a guest that hangs is long, and a guest may have many settings.
#[test]
fn an_agent_that_does_not_answer_is_waited_for_once() {
    let bfq = |tunable| Knob::GuestBfq { vm: "vm0".into(), tunable };
    let settings = [
        (Knob::GuestElevator { vm: "vm0".into() }, "bfq"),
        (bfq(BfqTunable::SliceIdle), "0"),
        (bfq(BfqTunable::StrictGuarantees), "1"),
    ];
    let lab = lab(false, "none", plan(&settings), &[]);
    let before = lab.snapshot();
    lab.apply().unwrap();
    let silent = Injector::new(Fails::Path("vm0.sock".into()), Errno::TIMEDOUT, false);
    let states = lab.state_of(&silent).unwrap();
    let unknown = states.iter().filter(|state| matches!(state, KnobState::Unknown { .. }));
    assert_eq!((unknown.count(), silent.hits()), (3, 1), "{states:?}");
    let reverted = lab.revert_with(&silent).unwrap().unwrap();
    assert!(!reverted.done && silent.hits() == 2, "{} waits: {}", silent.hits(), reverted.summary());
    let deaf = Injector::new(Fails::Path("scheduler".into()), Errno::TIMEDOUT, false);
    let states = lab.state_of(&deaf).unwrap();
    let unknown = states.iter().filter(|state| matches!(state, KnobState::Unknown { .. }));
    assert_eq!((unknown.count(), deaf.hits()), (3, 1), "its agent is there, and does not read: {states:?}");
    // The next one asks again.
    assert!(lab.revert(OnConflict::Report).done);
    assert_same(&before, &lab.snapshot(), "put back");
}

#[test]
fn a_systemd_that_does_not_answer_is_waited_for_once() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let root = Root::new(dir.path());
    fs::create_dir_all(root.at("/run/systemd/system")).unwrap();
    let silent = Injector::new(Fails::From(1), Errno::TIMEDOUT, false);
    let host = InterceptedHost(&root, silent.clone());
    let cap = |unit: &str| {
        let file = format!("/sys/fs/cgroup/{unit}/cpu.max");
        Write::new(unit, Target::host(file, Form::Plain), "5000 10000")
    };
    let machine = Machine::with_host(&root, &host, &NoGuests);
    let lost = unkept(&[cap("a.scope"), cap("b.scope")], &machine).unwrap();
    assert_eq!((lost.len(), silent.hits()), (2, 1), "{lost:?}");
}
