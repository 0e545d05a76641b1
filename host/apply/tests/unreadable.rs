//! An error of the kernel is not absence: after any error at any call, a setting reported as put
//! back is back, and the rest is still in the journal.

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use rtvirtio_apply::{
    ApplyError, Fate, Form, HostFiles as _, JOURNAL_FILE, KnobState, Machine, NoGuests, OnConflict, Place,
    Reverted, Session, Silent, Target, Write, append, resolve, status, unkept,
};
use rtvirtio_kernel::Root;
use rtvirtio_kernel::sched::Attr;
use rtvirtio_planner::{BfqTunable, Knob, LimitKind, Plan};
use rustix::io::Errno;
use support::inject::{FailingGuests, FailingHost, Fails, Injector};
use support::sim::{SimGuests, SimKernel};
use support::tasks::CPU;
use support::{Case, assert_same, full_plan, limit, plan, snapshot, weight};

const GROUPS: [&str; 5] = ["/lab", "/lab/vm0", "/lab/vm1", "/lab/vm2", "/other"];
const ERRORS: [Errno; 4] = [Errno::IO, Errno::ACCESS, Errno::MFILE, Errno::NXIO];
const SCHEDULER: &str = "/sys/block/loop0/queue/scheduler";
const WEIGHTS: &str = "/sys/fs/cgroup/blkio/lab/vm0/blkio.bfq.weight_device";

/// Simulated machine before a plan.
struct Lab {
    dir: tempfile::TempDir,
    kernel: SimKernel,
    root: Root,
    case: Case,
}

type Files = BTreeMap<PathBuf, Vec<u8>>;
type Make = Box<dyn Fn() -> Lab>;

impl Lab {
    fn new(v2: bool, elevator: &str, plan: Plan, before: &[(&str, &str)]) -> Self {
        // Journals are synced often: on a disk that would take most of the time.
        let memory = Path::new("/dev/shm");
        let dir =
            if memory.is_dir() { rtvirtio_testkit::tempdir_in(memory) } else { rtvirtio_testkit::tempdir() }
                .unwrap();
        let (root, guests) = (dir.path().join("root"), dir.path().join("guests"));
        let kernel = SimKernel::new(&root);
        if v2 {
            kernel.v2(&GROUPS)
        } else {
            kernel.v1(&GROUPS)
        }
        kernel.boot("one\n");
        kernel.disk("loop0", elevator);
        fs::create_dir_all(kernel.at("/sys/dev/block/259:1")).unwrap();
        for (n, elevator) in ["mq-deadline", "bfq", "none"].iter().enumerate() {
            SimKernel::new(guests.join(format!("vm{n}"))).disk("vda", elevator);
            fs::write(guests.join(format!("vm{n}.sock")), "").unwrap();
        }
        for (path, value) in before {
            kernel.write(Path::new(path), value).unwrap();
        }
        let case = Case {
            root: root.clone(),
            state: dir.path().join("state"),
            device: "loop0".into(),
            parent: "/lab".into(),
            vms: 3,
            guests: Some(guests),
            plan,
            cpu: Vec::new(),
            threads_of: None,
        };
        Self { root: Root::new(root), kernel, case, dir }
    }

