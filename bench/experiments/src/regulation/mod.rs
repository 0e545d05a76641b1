//! (alpha, Delta) of regulated traffic, alone and next to a memory-bound load: the I/O-domain
//! paper's Figs. 8 to 10, on the I/O domain's regulators.
//!
//! The paper regulates an Ethernet controller's AXI transactions in ten steps, each half of the one
//! before. Here the I/O domain's own caps do it, in requests of a disk and frames of a network, in
//! each direction: reads and writes of 4 KiB, frames to and from a VM; the disk and the host's end
//! of the link are memory of this machine. The load is memory-bound writes on every CPU, optionally
//! with a second device's traffic, as in the paper, or with a CPU budget.

mod claims;
mod cpu_budget;
mod device_load;
mod disk;
mod gate;
mod measure;
pub mod memory_load;
mod model;
mod network;
mod page;
pub mod planned;
mod victim;

pub use claims::{claims, outcomes};
pub use measure::{RegulationOptions, add, measure};
pub use model::victim_curve;
pub use page::{load, svg};

use clap::ValueEnum;
use rtvirtio_measure::HostFacts;
use rtvirtio_traffic::{Direction, Service, ServiceTarget};
use serde::{Deserialize, Serialize};

/// Largest rate, units per second; the others are each half of the one before.
pub const TOP: u64 = 65_536;
/// Number of rates, as in the paper.
pub const RATES: u32 = 10;
/// Measurements of the victim at each rate, interleaved.
pub const ROUNDS: u32 = 3;
/// Units of a point where its rate completes them in time, as in the paper.
const UNITS: u64 = 10_000;
/// Requests that victim and neighbour have outstanding, each.
const OUTSTANDING: usize = 16;

/// The first `count` rates from the largest on that are at least one per second.
#[must_use]
pub fn rates(top: u64, count: u32) -> Vec<u64> {
    (0..count.min(63)).map(|i| top >> i).filter(|rate| *rate > 0).collect()
}

/// Load next to the measured flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Beside {
    /// Nothing.
    #[value(name = "none")]
    Nothing,
    /// Memory-bound writes on every CPU.
    Memory,
    /// Work in memory, and reads of a second device.
    Device,
    /// Memory-bound writes with a CPU budget of a quarter.
    Held,
}

impl Beside {
    /// All loads, the idle host first.
    pub const ALL: [Self; 4] = [Self::Nothing, Self::Memory, Self::Device, Self::Held];
    /// Loads of a run without options.
    pub const USUAL: [Self; 2] = [Self::Nothing, Self::Memory];

    /// Name in tables and figures.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Nothing => "no load",
            Self::Memory => "memory load",
            Self::Device => "memory load and second device",
            Self::Held => "memory load with a CPU budget",
        }
    }
}

/// Completions of one flow under one regulation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "Row", into = "Row")]
pub struct Point {
    /// Kind and direction of the units.
    pub flow: Direction,
    /// Load next to the flow.
    pub beside: Beside,
    /// Units per second that the regulator admits; `None` without a regulator.
    pub rate: Option<u64>,
    /// Units that were completed.
    pub n: u64,
    /// alpha, units per second.
    pub alpha: f64,
    /// Delta as measured, ns.
    pub delta_ns: u64,
    /// Delta less the host's stalls, where these are known, ns.
    pub awake_ns: Option<u64>,
    /// Median of the time between two units, ns.
    pub median_ns: u64,
    /// Bytes per second that the memory load wrote meanwhile.
    pub memory: Option<f64>,
}

/// A point in a file: its fields in order. There are many, and files are to be small.
type Row = (Direction, Beside, Option<u64>, u64, f64, u64, Option<u64>, u64, Option<f64>);

impl From<Row> for Point {
    fn from((flow, beside, rate, n, alpha, delta_ns, awake_ns, median_ns, memory): Row) -> Self {
        Self { flow, beside, rate, n, alpha, delta_ns, awake_ns, median_ns, memory }
    }
}

impl From<Point> for Row {
    fn from(p: Point) -> Self {
        // More digits than these are noise.
        let alpha = (p.alpha * 1e3).round() / 1e3;
        (p.flow, p.beside, p.rate, p.n, alpha, p.delta_ns, p.awake_ns, p.median_ns, p.memory.map(f64::round))
    }
}

impl Point {
    /// Service with alpha and Delta, less the host's stalls where these are known.
    #[must_use]
    pub fn service(&self) -> Service {
        Service { alpha: self.alpha, delta: self.awake_ns.unwrap_or(self.delta_ns) as f64 / 1e9 }
    }
}

/// A victim next to a regulated neighbour on one disk.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct VictimPoint {
    /// Requests per second of the neighbour; `None` without one.
    pub rate: Option<u64>,
    /// Completions of the victim.
    pub victim: Point,
    /// Requests per second of the neighbour.
    pub neighbour: f64,
    /// Index of the interleaved repetition.
    #[serde(default)]
    pub round: u32,
}

