//! A sweep of a real device of this host by process VMs.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rtvirtio_apply::NoGuests;
use rtvirtio_kernel::Root;
use rtvirtio_measure::HostFacts;
use rtvirtio_measure::local::ensure_fio;
use rtvirtio_model::{HostModel, Profile};
use rtvirtio_spec::Device;
use rtvirtio_units::Bytes;
use rtvirtio_workflow::site::device_config;
use rtvirtio_workflow::{Dirs, Progress, Result, bfq, in_force};
use rtvirtio_workflow::{cpus, kernel_release};

use crate::dataset::Point;
use crate::design::MAX_VMS;
use crate::library::Shard;
use crate::process_vms::ProcessVms;
use crate::runs::MeasuredDevice;
use crate::stage::Stage;
use crate::sweep::{Allowed, Learning, learn, measure_shard};

/// Checks whether [`on_device`] could begin now; creates nothing.
///
/// # Errors
/// As of [`on_device`], before its first run.
pub fn check_device(name: &str, dirs: &Dirs) -> Result<()> {
    ensure_fio()?;
    in_force::refuse(dirs)?;
    Ok(ProcessVms::check(&node(name), MAX_VMS + 1)?)
}

fn node(name: &str) -> PathBuf {
    Path::new("/dev").join(name.replace('!', "/"))
}

/// Learns a model of the device of this name in the given time. The device's data is only read;
/// settings are journaled in the state directory, so that `rtvirtio revert` puts them back after a
/// crash.
///
/// # Errors
/// [`Kind::Guarded`](rtvirtio_workflow::Kind::Guarded) while anything uses the device,
/// [`Kind::InForce`](rtvirtio_workflow::Kind::InForce) while a plan is in force,
/// [`Kind::NotMeasured`](rtvirtio_workflow::Kind::NotMeasured) when the time was too short for a
/// model: the runs are kept, and the same call continues.
pub fn on_device(
    name: &str,
    profile: &Profile,
    time: Duration,
    generated: &str,
    dirs: &Dirs,
    progress: &dyn Progress,
) -> Result<HostModel> {
    let data = dirs.sweep(name);
    with_device((name, profile, &data, time, generated), dirs, progress, |learning, stage| {
        Ok(learn(learning, stage, progress)?)
    })
}

/// Measures one part of a sweep that several hosts share: runs of the device of this name in the
/// given time, together with those of an earlier call.
///
/// # Errors
/// As of [`on_device`].
pub fn shard_on_device(
    name: &str,
    profile: &Profile,
    (shard, time): (Shard, Duration),
    generated: &str,
    dirs: &Dirs,
    progress: &dyn Progress,
) -> Result<Vec<Point>> {
    let data = dirs.sweep(&format!("{name}.{}-of-{}", shard.index(), shard.total()));
    with_device((name, profile, &data, time, generated), dirs, progress, |learning, stage| {
        Ok(measure_shard(learning, shard, stage, progress)?)
    })
}

/// Prepares the device and this host, calls `run`, and removes what was prepared.
fn with_device<T>(
    (name, profile, data, time, generated): (&str, &Profile, &Path, Duration, &str),
    dirs: &Dirs,
    progress: &dyn Progress,
    run: impl FnOnce(Learning<'_>, Stage<'_>) -> Result<T>,
) -> Result<T> {
    ensure_fio()?;
    in_force::refuse(dirs)?;
    in_force::forget(&dirs.state)?;
    let vms = MAX_VMS + 1;
    let path = node(name);
    let rig = ProcessVms::new(&path, vms)?;
    if let Some(unseen) = rig.unseen() {
        progress.warn(&format!("whether {} is in use: {unseen}", path.display()));
    }
    let root = Root::default();
    // Not all kernels have BFQ: then only the other elevators are swept.
    let _ = bfq::load(rig.stack(), progress);
    let baseline = device_config(rig.stack(), &root, vms)?;
    let size = Bytes(rig.stack().device.size(&root)?);
    let host = HostFacts {
        kernel: kernel_release(),
        cpus: cpus(),
        vmm: "none".to_owned(),
        accelerator: "none".to_owned(),
        device: format!("{name}: {name} ({size})"),
    };
    let device = MeasuredDevice { name: name.to_owned(), spec: Device::Path(path) };
    let allowed = Allowed { elevators: rig.elevators()?, writes: false, cost: None };
    let stage = Stage::new(&rig, baseline, &NoGuests, &dirs.state, &dirs.fio())?;
    let generated = generated.to_owned();
    let learning = Learning { device: &device, allowed, profile, host, data, time, generated };
    let done = run(learning, stage)?;
    rig.remove()?;
    Ok(done)
}