    /// Adds a contract: a cgroup of ours with a budget, threads moved into it, and their policies.
    fn with_contract(mut self) -> Self {
        self.kernel.cpu_root();
        self.kernel.make_dir(&Path::new(CPU).join("vms")).unwrap();
        self.kernel.thread(7, 7, &Attr::other(-2), "/vms");
        self.kernel.thread(7, 8, &Attr::other(5), "/vms");
        self.kernel.thread(7, 9, &Attr::other(0), "/");
        let group = Path::new(CPU).join("rtvirtio-vm");
        let form = Form::Group { home: Path::new(CPU).join("vms"), scheduling: "other nice -2".to_owned() };
        let target = Target { place: Place::Host, path: group.clone(), form };
        let mut writes = vec![Write::new("cgroup", target, "present")];
        for (name, value) in [("cpu.rt_period_us", "20000"), ("cpu.rt_runtime_us", "4000")] {
            let write = Write::new(name, Target::host(group.join(name), Form::Plain), value);
            writes.push(Write { created_by: Some(0), also_ours: vec!["0".to_owned()], ..write });
        }
        for tid in [7, 8, 9] {
            let target = Target::thread_cgroup(7, tid, 1000 + u64::from(tid), "cpu", Path::new(CPU));
            writes.push(Write::new(format!("cgroup of {tid}"), target, "/rtvirtio-vm"));
        }
        for tid in [7, 8] {
            let target = Target::scheduling(7, tid, 1000 + u64::from(tid));
            writes.push(Write::new(format!("policy of {tid}"), target, Attr::fifo(tid).to_string()));
        }
        self.case.cpu = writes;
        self
    }

    fn snapshot(&self) -> Files {
        snapshot(&[self.case.root.clone(), self.dir.path().join("guests")])
    }

    fn with<T>(&self, injector: &Injector, action: impl FnOnce(&Machine<'_>) -> T) -> T {
        let (host, guests) =
            (FailingHost(&self.kernel, injector.clone()), FailingGuests(&SimGuests, injector.clone()));
        action(&Machine::with_host(&self.root, &host, &guests))
    }

    fn apply(&self, injector: &Injector) -> Result<(), ApplyError> {
        self.with(injector, |machine| {
            let mut writes = resolve(&self.case.plan, &self.case.binding(), machine)?;
            append(&mut writes, self.case.cpu.clone());
            let session = Session::open(&self.case.state)?;
            session.apply(&writes, machine, &mut Silent).map(drop)
        })
    }

    fn revert(&self, injector: &Injector) -> Result<Option<Reverted>, ApplyError> {
        let session = Session::open(&self.case.state)?;
        self.with(injector, |machine| session.revert(OnConflict::Report, machine, &mut Silent))
    }

    fn has_journal(&self) -> bool {
        self.case.state.join(JOURNAL_FILE).exists()
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
            let again = self.revert(&none()).unwrap().unwrap();
            assert!(again.done, "{what}: the second revert: {}", again.summary());
        }
        assert_same(before, &self.snapshot(), &format!("{what}: reverted again"));
    }
}

fn none() -> Injector {
    Injector::new(Fails::Never, Errno::IO, false)
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
                Lab::new(false, "mq-deadline", full_plan(true), &before)
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
                Lab::new(false, "bfq", full_plan(false), &before)
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
                Lab::new(false, "bfq", plan(&settings), &before)
            }),
        ),
        ("strict mode and slice_idle", Box::new(move || Lab::new(false, "bfq", plan(&both), &tuned))),
        ("strict mode", Box::new(move || Lab::new(false, "bfq", plan(&[(strict.clone(), "0")]), &tuned))),
        ("v2", Box::new(|| Lab::new(true, "none", full_plan(true), &[]))),
        (
            "threads",
            Box::new(|| {
                Lab::new(false, "none", plan(&[(Knob::HostElevator, "bfq"), (weight(0), "7")]), &[])
                    .with_contract()
            }),
        ),
    ]
}

