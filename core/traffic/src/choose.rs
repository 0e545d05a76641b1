//! Chooses a regulator for a target: the largest rate of the neighbours at which a victim keeps its
//! (alpha, Delta).

use serde::{Deserialize, Serialize};

use crate::curve::{Arrival, Service};

/// A victim's measured service while its neighbours are limited to `rate`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CurvePoint {
    /// Rate of the neighbours, per second.
    pub rate: f64,
    /// Service that the victim gets.
    pub service: Service,
}

/// Service that a victim must get.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ServiceTarget {
    /// alpha at least this, per second.
    pub alpha: f64,
    /// Delta at most this, in seconds.
    pub delta: f64,
}

impl ServiceTarget {
    /// Whether a service meets the target.
    #[must_use]
    pub fn is_met(&self, service: &Service) -> bool {
        service.alpha >= self.alpha && service.delta <= self.delta
    }
}

/// Rate for the neighbours, with the resulting service of the victim.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Choice {
    /// Rate, burst and peak.
    pub arrival: Arrival,
    /// Service of the victim by the measured curve.
    pub expected: Service,
    /// Service of the victim in the worst case by network calculus: the target holds for it too.
    pub bound: Service,
}

/// Reasons why nothing can be chosen.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ChooseError {
    /// Fewer than two points.
    #[error("a curve needs at least two measured rates, and has {points}: measure more")]
    TooFew {
        /// Number of points given.
        points: usize,
    },
    /// No run without a neighbour was measured.
    #[error("the victim was not measured without a neighbour: measure it so too")]
    NotAlone,
    /// The target does not hold even at the smallest measured rate.
    #[error(
        "at the smallest measured rate of its neighbours the victim gets alpha {:.1}/s and Delta {:.2} ms: measure smaller rates, or ask for less",
        best.alpha, best.delta * 1e3
    )]
    OutOfReach {
        /// Service at that rate.
        best: Service,
    },
    /// The target holds by the measured curve, but not in the worst case.
    #[error(
        "with its neighbours at {rate:.1}/s network calculus leaves the victim alpha {:.1}/s and Delta {:.2} ms: ask for less",
        best.alpha, best.delta * 1e3
    )]
    BeyondBound {
        /// Smallest measured rate of the neighbours, per second.
        rate: f64,
        /// Worst-case service at that rate; an alpha of 0 where nothing is left.
        best: Service,
    },
}

/// A victim's service over the rate of its neighbours: alpha falls and Delta rises. Where a
/// measurement contradicts that, the worst value at this and smaller rates is used.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Curve {
    points: Vec<CurvePoint>,
}

impl Curve {
    /// From measurements in any order.
    pub fn new(measured: &[CurvePoint]) -> Result<Self, ChooseError> {
        let mut points = measured.to_vec();
        points.retain(|p| p.rate.is_finite() && p.service.alpha.is_finite() && p.service.delta.is_finite());
        points.sort_by(|a, b| a.rate.total_cmp(&b.rate));
        if points.len() < 2 {
            return Err(ChooseError::TooFew { points: points.len() });
        }
        let mut worst = points[0].service;
        for point in &mut points {
            worst = Service {
                alpha: worst.alpha.min(point.service.alpha),
                delta: worst.delta.max(point.service.delta),
            };
            point.service = worst;
        }
        Ok(Self { points })
    }

    /// Service at a rate, interpolated linearly; `None` above the largest measured rate. Below the
    /// smallest rate its values are used.
    #[must_use]
    pub fn at(&self, rate: f64) -> Option<Service> {
        let after = self.points.partition_point(|p| p.rate < rate);
        let high = self.points.get(after)?;
        let Some(low) = after.checked_sub(1).and_then(|i| self.points.get(i)) else {
            return Some(high.service);
        };
        let share = (rate - low.rate) / (high.rate - low.rate);
        let between = |a: f64, b: f64| a + (b - a) * share;
        Some(Service {
            alpha: between(low.service.alpha, high.service.alpha),
            delta: between(low.service.delta, high.service.delta),
        })
    }

