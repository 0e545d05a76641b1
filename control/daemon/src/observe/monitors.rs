//! Disks of VMs by their monitors' counters, each monitor asked in a thread of its own: one that
//! does not answer, or answers each question just in time, delays no other VM's sample.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rtvirtio_kernel::detached::Detached;
use rtvirtio_kernel::{ProcessId, Root};
use rtvirtio_measure::observe::boundaries;
use rtvirtio_spec::{HostHandle, Reach, Vm};
use rtvirtio_vmm::VmmError;
use rtvirtio_vmm::disk_stats::DiskStats;
use rtvirtio_vmm::throttle::Drive;
use rtvirtio_workflow::{Dirs, find};

use crate::linux::RunningVm;

/// Timeout of the answers to one sample's questions.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// Interval before a monitor that has failed twice is asked again; it doubles with each failure, up
/// to [`MAX_RETRY_DELAY`], because answers cost time and memory.
const MIN_RETRY_DELAY: Duration = Duration::from_secs(2);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(60);

/// Disks of a VM with their counters, and drives with their throttle limits; else the reason why
/// these are not known.
pub(super) type Disks = Result<(Vec<DiskStats>, Vec<Drive>), String>;

/// Question to a VM's monitor that has no answer yet.
struct Question {
    /// Processes of the VM when it was asked.
    processes: Vec<ProcessId>,
    since: Instant,
    thread: Detached<(Instant, Disks)>,
}

/// Pending question to a VM's monitor, and its failures.
struct Asked {
    processes: Vec<ProcessId>,
    pending: Option<Question>,
    /// Failures in a row.
    failures: u32,
    /// Earliest time of the next question.
    again: Instant,
    /// Error of the last answer; `None` after a success.
    why: Option<String>,
}

/// State of every VM's monitor, by the VM's name.
pub(super) struct Monitors {
    dirs: Dirs,
    /// Whether monitors of libvirt's domains may be asked, which taints these.
    of_libvirt: bool,
    asked: BTreeMap<String, Asked>,
}

impl Monitors {
    pub fn new(dirs: Dirs, of_libvirt: bool) -> Self {
        Self { dirs, of_libvirt, asked: BTreeMap::new() }
    }

    /// Asks the monitors that are due, and waits up to `ANSWER_TIMEOUT` for answers. Each VM has
    /// one, with the time of its arrival.
    pub fn sample(&mut self, vms: &[Arc<RunningVm>]) -> BTreeMap<String, (Instant, Disks)> {
        let now = Instant::now();
        self.asked.retain(|name, _| vms.iter().any(|vm| vm.contract.vm.name == *name));
        // Answers that were late for an earlier sample come first, so that these monitors are asked
        // anew: each sample has an answer of one that takes longer than `ANSWER_TIMEOUT`.
        let mut arrived = self.take(|_| Duration::ZERO);
        for vm in vms {
            self.ask(vm, now);
        }
        let left = || (now + ANSWER_TIMEOUT).saturating_duration_since(Instant::now());
        arrived.extend(self.take(|of| if of.since >= now { left() } else { Duration::ZERO }));
        for (vm, asked) in &self.asked {
            arrived.entry(vm.clone()).or_insert_with(|| (now, Err(asked.unseen(now))));
        }
        arrived
    }

    /// Takes answers, each waited for as long as `limit` says of its question.
    fn take(&mut self, limit: impl Fn(&Question) -> Duration) -> BTreeMap<String, (Instant, Disks)> {
        let mut arrived = BTreeMap::new();
        for (vm, asked) in &mut self.asked {
            let Some(question) = &asked.pending else { continue };
            let Some(answer) = question.thread.wait(limit(question)) else { continue };
            let failed = |e: std::io::Error| (Instant::now(), Err(format!("its monitor was not asked: {e}")));
            let (at, disks) = answer.unwrap_or_else(failed);
            // An answer of an earlier start of the VM is dropped: the VM is asked anew.
            if asked.pending.take().is_some_and(|of| of.processes == asked.processes) {
                asked.note(&disks, at);
                arrived.insert(vm.clone(), (at, disks));
            }
        }
        arrived
    }

