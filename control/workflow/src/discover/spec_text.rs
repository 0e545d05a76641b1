//! A first spec: what was found as text, with what is observed, guessed and unknown in comments.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use rtvirtio_measure::observe::{Observed, Tail};
use rtvirtio_spec::MAX_NAME;
use rtvirtio_units::{Bytes, Nanos};
use rtvirtio_vmm::disk_stats::Direction;

use super::{Activity, Discovery, FoundDevice, FoundDisk, FoundReach, FoundVm, Source, unique};

/// A rate below this is no task: a clock, a log line now and then.
const LEAST_RATE: f64 = 1.0 / 60.0;
/// Sizes that a spec takes, in bytes.
const SIZES: (u64, u64) = (512, 16 << 20);
/// Least write of a file system, B; durable writes are multiples of it.
const PAGE: u64 = 4096;
/// Longest name of a disk, so that `durable-` before it still is a name.
const LONGEST_DISK: usize = 22;
/// Ratio of a proposed target to the observed tail.
const ROOM: f64 = 2.0;

/// A spec for the VMs that were found, to be read and corrected by a person: the order of the VMs
/// is their urgency, and nothing can tell it from outside.
#[must_use]
pub fn spec_text(discovery: &Discovery, generated: &str) -> String {
    let mut out = format!("# Written by `rtvirtio discover`, {generated}. Read it, correct it, then:\n");
    out += "#   sudo rtvirtio profile DEVICE; rtvirtio plan THIS_FILE\n#\n";
    out += "# The order of the VMs is their urgency: put the most urgent one first.\n";
    match discovery.observed_ns {
        Some(time) => {
            let _ = writeln!(
                out,
                "# Rates and sizes are what was seen in {time}; a VM may do more at other times. Targets are proposals:\n\
                 # {ROOM:.0} times the tail that was seen, which may be better or worse than what you need."
            );
        }
        None => {
            out += "# What the VMs do was not observed: `rtvirtio discover --observe 5min` fills it in.\n"
        }
    }
    let devices = devices(discovery);
    let observed = discovery.observed_ns.is_some();
    let many = devices.len() > 1;
    for device in &devices {
        // A spec has no device that no task uses.
        let rests = observed && !busy(discovery, device);
        let mute = if rests { "# " } else { "" };
        if rests {
            let _ = write!(out, "\n# {} was idle.", device.name);
        }
        let section = if many { "[[device]]" } else { "[device]" };
        let _ = writeln!(out, "\n{mute}{section}");
        if many {
            let _ = writeln!(out, "{mute}name = {}", quoted(&device.name));
        }
        let _ = writeln!(out, "{mute}path = {}", quoted(&device.path.display().to_string()));
    }
    if devices.is_empty() {
        out += "\n# No disk of a VM was found on a block device of this host.\n# [device]\n# path = \"/dev/...\"\n";
    }
    for vm in &discovery.vms {
        self::vm(&mut out, vm, many, discovery);
    }
    out
}

fn devices(discovery: &Discovery) -> Vec<FoundDevice> {
    let disks = discovery.vms.iter().flat_map(|vm| &vm.disks);
    let mut all: Vec<FoundDevice> = disks.filter_map(|d| d.device.clone()).collect();
    all.sort();
    all.dedup();
    all
}

/// Whether some VM has a task on a device.
fn busy(discovery: &Discovery, device: &FoundDevice) -> bool {
    let mut disks = discovery.vms.iter().flat_map(|vm| &vm.disks);
    disks.any(|d| d.device.as_ref() == Some(device) && disk_tasks(&mut String::new(), d, None, false) > 0)
}

