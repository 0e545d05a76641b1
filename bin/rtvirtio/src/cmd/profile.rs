//! `rtvirtio profile`.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use rtvirtio_console::{Global, Ui, check_writable, generated, need_root, show, style, write_result};
use rtvirtio_kernel::{BlockDevice, Root};
use rtvirtio_learn::on_device::{check_device, on_device};
use rtvirtio_measure::profile::to_json;
use rtvirtio_model::Profile;
use rtvirtio_report::text;
use rtvirtio_workflow::Progress;
use rtvirtio_workflow::model_choice::keep_aside;
use rtvirtio_workflow::profile::{Access, of_device, of_site};
use rtvirtio_workflow::site::{Site, load_spec, profile_key};

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
    let _lock = dirs.lock_vms()?;
    let (key, profile) = if is_spec {
        let spec = load_spec(Path::new(target))?;
        let key = profile_key(&spec.device)?;
        let site = Site::find(spec, dirs)?;
        (key, of_site(&site, length, dirs, ui)?)
    } else {
        let device = BlockDevice::find(&Root::default(), target)?;
        if args.sweep.is_some() {
            // What refuses the sweep is known before the minute that the profile takes.
            check_device(&device.name, dirs)?;
        }
        let access = if args.destroy_data { Access::DestroyData } else { Access::Reads };
        let profile = of_device(&device, length, access, dirs, ui)?;
        (device.name, profile)
    };
    let path = args.out.clone().unwrap_or_else(|| dirs.profile(&key));
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    }
    // Shown first: a full disk must not cost the measurement.
    show(ui, &profile, || text::profile(&profile, &style()))?;
    write_result(&path, &to_json(&profile, &path)?, global)?;
    ui.step(&format!("saved {}", path.display()));
    if let Some(time) = args.sweep {
        sweep(&key, &profile, Duration::from_nanos(time.0), global, ui)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Learns a model of the device from measured runs and saves it where `predict` and `plan` look for it.
fn sweep(key: &str, profile: &Profile, time: Duration, global: &Global, ui: &Ui) -> anyhow::Result<()> {
    let dirs = &global.dirs();
    let model = on_device(key, profile, time, &generated(), dirs, ui)?;
    let path = dirs.model(key);
    keep_aside(&path, ui)?;
    write_result(&path, &serde_json::to_vec(&model)?, global)?;
    ui.step(&format!(
        "learned from {} runs; predict and plan use {} from now on",
        model.points,
        path.display()
    ));
    Ok(())
}