    /// Asks a VM's monitor unless a question is pending or not due; returns whether it was asked.
    fn ask(&mut self, vm: &Arc<RunningVm>, now: Instant) -> bool {
        let name = &vm.contract.vm.name;
        let fresh =
            || Asked { processes: vm.processes.clone(), pending: None, failures: 0, again: now, why: None };
        let asked = self.asked.entry(name.clone()).or_insert_with(fresh);
        if asked.processes != vm.processes {
            *asked = Asked { pending: asked.pending.take(), ..fresh() };
        }
        if asked.pending.is_some() || now < asked.again {
            return false;
        }
        let (vm, dirs, of_libvirt) = (Arc::clone(vm), self.dirs.clone(), self.of_libvirt);
        let processes = vm.processes.clone();
        let disks = move || {
            let disks = disks_of(&vm.contract.vm, &dirs, of_libvirt);
            (Instant::now(), disks)
        };
        match Detached::call("monitor", disks) {
            Ok(thread) => asked.pending = Some(Question { processes, since: now, thread }),
            Err(e) => asked.why = Some(format!("no thread asks its monitor: {e}")),
        }
        asked.pending.is_some()
    }
}

impl Asked {
    fn note(&mut self, disks: &Disks, now: Instant) {
        match disks {
            Ok(_) => (self.failures, self.why) = (0, None),
            Err(why) => {
                self.failures = self.failures.saturating_add(1);
                self.why = Some(why.clone());
                if let Some(times) = self.failures.checked_sub(2) {
                    self.again = now + MIN_RETRY_DELAY.saturating_mul(1 << times.min(8)).min(MAX_RETRY_DELAY);
                }
            }
        }
    }

    /// Reason why the VM's disks are not seen at `now`.
    fn unseen(&self, now: Instant) -> String {
        let waits = |since: Instant| {
            format!("its monitor has not answered for {} s", now.saturating_duration_since(since).as_secs())
        };
        match (self.pending.as_ref().map(|of| of.since), &self.why) {
            (Some(since), None) => waits(since),
            (Some(since), Some(why)) => format!("{}; before: {why}", waits(since)),
            (None, Some(why)) => why.clone(),
            (None, None) => "it is queried with the next sample".to_owned(),
        }
    }
}

/// Reads disks and drives. Where QEMU keeps no histogram yet, `block-latency-histogram-set` sets
/// one with the targets' limits; it lasts as long as this start of QEMU.
fn disks_of(vm: &Vm, dirs: &Dirs, of_libvirt: bool) -> Disks {
    let is_domain = matches!(&vm.reach, Reach::Existing { host: HostHandle::Domain(_), .. });
    if is_domain && !of_libvirt {
        return Err(
            "set `monitor_of_libvirt = true`: QEMU's counters of a domain are read through libvirt's monitor command, which taints it"
                .to_owned(),
        );
    }
    let found = find::one_of_host(std::slice::from_ref(vm), &vm.name, dirs)
        .and_then(|vm| vm.monitor(&Root::default()));
    let mut qmp = match found {
        Ok(Some(qmp)) => qmp,
        Ok(None) => {
            return Err("it is reached without a monitor, so QEMU's counters cannot be read".to_owned());
        }
        Err(e) => return Err(format!("{e:#}")),
    };
    let words = |e: VmmError| e.to_string();
    let mut disks = qmp.disk_stats().map_err(words)?;
    let without =
        |d: &DiskStats| d.file.is_some() && d.read.histogram.is_none() && d.write.histogram.is_none();
    let lacking: Vec<String> = disks.iter().filter(|d| without(d)).map(|d| d.id.clone()).collect();
    if !lacking.is_empty() {
        let limits = limits(vm);
        for id in lacking {
            // QEMU before 4.0 has no such command: rates are seen all the same.
            let _ = qmp.set_latency_histogram(&id, &limits);
        }
        disks = qmp.disk_stats().map_err(words)?;
    }
    disks.retain(|d| d.file.is_some());
    let drives = qmp.query_drives().map_err(words)?;
    Ok((disks, drives))
}

/// Limits of a histogram: the usual ones, and every target's latency, so that what exceeds a target
/// is counted exactly.
pub(super) fn limits(vm: &Vm) -> Vec<u64> {
    let targets = vm.tasks.iter().flat_map(|task| task.goals().flatten()).map(|target| target.latency.0);
    let mut limits = boundaries();
    limits.extend(targets.filter(|latency| *latency > 0));
    limits.sort_unstable();
    limits.dedup();
    limits
}

#[cfg(test)]
mod tests;
