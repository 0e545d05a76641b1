//! Process VMs on a loop device, with fio: settings are applied, measured and put back, the data is
//! unchanged, and no cgroup remains.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use rtvirtio_apply::NoGuests;
use rtvirtio_kernel::{BlockDevice, Cgroups, Root};
use rtvirtio_learn::dataset::Point;
use rtvirtio_learn::load::{Knobs, Stream};
use rtvirtio_learn::process_vms::{ProcessVms, ProcessVmsError, remove_leftovers};
use rtvirtio_learn::run::{Job, Measurer as _};
use rtvirtio_learn::stage::{Stage, StageError, Treatment, revert_leftovers};
use rtvirtio_model::Elevator;
use rtvirtio_spec::Device;
use rtvirtio_testkit::{ChildGuard, LoopDevice, Need, has, skip};
use rtvirtio_units::Nanos;

const SIZE: usize = 64 << 20;

/// Serialises tests that create VMs, or remove those of a killed process.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A disk of 64 MiB with data in it.
struct Disk {
    dir: tempfile::TempDir,
    data: Vec<u8>,
    disk: LoopDevice,
    device: BlockDevice,
}

impl Disk {
    /// `None`, after a visible skip, where the machine does not allow it.
    fn new(test: &str) -> Option<Self> {
        let needs = [Need::Root, Need::Program("fio"), Need::Path("/dev/loop-control", "no loop devices")];
        if !has(test, &needs) {
            return None;
        }
        let root = Root::default();
        Cgroups::detect(&root).map_err(|e| skip(test, &e.to_string())).ok()?;
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let data: Vec<u8> = (0..SIZE).map(|i| (i / 4096) as u8).collect();
        fs::write(dir.path().join("disk"), &data).unwrap();
        let disk = LoopDevice::attach(&dir.path().join("disk")).expect("losetup");
        let device = BlockDevice::find(&root, &disk.0).unwrap();
        // An earlier user of this loop device may have left another.
        device.set_elevator(&root, "none").unwrap();
        device.offers(&root, "bfq").map_err(|e| skip(test, &e.to_string())).ok()?;
        Some(Self { dir, data, disk, device })
    }

    fn elevator(&self) -> String {
        self.device.elevators(&Root::default()).unwrap().current
    }

    fn is_as_it_was(&self) -> bool {
        self.elevator() == "none" && fs::read(self.dir.path().join("disk")).unwrap() == self.data
    }
}

/// Settings under which [`run`] measures.
fn knobs() -> Knobs {
    Knobs { slice_idle: Nanos(0), weights: vec![500, 100], ..Knobs::default_bfq(2) }
}

/// One run on the disk, with the state in `dir`.
fn run(vms: &ProcessVms, disk: &Path, dir: &Path, length: Duration) -> Result<Point, StageError> {
    let baseline = Knobs { elevator: Elevator::None, ..Knobs::default_bfq(2) }.config();
    let stage = Stage::new(vms, baseline, &NoGuests, &dir.join("state"), &dir.join("work"))?;
    let job = Job {
        id: "a".to_owned(),
        device: "loop",
        spec_device: &Device::Path(disk.to_owned()),
        scheme: "test",
        treatment: Treatment::knobs(knobs().config()),
        vms: &[vec![Stream::paced(50.0)], vec![Stream::flood(4)]],
        length,
        seed: 1,
        tries: 1,
    };
    stage.measure(&job, &AtomicBool::new(false))
}

#[test]
fn a_run_on_a_real_device_leaves_it_as_it_was() {
    let _turn = alone();
    let Some(disk) = Disk::new("a_run_on_a_real_device_leaves_it_as_it_was") else { return };
    let node = &disk.disk.0;
    {
        let open = fs::File::open(node).unwrap();
        let _user = ChildGuard(Command::new("sleep").arg("1000").stdin(open).spawn().unwrap());
        assert!(matches!(ProcessVms::new(node, 2), Err(ProcessVmsError::Claim(_))), "it is in use");
    }
    let vms = ProcessVms::new(node, 2).unwrap();
    assert!(vms.elevators().unwrap().contains(&Elevator::Bfq));
    let point = run(&vms, node, disk.dir.path(), Duration::from_secs(1)).unwrap();
    assert_eq!((point.knobs, point.results.len()), (knobs(), 2));
    assert!(point.results.iter().all(|r| r.n > 0), "{:?}", point.results);
    assert!(!revert_leftovers(&disk.dir.path().join("state"), &NoGuests).unwrap(), "nothing is applied");
    let (root, own) = (Root::default(), std::process::id());
    let cgroups = Cgroups::detect(&root).unwrap();
    assert_eq!(groups_of(&root, &cgroups, own).len(), 1);
    vms.remove().unwrap();
    assert!(groups_of(&root, &cgroups, own).is_empty());
    assert!(disk.is_as_it_was());
}

