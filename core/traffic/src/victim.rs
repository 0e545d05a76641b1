//! Service of a victim measured next to a regulated neighbour, and bounds for other limits.

use serde::{Deserialize, Serialize};

use crate::choose::{ChooseError, Curve, CurvePoint};
use crate::curve::{Arrival, Service};
use crate::tspec::Direction;

/// Version of the JSON of [`VictimCurve`].
pub const CURVE_SCHEMA: &str = "rtvirtio.curve.v1";
/// Limit of runs in a curve.
const MOST_RUNS: usize = 10_000;

/// A run of the victim at one limit of the neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VictimRun {
    /// Limit of the neighbour, in requests; `None` where it did not run.
    pub limit: Option<Arrival>,
    /// Requests per second that the neighbour got.
    pub neighbour: f64,
    /// Service of the victim, with a queue that was never empty.
    pub service: Service,
}

/// Requests outstanding at all times.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Outstanding {
    /// Queue depth of the victim.
    pub victim: u32,
    /// Queue depth of the neighbour.
    pub neighbour: u32,
}

/// Service of a victim over the limit of its neighbour on one disk, as a JSON file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VictimCurve {
    /// Always [`CURVE_SCHEMA`], for readers of the file.
    pub schema: String,
    /// Direction of the requests of both.
    pub direction: Direction,
    /// Bytes of each request of both.
    pub block: u64,
    /// Outstanding requests of both.
    pub outstanding: Outstanding,
    /// Whether the disk serves the oldest request first; else the order is unknown.
    pub oldest_first: bool,
    /// Runs: the victim alone at least once, and at least two with a limit.
    pub runs: Vec<VictimRun>,
}

impl VictimCurve {
    /// Error of the curve, in words; `None` for a valid one.
    #[must_use]
    pub fn fault(&self) -> Option<String> {
        let good = |s: &Service| s.alpha.is_finite() && s.alpha > 0.0 && s.delta.is_finite() && s.delta > 0.0;
        let limited =
            |a: &Arrival| a.rate.is_finite() && a.rate > 0.0 && a.burst.is_finite() && a.burst >= 1.0;
        if self.schema != CURVE_SCHEMA {
            return Some(format!("its schema is {:?}, not {CURVE_SCHEMA:?}", self.schema));
        }
        if self.runs.len() > MOST_RUNS {
            return Some(format!("it has {} runs, {MOST_RUNS} at most", self.runs.len()));
        }
        if !self.direction.is_disk() {
            return Some("its direction is one of a network: only disks are chosen for".to_owned());
        }
        if self.block == 0 || self.outstanding.victim == 0 || self.outstanding.neighbour == 0 {
            return Some("its block and what is outstanding are at least 1".to_owned());
        }
        let bad = |run: &VictimRun| {
            !good(&run.service)
                || !run.neighbour.is_finite()
                || run.neighbour < 0.0
                || !run.limit.as_ref().is_none_or(limited)
        };
        let at = self.runs.iter().position(bad)?;
        Some(format!("run {} of it has an impossible number", at + 1))
    }

    /// Model for limits between the measured ones.
    pub fn model(&self) -> Result<VictimModel, ChooseError> {
        VictimModel::new(&self.runs, self.oldest_first.then_some(self.outstanding))
    }
}

/// Measured curve, and the service that victim and neighbour share.
#[derive(Clone, Debug)]
pub struct VictimModel {
    /// Service of the victim over the rate that the neighbour got.
    curve: Curve,
    /// Least total of both in a run: the disk's speed varies between runs.
    alpha: f64,
    /// Longest gap of the victim without a neighbour, in seconds.
    alone: f64,
    /// Disk's own longest gap of each run, by the neighbour's limit: the victim's gap less the
    /// neighbour's share.
    gaps: Vec<(f64, f64)>,
    oldest_first: Option<Outstanding>,
}

