//! Two samples of the counters of QEMU and the kernel, with time between them.

use std::time::{Duration, Instant};

use rtvirtio_kernel::io_counters::IoCounters;
use rtvirtio_kernel::{Cgroups, Root};
use rtvirtio_measure::observe::{boundaries, of_cgroup, of_qemu};
use rtvirtio_spec::LibvirtDomain;
use rtvirtio_units::Nanos;
use rtvirtio_vmm::disk_stats::DiskStats;
use rtvirtio_vmm::{Qmp, VmmError};

use super::{Activity, Discovery, FoundDisk, FoundVm, Source, domains};
use crate::error::{Kind, Result};
use crate::progress::Progress;

/// Time limit of a monitor's answer.
const MONITOR: Duration = Duration::from_secs(5);

/// First sample of a VM's counters.
enum First {
    /// QEMU's counters, and the disks whose histograms this process has enabled.
    Qemu { at: Instant, disks: Vec<DiskStats>, ours: Vec<String> },
    /// The kernel's counters, one for each disk of the VM whose device is known.
    Cgroup { at: Instant, counters: Vec<Option<IoCounters>> },
}

/// Disables on drop the histograms that were enabled in QEMU, also when the observation fails.
struct Histograms<'a> {
    vm: &'a FoundVm,
    uri: &'a str,
    ids: Vec<String>,
}

impl Drop for Histograms<'_> {
    fn drop(&mut self) {
        if let (false, Ok(mut qmp)) = (self.ids.is_empty(), connect(self.vm, self.uri)) {
            for id in &self.ids {
                // A disk that was unplugged meanwhile has none.
                let _ = qmp.set_latency_histogram(id, &[]);
            }
        }
    }
}

/// Observes what each VM does with its disks for `length`, and fills in what was seen. QEMU keeps
/// latency histograms meanwhile, unless it has them already; they are removed at the end. After
/// Ctrl-C, what was seen until then is filled in.
///
/// # Errors
/// [`Kind::NotRunning`] when no VM could be observed.
pub fn observe(discovery: &mut Discovery, length: Duration, progress: &dyn Progress) -> Result<()> {
    let root = Root::default();
    let cgroups = Cgroups::detect(&root).ok();
    let vms = discovery.vms.clone();
    let uri = discovery.uri.clone().unwrap_or_else(|| LibvirtDomain::DEFAULT_URI.to_owned());
    let mut guards = Vec::new();
    let mut firsts = Vec::new();
    for vm in &vms {
        let first = first(&root, cgroups.as_ref(), vm, &uri, progress);
        if let Some(First::Qemu { ours, .. }) = &first {
            guards.push(Histograms { vm, uri: &uri, ids: ours.clone() });
        }
        firsts.push(first);
    }
    if firsts.iter().all(Option::is_none) {
        return Err(crate::Error::new(
            Kind::NotRunning,
            "no VM can be observed: QEMU's counters need its QMP socket or a libvirt domain, the kernel's a cgroup of its own",
        ));
    }
    let seen = firsts.iter().flatten().count();
    let length_text = Nanos::from_secs_f64(length.as_secs_f64());
    progress
        .step(&format!("observing {seen} of {} VMs for {length_text}; Ctrl-C ends it earlier", vms.len()));
    let begin = Instant::now();
    match wait(length, progress) {
        Err(e) if e.kind() == Kind::Cancelled => progress.warn(&format!(
            "stopped after {}: what was seen until then follows",
            Nanos::from_secs_f64(begin.elapsed().as_secs_f64().round())
        )),
        other => other?,
    }
    for (vm, first) in discovery.vms.iter_mut().zip(&firsts) {
        match first {
            Some(first) => second(&root, cgroups.as_ref(), vm, &uri, first),
            None => vm.notes.push("its I/O could not be observed".to_owned()),
        }
    }
    discovery.observed_ns = Some(Nanos::from_secs_f64(begin.elapsed().as_secs_f64()));
    drop(guards);
    Ok(())
}

fn wait(length: Duration, progress: &dyn Progress) -> Result<()> {
    let mut bar = progress.bar("observing", length.as_secs());
    let begin = Instant::now();
    while let Some(left) = length.checked_sub(begin.elapsed()).filter(|l| !l.is_zero()) {
        progress.pause(left.min(Duration::from_secs(1)))?;
        bar.set(begin.elapsed().as_secs());
    }
    Ok(())
}

