//! The I/O domain for a spec: `plan --domain`, `apply iod.toml`, and what `status` and `revert` do about it.

pub mod process;

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rtvirtio_apply::{Session, StateDir};
use rtvirtio_domain_config::File;
use rtvirtio_domain_plan::{DeviceModel, DiskPlace, DomainPlan, Options, plan};
use rtvirtio_kernel::process::Process;
use rtvirtio_kernel::{BlockDevice, Root};
use rtvirtio_model::Profile;
use rtvirtio_report::text::{Cell, Column, Table};
use rtvirtio_report::{terminal, text};
use rtvirtio_spec::{Device, Spec};
use rtvirtio_testbed::iod::IodError;
use rtvirtio_testbed::state::LabVm;
use rtvirtio_units::{Bytes, Nanos};
use serde::Serialize;

use super::iod::program;
use super::plan::{INFEASIBLE, load_profile};
use super::{show, style, write_file};
use crate::args::{Global, PlanArgs};
use crate::site;
use crate::ui::Ui;
use process::{Domain, FILE, LOG};

/// How long a domain may take from its start to its first answer.
const START: Duration = Duration::from_secs(3);
/// Between two looks at one that does not answer yet.
const LOOK: Duration = Duration::from_millis(20);

/// `rtvirtio plan --domain`.
pub fn make(args: &PlanArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let spec = site::load_spec(&args.model.spec)?;
    let profile = load_profile(&spec, args.model.profile.as_deref(), global)?;
    let plan = of_profile(&spec, &profile)?;
    doubts(&profile, ui);
    if let Some(out) = &args.out {
        let mut places = places(&spec, &args.disks, global)?;
        let name = args.model.spec.display().to_string();
        let text = |places: &[DiskPlace]| plan.text(&name, &control(global), places);
        // By the domain's own eyes: what it would refuse is not written.
        File::parse(out, &text(&places))?;
        if rustix::process::geteuid().is_root() {
            check_disks(&text(&places))?;
            places.iter_mut().for_each(|place| place.is_raw = true);
        } else {
            ui.warn("the disks were not looked at, and their format is not declared: that needs root");
        }
        write_file(out, text(&places).as_bytes())?;
        ui.step(&format!(
            "saved {}; start it with `rtvirtio apply {}`",
            terminal(&out.display().to_string(), false),
            terminal(&out.display().to_string(), false)
        ));
    }
    show(ui, &plan, || table(&plan))?;
    Ok(if plan.feasible { ExitCode::SUCCESS } else { ExitCode::from(INFEASIBLE) })
}

