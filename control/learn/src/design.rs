//! Conditions of a sweep: a Latin hypercube over loads and knobs.
//!
//! Levels are those of the RT-VirtIO paper's Table II (VM count, weights, task sets, IOPS,
//! `slice_idle`, `timeout_sync`), extended by no idling, `low_latency`, `max_budget`, the other
//! elevators, caps, writes, larger blocks, a neighbour without a rate.

use rtvirtio_model::Elevator;
use rtvirtio_stats::design::{latin_hypercube, level};
use rtvirtio_units::{Bytes, Iops, Nanos};

use crate::load::{Knobs, Stream};

/// Most VMs with paced tasks; one more may be a neighbour.
pub const MAX_VMS: usize = 4;

/// Light load of the paper, requests per second.
pub const LIGHT: f64 = 100.0;
/// Medium load of the paper, requests per second.
pub const MEDIUM: f64 = 500.0;
/// Heavy load of the paper, requests per second.
pub const HEAVY: f64 = 1500.0;

/// The paper's six task sets (its section VII-B).
pub const TASK_SETS: [&[f64]; 6] =
    [&[LIGHT], &[MEDIUM], &[HEAVY], &[LIGHT, MEDIUM], &[MEDIUM, HEAVY], &[LIGHT, MEDIUM, HEAVY]];

/// Load of a VM without a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Neighbour {
    /// 4 KiB random reads, 32 in flight.
    Flood,
    /// 128 KiB sequential writes, 16 in flight.
    Writer,
    /// Load of `Flood`, 200 ms on and 200 ms off.
    Burst,
}

impl Neighbour {
    /// Name in texts: `flood`, `writer` or `burst`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Flood => "flood",
            Self::Writer => "writer",
            Self::Burst => "burst",
        }
    }

    /// The only task of the VM.
    #[must_use]
    pub fn stream(self) -> Stream {
        match self {
            Self::Flood => Stream::flood(32),
            Self::Burst => Stream { burst: Some(Nanos::from_millis(200)), ..Stream::flood(32) },
            Self::Writer => {
                Stream { writes: 1.0, block: Bytes::from_kib(128), sequential: true, ..Stream::flood(16) }
            }
        }
    }
}

/// Settings and load of one run.
#[derive(Clone, Debug, PartialEq)]
pub struct Condition {
    /// Settings of the host.
    pub knobs: Knobs,
    /// Tasks of each VM.
    pub vms: Vec<Vec<Stream>>,
}

/// Limits of a device.
pub struct Limits<'a> {
    /// Elevators that the device offers.
    pub elevators: &'a [Elevator],
    /// Whether the device's data may be overwritten.
    pub writes: bool,
    /// Seconds of device time that one request takes, by share of writes and block size.
    pub cost: &'a dyn Fn(f64, Bytes) -> f64,
}

/// Number of coordinates of the hypercube, see [`condition`].
const DIMENSIONS: usize = 19;

/// Draws `n` conditions; equal for equal seeds.
#[must_use]
pub fn conditions(n: usize, limits: &Limits<'_>, seed: u64) -> Vec<Condition> {
    latin_hypercube(n, DIMENSIONS, seed).iter().map(|u| condition(u, limits)).collect()
}

/// Number of coordinates for [`paper_conditions`].
const PAPER_DIMENSIONS: usize = 11;

