//! Threads that a program moves among journaled levels: which values count as in force, when a
//! program may move them, and that revert puts them back from any level.

use std::process::{Command, Stdio};

use rtvirtio_apply::{
    Hold, KnobState, Levels, Machine, NoGuests, OnConflict, Session, Silent, Target, Write, status,
};
use rtvirtio_kernel::sched::{self, Attr};
use rtvirtio_kernel::{Root, task};
use rtvirtio_testkit::{ChildGuard, Need, has};

/// Child process that sleeps.
struct Sleeper(ChildGuard);

impl Sleeper {
    fn start() -> Self {
        Self(ChildGuard(Command::new("sleep").arg("1000").stdin(Stdio::null()).spawn().unwrap()))
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }

    fn target(&self) -> Target {
        let start = task::stat(&Root::default(), self.pid(), self.pid()).unwrap().start;
        Target::scheduling(self.pid(), self.pid(), start)
    }
}

fn attr(text: &str) -> Attr {
    text.parse().unwrap()
}

/// Fair policies other than the default one need no budget of a real-time group.
fn write(sleeper: &Sleeper) -> Write {
    let levels = ["batch nice 3", "batch nice 5", "other nice 0"].map(str::to_owned).to_vec();
    Write { levels, ..Write::new("policy of vcpu 0 (plc)", sleeper.target(), "batch nice 1") }
}

/// Result of [`Levels::hold`] once no other test's child has the lock: a child inherits it between
/// fork and exec.
fn hold(levels: &Levels) -> Hold<'_> {
    for _ in 0..1000 {
        match levels.hold().unwrap() {
            Hold::Busy => std::thread::sleep(std::time::Duration::from_millis(5)),
            other => return other,
        }
    }
    Hold::Busy
}

#[test]
fn levels_are_in_force_and_put_back() {
    if !has("levels_are_in_force_and_put_back", &[Need::Root]) {
        return;
    }
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let state = dir.path().join("state");
    let root = Root::default();
    let machine = Machine::new(&root, &NoGuests);
    let (sleeper, other) = (Sleeper::start(), Sleeper::start());
    let before = sched::get(sleeper.pid()).unwrap();

    let session = Session::open(&state).unwrap();
    let mut levels = Levels::of_session(&session).unwrap();
    assert!(levels.movable().is_empty() && levels.applied_by().is_none());
    assert!(matches!(hold(&levels), Hold::Changed), "nothing is in force");
    let plain = Write::new("policy of other (plc)", other.target(), "batch nice 2");
    session.apply(&[write(&sleeper), plain], &machine, &mut Silent).unwrap();
    levels.reload().unwrap();
    assert_eq!(levels.movable().len(), 1, "only threads with levels");
    drop(session);

    // Without the session's lock each change takes it.
    let mut levels = Levels::open(&state).unwrap();
    let movable = levels.movable()[0].clone();
    assert_eq!(levels.applied_by(), Some(std::process::id()));
    for level in ["batch nice 3", "batch nice 5", "other nice 0", "batch nice 1"] {
        let Hold::Free(guard) = hold(&levels) else { panic!("not free") };
        guard.set(&movable, &attr(level)).unwrap();
        drop(guard);
        assert!(sched::get(sleeper.pid()).unwrap().is(&attr(level)));
        let status = status(&state, &machine).unwrap().unwrap();
        assert_eq!(status.knobs[0].state, KnobState::InForce, "{level}");
    }
    let Hold::Free(guard) = hold(&levels) else { panic!("not free") };
    let error = guard.set(&movable, &attr("fifo 99")).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied);
    guard.set(&movable, &attr("batch nice 3")).unwrap();
    // A revert waits for the guard, and a program that moves finds a revert at work.
    drop(guard);
    let session = Session::open(&state).unwrap();
    assert!(matches!(levels.hold().unwrap(), Hold::Busy));

    // The thread is left at a level by a program that is gone.
    let reverted = session.revert(OnConflict::Report, &machine, &mut Silent).unwrap().unwrap();
    assert!(reverted.done, "{}", reverted.summary());
    assert!(sched::get(sleeper.pid()).unwrap().is(&before));
    drop(session);
    assert!(matches!(hold(&levels), Hold::Changed), "the journal has gone");
    levels.reload().unwrap();
    assert!(levels.movable().is_empty() && matches!(hold(&levels), Hold::Changed));
}

#[test]
fn a_value_outside_of_the_levels_is_another_programs() {
    if !has("a_value_outside_of_the_levels_is_another_programs", &[Need::Root]) {
        return;
    }
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let root = Root::default();
    let machine = Machine::new(&root, &NoGuests);
    let sleeper = Sleeper::start();
    let session = Session::open(dir.path().join("state")).unwrap();
    session.apply(&[write(&sleeper)], &machine, &mut Silent).unwrap();
    sched::set(sleeper.pid(), &attr("other nice 7")).unwrap();
    let reverted = session.revert(OnConflict::Report, &machine, &mut Silent).unwrap().unwrap();
    assert!(!reverted.done);
    assert!(sched::get(sleeper.pid()).unwrap().is(&attr("other nice 7")));
}

