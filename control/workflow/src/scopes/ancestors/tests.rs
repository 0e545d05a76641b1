use std::fs;
use std::io;

use rtvirtio_apply::{HostFiles, JOURNAL_FILE, NoGuests};
use rtvirtio_kernel::sched::Attr;

use super::*;
use crate::contracts::cores_tests::{auto, in_force, one, placed, put};
use crate::contracts::{InForce, partition_of_one};
use crate::dirs::write_state;
use crate::scope_files::{has_shared, vm_dir};
use crate::scopes::status;

const MOUNT: &str = "/sys/fs/cgroup";
/// Files of the controller in a group, each with the kernel's text.
const FILES: [(&str, &str); 2] = [("cpuset.cpus.exclusive", "\n"), ("cpuset.cpus.partition", "member\n")];

/// Files with the kernel's rules for the cpuset controller. What a kernel does is in
/// `bin/rtvirtio/boxed_partition`.
struct Kernel {
    dir: tempfile::TempDir,
    root: Root,
}

impl Kernel {
    fn new() -> Self {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let root = Root::new(dir.path().join("root"));
        put(&root, "/proc/self/mountinfo", "38 31 0:35 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
        put(&root, "/proc/sys/kernel/random/boot_id", "one\n");
        put(&root, "/proc/sys/kernel/osrelease", "6.12.9\n");
        put(&root, "/sys/devices/system/cpu/online", "0-7\n");
        put(&root, format!("{MOUNT}/cgroup.controllers"), "cpuset cpu\n");
        for group in ["", "/machine.slice", "/other.slice"] {
            put(&root, format!("{MOUNT}{group}/cgroup.subtree_control"), "cpu\n");
        }
        for scope in ["machine.slice/plc.scope", "machine.slice/hmi.scope", "other.slice/db.scope"] {
            put(&root, format!("{MOUNT}/{scope}/cgroup.procs"), "7\n");
        }
        Self { dir, root }
    }

    fn dirs(&self) -> Dirs {
        Dirs { state: self.dir.path().join("state"), run: self.dir.path().join("run") }
    }

    fn machine(&self) -> Machine<'_> {
        Machine::with_host(&self.root, self, &NoGuests)
    }

    fn hold(&self, wanted: &[&Partition]) -> Result<()> {
        hold(&self.dirs(), wanted, &self.root, &self.machine())
    }

    fn put_back(&self) {
        let back = put_back_on(&cpusets_dir(&self.dirs()), OnConflict::Report, &self.machine()).unwrap();
        assert!(back.as_ref().is_some_and(|back| back.done), "{back:?}");
    }

    fn text(&self, file: &str) -> String {
        fs::read_to_string(self.root.at(format!("{MOUNT}/{file}"))).unwrap().trim().to_owned()
    }

    /// Exclusive CPUs of the two slices.
    fn exclusive(&self) -> [String; 2] {
        ["machine.slice", "other.slice"].map(|slice| self.text(&format!("{slice}/cpuset.cpus.exclusive")))
    }

    /// Every file of the cgroups with its text.
    fn files(&self) -> BTreeMap<PathBuf, String> {
        let (mut dirs, mut files) = (vec![self.root.at(MOUNT)], BTreeMap::new());
        while let Some(dir) = dirs.pop() {
            for path in fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()) {
                if path.is_dir() {
                    dirs.push(path);
                } else {
                    let text = fs::read_to_string(&path).unwrap();
                    files.insert(path, text.trim().to_owned());
                }
            }
        }
        files
    }
}

impl HostFiles for Kernel {
    fn read(&self, path: &Path) -> io::Result<String> {
        HostFiles::read(&self.root, path)
    }
    fn write(&self, path: &Path, value: &str) -> io::Result<()> {
        if !path.ends_with("cgroup.subtree_control") {
            return HostFiles::write(&self.root, path, value);
        }
        let is_on = value == "+cpuset";
        let below = fs::read_dir(self.root.at(path.parent().unwrap()))?.map(|entry| entry.unwrap().path());
        for group in below.filter(|path| path.is_dir()) {
            for (name, text) in FILES {
                let file = group.join(name);
                if is_on { fs::write(file, text)? } else { fs::remove_file(file)? }
            }
        }
        HostFiles::write(&self.root, path, if is_on { "cpuset cpu\n" } else { "cpu\n" })
    }
    fn list(&self, dir: &Path) -> io::Result<Vec<String>> {
        HostFiles::list(&self.root, dir)
    }
    fn identity(&self, path: &Path) -> io::Result<u64> {
        HostFiles::identity(&self.root, path)
    }
    fn make_dir(&self, path: &Path) -> io::Result<()> {
        HostFiles::make_dir(&self.root, path)
    }
    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        HostFiles::remove_dir(&self.root, path)
    }
    fn thread_start(&self, _: u32, _: u32) -> io::Result<u64> {
        Err(io::ErrorKind::NotFound.into())
    }
    fn scheduling(&self, _: u32, _: u32) -> io::Result<Attr> {
        Err(io::ErrorKind::NotFound.into())
    }
    fn set_scheduling(&self, _: u32, _: u32, _: &Attr) -> io::Result<()> {
        Err(io::ErrorKind::NotFound.into())
    }
}

