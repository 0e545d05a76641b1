//! Loads and knobs in the compact form of a dataset's row, and their conversion to a spec and a
//! configuration.

use std::fmt;

use rtvirtio_model::{Bfq, Config, Elevator, VmConfig};
use rtvirtio_spec::{Burst, Device, LabKind, Op, Pattern, Spec, Target, Task, Vm};
use rtvirtio_units::{Bytes, Iops, Nanos, Percentile, Ratio};
use serde::{Deserialize, Serialize};

/// A task of a VM. The file omits default values.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stream {
    /// Requests per second; `None` for a load limited by `depth` only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<Iops>,
    /// Share of writes, 0 to 1.
    #[serde(default, skip_serializing_if = "is_default")]
    pub writes: f64,
    /// Size of a request.
    #[serde(default = "page", skip_serializing_if = "is_page")]
    pub block: Bytes,
    /// Ascending addresses instead of random ones.
    #[serde(default, skip_serializing_if = "is_default")]
    pub sequential: bool,
    /// Requests kept in flight.
    #[serde(default = "default_one", skip_serializing_if = "is_one")]
    pub depth: u32,
    /// Length of a burst and of the pause after it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub burst: Option<Nanos>,
    /// Latency that the p99.99 must not exceed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<Nanos>,
}

fn page() -> Bytes {
    Bytes::from_kib(4)
}

fn is_page(b: &Bytes) -> bool {
    *b == page()
}

fn is_default<T: Default + PartialEq>(v: &T) -> bool {
    *v == T::default()
}

fn default_one() -> u32 {
    1
}

fn is_one(v: &u32) -> bool {
    *v == 1
}

impl Stream {
    /// Synchronous 4 KiB random reads at a rate, as in the RT-VirtIO paper.
    #[must_use]
    pub fn paced(rate: f64) -> Self {
        Self {
            rate: Some(Iops(rate)),
            writes: 0.0,
            block: page(),
            sequential: false,
            depth: 1,
            burst: None,
            target: None,
        }
    }

    /// A best-effort task that always has `depth` requests in flight.
    #[must_use]
    pub fn flood(depth: u32) -> Self {
        Self { rate: None, depth, ..Self::paced(1.0) }
    }

    fn task(&self, index: usize) -> Task {
        let op = if self.writes <= 0.0 {
            Op::Read
        } else if self.writes >= 1.0 {
            Op::Write
        } else {
            Op::Mixed { write_share: Ratio(self.writes) }
        };
        let target = self.target.map(|latency| Target { percentile: Percentile::P9999, latency });
        Task {
            op,
            block: self.block,
            pattern: if self.sequential { Pattern::Sequential } else { Pattern::Random },
            depth: self.depth,
            burst: self.burst.map(Burst::Busy),
            targets: target.into_iter().collect(),
            ..Task::reads(&format!("t{index}"), self.rate)
        }
    }
}

/// Spec of some VMs, named `vm0`, `vm1`, ... with tasks `t0`, `t1`, ...
#[must_use]
pub fn spec(vms: &[Vec<Stream>], device: Device, kind: LabKind) -> Spec {
    let vm = |(i, streams): (usize, &Vec<Stream>)| {
        Vm::of_lab(&vm_name(i), kind, streams.iter().enumerate().map(|(k, s)| s.task(k)).collect())
    };
    Spec { device, vms: vms.iter().enumerate().map(vm).collect() }
}

#[must_use]
pub fn vm_name(index: usize) -> String {
    format!("vm{index}")
}

/// Writes the differences from the kernel's defaults.
impl fmt::Display for Knobs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let default = Self::default_bfq(self.weights.len());
        let mut words = vec![self.elevator.name().to_owned()];
        if self.slice_idle != default.slice_idle {
            words.push(format!("slice_idle {}", self.slice_idle));
        }
        if self.timeout_sync != default.timeout_sync {
            words.push(format!("timeout_sync {}", self.timeout_sync));
        }
        if self.low_latency != default.low_latency {
            words.push("low_latency 0".to_owned());
        }
        words.extend(self.max_budget.map(|b| format!("max_budget {b}")));
        if self.weights != default.weights {
            let weights: Vec<String> = self.weights.iter().map(u32::to_string).collect();
            words.push(format!("weights {}", weights.join("/")));
        }
        let caps = self.caps.iter().enumerate().filter_map(|(vm, cap)| Some((vm, (*cap)?)));
        words.extend(caps.map(|(vm, cap)| format!("{} at most {:.0}/s", vm_name(vm), cap.0)));
        f.write_str(&words.join(", "))
    }
}

/// Host settings of a run. Values of tunables that do not act under the elevator are the kernel's
/// defaults.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Knobs {
    /// Elevator of the host's disk.
    pub elevator: Elevator,
    /// BFQ's `slice_idle`.
    #[serde(default = "default_idle", skip_serializing_if = "is_default_idle")]
    pub slice_idle: Nanos,
    /// BFQ's `timeout_sync`.
    #[serde(default = "default_timeout", skip_serializing_if = "is_default_timeout")]
    pub timeout_sync: Nanos,
    /// BFQ's `low_latency`.
    #[serde(default = "yes", skip_serializing_if = "is_true")]
    pub low_latency: bool,
    /// BFQ's `max_budget`; `None` lets BFQ choose.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_budget: Option<Bytes>,
    /// I/O weight of each VM.
    pub weights: Vec<u32>,
    /// IOPS limit of each VM; empty for none at all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub caps: Vec<Option<Iops>>,
}

