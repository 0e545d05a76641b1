//! The I/O domain for a spec: `plan --domain`, `apply iod.toml`, and what `status` and `revert` do about it.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, bail};
use rtvirtio_apply::Session;
use rtvirtio_host::{BlockDevice, Root, task};
use rtvirtio_iodconfig::File;
use rtvirtio_iodplan::{DeviceModel, DiskPlace, DomainPlan, Options, plan};
use rtvirtio_lab::iod::IodError;
use rtvirtio_lab::proc::ProcessId;
use rtvirtio_lab::state::LabVm;
use rtvirtio_model::Profile;
use rtvirtio_report::text::{Cell, Column, Table};
use rtvirtio_report::{terminal, text};
use rtvirtio_spec::{Device, Spec};
use rtvirtio_units::{Bytes, Nanos};

use super::iod::program;
use super::plan::{INFEASIBLE, load_profile};
use super::{show, style, write_file};
use crate::args::{Global, PlanArgs};
use crate::site;
use crate::ui::Ui;

/// The configuration in force, in the state directory.
const FILE: &str = "iod.toml";
const LOG: &str = "iod.log";
/// How long a domain may take to finish what it holds.
const PATIENCE: Duration = Duration::from_secs(10);

/// `rtvirtio plan --domain`.
pub fn make(args: &PlanArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let spec = site::load_spec(&args.model.spec)?;
    let profile = load_profile(&spec, args.model.profile.as_deref(), global)?;
    let plan = of_profile(&spec, &profile)?;
    doubts(&profile, ui);
    if let Some(out) = &args.out {
        let places = places(&spec, &args.disks, global)?;
        let text = plan.text(&args.model.spec.display().to_string(), &control(global), &places);
        // By the domain's own eyes: what it would refuse is not written.
        File::parse(out, &text)?;
        write_file(out, text.as_bytes())?;
        ui.step(&format!(
            "saved {}; start it with `rtvirtio apply {}`",
            terminal(&out.display().to_string(), false),
            terminal(&out.display().to_string(), false)
        ));
    }
    show(ui, &plan, || table(&plan))?;
    Ok(if plan.feasible { ExitCode::SUCCESS } else { ExitCode::from(INFEASIBLE) })
}

/// Whether the domain can promise every target of a spec.
pub fn would_do(spec: &Spec, profile: &Profile) -> bool {
    of_profile(spec, profile).is_ok_and(|plan| plan.feasible)
}

fn of_profile(spec: &Spec, profile: &Profile) -> anyhow::Result<DomainPlan> {
    let device = DeviceModel::measured(profile)?;
    // The longest that a request took in a guest that was alone: all of it that the device does not explain is the guest's.
    let alone = profile.read.iter().min_by_key(|p| p.depth).map_or(0, |p| p.p50.0);
    let guest = profile.guest.as_ref().map_or(0, |g| g.point.max.0.saturating_sub(alone));
    Ok(plan(spec, &device, &Options { guest: Nanos(guest), ..Options::default() }))
}

/// What one must know of the profile to believe the plan.
fn doubts(profile: &Profile, ui: &Ui) {
    for doubt in &profile.doubts {
        ui.warn(&format!("the profile is in doubt: {}", terminal(doubt, false)));
    }
    if profile.guest.is_none() {
        ui.warn("the guest's own part of a request's time was not measured: bounds are from the guest's queue to its answer");
    }
}

fn control(global: &Global) -> PathBuf {
    absolute(&global.run_dir).join("iod.sock")
}

/// Independent of where this program was started.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// The configuration in force.
fn ours(global: &Global) -> PathBuf {
    absolute(&global.state_dir).join(FILE)
}

/// Where every VM's disk is, as the user says.
fn places(spec: &Spec, disks: &[String], global: &Global) -> anyhow::Result<Vec<DiskPlace>> {
    if spec.lab_kind().is_some() {
        bail!(
            "the disks of a lab are made when it is: `rtvirtio lab up SPEC --domain` plans and starts the domain too"
        );
    }
    let mut said: Vec<(&str, &str)> = Vec::new();
    for disk in disks {
        let Some((vm, path)) = disk.split_once('=') else { bail!("--disk {disk}: write VM=PATH") };
        if spec.vm(vm).is_none() {
            bail!("--disk {disk}: the spec has no VM \"{vm}\"");
        }
        if said.iter().any(|(other, _)| *other == vm) {
            bail!("--disk {disk}: there is another --disk for VM \"{vm}\"");
        }
        said.push((vm, path));
    }
    let place = |name: &str| {
        let Some((_, path)) = said.iter().find(|(vm, _)| *vm == name) else {
            bail!("where is the disk of VM \"{name}\" on this host? Say --disk {name}=PATH");
        };
        Ok(DiskPlace {
            socket: absolute(&global.run_dir).join("disks").join(format!("{name}.sock")),
            path: std::path::absolute(path).with_context(|| (*path).to_owned())?,
            part: None,
        })
    };
    spec.vms.iter().map(|vm| place(&vm.name)).collect()
}