    /// Largest measured rate of the neighbours, per second.
    #[must_use]
    pub fn largest(&self) -> f64 {
        self.points[self.points.len() - 1].rate
    }

    /// Largest rate at which the target holds by the curve.
    pub fn largest_rate(&self, target: &ServiceTarget) -> Result<f64, ChooseError> {
        let Some(last) = self.points.iter().rposition(|p| target.is_met(&p.service)) else {
            return Err(ChooseError::OutOfReach { best: self.points[0].service });
        };
        let low = &self.points[last];
        let Some(high) = self.points.get(last + 1) else { return Ok(low.rate) };
        // Point of a segment where alpha, or Delta, crosses the target.
        let share = |from: f64, to: f64, limit: f64| {
            if (to - from).abs() <= f64::EPSILON * from.abs() {
                1.0
            } else {
                ((limit - from) / (to - from)).clamp(0.0, 1.0)
            }
        };
        let alpha = if high.service.alpha >= target.alpha {
            1.0
        } else {
            share(low.service.alpha, high.service.alpha, target.alpha)
        };
        let delta = if high.service.delta <= target.delta {
            1.0
        } else {
            share(low.service.delta, high.service.delta, target.delta)
        };
        Ok(low.rate + (high.rate - low.rate) * alpha.min(delta))
    }
}

/// Chooses the neighbours' regulator: the largest rate at which the target holds both by the curve
/// and in the worst case.
///
/// `arrival` gives the arrival curve of a regulator at a rate; `left` gives the service that
/// network calculus leaves to the victim, such as by [`Service::fifo_left_by`]. The service left
/// must not improve with the rate.
pub fn choose(
    curve: &Curve,
    target: &ServiceTarget,
    arrival: impl Fn(f64) -> Arrival,
    left: impl Fn(&Arrival) -> Option<Service>,
) -> Result<Choice, ChooseError> {
    let bounded = |rate: f64| left(&arrival(rate)).filter(|bound| target.is_met(bound));
    let (low, high) = (curve.points[0].rate, curve.largest_rate(target)?);
    let nothing = Service { alpha: 0.0, delta: f64::INFINITY };
    let (low, bound) = largest_that_holds(low, high, bounded).ok_or_else(|| {
        let best = left(&arrival(low)).unwrap_or(nothing);
        ChooseError::BeyondBound { rate: low, best }
    })?;
    // `low` is within the measured rates.
    let expected = curve.at(low).unwrap_or(curve.points[0].service);
    Ok(Choice { arrival: arrival(low), expected, bound })
}