impl VictimModel {
    /// From runs in any order. With `oldest_first`, requests are served in order of arrival and
    /// these numbers of them are outstanding; without it the order is unknown.
    ///
    /// # Errors
    /// [`ChooseError::TooFew`], and [`ChooseError::NotAlone`] without a run of the victim alone.
    pub fn new(runs: &[VictimRun], oldest_first: Option<Outstanding>) -> Result<Self, ChooseError> {
        let alpha = runs.iter().map(|v| v.service.alpha + v.neighbour).fold(f64::INFINITY, f64::min);
        let alone = runs.iter().filter(|v| v.limit.is_none()).map(|v| v.service.delta);
        let alone = alone.reduce(f64::max).ok_or(ChooseError::NotAlone)?;
        let limited = || runs.iter().filter_map(|v| Some((v, v.limit?)));
        let points: Vec<CurvePoint> =
            limited().map(|(v, _)| CurvePoint { rate: v.neighbour, service: v.service }).collect();
        let curve = Curve::new(&points)?;
        let gaps = limited()
            .filter_map(|(v, limit)| {
                let neighbour = left(Service { alpha, delta: 0.0 }, &limit, oldest_first)?.delta;
                Some((limit.rate, v.service.delta - neighbour))
            })
            .collect();
        Ok(Self { curve, alpha, alone, gaps, oldest_first })
    }

    /// Service of the victim over the rate that the neighbour got.
    #[must_use]
    pub fn curve(&self) -> &Curve {
        &self.curve
    }

    /// Longest gap of a run, in seconds, the neighbour's share included.
    #[must_use]
    pub fn longest(&self) -> f64 {
        self.curve.at(self.curve.largest()).map_or(self.alone, |worst| worst.delta.max(self.alone))
    }

    /// Worst-case service of the victim at this limit of the neighbour; `None` above the largest
    /// measured limit, and where nothing is left.
    ///
    /// The disk's own gap is the longest at measured limits up to the next one above, less the
    /// neighbour's share, which is added for this limit: at a measured limit the bound is never
    /// better than the measurement.
    #[must_use]
    pub fn bound(&self, limit: &Arrival) -> Option<Service> {
        left(self.whole(limit)?, limit, self.oldest_first)
    }

    /// Longest latency of a request of the victim that makes `rate` a second, of which `burst` may
    /// come at once, at this limit of the neighbour; `None` where nothing bounds it. Without a
    /// rate, 0, the victim has as many outstanding at all times.
    ///
    /// Alpha and Delta of [`VictimModel::bound`] are each the better of two service curves, and
    /// together they are none. In any order the curve is that of [`Service::left_by`]. With the
    /// oldest first a request waits for those that are outstanding, and for no more than both
    /// bursts where the device serves both rates.
    #[must_use]
    pub fn latency(&self, limit: &Arrival, rate: f64, burst: f64) -> Option<f64> {
        let whole = self.whole(limit)?;
        let any = whole.left_by(limit).filter(|left| rate <= left.alpha);
        let any = any.map(|left| left.delta + (1.0 + burst) / left.alpha);
        let oldest = self.oldest_first.map(|o| {
            let (own, others) = (f64::from(o.victim), f64::from(o.neighbour));
            let fits = rate > 0.0 && limit.rate + rate <= whole.alpha;
            let ahead = if fits { burst + limit.burst.min(others) } else { own.max(burst) + others };
            whole.delta + (1.0 + ahead) / whole.alpha
        });
        any.into_iter().chain(oldest).reduce(f64::min)
    }

    /// Service that victim and neighbour share at this limit.
    fn whole(&self, limit: &Arrival) -> Option<Service> {
        let next = self.gaps.iter().map(|(rate, _)| *rate).filter(|rate| *rate >= limit.rate);
        let next = next.reduce(f64::min)?;
        let up_to = self.gaps.iter().filter(|(rate, _)| *rate <= next);
        let delta = up_to.map(|(_, gap)| *gap).fold(self.alone, f64::max);
        Some(Service { alpha: self.alpha, delta })
    }
}