/// The plan of a lab's domain, as the command that serves it.
pub fn for_lab(
    spec: &Spec,
    name: &str,
    profile: Option<&Path>,
    global: &Global,
    ui: &Ui,
) -> anyhow::Result<impl Fn(&Path, &[LabVm], &Path) -> Result<Command, IodError>> {
    if spec.lab_kind() != Some(rtvirtio_spec::LabKind::Qemu) {
        bail!("--domain needs QEMU guests (lab = \"qemu\"): a process has no vhost-user disk");
    }
    let profile = load_profile(spec, profile, global)?;
    let plan = of_profile(spec, &profile)?;
    doubts(&profile, ui);
    if !ui.json {
        print!("{}", table(&plan));
    } else if !plan.feasible {
        ui.warn("not every target can be promised: `rtvirtio plan --domain` says which, and why");
    }
    let name = name.to_owned();
    Ok(move |device: &Path, vms: &[LabVm], run_dir: &Path| {
        let places: Vec<DiskPlace> = vms
            .iter()
            .map(|vm| DiskPlace {
                socket: rtvirtio_lab::iod::socket(run_dir, &vm.name),
                path: device.to_owned(),
                part: Some((Bytes(vm.offset), Bytes(vm.size))),
            })
            .collect();
        let file = run_dir.join(rtvirtio_lab::iod::DIR).join(FILE);
        let text = plan.text(&name, &run_dir.join("iod.sock"), &places);
        std::fs::write(&file, text).map_err(|e| IodError::new(format!("{}: {e}", file.display())))?;
        let mut command = Command::new(program());
        command.arg("--config").arg(file);
        Ok(command)
    })
}

/// Whether a file is a domain's configuration rather than a spec.
pub fn is_config(path: &Path) -> bool {
    let Ok(text) = std::fs::read_to_string(path) else { return false };
    text.lines().any(|line| line.trim_start().starts_with("[[device]]"))
}

/// `rtvirtio apply iod.toml`: starts the domain.
pub fn apply(path: &Path, dry_run: bool, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let file = File::parse(path, &text)?;
    let ours = ours(global);
    let paths = file.devices.iter().flat_map(|d| &d.disks).flat_map(|d| [&d.socket, &d.path]);
    if let Some(relative) = paths.chain([&file.control]).find(|p| p.is_relative()) {
        bail!(
            "{}: {} must be an absolute path: the domain does not run where you are",
            path.display(),
            relative.display()
        );
    }
    if dry_run {
        let lines = [
            format!("{}: -> {}", ours.display(), path.display()),
            format!("start {} --config {}", program().display(), ours.display()),
        ];
        show(ui, &lines, || lines.join("\n") + "\n" + &how_to_connect(&file))?;
        return Ok(ExitCode::SUCCESS);
    }
    // Nobody else applies or reverts meanwhile.
    let _session = Session::open(&global.state_dir)?;
    if !running(global).is_empty() || ours.exists() {
        bail!(
            "an I/O domain is applied already: `rtvirtio revert` stops it; to change limits of a running one, edit its file and reload it"
        );
    }
    for dir in file.devices.iter().flat_map(|d| &d.disks).filter_map(|d| d.socket.parent()) {
        std::fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
    }
    for path in file.devices.iter().flat_map(|d| &d.disks).map(|d| &d.path) {
        let root = Root::default();
        let elevators =
            BlockDevice::find(&root, path).and_then(|d| Ok((d.elevators(&root)?.current, d.name)));
        // Files, and devices without an elevator, have none to warn of.
        if let Ok((current, name)) = elevators {
            if !matches!(current.as_str(), "none" | "mq-deadline") {
                ui.warn(&format!(
                    "{name} has the elevator {current}, which orders requests anew below the domain: `echo none > /sys/block/{name}/queue/scheduler`"
                ));
            }
        }
    }
    // Before it runs: whatever happens now, `revert` finds it by this file.
    write_file(&ours, text.as_bytes())?;
    let mut command = Command::new(program());
    command.arg("--config").arg(&ours);
    match rtvirtio_lab::iod::start(command, None, &global.state_dir.join(LOG)) {
        Ok(id) => ui.step(&format!("the I/O domain runs as process {}; `rtvirtio revert` stops it", id.pid)),
        Err(e) => {
            let _ = std::fs::remove_file(&ours);
            return Err(e.into());
        }
    }
    let status = super::iod::ask(&file.control)?;
    show(ui, &status, || how_to_connect(&file))?;
    Ok(ExitCode::SUCCESS)
}

/// What each VM's QEMU or libvirt must be told.
fn how_to_connect(file: &File) -> String {
    let mut s = String::from(
        "Each VM needs shared memory and its disk, QEMU's way:\n  \
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
    s
}

/// Processes that serve this state directory's configuration.
fn running(global: &Global) -> Vec<ProcessId> {
    let ours = ours(global);
    let serves = |pid: u32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let mut args = line.split(|b| *b == 0);
        let program = PathBuf::from(String::from_utf8_lossy(args.next()?).into_owned());
        let ours = std::os::unix::ffi::OsStrExt::as_bytes(ours.as_os_str());
        let named = program.file_name().is_some_and(|n| n == "rtvirtio-iod");
        (named && args.any(|a| a == ours)).then(|| ProcessId::of(pid)).flatten()
    };
    task::pids(&Root::default()).unwrap_or_default().into_iter().filter_map(serves).collect()
}

