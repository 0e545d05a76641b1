//! Claims: the project's published numbers, computed from measured runs.

use rtvirtio_measure::{RESULT_SCHEMA, Run};
use serde::{Deserialize, Serialize};

/// A measured number and its limit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Claim {
    /// Stable name, such as `cases.paper.bound.pass_rate`.
    pub id: String,
    /// Meaning of the number, in one sentence.
    pub what: String,
    /// The value of this run.
    pub value: f64,
    /// Unit of `value`; `share` for a number from 0 to 1.
    pub unit: String,
    /// Runs, tasks or repetitions behind it.
    pub n: usize,
    /// Lower limit of `value`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_least: Option<f64>,
    /// Upper limit of `value`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_most: Option<f64>,
    /// Whether the limit is met; true for a number without a limit, which is there for comparison.
    pub met: bool,
}

impl Claim {
    /// A number without a limit.
    #[must_use]
    pub fn new(id: impl Into<String>, what: impl Into<String>, value: f64, unit: &str, n: usize) -> Self {
        Self {
            id: id.into(),
            what: what.into(),
            value,
            unit: unit.to_owned(),
            n,
            at_least: None,
            at_most: None,
            met: true,
        }
    }

    /// A copy without limits.
    #[must_use]
    pub fn for_comparison(self) -> Self {
        Self { at_least: None, at_most: None, met: true, ..self }
    }

    /// Whether a limit is set; without one the number is there for comparison.
    #[must_use]
    pub fn has_limit(&self) -> bool {
        self.at_least.is_some() || self.at_most.is_some()
    }

    /// Sets a lower limit. Without measurements (`n` of 0) it is not met.
    #[must_use]
    pub fn at_least(mut self, limit: f64) -> Self {
        self.at_least = Some(limit);
        self.met &= self.n > 0 && self.value >= limit;
        self
    }

    /// Sets an upper limit.
    #[must_use]
    pub fn at_most(mut self, limit: f64) -> Self {
        self.at_most = Some(limit);
        self.met &= self.n > 0 && self.value <= limit;
        self
    }
}

/// The output of `rtvirtio-bench ... --json`.
#[derive(Clone, Debug, Serialize)]
pub struct BenchFile {
    /// Version of the form: that of result files, with claims.
    pub schema: String,
    /// Host of the measurement.
    pub host: rtvirtio_measure::HostFacts,
    /// Runs that the claims are computed from.
    pub runs: Vec<Run>,
    /// The saved data of experiments whose runs do not hold all of it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub data: Vec<serde_json::Value>,
    /// Numbers computed from `runs` and `data`.
    pub claims: Vec<Claim>,
}

impl BenchFile {
    /// Measurements with their claims.
    #[must_use]
    pub fn new(
        host: rtvirtio_measure::HostFacts,
        runs: Vec<Run>,
        data: Vec<serde_json::Value>,
        claims: Vec<Claim>,
    ) -> Self {
        Self { schema: RESULT_SCHEMA.to_owned(), host, runs, data, claims }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_decide_and_nothing_measured_meets_none() {
        let claim = |value, n| Claim::new("x", "x", value, "share", n);
        assert!(claim(0.1, 5).met);
        assert!(claim(0.95, 5).at_least(0.95).met && !claim(0.94, 5).at_least(0.95).met);
        assert!(claim(1.5, 5).at_most(1.5).met && !claim(1.6, 5).at_most(1.5).met);
        assert!(!claim(1.0, 0).at_least(0.5).met);
        assert!(!claim(f64::NAN, 5).at_least(0.5).met);
    }
}