/// Draws `n` conditions of the RT-VirtIO paper's Table II and nothing else: idling BFQ, weights, 4
/// KiB random reads at 100, 500 and 1500/s. The paper's coefficients and network have no input for
/// anything more.
#[must_use]
pub fn paper_conditions(n: usize, limits: &Limits<'_>, seed: u64) -> Vec<Condition> {
    let one = |u: &Vec<f64>| {
        let at = |i: usize| u.get(i).copied().unwrap_or(0.0);
        let vms = pick(at(0), &[1, 2, 3, 4], 4);
        let tasks = pick(at(1), &[1, 2, 3], 1);
        let rates: Vec<f64> = (0..tasks).map(|k| pick(at(2 + k), &[LIGHT, MEDIUM, HEAVY], LIGHT)).collect();
        let offered = rates.iter().sum::<f64>() * vms as f64 * (limits.cost)(0.0, Bytes::from_kib(4));
        let scale = (PAPER_LOAD / offered).min(1.0);
        let of_vm: Vec<Stream> = rates.iter().map(|r| Stream::paced(whole_rate(r * scale))).collect();
        let mut knobs = Knobs::default_bfq(vms);
        knobs.slice_idle = pick(at(5), &[1, 2, 4, 6, 8].map(Nanos::from_millis), knobs.slice_idle);
        knobs.timeout_sync = pick(at(6), &[32, 64, 124].map(Nanos::from_millis), knobs.timeout_sync);
        for (i, w) in knobs.weights.iter_mut().enumerate() {
            *w = pick(at(7 + i), &WEIGHTS, 100);
        }
        Condition { knobs, vms: vec![of_vm; vms] }
    };
    latin_hypercube(n, PAPER_DIMENSIONS, seed).iter().map(one).collect()
}

/// Largest declared load of [`paper_conditions`], as a share of the device's.
const PAPER_LOAD: f64 = 0.9;

/// Weights of the paper's VMs.
const WEIGHTS: [u32; 7] = [50, 100, 150, 250, 300, 500, 700];

fn pick<T: Clone>(u: f64, levels: &[T], default: T) -> T {
    level(u, levels).cloned().unwrap_or(default)
}

fn condition(u: &[f64], limits: &Limits<'_>) -> Condition {
    let at = |i: usize| u.get(i).copied().unwrap_or(0.0);
    let n = pick(at(0), &[1, 2, 3, 4, 4], 4);
    let rates = pick(at(1), &TASK_SETS, TASK_SETS[5]);
    let neighbour = neighbour(at(2), limits.writes);
    let writes = if limits.writes { pick(at(3), &[0.0, 0.0, 0.3], 0.0) } else { 0.0 };
    let block = pick(at(4), &[4, 4, 4, 16, 64, 128].map(Bytes::from_kib), Bytes::from_kib(4));
    // The declared load stays below what the device does; near that limit runs would show only the
    // limit.
    let most = 0.1 + 0.8 * at(5);
    let offered: f64 = rates.iter().sum::<f64>() * n as f64 * (limits.cost)(writes, block);
    let scale = (most / offered).min(1.0);
    let stream = |rate: &f64| Stream { writes, block, ..Stream::paced(whole_rate(rate * scale)) };
    let mut vms: Vec<Vec<Stream>> = vec![rates.iter().map(stream).collect(); n];
    let mut caps = vec![None; n];
    if at(16) > 0.85 {
        // Cap of a VM that keeps its rate: 1.5 times the declared rate.
        let declared: f64 = vms[0].iter().filter_map(|s| s.rate).map(|r| r.0).sum();
        caps[0] = Some(Iops((declared * 1.5).ceil()));
    }
    if let Some(neighbour) = neighbour {
        let stream = neighbour.stream();
        let free = (1.0 - offered.min(most)).max(0.05) / (limits.cost)(stream.writes, stream.block);
        let share = pick(at(17), &[None, None, Some(0.7), Some(0.3), Some(0.1)], None);
        caps.push(share.map(|s: f64| Iops((free * s).floor().max(1.0))));
        vms.push(vec![stream]);
    }
    let knobs = knobs(u, vms.len(), limits, caps);
    Condition { knobs, vms }
}

/// A rate that fio can pace without rounding: whole above ten a second, else in tenths.
#[must_use]
pub fn whole_rate(rate: f64) -> f64 {
    if rate >= 10.0 { rate.round() } else { ((rate * 10.0).round() / 10.0).max(0.2) }
}

fn neighbour(u: f64, writes: bool) -> Option<Neighbour> {
    let last = if writes { Some(Neighbour::Writer) } else { None };
    pick(u, &[None, None, None, Some(Neighbour::Flood), Some(Neighbour::Burst), last], None)
}

