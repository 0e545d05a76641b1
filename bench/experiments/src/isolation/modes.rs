//! Loads of each question, and the settings of each way to divide a device.

use std::str::FromStr;

use rtvirtio_learn::load::{Stream, spec, vm_name};
use rtvirtio_measure::fio::IoClass;
use rtvirtio_model::{Config, Elevator, Profile};
use rtvirtio_planner::{
    IoCostFile, Knob, LimitKind, PlanError, PlanOptions, Setting, Space, io_cost_plan, plan,
};
use rtvirtio_spec::{Arrival, Burst, Device, LabKind, Spec};
use rtvirtio_units::{Bytes, Enforcement, Iops, Nanos};
use serde::{Deserialize, Serialize};

/// VMs of the test bed.
pub const VMS: usize = 4;
/// Requests in flight of a VM that takes what it gets.
const BATCH: u32 = 32;
/// Size of large requests.
const LARGE: Bytes = Bytes(64 << 10);
/// Requests of a burst, all at once.
pub const AT_ONCE: u32 = 32;
/// Time from one burst to the next.
pub const BURST_PERIOD: Nanos = Nanos(500_000_000);
/// Limit that is in force and does not limit, requests per second.
const NO_LIMIT: u64 = 1_000_000;
/// Latency target that is in force and never missed, us.
const NO_TARGET: u64 = 1_000_000;

/// A way to divide the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// No elevator and no control.
    #[serde(rename = "none")]
    Plain,
    /// The elevator `mq-deadline`, with I/O classes where one VM has priority.
    MqDeadline,
    /// Limits of cgroups.
    IoMax,
    /// Latency targets of cgroups.
    IoLatency,
    /// io.cost with the kernel's own model and targets.
    IoCostShipped,
    /// io.cost with model and targets of a plan.
    IoCost,
    /// BFQ with its defaults and weights.
    Bfq,
    /// Limits of QEMU.
    QemuThrottle,
    /// The planner's search over the kernel's settings.
    KernelPlan,
    /// The I/O domain.
    IoDomain,
}

impl Mode {
    /// All modes, in the order of tables.
    pub const ALL: [Self; 10] = [
        Self::Plain,
        Self::MqDeadline,
        Self::IoMax,
        Self::IoLatency,
        Self::IoCostShipped,
        Self::IoCost,
        Self::Bfq,
        Self::QemuThrottle,
        Self::KernelPlan,
        Self::IoDomain,
    ];

    /// Name, as in results and on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => "none",
            Self::MqDeadline => "mq-deadline",
            Self::IoMax => "io-max",
            Self::IoLatency => "io-latency",
            Self::IoCostShipped => "io-cost-shipped",
            Self::IoCost => "io-cost",
            Self::Bfq => "bfq",
            Self::QemuThrottle => "qemu-throttle",
            Self::KernelPlan => "kernel-plan",
            Self::IoDomain => "io-domain",
        }
    }

    /// Elevator that it needs; the planner chooses its own.
    #[must_use]
    pub fn elevator(self) -> Option<Elevator> {
        match self {
            Self::KernelPlan => None,
            Self::MqDeadline => Some(Elevator::MqDeadline),
            Self::Bfq => Some(Elevator::Bfq),
            _ => Some(Elevator::None),
        }
    }
}

impl FromStr for Mode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = || Self::ALL.map(Self::name).join(", ");
        let found = Self::ALL.into_iter().find(|mode| mode.name() == text);
        found.ok_or_else(|| format!("there are {}", known()))
    }
}

/// A load, with what is asked of a mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Case {
    /// A VM with one read in flight.
    Apps1,
    /// Two of these.
    Apps2,
    /// Four of these.
    Apps4,
    /// Four VMs that read as fast as they can.
    Batch,
    /// Four such VMs with equal shares.
    Equal,
    /// Four such VMs with shares of 1, 2, 4 and 8.
    Weights,
    /// Two VMs with requests of 4 KiB and two with large ones, equal shares.
    Sizes,
    /// Two VMs that read and two that write, equal shares.
    Mixed,
    /// A VM with one read in flight next to three that read as fast as they can, held back little.
    Weak,
    /// Three others, held back more.
    Medium,
    /// Three others, held back as much as the mode is set to.
    Strong,
    /// A VM whose reads come in bursts next to three that read as fast as they can.
    Bursts,
}

impl Case {
    /// All cases, in the order of the questions.
    pub const ALL: [Self; 12] = [
        Self::Apps1,
        Self::Apps2,
        Self::Apps4,
        Self::Batch,
        Self::Equal,
        Self::Weights,
        Self::Sizes,
        Self::Mixed,
        Self::Weak,
        Self::Medium,
        Self::Strong,
        Self::Bursts,
    ];

