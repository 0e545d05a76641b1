//! What dead processes left is named by `check` and removed by `revert`; what is known is left
//! alone.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use rtvirtio_kernel::{Root, leftovers};
use rtvirtio_testkit::site::Site;
use rtvirtio_testkit::{ChildGuard, Machine, Need, has, vm_spec};

/// What one test leaves the other one's `revert` removes.
static ONE: Mutex<()> = Mutex::new(());

/// A cgroup of a contract as `apply` makes it.
struct Group(PathBuf);

impl Group {
    fn new(site: &Site, journal: &Path) -> Self {
        let dir = Path::new("/sys/fs/cgroup/cpu").join(format!("rtvirtio-{}", site.vm("left")));
        fs::create_dir(&dir).unwrap();
        leftovers::mark(&Root::default(), &dir, journal).unwrap();
        Self(dir)
    }

    fn is_named(&self, site: &Site) -> bool {
        let (_, found) = site.json(&["check"]);
        let found = found.as_array().unwrap().iter().filter(|f| f["id"] == "leftovers.cgroups");
        let name = self.0.file_name().unwrap().to_str().unwrap();
        found.filter(|f| f["what"].as_str().unwrap().contains(name)).count() == 1
    }
}

#[test]
fn a_contracts_cgroup_without_its_journal_is_named_and_removed() {
    let test = "a_contracts_cgroup_without_its_journal_is_named_and_removed";
    if !has(test, &[Need::Root, Need::RT_GROUPS]) {
        return;
    }
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let site = Site::new();
    let journal = site.dir.path().join("journal.json");
    fs::write(&journal, "{}").unwrap();
    let group = Group::new(&site, &journal);
    fs::write(group.0.join("cpu.rt_runtime_us"), "1000").unwrap();
    assert!(!group.is_named(&site), "its journal is there");
    site.ok(&["revert"]);
    assert!(group.0.exists());
    fs::remove_file(&journal).unwrap();
    assert!(group.is_named(&site));
    // Not while something runs in it.
    let mut sleep = Command::new("sleep");
    let vm = ChildGuard(sleep.arg("600").env("RTVIRTIO_RUN_DIR", site.run_dir()).spawn().unwrap());
    fs::write(group.0.join("cgroup.procs"), vm.id().to_string()).unwrap();
    site.ok(&["revert"]);
    drop(vm);
    assert!(group.0.exists());
    let (code, reverted) = site.json(&["revert"]);
    let removed = reverted["leftovers"].as_array().unwrap();
    assert!(code == 0 && removed.contains(&group.0.to_str().unwrap().into()), "{reverted}");
    assert!(!group.0.exists() && !group.is_named(&site));
}

#[test]
fn the_cgroups_of_a_dead_sweep_are_named_and_removed() {
    let test = "the_cgroups_of_a_dead_sweep_are_named_and_removed";
    let blkio = Path::new("/sys/fs/cgroup/blkio");
    if !has(test, &[Need::Root, Need::Path("/sys/fs/cgroup/blkio", "no blkio of cgroup v1")]) {
        return;
    }
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let site = Site::new();
    let mut gone = Command::new("true").spawn().unwrap();
    gone.wait().unwrap();
    let group = Group(blkio.join(format!("rtvirtio-learn-{}-1", gone.id())));
    fs::create_dir_all(group.0.join("vm0")).unwrap();
    assert!(group.is_named(&site));
    site.ok(&["revert"]);
    assert!(!group.0.exists());
}

/// The tests' own duty: a real-time budget that stays is taken from everything else on the machine.
#[test]
fn a_test_that_panics_leaves_no_budget() {
    let test = "a_test_that_panics_leaves_no_budget";
    if !has(test, &[Need::Root, Need::RT_GROUPS, Need::QEMU]) {
        return;
    }
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let mut group = PathBuf::new();
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let site = Site::new();
        let machine = Machine::start(site.dir.path(), "plc", &[]);
        let vm = site.vm("plc");
        group = Path::new("/sys/fs/cgroup/cpu").join(format!("rtvirtio-{vm}"));
        let keys = "cpu = { budget = \"4ms\", period = \"20ms\" }";
        let spec = site.write("plant.toml", &vm_spec("/dev/sdz", &vm, machine.qmp(), keys));
        site.ok(&["apply", &spec, "--cpu-only"]);
        assert_eq!(fs::read_to_string(group.join("cpu.rt_runtime_us")).unwrap(), "4000\n");
        // Its journal is lost too.
        fs::remove_dir_all(site.state_dir()).unwrap();
        panic!("as a test that fails");
    }));
    assert!(panicked.is_err() && !group.exists());
}
