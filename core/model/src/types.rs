//! Inputs of the models (a host profile and a configuration) and their output (a forecast with its
//! terms).

use std::borrow::Cow;
use std::ops::RangeInclusive;

use rtvirtio_units::{Bytes, Iops, Nanos, Ratio};
use serde::{Deserialize, Serialize};

/// Version of the profile file's format.
pub const PROFILE_SCHEMA: &str = "rtvirtio.profile.v1";

/// Measurements of one device of one host. Written by `rtvirtio profile`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Format version, always [`PROFILE_SCHEMA`].
    pub schema: String,
    /// Device name as in `/sys/block`, such as `nvme0n1`.
    pub device: String,
    /// WWID or serial number of the drive; `None` where the kernel knows none, and in profiles of
    /// older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<String>,
    /// Size of the device.
    pub size: Bytes,
    /// Block size of the measurements.
    pub block: Bytes,
    /// Reads with elevator `none`, by rising depth.
    pub read: Vec<DepthPoint>,
    /// Writes with elevator `none`, by rising depth; empty when writing was not allowed.
    pub write: Vec<DepthPoint>,
    /// Writes of the profile's size, each with an fdatasync(2) after it, elevator `none`, by rising
    /// depth: latency and rate of both together. Empty when writing was not allowed, and in
    /// profiles of older versions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sync: Vec<DepthPoint>,
    /// Reads with elevator `bfq` at the same depths as `read`, for BFQ's own cost.
    pub read_bfq: Vec<DepthPoint>,
    /// Larger requests, with elevator `none`, for the cost per byte. `None` in profiles of older
    /// versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub large: Option<LargeRequests>,
    /// I/O as seen inside a VM that runs alone; `None` when no VM was measured.
    pub guest: Option<GuestPoint>,
    /// CPUs of the host, for the load the VMs put on them.
    pub cpus: u32,
    /// Host facts at the time: kernel release.
    pub kernel: String,
    /// Every reason not to trust a number; empty when all checks passed.
    pub doubts: Vec<String>,
}

/// Largest block of a profile.
const MAX_BLOCK: Bytes = Bytes(1 << 30);
/// Requests per second that a device may have: above 0 at least one in a quarter of an hour, and
/// fewer than any bus carries.
const RATES: RangeInclusive<f64> = 1e-3..=1e10;
/// Longest latency that a profile may hold: about 11 days, as of a model's term.
const MAX_LATENCY: Nanos = Nanos(1_000_000_000_000_000);
/// Most CPU time that a request may cost, s.
const MOST_CPU: f64 = 1e3;

impl Profile {
    /// Checks a profile that came from a file: an impossible measurement would lead to times that
    /// are infinite or NaN.
    ///
    /// # Errors
    /// The first fault, in words.
    pub fn check(&self) -> Result<(), String> {
        let block = |b: Bytes, of: &str| match (Bytes(1)..=MAX_BLOCK).contains(&b) {
            true => Ok(()),
            false => Err(format!("its block size{of} is {} bytes", b.0)),
        };
        block(self.block, "")?;
        let mut all = vec![
            ("read", &self.read),
            ("write", &self.write),
            ("read_bfq", &self.read_bfq),
            ("sync", &self.sync),
        ];
        if let Some(large) = &self.large {
            block(large.block, " of larger requests")?;
            all.extend([("large.read", &large.read), ("large.write", &large.write)]);
        }
        for (name, points) in all {
            points.iter().try_for_each(|p| p.check(name))?;
        }
        self.guest.as_ref().map_or(Ok(()), GuestPoint::check)
    }

    /// A slower device: each request takes `factor` times as long. The part of guest and VMM is
    /// unchanged.
    #[must_use]
    pub fn slowed(&self, factor: f64) -> Self {
        let mut slow = self.clone();
        let lists = [&mut slow.read, &mut slow.write, &mut slow.sync, &mut slow.read_bfq];
        lists.into_iter().flatten().for_each(|point| point.slow_down(factor));
        if let Some(large) = &mut slow.large {
            large.read.iter_mut().chain(&mut large.write).for_each(|point| point.slow_down(factor));
        }
        slow
    }
}

/// Requests much larger than the profile's own: with both sizes, time per request and time per byte
/// can be separated.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LargeRequests {
    pub block: Bytes,
    /// Reads by rising depth.
    pub read: Vec<DepthPoint>,
    /// Writes by rising depth; empty when writing was not allowed.
    pub write: Vec<DepthPoint>,
}

