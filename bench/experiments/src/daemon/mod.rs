//! The service that keeps contracts: its reaction times, its cost, the state that `kill -9` leaves,
//! and whether it comes to rest.

pub mod day;
mod measure;
pub mod month;
pub mod observe;
pub mod pattern;
pub mod plans;
pub mod scale;

use crate::experiment::Experiment;

use rtvirtio_measure::HostFacts;
use serde::{Deserialize, Serialize};

pub use measure::{DaemonOptions, IDLE_VMS, measure, measure_observation};

use crate::claims::Claim;
use crate::page::{Section, Table};
use crate::report::ExperimentReport;
use crate::stats::rank::nearest_rank;
use month::Month;
use plans::PlanMonth;

/// State left by `kill -9`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kills {
    /// Times that the service was killed.
    pub n: usize,
    /// Kills while the contract was not in force: a step was under way, or about to be.
    pub unsettled: usize,
    /// Comparisons with the state from before.
    pub compared: usize,
    /// Settings, groups and journals that differed from the state before.
    pub differences: Vec<String>,
}

/// Measurements and their conditions, as saved in [`FILE`](crate::experiment::Experiment::FILE).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DaemonData {
    /// [`FORM`](crate::experiment::Experiment::FORM), checked on reading.
    pub schema: String,
    /// Host of the measurement.
    pub host: HostFacts,
    /// Command line of the measurement.
    pub command: String,
    /// Date of the measurement, and version of the program.
    pub generated: String,
    /// From a new thread to its priority, ms.
    pub thread_ms: Vec<f64>,
    /// From the first answer of a restarted QEMU to its contract, s.
    pub restart_s: Vec<f64>,
    /// Share of one CPU at rest, window by window.
    pub idle: Vec<f64>,
    /// Length of the windows at rest, s.
    pub idle_seconds: f64,
    /// Requests of a guest with and without observation.
    #[serde(default)]
    pub observed: Vec<observe::Pair>,
    /// Command line and date of `observed`, where it was measured separately.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_by: Option<String>,
    /// State left by `kill -9`.
    pub kills: Kills,
    /// Months of a simulated host.
    pub months: Vec<Month>,
    /// Months of plans, one for each pattern and seed.
    #[serde(default)]
    pub plans: Vec<PlanMonth>,
}

/// Percentile by nearest rank: the value that a share of all does not exceed; 0 without values.
fn quantile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    nearest_rank(&sorted, share).unwrap_or(0.0)
}

/// The claims of a result.
#[must_use]
pub fn claims(data: &DaemonData) -> Vec<Claim> {
    let longest = |values: &[f64]| values.iter().copied().fold(0.0, f64::max);
    let sum = |of: fn(&Month) -> u64| data.months.iter().map(of).sum::<u64>() as f64;
    let plans = |of: fn(&PlanMonth) -> u64| data.plans.iter().map(of).sum::<u64>() as f64;
    let months = data.months.len();
    let pairs =
        |of: fn(&observe::Pair) -> f64| quantile(&data.observed.iter().map(of).collect::<Vec<_>>(), 0.5);
    vec![
        Claim::new(
            "daemon.thread_p99_ms",
            "from a new thread of a VM to its place in the contract, p99",
            quantile(&data.thread_ms, 0.99),
            "ms",
            data.thread_ms.len(),
        )
        .at_most(300.0),
        Claim::new(
            "daemon.thread_p50_ms",
            "the same, median",
            quantile(&data.thread_ms, 0.5),
            "ms",
            data.thread_ms.len(),
        ),
        Claim::new(
            "daemon.restart_p99_s",
            "from the first answer of a restarted QEMU to its contract, p99",
            quantile(&data.restart_s, 0.99),
            "s",
            data.restart_s.len(),
        )
        .at_most(2.0),
        Claim::new(
            "daemon.idle_cpu",
            format!("share of one CPU with {IDLE_VMS} VMs at rest, the worst window"),
            longest(&data.idle),
            "share",
            data.idle.len(),
        )
        .at_most(0.005),
        Claim::new(
            "daemon.observe.iops_ratio",
            "requests of a guest that is observed each 2 s, five times as often as by default, over those of one that is not; median of pairs",
            pairs(|pair| pair.with.iops / pair.without.iops),
            "ratio",
            data.observed.len(),
        )
        .at_least(0.99),
        Claim::new(
            "daemon.observe.cpu_ratio",
            "CPU time of QEMU and the service for each request, the same way; median of pairs",
            pairs(|pair| pair.with.cpu_us / pair.without.cpu_us),
            "ratio",
            data.observed.len(),
        )
        .at_most(1.01),
        Claim::new(
            "daemon.kills.differences",
            "settings that differ after `kill -9` of the service at any moment, a restart and the end of the contract",
            data.kills.differences.len() as f64,
            "settings",
            data.kills.n,
        )
        .at_most(0.0),
        Claim::new(
            "daemon.settles.oscillating",
            "contracts put in force or put back without a cause, and settings of plans that were changed from one value to another for the third time, \
             in simulated months",
            sum(|m| m.oscillating) + plans(|m| m.oscillating),
            "steps",
            months + data.plans.len(),
        )
        .at_most(0.0),
        Claim::new(
            "daemon.settles.restless",
            "times that the loop was not at rest long after the last cause, and changes of plans when nothing new was seen, \
             in simulated months",
            sum(|m| m.restless) + sum(|m| m.wrong_at_rest) + plans(|m| m.restless),
            "times",
            months + data.plans.len(),
        )
        .at_most(0.0),
        Claim::new(
            "daemon.plans.hurt",
            "VMs that a plan made worse, as predicted, for the sake of less critical ones, without being asked, in simulated months",
            plans(|m| m.hurt),
            "VMs",
            data.plans.len(),
        )
        .at_most(0.0),
        Claim::new(
            "daemon.plans.changes",
            "changes of plan in a simulated month, the most of all patterns",
            data.plans.iter().map(|m| m.changes).max().unwrap_or(0) as f64,
            "changes",
            data.plans.len(),
        ),
        Claim::new(
            "daemon.settles.causes",
            "things that happened to the simulated host meanwhile",
            sum(|m| m.causes),
            "causes",
            months,
        ),
    ]
}