#[test]
fn one_error_at_each_call_of_a_revert_is_never_a_wrong_put_back() {
    let mut tried = 0;
    for (name, lab) in scenarios() {
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
                    let lab = lab();
                    let before = lab.snapshot();
                    lab.apply(&none()).unwrap();
                    let injector = Injector::new(Fails::At(vec![at]), errno, after);
                    let result = lab.revert(&injector);
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
    for (name, lab) in scenarios() {
        let paths: BTreeSet<String> = {
            let lab = lab();
            lab.apply(&none()).unwrap();
            let reverted = lab.revert(&none()).unwrap().unwrap();
            reverted.outcomes.into_iter().map(|o| o.path).collect()
        };
        for path in paths {
            let end: PathBuf = path.rsplit('/').take(2).collect::<Vec<_>>().into_iter().rev().collect();
            let lab = lab();
            let before = lab.snapshot();
            lab.apply(&none()).unwrap();
            let injector = Injector::new(Fails::Path(end), Errno::IO, false);
            let result = lab.revert(&injector);
            if injector.hits() > 0 {
                assert!(!result.as_ref().unwrap().as_ref().unwrap().done, "{name}: {path}");
            }
            tried += injector.hits();
            lab.assert_honest(&before, &result, &format!("{name}: {path} unreadable"));
        }
        // The kernel refuses every call from one moment on.
        let mut from = 1;
        loop {
            let lab = lab();
            let before = lab.snapshot();
            lab.apply(&none()).unwrap();
            let injector = Injector::new(Fails::From(from), Errno::MFILE, false);
            let result = lab.revert(&injector);
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
    for (name, lab) in scenarios() {
        let mut at = 1;
        loop {
            let lab = lab();
            let before = lab.snapshot();
            let errno = ERRORS[(at % 4) as usize];
            let injector = Injector::new(Fails::At(vec![at]), errno, at % 2 == 0);
            let what = format!("{name}: {errno:?} at call {at} of apply");
            match lab.apply(&injector) {
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
                let reverted = lab.revert(&none()).unwrap().unwrap();
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
        lab.apply(&none()).unwrap();
        for (at, errno, after) in errors {
            if !lab.has_journal() {
                break;
            }
            let result = lab.revert(&Injector::new(Fails::At(at), ERRORS[errno], after));
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
            let last = lab.revert(&none()).unwrap().unwrap();
            prop_assert!(last.done, "{}", last.summary());
        }
        assert_same(&before, &lab.snapshot(), "in the end");
    }
}

/// The stat of a cgroup's directory fails with EIO: the limit in it is still in force.
#[test]
fn a_limit_whose_cgroup_cannot_be_looked_at_is_not_gone() {
    let file = "/sys/fs/cgroup/blkio/lab/vm0/blkio.throttle.read_iops_device";
    let lab = Lab::new(false, "none", plan(&[(limit(0, LimitKind::ReadIops), "50")]), &[]);
    let before = lab.snapshot();
    lab.apply(&none()).unwrap();
    for path in ["lab/vm0", "block/7:0"] {
        let injector = Injector::new(Fails::Path(path.into()), Errno::IO, false);
        let reverted = lab.revert(&injector).unwrap().unwrap();
        assert!(!reverted.done && matches!(reverted.outcomes[0].fate, Fate::Failed { .. }), "{reverted:?}");
        assert!(reverted.summary().starts_with("not put back:"), "{}", reverted.summary());
        assert_eq!(lab.kernel.get(file), "7:0 50\n");
        let knobs = lab.with(&injector, |machine| status(&lab.case.state, machine)).unwrap().unwrap().knobs;
        assert!(matches!(knobs[0].state, KnobState::Unknown { .. }), "{knobs:?}");
    }
    assert!(lab.revert(&none()).unwrap().unwrap().done);
    assert_same(&before, &lab.snapshot(), "put back");
}

/// Without the boot id it is not known whether the names are still those of the same devices.
#[test]
fn without_a_boot_id_nothing_is_applied_or_put_back() {
    let lab = Lab::new(false, "none", plan(&[(Knob::HostElevator, "bfq")]), &[]);
    let untouched = lab.snapshot();
    for errno in [Errno::IO, Errno::NOENT] {
        let unreadable = Injector::new(Fails::Path("random/boot_id".into()), errno, false);
        let error = lab.apply(&unreadable).unwrap_err().to_string();
        assert!(error.contains("boot_id") && error.contains("is /proc mounted?"), "{error}");
        assert!(!lab.has_journal());
        lab.apply(&none()).unwrap();
        let applied = lab.snapshot();
        assert!(lab.revert(&unreadable).is_err() && lab.has_journal());
        assert_same(&applied, &lab.snapshot(), "not put back");
        assert!(lab.with(&unreadable, |machine| status(&lab.case.state, machine)).is_err());
        assert!(lab.revert(&none()).unwrap().unwrap().done);
    }
    assert_same(&untouched, &lab.snapshot(), "put back");
    assert!(lab.kernel.get(SCHEDULER).contains("[none]"));
}

/// A guest whose agent breaks off may be running; one whose socket has no listener has ended.
#[test]
fn a_guest_that_breaks_off_is_not_gone() {
    let settings = [(Knob::GuestElevator { vm: "vm0".into() }, "bfq")];
    let lab = Lab::new(false, "none", plan(&settings), &[]);
    let before = lab.snapshot();
    lab.apply(&none()).unwrap();
    for errno in [Errno::CONNRESET, Errno::PIPE, Errno::CONNREFUSED, Errno::NXIO, Errno::TIMEDOUT] {
        let reverted =
            lab.revert(&Injector::new(Fails::Path("queue/scheduler".into()), errno, false)).unwrap().unwrap();
        assert!(!reverted.done && matches!(reverted.outcomes[0].fate, Fate::Failed { .. }), "{reverted:?}");
    }
    for errno in [Errno::CONNRESET, Errno::PIPE, Errno::AGAIN, Errno::ACCESS] {
        let reverted =
            lab.revert(&Injector::new(Fails::Path("vm0.sock".into()), errno, false)).unwrap().unwrap();
        assert!(!reverted.done && matches!(reverted.outcomes[0].fate, Fate::Failed { .. }), "{reverted:?}");
    }
    assert!(lab.revert(&none()).unwrap().unwrap().done);
    assert_same(&before, &lab.snapshot(), "put back");
    lab.apply(&none()).unwrap();
    let refused = Injector::new(Fails::Path("vm0.sock".into()), Errno::CONNREFUSED, false);
    let reverted = lab.revert(&refused).unwrap().unwrap();
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
    let lab = Lab::new(false, "none", plan(&settings), &[]);
    let before = lab.snapshot();
    lab.apply(&none()).unwrap();
    let silent = Injector::new(Fails::Path("vm0.sock".into()), Errno::TIMEDOUT, false);
    let knobs = lab.with(&silent, |machine| status(&lab.case.state, machine)).unwrap().unwrap().knobs;
    let unknown = knobs.iter().filter(|knob| matches!(knob.state, KnobState::Unknown { .. }));
    assert_eq!((unknown.count(), silent.hits()), (3, 1), "{knobs:?}");
    let reverted = lab.revert(&silent).unwrap().unwrap();
    assert!(!reverted.done && silent.hits() == 2, "{} waits: {}", silent.hits(), reverted.summary());
    let deaf = Injector::new(Fails::Path("scheduler".into()), Errno::TIMEDOUT, false);
    let knobs = lab.with(&deaf, |machine| status(&lab.case.state, machine)).unwrap().unwrap().knobs;
    let unknown = knobs.iter().filter(|knob| matches!(knob.state, KnobState::Unknown { .. }));
    assert_eq!((unknown.count(), deaf.hits()), (3, 1), "its agent is there, and does not read: {knobs:?}");
    // The next one asks again.
    assert!(lab.revert(&none()).unwrap().unwrap().done);
    assert_same(&before, &lab.snapshot(), "put back");
}

#[test]
fn a_systemd_that_does_not_answer_is_waited_for_once() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let root = Root::new(dir.path());
    fs::create_dir_all(root.at("/run/systemd/system")).unwrap();
    let silent = Injector::new(Fails::From(1), Errno::TIMEDOUT, false);
    let host = FailingHost(&root, silent.clone());
    let cap = |unit: &str| {
        let file = format!("/sys/fs/cgroup/{unit}/cpu.max");
        Write::new(unit, Target::host(file, Form::Plain), "5000 10000")
    };
    let machine = Machine::with_host(&root, &host, &NoGuests);
    let lost = unkept(&[cap("a.scope"), cap("b.scope")], &machine).unwrap();
    assert_eq!((lost.len(), silent.hits()), (2, 1), "{lost:?}");
}
