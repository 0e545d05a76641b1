//! Prediction of a victim next to a regulated neighbour by the training runs.
//!
//! Every other rate, from the largest down, and the victim alone are training: each in every round,
//! so that a machine that is slower in one run than in another is in the training data too.

use rtvirtio_traffic::{
    Arrival, CURVE_SCHEMA, Direction, Outstanding, Service, VictimCurve, VictimModel, VictimRun,
};

use super::measure::burst;
use super::{OUTSTANDING, VictimPoint};

/// Outstanding requests of victim and neighbour.
const BOTH: Outstanding = Outstanding { victim: OUTSTANDING as u32, neighbour: OUTSTANDING as u32 };
/// Bytes of each request.
const BLOCK: u64 = 4_096;

/// A held-out point of the victim, with the curve's expectation and network calculus' bound.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct JudgedVictim {
    /// Point as measured.
    pub point: VictimPoint,
    /// By the curve of the training runs, at the neighbour's measured rate.
    pub expected: Service,
    /// Worst case, from the neighbour's limit alone.
    pub bound: Service,
}

/// Model of the training runs; `None` with too few.
pub(super) fn model(victims: &[VictimPoint]) -> Option<VictimModel> {
    let training = victims.iter().filter(|v| is_training(victims, v));
    VictimModel::new(&training.map(run).collect::<Vec<_>>(), Some(BOTH)).ok()
}

/// All runs, as `rtvirtio plan --traffic --curve` takes them; `None` without any.
#[must_use]
pub fn victim_curve(victims: &[VictimPoint]) -> Option<VictimCurve> {
    let curve = VictimCurve {
        schema: CURVE_SCHEMA.to_owned(),
        direction: Direction::Read,
        block: BLOCK,
        outstanding: BOTH,
        oldest_first: true,
        runs: victims.iter().map(run).collect(),
    };
    (!victims.is_empty()).then_some(curve)
}

fn run(v: &VictimPoint) -> VictimRun {
    let limit = v.rate.map(|rate| limit(rate as f64));
    VictimRun { limit, neighbour: v.neighbour, service: v.victim.service() }
}

/// Limit of the neighbour, with the burst that it has in the measurement.
pub(super) fn limit(rate: f64) -> Arrival {
    Arrival { rate, burst: burst(rate.ceil() as u64) as f64, peak: None }
}

fn is_training(all: &[VictimPoint], one: &VictimPoint) -> bool {
    let mut rates: Vec<u64> = all.iter().filter_map(|v| v.rate).collect();
    rates.sort_unstable_by(|a, b| b.cmp(a));
    rates.dedup();
    rates.iter().position(|rate| Some(*rate) == one.rate).is_none_or(|i| i % 2 == 0)
}

/// Every run at the other rates, with curve and bound of the training runs.
#[must_use]
pub fn judged_victims(victims: &[VictimPoint]) -> Vec<JudgedVictim> {
    let Some(model) = model(victims) else { return Vec::new() };
    victims
        .iter()
        .filter(|v| !is_training(victims, v))
        .filter_map(|v| {
            // A neighbour that the disk slows down gets the rest of the disk, not its limit.
            let expected = model.curve().at(v.neighbour.min(model.curve().largest()))?;
            Some(JudgedVictim { point: *v, expected, bound: model.bound(&limit(v.rate? as f64))? })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::regulation::{Beside, Point};

    fn victim(rate: Option<u64>, round: u32, alpha: f64, neighbour: f64, us: u64) -> VictimPoint {
        let victim = Point {
            flow: Direction::Read,
            beside: Beside::Nothing,
            rate,
            n: 1_001,
            alpha,
            delta_ns: us * 1_000,
            awake_ns: None,
            median_ns: 1_000,
            memory: None,
        };
        VictimPoint { rate, victim, neighbour, round }
    }

    #[test]
    fn a_victim_is_judged_by_what_is_left() {
        let all = [
            victim(None, 0, 1_000.0, 0.0, 2_000),
            victim(Some(800), 0, 500.0, 480.0, 21_000),
            victim(Some(400), 0, 610.0, 400.0, 9_000),
            victim(Some(200), 0, 805.0, 200.0, 8_000),
        ];
        let judged = judged_victims(&all);
        assert_eq!(judged.len(), 1);
        // The run with 800 had the smallest total: 980, of which 400 are the neighbour's.
        assert!((judged[0].bound.alpha - 580.0).abs() < 1e-9, "{judged:?}");
        // Its gap, less the 16 of the neighbour and the one of its own that fit into it.
        let whole = 1.0 / 980.0;
        let own = 21e-3 - 17.0 * whole;
        let (left, turn) = ((980.0 * own + 5.0) / 580.0, own + 16.0 * whole);
        assert!((judged[0].bound.delta - (f64::min(left, turn) + whole)).abs() < 1e-9, "{judged:?}");
        assert!((judged[0].expected.alpha - (805.0 - 305.0 * 200.0 / 280.0)).abs() < 1e-9, "{judged:?}");
    }

    #[test]
    fn the_bound_holds_for_every_training_run_and_grows_with_the_limit() {
        let runs = |round: u32, worse: f64| {
            let of = move |rate: u64, alpha: f64, us: u64| {
                victim(Some(rate), round, alpha / worse, rate as f64 / worse, (us as f64 * worse) as u64)
            };
            let alone = victim(None, round, 1_000.0 / worse, 0.0, 2_000);
            [
                alone,
                of(800, 300.0, 30_000),
                of(400, 600.0, 9_000),
                of(200, 800.0, 8_000),
                of(100, 890.0, 9_000),
            ]
        };
        let all: Vec<VictimPoint> = [runs(0, 1.0), runs(1, 1.2), runs(2, 1.1)].concat();
        let model = model(&all).unwrap();
        let bound = |rate| model.bound(&limit(rate));
        for v in all.iter().filter(|v| is_training(&all, v)) {
            let Some(rate) = v.rate else { continue };
            let of = bound(rate as f64).unwrap();
            assert!(v.victim.service().delta <= of.delta + 1e-12, "{v:?} {of:?}");
        }
        let all_rates: Vec<Service> = (1..=8).filter_map(|i| bound(f64::from(i) * 100.0)).collect();
        assert!(all_rates.windows(2).all(|two| two[0].alpha >= two[1].alpha && two[0].delta <= two[1].delta));
        assert_eq!((all_rates.len(), bound(801.0)), (8, None));
        assert_eq!(judged_victims(&all).len(), 6, "two rates in three rounds");
        assert!((model.longest() - 36e-3).abs() < 1e-9);
        assert!(judged_victims(&all[1..2]).is_empty(), "without the victim alone nothing is known");
    }
}