    /// Number of the question, 1 to 4.
    #[must_use]
    pub fn question(self) -> u8 {
        match self {
            Self::Apps1 | Self::Apps2 | Self::Apps4 | Self::Batch => 1,
            Self::Equal | Self::Weights | Self::Sizes | Self::Mixed => 2,
            Self::Weak | Self::Medium | Self::Strong => 3,
            Self::Bursts => 4,
        }
    }

    /// Name in ids of claims and in figures.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Apps1 => "apps1",
            Self::Apps2 => "apps2",
            Self::Apps4 => "apps4",
            Self::Batch => "batch",
            Self::Equal => "equal",
            Self::Weights => "weights",
            Self::Sizes => "sizes",
            Self::Mixed => "mixed",
            Self::Weak => "weak",
            Self::Medium => "medium",
            Self::Strong => "strong",
            Self::Bursts => "bursts",
        }
    }

    /// Strength with which the other VMs are held back for the first, 0 to 2; `None` where no VM
    /// has priority.
    #[must_use]
    pub fn strength(self) -> Option<usize> {
        match self {
            Self::Weak => Some(0),
            Self::Medium | Self::Bursts => Some(1),
            Self::Strong => Some(2),
            _ => None,
        }
    }

    /// Load of each VM. The first VM's of [`Case::Bursts`] are `AT_ONCE` reads at once.
    #[must_use]
    pub fn loads(self) -> Vec<Vec<Stream>> {
        let batch = || vec![Stream::flood(BATCH)];
        let with = |stream: Stream| vec![stream];
        let first = match self {
            Self::Apps1 => return vec![vec![Stream::flood(1)]; 1],
            Self::Apps2 => return vec![vec![Stream::flood(1)]; 2],
            Self::Apps4 => return vec![vec![Stream::flood(1)]; 4],
            Self::Batch | Self::Equal | Self::Weights => return vec![batch(); VMS],
            Self::Sizes => {
                let large = || with(Stream { block: LARGE, ..Stream::flood(BATCH) });
                return vec![batch(), batch(), large(), large()];
            }
            Self::Mixed => {
                let writes = || with(Stream { writes: 1.0, ..Stream::flood(BATCH) });
                return vec![batch(), batch(), writes(), writes()];
            }
            Self::Bursts => Stream::paced(f64::from(AT_ONCE) / BURST_PERIOD.as_secs_f64()),
            Self::Weak | Self::Medium | Self::Strong => Stream::flood(1),
        };
        vec![with(first), batch(), batch(), batch()]
    }

    /// The VMs with their loads.
    #[must_use]
    pub fn spec(self, device: Device, kind: LabKind) -> Spec {
        let mut spec = spec(&self.loads(), device, kind);
        if self == Self::Bursts {
            if let Some(task) = spec.vms.first_mut().and_then(|vm| vm.tasks.first_mut()) {
                task.arrival = Arrival::Open;
                task.depth = AT_ONCE;
                task.burst = Some(Burst::Requests { requests: AT_ONCE });
            }
        }
        spec
    }

    /// Weight of each VM.
    #[must_use]
    pub fn weights(self) -> Vec<u32> {
        match (self, self.strength()) {
            (Self::Weights, _) => vec![100, 200, 400, 800],
            (_, Some(strength)) => vec![[200, 500, 1_000][strength], 100, 100, 100],
            _ => vec![100; self.loads().len()],
        }
    }

    /// Most requests per second of each VM, of a device that does `total`; `None` for no limit.
    #[must_use]
    pub fn limits(self, total: f64) -> Vec<Option<u64>> {
        let tens = |limit: f64| Some(((limit / 10.0).floor() as u64 * 10).max(10));
        match (self.question(), self.strength()) {
            (1, _) => vec![Some(NO_LIMIT); self.loads().len()],
            (_, Some(strength)) => {
                let each = tens(total * [0.8, 0.5, 0.2][strength] / (VMS - 1) as f64);
                vec![None, each, each, each]
            }
            _ => {
                let weights = self.weights();
                let sum: u32 = weights.iter().sum();
                weights.iter().map(|w| tens(total * f64::from(*w) / f64::from(sum))).collect()
            }
        }
    }

    /// I/O class of each VM where one has priority.
    #[must_use]
    pub fn classes(self) -> Option<Vec<IoClass>> {
        self.strength()?;
        let mut classes = vec![IoClass::Idle; VMS];
        classes[0] = IoClass::RealTime(0);
        Some(classes)
    }
}

/// Device and host that settings are made for.
pub struct Basis<'a> {
    pub profile: &'a Profile,
    /// Settings in force while nothing is applied.
    pub baseline: &'a Config,
    pub device: &'a Device,
    pub kind: LabKind,
    /// Elevators that the device offers.
    pub elevators: &'a [Elevator],
}