/// The monitor of a VM; `Err(None)` for one without a known monitor.
fn connect(vm: &FoundVm, uri: &str) -> std::result::Result<Qmp, Option<String>> {
    let text = |e: VmmError| Some(e.to_string());
    match (&vm.qmp, domains::running(&Root::default(), uri, vm)) {
        (_, Ok(Some(domain))) => Qmp::of_domain(&domain, MONITOR).map_err(text),
        (_, Err(why)) => Err(Some(why)),
        (Some(socket), Ok(None)) => Qmp::connect(socket, MONITOR).map_err(text),
        (None, Ok(None)) => Err(None),
    }
}

fn first(
    root: &Root,
    cgroups: Option<&Cgroups>,
    vm: &FoundVm,
    uri: &str,
    progress: &dyn Progress,
) -> Option<First> {
    match connect(vm, uri).and_then(|mut qmp| begin(&mut qmp).map_err(|e| Some(e.to_string()))) {
        Ok(first) => return Some(first),
        Err(Some(e)) => {
            let taken = if vm.qmp.is_some() { "; another program may hold the socket" } else { "" };
            progress.warn(&format!(
                "{}: QEMU's counters cannot be read ({e}){taken}. The cgroup's counters are used instead: no latencies",
                vm.name
            ));
        }
        Err(None) => {}
    }
    let (cgroups, cgroup) = (cgroups?, vm.cgroup.as_ref()?);
    if !vm.own_cgroup {
        return None;
    }
    let read = |disk: &FoundDisk| {
        let device = disk.device.as_ref()?;
        // A group that has had no request has no counter yet.
        IoCounters::read(root, cgroups, cgroup, &device.dev).ok().map(Option::unwrap_or_default)
    };
    Some(First::Cgroup { at: Instant::now(), counters: vm.disks.iter().map(read).collect() })
}

/// First sample of QEMU's counters. Histograms are enabled before it, so that they and the counters
/// begin together.
fn begin(qmp: &mut Qmp) -> std::result::Result<First, VmmError> {
    let mut ours = Vec::new();
    for disk in qmp.disk_stats()? {
        let has = [&disk.read, &disk.write].iter().any(|c| c.histogram.is_some());
        // An older QEMU has no such command: its counters serve then.
        if disk.file.is_some() && !has && qmp.set_latency_histogram(&disk.id, &boundaries()).is_ok() {
            ours.push(disk.id);
        }
    }
    Ok(First::Qemu { disks: qmp.disk_stats()?, at: Instant::now(), ours })
}

fn second(root: &Root, cgroups: Option<&Cgroups>, vm: &mut FoundVm, uri: &str, first: &First) {
    match first {
        First::Qemu { at, disks, .. } => {
            let stats = |mut qmp: Qmp| qmp.disk_stats().map_err(|e| Some(e.to_string()));
            let after = match connect(vm, uri).and_then(stats) {
                Ok(after) => after,
                Err(e) => {
                    let why = e.map_or_else(String::new, |e| format!(": {e}"));
                    vm.notes.push(format!("its monitor did not answer at the end of the observation{why}"));
                    return;
                }
            };
            for (disk, now) in disks.iter().filter_map(|d| Some((d, after.iter().find(|a| a.id == d.id)?))) {
                let seen = of_qemu(disk, now, at.elapsed());
                let Some(file) = disk.file.as_ref() else { continue };
                let Some(directions) = seen else {
                    vm.notes.push(format!("the counters of {file} began anew meanwhile"));
                    continue;
                };
                let activity = Some(Activity { source: Source::Qemu, directions });
                match vm.disks.iter_mut().find(|d| d.path.as_os_str() == file.as_str()) {
                    Some(known) => known.activity = activity,
                    None => vm
                        .notes
                        .push(format!("{file} is a disk of QEMU's that its process does not have open")),
                }
            }
        }
        First::Cgroup { at, counters } => {
            let (Some(cgroups), Some(cgroup)) = (cgroups, vm.cgroup.clone()) else { return };
            for (disk, before) in vm.disks.iter_mut().zip(counters) {
                let (Some(before), Some(device)) = (before, disk.device.as_ref()) else { continue };
                let now = IoCounters::read(root, cgroups, &cgroup, &device.dev).ok().flatten();
                let between = now.unwrap_or_default().since(before);
                disk.activity = between
                    .map(|b| Activity { source: Source::Cgroup, directions: of_cgroup(&b, at.elapsed()) });
            }
        }
    }
}
