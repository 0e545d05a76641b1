//! Damage by one VM, and its effects on it and the others.

use std::fs::OpenOptions;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::mpsc::channel;

use rtvirtio_apply::{Machine, NoGuests, Session, Silent, Target, Write};
use rtvirtio_kernel::sched::{self, Attr};
use rtvirtio_kernel::{Root, task};
use rtvirtio_urgency::page::Memory as _;

use super::*;

/// Changes of a VM to its own page end no poll of the others'.
#[test]
fn a_page_that_is_cut_off_reports_nothing() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let (path, state) = (dir.path().join("page"), dir.path().join("state"));
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
    file.set_len(LEAST_SIZE as u64).unwrap();
    let lock = file.try_clone().unwrap();
    let page = Page { file: file.try_clone().unwrap(), path, size: LEAST_SIZE, lock, doorbell: None };
    let none = || -> Result<Qmp, UrgencyError> {
        Err(UrgencyError::NoMonitor { vm: "plc".to_owned(), why: "a test".to_owned() })
    };
    let config = Config::new(90, 0, 97);
    let mut vm = ServedVm::new("plc", std::process::id(), config, page, Box::new(none)).unwrap();
    drop(rtvirtio_apply::Session::open(&state).unwrap());
    let levels = Levels::open(&state).unwrap();
    // The guest reports in the page.
    FileMemory::new(file.try_clone().unwrap(), 0).write(32, &1u32.to_le_bytes()).unwrap();
    vm.poll(&levels, Nanos(1));
    assert_eq!((vm.mode, vm.refused.is_some()), (Mode::Region, false));
    file.set_len(0).unwrap();
    assert!(vm.poll(&levels, Nanos(2)).is_none());
    assert_eq!(vm.mode, Mode::Off);
    assert!(vm.refused.as_ref().is_some_and(|why| why.contains("cannot be read")));
    // As before, the page is followed again.
    file.set_len(LEAST_SIZE as u64).unwrap();
    FileMemory::new(file, 0).write(32, &1u32.to_le_bytes()).unwrap();
    vm.poll(&levels, Nanos(3));
    assert_eq!((vm.mode, vm.refused.is_some()), (Mode::Region, false));
}

fn contract() -> Attr {
    Attr::fifo(5)
}

/// Sleeping process whose contract is FIFO 5 and whose levels are 7 and ordinary, in force in this
/// state directory, at a level left by an earlier process; `None` where that is not possible.
fn left_at(level: &Attr, state: &Path, test: &str) -> Option<rtvirtio_testkit::ChildGuard> {
    if !rtvirtio_testkit::has(test, &[rtvirtio_testkit::Need::Root]) {
        return None;
    }
    let sleeper =
        rtvirtio_testkit::ChildGuard(std::process::Command::new("sleep").arg("1000").spawn().unwrap());
    let pid = sleeper.0.id();
    let floor = Attr::other(0);
    if let Err(e) = sched::set(pid, &contract()) {
        rtvirtio_testkit::skip(test, &format!("no real-time priority here: {e}"));
        return None;
    }
    sched::set(pid, &floor).unwrap();
    let root = Root::default();
    let start = task::stat(&root, pid, pid).unwrap().start;
    let target = Target::scheduling(pid, pid, start);
    let levels = vec![Attr::fifo(7).to_string(), floor.to_string()];
    let text = contract().to_string();
    let write = Write { levels, ..Write::new("policy of vcpu 0 (plc)", target, text.as_str()) };
    let session = Session::open(state).unwrap();
    session.apply(&[write], &Machine::new(&root, &NoGuests), &mut Silent).unwrap();
    drop(session);
    sched::set(pid, level).unwrap();
    Some(sleeper)
}

