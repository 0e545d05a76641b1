//! Claims of the points.

use rtvirtio_learn::statistic::median;
use rtvirtio_traffic::qos400::{PAPER_CLOCK_HZ, PAPER_SETTINGS, paper_settings_wrong};
use rtvirtio_traffic::{Arrival, Direction, Service};

use super::model::{JudgedVictim, judged_victims};
use super::{Beside, Point, RegulationData};
use crate::claims::Claim;

/// Largest share of the unregulated rate at which a regulator counts as acting.
const ACTS: f64 = 0.9;

/// A point that was not used to find the service's own Delta, with its bound.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Judged {
    /// Point as measured.
    pub point: Point,
    /// The bound: alpha of the regulator, Delta of regulator and service.
    pub bound: Service,
    /// Whether alpha and Delta are within it.
    pub within: bool,
}

/// Regulated points in the order of flow and load, from the lowest rate up, each with its bound
/// where it was held out.
///
/// The service behind a regulator has a Delta of its own: its lateness beyond the regulator's `1 /
/// rate`. The longest of the training points bounds it, and with it the bound of a rate is `delta +
/// 1 / rate` ([`Service::regulated`]). Training is every other rate from the lowest up, which was
/// measured longest: a late wake-up is the more likely the longer the measurement. Disks are one
/// pool and networks another, each over all directions and loads, for the largest of n is exceeded
/// by one more of their kind with a probability of `1 / (n + 1)` (the conformal quantile, see
/// `rtvirtio_stats::conformal`): one in 21 with twenty, and one in six with those of a single
/// direction and load. The flow without a regulator is not in it: its queue is served without a
/// wake-up.
#[must_use]
pub fn outcomes(points: &[Point]) -> Vec<Judged> {
    let late = |p: &Point, rate: f64| (p.service().delta - 1.0 / rate).max(0.0);
    let mut pools = [0.0f64; 2];
    let mut held_out = Vec::new();
    for flow in Direction::ALL {
        for beside in Beside::ALL {
            let of: Vec<&Point> = points.iter().filter(|p| p.flow == flow && p.beside == beside).collect();
            let Some(free) = of.iter().find(|p| p.rate.is_none()) else { continue };
            let mut acting: Vec<(&Point, f64)> = of
                .iter()
                .filter_map(|p| Some((*p, p.rate? as f64)))
                .filter(|(_, rate)| *rate < ACTS * free.alpha)
                .collect();
            acting.sort_by(|a, b| a.1.total_cmp(&b.1));
            let pool = &mut pools[usize::from(flow.is_disk())];
            // Without known stalls of the host, the service's own Delta is unknown.
            let training = acting.iter().step_by(2).filter(|(p, _)| p.awake_ns.is_some());
            *pool = training.map(|(p, rate)| late(p, *rate)).fold(*pool, f64::max);
            held_out.extend(acting.into_iter().skip(1).step_by(2).map(|(p, rate)| (p, rate, free.alpha)));
        }
    }
    let judge = |(point, rate, alpha): (&Point, f64, f64)| {
        let service = Service { alpha, delta: pools[usize::from(point.flow.is_disk())] };
        let bound = service.regulated(&Arrival { rate, burst: 1.0, peak: None }, 1.0);
        let seconds = (point.n - 1) as f64 / point.alpha;
        // A late first unit and a punctual last one do not make alpha larger.
        let off = rate * (service.delta / seconds);
        let is_alpha_within = (rate - off..=rate + off).contains(&point.alpha);
        Judged { point: *point, bound, within: is_alpha_within && point.service().delta <= bound.delta }
    };
    held_out.into_iter().map(judge).collect()
}

/// Relative error of the rate at points at which the regulator acts.
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

/// Ratio of a value next to a load to that without, over points of the same flow and rate.
fn ratios(points: &[Point], load: Beside, of: impl Fn(&Point) -> f64) -> Vec<f64> {
    let pair = |p: &Point| {
        let same = |q: &&Point| q.flow == p.flow && q.rate == p.rate && q.beside == load;
        let loaded = points.iter().find(same).filter(|_| p.beside == Beside::Nothing)?;
        (of(p) > 0.0).then(|| of(loaded) / of(p))
    };
    points.iter().filter_map(pair).collect()
}

