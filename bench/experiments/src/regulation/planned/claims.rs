//! Claims of the runs.

use rtvirtio_learn::statistic::median;

use super::{HeldBy, PlannedData, PlannedLimit, PlannedPoint};
use crate::claims::Claim;

/// Shares of kept targets, and bounds over measured latencies.
#[must_use]
pub fn claims(data: &PlannedData) -> Vec<Claim> {
    let limited: Vec<(&PlannedPoint, PlannedLimit)> =
        data.points.iter().filter_map(|p| Some((p, p.limit?))).collect();
    let share = |within: &dyn Fn(&(&PlannedPoint, PlannedLimit)) -> bool| {
        limited.iter().filter(|one| within(one)).count() as f64 / limited.len().max(1) as f64
    };
    let over = |held_by: &dyn Fn(HeldBy) -> bool| -> Vec<f64> {
        let of = limited.iter().filter(|(p, _)| held_by(p.held_by));
        of.map(|(p, limit)| limit.bound.0 as f64 / p.victim.awake.unwrap_or(p.victim.longest).0.max(1) as f64)
            .collect()
    };
    let every = over(&|_| true);
    // Each target is checked against the run of its round without a limit.
    let without = |(p, limit): &(&PlannedPoint, PlannedLimit)| {
        let same = |q: &&PlannedPoint| {
            q.limit.is_none() && (q.held_by, q.block, q.round) == (p.held_by, p.block, p.round)
        };
        data.points.iter().find(same).map(|q| q.victim.is_within(limit.target))
    };
    let unlimited: Vec<bool> = limited.iter().filter_map(without).collect();
    let mut all = vec![
        Claim::new(
            "regulation.plan.held",
            "share of runs in which every request of a victim is within its target, and its rate is kept, next to a neighbour with the limit that `plan --traffic` chose; less the host's own stalls",
            share(&|(p, limit)| p.victim.is_within(limit.target)),
            "share",
            limited.len(),
        )
        .at_least(0.95),
        Claim::new(
            "regulation.plan.held_without",
            "the same targets next to the same neighbour without a limit",
            unlimited.iter().filter(|held| **held).count() as f64 / unlimited.len().max(1) as f64,
            "share",
            unlimited.len(),
        ),
        Claim::new(
            "regulation.plan.bound_holds",
            "share of these runs in which no request took longer than the bound",
            share(&|(p, limit)| p.victim.is_within(limit.bound)),
            "share",
            limited.len(),
        )
        .at_least(0.95),
        Claim::new(
            "regulation.plan.bound_over_measured",
            "bound over the victim's longest request, median of these runs",
            median(every.clone()),
            "times",
            every.len(),
        )
        .at_most(1.5),
    ];
    for held_by in HeldBy::ALL {
        let of = over(&|other| other == held_by);
        let id = match held_by {
            HeldBy::Domain => "domain",
            HeldBy::Kernel => "kernel",
        };
        let what = format!("the same, of limits held by the {}", held_by.name());
        let id = format!("regulation.plan.bound_over_measured.{id}");
        all.push(Claim::new(id, what, median(of.clone()), "times", of.len()));
    }
    all.push(Claim::new(
        "regulation.plan.refused",
        "targets of a victim for which `plan --traffic` finds no limit",
        data.refused.len() as f64,
        "targets",
        data.refused.len() + targets(&limited),
    ));
    all
}

fn targets(limited: &[(&PlannedPoint, PlannedLimit)]) -> usize {
    let first = limited.iter().map(|(p, _)| p.round).min();
    limited.iter().filter(|(p, _)| Some(p.round) == first).count()
}

#[cfg(test)]
mod tests {
    use rtvirtio_measure::HostFacts;
    use rtvirtio_units::{Bytes, Nanos};

    use super::super::VictimSeen;
    use super::*;
    use crate::saved::Saved as _;

    fn point(round: u32, target_ms: Option<u64>, longest_ms: u64) -> PlannedPoint {
        let limit = target_ms.map(|ms| PlannedLimit {
            target: Nanos::from_millis(ms),
            bound: Nanos::from_millis(ms - 2),
            rate: 5,
            burst: 2,
            peak: None,
        });
        let longest = Nanos::from_millis(longest_ms);
        let victim = VictimSeen { n: 1_000, rate: 200.0, longest, awake: Some(longest) };
        PlannedPoint {
            held_by: HeldBy::Domain,
            block: Bytes::from_kib(4),
            limit,
            round,
            victim,
            neighbour: 5.0,
        }
    }

    fn value(points: Vec<PlannedPoint>, id: &str) -> (f64, usize, bool) {
        let data = PlannedData {
            schema: PlannedData::SCHEMA.to_owned(),
            host: HostFacts { cpus: 1, ..HostFacts::default() },
            command: String::new(),
            generated: String::new(),
            seconds: 1.0,
            stall: Nanos::from_millis(1),
            points,
            refused: Vec::new(),
        };
        let all = claims(&data);
        let one = all.iter().find(|c| c.id == id).unwrap_or_else(|| panic!("{id}"));
        (one.value, one.n, one.met)
    }

    #[test]
    fn a_late_request_is_counted_against_target_and_bound() {
        let points =
            || vec![point(0, None, 30), point(0, Some(20), 19), point(1, None, 15), point(1, Some(20), 9)];
        assert_eq!(value(points(), "regulation.plan.held"), (1.0, 2, true));
        assert_eq!(value(points(), "regulation.plan.bound_holds"), (0.5, 2, false));
        let (over, n, met) = value(points(), "regulation.plan.bound_over_measured");
        assert!((over - f64::midpoint(18.0 / 19.0, 2.0)).abs() < 1e-12 && n == 2 && met, "{over}");
        // Without a limit the target is missed in the first round, and held in the second.
        assert_eq!(value(points(), "regulation.plan.held_without"), (0.5, 2, true));
        assert_eq!(value(points(), "regulation.plan.refused"), (0.0, 1, true));
        assert_eq!(value(Vec::new(), "regulation.plan.held"), (0.0, 0, false), "nothing holds nothing");
    }
}
