use std::cell::RefCell;
use std::collections::BTreeSet;
use std::os::unix::net::UnixListener;

use rtvirtio_testkit::site::wait_for;

use super::super::search::tests::{serve, vm};
use super::*;
use crate::contracts::cores_tests::{auto, in_force, one, placed};

#[test]
fn a_vm_whose_first_look_up_fails_is_looked_for_again_and_said_not_to_be_kept() {
    let (dir, dirs) = crate::fixtures::dirs();
    let socket = dir.path().join("qmp");
    let spec = vm("plc", &socket);
    let (mut search, mut sought) = (Search::new(&dirs), Sought::default());
    sought.add(in_force(&one("plc", 10, auto()), placed(&[4])), &spec);
    let lines = RefCell::new(Vec::new());
    let warn = |line: &str| lines.borrow_mut().push(line.to_owned());
    // A monitor that hangs up, as of a QEMU that is being attached to.
    let listener = UnixListener::bind(&socket).unwrap();
    let hangs_up = std::thread::spawn(move || drop(listener.accept().unwrap()));
    let begin = Instant::now();
    wait_for("the first look", || {
        assert!(sought.poll(&mut search, begin, &warn).is_empty());
        !lines.borrow().is_empty()
    });
    hangs_up.join().unwrap();
    let said = lines.borrow().join("\n");
    assert!(said.starts_with("the contract of plc is not kept until it is found: "), "{said}");
    assert!(!sought.is_searching(begin), "it is looked for after a pause");
    // It may run: nothing ends, however long it takes.
    let later = begin + 10 * ABSENT_FOR;
    assert!(!sought.has_ended(later));
    std::fs::remove_file(&socket).unwrap();
    serve(&socket);
    assert!(sought.is_searching(later));
    let mut found = Vec::new();
    wait_for("the second look", || {
        found.extend(sought.poll(&mut search, later, &warn));
        !found.is_empty()
    });
    let (of, _, handle) = &found[0];
    assert_eq!((of.vm.as_str(), &handle.pids), ("plc", &BTreeSet::from([std::process::id()])));
    assert!(sought.has_ended(later) && !sought.any(|_| true), "nothing is left to be looked for");
    assert_eq!(lines.borrow().len(), 1);
}

#[test]
fn only_vms_that_are_seen_not_to_run_for_a_while_end_the_search() {
    let spec = vm("plc", std::path::Path::new("/nowhere"));
    let mut sought = Sought::default();
    sought.add(in_force(&one("plc", 10, auto()), placed(&[4])), &spec);
    let begin = Instant::now();
    let mut take = |e: Error, now| assert!(sought.take("plc", Err(e), now, &|_| {}).is_none());
    let off = || Error::new(Kind::NotRunning, "it does not run");
    take(off(), begin);
    take(Error::from(std::io::Error::other("busy")), begin + ABSENT_FOR / 2);
    take(off(), begin + ABSENT_FOR);
    assert!(!sought.has_ended(begin + ABSENT_FOR), "it may have run in between");
    assert!(sought.has_ended(begin + 2 * ABSENT_FOR));
}
