//! Waits of VMs for each other: by the I/O domain's counters, and by those of the VMs' cgroups.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rtvirtio_kernel::device_io::DeviceIo;
use rtvirtio_kernel::io_counters::IoCounters;
use rtvirtio_kernel::{BlockDevice, Cgroups, Root, unless_gone};
use rtvirtio_measure::waits::{Interval, Use, WaitRow, estimate};
use rtvirtio_model::{Service, service};
use rtvirtio_spec::{Device, Spec};
use rtvirtio_vmm::disk_stats::DiskStats;
use rtvirtio_workflow::domain::client;
use rtvirtio_workflow::plan::load_profile;
use rtvirtio_workflow::{Dirs, Kind};
use serde::{Deserialize, Serialize};

use super::domain::control;
use super::domain_waits::{DomainCounters, domain_counters, exact};
use super::facts::devices;
use crate::history::now;
use crate::linux::RunningVm;

const WINDOW: Duration = Duration::from_secs(300);

/// Waits of VMs for each other, over the last minutes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WaitsObservation {
    /// Time of the sample, RFC 3339; empty before the first one.
    pub time: String,
    /// Rows, one for each VM and device.
    pub rows: Vec<WaitRow>,
    /// Sources that could not be read, each with the reason.
    pub unseen: Vec<String>,
}

/// Windows of the I/O domain's and the devices' counters.
#[derive(Debug, Default)]
pub(super) struct WaitWindows {
    begin: Option<Instant>,
    domain: VecDeque<(f64, DomainCounters)>,
    devices: BTreeMap<PathBuf, DeviceWindow>,
}

#[derive(Debug, Default)]
struct DeviceWindow {
    last: Option<DeviceSample>,
    intervals: VecDeque<(Instant, Interval)>,
}

/// Inputs that all devices of one sample share.
struct SampleInput<'a> {
    groups: Option<&'a (Cgroups, BTreeMap<String, PathBuf>)>,
    disks: &'a BTreeMap<String, DiskStats>,
    root: &'a Root,
    dirs: &'a Dirs,
    at: Instant,
}

/// The counters of a device at one moment.
#[derive(Clone, Debug)]
struct DeviceSample {
    at: Instant,
    device: DeviceIo,
    groups: BTreeMap<String, IoCounters>,
    /// QEMU's counters of VMs that have this disk only.
    latencies: BTreeMap<String, DiskStats>,
}

impl WaitWindows {
    /// Takes one sample. `disks` has the counters of each VM with one disk.
    pub fn sample(
        &mut self,
        vms: &[Arc<RunningVm>],
        disks: &BTreeMap<String, DiskStats>,
        root: &Root,
        dirs: &Dirs,
    ) -> WaitsObservation {
        let at = Instant::now();
        let mut out = WaitsObservation { time: now(), ..WaitsObservation::default() };
        match domain(dirs) {
            Ok(Some(counters)) => {
                let begin = *self.begin.get_or_insert(at);
                let seconds = at.duration_since(begin).as_secs_f64();
                self.domain.push_back((seconds, counters));
                while self.domain.get(1).is_some_and(|(then, _)| seconds - then >= WINDOW.as_secs_f64()) {
                    self.domain.pop_front();
                }
                out.rows.extend(exact(self.domain.make_contiguous()));
            }
            Ok(None) => self.domain.clear(),
            Err(why) => {
                self.domain.clear();
                out.unseen.push(format!("the I/O domain: {why}"));
            }
        }
        let groups = groups(vms, root, &mut out.unseen);
        let paths: BTreeSet<PathBuf> = vms.iter().flat_map(|vm| devices(vm)).collect();
        self.devices.retain(|path, _| paths.contains(path));
        for path in paths {
            let window = self.devices.entry(path.clone()).or_default();
            let users: Vec<&RunningVm> =
                vms.iter().map(Arc::as_ref).filter(|vm| devices(vm).any(|of| of == path)).collect();
            match window.sample(
                &path,
                &users,
                &SampleInput { groups: groups.as_ref(), disks, root, dirs, at },
            ) {
                Ok(rows) => out.rows.extend(rows),
                Err(why) => {
                    // A gap would count requests of the unseen time.
                    *window = DeviceWindow::default();
                    out.unseen.push(format!("{}: {why}", path.display()));
                }
            }
        }
        out
    }
}

