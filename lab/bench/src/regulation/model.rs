//! What the training runs of a victim next to a regulated neighbour say of the other ones.
//!
//! Every other rate, from the largest down, and the victim alone are training: each in every round,
//! so that what a machine is slower in one run than in another is seen in training too.

use rtvirtio_traffic::{Arrival, Curve, CurvePoint, Service};

use super::measure::burst;
use super::{OUTSTANDING, VictimPoint};

/// A held-out point of the victim: what the curve expects and what network calculus bounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct JudgedVictim {
    /// As measured.
    pub point: VictimPoint,
    /// By the curve of the training runs, at the rate that the neighbour really got.
    pub expected: Service,
    /// In the worst case, from the neighbour's limit alone.
    pub bound: Service,
}

/// The training runs' curve, and the service that victim and neighbour share.
#[derive(Clone, Debug)]
pub(super) struct VictimModel {
    /// The victim's service over the rate that the neighbour really got.
    pub(super) curve: Curve,
    /// Least that both got together in a run: how fast the disk is is not the same in all.
    alpha: f64,
    /// Longest gap without a neighbour.
    alone: f64,
    /// The disk's own longest gap in a run, without the neighbour's share of it, over the
    /// neighbour's limit.
    gaps: Vec<(f64, f64)>,
}

impl VictimModel {
    /// `None` with too few points.
    pub(super) fn new(victims: &[VictimPoint]) -> Option<Self> {
        let training: Vec<&VictimPoint> = victims.iter().filter(|v| is_training(victims, v)).collect();
        let alpha = training.iter().map(|v| v.victim.alpha + v.neighbour).fold(f64::INFINITY, f64::min);
        let alone = training
            .iter()
            .filter(|v| v.rate.is_none())
            .map(|v| v.victim.service().delta)
            .reduce(f64::max)?;
        let points: Vec<CurvePoint> = training
            .iter()
            .filter(|v| v.rate.is_some())
            .map(|v| CurvePoint { rate: v.neighbour, service: v.victim.service() })
            .collect();
        let curve = Curve::new(&points).ok()?;
        let gaps = training
            .iter()
            .filter_map(|v| {
                let rate = v.rate? as f64;
                let neighbour = worst(Service { alpha, delta: 0.0 }, &limit(rate))?.delta;
                Some((rate, v.victim.service().delta - neighbour))
            })
            .collect();
        Some(Self { curve, alpha, alone, gaps })
    }

    /// The longest gap of a training run, the neighbour's share included.
    pub(super) fn longest(&self) -> f64 {
        self.curve.at(self.curve.largest()).map_or(self.alone, |worst| worst.delta.max(self.alone))
    }

    /// What the victim gets in the worst case with this limit of the neighbour; `None` above the
    /// largest in training.
    ///
    /// The disk's own gap is the longest at training limits up to the next one from here, less the
    /// neighbour's share, which is added for this limit: at a training limit the bound is never
    /// below what was measured there.
    pub(super) fn bound(&self, limit: &Arrival) -> Option<Service> {
        let next = self.gaps.iter().map(|(rate, _)| *rate).filter(|rate| *rate >= limit.rate);
        let next = next.reduce(f64::min)?;
        let up_to = self.gaps.iter().filter(|(rate, _)| *rate <= next);
        let delta = up_to.map(|(_, gap)| *gap).fold(self.alone, f64::max);
        worst(Service { alpha: self.alpha, delta }, limit)
    }
}

/// A limit of the neighbour, with the burst that it has in the measurement.
pub(super) fn limit(rate: f64) -> Arrival {
    Arrival { rate, burst: burst(rate.ceil() as u64) as f64, peak: None }
}

/// What a limited neighbour leaves first come first served, from one completion to the next: that
/// needs one more unit of service.
fn worst(whole: Service, limit: &Arrival) -> Option<Service> {
    let outstanding = OUTSTANDING as f64;
    let left = whole.fifo_left_by(limit, outstanding, outstanding)?;
    Some(Service { delta: left.delta + 1.0 / whole.alpha, ..left })
}

fn is_training(all: &[VictimPoint], one: &VictimPoint) -> bool {
    let mut rates: Vec<u64> = all.iter().filter_map(|v| v.rate).collect();
    rates.sort_unstable_by(|a, b| b.cmp(a));
    rates.dedup();
    rates.iter().position(|rate| Some(*rate) == one.rate).is_none_or(|i| i % 2 == 0)
}

/// Every run at the other rates, against curve and bound of the training runs.
#[must_use]
pub fn judged_victims(victims: &[VictimPoint]) -> Vec<JudgedVictim> {
    let Some(model) = VictimModel::new(victims) else { return Vec::new() };
    victims
        .iter()
        .filter(|v| !is_training(victims, v))
        .filter_map(|v| {
            // A neighbour that the disk holds back gets what it leaves, not its limit.
            let expected = model.curve.at(v.neighbour.min(model.curve.largest()))?;
            Some(JudgedVictim { point: *v, expected, bound: model.bound(&limit(v.rate? as f64))? })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use rtvirtio_traffic::Direction;

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
        // The run with 800 had the least in all: 980, of which 400 are the neighbour's.
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
        let model = VictimModel::new(&all).unwrap();
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
