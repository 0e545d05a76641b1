//! `rtvirtio-lab profile twin:NAME`.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use rtvirtio_console::{Global, Ui, check_writable, need_root, show, style, write_result};
use rtvirtio_kernel::{BlockDevice, Root};
use rtvirtio_measure::profile::to_json;
use rtvirtio_model::Profile;
use rtvirtio_report::text;
use rtvirtio_spec::{Device, LabKind};
use rtvirtio_testbed::twin::TwinProfile;
use rtvirtio_units::Bytes;
use rtvirtio_workflow::profile::{Access, of_device};
use rtvirtio_workflow::site::profile_key;
use rtvirtio_workflow::{Error, Progress as _};

use super::bench::bed::Bed;
use super::bench::sweep::learn;
use super::lab::{self, PROFILE_DIR, below};
use crate::args::{AccelName, TwinProfileArgs};

/// Size of a twin that is made only to be measured.
const TWIN_SIZE: Bytes = Bytes(1 << 30);

/// `rtvirtio-lab profile`.
pub fn run(args: &TwinProfileArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let Some(name) = args.target.strip_prefix("twin:") else {
        bail!("{} is not twin:NAME: measure a real device with `rtvirtio profile`", args.target);
    };
    TwinProfile::load(name)?;
    args.out.as_deref().map_or(Ok(()), check_writable)?;
    need_root("profile")?;
    let dirs = &global.dirs();
    let _lock = dirs.lock_vms()?;
    let device = Device::Twin { profile: name.to_owned(), size: TWIN_SIZE };
    let key = profile_key(&device)?;
    let profile = of_twin(name, Duration::from_nanos(args.length.0), global, ui)?;
    let path = args.out.clone().unwrap_or_else(|| dirs.profile(&key));
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    }
    // Shown first: a full disk must not cost the measurement.
    show(ui, &profile, || text::profile(&profile, &style()))?;
    write_result(&path, &to_json(&profile, &path)?, global)?;
    ui.step(&format!("saved {}", path.display()));
    if let Some(time) = args.sweep {
        sweep(&args.target, &key, &profile, Duration::from_nanos(time.0), global, ui)?;
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
    let dirs = &global.dirs();
    let vms = rtvirtio_bench::design::MAX_VMS + 1;
    let bed = Bed::made(target, vms, LabKind::Process, global, ui)?;
    let learned = learn(&bed, profile, &dirs.sweep(key), time, ui);
    bed.remove()?;
    let model = learned?;
    let path = dirs.model(key);
    rtvirtio_workflow::model_choice::keep_aside(&path, ui)?;
    write_result(&path, &serde_json::to_vec(&model)?, global)?;
    ui.step(&format!(
        "learned from {} runs; predict and plan use {} from now on",
        model.points,
        path.display()
    ));
    Ok(())
}

/// In a lab of its own.
fn of_twin(name: &str, length: Duration, global: &Global, ui: &Ui) -> anyhow::Result<Profile> {
    let global = below(global, PROFILE_DIR);
    lab::remove(&global)?;
    let text = format!(
        "[device]\ntwin = {name:?}\nsize = \"{TWIN_SIZE}\"\n[[vm]]\nname = \"none\"\nlab = \"process\"\n\
         [[vm.task]]\nname = \"none\"\nop = \"read\"\nblock = \"4KiB\"\nrate = \"1/s\"\n"
    );
    let spec = rtvirtio_spec::parse("profile", &text)?;
    let made = lab::up(&spec, "profile", &text, AccelName::Auto, None, &global, ui)?;
    // Its content is of no value, so writes are measured too.
    let result = BlockDevice::find(&Root::default(), made.device())
        .map_err(Error::from)
        .and_then(|device| of_device(&device, length, Access::Made, &global.dirs(), ui));
    lab::remove(&global)?;
    Ok(Profile { device: profile_key(&spec.device)?, ..result? })
}