#[test]
fn an_amendment_adds_levels_to_a_thread_that_has_its_value() {
    if !has("an_amendment_adds_levels_to_a_thread_that_has_its_value", &[Need::Root]) {
        return;
    }
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let state = dir.path().join("state");
    let root = Root::default();
    let machine = Machine::new(&root, &NoGuests);
    let sleeper = Sleeper::start();
    let session = Session::open(&state).unwrap();
    let plain = Write { levels: Vec::new(), ..write(&sleeper) };
    session.apply(&[plain], &machine, &mut Silent).unwrap();
    session.amend(&[write(&sleeper)], &machine, &mut Silent).unwrap();
    assert_eq!(Levels::of_session(&session).unwrap().movable().len(), 1);
    // From a level back to the plan's value, and with one level less.
    sched::set(sleeper.pid(), &attr("batch nice 3")).unwrap();
    let fewer = Write { levels: vec!["batch nice 5".to_owned()], ..write(&sleeper) };
    let amended = session.amend(&[fewer], &machine, &mut Silent).unwrap();
    assert!(amended.left.is_empty() && amended.failed.is_empty(), "{amended:?}");
    assert!(sched::get(sleeper.pid()).unwrap().is(&attr("batch nice 1")));
    assert_eq!(Levels::of_session(&session).unwrap().movable()[0].levels, [attr("batch nice 5")]);
}

/// A weight as a file that moves: a plain file stands for the cgroup's here, the kernel's own is in
/// `bin/rtvirtio/tests/starts.rs`.
#[test]
fn a_file_moves_among_its_levels_and_is_put_back() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let (state, group) = (dir.path().join("state"), dir.path().join("group"));
    std::fs::create_dir(&group).unwrap();
    let path = group.join("weight");
    std::fs::write(&path, "50").unwrap();
    let read = || std::fs::read_to_string(&path).unwrap();
    let root = Root::default();
    let machine = Machine::new(&root, &NoGuests);
    let target = Target::host(&path, rtvirtio_apply::Form::Plain);
    let write = Write { levels: vec!["1000".to_owned()], ..Write::new("weight of vm0", target, "100") };
    Session::open(&state).unwrap().apply(&[write], &machine, &mut Silent).unwrap();
    let levels = Levels::open(&state).unwrap();
    assert!(levels.movable().is_empty(), "no thread");
    let file = levels.files()[0].clone();
    let set = |value: &str| {
        let Hold::Free(guard) = hold(&levels) else { panic!("not free") };
        guard.set_file(&file, value).map_err(|e| e.kind())
    };
    assert_eq!((set("1000"), read()), (Ok(true), "1000".to_owned()));
    assert_eq!(set("1000"), Ok(false), "it is so already");
    let status = status(&state, &machine).unwrap().unwrap();
    assert_eq!(status.knobs[0].state, KnobState::InForce);
    assert_eq!(set("999"), Err(std::io::ErrorKind::PermissionDenied), "not in the journal");
    // Another program's value is left alone, and reported.
    std::fs::write(&path, "333").unwrap();
    assert_eq!((set("100"), read()), (Err(std::io::ErrorKind::InvalidData), "333".to_owned()));
    std::fs::write(&path, "1000").unwrap();
    // The program that moved it is gone: the journal has the level as ours.
    let session = Session::open(&state).unwrap();
    let reverted = session.revert(OnConflict::Report, &machine, &mut Silent).unwrap().unwrap();
    assert!(reverted.done);
    assert_eq!(read(), "50");
    drop(session);
    assert!(matches!(hold(&levels), Hold::Changed), "nothing is in force any more");
}

/// A restarted VM has another cgroup of the same name, with a weight of its own.
#[test]
fn a_file_of_another_group_is_not_moved() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let (state, group) = (dir.path().join("state"), dir.path().join("group"));
    let path = group.join("weight");
    let make = || {
        std::fs::create_dir(&group).unwrap();
        std::fs::write(&path, "100").unwrap();
    };
    make();
    let root = Root::default();
    let machine = Machine::new(&root, &NoGuests);
    let target = Target::host(&path, rtvirtio_apply::Form::Plain);
    let write = Write { levels: vec!["1000".to_owned()], ..Write::new("weight of vm0", target, "100") };
    Session::open(&state).unwrap().apply(&[write], &machine, &mut Silent).unwrap();
    let levels = Levels::open(&state).unwrap();
    // The old directory stays, so that the new one has another inode.
    std::fs::rename(&group, dir.path().join("old")).unwrap();
    make();
    let Hold::Free(guard) = hold(&levels) else { panic!("not free") };
    let error = guard.set_file(&levels.files()[0], "1000").unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "100");
}
