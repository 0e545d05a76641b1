//! `rtvirtio discover`: the VMs of this host, and a first spec for them.

use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{bail, ensure};
use rtvirtio_console::{Global, Ui, generated, show, style, write_file};
use rtvirtio_kernel::Root;
use rtvirtio_measure::observe::Observed;
use rtvirtio_report::text::{Column, Table};
use rtvirtio_text::shell_path;
use rtvirtio_units::Nanos;
use rtvirtio_vmm::disk_stats::Direction;
use rtvirtio_workflow::cpu_room::cpu_use;
use rtvirtio_workflow::discover::{
    Discovery, FoundDisk, FoundReach, FoundVm, compare, discover, observe, spec_text,
};
use rtvirtio_workflow::{Progress as _, check_writable};

use crate::args::DiscoverArgs;

/// Shortest observation: a tail needs more samples.
const LEAST: Nanos = Nanos::from_millis(1000);

pub fn run(args: &DiscoverArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    ensure!(args.observe.is_none_or(|t| t >= LEAST), "--observe: at least {LEAST}, better 5min");
    let out = args.out.as_deref().filter(|out| *out != Path::new("-"));
    if let Some(out) = out {
        if out.try_exists()? && !args.force {
            bail!("{} exists already: choose another name, or give --force", out.display());
        }
        check_writable(out)?;
    }
    let mut found = discover(&Root::default(), args.uri.as_deref())?;
    for one in &found.unreadable {
        ui.warn(&format!(
            "process {} ({}) cannot be inspected: {}{}",
            one.pid,
            one.program,
            one.why,
            if rustix::process::geteuid().is_root() { "" } else { "; run it with sudo" }
        ));
    }
    match (found.vms.is_empty(), found.unreadable.len()) {
        (true, 0) => {
            ui.step("no virtual machine runs here: no QEMU, Cloud Hypervisor, Firecracker or crosvm")
        }
        (true, hidden) => ui.step(&format!(
            "no virtual machine was seen, but {hidden} {} cannot be inspected",
            if hidden == 1 { "process" } else { "processes" }
        )),
        (false, _) => {}
    }
    let pids: Vec<u32> = found.vms.iter().map(|vm| vm.pid).collect();
    if !pids.is_empty() {
        let of = cpu_use(&pids, ui).map_err(|e| ui.warn(&format!("CPU time of VMs is not known: {e:#}")));
        found.cpu = of.ok();
    }
    if let (Some(length), false) = (args.observe, found.vms.is_empty()) {
        observe(&mut found, Duration::from_nanos(length.0), ui)?;
        compare(&mut found, &global.dirs(), ui);
    }
    let text = spec_text(&found, &generated());
    match out {
        _ if args.out.is_none() => {}
        Some(out) => {
            write_file(out, text.as_bytes())?;
            ui.step(&format!(
                "saved {}: read and correct it, then `rtvirtio plan {}`",
                out.display(),
                shell_path(out)
            ));
        }
        None if ui.json => bail!("`--out -` and --json both want standard output"),
        None => {
            std::io::stdout().lock().write_all(text.as_bytes())?;
            return Ok(ExitCode::SUCCESS);
        }
    }
    show(ui, &found, || table(&found))?;
    Ok(ExitCode::SUCCESS)
}

fn table(found: &Discovery) -> String {
    let mut table = Table::new(vec![
        Column::name("VM"),
        Column::name("named by"),
        Column::name("disk"),
        Column::name("device"),
        Column::number("reads"),
        Column::number("writes"),
        Column::number("longest tail"),
    ]);
    for vm in &found.vms {
        let mut name = vm.name.clone();
        let mut reach = reach(vm);
        if vm.disks.is_empty() {
            let none = || "-".to_owned().into();
            table.row(vec![name.into(), reach.into(), none(), none(), none(), none(), none()]);
            continue;
        }
        for disk in &vm.disks {
            let device = disk.device.as_ref().map_or("-", |d| d.name.as_str()).to_owned();
            let path = disk.path.display().to_string();
            let (reads, writes) = (rate(disk, Direction::Read), rate(disk, Direction::Write));
            let row = [
                std::mem::take(&mut name),
                std::mem::take(&mut reach),
                path,
                device,
                reads,
                writes,
                tail(disk),
            ];
            table.row(row.into_iter().map(Into::into).collect());
        }
    }
    let mut out = table.draw(&style());
    out.extend(found.cpu.map(|of| style().wrap(&format!("CPU: {of}"), 0)));
    for vm in &found.vms {
        for note in &vm.notes {
            out += &style().wrap(&format!("{}: {note}", vm.name), 0);
        }
    }
    out
}

fn reach(vm: &FoundVm) -> String {
    match &vm.reach {
        FoundReach::Domain(name) => format!("domain {name}"),
        FoundReach::Proxmox(id) => format!("proxmox {id}"),
        FoundReach::Qmp(socket) => format!("qmp {}", socket.display()),
        FoundReach::Cgroup(path) => format!("cgroup {}", path.display()),
        FoundReach::Pid(pid) => format!("pid {pid}"),
    }
}

fn seen(disk: &FoundDisk, direction: Direction) -> Option<&Observed> {
    disk.activity.as_ref()?.directions.iter().find(|d| d.direction == direction)
}

/// Rate of a disk in one direction; `?` where it was not observed.
fn rate(disk: &FoundDisk, direction: Direction) -> String {
    match (&disk.activity, seen(disk, direction)) {
        (None, _) => "?".to_owned(),
        (Some(_), None) => "0/s".to_owned(),
        (Some(_), Some(seen)) => format!("{:.1}/s", seen.rate.0),
    }
}

/// Highest percentile that the samples support, the worse of reads and writes.
fn tail(disk: &FoundDisk) -> String {
    let of = |direction| seen(disk, direction).and_then(|s| s.tails.last());
    let worst =
        [of(Direction::Read), of(Direction::Write)].into_iter().flatten().max_by_key(|t| t.latency_ns);
    worst.map_or_else(|| "-".to_owned(), |t| format!("{} {}", t.percentile, t.latency_ns))
}