/// Process ids of an applied domain, for programs; `None` where none was applied.
pub fn pids(global: &Global) -> Option<Vec<u32>> {
    ours(global).exists().then(|| running(global).iter().map(|p| p.pid).collect())
}

/// One line for `rtvirtio status`, when a domain was applied.
pub fn status(global: &Global) -> Option<String> {
    ours(global).exists().then(|| match running(global).as_slice() {
        [] => "I/O domain: applied, but NOT RUNNING; its last words are in iod.log in the state directory\n"
            .to_owned(),
        all => {
            let pids: Vec<String> = all.iter().map(|p| p.pid.to_string()).collect();
            format!(
                "I/O domain: process {}; `rtvirtio iod status` shows what each VM gets\n",
                pids.join(", ")
            )
        }
    })
}

/// Stops an applied domain. False when there was none.
pub fn stop(global: &Global, force: bool) -> anyhow::Result<bool> {
    let ours = ours(global);
    if !ours.exists() && running(global).is_empty() {
        return Ok(false);
    }
    let _session = Session::open(&global.state_dir)?;
    let running = running(global);
    if !force && !running.is_empty() {
        let file = File::load(&ours)
            .context("which guests the I/O domain serves is not known, and they would stand still: mend the file, or say --force")?;
        let status = super::iod::ask(&file.control)?;
        let vms = status["vms"].as_array().cloned().unwrap_or_default();
        let attached: Vec<&str> =
            vms.iter().filter(|vm| vm["attached"] == true).filter_map(|vm| vm["name"].as_str()).collect();
        if !attached.is_empty() {
            bail!(
                "the I/O domain serves the disks of {}: shut these VMs down first, or say --force, after which their requests wait until a domain runs again",
                terminal(&attached.join(", "), false)
            );
        }
    }
    for process in running {
        process.stop(PATIENCE);
        if process.is_alive() {
            bail!("the I/O domain (process {}) does not end", process.pid);
        }
    }
    for file in [FILE, LOG] {
        match std::fs::remove_file(global.state_dir.join(file)) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e).context(file),
            _ => {}
        }
    }
    Ok(true)
}

/// Who is promised nothing, and why.
pub fn refusals(plan: &DomainPlan) -> String {
    let ascii = style().ascii;
    let refused = plan.vms.iter().filter_map(|vm| Some((vm, vm.refused.as_ref()?)));
    refused
        .map(|(vm, why)| format!("{}: no promise: {}\n", terminal(&vm.vm, ascii), terminal(why, ascii)))
        .collect()
}

/// The plan for people.
fn table(plan: &DomainPlan) -> String {
    let style = style();
    let mut out = format!(
        "I/O domain on {}: {} reserved, window {}{}, pieces of {}, guests may catch up {}\n",
        terminal(&plan.device.name, style.ascii),
        plan.reserved,
        plan.window,
        if plan.window < plan.full_window {
            format!(" (of {}: costs throughput)", plan.full_window)
        } else {
            String::new()
        },
        plan.quantum,
        plan.catch_up,
    );
    let mut t = Table::new(vec![
        Column::name("VM"),
        Column::name("task"),
        Column::number("target"),
        Column::number("worst case"),
        Column::word(""),
    ]);
    for task in &plan.tasks {
        let (word, paint) = match task.met {
            Some(true) => ("guaranteed", Some(text::Paint::Good)),
            Some(false) => ("NOT PROMISED", Some(text::Paint::Bad)),
            None => ("shares the rest", None),
        };
        t.row(vec![
            task.vm.as_str().into(),
            task.task.as_str().into(),
            task.target.map_or_else(|| "-".to_owned(), |t| format!("{} {}", t.percentile, t.latency)).into(),
            task.bound.map_or_else(|| "-".to_owned(), |b| b.to_string()).into(),
            Cell::painted(word, paint),
        ]);
    }
    out.push_str(&t.draw(&style));
    out.push_str(&refusals(plan));
    for vm in &plan.vms {
        if vm.urgent_only && vm.reserve.is_some() {
            let _ = writeln!(
                out,
                "{}: has tasks without a target; run those with one under `ionice -c1` in the guest, or their promise is void",
                terminal(&vm.vm, style.ascii)
            );
        }
    }
    out
}

/// The domain of a spec on what is known of its device: what a twin declares, or a profile.
pub fn for_simulation(spec: &Spec, profile: Option<&Path>, global: &Global) -> anyhow::Result<DomainPlan> {
    match (&spec.device, profile) {
        (Device::Twin { profile, size }, None) => {
            let twin = rtvirtio_twin::TwinProfile::load(profile)?;
            Ok(plan(spec, &DeviceModel::declared(profile, &twin, *size), &Options::default()))
        }
        _ => of_profile(spec, &load_profile(spec, profile, global)?),
    }
}
