//! What the points show.

use rtvirtio_learn::statistic::median;
use rtvirtio_traffic::qos400::{PAPER_CLOCK_HZ, PAPER_SETTINGS, paper_settings_wrong};
use rtvirtio_traffic::{Arrival, Curve, CurvePoint, Direction, Service};

use super::measure::burst;
use super::{Beside, Point, RegulationData, VictimPoint};
use crate::claims::Claim;

/// A rate acts where it is below this share of what the flow gets without it.
const ACTS: f64 = 0.9;

/// A point that was not used to find the service's own Delta, against its bound.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Judged {
    /// As measured.
    pub point: Point,
    /// The bound: alpha of the regulator, Delta of regulator and service.
    pub bound: Service,
    /// Whether alpha and Delta are within it.
    pub within: bool,
}

/// Regulated points, in the order of flow, load and rate, each with its bound where it was held
/// out.
///
/// The service behind a regulator has an alpha and a Delta of its own: those of the flow without
/// a regulator, and of every other rate, the longest gap beyond the regulator's own. With them the
/// bound of each remaining rate is `delta + 1 / rate` ([`Service::regulated`]).
#[must_use]
pub fn outcomes(points: &[Point]) -> Vec<Judged> {
    let mut judged = Vec::new();
    for flow in Direction::ALL {
        for beside in Beside::ALL {
            let of: Vec<&Point> = points.iter().filter(|p| p.flow == flow && p.beside == beside).collect();
            let Some(free) = of.iter().find(|p| p.rate.is_none()) else { continue };
            let acting: Vec<(&Point, f64)> = of
                .iter()
                .filter_map(|p| Some((*p, p.rate? as f64)))
                .filter(|(_, rate)| *rate < ACTS * free.alpha)
                .collect();
            let own = |(point, rate): &(&Point, f64)| (point.service().delta - 1.0 / rate).max(0.0);
            let known = acting.iter().step_by(2).map(own).fold(free.service().delta, f64::max);
            let service = Service { alpha: free.alpha, delta: known };
            for (point, rate) in acting.iter().skip(1).step_by(2) {
                let regulator = Arrival { rate: *rate, burst: 1.0, peak: None };
                let bound = service.regulated(&regulator, 1.0);
                let seconds = (point.n - 1) as f64 / point.alpha;
                // A first unit that comes late and a last one that does not make alpha larger.
                let off = rate * (known / seconds);
                let alpha = (rate - off..=rate + off).contains(&point.alpha);
                let within = alpha && point.service().delta <= bound.delta;
                judged.push(Judged { point: **point, bound, within });
            }
        }
    }
    judged
}

/// Points at which the regulator acts: what is left of a rate's error.
fn rate_errors(points: &[Point]) -> Vec<f64> {
    let free = |p: &Point| {
        let same = |q: &&Point| q.flow == p.flow && q.beside == p.beside && q.rate.is_none();
        points.iter().find(same).map_or(0.0, |q| q.alpha)
    };
    let of = |p: &Point| {
        let rate = p.rate? as f64;
        (rate < ACTS * free(p)).then(|| (p.alpha / rate - 1.0).abs())
    };
    points.iter().filter_map(of).collect()
}

/// alpha and Delta next to the memory load over those without, of points of the same flow and rate.
fn ratios(points: &[Point], of: impl Fn(&Point) -> f64) -> Vec<f64> {
    let pair = |p: &Point| {
        let same = |q: &&Point| q.flow == p.flow && q.rate == p.rate && q.beside == Beside::Memory;
        let loaded = points.iter().find(same).filter(|_| p.beside == Beside::Nothing)?;
        (of(p) > 0.0).then(|| of(loaded) / of(p))
    };
    points.iter().filter_map(pair).collect()
}

/// A held-out point of the victim: what the curve expects and what network calculus bounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct JudgedVictim {
    /// As measured.
    pub point: VictimPoint,
    /// By the curve of the other points.
    pub expected: Service,
    /// In the worst case.
    pub bound: Service,
}

