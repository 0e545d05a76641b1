//! `rtvirtio profile`.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use rtvirtio_console::{Global, Ui, generated, need_root, save_model, save_profile};
use rtvirtio_kernel::{Root, Stack};
use rtvirtio_learn::on_device::{check_device, on_device};
use rtvirtio_model::Profile;
use rtvirtio_spec::Device;
use rtvirtio_text::shell_path;
use rtvirtio_workflow::devices::Devices;
use rtvirtio_workflow::named::named_host;
use rtvirtio_workflow::profile::{Access, of_device, of_site, refuse_lesser};
use rtvirtio_workflow::site::Site;
use rtvirtio_workflow::{check_writable, profile_key};

use crate::args::{ProfileArgs, ProfileCommand};
use crate::cmd::profile_library::Part;

pub fn run(args: &ProfileArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    args.out.as_deref().map_or(Ok(()), check_writable)?;
    if !matches!(args.what, Some(ProfileCommand::Merge(_))) {
        need_root("profile")?;
    }
    let target = match (&args.what, &args.target) {
        (Some(ProfileCommand::Cpu(args)), _) => return super::profile_cpu::run(args, global, ui),
        (Some(ProfileCommand::Merge(args)), _) => return super::profile_library::merge(args, global, ui),
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
    if args.kind.is_some() && args.shard.is_none() && args.library.is_none() {
        bail!("--kind names the kind of device for --shard or --library: give one of these");
    }
    if args.library.is_some() && is_spec {
        bail!("a library knows kinds of devices: name the device instead of a spec");
    }
    let access = access(args);
    access.check_length(length)?;
    let _lock = dirs.lock_vms()?;
    if is_spec {
        return of_spec(args, Path::new(target), length, global, ui);
    }
    let stack = Stack::find(&Root::default(), target)?;
    let key = stack.device.name.clone();
    // Checked first: otherwise the sweep would be refused after a profile of a minute.
    if args.sweep.is_some() {
        check_device(&key, dirs)?;
    }
    let part = args.shard.map(|shard| Part::from_args(shard, args, &stack)).transpose()?;
    if let Some(library) = &args.library {
        if let Some(done) = super::profile_library::known(library, args, &stack, access, global, ui)? {
            return Ok(done);
        }
    }
    let path = args.out.clone().filter(|_| part.is_none()).unwrap_or_else(|| dirs.profile(&key));
    if !args.replace {
        refuse_lesser(&path, access)?;
    }
    let profile = of_device(&stack, length, access, dirs, ui)?;
    save_profile(&profile, &path, global, ui)?;
    match (args.sweep.map(|time| Duration::from_nanos(time.0)), part) {
        (Some(time), Some(part)) => part.measure(&key, &profile, time, global, ui)?,
        (Some(time), None) => sweep(&key, &profile, time, global, ui)?,
        (None, _) => {}
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

/// Profiles each device of a spec in turn.
fn of_spec(
    args: &ProfileArgs,
    spec: &Path,
    length: Duration,
    global: &Global,
    ui: &Ui,
) -> anyhow::Result<ExitCode> {
    let dirs = &global.dirs();
    let host = named_host(spec)?;
    let real = |part: &rtvirtio_spec::Part| match &part.spec.device {
        Device::Path(path) => Some(shell_path(path)),
        _ => None,
    };
    if let (true, Some(device)) = (args.destroy_data, host.parts().iter().find_map(real)) {
        bail!(
            "of the device of a spec only reads are measured; `rtvirtio profile {device} --destroy-data` writes too, \
             and everything on it is lost"
        );
    }
    let devices = Devices::find(host, dirs)?;
    let many = devices.sites.len();
    anyhow::ensure!(
        args.out.is_none() || many == 1,
        "--out is one file, and the spec has {many} devices: without it each profile is saved by its device's name"
    );
    let path_of = |site: &Site| match &args.out {
        Some(out) => Ok(out.clone()),
        None => profile_key(&site.spec.device).map(|key| dirs.profile(&key)),
    };
    for site in devices.sites.iter().filter(|_| !args.replace) {
        refuse_lesser(&path_of(site)?, access(args))?;
    }
    for site in &devices.sites {
        let profile = of_site(site, access(args), length, dirs, ui)?;
        let path = path_of(site)?;
        save_profile(&profile, &path, global, ui)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Learns a model of the device from measured runs and saves it in the directory that `predict` and
/// `plan` read.
fn sweep(key: &str, profile: &Profile, time: Duration, global: &Global, ui: &Ui) -> anyhow::Result<()> {
    let dirs = &global.dirs();
    let model = on_device(key, profile, time, &generated(), dirs, ui)?;
    save_model(&model, &dirs.model(key), global, ui)
}