/// Claims of settings, points and victims.
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
    all.extend(data.spoiled.map(|spoiled| {
        Claim::new(
            "regulation.spoiled",
            "measurements made anew, because a CPU of the host stood still for more than a twentieth of their time",
            spoiled as f64,
            "runs",
            data.points.len() + data.victims.len() + data.choices.len(),
        )
    }));
    all.extend(of_victims(data));
    all.extend(of_choices(data));
    all
}

fn of_points(points: &[Point]) -> Vec<Claim> {
    let errors = rate_errors(points);
    let judged = outcomes(points);
    let outside = judged.iter().filter(|j| !j.within).count();
    let bounds = |wanted: &dyn Fn(Direction) -> bool| -> Vec<f64> {
        let of = judged.iter().filter(|j| wanted(j.point.flow));
        of.map(|j| j.bound.delta / j.point.service().delta).collect()
    };
    let (every, disks, networks) =
        (bounds(&|_| true), bounds(&|flow| flow.is_disk()), bounds(&|flow| !flow.is_disk()));
    let units = || points.iter().filter(|p| p.rate.is_some()).map(|p| p.n);
    let (fewest, most) = (units().min().unwrap_or(0), units().max().unwrap_or(0));
    let mut all = vec![
        Claim::new(
            "regulation.rate_error",
            format!("largest distance of alpha from the rate of its regulator, in any direction, with and without each load that was measured; {fewest} to {most} units each"),
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
            median(every.clone()),
            "times",
            every.len(),
        )
        .at_most(1.5),
        Claim::new(
            "regulation.bound_over_measured.disks",
            "the same, of disks only",
            median(disks.clone()),
            "times",
            disks.len(),
        ),
        Claim::new(
            "regulation.bound_over_measured.networks",
            "the same, of networks only",
            median(networks.clone()),
            "times",
            networks.len(),
        ),
    ];
    for (id, load, what) in [
        ("memory", Beside::Memory, "a memory-bound load on every CPU"),
        ("device", Beside::Device, "a memory-bound load on every CPU and a second device's traffic"),
        ("held", Beside::Held, "a memory-bound load on every CPU with a CPU budget"),
    ] {
        // The memory load is of every run, the others are options.
        if load == Beside::Memory || points.iter().any(|p| p.beside == load) {
            all.extend(next_to(points, id, load, what));
        }
    }
    all
}