impl Basis<'_> {
    /// Most reads per second of the device.
    pub fn total(&self) -> f64 {
        self.profile.read.iter().map(|point| point.iops.0).fold(0.0, f64::max)
    }

    /// Median and p99 of single reads of the idle device.
    pub fn single(&self) -> (Nanos, Nanos) {
        self.profile.read.first().map_or((Nanos(100_000), Nanos(1_000_000)), |point| (point.p50, point.p99))
    }

    /// Specification for planners: the first VM has a rate, half of what single reads reach, and a
    /// target, a multiple of their p99.
    fn planned(&self, case: Case) -> Spec {
        let mut loads = case.loads();
        let (p50, p99) = self.single();
        if let (Some(strength), Some(first)) = (case.strength(), loads.first_mut()) {
            let rate = if case == Case::Bursts {
                f64::from(AT_ONCE) / BURST_PERIOD.as_secs_f64()
            } else {
                (0.5 / p50.as_secs_f64().max(1e-6)).round().max(1.0)
            };
            let target = Nanos(p99.0.max(1) * [20, 8, 3][strength]);
            let stream = Stream { rate: Some(Iops(rate)), target: Some(target), ..Stream::paced(rate) };
            *first = vec![stream];
        }
        spec(&loads, self.device.clone(), self.kind)
    }

    fn options(&self, vms: usize) -> PlanOptions {
        let mut start = self.baseline.clone();
        start.vms.truncate(vms);
        let space = Space { guests: false, elevators: self.elevators.to_vec(), ..Space::default() };
        PlanOptions { space, ..PlanOptions::new(start) }
    }
}

/// Settings of a mode for a case. Those of QEMU and of the I/O domain are not the kernel's: the
/// elevator alone.
///
/// # Errors
/// [`PlanError`] where a planner has no plan.
pub fn settings(mode: Mode, case: Case, basis: &Basis<'_>) -> Result<Vec<Setting>, PlanError> {
    let mut found = Vec::new();
    let mut push = |knob, value: String| {
        found.push(Setting { knob, value, reason: String::new(), strength: Enforcement::Hint });
    };
    if let Some(elevator) = mode.elevator() {
        push(Knob::HostElevator, elevator.name().to_owned());
    }
    let of = vm_name;
    match mode {
        Mode::Plain | Mode::MqDeadline | Mode::QemuThrottle | Mode::IoDomain => {}
        Mode::IoMax => {
            for (vm, limit) in case.limits(basis.total()).into_iter().enumerate() {
                let Some(limit) = limit else { continue };
                // Equal shares of requests of different sizes are shares of bytes.
                let (kind, limit) = match case {
                    Case::Sizes => (LimitKind::ReadBps, limit * basis.profile.block.0),
                    Case::Mixed if vm >= 2 => (LimitKind::WriteIops, limit),
                    _ => (LimitKind::ReadIops, limit),
                };
                push(Knob::VmLimit { vm: of(vm), limit: kind }, limit.to_string());
            }
        }
        Mode::IoLatency => match case.strength() {
            Some(strength) => {
                let p99 = basis.single().1.0 as f64 / 1e3;
                let target = (p99 * [8.0, 3.0, 1.2][strength]).ceil().max(1.0);
                push(Knob::VmIoLatency { vm: of(0) }, format!("{target:.0}"));
            }
            None => {
                for vm in 0..case.loads().len() {
                    push(Knob::VmIoLatency { vm: of(vm) }, NO_TARGET.to_string());
                }
            }
        },
        Mode::IoCostShipped | Mode::IoCost => {
            if mode == Mode::IoCostShipped {
                push(Knob::HostIoCost(IoCostFile::Qos), "enable=1 ctrl=auto".to_owned());
            } else {
                let spec = basis.planned(case);
                let planned = io_cost_plan(&spec, basis.profile, &basis.options(spec.vms.len()))?;
                for setting in planned.settings {
                    if matches!(setting.knob, Knob::HostIoCost(_)) {
                        push(setting.knob, setting.value);
                    }
                }
            }
            for (vm, weight) in case.weights().into_iter().enumerate() {
                push(Knob::VmIoWeight { vm: of(vm) }, weight.to_string());
            }
        }
        Mode::Bfq => {
            for (vm, weight) in case.weights().into_iter().enumerate() {
                push(Knob::VmWeight { vm: of(vm) }, weight.to_string());
            }
        }
        Mode::KernelPlan => {
            let spec = basis.planned(case);
            return Ok(plan(&spec, basis.profile, &basis.options(spec.vms.len()))?.settings);
        }
    }
    Ok(found)
}