/// A VM's QEMU that does not answer affects no others, and leaves no vCPU of its own at a level
/// that a killed process gave it.
#[test]
fn a_monitor_that_does_not_answer_leaves_its_vcpus_at_their_contract() {
    let test = "a_monitor_that_does_not_answer_leaves_its_vcpus_at_their_contract";
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let state = dir.path().join("state");
    let Some(sleeper) = left_at(&Attr::fifo(7), &state, test) else { return };
    let pid = sleeper.0.id();
    let asked = Arc::new(AtomicUsize::new(0));
    let asking = asked.clone();
    let none = move || -> Result<Qmp, UrgencyError> {
        asking.fetch_add(1, Relaxed);
        Err(UrgencyError::NoMonitor { vm: "plc".to_owned(), why: "a test".to_owned() })
    };
    let mut vm = ServedVm::without_reports("plc", pid, Config::new(90, 0, 97), Box::new(none)).unwrap();
    let mut levels = Levels::open(&state).unwrap();
    let stop = AtomicBool::new(false);
    let mut refused = None;
    let mut report = |all: &[VmStatus]| {
        refused.clone_from(&all[0].refused);
        let is_set = sched::get(pid).unwrap().is(&contract());
        stop.store(asked.load(Relaxed) > 1 && is_set && refused.is_some(), Relaxed);
    };
    let ended = crate::serve(std::slice::from_mut(&mut vm), &mut levels, &stop, &mut report).unwrap();
    assert_eq!(ended, crate::Ended::Stopped);
    assert!(refused.is_some_and(|why| why.contains("not all of its vCPUs are known")));
    assert!(!vm.has_ended(), "its thread is there");

    drop(sleeper);
    let ended =
        crate::serve(std::slice::from_mut(&mut vm), &mut levels, &AtomicBool::new(false), &mut |_| {});
    assert_eq!(ended.unwrap(), crate::Ended::VmsEnded);
    assert_eq!(vm.status().refused, None);
}

/// While QEMU does not answer, everything else goes on, the end included.
#[test]
fn a_monitor_that_hangs_holds_up_nothing() {
    let test = "a_monitor_that_hangs_holds_up_nothing";
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let state = dir.path().join("state");
    let Some(sleeper) = left_at(&Attr::other(0), &state, test) else { return };
    let (release, released) = channel::<()>();
    let hanging = move || -> Result<Qmp, UrgencyError> {
        // Until the test is over.
        let _ = released.recv_timeout(rtvirtio_testkit::HANG);
        Err(UrgencyError::NoMonitor { vm: "plc".to_owned(), why: "a test".to_owned() })
    };
    let config = Config::new(90, 0, 97);
    let mut vm = ServedVm::without_reports("plc", sleeper.0.id(), config, Box::new(hanging)).unwrap();
    let mut levels = Levels::open(&state).unwrap();
    let stop = AtomicBool::new(false);
    let mut reports = 0;
    let mut report = |_: &[VmStatus]| {
        reports += 1;
        stop.store(reports > 1, Relaxed);
    };
    let ended = crate::serve(std::slice::from_mut(&mut vm), &mut levels, &stop, &mut report).unwrap();
    assert_eq!((ended, reports), (crate::Ended::Stopped, 2));
    assert!(vm.monitor.vcpus().is_none() && !vm.has_ended());
    // A thread that was left at the floor does not stay there.
    assert!(sched::get(sleeper.0.id()).unwrap().is(&contract()));
    drop(release);
}

/// A journal that another VM's settings were added to shortly before the end is still ours.
#[test]
fn vcpus_are_settled_by_a_journal_that_was_amended_since() {
    let test = "vcpus_are_settled_by_a_journal_that_was_amended_since";
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let state = dir.path().join("state");
    let Some(sleeper) = left_at(&Attr::fifo(7), &state, test) else { return };
    let none = || -> Result<Qmp, UrgencyError> {
        Err(UrgencyError::NoMonitor { vm: "plc".to_owned(), why: "a test".to_owned() })
    };
    let pid = sleeper.0.id();
    let mut vm = ServedVm::without_reports("plc", pid, Config::new(90, 0, 97), Box::new(none)).unwrap();
    let mut levels = Levels::open(&state).unwrap();
    let by = levels.applied_by();
    let other =
        rtvirtio_testkit::ChildGuard(std::process::Command::new("sleep").arg("1000").spawn().unwrap());
    let (root, id) = (Root::default(), other.0.id());
    let target = Target::scheduling(id, id, task::stat(&root, id, id).unwrap().start);
    let write = Write::new("policy of vcpu 0 (other)", target, contract().to_string().as_str());
    let session = Session::open(&state).unwrap();
    session.amend(&[write], &Machine::new(&root, &NoGuests), &mut Silent).unwrap();
    drop(session);
    sched::set(pid, &Attr::fifo(7)).unwrap();
    assert!(matches!(levels.hold().unwrap(), Hold::Changed));
    vm.settle(&mut levels, by).unwrap();
    assert!(sched::get(pid).unwrap().is(&contract()));
}
