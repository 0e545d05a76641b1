//! Hits of limits: every limiter that acts on a VM, with its counter of hits where there is one.
//! Most have none; then the use of the limit shows how near it is.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use rtvirtio_domain_protocol::histograms::DiskHistograms;
use rtvirtio_kernel::cgroup::Limit;
use rtvirtio_kernel::io_counters::IoCounters;
use rtvirtio_kernel::{BlockDevice, Cgroups, HostError, Root, unless_gone};
use rtvirtio_spec::Device;
use rtvirtio_vmm::disk_stats::DiskStats;
use rtvirtio_vmm::throttle::{Drive, ThrottleLimits};
use rtvirtio_workflow::vm_counters::Dimension;
use serde::Serialize;

use super::VmObservation;
use super::domain;
use super::qdisc;
use crate::linux::RunningVm;

/// Mechanism that enforces a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LimiterKind {
    /// A quota of CPU time of a cgroup.
    CpuQuota,
    /// blk-throttle: `io.max`, or `blkio.throttle.*` of cgroup v1.
    BlkThrottle,
    /// QEMU's throttling of a drive.
    QemuThrottle,
    /// A cap of the I/O domain.
    IoDomainCap,
    /// A queueing discipline of a network interface.
    Tc,
}

/// Use and hits of one limiter since the last sample.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LimiterObservation {
    /// Mechanism of the limiter.
    pub kind: LimiterKind,
    /// Setting and device, cgroup or interface that it applies to.
    pub name: String,
    /// Limit per second, in the unit of its name; `None` where that is not known.
    pub limit: Option<f64>,
    /// Use per second, in the unit of the limit; `None` where nothing counts that, and at the first
    /// sample.
    pub used: Option<f64>,
    /// Hits per second: requests, periods or frames held back; `None` where nothing counts that.
    pub hits_per_s: Option<f64>,
    /// Reason why hits are not counted.
    pub unseen: Option<String>,
    /// Part of I/O that it counts; `None` where that is not known, it counts requests by their size
    /// or those of several drives, and for others than disks.
    #[serde(skip)]
    pub dimension: Option<Dimension>,
    /// Cgroup whose requests it counts, of blk-throttle.
    #[serde(skip)]
    pub cgroup: Option<PathBuf>,
}

/// Counters of a VM's limiters at the last sample.
#[derive(Debug, Default)]
pub(super) struct LimiterCounters {
    at: Option<Instant>,
    groups: BTreeMap<(PathBuf, String), IoCounters>,
    drives: BTreeMap<String, DiskStats>,
    hits: BTreeMap<String, u64>,
}

/// Data of a VM that the sampler has already read.
pub(super) struct LimiterInput<'a> {
    pub vm: &'a RunningVm,
    /// QEMU's drives with their limits, and its counters.
    pub drives: &'a [Drive],
    pub disks: &'a [DiskStats],
    pub domain: &'a [&'a DiskHistograms],
}

const FIRST: &str = "counted from the next sample on";

impl LimiterCounters {
    /// Reads every limiter that acts on a VM.
    pub fn sample(
        &mut self,
        looked: &LimiterInput<'_>,
        seen: &VmObservation,
        root: &Root,
        now: Instant,
    ) -> Vec<LimiterObservation> {
        let seconds = self.at.map(|at| now.duration_since(at).as_secs_f64().max(f64::MIN_POSITIVE));
        self.at = Some(now);
        let mut all: Vec<LimiterObservation> = cpu_quota(looked.vm, seen).into_iter().collect();
        all.extend(self.groups(looked.vm, root, seconds));
        all.extend(self.drives(looked, seconds));
        let mut hits = BTreeMap::new();
        for disk in looked.domain {
            let directions = [("read", &disk.read), ("write", &disk.write)].into_iter().zip(disk.capped);
            for ((word, direction), _) in directions.filter(|(_, capped)| *capped) {
                let name = format!("{word} cap of {}", domain::id(disk));
                all.push(self.counted(
                    LimiterKind::IoDomainCap,
                    name,
                    direction.cap_hits,
                    seconds,
                    &mut hits,
                ));
            }
        }
        for nic in &looked.vm.contract.vm.nics {
            let Some(tap) = &nic.tap else { continue };
            match qdisc::limiting(tap) {
                Ok(qdiscs) => all.extend(qdiscs.into_iter().map(|one| {
                    let name = format!("{} {} of {tap}", one.kind, one.handle);
                    self.counted(LimiterKind::Tc, name, one.overlimits, seconds, &mut hits)
                })),
                Err(why) => all.push(unseen(LimiterKind::Tc, format!("qdiscs of {tap}"), why)),
            }
        }
        self.hits = hits;
        all
    }