/// Service left by a limited neighbour, from one completion to the next: that takes one more unit
/// of service.
fn left(whole: Service, limit: &Arrival, oldest_first: Option<Outstanding>) -> Option<Service> {
    let (left, next) = match oldest_first {
        Some(o) => {
            (whole.fifo_left_by(limit, f64::from(o.victim), f64::from(o.neighbour))?, 1.0 / whole.alpha)
        }
        None => {
            let left = whole.left_by(limit)?;
            (left, 1.0 / left.alpha)
        }
    };
    Some(Service { delta: left.delta + next, ..left })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(rate: Option<f64>, alpha: f64, neighbour: f64, delta: f64) -> VictimRun {
        let limit = rate.map(|rate| Arrival { rate, burst: 1.0 + rate / 100.0, peak: None });
        VictimRun { limit, neighbour, service: Service { alpha, delta } }
    }

    fn curve() -> VictimCurve {
        VictimCurve {
            schema: CURVE_SCHEMA.to_owned(),
            direction: Direction::Read,
            block: 4_096,
            outstanding: Outstanding { victim: 16, neighbour: 16 },
            oldest_first: false,
            runs: vec![
                run(None, 1_000.0, 0.0, 0.002),
                run(Some(400.0), 590.0, 400.0, 0.009),
                run(Some(200.0), 800.0, 200.0, 0.006),
            ],
        }
    }

    #[test]
    fn the_bound_holds_for_every_run_in_either_order() {
        for oldest_first in [true, false] {
            let curve = VictimCurve { oldest_first, ..curve() };
            let model = curve.model().unwrap();
            for run in curve.runs.iter().filter(|run| run.limit.is_some()) {
                let bound = model.bound(&run.limit.unwrap()).unwrap();
                assert!(bound.delta >= run.service.delta - 1e-12, "{run:?} {bound:?}");
                assert!(bound.alpha <= run.service.alpha + 1e-9, "{run:?} {bound:?}");
            }
            assert_eq!(model.bound(&Arrival { rate: 401.0, burst: 1.0, peak: None }), None);
        }
        let (known, any) = (VictimCurve { oldest_first: true, ..curve() }, curve());
        let at = |c: &VictimCurve| c.model().unwrap().bound(&c.runs[1].limit.unwrap()).unwrap();
        assert!(at(&known).delta <= at(&any).delta, "an order that is known leaves more");
    }

    #[test]
    fn a_latency_is_of_one_service_curve() {
        let outstanding = Outstanding { victim: 64, neighbour: 32 };
        let curve = VictimCurve { oldest_first: true, outstanding, ..curve() };
        let (model, limit) = (curve.model().unwrap(), curve.runs[1].limit.unwrap());
        let latency = |rate: f64| model.latency(&limit, rate, 1.0).unwrap();
        // 400/s and 100/s fit into 990/s: both bursts count.
        assert!((latency(100.0) - (0.002 + 7.0 / 990.0)).abs() < 1e-9, "{}", latency(100.0));
        // With 650/s they do not, and all that may be outstanding is: alpha is 660/s nevertheless.
        assert!(model.bound(&limit).unwrap().alpha >= 650.0);
        assert!((latency(650.0) - (0.002 + 97.0 / 990.0)).abs() < 1e-9, "{}", latency(650.0));
        // In any order what is left of 990/s has to suffice.
        let any = VictimCurve { oldest_first: false, ..curve }.model().unwrap();
        assert!(any.latency(&limit, 100.0, 1.0) > model.latency(&limit, 100.0, 1.0));
        assert_eq!(any.latency(&limit, 650.0, 1.0), None);
    }

    #[test]
    fn a_curve_that_cannot_be_is_refused() {
        assert_eq!(curve().fault(), None);
        let text = serde_json::to_string(&curve()).unwrap();
        assert_eq!(serde_json::from_str::<VictimCurve>(&text).unwrap(), curve());
        let with = |change: fn(&mut VictimCurve)| {
            let mut c = curve();
            change(&mut c);
            c.fault()
        };
        assert!(with(|c| c.schema.clear()).is_some());
        assert!(with(|c| c.block = 0).is_some());
        assert!(with(|c| c.direction = Direction::Rx).is_some());
        assert!(with(|c| c.runs[1].service.alpha = 0.0).unwrap().contains("run 2"));
        assert!(with(|c| c.runs[2].limit.as_mut().unwrap().rate = f64::NAN).is_some());
        let alone = VictimCurve { runs: curve().runs[1..].to_vec(), ..curve() };
        assert_eq!(alone.model().unwrap_err(), ChooseError::NotAlone);
        let few = VictimCurve { runs: curve().runs[..2].to_vec(), ..curve() };
        assert_eq!(few.model().unwrap_err(), ChooseError::TooFew { points: 1 });
    }
}
