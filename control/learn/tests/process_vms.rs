//! Process VMs on a loop device, with fio: settings are applied, measured and put back, the data is
//! as it was, and nothing is left.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use rtvirtio_apply::NoGuests;
use rtvirtio_kernel::{BlockDevice, Cgroups, Root};
use rtvirtio_learn::load::{Knobs, Stream};
use rtvirtio_learn::process_vms::{ProcessVms, ProcessVmsError, remove_leftovers};
use rtvirtio_learn::run::{Job, measure};
use rtvirtio_learn::stage::{Stage, Treatment};
use rtvirtio_model::Elevator;
use rtvirtio_spec::Device;
use rtvirtio_testkit::{Need, has, skip};
use rtvirtio_units::Nanos;

const SIZE: usize = 64 << 20;

/// Detached when dropped.
struct Loop(PathBuf);

impl Loop {
    fn new(file: &Path) -> Self {
        let out = Command::new("losetup").args(["--find", "--show"]).arg(file).output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        Self(String::from_utf8(out.stdout).unwrap().trim().into())
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.0).status();
    }
}

/// Ended when dropped.
struct Sleeper(Child);

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_run_on_a_real_device_leaves_it_as_it_was() {
    let test = "a_run_on_a_real_device_leaves_it_as_it_was";
    let needs = [Need::Root, Need::Program("fio"), Need::Path("/dev/loop-control", "no loop devices")];
    if !has(test, &needs) {
        return;
    }
    let root = Root::default();
    let cgroups = match Cgroups::detect(&root) {
        Ok(cgroups) => cgroups,
        Err(e) => return skip(test, &e.to_string()),
    };
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("disk");
    let data: Vec<u8> = (0..SIZE).map(|i| (i / 4096) as u8).collect();
    fs::write(&file, &data).unwrap();
    let disk = Loop::new(&file);
    let device = BlockDevice::find(&root, &disk.0).unwrap();
    // An earlier user of this loop device may have left another.
    device.set_elevator(&root, "none").unwrap();
    if let Err(e) = device.offers(&root, "bfq") {
        return skip(test, &e.to_string());
    }
    {
        let open = fs::File::open(&disk.0).unwrap();
        let _user = Sleeper(Command::new("sleep").arg("1000").stdin(open).spawn().unwrap());
        assert!(matches!(ProcessVms::new(&disk.0, 2), Err(ProcessVmsError::Claim(_))), "it is in use");
    }
    let vms = ProcessVms::new(&disk.0, 2).unwrap();
    assert!(vms.elevators().unwrap().contains(&Elevator::Bfq));
    let baseline = Knobs { elevator: Elevator::None, ..Knobs::default_bfq(2) }.config();
    let (state, work) = (dir.path().join("state"), dir.path().join("work"));
    let stage = Stage::new(&vms, baseline, &NoGuests, &state, &work).unwrap();
    let mut knobs = Knobs::default_bfq(2);
    (knobs.slice_idle, knobs.weights) = (Nanos(0), vec![500, 100]);
    let loads = [vec![Stream::paced(50.0)], vec![Stream::flood(4)]];
    let job = Job {
        id: "a".to_owned(),
        device: "loop",
        spec_device: &Device::Path(disk.0.clone()),
        scheme: "test",
        treatment: Treatment::knobs(knobs.config()),
        vms: &loads,
        length: Duration::from_secs(1),
        seed: 1,
        tries: 1,
    };
    let cancel = AtomicBool::new(false);
    let point = measure(&job, &stage, &cancel, &mut |_| ()).unwrap();
    assert_eq!((point.knobs, point.results.len()), (knobs, 2));
    assert!(point.results.iter().all(|r| r.n > 0), "{:?}", point.results);
    assert_eq!(device.elevators(&root).unwrap().current, "none");
    drop(stage);
    let own = ours(&root, &cgroups);
    assert_eq!(own.len(), 1, "{own:?}");
    vms.remove().unwrap();
    assert!(ours(&root, &cgroups).is_empty());
    assert!(fs::read(&file).unwrap() == data, "the data is as it was");
}

/// Cgroups of this process's VMs.
fn ours(root: &Root, cgroups: &Cgroups) -> Vec<String> {
    let start = format!("rtvirtio-learn-{}-", std::process::id());
    let all = root.list(cgroups.dir(Path::new("/")).unwrap()).unwrap();
    all.into_iter().filter(|name| name.starts_with(&start)).collect()
}

#[test]
fn what_a_killed_process_left_is_removed_with_its_load() {
    let test = "what_a_killed_process_left_is_removed_with_its_load";
    if !has(test, &[Need::Root]) {
        return;
    }
    let root = Root::default();
    let cgroups = match Cgroups::detect(&root) {
        Ok(cgroups) => cgroups,
        Err(e) => return skip(test, &e.to_string()),
    };
    // A process that has ended, and so has its id.
    let mut gone = Command::new("true").spawn().unwrap();
    gone.wait().unwrap();
    let parent = PathBuf::from(format!("/rtvirtio-learn-{}-1", gone.id()));
    let vm = parent.join("vm0");
    cgroups.create(&root, &vm).unwrap();
    let mut sleeper = Sleeper(Command::new("sleep").arg("1000").stdin(Stdio::null()).spawn().unwrap());
    cgroups.attach(&root, &vm, sleeper.0.id()).unwrap();
    // Another test may remove it first, as it makes VMs.
    remove_leftovers(&root).unwrap();
    assert!(!root.exists(cgroups.dir(&parent).unwrap()).unwrap());
    assert!(!sleeper.0.wait().unwrap().success(), "it was ended");
}
