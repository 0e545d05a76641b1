//! The I/O domain for a spec: `plan --domain`, `apply iod.toml`, and its line in `status`.

mod connect;

use std::path::Path;
use std::process::ExitCode;

use rtvirtio_console::{INFEASIBLE, Ui, show, style, write_file};
use rtvirtio_report::{terminal, text};
use rtvirtio_text::shell_path;
use rtvirtio_vmm::Reconnect;
use rtvirtio_workflow::domain::{self, DomainStatus, process::LOG};
use rtvirtio_workflow::named::named_host;
use rtvirtio_workflow::{Dirs, Progress};

use self::connect::how_to_connect;
use crate::args::PlanArgs;

pub fn make(args: &PlanArgs, dirs: &Dirs, ui: &Ui) -> anyhow::Result<ExitCode> {
    let host = named_host(&args.model.spec)?;
    let spec = host.single()?.clone();
    let plan = domain::plan::make(&spec, args.model.profile.as_deref(), dirs, ui)?;
    let plan = domain::plan::with_networks(plan, &host, dirs, ui);
    let plan = plan.with_socket_group(args.socket_group.as_deref());
    if let Some(out) = &args.out {
        let name = args.model.spec.display().to_string();
        let text = domain::plan::config(&plan, &spec, (&name, out), &args.disks, dirs, ui)?;
        write_file(out, text.as_bytes())?;
        if args.socket_group.is_none() && domain::plan::needs_group(&host) {
            ui.warn(
                "the sockets are for root only, and libvirt's QEMU is another user: plan with `--socket-group kvm` (the group of that user on Debian)",
            );
        }
        let out = terminal(&shell_path(out), false);
        ui.step(&format!("saved {out}; start it with `rtvirtio apply {out}`"));
    }
    show(ui, &plan, || text::domain_plan(&plan, &style()))?;
    Ok(if plan.feasible { ExitCode::SUCCESS } else { ExitCode::from(INFEASIBLE) })
}

/// `rtvirtio apply iod.toml`: starts the I/O domain.
pub fn apply(path: &Path, dry_run: bool, dirs: &Dirs, ui: &Ui) -> anyhow::Result<ExitCode> {
    let config = domain::load(path)?;
    if dry_run {
        let lines = config.preview(path, dirs, ui)?;
        show(ui, &lines, || lines.join("\n") + "\n" + &how_to_connect(&config.file, Reconnect::of_host()))?;
        return Ok(ExitCode::SUCCESS);
    }
    let pid = config.start(dirs, ui)?;
    ui.step(&format!("the I/O domain runs as process {pid}; `rtvirtio revert` stops it"));
    let status = config.ask(pid)?;
    show(ui, &status, || how_to_connect(&config.file, Reconnect::of_host()))?;
    Ok(ExitCode::SUCCESS)
}

/// Message with the kept configuration of a stopped I/O domain.
pub fn kept_text(kept: &Path) -> String {
    let kept = terminal(&kept.display().to_string(), false);
    format!(
        "its configuration is kept, as it was changed since `apply`: `rtvirtio apply {kept}` starts it again"
    )
}

/// Line of the I/O domain in `rtvirtio status`.
pub fn status_text(status: &DomainStatus) -> String {
    if let Some(error) = &status.error {
        return format!("I/O domain: NOT KNOWN: {}\n", terminal(error, false));
    }
    if status.pids.is_empty() {
        let config = status.config.as_ref().map(|config| terminal(&config.display().to_string(), false));
        return format!(
            "I/O domain: applied, but NOT RUNNING, and its guests wait: `rtvirtio apply {}` starts it again as it was; its last log lines are in {LOG} next to that file\n",
            config.unwrap_or_default()
        );
    }
    let pids: Vec<String> = status.pids.iter().map(u32::to_string).collect();
    format!("I/O domain: process {}; `rtvirtio iod status` shows what each VM gets\n", pids.join(", "))
}