/// The curve of every other rate, and the service that victim and neighbour share; `None` with too
/// few points.
#[must_use]
pub fn victim_curve(victims: &[VictimPoint]) -> Option<(Curve, Service)> {
    let alone = victims.iter().find(|v| v.rate.is_none())?.victim.service();
    let used: Vec<&VictimPoint> = victims.iter().filter(|v| v.rate.is_some()).step_by(2).collect();
    let of = |v: &&VictimPoint| Some(CurvePoint { rate: v.rate? as f64, service: v.victim.service() });
    let points: Vec<CurvePoint> = used.iter().filter_map(of).collect();
    let curve = Curve::new(&points).ok()?;
    let delta = points.iter().map(|p| p.service.delta).fold(alone.delta, f64::max);
    Some((curve, Service { alpha: alone.alpha, delta }))
}

/// Every other rate of the neighbour, against the curve of the rest and the bound.
#[must_use]
pub fn judged_victims(victims: &[VictimPoint]) -> Vec<JudgedVictim> {
    let Some((curve, whole)) = victim_curve(victims) else { return Vec::new() };
    let held_out = victims.iter().filter(|v| v.rate.is_some()).skip(1).step_by(2);
    held_out
        .filter_map(|v| {
            let rate = v.rate? as f64;
            let left = whole.left_by(&Arrival { rate, burst: burst(v.rate?) as f64, peak: None })?;
            // One unit of service more passes between two completions.
            let bound = Service { alpha: left.alpha, delta: left.delta + 1.0 / whole.alpha };
            Some(JudgedVictim { point: *v, expected: curve.at(rate)?, bound })
        })
        .collect()
}

/// All claims.
#[must_use]
pub fn claims(data: &RegulationData) -> Vec<Claim> {
    let wrong = paper_settings_wrong(PAPER_CLOCK_HZ) as f64;
    let mut all = vec![
        Claim::new(
            "regulation.qos400.wrong",
            "of the I/O-domain paper's ten settings of the QoS-400, those whose words, rates or decoding differ from what it prints",
            wrong,
            "settings",
            PAPER_SETTINGS.len(),
        )
        .at_most(0.0),
    ];
    all.extend(of_points(&data.points));
    all.extend(of_victims(data));
    all
}

fn of_points(points: &[Point]) -> Vec<Claim> {
    let errors = rate_errors(points);
    let judged = outcomes(points);
    let outside = judged.iter().filter(|j| !j.within).count();
    let over: Vec<f64> = judged.iter().map(|j| j.bound.delta / j.point.service().delta).collect();
    let (alphas, deltas) = (ratios(points, |p| p.alpha), ratios(points, |p| p.service().delta));
    let units = points.iter().filter(|p| p.rate.is_some()).map(|p| p.n).max().unwrap_or(0);
    vec![
        Claim::new(
            "regulation.rate_error",
            format!("largest distance of alpha from the rate of its regulator, in any direction, with and without the memory load; up to {units} units each"),
            errors.iter().copied().fold(0.0, f64::max),
            "share",
            errors.len(),
        )
        .at_most(0.01),
        Claim::new(
            "regulation.rate_error.median",
            "the same, median",
            median(errors.clone()),
            "share",
            errors.len(),
        ),
        Claim::new(
            "regulation.outside_bound",
            "share of held-out points whose alpha or Delta, less the host's own stalls, is outside the bound of network calculus",
            outside as f64 / judged.len().max(1) as f64,
            "share",
            judged.len(),
        )
        .at_most(0.05),
        Claim::new(
            "regulation.bound_over_measured",
            "bound of Delta over Delta as measured less the host's own stalls, median of held-out points",
            median(over.clone()),
            "times",
            over.len(),
        )
        .at_most(1.5),
        Claim::new(
            "regulation.memory.alpha",
            "alpha next to a memory-bound load on every CPU over that without, smallest of all rates and directions",
            alphas.iter().copied().fold(f64::INFINITY, f64::min).min(1e9),
            "times",
            alphas.len(),
        ),
        Claim::new(
            "regulation.memory.delta",
            "Delta next to the memory load over that without, median of all rates and directions",
            median(deltas.clone()),
            "times",
            deltas.len(),
        ),
    ]
}

