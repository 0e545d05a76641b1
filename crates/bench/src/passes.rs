//! Pass rates: which scheme meets all targets of which case, how often.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::cases::{Case, Tier};
use crate::claims::Claim;
use crate::dataset::Point;

/// Share of the declared rate that must be kept.
const RATE_KEPT: f64 = 0.99;

/// Schemes of ours, for the comparison with the others.
pub const OURS: [&str; 3] = ["slice", "bound", "tuned"];

/// What the RT-VirtIO paper reports for its 24 cases (its section VII-B), as shares.
pub const PUBLISHED: [(&str, f64); 5] = [
    ("default-bfq", 0.4042),
    ("ionice", 0.4896),
    ("rt-xen", 0.3854),
    ("rt-virtio-analytical", 0.6903),
    ("rt-virtio-mlp", 0.6944),
];

/// Name of a point of a case: the schemes that share a run stand in [`Point::scheme`], separated by commas.
#[must_use]
pub fn point_id(case: &str, repetition: usize, schemes: &str) -> String {
    format!("{case}/{repetition}/{schemes}")
}

/// The case of a point's name.
#[must_use]
pub fn case_of(id: &str) -> &str {
    id.split('/').next().unwrap_or(id)
}

/// Whether all targets of a run were met and all declared rates kept.
#[must_use]
pub fn passed(point: &Point) -> bool {
    worst(point) <= 1.0
}

/// The largest of measured over target; at least the lost rate's share above 1 when a rate was not kept.
#[must_use]
pub fn worst(point: &Point) -> f64 {
    let mut worst = 0.0f64;
    for (_, stream, outcome) in point.tasks() {
        let Some(target) = stream.target else { continue };
        worst = worst.max(outcome.p9999.0 as f64 / target.0 as f64);
        if let Some(rate) = stream.rate {
            let kept = outcome.rate.0 / rate.0;
            if kept < RATE_KEPT {
                worst = worst.max(2.0 - kept);
            }
        }
    }
    worst
}

/// One scheme in one case.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Cell {
    /// Runs.
    pub n: usize,
    /// Runs that passed.
    pub passed: usize,
    /// [`worst`] of each run.
    pub worst: Vec<f64>,
}

/// One tier.
#[derive(Clone, Debug, Serialize)]
pub struct Table {
    /// Tier.
    pub tier: Tier,
    /// Cases in order.
    pub cases: Vec<String>,
    /// Schemes in order of appearance in [`order`].
    pub schemes: Vec<String>,
    /// By case, then scheme.
    pub cells: Vec<Vec<Cell>>,
}

impl Table {
    /// From measured points, for the given cases.
    #[must_use]
    pub fn new(tier: Tier, cases: &[Case], points: &[Point]) -> Self {
        let mut by: BTreeMap<(&str, &str), Cell> = BTreeMap::new();
        let mut names = BTreeSet::new();
        for p in points {
            for scheme in p.scheme.split(',') {
                let cell = by.entry((case_of(&p.id), scheme)).or_default();
                cell.n += 1;
                cell.passed += usize::from(passed(p));
                cell.worst.push(worst(p));
                names.insert(scheme);
            }
        }
        let mut schemes: Vec<String> = names.into_iter().map(str::to_owned).collect();
        schemes.sort_by_key(|s| order(s));
        let cases: Vec<String> = cases.iter().map(|c| c.name.clone()).collect();
        let cell = |c: &String, s: &String| by.get(&(c.as_str(), s.as_str())).cloned().unwrap_or_default();
        let cells = cases.iter().map(|c| schemes.iter().map(|s| cell(c, s)).collect()).collect();
        Self { tier, cases, schemes, cells }
    }

    /// Mean over the measured cases of the share of runs that passed, with the number of cases and of runs.
    #[must_use]
    pub fn pass_rate(&self, scheme: &str) -> (f64, usize, usize) {
        let Some(at) = self.schemes.iter().position(|s| s == scheme) else { return (0.0, 0, 0) };
        let measured: Vec<&Cell> = self.cells.iter().map(|row| &row[at]).filter(|c| c.n > 0).collect();
        let sum: f64 = measured.iter().map(|c| c.passed as f64 / c.n as f64).sum();
        (sum / measured.len().max(1) as f64, measured.len(), measured.iter().map(|c| c.n).sum())
    }

    /// Cases that some scheme passed in at least half of its runs, and those of them that ours did too.
    #[must_use]
    pub fn possible(&self) -> (Vec<String>, Vec<String>) {
        let often = |c: &Cell| c.n > 0 && 2 * c.passed >= c.n;
        let (mut any, mut ours) = (Vec::new(), Vec::new());
        for (case, row) in self.cases.iter().zip(&self.cells) {
            if row.iter().any(often) {
                any.push(case.clone());
                let ok = row.iter().zip(&self.schemes).any(|(c, s)| OURS.contains(&s.as_str()) && often(c));
                if ok {
                    ours.push(case.clone());
                }
            }
        }
        (any, ours)
    }

    /// What the tier shows.
    #[must_use]
    pub fn claims(&self) -> Vec<Claim> {
        let tier = self.tier.name();
        let mut out = Vec::new();
        for scheme in &self.schemes {
            let (rate, cases, n) = self.pass_rate(scheme);
            let what =
                format!("share of runs of the {tier} tier in which {scheme} met every target, {cases} cases");
            let claim = Claim::new(format!("cases.{tier}.{scheme}.pass_rate"), what, rate, "share", n);
            out.push(match (self.tier, scheme.as_str()) {
                (Tier::Paper, "bound" | "tuned") => claim.at_least(0.95),
                (Tier::Tight, "bound" | "tuned") => claim.at_least(0.9),
                (Tier::Strict, "bound" | "tuned") => claim.at_least(0.7),
                _ => claim,
            });
        }
        let (any, ours) = self.possible();
        let share = if any.is_empty() { 0.0 } else { ours.len() as f64 / any.len() as f64 };
        let what = format!("share of the {tier} cases that any scheme passes which one of ours passes too");
        let claim = Claim::new(format!("cases.{tier}.ours_of_possible"), what, share, "share", any.len());
        out.push(if self.tier == Tier::Paper { claim.at_least(1.0) } else { claim });
        out
    }
}

/// Place of a scheme in tables: the paper's order, then ours.
#[must_use]
pub fn order(scheme: &str) -> usize {
    PUBLISHED.iter().map(|(s, _)| *s).chain(OURS).position(|s| s == scheme).unwrap_or(usize::MAX)
}