/// Measured throughput and latency at one queue depth.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DepthPoint {
    /// Requests in flight, in a closed loop.
    pub depth: u32,
    /// Median over the repetitions.
    pub iops: Iops,
    /// (max - min) / median over the repetitions, 0 to 1 and beyond.
    pub spread: f64,
    /// Samples over all repetitions.
    pub n: u64,
    /// Median completion latency of all samples.
    pub p50: Nanos,
    /// 99th percentile of the same.
    pub p99: Nanos,
    /// 99.99th percentile; with `n` < 10 000 it is the maximum.
    pub p9999: Nanos,
    /// Largest completion latency of all samples.
    pub max: Nanos,
}

impl DepthPoint {
    fn slow_down(&mut self, factor: f64) {
        self.iops.0 /= factor;
        for latency in [&mut self.p50, &mut self.p99, &mut self.p9999, &mut self.max] {
            latency.0 = (latency.0 as f64 * factor).min(MAX_LATENCY.0 as f64) as u64;
        }
    }

    /// A rate of zero stands for no measurement.
    fn check(&self, of: &str) -> Result<(), String> {
        let bad = |what: String| Err(format!("{of} at depth {}: {what}", self.depth));
        let rate = self.iops.0;
        if rate != 0.0 && !RATES.contains(&rate) {
            return bad(format!("{rate} requests per second cannot be"));
        }
        if !(self.spread.is_finite() && self.spread >= 0.0) {
            return bad(format!("a spread of {} cannot be", self.spread));
        }
        match [self.p50, self.p99, self.p9999, self.max].into_iter().find(|l| *l > MAX_LATENCY) {
            Some(latency) => bad(format!("a latency of {latency} cannot be")),
            None => Ok(()),
        }
    }
}

/// Latency inside a VM that runs alone, elevator `none` on host and guest, depth 1.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GuestPoint {
    /// `qemu-tcg`, `qemu-kvm` or `process`.
    pub kind: String,
    /// Throughput and latency inside the VM.
    pub point: DepthPoint,
    /// CPU seconds of the host that one request costs (VMM and guest together).
    pub cpu_per_request: f64,
}

impl GuestPoint {
    /// Checks a point that came from a file.
    ///
    /// # Errors
    /// The first fault, in words.
    pub fn check(&self) -> Result<(), String> {
        if !(0.0..=MOST_CPU).contains(&self.cpu_per_request) {
            return Err(format!("guest: {} s of CPU time for a request cannot be", self.cpu_per_request));
        }
        self.point.check("guest")
    }

    /// Whether the VM was a real guest; a process VM adds nothing.
    #[must_use]
    pub fn is_of_guest(&self) -> bool {
        self.kind != "process"
    }
}

/// A configuration whose effect is predicted: values of the knobs, per host and VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Config {
    /// I/O scheduler of the host's device.
    pub elevator: Elevator,
    /// Host BFQ tunables; they act only when `elevator` is [`Elevator::Bfq`].
    pub bfq: Bfq,
    /// Settings per VM, in spec order.
    pub vms: Vec<VmConfig>,
}

/// The part of a configuration that belongs to one VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VmConfig {
    /// BFQ weight of the VM's cgroup, 1 to 1000.
    pub weight: u32,
    /// Cap on the VM's read + write requests per second; `None` for no cap.
    pub cap: Option<Iops>,
    /// I/O scheduler inside the guest.
    pub guest_elevator: Elevator,
    /// BFQ tunables inside the guest.
    pub guest_bfq: Bfq,
}

/// Linux's multi-queue I/O schedulers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Elevator {
    /// FIFO per hardware queue.
    None,
    /// `mq-deadline`: a deadline per request and batches per direction.
    MqDeadline,
    /// `kyber`: latency targets for reads and writes.
    Kyber,
    /// `bfq`: budget fair queueing.
    Bfq,
}

impl Elevator {
    /// Name in `/sys/block/*/queue/scheduler`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::MqDeadline => "mq-deadline",
            Self::Kyber => "kyber",
            Self::Bfq => "bfq",
        }
    }
}

/// BFQ's tunables as numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bfq {
    /// `slice_idle`: wait for the next request of a queue.
    pub slice_idle: Nanos,
    /// `timeout_sync`: longest slice of a queue.
    pub timeout_sync: Nanos,
    /// `low_latency`: whether weights of interactive queues are raised.
    pub low_latency: bool,
    /// `max_budget`; `None` lets BFQ choose.
    pub max_budget: Option<Bytes>,
    /// `strict_guarantees`: one request at the device at a time.
    pub strict_guarantees: bool,
}

