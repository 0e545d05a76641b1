//! `rtvirtio-lab`.

use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::Context;
use rtvirtio_measure::{RESULT_SCHEMA, ResultFile};
use rtvirtio_report::text;
use rtvirtio_spec::Spec;
use rtvirtio_testbed::image::GuestImage;
use rtvirtio_testbed::qemu::Accel;
use rtvirtio_testbed::{GuestImages, IodCommand, Lab, LabError, UpOptions, guest_kernels, remove_leftovers};
use rtvirtio_units::Bytes;
use rtvirtio_vmm::{KvmProbe, probe_kvm};

use super::bench::BENCH_DIR;
use crate::args::{AccelName, LabRunArgs, LabUpArgs};
use rtvirtio_console::Global;
use rtvirtio_console::{Cancelled, Ui, exit_code, need_root, show, style};
use rtvirtio_workflow::Progress as _;
use rtvirtio_workflow::apply::revert_all;
use rtvirtio_workflow::run::measure;
use rtvirtio_workflow::site::Site;

/// `rtvirtio-lab down`.
pub fn down(global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    need_root("down")?;
    let _lock = global.dirs().lock_vms()?;
    let mut there = Lab::remove(&global.run_dir)?;
    // What a killed `demo`, `profile` or `bench` left: its settings first, while their files are there.
    for own in [DEMO_DIR, PROFILE_DIR, BENCH_DIR] {
        there |= remove(&below(global, own))?;
    }
    there |= remove_leftovers()?;
    ui.step(if there { "the lab is removed" } else { "no lab was up" });
    Ok(ExitCode::SUCCESS)
}

