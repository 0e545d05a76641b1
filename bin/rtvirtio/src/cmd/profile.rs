//! `rtvirtio profile`.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use rtvirtio_console::{Global, Ui, generated, need_root, save_model, save_profile};
use rtvirtio_kernel::{BlockDevice, Root};
use rtvirtio_learn::on_device::{check_device, on_device};
use rtvirtio_model::Profile;
use rtvirtio_spec::Device;
use rtvirtio_workflow::find::load_spec;
use rtvirtio_workflow::profile::{Access, of_device, of_site};
use rtvirtio_workflow::site::Site;
use rtvirtio_workflow::{check_writable, profile_key};

use crate::args::{ProfileArgs, ProfileCommand};

/// `rtvirtio profile`.
pub fn run(args: &ProfileArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    args.out.as_deref().map_or(Ok(()), check_writable)?;
    need_root("profile")?;
    let target = match (&args.what, &args.target) {
        (Some(ProfileCommand::Cpu(args)), _) => return super::profile_cpu::run(args, global, ui),
        (None, Some(target)) => target,
        (None, None) => bail!("name a block device or a spec"),
    };
    if target.starts_with("twin:") {
        bail!("a twin is the lab's: `rtvirtio-lab profile {target}`");
    }
    let dirs = &global.dirs();
    let length = Duration::from_nanos(args.length.0);
    let is_spec = Path::new(target).is_file();
    if args.sweep.is_some() && is_spec {
        bail!("a sweep needs the device for itself: name the device instead of a spec");
    }
    let access = access(args);
    access.check_length(length)?;
    let _lock = dirs.lock_vms()?;
    let (key, profile) = if is_spec {
        let spec = load_spec(Path::new(target))?;
        if let (true, Device::Path(path)) = (args.destroy_data, &spec.device) {
            bail!(
                "of the device of a spec only reads are measured; `rtvirtio profile {} --destroy-data` writes too, and everything on it is lost",
                path.display()
            );
        }
        let key = profile_key(&spec.device)?;
        let site = Site::find(spec, dirs)?;
        (key, of_site(&site, access, length, dirs, ui)?)
    } else {
        let device = BlockDevice::find(&Root::default(), target)?;
        if args.sweep.is_some() {
            // What refuses the sweep is known before the minute that the profile takes.
            check_device(&device.name, dirs)?;
        }
        let profile = of_device(&device, length, access, dirs, ui)?;
        (device.name, profile)
    };
    let path = args.out.clone().unwrap_or_else(|| dirs.profile(&key));
    save_profile(&profile, &path, global, ui)?;
    if let Some(time) = args.sweep {
        sweep(&key, &profile, Duration::from_nanos(time.0), global, ui)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn access(args: &ProfileArgs) -> Access {
    match (args.destroy_data, args.gentle, args.yes) {
        (true, ..) => Access::DestroyData,
        (_, true, _) => Access::Gentle,
        (.., true) => Access::ReadsUnderVms,
        _ => Access::Reads,
    }
}

/// Learns a model of the device from measured runs and saves it where `predict` and `plan` look for
/// it.
fn sweep(key: &str, profile: &Profile, time: Duration, global: &Global, ui: &Ui) -> anyhow::Result<()> {
    let dirs = &global.dirs();
    let model = on_device(key, profile, time, &generated(), dirs, ui)?;
    save_model(&model, &dirs.model(key), global, ui)
}
