//! The I/O domain for a spec: `plan --domain`, `apply iod.toml`, and its line in `status`.

use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;

use rtvirtio_console::{INFEASIBLE, Ui, show, style, write_file};
use rtvirtio_domain_config::File;
use rtvirtio_report::{terminal, text};
use rtvirtio_text::shell_path;
use rtvirtio_workflow::domain::{self, DomainStatus, process::LOG};
use rtvirtio_workflow::find::load_host;
use rtvirtio_workflow::{Dirs, Progress};

use crate::args::PlanArgs;

/// `rtvirtio plan --domain`.
pub fn make(args: &PlanArgs, dirs: &Dirs, ui: &Ui) -> anyhow::Result<ExitCode> {
    let host = load_host(&args.model.spec)?;
    let spec = host.single()?.clone();
    let plan = domain::plan::make(&spec, args.model.profile.as_deref(), dirs, ui)?;
    let plan = domain::plan::with_networks(plan, &host, dirs);
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

/// `rtvirtio apply iod.toml`: starts the domain.
pub fn apply(path: &Path, dry_run: bool, dirs: &Dirs, ui: &Ui) -> anyhow::Result<ExitCode> {
    let config = domain::load(path)?;
    if dry_run {
        let lines = config.preview(path, dirs, ui)?;
        show(ui, &lines, || lines.join("\n") + "\n" + &how_to_connect(&config.file))?;
        return Ok(ExitCode::SUCCESS);
    }
    let pid = config.start(dirs, ui)?;
    ui.step(&format!("the I/O domain runs as process {pid}; `rtvirtio revert` stops it"));
    let status = config.ask(pid)?;
    show(ui, &status, || how_to_connect(&config.file))?;
    Ok(ExitCode::SUCCESS)
}

/// Options for each VM's QEMU or libvirt.
fn how_to_connect(file: &File) -> String {
    let mut s = String::from(
        "Each VM needs shared memory, and its disk and port, QEMU's way:\n  \
         -object memory-backend-memfd,id=mem,size=MEMORY,share=on -machine memory-backend=mem\n",
    );
    let disks: Vec<_> = file.devices.iter().flat_map(|d| &d.disks).collect();
    for d in &disks {
        // Writing to a String cannot fail.
        let _ = writeln!(
            s,
            "  {}: -chardev socket,id=disk0,path={},reconnect=1 -device vhost-user-blk-pci,chardev=disk0",
            terminal(&d.name, false),
            terminal(&d.socket.display().to_string(), false)
        );
    }
    let ports: Vec<_> = file.networks.iter().flat_map(|n| &n.ports).collect();
    for p in &ports {
        let _ = writeln!(
            s,
            "  {}: -chardev socket,id=net0,path={},reconnect=1 -netdev vhost-user,id=net0,chardev=net0 -device virtio-net-pci,netdev=net0,mac={}",
            terminal(&p.name, false),
            terminal(&p.socket.display().to_string(), false),
            p.mac
        );
    }
    s.push_str(
        "or libvirt's:\n  <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>\n",
    );
    for d in &disks {
        let _ = writeln!(
            s,
            "  {}: <disk type='vhostuser' device='disk'><driver name='qemu' type='raw'/><source type='unix' path='{}'><reconnect enabled='yes' timeout='1'/></source>\
             <target dev='vda' bus='virtio'/></disk>",
            terminal(&d.name, false),
            terminal(&d.socket.display().to_string(), false)
        );
    }
    for p in &ports {
        let _ = writeln!(
            s,
            "  {}: <interface type='vhostuser'><mac address='{}'/><source type='unix' path='{}' mode='client'>\
             <reconnect enabled='yes' timeout='1'/></source><model type='virtio'/></interface>",
            terminal(&p.name, false),
            p.mac,
            terminal(&p.socket.display().to_string(), false)
        );
    }
    s
}

/// The domain's line in `rtvirtio status`.
pub fn status_text(status: &DomainStatus) -> String {
    if let Some(error) = &status.error {
        return format!("I/O domain: NOT KNOWN: {}\n", terminal(error, false));
    }
    if status.pids.is_empty() {
        return format!(
            "I/O domain: applied, but NOT RUNNING; its last words are in {LOG} in the state directory\n"
        );
    }
    let pids: Vec<String> = status.pids.iter().map(u32::to_string).collect();
    format!("I/O domain: process {}; `rtvirtio iod status` shows what each VM gets\n", pids.join(", "))
}