/// Environment variable with the disk for the killed process.
const DISK: &str = "RTVIRTIO_LEARN_TEST_DISK";
/// Environment variable with its directory.
const DIR: &str = "RTVIRTIO_LEARN_TEST_DIR";

/// Child process of the next test, which kills it; does nothing by itself.
#[test]
fn a_run_to_be_killed() {
    let (Some(disk), Some(dir)) = (std::env::var_os(DISK), std::env::var_os(DIR)) else { return };
    let vms = ProcessVms::new(Path::new(&disk), 2).unwrap();
    let _ = run(&vms, Path::new(&disk), Path::new(&dir), Duration::from_secs(600));
}

#[test]
fn a_run_that_is_killed_can_be_cleaned_up() {
    let _turn = alone();
    let Some(disk) = Disk::new("a_run_that_is_killed_can_be_cleaned_up") else { return };
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "a_run_to_be_killed"]).env(DISK, &disk.disk.0).env(DIR, disk.dir.path());
    let mut child = ChildGuard(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    let pid = child.0.id();
    let (root, work) = (Root::default(), disk.dir.path().join("work"));
    // The settings are in force and fio has its job.
    while disk.elevator() != "bfq" || !work.join("vm1/job.fio").exists() {
        assert!(child.0.try_wait().unwrap().is_none(), "it ended by itself");
        thread::sleep(Duration::from_millis(20));
    }
    let cgroups = Cgroups::detect(&root).unwrap();
    assert_eq!(groups_of(&root, &cgroups, pid).len(), 1);
    child.0.kill().unwrap();
    child.0.wait().unwrap();
    assert_eq!(disk.elevator(), "bfq");
    assert!(revert_leftovers(&disk.dir.path().join("state"), &NoGuests).unwrap());
    remove_leftovers(&root).unwrap();
    assert!(groups_of(&root, &cgroups, pid).is_empty());
    assert!(disk.is_as_it_was());
}

/// Cgroups of the VMs of a process.
fn groups_of(root: &Root, cgroups: &Cgroups, pid: u32) -> Vec<String> {
    let start = format!("rtvirtio-learn-{pid}-");
    let all = root.list(cgroups.dir(Path::new("/")).unwrap()).unwrap();
    all.into_iter().filter(|name| name.starts_with(&start)).collect()
}

#[test]
fn what_a_killed_process_left_is_removed_with_its_load() {
    let _turn = alone();
    let test = "what_a_killed_process_left_is_removed_with_its_load";
    if !has(test, &[Need::Root]) {
        return;
    }
    let root = Root::default();
    let cgroups = match Cgroups::detect(&root) {
        Ok(cgroups) => cgroups,
        Err(e) => return skip(test, &e.to_string()),
    };
    // Id of a process that has ended.
    let mut gone = Command::new("true").spawn().unwrap();
    gone.wait().unwrap();
    let parent = PathBuf::from(format!("/rtvirtio-learn-{}-1", gone.id()));
    let vm = parent.join("vm0");
    cgroups.create(&root, &vm).unwrap();
    let mut sleeper = ChildGuard(Command::new("sleep").arg("1000").stdin(Stdio::null()).spawn().unwrap());
    cgroups.attach(&root, &vm, sleeper.0.id()).unwrap();
    remove_leftovers(&root).unwrap();
    assert!(!root.exists(cgroups.dir(&parent).unwrap()).unwrap());
    assert!(!sleeper.0.wait().unwrap().success(), "it was ended");
}