fn vm(out: &mut String, vm: &FoundVm, many: bool, discovery: &Discovery) {
    let observed = discovery.observed_ns.is_some();
    let usable: Vec<&FoundDisk> = vm.disks.iter().filter(|d| d.device.is_some()).collect();
    let _ = writeln!(out, "\n# {} {}, process {}", vm.vmm.name(), vm.name, vm.pid);
    for note in &vm.notes {
        let _ = writeln!(out, "# Note: {}.", shown(note));
    }
    for disk in &vm.disks {
        let on = disk.device.as_ref().map_or("no block device of this host".to_owned(), |d| d.name.clone());
        let how = if disk.writes { "" } else { ", read only" };
        let _ = writeln!(out, "# Disk {} on {on}{how}", shown(disk.path.display()));
    }
    let named = many && usable.len() > 1;
    let mut text = String::new();
    let mut tasks = 0;
    let names = disk_names(&usable);
    for (disk, name) in usable.iter().zip(&names) {
        let several = (usable.len() > 1).then_some(name.as_str());
        tasks += disk_tasks(&mut text, disk, several, named);
    }
    // What was at rest is left out of the plan until a person says what it is to do.
    let mute = if usable.is_empty() || observed && tasks == 0 { "# " } else { "" };
    let mut line = |text: String| {
        let _ = writeln!(out, "{mute}{text}");
    };
    line("[[vm]]".to_owned());
    line(format!("name = {}", quoted(&vm.name)));
    if let (FoundReach::Domain(_), Some(uri)) = (&vm.reach, &discovery.uri) {
        line(format!("uri = {}", quoted(uri)));
    }
    line(match &vm.reach {
        FoundReach::Domain(name) => format!("domain = {}", quoted(name)),
        FoundReach::Proxmox(id) => format!("proxmox = {id}"),
        FoundReach::Qmp(socket) => format!("qmp = {}", quoted(&socket.display().to_string())),
        FoundReach::Cgroup(path) => format!("cgroup = {}", quoted(&path.display().to_string())),
        FoundReach::Pid(pid) => format!("pid = {pid}"),
    });
    if let (Some(agent), FoundReach::Qmp(_) | FoundReach::Cgroup(_) | FoundReach::Pid(_)) =
        (&vm.agent, &vm.reach)
    {
        line(format!("agent = {}", quoted(&agent.display().to_string())));
    }
    match &usable[..] {
        [disk] if many => {
            let name = &disk.device.as_ref().expect("it is usable").name;
            line(format!("device = {}", quoted(name)));
        }
        _ => {}
    }
    let target = usable.iter().find_map(|d| d.target.as_deref());
    line(match target {
        Some(target) => {
            format!("# disk = {}   # where `verify` runs its tasks: libvirt's name", quoted(target))
        }
        None => "# disk = \"/dev/vdb\"   # where `verify` runs its tasks: the disk's name inside the guest"
            .to_owned(),
    });
    if many && usable.len() > 1 {
        let one = |(disk, name): (&&FoundDisk, &String)| {
            let device = &disk.device.as_ref().expect("it is usable").name;
            format!("{{ name = {}, device = {} }}", quoted(name), quoted(device))
        };
        line(format!("disks = [{}]", usable.iter().zip(&names).map(one).collect::<Vec<_>>().join(", ")));
    }
    *out += &text;
    if tasks == 0 {
        let why = if observed { "It was idle." } else { "What it does is not known." };
        let _ = writeln!(
            out,
            "\n# {why} Say what it is to do, and remove the marks:\n# [[vm.task]]\n# name = \"cycle\"\n# op = \"read\"\n\
             # block = \"4KiB\"\n# rate = \"100/s\"\n# target = {{ percentile = \"p99.99\", latency = \"10ms\" }}"
        );
    }
}

/// Names for the disks of one VM, from their paths.
fn disk_names(disks: &[&FoundDisk]) -> Vec<String> {
    let mut names = BTreeSet::new();
    let name = |disk: &&FoundDisk| {
        let name = disk.path.file_name().unwrap_or_default().to_string_lossy();
        unique(&name.chars().take(LONGEST_DISK).collect::<String>(), &mut names)
    };
    disks.iter().map(name).collect()
}

