use std::fs;

use rtvirtio_kernel::{Level, ProcessId};
use rtvirtio_measure::fio::Region;
use rtvirtio_units::Bytes;

use super::*;
use crate::inventory::{ListedGuest, ListedVm};

const CPU: &str = "/sys/fs/cgroup/cpu";

struct Host {
    dir: tempfile::TempDir,
    root: Root,
}

impl Host {
    fn new() -> Self {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let host = Self { root: Root::new(dir.path()), dir };
        host.put("/proc/self/mountinfo", "38 31 0:35 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n");
        fs::create_dir_all(host.root.at(CPU)).unwrap();
        host
    }

    fn put(&self, path: &str, text: &str) {
        crate::fixtures::put(&self.root, path, text);
    }

    /// The state and run directories are the host's own, below the same directory.
    fn dirs(&self) -> Dirs {
        Dirs { state: self.dir.path().join("state"), run: self.dir.path().join("run") }
    }

    fn ids(&self) -> Vec<String> {
        findings(&self.root, &self.dirs()).into_iter().map(|f| f.id).collect()
    }
}

#[test]
fn groups_of_dead_processes_are_named_with_their_remedy() {
    let host = Host::new();
    // A clean host has none.
    let found = findings(&host.root, &host.dirs());
    assert_eq!((found.len(), found[0].id.as_str(), found[0].level), (1, "leftovers", Level::Ok), "{found:?}");
    host.put(&format!("{CPU}/rtvirtio-learn-4000001-5/cgroup.procs"), "");
    host.put(&format!("{CPU}/rtvirtio-web/cgroup.procs"), "");
    host.put(&format!("{CPU}/rtvirtio-bench-4000001-5-fair-a/cgroup.procs"), "");
    let found = findings(&host.root, &host.dirs());
    assert_eq!(found.len(), 2, "what bears no mark may be in force: {found:?}");
    let (lab, found): (Vec<_>, Vec<_>) = found.into_iter().partition(|f| f.what.contains("bench"));
    assert!(lab[0].remedy.contains("rtvirtio-lab down"), "{lab:?}");
    assert!(found[0].what.contains("rtvirtio-learn-4000001-5: process 4000001 is gone"), "{found:?}");
    assert!(found[0].remedy.contains("rtvirtio revert"), "{found:?}");
}

#[test]
fn a_contract_without_a_journal_is_left_and_kept_while_a_vm_runs_in_it() {
    let host = Host::new();
    let group = Path::new(CPU).join("rtvirtio-web");
    host.put(&format!("{CPU}/rtvirtio-web/cgroup.procs"), "77\n");
    host.put("/state/journal.json", "");
    if leftovers::mark(&host.root, &group, Path::new("/state/journal.json")).is_err() {
        let test = "a_contract_without_a_journal_is_left_and_kept_while_a_vm_runs_in_it";
        return rtvirtio_testkit::skip(test, "needs root");
    }
    let left = |host: &Host| left(&host.root, leftovers::groups(&host.root).unwrap()).unwrap();
    assert!(left(&host).is_empty() && remove_contracts(&host.root).unwrap().is_empty(), "a journal knows it");
    fs::remove_file(host.root.at("/state/journal.json")).unwrap();
    let found = of_group(&left(&host)[0]);
    assert!(found.remedy.contains("end process 77"), "{found:?}");
    assert!(remove_contracts(&host.root).unwrap().is_empty(), "a VM runs in it");
    host.put(&format!("{CPU}/rtvirtio-web/cgroup.procs"), "");
    assert!(of_group(&left(&host)[0]).remedy.starts_with("`rtvirtio revert`"));
}

#[test]
fn labs_whose_parts_are_gone_are_named() {
    let host = Host::new();
    let dirs = host.dirs();
    host.put("/run/lab.json", "{}");
    assert_eq!(host.ids(), [LAB], "it did not come up");
    let mut list = Inventory::new("a.toml", "", Path::new("/dev/loop7"));
    let gone = ProcessId { pid: 4_000_001, start_time: 1 };
    list.vms.push(ListedVm {
        name: "plant".to_owned(),
        cgroup: "/x".into(),
        guest: Some(ListedGuest {
            process: gone.clone(),
            qmp: "/q".into(),
            agent: "/a".into(),
            disk: "/d".into(),
        }),
        region: Region { offset: Bytes(0), size: Bytes(1) },
    });
    list.domain = Some(gone);
    list.save(&dirs.run).unwrap();
    let found = findings(&host.root, &dirs);
    let what = &found[0].what;
    assert_eq!(found.len(), 1, "{found:?}");
    for part in ["QEMU of plant (process 4000001) has ended", "its I/O domain", "/dev/loop7 is gone"] {
        assert!(what.contains(part), "{what}");
    }
    assert!(found[0].remedy.contains("rtvirtio-lab down"));
    // All there again.
    list.vms.clear();
    list.domain = None;
    list.save(&dirs.run).unwrap();
    host.put("/sys/block/loop7/size", "1\n");
    host.put("/sys/block/loop7/loop/backing_file", "/x\n");
    assert_eq!(host.ids(), ["leftovers"]);
    // One that a command made for itself, and was killed.
    host.put("/run/bench/lab.json", r#"{"cgroups": ["/rtvirtio-lab-4000001", "/rtvirtio-lab-4000001/vm0"]}"#);
    assert_eq!(host.ids(), [LAB]);
}

#[test]
fn twins_of_dead_labs_are_named_with_their_loops() {
    let host = Host::new();
    host.put(
        "/proc/self/mountinfo",
        "50 31 0:50 / /run/a/twin rw - fuse rtvirtio-twin rw\n51 31 0:51 / /run/b/twin rw - fuse rtvirtio-twin rw\n",
    );
    host.put("/run/b/lab.json", "{}");
    host.put("/sys/block/loop3/loop/backing_file", "/run/a/twin/disk\n");
    let found: Vec<_> = findings(&host.root, &host.dirs()).into_iter().filter(|f| f.id == TWINS).collect();
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].what.contains("/run/a/twin with /dev/loop3"), "{found:?}");
}

#[test]
fn a_journal_of_another_boot_is_named() {
    let host = Host::new();
    host.put("/proc/sys/kernel/random/boot_id", "one\n");
    host.put("/sys/block/sda/queue/iosched/x", "1\n");
    let machine = Machine::new(&host.root, &NoGuests);
    let target = rtvirtio_apply::Target::host("/sys/block/sda/queue/iosched/x", rtvirtio_apply::Form::Plain);
    let write = rtvirtio_apply::Write::new("x".to_owned(), target, "2");
    let session = rtvirtio_apply::Session::open(host.dirs().state).unwrap();
    session.apply(&[write], &machine, &mut rtvirtio_apply::Silent).unwrap();
    assert_eq!(host.ids(), ["leftovers"], "it is in force");
    host.put("/proc/sys/kernel/random/boot_id", "two\n");
    let found = findings(&host.root, &host.dirs());
    assert_eq!((found.len(), found[0].id.as_str()), (1, JOURNAL), "{found:?}");
    assert!(found[0].what.contains("of another boot") && found[0].remedy.contains("rtvirtio revert"));
}
