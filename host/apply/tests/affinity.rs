//! CPUs of threads of this machine: set, read back, told from another program's, and put back.

use std::process::{Command, Stdio};

use rtvirtio_apply::{KnobState, Machine, NoGuests, OnConflict, Session, Silent, Target, Write, status};
use rtvirtio_kernel::{Root, task, text};
use rtvirtio_testkit::{ChildGuard, Need, has};

fn sleeper() -> ChildGuard {
    ChildGuard(Command::new("sleep").arg("1000").stdin(Stdio::null()).spawn().unwrap())
}

fn cpus(child: &ChildGuard) -> String {
    task::affinity(&Root::default(), child.id(), child.id()).unwrap()
}

fn write(child: &ChildGuard, cpus: &str) -> Write {
    let start = task::stat(&Root::default(), child.id(), child.id()).unwrap().start;
    Write::new("CPUs of vcpu 0 (plc)", Target::affinity(child.id(), child.id(), start), cpus)
}

#[test]
fn cpus_of_threads_are_set_and_put_back() {
    const NAME: &str = "cpus_of_threads_are_set_and_put_back";
    let (a, b, gone) = (sleeper(), sleeper(), sleeper());
    let before = cpus(&a);
    let all = text::cpu_list(&before).unwrap();
    if !has(NAME, &[Need::Root]) {
        return;
    }
    let [first, last] = [all.first(), all.last()].map(|cpu| cpu.unwrap().to_string());
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let (state, root) = (dir.path().join("state"), Root::default());
    let machine = Machine::new(&root, &NoGuests);
    let session = Session::open(&state).unwrap();
    session
        .apply(&[write(&a, &last), write(&b, &first), write(&gone, &last)], &machine, &mut Silent)
        .unwrap();
    assert_eq!([&a, &b, &gone].map(cpus), [last.clone(), first, last]);
    let states = || status(&state, &machine).unwrap().unwrap().knobs.into_iter().map(|knob| knob.state);
    assert!(states().all(|state| state == KnobState::InForce));

    // What another program has put back, and a thread that has ended, need nothing.
    drop(gone);
    task::set_affinity(b.id(), &all).unwrap();
    let reverted = session.revert(OnConflict::Report, &machine, &mut Silent).unwrap().unwrap();
    assert!(reverted.done, "{}", reverted.summary());
    assert_eq!([&a, &b].map(cpus), [before.clone(), before]);
}

#[test]
fn cpus_that_do_not_exist_are_refused_and_the_others_put_back() {
    const NAME: &str = "cpus_that_do_not_exist_are_refused_and_the_others_put_back";
    if !has(NAME, &[Need::Root]) {
        return;
    }
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let root = Root::default();
    let machine = Machine::new(&root, &NoGuests);
    let (a, b) = (sleeper(), sleeper());
    let before = cpus(&a);
    let last = text::cpu_list(&before).unwrap().last().unwrap().to_string();
    // Beyond the set that the system call takes, empty, and no list.
    for bad in ["1023", "8191", "", "x"] {
        let session = Session::open(dir.path().join("state")).unwrap();
        session.apply(&[write(&a, &last), write(&b, bad)], &machine, &mut Silent).unwrap_err();
        assert_eq!([&a, &b].map(cpus), [before.clone(), before.clone()], "{bad}");
    }
}