/// Largest value of a range at which `holds`, with its result, found by bisection: `holds` must be
/// monotonic. `None` when it does not hold at `low`.
pub fn largest_that_holds<T>(low: f64, high: f64, holds: impl Fn(f64) -> Option<T>) -> Option<(f64, T)> {
    if let Some(all) = holds(high) {
        return Some((high, all));
    }
    let (mut low, mut high, mut found) = (low, high, holds(low)?);
    // Halves the remaining range each time: far below one per second at the end.
    for _ in 0..64 {
        let middle = low + (high - low) / 2.0;
        match holds(middle) {
            Some(better) => (low, found) = (middle, better),
            None => high = middle,
        }
    }
    Some((low, found))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn point(rate: f64, alpha: f64, delta: f64) -> CurvePoint {
        CurvePoint { rate, service: Service { alpha, delta } }
    }

    fn curve() -> Curve {
        Curve::new(&[point(400.0, 200.0, 0.08), point(100.0, 800.0, 0.02), point(200.0, 600.0, 0.04)])
            .unwrap()
    }

    #[test]
    fn the_largest_rate_is_where_one_of_the_two_crosses() {
        let c = curve();
        let of = |alpha: f64, delta: f64| c.largest_rate(&ServiceTarget { alpha, delta });
        assert_eq!(of(600.0, 1.0), Ok(200.0));
        assert_eq!(of(700.0, 1.0), Ok(150.0));
        assert_eq!(of(0.0, 0.06), Ok(300.0));
        // The smaller rate of the two limits.
        assert_eq!(of(700.0, 0.06), Ok(150.0));
        assert_eq!(of(0.0, 1.0), Ok(400.0), "never beyond what was measured");
        let best = Service { alpha: 800.0, delta: 0.02 };
        assert_eq!(of(900.0, 1.0), Err(ChooseError::OutOfReach { best }));
    }

    #[test]
    fn a_measurement_that_is_better_than_at_a_smaller_rate_does_not_count() {
        let c = Curve::new(&[point(1.0, 10.0, 0.5), point(2.0, 20.0, 0.1), point(4.0, 5.0, 0.7)]).unwrap();
        assert_eq!(c.at(2.0), Some(Service { alpha: 10.0, delta: 0.5 }));
        assert_eq!(c.at(3.0), Some(Service { alpha: 7.5, delta: 0.6 }));
        assert_eq!((c.at(0.1), c.at(4.1)), (Some(Service { alpha: 10.0, delta: 0.5 }), None));
        assert_eq!(Curve::new(&[point(1.0, 1.0, 1.0)]), Err(ChooseError::TooFew { points: 1 }));
    }

    #[test]
    fn a_choice_holds_by_the_curve_and_in_the_worst_case() {
        let whole = Service { alpha: 1_000.0, delta: 0.001 };
        let chosen = |alpha: f64, delta: f64, whole: Service| {
            let bucket = |rate: f64| Arrival { rate, burst: 1.0 + rate / 100.0, peak: None };
            choose(&curve(), &ServiceTarget { alpha, delta }, bucket, |a| whole.left_by(a))
        };
        let c = chosen(600.0, 1.0, whole).unwrap();
        assert_eq!(c.arrival, Arrival { rate: 200.0, burst: 3.0, peak: None });
        assert_eq!(c.expected, Service { alpha: 600.0, delta: 0.04 });
        assert_eq!(c.bound, Service { alpha: 800.0, delta: 4.0 / 800.0 });
        // The shared service was smaller in another run: the bound decides.
        let c = chosen(600.0, 1.0, Service { alpha: 750.0, ..whole }).unwrap();
        assert!((c.arrival.rate - 150.0).abs() < 1e-6 && c.bound.alpha >= 600.0, "{c:?}");
        let e = chosen(600.0, 1.0, Service { alpha: 650.0, ..whole });
        assert!(
            matches!(e, Err(ChooseError::BeyondBound { rate: 100.0, best }) if best.alpha == 550.0),
            "{e:?}"
        );
        assert!(matches!(chosen(900.0, 1.0, whole), Err(ChooseError::OutOfReach { .. })));
        assert_eq!(curve().largest(), 400.0);
    }

    proptest! {
        /// By the curve, the target holds at the chosen rate.
        #[test]
        fn the_choice_meets_its_target(
            values in prop::collection::vec((1.0f64..1e4, 1.0f64..1e4, 1e-4f64..1.0), 2..12),
            alpha in 1.0f64..1e4, delta in 1e-4f64..1.0,
        ) {
            let points: Vec<_> = values.iter().map(|(r, a, d)| point(*r, *a, *d)).collect();
            let curve = Curve::new(&points).unwrap();
            let target = ServiceTarget { alpha, delta };
            match curve.largest_rate(&target) {
                Ok(rate) => {
                    let s = curve.at(rate).unwrap();
                    prop_assert!(s.alpha >= alpha * (1.0 - 1e-9) && s.delta <= delta * (1.0 + 1e-9), "{s:?}");
                }
                Err(ChooseError::OutOfReach { best }) => prop_assert!(best.alpha < alpha || best.delta > delta),
                Err(e) => return Err(TestCaseError::fail(e.to_string())),
            }
        }
    }
}
