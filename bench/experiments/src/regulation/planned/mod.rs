//! `rtvirtio plan --traffic` compared with measurements: limits chosen from a device's profile are
//! enforced by the I/O domain or the kernel, and the victim is measured next to a neighbour that
//! uses them up.
//!
//! The profile is made of loads of one process at a time, so every point here is held out. The
//! neighbour works in bursts, because the bucket of an idle VM is full: its burst then comes at
//! once, as the bound assumes. It is measured without a limit too, since a target that holds anyway
//! shows no effect of the limit.

mod claims;
mod measure;
mod page;

pub use claims::claims;
pub use measure::{PlannedOptions, measure};

use rtvirtio_measure::HostFacts;
use rtvirtio_units::{Bytes, Nanos};
use serde::{Deserialize, Serialize};

/// Requests per second of the victim, of 4 KiB each.
const RATE: f64 = 200.0;
/// Targets of the victim over the device's longest stall in the profile.
const TIMES: [f64; 3] = [1.5, 2.0, 4.0];
/// Requests of the neighbour, one size a run.
const BLOCKS: [Bytes; 2] = [Bytes(4 << 10), Bytes(64 << 10)];
/// Requests of the neighbour outstanding: more than any burst here.
const DEPTH: u32 = 128;
/// Time for which the neighbour works, then rests: longer than a slice of blk-throttle (100 ms), so
/// that each of its bursts is a full one.
const BURST: Nanos = Nanos::from_millis(250);
/// Share of its rate below which a victim is not served.
const SERVED: f64 = 0.99;

/// Mechanism that enforces the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HeldBy {
    /// A cap of the I/O domain, which serves first come first served.
    Domain,
    /// The kernel, by blk-throttle in the neighbour's cgroup.
    Kernel,
}

impl HeldBy {
    /// Both mechanisms, the I/O domain first.
    pub const ALL: [Self; 2] = [Self::Domain, Self::Kernel];

    /// Name in tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Domain => "I/O domain",
            Self::Kernel => "kernel",
        }
    }
}

/// A limit of the neighbour as it was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlannedLimit {
    /// Latency target of the victim.
    pub target: Nanos,
    /// Bound of the victim's latency under the limit.
    pub bound: Nanos,
    /// Requests per second of the neighbour.
    pub rate: u64,
    /// Burst of the neighbour, requests.
    pub burst: u64,
    /// Requests per second within the burst.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak: Option<u64>,
}

/// Victim and neighbour in one run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlannedPoint {
    /// Mechanism that enforced the limit.
    pub held_by: HeldBy,
    /// Size of the neighbour's requests.
    pub block: Bytes,
    /// Limit of the neighbour; `None` without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<PlannedLimit>,
    /// Index of the interleaved repetition.
    pub round: u32,
    /// Service of the victim in the run.
    pub victim: VictimSeen,
    /// Requests per second of the neighbour, its rests included.
    pub neighbour: f64,
}

/// Service of the victim in a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct VictimSeen {
    /// Requests that were completed.
    pub n: u64,
    /// Completed requests per second.
    pub rate: f64,
    /// Longest request, from its intended start; known to 1 ms where the kernel holds the limit.
    pub longest: Nanos,
    /// Longest request less the host's stalls, where these are known.
    pub awake: Option<Nanos>,
}

impl VictimSeen {
    /// Whether the victim had its rate, and no request took longer.
    #[must_use]
    pub fn is_within(&self, time: Nanos) -> bool {
        self.rate >= SERVED * RATE && self.awake.unwrap_or(self.longest) <= time
    }
}

/// A target for which there is no limit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RefusedLimit {
    /// Mechanism that was to enforce the limit.
    pub held_by: HeldBy,
    /// Size of the neighbour's requests.
    pub block: Bytes,
    /// Latency target of the victim.
    pub target: Nanos,
    /// Reason why no limit can be chosen.
    pub why: String,
}

/// Measurements and their conditions, as saved in [`FILE`](crate::experiment::Experiment::FILE).
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PlannedData {
    /// [`FORM`](crate::experiment::Experiment::FORM), checked on reading.
    pub schema: String,
    /// Host of the measurement.
    pub host: HostFacts,
    /// Command line of the measurement.
    pub command: String,
    /// Date of the measurement, and version of the program.
    pub generated: String,
    /// Length of each run, s.
    pub seconds: f64,
    /// The longest stall that the profile shows.
    pub stall: Nanos,
    /// Runs with and without limits.
    pub points: Vec<PlannedPoint>,
    /// Targets for which no limit can be chosen.
    pub refused: Vec<RefusedLimit>,
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