/// Measurements and their conditions, as saved in [`FILE`](crate::experiment::Experiment::FILE).
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RegulationData {
    /// [`FORM`](crate::experiment::Experiment::FORM), checked on reading.
    pub schema: String,
    /// Host of the measurement.
    pub host: HostFacts,
    /// Command line of the measurement.
    pub command: String,
    /// Date of the measurement, and version of the program.
    pub generated: String,
    /// Size of the largest cache, bytes.
    pub cache: u64,
    /// Bytes of the memory load's arrays.
    pub memory: u64,
    /// All points, in the order of flow, load and rate.
    pub points: Vec<Point>,
    /// A victim next to a regulated neighbour.
    #[serde(default)]
    pub victims: Vec<VictimPoint>,
    /// Targets of the victim, with the neighbour's chosen limit and its effect.
    #[serde(default)]
    pub choices: Vec<ChosenRate>,
    /// Targets for which there is no rate; `None` in files that do not list them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<Vec<RefusedTarget>>,
    /// Measurements that were repeated, because a CPU stalled for more than a twentieth of their
    /// time; `None` in files that do not count them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spoiled: Option<u64>,
}

/// A target of the victim and the neighbour's rate for it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChosenRate {
    /// alpha and Delta that the victim must have.
    pub target: ServiceTarget,
    /// The neighbour's rate by the measured curve and the bound.
    pub chosen: f64,
    /// Burst of the neighbour at that rate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub burst: Option<f64>,
    /// Victim next to the neighbour at that rate.
    pub measured: VictimPoint,
}

impl ChosenRate {
    /// Whether the target holds.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.target.is_met(&self.measured.victim.service())
    }
}

/// A target of the victim for which no rate of the neighbour can be chosen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RefusedTarget {
    /// alpha and Delta that the victim must have.
    pub target: ServiceTarget,
    /// Reason why no rate can be chosen.
    pub why: String,
}

#[cfg(test)]
impl RegulationData {
    fn for_tests(points: Vec<Point>, victims: Vec<VictimPoint>) -> Self {
        Self {
            schema: <Self as crate::experiment::Experiment>::FORM.to_owned(),
            host: HostFacts { cpus: 1, device: "memory".to_owned(), ..HostFacts::default() },
            command: "bench regulation".to_owned(),
            generated: String::new(),
            cache: 1 << 20,
            memory: 1 << 22,
            points,
            victims,
            choices: Vec::new(),
            refused: None,
            spoiled: None,
        }
    }
}

/// alpha, Delta and the median interval of completions at these times, ns; less the host's stalls
/// where these are known.
pub(crate) fn point(
    mut at: Vec<u64>,
    stalls: Option<&rtvirtio_measure::stalls::Stalls>,
    (flow, beside, rate): (Direction, Beside, Option<u64>),
) -> Option<Point> {
    at.sort_unstable();
    let (first, last) = (*at.first()?, *at.last()?);
    let mut gaps: Vec<u64> = at.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let awake = stalls.map(|stalls| {
        let less = |pair: &[u64]| pair[1] - pair[0] - stalls.within(pair[0], pair[1]);
        at.windows(2).map(less).max().unwrap_or(0)
    });
    gaps.sort_unstable();
    let seconds = (last - first) as f64 / 1e9;
    (seconds > 0.0).then(|| Point {
        flow,
        beside,
        rate,
        n: at.len() as u64,
        alpha: gaps.len() as f64 / seconds,
        delta_ns: *gaps.last().unwrap_or(&0),
        awake_ns: awake,
        median_ns: gaps[gaps.len() / 2],
        memory: None,
    })
}

#[cfg(test)]
mod tests {
    use rtvirtio_measure::stalls::Stalls;

    use super::*;

    #[test]
    fn each_rate_is_half_of_the_one_before() {
        let all = rates(TOP, RATES);
        assert_eq!((all.len(), all[0], all[9]), (10, 65_536, 128));
        assert_eq!(rates(2, 10), [2, 1]);
        assert!(all.windows(2).all(|pair| pair[1] * 2 == pair[0]));
    }

    #[test]
    fn a_point_is_the_long_run_rate_and_the_longest_gap() {
        let of = (Direction::Read, Beside::Nothing, Some(1_000));
        let at = vec![3_000_000, 0, 1_000_000, 2_000_000, 10_000_000];
        let p = point(at.clone(), None, of).unwrap();
        assert_eq!((p.n, p.delta_ns, p.median_ns, p.awake_ns), (5, 7_000_000, 1_000_000, None));
        assert!((p.alpha - 400.0).abs() < 1e-9, "{p:?}");
        let stalls = Stalls::union(vec![(4_000_000, 9_000_000)]);
        assert_eq!(point(at, Some(&stalls), of).unwrap().awake_ns, Some(2_000_000));
        assert_eq!(point(vec![5], None, of), None);
        assert_eq!(point(Vec::new(), None, of), None);
    }
}