    fn counted(
        &self,
        kind: LimiterKind,
        name: String,
        hits: u64,
        seconds: Option<f64>,
        into: &mut BTreeMap<String, u64>,
    ) -> LimiterObservation {
        let before = self.hits.get(&name).and_then(|then| hits.checked_sub(*then));
        let hits_per_s = before.zip(seconds).map(|(n, seconds)| n as f64 / seconds);
        into.insert(name.clone(), hits);
        let unseen = hits_per_s.is_none().then(|| FIRST.to_owned());
        LimiterObservation { hits_per_s, unseen, ..limiter(kind, name) }
    }

    /// Limits of the cgroup that a VM is in, and of those above it, for the disks of its contract.
    fn groups(&mut self, vm: &RunningVm, root: &Root, seconds: Option<f64>) -> Vec<LimiterObservation> {
        const WHY: &str = "the kernel counts no requests that blk-throttle has held up; what was used of the limit is shown";
        let mut out = Vec::new();
        let mut counters = BTreeMap::new();
        let before = std::mem::take(&mut self.groups);
        let (cgroups, group) = match group_of(vm, root) {
            Ok(Some(found)) => found,
            Ok(None) => return out,
            Err(e) => {
                let name = "limits of its cgroup".to_owned();
                return vec![unseen(LimiterKind::BlkThrottle, name, e.to_string())];
            }
        };
        for part in &vm.contract.parts {
            let Device::Path(path) = &part.spec.device else { continue };
            let limits = BlockDevice::find(root, path).and_then(|device| {
                let limits = cgroups.limits_on_path(root, &group, &device.dev)?;
                Ok((device, limits))
            });
            let (device, limits) = match limits {
                Ok(found) => found,
                Err(e) => {
                    let name = format!("limits for {}", path.display());
                    out.push(unseen(LimiterKind::BlkThrottle, name, e.to_string()));
                    continue;
                }
            };
            for one in limits {
                let key = (one.cgroup.clone(), device.dev.clone());
                if !counters.contains_key(&key) {
                    // An unreadable counter is left out: from 0 on, all since its start would
                    // count.
                    if let Ok(read) = IoCounters::read(root, &cgroups, &one.cgroup, &device.dev) {
                        counters.insert(key.clone(), read.unwrap_or_default());
                    }
                }
                let between = before.get(&key).and_then(|then| counters.get(&key)?.since(then));
                let used = between.zip(seconds).map(|(io, seconds)| part_of(&io, one.limit) / seconds);
                out.push(LimiterObservation {
                    kind: LimiterKind::BlkThrottle,
                    name: named(one.limit, path, &one.cgroup),
                    limit: Some(one.value as f64),
                    used,
                    hits_per_s: None,
                    unseen: Some(WHY.to_owned()),
                    dimension: Some(Dimension::of_limit(one.limit)),
                    cgroup: Some(one.cgroup),
                });
            }
        }
        self.groups = counters;
        out
    }

