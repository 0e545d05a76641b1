//! Causes of a missed target, named where counters of its window show them.
//!
//! A cause is named only with evidence above a threshold; a fact that could not be read is `None`
//! and names nothing. Two causes are named where both have it. Shares are estimates.
//!
//! # Evidence
//!
//! - A limit holds a VM when it used at least [`USED`] of it, while the disk did not stand still,
//!   and asked for more: the backlog then grows as long as the load lasts, so that the
//!   limit is the whole cause. Where it declares no more than the limit, and sends at least
//!   [`OVER`] times that, its own load is. A limit that others share is judged by what all use and
//!   ask for. Where it is used up by requests of unknown load, whether it holds the VM is not
//!   known: neither it nor a cause that it would rule out is named.
//! - A stop (own CPU quota, stall of the host, standstill of the disk) of length `S` in sum delays
//!   at most the `r S` requests that arrive meanwhile at rate `r`. Divided by the late ones this is
//!   its share, as in `rtvirtio-measure`'s `late`.
//! - Waits for memory are such stops, by the time that the kernel counts (`rtvirtio-measure`'s
//!   `memory_waits`), less that of all stalls of the host; they name nothing without a major fault
//!   of the VM, or where memory may be compressed.
//! - `k` late requests waited for more than `k T` in sum, with `T` the target. Where all requests
//!   of the device, of whatever VM, spent less than half of that in the block layer, the device and
//!   its users are not the cause, and waiting for CPUs may be named, where the VM itself does not
//!   use most of them.
//! - Where half of the requests are late, and the mean request spends at least half of the median's
//!   latency in the block layer, or of the time that a task with so many requests at once has for
//!   each at its rate, the device is where they wait. So it is where nothing else is named, and the
//!   late ones' time was spent below the guest and not for CPUs. Where the VMM counts other tasks
//!   with it, the mean request stands for the task's where at least [`MANY`] wait at once, and only
//!   the VM's own load is named by it. Of those who moved the device's bytes, each other one with
//!   at least [`SHARED`] of them is named, and so is the VM's own load, by the bytes that it sends
//!   above its declaration. A VM with at least [`ALONE`] of them waits for its own load where it
//!   sends [`OVER`] times what it declares, which the device carries then, else for the device;
//!   neither is named where more came than declared, but not with the time before.
//! - BFQ is named where requests wait at the device, it held some back for at least [`NAMED`] of
//!   the time while the driver had none, and nothing else is named: a device with nothing to do is
//!   not too slow.
//! - Where nothing else is named, the device and its users are not the cause, no limit holds the
//!   VM, and waits for CPUs, quotas and stalls of the host can have delayed at most [`LITTLE`] of
//!   the late requests, its memory is the cause where its processes had a major fault for at least
//!   [`NAMED`] of these, none of them of compressed memory, and waits for memory are not known. The
//!   guest is where the host had hardly any fault, and the VMM counts the task's requests alone,
//!   but had them for at most [`INSIDE`] of the time in which they were late.

mod cpu;
mod inside;
mod limit;
mod users;
mod words;

pub use inside::{Faults, INSIDE, LITTLE, VmUse};
pub use limit::{Limit, Limiter, OtherUsers};
pub use words::describe;

use rtvirtio_units::Nanos;
use serde::{Deserialize, Serialize};

use users::{elevator, users};