/// `rtvirtio-lab status`.
pub fn status(global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let lab = Lab::open(&global.run_dir)?;
    let state = lab.state();
    show(ui, state, || {
        let mut out = format!(
            "lab from {}\n  device       {} = {}\n  accelerator  {} ({})\n",
            state.spec_name,
            lab.device().display(),
            state.device_text,
            state.accelerator,
            state.vmm
        );
        if let Some(iod) = &state.iod {
            let alive = if iod.is_alive() { "" } else { " is DEAD" };
            out.push_str(&format!("  I/O domain   process {}{alive}\n", iod.pid));
        }
        for vm in &state.vms {
            let what = match &vm.qemu {
                Some(q) if q.is_alive() => {
                    format!("QEMU process {}, Linux {}", q.process.pid, vm.kernel)
                }
                Some(q) => format!("QEMU process {} is DEAD", q.process.pid),
                None => "process VM".to_owned(),
            };
            out.push_str(&format!("  {:<12} {what}, cgroup {}\n", vm.name, vm.cgroup.display()));
        }
        out
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Run directory of `profile twin:`, below the global one.
pub const PROFILE_DIR: &str = "profile";
/// Run directory of `demo`, below the global one.
pub const DEMO_DIR: &str = "demo";
/// State directory of such a lab, below its run directory.
const STATE: &str = "state";

/// The directories of a lab of its own, below those of the user's: it never mixes with what the user
/// has applied, and `down` finds it after a crash.
pub fn below(global: &Global, dir: &str) -> Global {
    let run_dir = global.run_dir.join(dir);
    Global { state_dir: run_dir.join(STATE), run_dir, ..global.clone() }
}

/// Puts back what is applied to a lab with a state directory of its own, and removes the lab and its directory.
pub fn remove(global: &Global) -> anyhow::Result<bool> {
    let reverted = revert_all(&global.dirs());
    let there = Lab::remove(&global.run_dir)?;
    // Settings of a device that is gone are gone with it, so the lab goes even when putting back failed; then that is told.
    reverted?;
    match std::fs::remove_dir_all(&global.run_dir) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(e).with_context(|| format!("cannot remove {}", global.run_dir.display()))
        }
        _ => Ok(there),
    }
}

/// `rtvirtio-lab up`.
pub fn up_command(args: &LabUpArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    need_root("up")?;
    let _lock = global.dirs().lock_vms()?;
    let text = std::fs::read_to_string(&args.spec)
        .with_context(|| format!("cannot read {}", args.spec.display()))?;
    let name = args.spec.display().to_string();
    let spec = rtvirtio_spec::parse(&name, &text)?;
    let lab = if args.domain {
        let planned = super::domain::plan_for_lab(&spec, &name, args.profile.as_deref(), &global.dirs(), ui)?;
        up(&spec, &name, &text, args.accel, Some(&planned), global, ui)?
    } else {
        up(&spec, &name, &text, args.accel, None, global, ui)?
    };
    ui.step(&format!("the lab is up on {}; remove it with `rtvirtio-lab down`", lab.device().display()));
    show(ui, lab.state(), String::new)?;
    Ok(ExitCode::SUCCESS)
}

/// Makes a lab, with a guest image when the spec needs one.
pub fn up(
    spec: &Spec,
    name: &str,
    text: &str,
    accel: AccelName,
    iod: Option<&IodCommand<'_>>,
    global: &Global,
    ui: &Ui,
) -> anyhow::Result<Lab> {
    let progress = |text: &str| ui.step(text);
    let mut images = GuestImages::new();
    for kernel in guest_kernels(spec) {
        let image = rtvirtio_testbed::image::ensure_kernel(&global.cache_dir, kernel, &progress);
        // Ctrl-C reaches apt too, whose failure is then not the news.
        ui.check_cancelled()?;
        images.insert(kernel, image?);
    }
    // One of them answers for all whether KVM works.
    let accel = images.values().next().map(|image| choose_accel(accel, image, ui)).transpose()?;
    let options = UpOptions {
        run_dir: &global.run_dir,
        twin_server: &twin_server,
        guests: accel.map(|accel| (&images, accel)),
        iod,
        cancel: ui.cancel_flag(),
        progress: &progress,
    };
    let made = Lab::up(spec, name, text, &options);
    // An unreadable state is no sign that nothing is left.
    if made.is_err() && Lab::is_there(&global.run_dir).unwrap_or(true) {
        ui.warn("not all of the lab could be removed: try `rtvirtio-lab down`");
        return Ok(made?);
    }
    match made {
        Err(LabError::Cancelled) => Err(Cancelled.into()),
        Err(_) if ui.is_cancelled() => Err(Cancelled.into()),
        other => Ok(other?),
    }
}

/// This program again, as the twin's server.
pub fn twin_server(profile: &str, size: Bytes, mount: &Path) -> Command {
    // The link names this very program, also when its file was replaced meanwhile.
    let mut command = Command::new("/proc/self/exe");
    command.arg("twin-serve").args(["--profile", profile, "--size", &size.to_string(), "--mount"]).arg(mount);
    command
}

/// What runs the guests: as asked, or KVM where it really works.
pub fn choose_accel(wanted: AccelName, image: &GuestImage, ui: &Ui) -> anyhow::Result<Accel> {
    match wanted {
        AccelName::Kvm => Ok(Accel::Kvm),
        AccelName::Tcg => Ok(Accel::Tcg),
        AccelName::Auto => {
            ui.step("finding out whether KVM really works");
            Ok(match probe_kvm(&image.kernel, &image.initrd)? {
                KvmProbe::Works => Accel::Kvm,
                KvmProbe::Broken { reason } => {
                    ui.step(&format!(
                        "KVM does not run a stock guest here ({reason}): using TCG emulation, which is slower"
                    ));
                    Accel::Tcg
                }
                KvmProbe::Absent { reason } => {
                    ui.step(&format!("no KVM here ({reason}): using TCG emulation, which is slower"));
                    Accel::Tcg
                }
            })
        }
    }
}

/// `rtvirtio-lab run`.
pub fn run_command(args: &LabRunArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    need_root("run")?;
    let _lock = global.dirs().lock_vms()?;
    let dirs = &global.dirs();
    let lab = Lab::open(&global.run_dir)?;
    let spec = rtvirtio_spec::parse(&lab.state().spec_name, &lab.state().spec_text)?;
    let site = Site::find(spec, dirs)?;
    site.guard_data(args.destroy_data)?;
    let run = measure(&site, &args.scheme, Duration::from_nanos(args.length.0), &[], dirs, ui)?;
    let file = ResultFile { schema: RESULT_SCHEMA.to_owned(), host: site.facts(), runs: vec![run] };
    show(ui, &file, || text::results(&file, &style()))?;
    Ok(exit_code(&file.runs[0]))
}