fn of_victims(data: &RegulationData) -> Vec<Claim> {
    let judged = judged_victims(&data.victims);
    let holds = |j: &&JudgedVictim| {
        let s = j.point.victim.service();
        s.alpha >= j.bound.alpha && s.delta <= j.bound.delta
    };
    let n = judged.len();
    let share = judged.iter().filter(holds).count() as f64 / n.max(1) as f64;
    let over = |of: &dyn Fn(&JudgedVictim) -> f64| median(judged.iter().map(of).collect());
    let mut all = vec![
        Claim::new(
            "regulation.victim.bound_holds",
            "share of held-out rates of a neighbour at which a victim's alpha and Delta are within the bound of network calculus",
            share,
            "share",
            n,
        )
        .at_least(0.95),
        Claim::new(
            "regulation.victim.alpha_over_bound",
            "the victim's alpha over its bound, median of held-out rates",
            over(&|j| j.point.victim.alpha / j.bound.alpha),
            "times",
            n,
        )
        .at_most(1.5),
        Claim::new(
            "regulation.victim.bound_over_measured",
            "bound of the victim's Delta over Delta as measured, median of held-out rates",
            over(&|j| j.bound.delta / j.point.victim.service().delta),
            "times",
            n,
        )
        .at_most(1.5),
        Claim::new(
            "regulation.victim.curve_error",
            "distance of the victim's alpha from what the curve of the other rates expects, median of held-out rates",
            over(&|j| (j.point.victim.alpha / j.expected.alpha - 1.0).abs()),
            "share",
            n,
        ),
    ];
    if !data.choices.is_empty() {
        let held = data.choices.iter().filter(|c| c.is_held()).count();
        all.push(
            Claim::new(
                "regulation.choice.held",
                "share of targets of a victim that hold when its neighbour has the rate that was chosen for them, measured again",
                held as f64 / data.choices.len() as f64,
                "share",
                data.choices.len(),
            )
            .at_least(0.95),
        );
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(rate: Option<u64>, alpha: f64, delta_us: u64) -> Point {
        Point {
            flow: Direction::Read,
            beside: Beside::Nothing,
            rate,
            n: 1_001,
            alpha,
            delta_ns: delta_us * 1_000,
            awake_ns: None,
            median_ns: 1_000,
            memory: None,
        }
    }

    #[test]
    fn every_other_rate_is_judged_by_the_rest() {
        let points = [
            point(None, 10_000.0, 500),
            // Not below what the flow gets anyway.
            point(Some(16_384), 10_000.0, 500),
            point(Some(4_000), 4_000.0, 1_250),
            point(Some(2_000), 2_000.0, 1_400),
            point(Some(1_000), 1_000.0, 1_500),
            point(Some(500), 500.0, 3_100),
        ];
        let judged = outcomes(&points);
        assert_eq!(judged.len(), 2);
        // The service's own gap is 1.25 ms less a quarter: 1 ms.
        assert!((judged[0].bound.delta - 1.5e-3).abs() < 1e-9 && judged[0].within, "{judged:?}");
        assert!((judged[1].bound.delta - 3e-3).abs() < 1e-9 && !judged[1].within, "{judged:?}");
        assert!(rate_errors(&points).iter().all(|e| *e < 1e-9));
        let fast = [points[0], points[2], point(Some(2_000), 2_050.0, 1_400)];
        assert!(!outcomes(&fast)[0].within, "alpha beyond the rate");
        assert!(outcomes(&points[1..]).is_empty(), "without the unregulated flow nothing is known");
    }

    #[test]
    fn a_victim_is_judged_by_what_is_left() {
        let victim = |rate: Option<u64>, alpha, us| VictimPoint {
            rate,
            victim: point(rate, alpha, us),
            neighbour: rate.unwrap_or(0) as f64,
        };
        let all = [
            victim(None, 1_000.0, 2_000),
            victim(Some(800), 220.0, 9_000),
            victim(Some(400), 610.0, 4_000),
            victim(Some(200), 805.0, 3_000),
        ];
        let judged = judged_victims(&all);
        assert_eq!(judged.len(), 1);
        assert!((judged[0].bound.alpha - 600.0).abs() < 1e-9);
        // (1000 * 9 ms + a burst of 5) / 600 and a millisecond.
        assert!((judged[0].bound.delta - (14.0 / 600.0 + 1e-3)).abs() < 1e-9, "{judged:?}");
        assert!((judged[0].expected.alpha - (805.0 - 585.0 / 3.0)).abs() < 1e-9, "{judged:?}");
    }

    #[test]
    fn without_points_only_the_words_are_claimed_to_hold() {
        let data = RegulationData::for_tests(Vec::new(), Vec::new());
        let claims = claims(&data);
        let met: Vec<&str> =
            claims.iter().filter(|c| c.at_most.or(c.at_least).is_some() && c.met).map(|c| &*c.id).collect();
        assert_eq!(met, ["regulation.qos400.wrong"]);
    }
}