/// The counters of an I/O domain; `None` where none runs.
fn domain(dirs: &Dirs) -> Result<Option<DomainCounters>, String> {
    let Some(control) = control(dirs)? else { return Ok(None) };
    let status = client::ask(&control).map_err(|e| format!("{e:#}"))?;
    Ok(Some(domain_counters(status.vms)))
}

fn groups(
    vms: &[Arc<RunningVm>],
    root: &Root,
    unseen: &mut Vec<String>,
) -> Option<(Cgroups, BTreeMap<String, PathBuf>)> {
    let cgroups = match Cgroups::detect(root) {
        Ok(cgroups) => cgroups,
        Err(e) => {
            unseen.push(format!("shares of VMs of disks: {e}"));
            return None;
        }
    };
    let of = |vm: &RunningVm| {
        let group = cgroups.of_pid(root, vm.processes.first()?.pid).ok()?;
        Some(Cgroups::unit_of(&group))
    };
    let all: BTreeMap<String, PathBuf> =
        vms.iter().filter_map(|vm| Some((vm.contract.vm.name.clone(), of(vm)?))).collect();
    let shared = |group: &Path| all.values().filter(|other| *other == group).count() > 1;
    let (bad, good): (BTreeMap<_, _>, BTreeMap<_, _>) =
        all.clone().into_iter().partition(|(_, group)| Cgroups::is_root(group) || shared(group));
    if !bad.is_empty() {
        let names: Vec<&str> = bad.keys().map(String::as_str).collect();
        unseen.push(format!(
            "{}: no cgroup of their own, so their shares of disks cannot be distinguished",
            names.join(", ")
        ));
    }
    Some((cgroups, good))
}

impl DeviceWindow {
    fn sample(
        &mut self,
        path: &Path,
        users: &[&RunningVm],
        seen: &SampleInput<'_>,
    ) -> Result<Vec<WaitRow>, String> {
        let SampleInput { groups, disks, root, dirs, at } = *seen;
        let Some((cgroups, groups)) = groups else { return Ok(Vec::new()) };
        let spec = Spec { device: Device::Path(path.to_owned()), vms: Vec::new() };
        let profile = load_profile(&spec, None, dirs).map_err(|e| match e.kind() {
            Kind::NotMeasured => format!(
                "it is not measured, so its time cannot be split by VM: `rtvirtio profile {}`",
                rtvirtio_text::shell_path(path)
            ),
            _ => format!("{e:#}"),
        })?;
        let service = service(&profile).map_err(|e| e.to_string())?;
        let words = |e: rtvirtio_kernel::HostError| e.to_string();
        let device = BlockDevice::find(root, path).map_err(words)?;
        let mut look = DeviceSample {
            at,
            device: DeviceIo::read(root, &device).map_err(words)?,
            groups: BTreeMap::new(),
            latencies: BTreeMap::new(),
        };
        for vm in users {
            let name = &vm.contract.vm.name;
            let Some(group) = groups.get(name) else { continue };
            // A group that is gone belongs to a VM that has ended meanwhile; one without counters
            // has sent nothing yet.
            let counters = unless_gone(IoCounters::read(root, cgroups, group, &device.dev)).map_err(words)?;
            if let Some(counters) = counters {
                look.groups.insert(name.clone(), counters.unwrap_or_default());
            }
            if let Some(stats) = disks.get(name).filter(|_| vm.contract.parts.len() == 1) {
                look.latencies.insert(name.clone(), stats.clone());
            }
        }
        if let Some(interval) = self.last.as_ref().and_then(|last| between(last, &look, &service)) {
            self.intervals.push_back((at, interval));
        }
        self.last = Some(look);
        while self.intervals.front().is_some_and(|(then, _)| at.duration_since(*then) >= WINDOW) {
            self.intervals.pop_front();
        }
        let intervals: Vec<Interval> = self.intervals.iter().map(|(_, interval)| interval.clone()).collect();
        Ok(estimate(&path.display().to_string(), &intervals))
    }
}

/// `None` when the device's counters began anew.
fn between(before: &DeviceSample, after: &DeviceSample, service: &Service) -> Option<Interval> {
    let all = after.device.since(&before.device)?;
    let all = IoCounters {
        reads: all.reads,
        writes: all.writes,
        read_bytes: all.read_bytes,
        write_bytes: all.write_bytes,
    };
    let one = |(vm, now): (&String, &IoCounters)| {
        let done = now.since(before.groups.get(vm)?)?;
        let latencies = before.latencies.get(vm).zip(after.latencies.get(vm));
        let waited_s = latencies.and_then(|(then, now)| waited(then, now, service));
        Some(Use { vm: vm.clone(), device_s: occupied(&done, service), waited_s })
    };
    Some(Interval {
        seconds: after.at.duration_since(before.at).as_secs_f64(),
        uses: after.groups.iter().filter_map(one).collect(),
        device_s: occupied(&all, service),
    })
}

