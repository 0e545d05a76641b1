//! A page that its VM spoils.

use std::fs::OpenOptions;

use rtvirtio_urgency::page::Memory as _;

use super::*;

/// What a VM does to its own page ends no look at the others'.
#[test]
fn a_page_that_is_cut_off_reports_nothing() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let (path, state) = (dir.path().join("page"), dir.path().join("state"));
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
    file.set_len(LEAST_SIZE as u64).unwrap();
    let page = Page { file: file.try_clone().unwrap(), path, size: LEAST_SIZE, doorbell: None };
    let none = || -> Result<Qmp, UrgencyError> {
        Err(UrgencyError::NoMonitor { vm: "plc".to_owned(), why: "a test".to_owned() })
    };
    let config = Config::new(90, 0, 97);
    let mut vm = ServedVm::new("plc", std::process::id(), config, page, Box::new(none)).unwrap();
    drop(rtvirtio_apply::Session::open(&state).unwrap());
    let levels = Levels::open(&state).unwrap();
    // The guest reports in the region.
    FileMemory::new(file.try_clone().unwrap(), 0).write(32, &1u32.to_le_bytes()).unwrap();
    vm.look(&levels, Nanos(1)).unwrap();
    assert_eq!((vm.mode, vm.refused.is_some()), (Mode::Region, false));
    file.set_len(0).unwrap();
    assert!(matches!(vm.look(&levels, Nanos(2)), Ok(None)));
    assert_eq!(vm.mode, Mode::Off);
    assert!(vm.refused.as_ref().is_some_and(|why| why.contains("cannot be read")));
    // As it was, it is followed again.
    file.set_len(LEAST_SIZE as u64).unwrap();
    FileMemory::new(file, 0).write(32, &1u32.to_le_bytes()).unwrap();
    vm.look(&levels, Nanos(3)).unwrap();
    assert_eq!((vm.mode, vm.refused.is_some()), (Mode::Region, false));
}