/// Has the domain's program look at the disks of a configuration: in use, formats, sizes, overlaps. Nothing is changed.
fn check_disks(config: &str) -> anyhow::Result<()> {
    let mut file = tempfile::NamedTempFile::new().context("a file for the check of the disks")?;
    file.write_all(config.as_bytes()).context("a file for the check of the disks")?;
    let mut command = Command::new(program());
    command.arg("--config").arg(file.path()).arg("--check=disks");
    let out = command.output().with_context(|| program().display().to_string())?;
    if out.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&out.stderr);
    bail!("{}", terminal(said.trim().trim_start_matches("rtvirtio-iod: "), false))
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
            is_raw: false,
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
                socket: rtvirtio_testbed::iod::socket(run_dir, &vm.name),
                path: device.to_owned(),
                part: Some((Bytes(vm.offset), Bytes(vm.size))),
                // The lab has made it.
                is_raw: true,
            })
            .collect();
        let file = run_dir.join(rtvirtio_testbed::iod::DIR).join(FILE);
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
    let paths = file.devices.iter().flat_map(|d| &d.disks).flat_map(|d| [&d.socket, &d.path]);
    if let Some(relative) = paths.chain([&file.control]).find(|p| p.is_relative()) {
        bail!(
            "{}: {} must be an absolute path: the domain does not run where you are",
            path.display(),
            relative.display()
        );
    }
    if dry_run {
        if rustix::process::geteuid().is_root() {
            check_disks(&text)?;
        } else {
            ui.warn("the disks were not looked at: that needs root");
        }
        let ours = process::config_path(&global.state_dir);
        let lines = [
            format!("{}: -> {}", ours.display(), path.display()),
            format!("start {} --config {}", program().display(), ours.display()),
        ];
        show(ui, &lines, || lines.join("\n") + "\n" + &how_to_connect(&file))?;
        return Ok(ExitCode::SUCCESS);
    }
    // No other process applies or reverts meanwhile.
    let _session = Session::open(&global.state_dir)?;
    match process::find(&global.state_dir)? {
        Domain::Absent => {}
        Domain::Runs(_) => bail!(
            "an I/O domain is applied already: `rtvirtio revert` stops it; to change limits of a running one, edit its file and reload it"
        ),
        Domain::Ended => bail!(
            "an I/O domain is applied already, but does not run ({LOG} in the state directory has its last words): `rtvirtio revert` first"
        ),
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
    let pid = process::start(Command::new(program()), &text, &global.state_dir)?;
    ui.step(&format!("the I/O domain runs as process {pid}; `rtvirtio revert` stops it"));
    let status = super::iod::ask_one_of(&file.control, &[pid])?;
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

/// The domain's part of `rtvirtio status`.
#[derive(Serialize)]
pub struct DomainStatus {
    /// Its processes; more than one only while it is started.
    pub pids: Vec<u32>,
    /// Why it is not known whether it runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// What became of an applied domain; `None` where none is applied.
pub fn status(global: &Global) -> Option<DomainStatus> {
    match process::find(&global.state_dir) {
        Ok(Domain::Absent) => None,
        Ok(Domain::Ended) => Some(DomainStatus { pids: Vec::new(), error: None }),
        Ok(Domain::Runs(all)) => Some(DomainStatus { pids: pids(&all), error: None }),
        Err(e) => Some(DomainStatus { pids: Vec::new(), error: Some(format!("{e:#}")) }),
    }
}

fn pids(processes: &[Process]) -> Vec<u32> {
    processes.iter().map(Process::pid).collect()
}

impl DomainStatus {
    /// Whether it runs, for all that is known.
    pub fn runs(&self) -> bool {
        !self.pids.is_empty()
    }

    /// One line.
    pub fn text(&self) -> String {
        if let Some(error) = &self.error {
            return format!("I/O domain: NOT KNOWN: {}\n", terminal(error, false));
        }
        if self.pids.is_empty() {
            return format!(
                "I/O domain: applied, but NOT RUNNING; its last words are in {LOG} in the state directory\n"
            );
        }
        let pids: Vec<String> = self.pids.iter().map(u32::to_string).collect();
        format!("I/O domain: process {}; `rtvirtio iod status` shows what each VM gets\n", pids.join(", "))
    }
}

/// What `revert` did about the domain.
#[derive(Serialize)]
#[serde(rename_all = "snake_case", tag = "fate")]
pub enum Fate {
    /// None was applied.
    None,
    /// It is stopped, or had ended already; its files are removed.
    Stopped {
        /// Its processes.
        pids: Vec<u32>,
    },
    /// It is as it was.
    Left {
        /// Its processes, as far as they are known.
        pids: Vec<u32>,
        /// Why, with the remedy.
        why: String,
    },
}

impl Fate {
    /// Whether nothing of the domain is left.
    pub fn is_settled(&self) -> bool {
        !matches!(self, Self::Left { .. })
    }
}

/// Stops an applied domain, unless guests are attached and it is not to be stopped under them. The state directory is locked by
/// the caller.
pub fn stop(global: &Global, under_guests: bool) -> Fate {
    let left = |pids, e: anyhow::Error| Fate::Left { pids, why: format!("{e:#}") };
    let processes = match process::find(&global.state_dir) {
        Ok(Domain::Absent) => return Fate::None,
        Ok(Domain::Ended) => Vec::new(),
        Ok(Domain::Runs(processes)) => processes,
        Err(e) => return left(Vec::new(), e),
    };
    let pids = pids(&processes);
    let may_stop = match processes.as_slice() {
        _ if under_guests => Ok(()),
        [] => nothing_answers(global),
        _ => no_guest(global, &processes),
    };
    match may_stop.and_then(|()| process::stop(&processes, &global.state_dir)) {
        Ok(()) => Fate::Stopped { pids },
        Err(e) => left(pids, e),
    }
}

/// The configuration in force.
fn applied(global: &Global) -> anyhow::Result<File> {
    let path = process::config_path(&global.state_dir);
    let text = StateDir::open(&global.state_dir)?.read(FILE).with_context(|| path.display().to_string())?;
    Ok(File::parse(&path, &String::from_utf8(text).with_context(|| path.display().to_string())?)?)
}

/// Fails where a guest is attached, or where that cannot be told.
fn no_guest(global: &Global, processes: &[Process]) -> anyhow::Result<()> {
    let unknown = "which guests the I/O domain serves is not known, and they would stand still: mend that, or `rtvirtio revert --stop-domain`";
    let control = applied(global).context(unknown)?.control;
    let attached = || -> anyhow::Result<Vec<String>> {
        let status = super::iod::ask_one_of(&control, &pids(processes))?;
        let vms = status["vms"].as_array().context("its status names no VMs")?;
        let attached = vms.iter().filter(|vm| vm["attached"] != false);
        Ok(attached.map(|vm| vm["name"].as_str().unwrap_or("a VM").to_owned()).collect())
    };
    let deadline = Instant::now() + START;
    let attached = loop {
        match attached() {
            Ok(attached) => break attached,
            // One that has ended serves none.
            Err(_) if have_ended(processes)? => return Ok(()),
            Err(e) if Instant::now() > deadline => return Err(e).context(unknown),
            // After a crash of `apply` it may be starting still.
            Err(_) => std::thread::sleep(LOOK),
        }
    };
    if !attached.is_empty() {
        bail!(
            "it serves the disks of {}: shut these VMs down and revert again, or `rtvirtio revert --stop-domain`, after which their requests wait until a domain runs again",
            terminal(&attached.join(", "), false)
        );
    }
    Ok(())
}

fn have_ended(processes: &[Process]) -> anyhow::Result<bool> {
    for process in processes {
        if !process.has_ended(Duration::ZERO)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Fails where the configuration's control socket is answered although no process holds the lock, as that of a domain which
/// another program started.
fn nothing_answers(global: &Global) -> anyhow::Result<()> {
    // A file that cannot be read says nothing of a process; it is removed with the rest.
    let Ok(file) = applied(global) else { return Ok(()) };
    if let Some(pid) = super::iod::listener(&file.control)? {
        bail!(
            "process {pid} answers at {} but was not started by `rtvirtio apply`: end it and revert again, or leave it and forget the domain that has ended with `rtvirtio revert --stop-domain`",
            file.control.display()
        );
    }
    Ok(())
}

/// VMs that are promised nothing, and why.
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
