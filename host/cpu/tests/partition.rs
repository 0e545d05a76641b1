//! A VM's partition over a directory that stands in for cgroup v2: order of the writes, an invalid
//! partition, and everything put back. What a kernel does is in `bin/rtvirtio/boxed_partition`.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rtvirtio_apply::{
    ApplyError, Fate, HostFiles, KnobState, Machine, NoGuests, OnConflict, Session, Silent, Write, status,
};
use rtvirtio_cpu::{
    Ask, Backend, Contract, Grant, KernelMechanism, Level, Order, Partition, Probe, partition_writes,
    settings, settings_in,
};
use rtvirtio_kernel::sched::{Attr, Policy};
use rtvirtio_kernel::task::Membership;
use rtvirtio_kernel::{PartitionError, Root};
use rtvirtio_units::{Enforcement, Nanos, Ratio};
use rtvirtio_vmm::{Role, Thread};

const MOUNT: &str = "/sys/fs/cgroup";
const SLICE: &str = "/sys/fs/cgroup/machine.slice";
const SCOPE: &str = "/sys/fs/cgroup/machine.slice/plc.scope";
const KIND: &str = "cpuset.cpus.partition";
const EXCLUSIVE: &str = "cpuset.cpus.exclusive";
const REASON: &str = "root invalid (Cpu list in cpuset.cpus not exclusive)";

/// Files with the kernel's rules for the cpuset controller, and a list of the writes.
struct Kernel {
    dir: tempfile::TempDir,
    root: Root,
    written: RefCell<Vec<String>>,
    /// Text that a partition shows after `root` was written.
    shows: RefCell<&'static str>,
}