/// Part of a limit in use from which on it holds.
pub const USED: f64 = 0.9;
/// Share of the time in which a task was late that its requests must have spent below the guest.
const BELOW: f64 = 2.0 / 3.0;
/// Part of the latency of requests on time that counts as spent below the guest.
const ON_TIME: f64 = 0.2;
/// Mean number of requests of a VM below the guest from which on those of all its tasks are taken
/// to wait alike, on a device that serves one after the other. One that serves many at once does
/// not do so, which is why no other user of the device is named by it.
pub const MANY: f64 = 4.0;
/// Stops by a quota may last longer than their lower bound, which divides their sum by the CPUs
/// that may stop at once: this many times is assumed where nothing else is ruled out by it.
const QUOTA_ERROR: u64 = 2;
/// Least share of a window by which the use of a limit is judged.
const MOVING: f64 = 0.5;
/// Share of the late requests from which on a cause is named.
pub const NAMED: f64 = 0.3;
/// Share of a device's bytes from which on another user of it is named.
pub const SHARED: f64 = 0.4;
/// Share of a device's bytes from which on a VM counts as alone on it.
pub const ALONE: f64 = 0.8;
/// Rate as a multiple of the declared one from which on the load is above the declaration.
pub const OVER: f64 = 1.1;
/// Time per second that one of the VM's threads was ready without a CPU, or share of the host's CPU
/// time that the hypervisor below stole, from which on it is named.
pub const WAITED: f64 = 0.3;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CauseKind {
    /// Limit of a cgroup for the device.
    KernelLimit,
    /// Throttling of a drive by QEMU.
    QemuThrottle,
    /// The VM sends more than it declares.
    Load,
    /// Quota of CPU time of the VM's own cgroup.
    CpuQuota,
    /// The hypervisor below this host took its CPUs.
    CpuSteal,
    /// Threads of the VM were ready while others used the CPUs.
    CpuOthers,
    /// CPUs of the host stalled.
    HostStall,
    /// The disk held requests and completed none.
    DiskStall,
    /// Use of the device by another VM.
    Neighbour,
    /// A program that is none of the VMs used the device.
    OtherProgram,
    /// The device does not keep up with this VM alone.
    Device,
    /// The host's elevator held requests back while the device had none.
    Elevator,
    /// Memory of the VM had to be read back from a disk.
    Paging,
    /// The guest itself: its elevator, limits or busy CPUs.
    Guest,
}

impl CauseKind {
    /// Every kind.
    pub const ALL: [Self; 14] = [
        Self::KernelLimit,
        Self::QemuThrottle,
        Self::Load,
        Self::CpuQuota,
        Self::CpuSteal,
        Self::CpuOthers,
        Self::HostStall,
        Self::DiskStall,
        Self::Neighbour,
        Self::OtherProgram,
        Self::Device,
        Self::Elevator,
        Self::Paging,
        Self::Guest,
    ];
}

/// Cause of a missed target.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cause {
    pub kind: CauseKind,
    /// Estimated share of the late requests that it delayed, 0 to 1, of stops: of other causes it
    /// is not known.
    pub share: Option<f64>,
    /// Cause in words, with the numbers that show it.
    pub evidence: String,
    /// Remedy in words.
    pub remedy: String,
}

/// Stops of something in the window.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stops {
    pub count: u64,
    /// Sum of their lengths.
    pub total: Nanos,
}

/// Use of the device in the window, all requests of all programs.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceUse {
    /// Requests completed.
    pub requests: f64,
    /// Time that these spent in the block layer, from their start to their completion, in seconds.
    pub waited: f64,
    /// Share of its bytes by VM, this one's included; `None` where some VM's is not counted.
    pub shares: Option<Vec<(String, f64)>>,
}

/// Load of the VM, against what it declares.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Load {
    /// Completed per second.
    pub sent: f64,
    /// Declared per second.
    pub declared: f64,
    /// Bytes are counted, else requests.
    pub bytes: bool,
}

impl Load {
    /// Whether it is above the declaration.
    fn is_above(&self) -> bool {
        self.declared > 0.0 && self.sent >= self.declared * OVER
    }

    /// Part of what it sends that is above the declaration.
    fn excess(&self) -> f64 {
        if self.is_above() { 1.0 - self.declared / self.sent } else { 0.0 }
    }

    /// Cause, where it is above the declaration.
    fn cause(&self) -> Option<Cause> {
        let of = |n: f64| if self.bytes { format!("{:.0} kB/s", n / 1e3) } else { format!("{n:.0}/s") };
        self.is_above().then(|| Cause {
            kind: CauseKind::Load,
            share: None,
            evidence: format!("it sends {} and declares {}", of(self.sent), of(self.declared)),
            remedy: "lower what the guest sends, or declare it and plan again".to_owned(),
        })
    }
}

