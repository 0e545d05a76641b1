//! `rtvirtio plan --traffic` against measurements: the limits that it chooses from a device's
//! profile are set by what holds them, and the victim is measured next to a neighbour that uses
//! them up.
//!
//! The profile is made of loads of one process at a time, so every point here is held out. The
//! neighbour works in bursts, because a bucket that was left alone is full: its burst then comes at
//! once, which is what the bound counts with. It is measured without a limit too, for a target that
//! holds anyway says nothing of the limit.

mod claims;
mod measure;
mod page;

pub use claims::claims;
pub use measure::{PlannedOptions, measure};
pub use page::report;

use rtvirtio_measure::HostFacts;
use rtvirtio_units::{Bytes, Nanos};
use serde::{Deserialize, Serialize};

use crate::saved::Saved;

/// File name of the result.
pub const FILE: &str = "regulation-plan.json";
/// Requests per second of the victim, of 4 KiB each.
const RATE: f64 = 200.0;
/// Its targets, as multiples of what the profile shows as the device's longest stall.
const TIMES: [f64; 3] = [1.5, 2.0, 4.0];
/// Requests of the neighbour, one size a run.
const BLOCKS: [Bytes; 2] = [Bytes(4 << 10), Bytes(64 << 10)];
/// Requests of the neighbour outstanding: more than any burst here.
const DEPTH: u32 = 128;
/// The neighbour works for so long, then rests for as long: longer than a slice of blk-throttle
/// (100 ms), so that each of its bursts is a full one.
const BURST: Nanos = Nanos::from_millis(250);
/// A victim with less of its rate is not served.
const SERVED: f64 = 0.99;

/// What holds the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HeldBy {
    /// A cap of the I/O domain, which serves first come first served.
    Domain,
    /// The kernel, by blk-throttle in the neighbour's cgroup.
    Kernel,
}

impl HeldBy {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Domain, Self::Kernel];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Domain => "I/O domain",
            Self::Kernel => "kernel",
        }
    }
}

/// A limit as it was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlannedLimit {
    /// The victim's target, for which it is.
    pub target: Nanos,
    /// The bound of the victim's latency with it.
    pub bound: Nanos,
    /// Requests per second.
    pub rate: u64,
    /// Requests at once.
    pub burst: u64,
    /// Requests per second within the burst.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak: Option<u64>,
}

/// One run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlannedPoint {
    /// What held the limit.
    pub held_by: HeldBy,
    /// Size of the neighbour's requests.
    pub block: Bytes,
    /// `None` where the neighbour had no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<PlannedLimit>,
    /// Which of the interleaved repetitions.
    pub round: u32,
    /// What the victim got.
    pub victim: VictimSeen,
    /// Requests per second of the neighbour, its rests included.
    pub neighbour: f64,
}

/// What the victim got in a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct VictimSeen {
    /// Requests.
    pub n: u64,
    /// Requests per second.
    pub rate: f64,
    /// The longest, from its intended start; known to 1 ms where the kernel holds the limit.
    pub longest: Nanos,
    /// The same less the time in which a CPU of the host stood still, where that is known.
    pub awake: Option<Nanos>,
}

impl VictimSeen {
    /// Whether it had its rate, and no request took longer.
    #[must_use]
    pub fn is_within(&self, time: Nanos) -> bool {
        self.rate >= SERVED * RATE && self.awake.unwrap_or(self.longest) <= time
    }
}

/// A target for which there is no limit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RefusedLimit {
    /// What was to hold it.
    pub held_by: HeldBy,
    /// Size of the neighbour's requests.
    pub block: Bytes,
    /// The target.
    pub target: Nanos,
    /// Why there is none.
    pub why: String,
}

/// The result.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PlannedData {
    /// [`PlannedData::SCHEMA`].
    pub schema: String,
    /// Where.
    pub host: HostFacts,
    /// How.
    pub command: String,
    /// When.
    pub generated: String,
    /// Length of each run.
    pub seconds: f64,
    /// The longest stall that the profile shows.
    pub stall: Nanos,
    /// All runs.
    pub points: Vec<PlannedPoint>,
    /// Targets for which nothing can be chosen.
    pub refused: Vec<RefusedLimit>,
}

impl Saved for PlannedData {
    const SCHEMA: &str = "rtvirtio-regulation-plan/1";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_victim_without_its_rate_is_not_within() {
        let seen = VictimSeen { n: 1_000, rate: 199.0, longest: Nanos::from_millis(20), awake: None };
        assert!(seen.is_within(Nanos::from_millis(20)) && !seen.is_within(Nanos::from_millis(19)));
        let awake = VictimSeen { awake: Some(Nanos::from_millis(9)), ..seen };
        assert!(awake.is_within(Nanos::from_millis(9)));
        assert!(!VictimSeen { rate: 150.0, ..awake }.is_within(Nanos::from_millis(20)));
    }
}