    /// Throttle limits of QEMU's drives.
    fn drives(&mut self, looked: &LimiterInput<'_>, seconds: Option<f64>) -> Vec<LimiterObservation> {
        const WHY: &str =
            "QEMU counts no requests that its throttling has held up; what was used of the limit is shown";
        let mut out = Vec::new();
        for drive in looked.drives {
            // By the file: the two commands name drives in different ways.
            let file = drive.file.as_ref().map(|file| file.display().to_string());
            let now = looked.disks.iter().find(|disk| file.is_some() && disk.file == file);
            let before = now.and_then(|now| self.drives.get(&now.id));
            // What the other drives of a throttle group use of its limits is not counted here.
            let is_shared = !drive.shared_with.is_empty();
            for limits in &drive.limits {
                let is_counted = |name: &str| !is_shared && !limits.is_by_size(name);
                for (name, limit, of) in each(limits) {
                    let done = now.zip(before).and_then(|(now, then)| of(now).checked_sub(of(then)));
                    let used = done.zip(seconds).map(|(n, seconds)| n as f64 / seconds);
                    out.push(LimiterObservation {
                        limit: Some(limit as f64),
                        used,
                        unseen: Some(WHY.to_owned()),
                        dimension: is_counted(name).then(|| Dimension::of_throttle(name)),
                        ..limiter(LimiterKind::QemuThrottle, format!("{name} of {}", drive.name))
                    });
                }
            }
        }
        self.drives = looked.disks.iter().map(|disk| (disk.id.clone(), disk.clone())).collect();
        out
    }
}

/// The cgroup that a VM is in; `None` when it has ended.
fn group_of(vm: &RunningVm, root: &Root) -> Result<Option<(Cgroups, PathBuf)>, HostError> {
    let Some(process) = vm.processes.first() else { return Ok(None) };
    let cgroups = Cgroups::detect(root)?;
    let group = unless_gone(cgroups.of_pid(root, process.pid))?;
    Ok(group.map(|group| (cgroups, group)))
}

/// A limiter of which nothing is known yet.
fn limiter(kind: LimiterKind, name: String) -> LimiterObservation {
    LimiterObservation {
        kind,
        name,
        limit: None,
        used: None,
        hits_per_s: None,
        unseen: None,
        dimension: None,
        cgroup: None,
    }
}

fn unseen(kind: LimiterKind, name: String, why: String) -> LimiterObservation {
    LimiterObservation { unseen: Some(why), ..limiter(kind, name) }
}

/// CPU quota of a VM's contract, or of its cgroup without one.
fn cpu_quota(vm: &RunningVm, seen: &VmObservation) -> Option<LimiterObservation> {
    let hits_per_s = seen.throttled_per_s;
    if hits_per_s.is_none() && vm.cpu.is_none() {
        return None;
    }
    let why = "a real-time budget and SCHED_DEADLINE have no counter, and a quota is counted from the next sample on";
    Some(LimiterObservation {
        used: seen.cpu_used,
        hits_per_s,
        unseen: hits_per_s.is_none().then(|| why.to_owned()),
        ..limiter(LimiterKind::CpuQuota, "CPU time".to_owned())
    })
}

fn part_of(io: &IoCounters, limit: Limit) -> f64 {
    let n = match limit {
        Limit::ReadIops => io.reads,
        Limit::WriteIops => io.writes,
        Limit::ReadBps => io.read_bytes,
        Limit::WriteBps => io.write_bytes,
    };
    n as f64
}

fn named(limit: Limit, device: &Path, cgroup: &Path) -> String {
    format!("{} for {} in {}", limit.key(), device.display(), cgroup.display())
}

type Count = fn(&DiskStats) -> u64;

/// Limits that are set, each with the counter that it applies to.
fn each(limits: &ThrottleLimits) -> Vec<(&'static str, u64, Count)> {
    let all: [(&'static str, u64, Count); 6] = [
        ("iops-total", limits.iops, |s| s.read.ops + s.write.ops),
        ("iops-read", limits.iops_rd, |s| s.read.ops),
        ("iops-write", limits.iops_wr, |s| s.write.ops),
        ("bps-total", limits.bps, |s| s.read.bytes + s.write.bytes),
        ("bps-read", limits.bps_rd, |s| s.read.bytes),
        ("bps-write", limits.bps_wr, |s| s.write.bytes),
    ];
    all.into_iter().filter(|(_, limit, _)| *limit > 0).collect()
}

#[cfg(test)]
pub(super) mod tests;