/// Facts of the window in which a target was missed. `None` is what could not be read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Facts {
    pub vm: String,
    /// Length of the window in seconds.
    pub seconds: f64,
    /// Requests per second that were due or, where that is not known, came.
    pub rate: f64,
    /// Load of the VM, where more may come than it declares.
    pub load: Option<Load>,
    /// Completed requests.
    pub n: u64,
    /// Requests above the target.
    pub late: u64,
    pub target: Nanos,
    /// Median latency.
    pub median: Nanos,
    /// Requests that the task has at once at most, where its latencies begin when a request is due:
    /// they hold the wait for an earlier one's end then.
    pub depth: Option<u32>,
    /// Limits that act on the VM for the device.
    pub limits: Option<Vec<Limit>>,
    /// Whether the limits have those of QEMU, where QEMU has the requests.
    pub has_throttling: bool,
    /// Stops by CPU quotas of the VM's cgroup and those above; the sum of their lengths is a lower
    /// bound.
    pub quota: Option<Stops>,
    /// Time per second that one of its threads was ready without a CPU, the one with the longest.
    pub ready: Option<f64>,
    /// Share of the time of all CPUs that the hypervisor below this host took.
    pub stolen: Option<f64>,
    /// CPUs of this host.
    pub cpus: Option<u32>,
    /// CPUs that the VM's own threads used, in the mean.
    pub own_cpus: Option<f64>,
    /// Stalls of the host.
    pub host: Option<Stops>,
    /// Standstills of the disk, less the host's stalls.
    pub disk: Option<Stops>,
    pub device: Option<DeviceUse>,
    /// Share of the time in which the elevator held requests back while the driver had none.
    pub held: Option<f64>,
    /// The VM's requests, where their latencies are known below the guest too.
    pub below: Option<VmUse>,
    /// Page faults, where they were counted.
    pub faults: Option<Faults>,
    /// Spans in which the VM waited for memory, each by the time that the kernel counted in it.
    pub memory: Option<Stops>,
}

impl Facts {
    /// Names of the facts that could not be read: what these would show is not ruled out.
    #[must_use]
    pub fn unread(&self) -> Vec<String> {
        let users = self.device.as_ref().is_some_and(|device| device.shares.is_none());
        let all = [
            (self.limits.is_none(), "its limits"),
            (self.is_limit_unclear(), "what others ask of its limit"),
            (self.limits.is_some() && !self.has_throttling, "QEMU's throttling"),
            (self.quota.is_none(), "its CPU quota"),
            (self.ready.is_none() || self.own_cpus.is_none(), "its wait for CPUs"),
            (self.stolen_of_one().is_none(), "steal"),
            (self.host.is_none(), "stalls of the host"),
            (self.disk.is_none(), "standstills of the disk"),
            (self.device.is_none(), "use of the device"),
            (users, "who uses the device"),
            (self.held.is_none() && self.is_at_device(), "BFQ's idling"),
            (self.below.is_none(), "its time below the guest"),
            (self.faults.is_none(), "its page faults"),
        ];
        all.iter().filter(|(is_unread, _)| *is_unread).map(|(_, name)| (*name).to_owned()).collect()
    }

    /// Share of the late requests that stops delay, where each may be long enough to matter to the
    /// target, and the share to name them. `error` is how much longer than known they may be.
    fn delayed_by(&self, stops: Option<Stops>, error: u64) -> Option<f64> {
        let Stops { count, total } = stops.filter(|stops| stops.count > 0)?;
        // Stops shorter than half a target make no request late by themselves; many add up.
        let is_long = total.0 / count * 2 * error >= self.target.0;
        let is_often = total.0 as f64 / 1e9 >= self.seconds / 2.0;
        let touched = self.rate * total.0 as f64 / 1e9;
        let share = (self.late > 0 && (is_long || is_often)).then(|| (touched / self.late as f64).min(1.0));
        share.filter(|share| *share >= NAMED)
    }

    /// Standstills, where they are longer than a device at work takes between two completions: a
    /// slow one completes nothing for a while as well, and an idle one for longer.
    fn standstills(&self) -> Option<Stops> {
        let stops = self.disk.filter(|stops| stops.count > 0)?;
        let device = self.device.as_ref()?;
        let usual = self.seconds.min(device.waited) / device.requests.max(1.0);
        (stops.total.0 as f64 / stops.count as f64 / 1e9 >= usual * 10.0).then_some(stops)
    }

    /// Share of the window in which the disk did not stand still: a limit is used in that time.
    fn moving(&self) -> f64 {
        let stalled = self.standstills().map_or(0.0, |stops| stops.total.0 as f64 / 1e9);
        (1.0 - stalled / self.seconds.max(f64::MIN_POSITIVE)).max(MOVING)
    }