fn default_idle() -> Nanos {
    Bfq::default().slice_idle
}

fn is_default_idle(v: &Nanos) -> bool {
    *v == default_idle()
}

fn default_timeout() -> Nanos {
    Bfq::default().timeout_sync
}

fn is_default_timeout(v: &Nanos) -> bool {
    *v == default_timeout()
}

fn yes() -> bool {
    true
}

fn is_true(v: &bool) -> bool {
    *v
}

impl Knobs {
    /// Host settings of a configuration.
    #[must_use]
    pub fn from_config(config: &Config) -> Self {
        let bfq = if config.elevator == Elevator::Bfq { config.bfq } else { Bfq::default() };
        let caps: Vec<Option<Iops>> = config.vms.iter().map(|vm| vm.cap).collect();
        Self {
            elevator: config.elevator,
            slice_idle: bfq.slice_idle,
            timeout_sync: bfq.timeout_sync,
            low_latency: bfq.low_latency,
            max_budget: bfq.max_budget,
            weights: config.vms.iter().map(|vm| vm.weight).collect(),
            caps: if caps.iter().all(Option::is_none) { Vec::new() } else { caps },
        }
    }

    /// Configuration with these settings; guests have no elevator.
    #[must_use]
    pub fn config(&self) -> Config {
        let vm = |(i, weight): (usize, &u32)| VmConfig {
            weight: *weight,
            cap: self.caps.get(i).copied().flatten(),
            guest_elevator: Elevator::None,
            guest_bfq: Bfq::default(),
        };
        Config {
            elevator: self.elevator,
            bfq: Bfq {
                slice_idle: self.slice_idle,
                timeout_sync: self.timeout_sync,
                low_latency: self.low_latency,
                max_budget: self.max_budget,
                strict_guarantees: false,
            },
            vms: self.weights.iter().enumerate().map(vm).collect(),
        }
    }

    /// Kernel defaults under BFQ, for `vms` VMs.
    #[must_use]
    pub fn default_bfq(vms: usize) -> Self {
        let vm =
            VmConfig { weight: 100, cap: None, guest_elevator: Elevator::None, guest_bfq: Bfq::default() };
        Self::from_config(&Config { elevator: Elevator::Bfq, bfq: Bfq::default(), vms: vec![vm; vms] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_short_and_come_back() {
        let stream = Stream::paced(500.0);
        let text = serde_json::to_string(&stream).unwrap();
        assert_eq!(text, r#"{"rate":500.0}"#);
        assert_eq!(serde_json::from_str::<Stream>(&text).unwrap(), stream);
        let writer =
            Stream { writes: 1.0, block: Bytes::from_kib(128), sequential: true, ..Stream::flood(16) };
        assert_eq!(serde_json::from_str::<Stream>(&serde_json::to_string(&writer).unwrap()).unwrap(), writer);
        assert!(serde_json::from_str::<Stream>(r#"{"rat":5}"#).is_err(), "unknown keys are errors");
    }

    #[test]
    fn knobs_and_configurations_agree() {
        let mut knobs = Knobs::default_bfq(2);
        assert_eq!(Knobs::from_config(&knobs.config()), knobs);
        knobs.caps = vec![None, Some(Iops(700.0))];
        knobs.slice_idle = Nanos(0);
        assert_eq!(Knobs::from_config(&knobs.config()), knobs);
        assert_eq!(knobs.to_string(), "bfq, slice_idle 0ns, vm1 at most 700/s");
        assert_eq!(Knobs::default_bfq(2).to_string(), "bfq");
        // Tunables of an elevator that is not in force do not count.
        knobs.elevator = Elevator::None;
        assert_eq!(Knobs::from_config(&knobs.config()).slice_idle, Bfq::default().slice_idle);
    }

    #[test]
    fn a_load_becomes_a_spec() {
        let device = Device::Twin { profile: "qlc-nvme".to_owned(), size: Bytes(1 << 30) };
        let mut stream = Stream { writes: 0.3, target: Some(Nanos::from_millis(5)), ..Stream::paced(100.0) };
        let vms = vec![vec![stream.clone()], vec![Stream::flood(32), Stream::paced(1.0)]];
        let spec = spec(&vms, device, LabKind::Process);
        assert_eq!((spec.vms[1].name.as_str(), spec.vms[1].tasks[1].name.as_str()), ("vm1", "t1"));
        assert_eq!(spec.vms[0].tasks[0].op, Op::Mixed { write_share: Ratio(0.3) });
        assert_eq!(spec.vms[0].tightest_target(), Some(Nanos::from_millis(5)));
        stream.writes = 1.0;
        assert_eq!(stream.task(0).op, Op::Write);
    }
}