fn knobs(u: &[f64], vms: usize, limits: &Limits<'_>, mut caps: Vec<Option<Iops>>) -> Knobs {
    let at = |i: usize| u.get(i).copied().unwrap_or(0.0);
    let bfq = Elevator::Bfq;
    let wanted =
        pick(at(6), &[bfq, bfq, bfq, bfq, bfq, Elevator::None, Elevator::MqDeadline, Elevator::Kyber], bfq);
    let elevator = if limits.elevators.contains(&wanted) { wanted } else { Elevator::None };
    let mut knobs = Knobs { elevator, ..Knobs::default_bfq(vms) };
    if caps.iter().all(Option::is_none) {
        caps.clear();
    }
    knobs.caps = caps;
    if elevator != bfq {
        return knobs;
    }
    knobs.slice_idle = pick(at(7), &[0, 0, 1, 2, 4, 6, 8, 8].map(Nanos::from_millis), Nanos(0));
    knobs.timeout_sync = pick(at(8), &[32, 64, 124, 125].map(Nanos::from_millis), knobs.timeout_sync);
    knobs.low_latency = at(9) < 0.5;
    let budgets = [None, None, None, Some(Bytes::from_kib(512)), Some(Bytes::from_kib(2048))];
    knobs.max_budget = pick(at(10), &budgets, None);
    if at(15) >= 0.4 {
        for (i, w) in knobs.weights.iter_mut().enumerate() {
            *w = pick(at(if i < MAX_VMS { 11 + i } else { 18 }), &WEIGHTS, 100);
        }
    }
    knobs
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Elevator; 4] = [Elevator::None, Elevator::MqDeadline, Elevator::Kyber, Elevator::Bfq];

    fn limits<'a>(writes: bool, elevators: &'a [Elevator]) -> Limits<'a> {
        Limits { elevators, writes, cost: &|_, block| 60e-6 + block.0 as f64 * 1e-9 }
    }

    #[test]
    fn every_level_is_visited_and_nothing_is_impossible() {
        let all = conditions(200, &limits(true, &ALL), 1);
        assert_eq!(all, conditions(200, &limits(true, &ALL), 1), "the same seed, the same design");
        for elevator in ALL {
            assert!(all.iter().any(|c| c.knobs.elevator == elevator), "{elevator:?}");
        }
        for n in 1..=MAX_VMS {
            assert!(all.iter().any(|c| c.vms.iter().filter(|vm| vm[0].rate.is_some()).count() == n));
        }
        for neighbour in [Neighbour::Flood, Neighbour::Writer, Neighbour::Burst] {
            assert!(all.iter().any(|c| c.vms.last().unwrap()[0] == neighbour.stream()), "{neighbour:?}");
        }
        for c in &all {
            let load: f64 = c
                .vms
                .iter()
                .flatten()
                .filter_map(|s| s.rate.map(|r| r.0 * (60e-6 + s.block.0 as f64 * 1e-9)))
                .sum();
            assert!(load < 0.95, "{load} {c:?}");
            assert_eq!(c.knobs.weights.len(), c.vms.len());
            assert!(c.knobs.caps.is_empty() || c.knobs.caps.len() == c.vms.len());
        }
    }

    #[test]
    fn the_papers_conditions_are_of_its_table_ii() {
        let all = paper_conditions(100, &limits(true, &ALL), 1);
        for c in &all {
            assert!(c.knobs.elevator == Elevator::Bfq && c.knobs.slice_idle.0 > 0 && c.knobs.caps.is_empty());
            let streams: Vec<&Stream> = c.vms.iter().flatten().collect();
            assert!((1..=4).contains(&c.vms.len()) && (1..=3).contains(&c.vms[0].len()));
            let load: f64 = streams.iter().filter_map(|s| s.rate).map(|r| r.0 * 64.1e-6).sum();
            assert!(load < 0.92 && streams.iter().all(|s| s.writes == 0.0), "{load} {c:?}");
        }
        for n in 1..=4 {
            assert!(all.iter().any(|c| c.vms.len() == n));
        }
        assert!(all.iter().any(|c| c.knobs.weights.windows(2).any(|w| w[0] != w[1])));
    }

    #[test]
    fn a_device_with_data_is_only_read_and_only_offered_elevators_are_set() {
        let few = [Elevator::None, Elevator::Bfq];
        for c in conditions(100, &limits(false, &few), 2) {
            assert!(c.vms.iter().flatten().all(|s| s.writes == 0.0));
            assert!(few.contains(&c.knobs.elevator));
        }
    }
}