impl Experiment for DaemonData {
    const FORM: &str = "rtvirtio-daemon/1";
    const FILE: &str = "daemon.json";
    const TITLE: &str = "rtvirtio: the service";

    fn report(&self) -> anyhow::Result<ExperimentReport> {
        let mut lead = format!(
            "The service on Linux {} with {} CPUs, QEMU processes without a guest; {}. The months are simulated: the loop of the \
             service on a simulated host in virtual time.",
            self.host.kernel, self.host.cpus, self.command
        );
        if let Some(by) = &self.observed_by {
            lead.push_str(&format!(" Observation: {by}."));
        }
        let row = |name: &str, unit: &str, values: &[f64]| {
            let number = |share| format!("{:.4}", quantile(values, share));
            vec![format!("{name}, {unit}"), values.len().to_string(), number(0.5), number(0.99), number(1.0)]
        };
        let month = |m: &Month| {
            [m.seed, m.days, m.causes, m.passes, m.steps, m.oscillating, m.restless, m.restores_per_hour]
                .map(|n| n.to_string())
                .to_vec()
        };
        let of = |of: fn(&observe::Pair) -> f64| self.observed.iter().map(of).collect::<Vec<_>>();
        let times = Table {
            label: "times".to_owned(),
            head: ["", "n", "median", "p99", "longest"].map(str::to_owned).to_vec(),
            rows: vec![
                row("a new thread has its place", "ms", &self.thread_ms),
                row("a restarted VM has its contract", "s", &self.restart_s),
                row("share of one CPU at rest", "share", &self.idle),
                row("requests/s of a guest without observation", "1/s", &of(|p| p.without.iops)),
                row("with QEMU's histograms alone", "1/s", &of(|p| p.histograms.iops)),
                row("with it", "1/s", &of(|p| p.with.iops)),
                row("CPU time for each request without observation", "us", &of(|p| p.without.cpu_us)),
                row("with QEMU's histograms alone", "us", &of(|p| p.histograms.cpu_us)),
                row("with it", "us", &of(|p| p.with.cpu_us)),
            ],
        };
        let months = Table {
            label: "simulated months".to_owned(),
            head: [
                "seed",
                "days",
                "causes",
                "passes",
                "steps",
                "oscillating",
                "restless",
                "restores in an hour",
            ]
            .map(str::to_owned)
            .to_vec(),
            rows: self.months.iter().map(month).collect(),
        };
        let plan = |m: &PlanMonth| {
            let pattern = serde_json::to_value(m.pattern).unwrap_or_default();
            let mut row = vec![pattern.as_str().unwrap_or_default().replace('_', " ")];
            row.push(if m.accepts { "accepts" } else { "-" }.to_owned());
            let numbers =
                [m.seed, m.days, m.planned, m.changes, m.settings, m.oscillating, m.restless, m.hurt];
            row.extend(numbers.map(|n| n.to_string()));
            row
        };
        let head = [
            "pattern",
            "operator",
            "seed",
            "days",
            "planned",
            "changes",
            "settings",
            "oscillating",
            "restless",
            "hurt",
        ];
        let plans = Table {
            label: "simulated months of plans".to_owned(),
            head: head.map(str::to_owned).to_vec(),
            rows: self.plans.iter().map(plan).collect(),
        };
        let tables = vec![times, months, plans];
        let section = Section { title: "The service".to_owned(), tables, ..Section::default() };
        ExperimentReport::of_data(self, self.host.clone(), claims(self), lead, vec![section])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_of_the_right_rank() {
        let values: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!(
            (quantile(&values, 0.5), quantile(&values, 0.99), quantile(&values, 1.0)),
            (50.0, 99.0, 100.0)
        );
        assert_eq!(quantile(&[], 0.99), 0.0);
    }
}
