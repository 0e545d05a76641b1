//! (alpha, Delta) of regulated traffic, alone and next to a memory-bound load: the I/O-domain
//! paper's Figs. 8 to 10, on the I/O domain's regulators.
//!
//! The paper regulates an Ethernet controller's AXI transactions in ten steps, each half of the one
//! before. Here the domain's own caps do it, in requests of a disk and frames of a network, in each
//! direction: reads and writes of 4 KiB, frames to and from a VM; the disk and the far end of the
//! link are memory of this machine. The load is memory-bound writes on every CPU, optionally with a
//! second device's traffic, as in the paper, or held by a CPU budget.

mod claims;
mod cpu_budget;
mod device_load;
mod disk;
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
pub use page::{load, report, svg};

use rtvirtio_measure::HostFacts;
use rtvirtio_traffic::{Direction, Service, ServiceTarget};
use serde::{Deserialize, Serialize};

use crate::saved::Saved;

/// File name of the result.
pub const FILE: &str = "regulation.json";
/// The largest rate, in units per second; the others are each half of the one before.
pub const TOP: u64 = 65_536;
/// How many rates there are, as in the paper.
pub const RATES: u32 = 10;
/// How often the victim is measured at each rate, interleaved.
pub const ROUNDS: u32 = 3;
/// Units of a point where its rate gives them in time, as in the paper.
const UNITS: u64 = 10_000;
/// Requests that victim and neighbour have outstanding, each.
const OUTSTANDING: usize = 16;

/// So many rates from the largest on, as far as they are one per second.
#[must_use]
pub fn rates(top: u64, count: u32) -> Vec<u64> {
    (0..count.min(63)).map(|i| top >> i).filter(|rate| *rate > 0).collect()
}

/// What else runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Beside {
    /// Nothing.
    Nothing,
    /// The memory-bound load on every CPU.
    Memory,
    /// The memory-bound load, and reads of a second device.
    Device,
    /// The memory-bound load with a CPU budget.
    Held,
}

impl Beside {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Nothing, Self::Memory, Self::Device, Self::Held];
    /// Those of a run without options.
    pub const USUAL: [Self; 2] = [Self::Nothing, Self::Memory];

    /// Its name.
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
    /// Which flow.
    pub flow: Direction,
    /// What else ran.
    pub beside: Beside,
    /// Units per second that the regulator lets go; `None` for none.
    pub rate: Option<u64>,
    /// Units that were completed.
    pub n: u64,
    /// alpha, units per second.
    pub alpha: f64,
    /// Delta, ns.
    pub delta_ns: u64,
    /// Delta less the time in which a CPU of the host stood still, where that is known.
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
    /// As a service.
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
    /// The victim's completions.
    pub victim: Point,
    /// The neighbour's requests per second.
    pub neighbour: f64,
    /// Which of the interleaved repetitions.
    #[serde(default)]
    pub round: u32,
}

/// The result.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RegulationData {
    /// [`RegulationData::SCHEMA`].
    pub schema: String,
    /// Where.
    pub host: HostFacts,
    /// How.
    pub command: String,
    /// When.
    pub generated: String,
    /// Largest cache, in bytes.
    pub cache: u64,
    /// Bytes of the memory load's arrays.
    pub memory: u64,
    /// All points, in the order of flow, load and rate.
    pub points: Vec<Point>,
    /// A victim next to a regulated neighbour.
    #[serde(default)]
    pub victims: Vec<VictimPoint>,
    /// Targets of the victim, with what was chosen for the neighbour and what that gave.
    #[serde(default)]
    pub choices: Vec<ChosenRate>,
    /// Targets for which there is no rate; `None` in files that do not list them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<Vec<RefusedTarget>>,
    /// Measurements that were made anew, because a CPU stood still for more than a twentieth of
    /// their time; `None` in files that do not count them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spoiled: Option<u64>,
}

/// A target of the victim and the neighbour's rate for it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChosenRate {
    /// What the victim must get.
    pub target: ServiceTarget,
    /// The neighbour's rate by the measured curve and the bound.
    pub chosen: f64,
    /// The burst that the neighbour had with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub burst: Option<f64>,
    /// What the victim got with it.
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
    /// What the victim must get.
    pub target: ServiceTarget,
    /// Why there is none.
    pub why: String,
}

#[cfg(test)]
impl RegulationData {
    fn for_tests(points: Vec<Point>, victims: Vec<VictimPoint>) -> Self {
        Self {
            schema: Self::SCHEMA.to_owned(),
            host: HostFacts {
                kernel: String::new(),
                cpus: 1,
                vmm: String::new(),
                accelerator: String::new(),
                device: "memory".to_owned(),
            },
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

impl Saved for RegulationData {
    const SCHEMA: &str = "rtvirtio-regulation/1";
}

/// alpha, Delta and the median time of completions at these moments, in ns; less the host's stalls
/// where they are known.
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
