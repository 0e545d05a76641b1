//! Rates of the VMs without a target: the price of meeting the others' targets.

use rtvirtio_planner::scheme_name;
use serde::Serialize;

use crate::cases::passes::case_of;
use crate::cases::schemes::{DefaultBfq, Scheme};
use crate::cases::{Case, Tier};
use crate::claims::Claim;
use rtvirtio_learn::dataset::Point;
use rtvirtio_learn::design::Neighbour;
use rtvirtio_learn::statistic::median;

/// The rates of one kind of neighbour.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NeighbourRates {
    /// Name of the kind ([`Neighbour::name`]).
    pub neighbour: &'static str,
    /// Measured cases with such a neighbour.
    pub cases: usize,
    /// By scheme, requests per second, median over its cases; `None` for a scheme that ran none of
    /// them.
    pub rates: Vec<Option<f64>>,
}

impl NeighbourRates {
    /// The rates for tables.
    pub fn cells(&self) -> impl Iterator<Item = String> {
        self.rates.iter().map(|rate| rate.map_or("-".to_owned(), |rate| format!("{rate:.0}")))
    }
}

/// The rates of each kind of neighbour under each scheme, without kinds that no measured case has.
#[must_use]
pub fn neighbour_rates(cases: &[Case], schemes: &[String], points: &[Point]) -> Vec<NeighbourRates> {
    let kinds = [Neighbour::Flood, Neighbour::Burst, Neighbour::Writer];
    let of = |kind: Neighbour| {
        let cases: Vec<&Case> = cases.iter().filter(|c| c.neighbour == Some(kind)).collect();
        let by_case = |scheme: &String| -> Vec<f64> {
            cases.iter().filter_map(|case| rate(case, scheme, points)).collect()
        };
        let all: Vec<Vec<f64>> = schemes.iter().map(by_case).collect();
        NeighbourRates {
            neighbour: kind.name(),
            cases: all.iter().map(Vec::len).max().unwrap_or(0),
            rates: all.into_iter().map(|rates| (!rates.is_empty()).then(|| median(rates))).collect(),
        }
    };
    kinds.into_iter().map(of).filter(|rates| rates.cases > 0).collect()
}

/// Per scheme the neighbours' rates as a share of those under the kernel's defaults, which limit no
/// VM.
#[must_use]
pub fn claims(tier: Tier, cases: &[Case], schemes: &[String], points: &[Point]) -> Vec<Claim> {
    let unlimited = DefaultBfq.name();
    let claim = |scheme: &String| {
        let share = |case: &Case| Some(rate(case, scheme, points)? / rate(case, unlimited, points)?);
        let shares: Vec<f64> = cases
            .iter()
            .filter(|c| c.neighbour.is_some())
            .filter_map(share)
            .filter(|s| s.is_finite())
            .collect();
        let (tier, n) = (tier.name(), shares.len());
        let what = format!(
            "rate of the VM without a target under {}, as a share of its rate under {}, median over {n} cases of the {tier} tier",
            scheme_name(scheme),
            scheme_name(unlimited)
        );
        let id = format!("cases.{tier}.{scheme}.neighbour");
        (n > 0).then(|| Claim::new(id, what, median(shares), "share", n))
    };
    schemes.iter().filter(|s| *s != unlimited).filter_map(claim).collect()
}

/// Requests per second of the tasks without a rate, in a case that has some, under a scheme, median
/// over its runs; `None` without runs.
fn rate(case: &Case, scheme: &str, points: &[Point]) -> Option<f64> {
    let runs = points.iter().filter(|p| p.is_of(scheme) && case_of(&p.id) == case.name);
    let unpaced = |p: &Point| p.tasks().filter(|(_, s, _)| s.rate.is_none()).map(|(_, _, r)| r.rate.0).sum();
    let rates: Vec<f64> = runs.map(unpaced).collect();
    (!rates.is_empty()).then(|| median(rates))
}

#[cfg(test)]
mod tests {
    use rtvirtio_units::Iops;

    use super::*;
    use crate::cases::passes::tests::run;
    use crate::cases::{CaseOptions, cases};

    #[test]
    fn what_neighbours_got_is_told_by_kind_and_beside_the_defaults() {
        let options = CaseOptions { writes: 0.0, third_of: None };
        let of_tier = cases(Tier::Strict, &options);
        let case = of_tier.iter().find(|c| c.name == "1vm-L-strict-flood").unwrap();
        let with = |scheme: &str, repetition: usize, rate: f64| {
            let mut p = run(scheme, repetition, 2, 100.0, 0);
            p.id = crate::cases::passes::point_id(&case.name, repetition, scheme);
            p.vms.clone_from(&case.vms);
            let neighbour = rtvirtio_learn::dataset::Outcome { rate: Iops(rate), ..p.results[0].clone() };
            p.results.push(neighbour);
            p
        };
        let points = [
            with("default-bfq", 0, 5_000.0),
            with("slice,bound", 0, 200.0),
            with("slice,bound", 1, 300.0),
            with("trial", 1, 9.0),
        ];
        let schemes = ["default-bfq", "slice", "tuned"].map(str::to_owned);
        let rates = neighbour_rates(&of_tier, &schemes, &points);
        assert_eq!(
            rates,
            [NeighbourRates { neighbour: "flood", cases: 1, rates: vec![Some(5_000.0), Some(250.0), None] }]
        );
        let claims = claims(Tier::Strict, &of_tier, &schemes, &points);
        assert_eq!(
            claims.len(),
            1,
            "schemes that did not run make no claim, and the defaults are the reference"
        );
        assert_eq!((claims[0].id.as_str(), claims[0].value), ("cases.strict.slice.neighbour", 0.05));
        // Cases without neighbours make no claim.
        assert!(neighbour_rates(&cases(Tier::Tight, &options), &schemes, &points).is_empty());
    }
}