/// Ratios of alpha and Delta next to a load to those without.
fn next_to(points: &[Point], id: &str, load: Beside, what: &str) -> [Claim; 2] {
    let (alphas, deltas) = (ratios(points, load, |p| p.alpha), ratios(points, load, |p| p.service().delta));
    [
        Claim::new(
            format!("regulation.{id}.alpha"),
            format!("alpha next to {what} over that without, smallest of all rates and directions"),
            alphas.iter().copied().fold(f64::INFINITY, f64::min).min(1e9),
            "times",
            alphas.len(),
        ),
        Claim::new(
            format!("regulation.{id}.delta"),
            "Delta next to the same load over that without, median of all rates and directions",
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
    vec![
        Claim::new(
            "regulation.victim.bound_holds",
            "share of runs at held-out rates of a neighbour in which a victim's alpha and Delta are within the bound of network calculus",
            share,
            "share",
            n,
        )
        .at_least(0.95),
        Claim::new(
            "regulation.victim.alpha_over_bound",
            "the victim's alpha over its bound, median of runs at held-out rates",
            over(&|j| j.point.victim.alpha / j.bound.alpha),
            "times",
            n,
        )
        .at_most(1.5),
        Claim::new(
            "regulation.victim.bound_over_measured",
            "bound of the victim's Delta over Delta as measured, median of runs at held-out rates",
            over(&|j| j.bound.delta / j.point.victim.service().delta),
            "times",
            n,
        )
        .at_most(1.5),
        Claim::new(
            "regulation.victim.curve_error",
            "distance of the victim's alpha from what the curve of the other rates expects, median of runs at held-out rates",
            over(&|j| (j.point.victim.alpha / j.expected.alpha - 1.0).abs()),
            "share",
            n,
        ),
    ]
}

fn of_choices(data: &RegulationData) -> Vec<Claim> {
    let mut all = Vec::new();
    if !data.choices.is_empty() {
        let held = data.choices.iter().filter(|c| c.is_held()).count();
        all.push(
            Claim::new(
                "regulation.choice.held",
                "share of runs in which a victim's target holds when its neighbour has the rate that was chosen for it, measured again",
                held as f64 / data.choices.len() as f64,
                "share",
                data.choices.len(),
            )
            .at_least(0.95),
        );
    }
    if let Some(refused) = &data.refused {
        let mut chosen: Vec<f64> = data.choices.iter().map(|c| c.target.alpha).collect();
        chosen.sort_by(f64::total_cmp);
        chosen.dedup();
        all.push(Claim::new(
            "regulation.choice.refused",
            "targets of a victim for which no rate of its neighbour can be chosen: by the curve or by the bound it would be missed at every one",
            refused.len() as f64,
            "targets",
            refused.len() + chosen.len(),
        ));
    }
    all
}

#[cfg(test)]
mod tests {
    use rtvirtio_traffic::ServiceTarget;

    use super::super::{ChosenRate, RefusedTarget, VictimPoint};
    use super::*;

    fn point(rate: Option<u64>, alpha: f64, delta_us: u64) -> Point {
        Point {
            flow: Direction::Read,
            beside: Beside::Nothing,
            rate,
            n: 1_001,
            alpha,
            delta_ns: delta_us * 1_000,
            awake_ns: Some(delta_us * 1_000),
            median_ns: 1_000,
            memory: None,
        }
    }

    #[test]
    fn every_other_rate_is_judged_by_what_all_of_its_kind_were_late() {
        let points = [
            // A Delta longer than any below: another regime.
            point(None, 10_000.0, 9_000),
            // A rate not below that of the unregulated flow.
            point(Some(16_384), 10_000.0, 500),
            point(Some(4_000), 4_000.0, 1_340),
            point(Some(2_000), 2_000.0, 1_400),
            point(Some(1_000), 1_000.0, 2_300),
            point(Some(500), 500.0, 3_100),
        ];
        let judged = outcomes(&points);
        assert_eq!(judged.len(), 2);
        // At 500 per second it is 3.1 ms less two: 1.1 ms late.
        assert!((judged[0].bound.delta - 2.1e-3).abs() < 1e-9 && !judged[0].within, "{judged:?}");
        assert!((judged[1].bound.delta - 1.35e-3).abs() < 1e-9 && judged[1].within, "{judged:?}");
        // Writes of the same disk are of its kind, frames are not.
        let of = |flow: Direction| {
            let more = [point(None, 10_000.0, 9_000), point(Some(500), 500.0, 3_400)];
            outcomes(&[&points[..], &more.map(|p| Point { flow, ..p })].concat())
        };
        assert!(of(Direction::Write)[0].within && !of(Direction::Tx)[0].within);
        assert!(rate_errors(&points).iter().all(|e| *e < 1e-9));
        let fast = [points[0], point(Some(2_000), 2_050.0, 1_400), points[5]];
        assert!(!outcomes(&fast)[0].within, "alpha beyond the rate");
        assert!(outcomes(&points[1..]).is_empty(), "without the unregulated flow nothing is known");
    }

    #[test]
    fn a_refused_target_is_counted_and_not_dropped() {
        let mut data = RegulationData::for_tests(Vec::new(), Vec::new());
        assert!(of_choices(&data).is_empty());
        let target = ServiceTarget { alpha: 1.0, delta: 1.0 };
        data.refused = Some(vec![RefusedTarget { target, why: "ask for less".to_owned() }]);
        let claims = of_choices(&data);
        assert_eq!((claims.len(), claims[0].value, claims[0].n), (1, 1.0, 1));
        let got =
            |alpha| VictimPoint { rate: Some(5), victim: point(Some(5), alpha, 1), neighbour: 5.0, round: 0 };
        let choice = |alpha| ChosenRate { target, chosen: 5.0, burst: Some(2.0), measured: got(alpha) };
        data.choices = vec![choice(2.0), choice(0.5)];
        data.refused = Some(Vec::new());
        let claims = of_choices(&data);
        assert_eq!((claims[0].value, claims[0].n, claims[1].value, claims[1].n), (0.5, 2, 0.0, 1));
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