/// Models that a plan may rest on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ModelKind {
    /// Our model of BFQ's slices and of queueing at the device.
    Slice,
    /// Forests learned on this host, with a calibrated upper bound.
    Bound,
}

/// A predicted tail with the terms it is the sum of.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Forecast {
    /// Predicted latency at the target's percentile (p99.99 without a target).
    pub latency_ns: Nanos,
    /// Share of the declared rate that is kept, `achieved / declared`, at most 1: as expected, or
    /// as the upper bound implies where that is more. `1.0` for tasks without a rate.
    pub rate_kept: f64,
    /// Terms of the guest part and of the host part; they sum to `latency_ns` up to rounding.
    pub terms: Vec<Term>,
    /// Upper bound of the latency, from a model that was learned on this host; `None` from the
    /// formulas.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upper: Option<Upper>,
}

impl Forecast {
    /// The forecast scaled to another latency: its terms keep their proportions, so that they still
    /// show where the time goes.
    #[must_use]
    pub fn scaled_to(mut self, latency: Nanos) -> Self {
        let factor = latency.0 as f64 / (self.latency_ns.0 as f64).max(1.0);
        for term in &mut self.terms {
            term.latency_ns = Nanos((term.latency_ns.0 as f64 * factor) as u64);
        }
        self.latency_ns = latency;
        self
    }
}

/// A [`Forecast`] without its terms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Brief {
    /// Like [`Forecast::latency_ns`].
    pub latency_ns: Nanos,
    /// Like [`Forecast::rate_kept`].
    pub rate_kept: f64,
}

/// An upper bound of a tail.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Upper {
    /// Bound on the latency at the target's percentile.
    pub latency_ns: Nanos,
    /// Share of new runs whose tail stays below the bound.
    pub confidence: Ratio,
    /// Evidence for the confidence.
    pub basis: UpperBasis,
    /// Addition for the tail as measured, with the host's own stalls, which no setting changes;
    /// zero where the bound includes them.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub host_ns: Nanos,
    /// Properties of the task or the settings outside the measured range, in words: the bound is
    /// then a guess, widened.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub outside: Vec<String>,
    /// Length of the runs that the tail is of, s. A shorter or longer run has a shorter or longer
    /// tail while it has fewer requests than the percentile needs.
    #[serde(default)]
    pub run_s: f64,
}

fn is_zero(ns: &Nanos) -> bool {
    ns.0 == 0
}

/// Evidence for an upper bound's confidence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UpperBasis {
    /// Runs on this host in which BFQ idled, or did not, as it would here.
    Regime,
    /// Runs of all regimes together.
    Pooled,
    /// Runs in QEMU guests, all regimes together.
    Guests,
    /// No evidence: the load or the settings lie outside the measured range.
    Extrapolated,
}

/// Part of a predicted latency with one cause.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Term {
    /// Guest part or host part.
    pub side: Side,
    /// Short stable name, such as `switch`, `own-service`, `other-vms`, `timeout-sync`, `device`.
    /// Names of our models are static: a search makes millions of terms.
    pub name: Cow<'static, str>,
    /// Part of the latency, ns.
    pub latency_ns: Nanos,
    /// The measured statistic that the term is computed from, such as `p99 of 27865 samples`, or
    /// that it is assumed; `None` where it follows from settings and rates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub statistic: Option<String>,
}

/// System part in which a term arises.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Side {
    /// Inside the guest and its VMM.
    Guest,
    /// On the host and its device.
    Host,
}

impl Forecast {
    /// Latency that a target is compared with: the upper bound where there is one, else the
    /// expected latency.
    #[must_use]
    pub fn judged(&self) -> Nanos {
        self.upper.as_ref().map_or(self.latency_ns, |u| u.latency_ns)
    }

    /// Latency that a VM can be promised: [`Forecast::judged`] plus the host's own stalls.
    #[must_use]
    pub fn promised(&self) -> Nanos {
        let host = self.upper.as_ref().map_or(0, |u| u.host_ns.0);
        Nanos(self.judged().0.saturating_add(host))
    }
}

impl Default for Bfq {
    /// The kernel's defaults (block/bfq-iosched.c): 8 ms, HZ/8, low latency on, automatic budget.
    fn default() -> Self {
        Self {
            slice_idle: Nanos::from_millis(8),
            timeout_sync: Nanos::from_millis(125),
            low_latency: true,
            max_budget: None,
            strict_guarantees: false,
        }
    }
}