    /// Whether a limit is used up that holds the VM or not, by what others ask for.
    fn is_limit_unclear(&self) -> bool {
        let moving = self.moving();
        self.limits.iter().flatten().any(|limit| limit.is_unclear(moving))
    }

    /// Whether the device and its users cannot be the cause.
    fn is_outside_of_device(&self) -> bool {
        let lost = self.late as f64 * self.target.0 as f64 / 1e9;
        self.device.as_ref().is_some_and(|device| device.waited < lost / 2.0)
    }

    /// Most time that the task's own requests spent in standstills, in seconds: these say nothing
    /// of how long the device takes else.
    fn stood_still(&self) -> f64 {
        let depth = f64::from(self.depth.unwrap_or(1).max(1));
        self.standstills().map_or(0.0, |stops| stops.total.0 as f64 / 1e9 * depth)
    }

    /// Whether the device is where requests wait.
    fn is_at_device(&self) -> bool {
        let stood = self.stood_still();
        let mean_of = |waited: f64, requests: f64| (waited - stood).max(0.0) / requests;
        self.late.saturating_mul(2) >= self.n.max(1)
            && self.device.as_ref().filter(|device| device.requests >= 1.0).is_some_and(|device| {
                let mean = mean_of(device.waited, device.requests);
                // Its own requests may take longer or shorter than those of all VMs.
                let own = self.below.filter(|below| below.requests >= 1.0);
                let own = own.map_or(mean, |below| mean_of(below.waited, below.requests));
                let each = self.depth.filter(|_| self.rate > 0.0).map(|depth| f64::from(depth) / self.rate);
                let is_full = each.is_some_and(|each| mean.min(own) >= each / 2.0);
                // A backlog makes latencies longer than what the device takes.
                let is_own = self.below.is_some_and(|of| !of.is_mixed) || !self.is_outside_of_device();
                mean >= self.median.0 as f64 / 2e9 || (is_full && is_own)
            })
    }

    /// Whether more came in the window than is declared, and not with the time before it: after a
    /// rest that is load above the declaration, after a stop what was due meanwhile.
    fn may_catch_up(&self) -> bool {
        let is_over = |load: &Load| !load.bytes && self.rate >= OVER * load.declared;
        self.load.as_ref().is_some_and(|load| is_over(load) && !load.is_above())
    }

    /// Whether the late requests waited below the guest, and not for CPUs: what is left is the
    /// device, where nothing holds them.
    fn is_below_guest(&self) -> bool {
        let (late, of) = (self.late as f64, self.late as f64 / self.n.max(1) as f64);
        let spent = || {
            let below = self.below.filter(|below| below.requests > 0.0 && self.quota.is_some())?;
            // A limit may hold bursts back, whatever was used of it in all.
            self.limits.as_ref().filter(|limits| limits.is_empty() && self.has_throttling)?;
            let in_flight = below.waited / self.seconds.max(f64::MIN_POSITIVE);
            // The mean of all tasks says nothing of one whose requests may not wait behind others'.
            let is_known = !below.is_mixed || (in_flight >= MANY && self.depth.is_some() && of >= NAMED);
            // A thread that waits for a CPU delays all that are in flight.
            let for_cpus = (self.ready? + self.stolen_of_one()?) * self.seconds * in_flight.max(1.0);
            is_known.then_some((below.requests, below.waited - for_cpus - self.stood_still()))
        };
        spent().filter(|_| self.late > 0).is_some_and(|(requests, waited)| match self.depth {
            // Each of the task's places was taken while it was late, and by the others for at most
            // their latency.
            Some(depth) if of >= NAMED => {
                let taken = self.rate / f64::from(depth.max(1));
                let others = (1.0 - of) * self.median.min(self.target).0 as f64 / 1e9 * taken;
                waited / requests * taken >= of * BELOW + others.min(1.0 - of) * ON_TIME
            }
            _ => {
                let usual = (requests - late).max(0.0) * self.median.0 as f64 / 1e9;
                waited - usual >= late * self.target.0 as f64 / 2e9
            }
        })
    }
}

