//! `rtvirtio-lab profile twin:NAME`.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use rtvirtio_console::{Global, Ui, need_root, save_model, save_profile};
use rtvirtio_harness::test_bed::{TestBed, learn};
use rtvirtio_kernel::{Root, Stack};
use rtvirtio_learn::design::MAX_VMS;
use rtvirtio_model::Profile;
use rtvirtio_spec::{Device, LabKind};
use rtvirtio_testbed::AccelChoice;
use rtvirtio_units::Bytes;
use rtvirtio_workflow::profile::{Access, of_device};
use rtvirtio_workflow::profile_key;
use rtvirtio_workflow::{Error, check_writable};

use super::lab::{PROFILE_DIR, lab_host};
use crate::args::TwinProfileArgs;

/// Size of a twin that is created only for the measurement.
const TWIN_SIZE: Bytes = Bytes(1 << 30);

pub fn run(args: &TwinProfileArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let Some(name) = args.target.strip_prefix("twin:") else {
        bail!("{} is not twin:NAME: measure a real device with `rtvirtio profile`", args.target);
    };
    rtvirtio_files::load_twin(name)?;
    args.out.as_deref().map_or(Ok(()), check_writable)?;
    need_root("rtvirtio-lab profile")?;
    let dirs = &global.dirs();
    let _lock = dirs.lock_vms()?;
    let device = Device::Twin { profile: name.to_owned(), size: TWIN_SIZE };
    let key = profile_key(&device)?;
    let profile = of_twin(name, Duration::from_nanos(args.length.0), global, ui)?;
    let path = args.out.clone().unwrap_or_else(|| dirs.profile(&key));
    save_profile(&profile, &path, global, ui)?;
    if let Some(time) = args.sweep {
        sweep(&args.target, &key, &profile, Duration::from_nanos(time.0), global, ui)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Learns a model of the device from measured runs and saves it in the directory that `predict` and
/// `plan` read.
fn sweep(
    target: &str,
    key: &str,
    profile: &Profile,
    time: Duration,
    global: &Global,
    ui: &Ui,
) -> anyhow::Result<()> {
    let dirs = &global.dirs();
    let bed = TestBed::make(target, MAX_VMS + 1, LabKind::Process, &lab_host(global), ui)?;
    let learned = learn(&bed, profile, &dirs.sweep(key), time, ui);
    bed.remove()?;
    let model = learned?;
    save_model(&model, &dirs.model(key), global, ui)
}

/// Measures a twin in a separate lab.
fn of_twin(name: &str, length: Duration, global: &Global, ui: &Ui) -> anyhow::Result<Profile> {
    let labs = lab_host(global).below(PROFILE_DIR);
    labs.remove()?;
    let text = format!(
        "[device]\ntwin = {name:?}\nsize = \"{TWIN_SIZE}\"\n[[vm]]\nname = \"none\"\nlab = \"process\"\n\
         [[vm.task]]\nname = \"none\"\nop = \"read\"\nblock = \"4KiB\"\nrate = \"1/s\"\n"
    );
    let spec = rtvirtio_spec::parse("profile", &text)?;
    let lab = labs.up(&spec, ("profile", &text), AccelChoice::Auto, None, ui)?;
    // The twin has no data to lose, so writes are measured too.
    let result = Stack::find(&Root::default(), lab.device())
        .map_err(Error::from)
        .and_then(|device| of_device(&device, length, Access::Made, &labs.dirs, ui));
    labs.remove()?;
    Ok(Profile { device: profile_key(&spec.device)?, ..result? })
}