/// Device time of requests, in seconds. Writes count as reads where writes were not measured.
fn occupied(done: &IoCounters, service: &Service) -> f64 {
    let line = |line: &rtvirtio_model::ServiceLine, n: u64, bytes: u64| {
        let more = bytes.saturating_sub(n.saturating_mul(service.block.0));
        n as f64 * line.occupancy + more as f64 * line.per_byte
    };
    let writes = service.write.as_ref().unwrap_or(&service.read);
    line(&service.read, done.reads, done.read_bytes) + line(writes, done.writes, done.write_bytes)
}

/// Seconds that requests of a VM took beyond their time without load; `None` when QEMU's counters
/// began anew.
fn waited(before: &DiskStats, after: &DiskStats, service: &Service) -> Option<f64> {
    let writes = service.write.as_ref().unwrap_or(&service.read);
    let mut total = 0.0;
    for (then, now, line) in
        [(&before.read, &after.read, &service.read), (&before.write, &after.write, writes)]
    {
        let n = now.ops.checked_sub(then.ops)?;
        let bytes = now.bytes.checked_sub(then.bytes)?;
        let took = now.time_ns.checked_sub(then.time_ns)? as f64 / 1e9;
        let more = bytes.saturating_sub(n.saturating_mul(service.block.0));
        let alone = n as f64 * line.alone + more as f64 * line.alone_per_byte;
        total += (took - alone).max(0.0);
    }
    Some(total)
}

#[cfg(test)]
mod tests {
    use rtvirtio_vmm::disk_stats::Counters;

    use super::*;

    /// A drive's profile: 132 us for a read of 4 KiB.
    const PROFILE: &str = include_str!("../../../learn/data/qlc-nvme.profile.json");

    fn stats(ops: u64, time_ms: u64) -> DiskStats {
        let counters = Counters { ops, bytes: ops * 4096, time_ns: time_ms * 1_000_000, histogram: None };
        DiskStats {
            id: "d".to_owned(),
            file: None,
            format: None,
            read_only: false,
            read: counters,
            write: Counters::default(),
            flush: Counters::default(),
        }
    }

    #[test]
    fn an_interval_has_what_each_group_had_and_what_the_rest_had() {
        let service = service(&serde_json::from_str(PROFILE).unwrap()).unwrap();
        let reads = |reads: u64| IoCounters { reads, read_bytes: reads * 4096, ..IoCounters::default() };
        let begin = Instant::now();
        let look = |seconds: u64, plc: u64, hist: u64, all: u64, took_ms: u64| DeviceSample {
            at: begin + Duration::from_secs(seconds),
            device: DeviceIo { reads: all, read_bytes: all * 4096, ..DeviceIo::default() },
            groups: [("plc".to_owned(), reads(plc)), ("hist".to_owned(), reads(hist))].into(),
            latencies: [("plc".to_owned(), stats(plc, took_ms))].into(),
        };
        let (first, second) = (look(0, 100, 0, 1_000, 10), look(10, 1_100, 6_000, 11_000, 1_010));
        let interval = between(&first, &second, &service).unwrap();
        let of = |vm: &str| interval.uses.iter().find(|u| u.vm == vm).unwrap();
        assert_eq!(interval.seconds, 10.0);
        assert!((of("hist").device_s / of("plc").device_s - 6.0).abs() < 1e-9);
        assert!((interval.device_s / of("plc").device_s - 10.0).abs() < 1e-9);
        // 1 s of latency for 1000 reads, of which 132 us each are the drive's.
        let waited = of("plc").waited_s.unwrap();
        assert!((waited - 0.868).abs() < 0.01, "{waited}");
        assert_eq!(of("hist").waited_s, None);
        // A restart of QEMU or of the device is no interval of theirs.
        assert_eq!(between(&second, &first, &service), None);
        let again = look(20, 5, 7_000, 12_000, 5);
        let interval = between(&second, &again, &service).unwrap();
        assert_eq!(interval.uses.iter().map(|u| u.vm.as_str()).collect::<Vec<_>>(), ["hist"]);
    }
}