/// Causes with evidence, those without a known share first, then the largest; empty where none is
/// seen.
#[must_use]
pub fn causes(facts: &Facts) -> Vec<Cause> {
    let (limits, moving) = (facts.limits.as_deref().unwrap_or_default(), facts.moving());
    let mut found: Vec<Cause> = limits.iter().filter_map(|limit| limit.cause(moving)).collect();
    // Nothing holds what it declares: the rest waits for its own limit.
    let is_unclear = facts.is_limit_unclear();
    let is_beyond = found.is_empty() && !is_unclear && limits.iter().any(|limit| limit.is_used_up(moving));
    let load = facts.load.and_then(|load| load.cause()).filter(|_| is_beyond);
    let is_loaded = load.is_some();
    found.extend(load);
    let mut name = |kind, share: Option<f64>, evidence: String, remedy: &str| {
        found.push(Cause { kind, share, evidence, remedy: remedy.to_owned() });
    };
    let may_be_limited = is_loaded || is_unclear || limits.iter().any(|limit| limit.holds(moving));
    let percent = |part: f64| format!("{:.0} %", 100.0 * part);
    let of_time = |stops: Option<Stops>| {
        percent(stops.map_or(0.0, |s| s.total.0 as f64 / 1e9 / facts.seconds.max(f64::MIN_POSITIVE)).min(1.0))
    };
    let by_quota = facts.delayed_by(facts.quota, QUOTA_ERROR);
    if let Some(share) = by_quota {
        let stops = facts.quota.map_or(0, |stops| stops.count);
        let time = of_time(facts.quota);
        let evidence = format!(
            "the CPU quota of its cgroup or of one above stopped threads {stops} times, for at least {time} of the time"
        );
        name(
            CauseKind::CpuQuota,
            Some(share),
            evidence,
            "raise the quota or the contract's budget, or lower the rate",
        );
    }
    let is_outside = facts.is_outside_of_device();
    // A limit holds requests before the block layer counts them, and a stopped thread counts as
    // ready on some kernels: neither waits for a CPU that others use.
    if is_outside && !may_be_limited && facts.limits.is_some() && facts.has_throttling {
        if let Some(of) = facts.waits_for_cpus(by_quota.is_some()) {
            name(of.kind, of.share, of.evidence, &of.remedy);
        }
    }
    if let Some(share) = facts.delayed_by(facts.host, 1) {
        let evidence = format!("CPUs of the host stalled for {} of the time", of_time(facts.host));
        name(
            CauseKind::HostStall,
            Some(share),
            evidence,
            "find what stops the host: its hypervisor, firmware or interrupts",
        );
    }
    let standstills = facts.standstills();
    let by_standstills = facts.delayed_by(standstills, 1);
    if let Some(share) = by_standstills {
        let evidence =
            format!("the disk held requests and completed none for {} of the time", of_time(standstills));
        name(
            CauseKind::DiskStall,
            Some(share),
            evidence,
            "look for the disk's own pauses (its cache, health, path)",
        );
    }
    let by_memory = facts.waits_for_memory();
    let is_paged = by_memory.is_some();
    found.extend(by_memory);
    let is_at_device = facts.is_at_device() || (found.is_empty() && !is_outside && facts.is_below_guest());
    let is_stopped = facts.delayed_by(facts.quota, 1).is_some();
    if is_at_device && !may_be_limited && !is_stopped && !is_paged && by_standstills.is_none() {
        let shares = facts.device.as_ref().and_then(|device| device.shares.as_ref());
        let mut users = shares.map(|shares| users(facts, shares)).unwrap_or_default();
        // Other tasks' requests may be the long ones, next to which the task's own are quick.
        if !facts.is_at_device() && facts.below.is_some_and(|below| below.is_mixed) {
            users.retain(|user| user.kind == CauseKind::Load);
        }
        if let Some(held) = facts.held.filter(|held| *held >= NAMED) {
            users.retain(|user| user.kind != CauseKind::Device);
            let is_only = found.is_empty() && users.is_empty();
            users.extend(is_only.then(|| elevator(held)));
        }
        found.extend(users);
    }
    let is_known = facts.limits.is_some() && facts.has_throttling && !may_be_limited;
    if found.is_empty() && is_outside && is_known && by_standstills.is_none() {
        found.extend(facts.inside());
    }
    let of = |cause: &Cause| cause.share.unwrap_or(f64::INFINITY);
    found.sort_by(|a, b| of(b).total_cmp(&of(a)));
    found
}

#[cfg(test)]
mod tests;
