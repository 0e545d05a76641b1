//! `rtvirtio profile`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use rtvirtio_kernel::{BlockDevice, Claim, Root};
use rtvirtio_testbed::Lab;
use rtvirtio_testbed::twin::TwinProfile;

use rtvirtio_measure::MeasureError;
use rtvirtio_measure::awake::Awake;
use rtvirtio_measure::profile::{ProfileControl, ProfileOptions, measure, to_json};
use rtvirtio_model::Profile;
use rtvirtio_report::text;
use rtvirtio_spec::{Device, LabKind};
use rtvirtio_units::Bytes;

use super::bench::bed::Bed;
use super::bench::sweep::learn;
use super::{lab, need_root, show, style, write_result};
use crate::args::{AccelName, Global, ProfileArgs, ProfileCommand};
use crate::data_guard;
use crate::elevator::MeasuredElevator;
use crate::model_choice;
use crate::site::{self, Site};
use crate::ui::{Cancelled, Ui};

/// Size of a twin that is made only to be measured.
const TWIN_SIZE: Bytes = Bytes(1 << 30);

/// `rtvirtio profile`.
pub fn run(args: &ProfileArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    need_root("profile")?;
    let target = match (&args.what, &args.target) {
        (Some(ProfileCommand::Cpu(args)), _) => return super::profile_cpu::run(args, global, ui),
        (None, Some(target)) => target,
        (None, None) => bail!("name a block device, twin:NAME or a spec"),
    };
    let length = Duration::from_nanos(args.length.0);
    if args.sweep.is_some() && !target.starts_with("twin:") && Path::new(target).is_file() {
        bail!("a sweep needs the device for itself: name the device or twin:NAME instead of a spec");
    }
    let _lock = site::lock(global)?;
    let (key, profile) = if let Some(name) = target.strip_prefix("twin:") {
        let device = Device::Twin { profile: name.to_owned(), size: TWIN_SIZE };
        (site::profile_key(&device)?, of_twin(name, length, global, ui)?)
    } else if Path::new(target).is_file() {
        let spec = site::load_spec(Path::new(target))?;
        let key = site::profile_key(&spec.device)?;
        let site = Site::find(spec, global)?;
        (key, of_site(&site, length, global, ui)?)
    } else {
        let device = BlockDevice::find(&Root::default(), target)?;
        let profile = of_device(&device, length, (args.destroy_data, false), global, ui)?;
        (device.name, profile)
    };
    let path = args.out.clone().unwrap_or_else(|| site::profile_path(global, &key));
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    }
    // Shown first: a full disk must not cost the measurement.
    show(ui, &profile, || text::profile(&profile, &style()))?;
    write_result(&path, &to_json(&profile, &path)?, global)?;
    ui.step(&format!("saved {}", path.display()));
    if let Some(time) = args.sweep {
        sweep(target, &key, &profile, Duration::from_nanos(time.0), global, ui)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Learns a model of the device from measured runs and saves it where `predict` and `plan` look for it.
fn sweep(
    target: &str,
    key: &str,
    profile: &Profile,
    time: Duration,
    global: &Global,
    ui: &Ui,
) -> anyhow::Result<()> {
    let vms = rtvirtio_bench::design::MAX_VMS + 1;
    let bed = match target.strip_prefix("twin:") {
        Some(_) => Bed::made(target, vms, LabKind::Process, global, ui)?,
        None if Path::new(target).is_file() => {
            bail!("a sweep needs the device for itself: name the device or twin:NAME instead of a spec")
        }
        None => Bed::real(&Path::new("/dev").join(key), vms, global, ui)?,
    };
    let data = global.state_dir.join("sweeps").join(format!("{key}.jsonl"));
    let learned = learn(&bed, profile, &data, time, ui);
    bed.remove()?;
    let model = learned?;
    let path = model_choice::path(global, key);
    model_choice::keep_aside(&path, ui)?;
    write_result(&path, &serde_json::to_vec(&model)?, global)?;
    ui.step(&format!(
        "learned from {} runs; predict and plan use {} from now on",
        model.points,
        path.display()
    ));
    Ok(())
}

/// In a lab of its own below the run directory, so that `lab down` finds it after a crash.
fn of_twin(name: &str, length: Duration, global: &Global, ui: &Ui) -> anyhow::Result<Profile> {
    TwinProfile::load(name)?;
    let mut global = global.clone();
    global.run_dir = global.run_dir.join(lab::PROFILE_DIR);
    Lab::remove(&global.run_dir)?;
    let text = format!(
        "[device]\ntwin = {name:?}\nsize = \"{TWIN_SIZE}\"\n[[vm]]\nname = \"none\"\nlab = \"process\"\n\
         [[vm.task]]\nname = \"none\"\nop = \"read\"\nblock = \"4KiB\"\nrate = \"1/s\"\n"
    );
    let spec = rtvirtio_spec::parse("profile", &text)?;
    let made = lab::up(&spec, "profile", &text, AccelName::Auto, None, &global, ui)?;
    let result = BlockDevice::find(&Root::default(), made.device())
        .map_err(anyhow::Error::from)
        // Its content is nobody's, so writes are measured too.
        .and_then(|device| of_device(&device, length, (true, true), &global, ui));
    lab::remove(&global)?;
    Ok(Profile { device: site::profile_key(&spec.device)?, ..result? })
}

/// The device of a site, and I/O as its first VM sees it.
pub fn of_site(site: &Site, length: Duration, global: &Global, ui: &Ui) -> anyhow::Result<Profile> {
    // What a lab made holds nobody's data, so writes are measured too.
    let made = site.spec.device.is_made();
    let mut profile = of_device(&site.device, length, (made, made), global, ui)?;
    if made {
        // A loop device's number is chance.
        profile.device = site::profile_key(&site.spec.device)?;
    }
    if site.lab.is_some() {
        profile.guest = Some(crate::guest_point::measure(site, &profile, global, ui)?);
    }
    Ok(profile)
}

fn of_device(
    device: &BlockDevice,
    length: Duration,
    (destroy_data, made): (bool, bool),
    global: &Global,
    ui: &Ui,
) -> anyhow::Result<Profile> {
    let root = Root::default();
    if let (true, Some(partition)) = (destroy_data, &device.partition) {
        // The measurement is of the whole disk: writing would reach the partition table and the other partitions.
        bail!("{partition} is a partition of {}: writes can be measured on a whole disk only", device.name);
    }
    let path = PathBuf::from("/dev").join(device.name.replace('!', "/"));
    site::load_bfq(device)?;
    let dir = work_dir(global)?;
    let mut options = ProfileOptions::new(path.clone(), Bytes(device.size(&root)?), dir.path().to_owned());
    // A made device has the machine for itself, as a real-time host: its CPUs do not sleep, and what the host still stood still is not the device's.
    let _awake = if made { Awake::hold().ok() } else { None };
    options.watch = made;
    options.budget = length;
    let claim = match (destroy_data, made) {
        (true, true) => Some(Claim::of_made(&path)?),
        (true, false) => Some(data_guard::claim(&path, &[], ui)?),
        (false, true) => None,
        (false, false) => {
            data_guard::warn_of_load(&path, ui)?;
            None
        }
    };
    let elevator = MeasuredElevator::open(device, global)?;
    let mut bar = ui.bar(&format!("measuring {}", device.name), 100);
    let result = measure(
        &options,
        &mut ProfileControl {
            set_elevator: &mut |name| elevator.set(name).map_err(Into::into),
            claim: claim.as_ref(),
            progress: &mut |done, total, what| {
                bar.say(&format!("measuring {}: {what}", device.name));
                bar.set(done * 100 / total.max(1));
            },
            cancel: ui.cancel_flag(),
        },
    );
    drop(bar);
    elevator.put_back()?;
    match result {
        Err(MeasureError::Cancelled) => Err(Cancelled.into()),
        other => Ok(Profile { identity: device.identity(&root)?, ..other? }),
    }
}

/// A directory for fio's files, removed afterwards.
fn work_dir(global: &Global) -> anyhow::Result<tempfile::TempDir> {
    std::fs::create_dir_all(&global.run_dir)
        .with_context(|| format!("cannot create {}", global.run_dir.display()))?;
    Ok(tempfile::Builder::new().prefix("profile-").tempdir_in(&global.run_dir)?)
}