fn partition(group: &str, cpus: &[u32]) -> Partition {
    Partition { group: group.into(), cpus: cpus.iter().copied().collect() }
}

fn of_plc() -> Partition {
    partition("/machine.slice/plc.scope", &[2, 3])
}

#[test]
fn partitions_that_come_and_go_share_the_groups_above_and_all_is_put_back() {
    let kernel = Kernel::new();
    let before = kernel.files();
    let plc = of_plc();
    let hmi = partition("/machine.slice/hmi.scope", &[1]);
    let db = partition("/other.slice/db.scope", &[5]);
    kernel.hold(&[&plc]).unwrap();
    assert_eq!(kernel.exclusive(), ["2-3", ""]);
    let own = partition_of_one(&kernel.root, "plc", &plc).unwrap();
    let own: Vec<(String, &str)> =
        own.iter().map(|write| (write.target.to_string(), write.value.as_str())).collect();
    let file = |name: &str| format!("{MOUNT}/machine.slice/plc.scope/{name}");
    assert_eq!(own, [(file("cpuset.cpus.exclusive"), "2-3"), (file("cpuset.cpus.partition"), "root")]);
    // The group above lacks the CPU, which the VM's own journal must not give it.
    let error = partition_of_one(&kernel.root, "hmi", &hmi).unwrap_err();
    assert!(error.to_string().contains("another program has changed exclusive CPUs"), "{error}");
    kernel.hold(&[&plc, &hmi]).unwrap();
    assert_eq!(kernel.exclusive(), ["1-3", ""]);
    // A slice that had no controller so far.
    kernel.hold(&[&plc, &hmi, &db]).unwrap();
    assert_eq!(kernel.exclusive(), ["1-3", "5"]);
    assert_eq!(kernel.text("other.slice/cgroup.subtree_control"), "cpuset cpu");
    assert!(has_shared(&kernel.dirs()).unwrap());
    kernel.hold(&[&hmi]).unwrap();
    assert_eq!(kernel.exclusive(), ["1", ""]);
    kernel.hold(&[]).unwrap();
    assert_eq!(kernel.files(), before);
    assert!(!has_shared(&kernel.dirs()).unwrap());
    kernel.hold(&[]).unwrap();
}

#[test]
fn the_group_of_a_vm_that_has_ended_needs_nothing() {
    let kernel = Kernel::new();
    let (plc, db) = (of_plc(), partition("/other.slice/db.scope", &[5]));
    kernel.hold(&[&plc, &db]).unwrap();
    fs::remove_dir_all(kernel.root.at(format!("{MOUNT}/other.slice"))).unwrap();
    let hmi = partition("/machine.slice/hmi.scope", &[1]);
    kernel.hold(&[&plc, &db, &hmi]).unwrap();
    assert_eq!(kernel.text("machine.slice/cpuset.cpus.exclusive"), "1-3");
    kernel.hold(&[]).unwrap();
    assert_eq!(kernel.text("machine.slice/cgroup.subtree_control"), "cpu");
}

/// A process that is killed leaves the journal of what it has written so far.
#[test]
fn what_a_killed_process_has_begun_is_put_back_or_goes_on() {
    let kernel = Kernel::new();
    let (before, plc, dirs) = (kernel.files(), of_plc(), kernel.dirs());
    let begin = || {
        let mut writes = ancestor_writes(&kernel.root, &[&plc], &BTreeMap::new()).unwrap();
        writes.retain(|write| write.target.form == Form::CpusetEnabled);
        let session = Session::open(cpusets_dir(&dirs)).unwrap();
        session.apply(&writes, &kernel.machine(), &mut Silent).unwrap();
    };
    begin();
    kernel.put_back();
    assert_eq!(kernel.files(), before);
    begin();
    kernel.hold(&[&plc]).unwrap();
    assert_eq!(kernel.exclusive(), ["2-3", ""]);
    kernel.put_back();
    assert_eq!(kernel.files(), before);
}

