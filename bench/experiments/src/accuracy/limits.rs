//! Limits of the sharpness of any bound on a dataset.

use std::fmt::Write as _;

use super::repeat::Repeatability;

use super::networks::Networks;
use crate::claims::Claim;

/// Difference between runs of one condition, and the scores of another kind of model.
pub struct Limits {
    /// From conditions that ran more than once.
    pub repeat: Option<Repeatability>,
    /// Networks in place of the forest.
    pub networks: Networks,
}

impl Limits {
    /// Scores of the networks and factor between repeated runs for a terminal.
    pub fn text(&self) -> String {
        let net = &self.networks;
        let mut s = format!(
            "\nnetworks with the same inputs instead of the forest: typical factor {:.2}, coverage {:.2}%, upper/actual {:.2}\n",
            net.factor,
            100.0 * net.coverage,
            net.sharpness
        );
        let Some(r) = &self.repeat else {
            s.push_str("no condition ran twice: `rtvirtio-bench sweep --again N` measures how far two runs of one condition differ\n");
            return s;
        };
        let _ = writeln!(
            s,
            "{} conditions ran {} times: a bound at 99% of runs needs {:.2} times a condition's own median (median over tasks)",
            r.conditions, r.runs, r.floor
        );
        if let Some((non_idling, _)) = r.non_idling {
            let _ = writeln!(s, "  {non_idling:.2} times where BFQ does not idle");
        }
        for (name, n, typical, p90) in r.regimes.iter().filter(|r| r.1 > 0) {
            let _ = writeln!(s, "  {name:<24} {n:>5} pairs differ by {typical:.2} (median), {p90:.2} (p90)");
        }
        s
    }

    /// Sharpness that a perfect bound would have on repeated conditions, without a limit.
    pub fn claims(&self) -> Vec<Claim> {
        let Some(r) = &self.repeat else { return Vec::new() };
        let needs = "what a perfect bound at 99 % would need above the median, from conditions that ran more than once";
        let all = Claim::new("accuracy.bound.floor", needs, r.floor, "ratio", r.runs);
        let non_idling = r.non_idling.map(|(floor, runs)| {
            let needs = format!("{needs}, where BFQ does not idle");
            Claim::new("accuracy.flowing.floor", needs, floor, "ratio", runs)
        });
        [all].into_iter().chain(non_idling).collect()
    }
}