/// Appends the tasks of one disk and returns their number. Each flush is taken to follow a write:
/// the two are one durable write, and the writes that are left are a task of their own. `disk_name`
/// is given where the VM has several, and `named` whether a task has to say it.
fn disk_tasks(out: &mut String, disk: &FoundDisk, disk_name: Option<&str>, named: bool) -> usize {
    let Some(Activity { source, directions }) = &disk.activity else { return 0 };
    let of = |direction| directions.iter().find(|o: &&Observed| o.direction == direction);
    let (reads, writes, flushes) = (of(Direction::Read), of(Direction::Write), of(Direction::Flush));
    let rate_of = |seen: Option<&Observed>| seen.map_or(0.0, |o| o.rate.0);
    let durable = rate_of(flushes).min(rate_of(writes));
    let shares = [
        (reads, "reads", rate_of(reads), None),
        (writes, "writes", rate_of(writes) - durable, None),
        (writes, "durable", durable, flushes),
    ];
    let mut tasks = 0;
    for (seen, task, share, flush) in shares {
        let Some(seen) = seen.filter(|_| share >= LEAST_RATE) else { continue };
        let task = disk_name.map_or_else(|| task.to_owned(), |disk| format!("{task}-{disk}"));
        let mut line = |text: String| {
            let _ = writeln!(out, "{text}");
        };
        line(String::new());
        line(format!("# {}", comment(seen, *source)));
        if let Some(flush) = flush {
            line(format!("# {}", comment(flush, *source)));
            line("# A flush is what a sync in the guest makes. `profile` measures syncs on a disk without data only.".to_owned());
        }
        line("[[vm.task]]".to_owned());
        line(format!("name = {}", quoted(&task.chars().take(MAX_NAME).collect::<String>())));
        line(format!("op = \"{}\"", if seen.direction == Direction::Read { "read" } else { "write" }));
        let unit = if flush.is_some() { PAGE } else { SIZES.0 };
        line(format!("block = \"{}\"", block(seen.mean_size.unwrap_or(Bytes(4096)), unit)));
        if flush.is_some() {
            line("sync = \"fdatasync\"".to_owned());
        }
        if let Some(disk) = disk_name.filter(|_| named) {
            line(format!("disk = {}", quoted(disk)));
        }
        line(format!("rate = \"{}\"", rate(share)));
        line("loop = \"open\"".to_owned());
        match tail(seen, flush) {
            Some(Tail { percentile, latency_ns }) => line(format!(
                "target = {{ percentile = \"{percentile}\", latency = \"{}\" }}",
                proposed(latency_ns)
            )),
            None => line("# target = { percentile = \"p99.99\", latency = \"10ms\" }   # too little was seen to propose one".to_owned()),
        }
        tasks += 1;
    }
    tasks
}

/// The highest percentile that was seen, p99 at least; of a durable write the sum of its two parts.
fn tail(seen: &Observed, flush: Option<&Observed>) -> Option<Tail> {
    let worth = |t: &&Tail| t.percentile.0 >= 99.0;
    let Some(flush) = flush else { return seen.tails.iter().rfind(worth).copied() };
    let both = |t: &&Tail| flush.tails.iter().any(|f| f.percentile == t.percentile);
    let write = seen.tails.iter().rfind(|t| worth(t) && both(t))?;
    let flush = flush.tails.iter().find(|f| f.percentile == write.percentile)?;
    Some(Tail { latency_ns: Nanos(write.latency_ns.0 + flush.latency_ns.0), ..*write })
}

/// Observed I/O as a comment for the user.
fn comment(seen: &Observed, source: Source) -> String {
    let what = match seen.direction {
        Direction::Read => "reads",
        Direction::Write => "writes",
        Direction::Flush => "flushes",
    };
    let mut text = format!("Seen: {} {what}, {:.1}/s", seen.n, seen.rate.0);
    if let Some(size) = seen.mean_size {
        let _ = write!(text, ", {:.1} KiB each", size.as_kib_f64());
    }
    if let Some(depth) = seen.depth {
        let _ = write!(text, ", {depth:.2} in flight");
    }
    for tail in &seen.tails {
        let _ = write!(text, ", {} {}", tail.percentile, tail.latency_ns);
    }
    if let Some(longest) = seen.longest_ns {
        let _ = write!(text, ", longest {longest}");
    }
    if source == Source::Cgroup {
        text += " (by the kernel, for all its disks on this device; latencies are not counted)";
    }
    text
}

/// A mean size as a size of requests: a multiple of `unit` bytes.
fn block(mean: Bytes, unit: u64) -> Bytes {
    let units = (mean.0 as f64 / unit as f64).round() as u64;
    Bytes((units * unit).clamp(unit, SIZES.1))
}

/// A rate that is not below what was seen, but for the error of a difference.
fn rate(seen: f64) -> String {
    let seen = seen - 1e-9 * seen.max(1.0);
    if seen < 1.0 { format!("{}/min", (seen * 60.0).ceil()) } else { format!("{}/s", seen.ceil()) }
}

/// Twice the tail, as the next of 1, 2, 5.
fn proposed(tail: Nanos) -> Nanos {
    let wanted = tail.0 as f64 * ROOM;
    let decade = 10f64.powf(wanted.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().find(|s| s * decade >= wanted).unwrap_or(10.0);
    Nanos((step * decade).round() as u64)
}

/// Text for TOML, of which JSON's strings are a part. Single quotes keep backslashes readable, as
/// in the names of libvirt's cgroups.
fn quoted(text: &str) -> String {
    let plain = !text.contains(|c: char| c == '\'' || c.is_control());
    if text.contains('\\') && plain {
        return format!("'{text}'");
    }
    serde_json::Value::from(text).to_string()
}

/// Text for a comment, which ends with its line.
fn shown(text: impl std::fmt::Display) -> String {
    text.to_string().chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}
