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

/// A process with one more thread, which was started while the first one had a CPU of ours.
#[test]
fn threads_that_inherited_cpus_of_ours_get_those_from_before() {
    const NAME: &str = "threads_that_inherited_cpus_of_ours_get_those_from_before";
    if !has(NAME, &[Need::Root]) {
        return;
    }
    let (root, pid) = (Root::default(), std::process::id());
    let of = |tid: u32| task::affinity(&root, pid, tid).unwrap();
    let target = |tid: u32| Target::affinity(pid, tid, task::stat(&root, pid, tid).unwrap().start);
    let (tell, told) = std::sync::mpsc::channel();
    let (end, ended) = std::sync::mpsc::channel::<()>();
    let (start, started) = std::sync::mpsc::channel::<()>();
    // A thread of this test starts others when it is told to, and all live until the end.
    let parent = std::thread::spawn(move || {
        let tid = || u32::try_from(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
        tell.send(tid()).unwrap();
        let mut heirs = Vec::new();
        while started.recv().is_ok() {
            let (tell, (keep, kept)) = (tell.clone(), std::sync::mpsc::channel::<()>());
            let heir = std::thread::spawn(move || {
                tell.send(tid()).unwrap();
                let _ = kept.recv();
            });
            heirs.push((keep, heir));
        }
        let _ = ended.recv();
    });
    let parent_tid = told.recv().unwrap();
    let before = of(parent_tid);
    let last = text::cpu_list(&before).unwrap().last().unwrap().to_string();
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let machine = Machine::new(&root, &NoGuests);
    let session = Session::open(dir.path().join("state")).unwrap();
    let of_parent = Write::new("CPUs of iothread (plc)", target(parent_tid), &last);
    let heir = || {
        start.send(()).unwrap();
        told.recv().unwrap()
    };
    // Of the I/O domain only the threads in the journal are ours.
    let domain = Root::new(dir.path());
    let process = domain.at(format!("/proc/{pid}"));
    std::fs::create_dir_all(&process).unwrap();
    std::fs::write(process.join("status"), "Uid:\t0\t0\t0\t0\n").unwrap();
    std::os::unix::fs::symlink("/usr/bin/rtvirtio-iod", process.join("exe")).unwrap();
    session.apply(std::slice::from_ref(&of_parent), &machine, &mut Silent).unwrap();
    let foreign = heir();
    let of_domain = Machine::with_host(&domain, &root, &NoGuests);
    assert!(session.revert(OnConflict::Report, &of_domain, &mut Silent).unwrap().unwrap().done);
    assert_eq!([parent_tid, foreign].map(of), [before.clone(), last.clone()]);
    // A process that gives itself that name is not the I/O domain.
    let comm = format!("/proc/{pid}/comm");
    let name = std::fs::read_to_string(&comm).unwrap();
    std::fs::write(&comm, "rtvirtio-iod").unwrap();
    session.apply(&[of_parent], &machine, &mut Silent).unwrap();
    let (unseen, amended) = (heir(), heir());
    assert_eq!([unseen, amended].map(of), [last.clone(), last.clone()]);
    // One is added to the journal with the value that it inherited; one stays unknown.
    let write = Write::new("CPUs of worker (plc)", target(amended), &last);
    session.amend(&[write], &machine, &mut Silent).unwrap();
    let reverted = session.revert(OnConflict::Report, &machine, &mut Silent).unwrap().unwrap();
    assert!(reverted.done, "{}", reverted.summary());
    assert_eq!([parent_tid, unseen, amended].map(of), [before.clone(), before.clone(), before]);
    std::fs::write(&comm, name.trim()).unwrap();
    drop((start, end));
    parent.join().unwrap();
}