#[test]
fn a_group_above_that_another_program_has_changed_is_seen_with_the_vm_and_set_again() {
    let kernel = Kernel::new();
    let (plc, dirs, machine) = (of_plc(), kernel.dirs(), kernel.machine());
    kernel.hold(&[&plc, &partition("/other.slice/db.scope", &[5])]).unwrap();
    let session = || Session::open(vm_dir(&dirs, "plc")).unwrap();
    let own = partition_of_one(&kernel.root, "plc", &plc).unwrap();
    session().apply(&own, &machine, &mut Silent).unwrap();
    let differing = || -> Vec<String> {
        let knobs = status(&dirs, "plc", &machine).unwrap().unwrap().knobs;
        // Of other slices it has nothing.
        assert!(!knobs.iter().any(|knob| knob.path.contains("other.slice")), "{knobs:?}");
        let differs = |knob: &KnobStatus| !matches!(knob.state, KnobState::InForce | KnobState::Gone { .. });
        let path = |knob: KnobStatus| knob.path.strip_prefix(MOUNT).unwrap().to_owned();
        knobs.into_iter().filter(differs).map(path).collect()
    };
    assert_eq!(differing(), Vec::<String>::new());
    let slice = "/machine.slice/cgroup.subtree_control";
    HostFiles::write(&kernel, Path::new(&format!("{MOUNT}{slice}")), "-cpuset").unwrap();
    assert_eq!(differing(), [slice]);
    let all = |_: &str, _: &str| true;
    assert_eq!(restore(&dirs, &all, &machine).unwrap().written.len(), 1);
    // With the controller the VM's files are back, as the kernel makes them.
    let of_scope = |name: &str| format!("/machine.slice/plc.scope/{name}");
    assert_eq!(differing(), FILES.map(|(name, _)| of_scope(name)));
    assert_eq!(session().restore(&all, &machine).unwrap().written.len(), 2);
    assert_eq!(differing(), Vec::<String>::new());
    assert_eq!(kernel.text("machine.slice/plc.scope/cpuset.cpus.partition"), "root");
    // What was left to another program is not put back.
    put(&kernel.root, format!("{MOUNT}/machine.slice/cpuset.cpus.exclusive"), "2-4\n");
    assert_eq!(release(&dirs, &all, &machine).unwrap().len(), 1);
    session().revert(OnConflict::Report, &machine, &mut Silent).unwrap();
    // Nor is the controller, which it needs.
    assert_eq!(kernel.hold(&[]).unwrap_err().kind(), Kind::NotPutBack);
    assert_eq!(kernel.text("machine.slice/cpuset.cpus.exclusive"), "2-4");
    put(&kernel.root, format!("{MOUNT}/machine.slice/cpuset.cpus.exclusive"), "\n");
    kernel.hold(&[]).unwrap();
    assert_eq!(kernel.text("cgroup.subtree_control"), "cpu");
}

#[test]
fn partitions_of_apply_and_of_the_service_exclude_each_other() {
    let kernel = Kernel::new();
    let (before, plc, dirs) = (kernel.files(), of_plc(), kernel.dirs());
    refuse_next_to_service(Some("web"), &dirs).unwrap();
    kernel.hold(&[&plc]).unwrap();
    refuse_next_to_service(None, &dirs).unwrap();
    let error = refuse_next_to_service(Some("web"), &dirs).unwrap_err();
    assert!(error.kind() == Kind::InForce && error.to_string().starts_with("web: "), "{error}");
    kernel.hold(&[]).unwrap();
    let of = in_force(&one("plc", 10, auto()), placed(&[4]));
    let of_apply = InForce { partition: Some(plc.clone()), ..of };
    write_state(&dirs.state, contracts::IN_FORCE_FILE, &serde_json::to_vec(&[&of_apply]).unwrap()).unwrap();
    kernel.hold(&[&plc]).unwrap();
    kernel.hold(&[]).unwrap();
    // Without a journal nothing of it is in force; with one it is.
    write_state(&dirs.state, JOURNAL_FILE, b"{}").unwrap();
    let error = kernel.hold(&[&plc]).unwrap_err();
    assert!(error.kind() == Kind::InForce && error.to_string().contains("rtvirtio revert"), "{error}");
    assert_eq!(kernel.files(), before);
}
