//! `rtvirtio-lab up`, `run`, `down`, `status`.

use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::Context;
use rtvirtio_harness::{BENCH_DIR, huge_pages};
use rtvirtio_measure::{RESULT_SCHEMA, ResultFile};
use rtvirtio_report::text;
use rtvirtio_testbed::{Lab, LabHost, remove_leftovers};
use rtvirtio_units::Bytes;

use crate::args::{LabRunArgs, LabUpArgs};
use rtvirtio_console::Global;
use rtvirtio_console::{Ui, exit_code, need_root, show, style};
use rtvirtio_workflow::Progress as _;
use rtvirtio_workflow::run::measure;
use rtvirtio_workflow::site::Site;

pub fn down(global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    need_root("rtvirtio-lab down")?;
    let _lock = global.dirs().lock_vms()?;
    let mut was_up = Lab::remove(&global.run_dir)?;
    // A killed `demo`, `profile` or `rtvirtio-bench` may have left a lab.
    for dir in [DEMO_DIR, PROFILE_DIR, BENCH_DIR] {
        was_up |= lab_host(global).below(dir).remove()?;
    }
    was_up |= remove_leftovers()?;
    was_up |= huge_pages::remove_left()?;
    ui.step(if was_up { "the lab is removed" } else { "no lab was up" });
    Ok(ExitCode::SUCCESS)
}

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
            let state = match &vm.qemu {
                Some(q) if q.is_alive() => {
                    format!("QEMU process {}, Linux {}", q.process.pid, vm.kernel)
                }
                Some(q) => format!("QEMU process {} is DEAD", q.process.pid),
                None => "process VM".to_owned(),
            };
            out.push_str(&format!("  {:<12} {state}, cgroup {}\n", vm.name, vm.cgroup.display()));
        }
        out
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Run directory of `profile twin:`, below the global one.
pub const PROFILE_DIR: &str = "profile";
/// Run directory of `demo`, below the global one.
pub const DEMO_DIR: &str = "demo";
/// Access to the labs in this program's directories.
pub fn lab_host(global: &Global) -> LabHost {
    LabHost { dirs: global.dirs(), cache_dir: global.cache_dir.clone(), twin_server }
}

pub fn up_command(args: &LabUpArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    need_root("rtvirtio-lab up")?;
    let _lock = global.dirs().lock_vms()?;
    let text = std::fs::read_to_string(&args.spec)
        .with_context(|| format!("cannot read {}", args.spec.display()))?;
    let name = args.spec.display().to_string();
    let spec = rtvirtio_spec::parse(&name, &text)?;
    let labs = lab_host(global);
    let lab = if args.domain {
        let planned = super::domain::plan_for_lab(&spec, &name, args.profile.as_deref(), &global.dirs(), ui)?;
        labs.up(&spec, (&name, &text), args.accel.into(), Some(&planned), ui)?
    } else {
        labs.up(&spec, (&name, &text), args.accel.into(), None, ui)?
    };
    ui.step(&format!("the lab is up on {}; remove it with `rtvirtio-lab down`", lab.device().display()));
    show(ui, lab.state(), String::new)?;
    Ok(ExitCode::SUCCESS)
}

/// Command of this program as the server of a twin.
fn twin_server(profile: &str, size: Bytes, mount: &Path) -> Command {
    // `/proc/self/exe` is this program even when its file has been replaced.
    let mut command = Command::new("/proc/self/exe");
    command.arg("twin-serve").args(["--profile", profile, "--size", &size.to_string(), "--mount"]).arg(mount);
    command
}

pub fn run_command(args: &LabRunArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    need_root("rtvirtio-lab run")?;
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