impl Kernel {
    fn new() -> Self {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let root = Root::new(dir.path().join("root"));
        let (written, shows) = (RefCell::default(), RefCell::new("root"));
        let kernel = Self { dir, root, written, shows };
        kernel.put("/proc/self/mountinfo", "38 31 0:35 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
        kernel.put("/proc/sys/kernel/random/boot_id", "one\n");
        kernel.put("/proc/sys/kernel/osrelease", "6.12.9\n");
        kernel.put("/sys/devices/system/cpu/online", "0-3\n");
        kernel.put(&format!("{MOUNT}/cgroup.controllers"), "cpuset cpu\n");
        kernel.put(&format!("{MOUNT}/cpuset.cpus.effective"), "0-3\n");
        kernel.put(&format!("{MOUNT}/cgroup.subtree_control"), "cpuset cpu\n");
        kernel.put(&format!("{SLICE}/cgroup.subtree_control"), "cpu\n");
        kernel.put(&format!("{SLICE}/{EXCLUSIVE}"), "\n");
        kernel.put(&format!("{SLICE}/{KIND}"), "member\n");
        kernel.put(&format!("{SCOPE}/cgroup.procs"), "7\n");
        kernel
    }

    fn put(&self, path: &str, text: &str) {
        let path = self.root.at(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn machine(&self) -> Machine<'_> {
        Machine::with_host(&self.root, self, &NoGuests)
    }

    fn state(&self) -> PathBuf {
        self.dir.path().join("state")
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

    fn writes(&self) -> Vec<Write> {
        partition_writes(&self.root, &[("plc", &partition())]).unwrap()
    }

    fn apply(&self) -> Result<(), ApplyError> {
        let session = Session::open(self.state())?;
        session.apply(&self.writes(), &self.machine(), &mut Silent).map(drop)
    }

    fn revert(&self, on_conflict: OnConflict) -> Vec<Fate> {
        let session = Session::open(self.state()).unwrap();
        let reverted = session.revert(on_conflict, &self.machine(), &mut Silent).unwrap().unwrap();
        reverted.outcomes.into_iter().map(|outcome| outcome.fate).collect()
    }
}

impl HostFiles for Kernel {
    fn read(&self, path: &Path) -> io::Result<String> {
        HostFiles::read(&self.root, path)
    }
    fn write(&self, path: &Path, value: &str) -> io::Result<()> {
        let shown = path.strip_prefix(MOUNT).unwrap().display().to_string();
        self.written.borrow_mut().push(format!("{shown} {}", value.trim()));
        if path.ends_with("cgroup.subtree_control") {
            let below = [(EXCLUSIVE, "\n"), (KIND, "member\n")]
                .map(|(name, text)| (self.root.at(SCOPE).join(name), text));
            let mut words: BTreeSet<String> =
                HostFiles::read(self, path)?.split_whitespace().map(str::to_owned).collect();
            if value == "+cpuset" {
                words.insert("cpuset".to_owned());
                below.iter().try_for_each(|(file, text)| fs::write(file, text))?;
            } else {
                words.remove("cpuset");
                below.iter().try_for_each(|(file, _)| fs::remove_file(file))?;
            }
            let words: Vec<String> = words.into_iter().collect();
            return HostFiles::write(&self.root, path, &words.join(" "));
        }
        let is_partition = path.ends_with(KIND) && value == "root";
        HostFiles::write(&self.root, path, if is_partition { *self.shows.borrow() } else { value })
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

fn partition() -> Partition {
    Partition { group: "/machine.slice/plc.scope".into(), cpus: BTreeSet::from([2, 3]) }
}

#[test]
fn a_partition_is_written_last_and_put_back_first() {
    let kernel = Kernel::new();
    let before = kernel.files();
    kernel.apply().unwrap();
    let written = std::mem::take(&mut *kernel.written.borrow_mut());
    assert_eq!(
        written,
        [
            "machine.slice/cgroup.subtree_control +cpuset",
            "machine.slice/cpuset.cpus.exclusive 2-3",
            "machine.slice/plc.scope/cpuset.cpus.exclusive 2-3",
            "machine.slice/plc.scope/cpuset.cpus.partition root",
        ]
    );
    let fates = kernel.revert(OnConflict::Report);
    assert!(fates.iter().all(|fate| matches!(fate, Fate::Restored { .. })), "{fates:?}");
    assert_eq!(
        *kernel.written.borrow(),
        [
            "machine.slice/plc.scope/cpuset.cpus.partition member",
            "machine.slice/plc.scope/cpuset.cpus.exclusive ",
            "machine.slice/cpuset.cpus.exclusive ",
            "machine.slice/cgroup.subtree_control -cpuset",
        ]
    );
    assert_eq!(kernel.files(), before);
}

#[test]
fn a_partition_that_the_kernel_shows_as_invalid_is_rolled_back_with_its_reason() {
    let kernel = Kernel::new();
    let before = kernel.files();
    *kernel.shows.borrow_mut() = REASON;
    let error = kernel.apply().unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, ApplyError::RolledBack { .. }) && text.contains(REASON), "{text}");
    assert_eq!(kernel.files(), before);
    assert_eq!(status(&kernel.state(), &kernel.machine()).unwrap(), None);
}

#[test]
fn a_partition_that_becomes_invalid_is_not_in_force_and_is_put_back() {
    let kernel = Kernel::new();
    let before = kernel.files();
    kernel.apply().unwrap();
    let state = || {
        let knobs = status(&kernel.state(), &kernel.machine()).unwrap().unwrap().knobs;
        knobs.into_iter().find(|knob| knob.path.ends_with(KIND)).unwrap().state
    };
    assert_eq!(state(), KnobState::InForce);
    kernel.put(&format!("{SCOPE}/{KIND}"), &format!("{REASON}\n"));
    assert_eq!(state(), KnobState::Changed { found: REASON.to_owned() });
    let fates = kernel.revert(OnConflict::Report);
    assert!(fates.iter().all(|fate| matches!(fate, Fate::Restored { .. })), "{fates:?}");
    assert_eq!(kernel.files(), before);
}

#[test]
fn a_partition_that_stays_invalid_is_not_set_again() {
    let kernel = Kernel::new();
    kernel.apply().unwrap();
    kernel.put(&format!("{SCOPE}/{KIND}"), "member\n");
    let restore = || {
        let session = Session::open(kernel.state()).unwrap();
        session.restore(&|_, _| true, &kernel.machine()).unwrap()
    };
    *kernel.shows.borrow_mut() = REASON;
    for _ in 0..2 {
        let done = restore();
        assert!(done.written.is_empty() && done.failed.len() == 1, "{done:?}");
        assert!(done.failed[0].1.contains(REASON), "{done:?}");
    }
    *kernel.shows.borrow_mut() = "root";
    let done = restore();
    assert!(done.written.len() == 1 && done.failed.is_empty(), "{done:?}");
}

#[test]
fn a_controller_that_another_program_has_come_to_use_stays() {
    let kernel = Kernel::new();
    kernel.apply().unwrap();
    let other = format!("{SLICE}/other.scope/{KIND}");
    kernel.put(&other, "root\n");
    let fates = kernel.revert(OnConflict::Report);
    let is_kept =
        |fate: &Fate| matches!(fate, Fate::Conflict { found } if found.starts_with("+cpuset, used by"));
    assert_eq!(fates.iter().filter(|fate| is_kept(fate)).count(), 1, "{fates:?}");
    kernel.put(&other, "member\n");
    kernel.revert(OnConflict::Report);
    assert!(
        !kernel.files().keys().any(|file| file.starts_with(kernel.root.at(SCOPE)) && file.ends_with(KIND))
    );
}

fn threads() -> Vec<Thread> {
    let thread = |tid: u32, role: Role, kernel: bool, affinity: &str| Thread {
        pid: 7,
        tid,
        role,
        kernel,
        policy: Some(Policy::Other),
        affinity: affinity.to_owned(),
        cgroups: vec![Membership {
            controllers: String::new(),
            path: if kernel { "/".into() } else { "/machine.slice/plc.scope".into() },
        }],
        ..Thread::default()
    };
    vec![
        thread(7, Role::Emulator, false, "0-3"),
        thread(8, Role::Vcpu(vec![0]), false, "0-3"),
        thread(9, Role::KvmPit, true, "0-3"),
    ]
}

fn ask(threads: &[Thread]) -> Ask<'_> {
    let contract = Contract::new(Nanos::from_millis(10), Nanos::from_millis(20)).unwrap();
    Ask { vm: "plc", threads, contract, order: Order::Contract, level: Level::ALONE, used: &[] }
}

#[test]
fn a_reservation_in_a_partition_is_a_guarantee_on_its_cpus() {
    let kernel = Kernel::new();
    let threads = threads();
    let partition = Partition::of_threads(&threads, BTreeSet::from([2, 3]));
    assert_eq!(partition, self::partition());
    let grant = Grant { limit: Ratio(0.95), fair_server: Ratio(0.0), taken: Vec::new() };
    let found = vec![KernelMechanism { backend: Backend::Deadline, grant }];
    let probe = Probe { found, missing: Vec::new(), cpus: 4, cgroups: None };
    let entered = partition.entered(&kernel.root, &threads).unwrap();
    let cpus: Vec<&str> = entered.iter().map(|thread| thread.affinity.as_str()).collect();
    assert_eq!(cpus, ["2-3", "2-3", "0-1"]);
    let here = (Backend::Deadline, Some(&partition.cpus));
    let held = settings_in(&kernel.root, &probe, here, &ask(&entered)).unwrap();
    assert_eq!((held.strength, held.writes.len()), (Enforcement::Guarantee, 2), "{held:?}");
    assert!(held.outside.iter().any(|(tid, why)| *tid == 9 && why.contains("0-1 only")), "{held:?}");
    let runtime = |write: &Write| write.value.parse::<Attr>().unwrap().reservation.unwrap().runtime;
    let all: u64 = held.writes.iter().map(runtime).sum();
    assert!((19_000_000..=20_000_000).contains(&all), "10 ms on each of two CPUs: {all}");
    // Threads that some program has pinned within the partition are refused, as ever.
    let mut pinned = threads.clone();
    pinned[1].affinity = "2".to_owned();
    let entered = partition.entered(&kernel.root, &pinned).unwrap();
    settings_in(&kernel.root, &probe, here, &ask(&entered)).unwrap_err();
    // Nor does a mask alone make a root domain.
    let entered = partition.entered(&kernel.root, &threads).unwrap();
    settings(&kernel.root, &probe, Backend::Deadline, &ask(&entered)).unwrap_err();
}

#[test]
fn what_cannot_be_a_partition_is_refused_before_anything_is_written() {
    let kernel = Kernel::new();
    let all = Partition { cpus: BTreeSet::from([0, 1, 2, 3]), ..partition() };
    let error = partition_writes(&kernel.root, &[("plc", &all)]).unwrap_err();
    assert!(matches!(error, PartitionError::Cannot { .. }), "{error}");
    assert!(kernel.written.borrow().is_empty());
}
