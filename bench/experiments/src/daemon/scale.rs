//! The service with hundreds of contracts, and with a VM of thousands of threads. The VMs are
//! processes that sleep, with threads of a VMM's names.

mod measure;

use crate::experiment::Experiment;

use rtvirtio_measure::HostFacts;
use serde::{Deserialize, Serialize};

pub use measure::{ScaleOptions, measure, sleep_with};

use super::quantile;
use crate::claims::Claim;
use crate::page::Section;
use crate::page::xy::table;
use crate::report::ExperimentReport;

/// Contracts of the two sizes that are measured, each in a file of its own.
pub const CONTRACTS: [usize; 2] = [60, 300];
/// VMs of one file.
pub const IN_ONE_FILE: usize = 100;
/// Threads of the large VM.
pub const THREADS: usize = 5_000;

/// Contracts that are in place when the service starts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Start {
    /// From the start of the service until all are in force, s; `None` where that took too long.
    pub in_force_s: Option<f64>,
    /// Failures of single contracts on the way, each with its reason.
    pub failed: Vec<String>,
}

/// A VM of thousands of threads gets its contract, next to one that has its own.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Large {
    /// From its contract until all threads are in it, s; `None` where that took too long.
    pub in_force_s: Option<f64>,
    /// From a change of the neighbour's setting meanwhile until it is set again, s.
    pub restored_s: Vec<f64>,
    /// From SIGTERM, while threads are taken in, to the end of the service, s.
    pub ended_s: f64,
    /// Time that putting all back then takes, s.
    pub back_s: f64,
    /// Settings that were not put back, and why.
    pub left: Vec<String>,
}

/// Round of all measurements.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Round {
    /// A file for each contract, one result for each of [`CONTRACTS`].
    pub starts: Vec<Start>,
    /// [`IN_ONE_FILE`] contracts in one file.
    pub one_file: Start,
    /// The VM of [`THREADS`] threads.
    pub large: Large,
}

/// Measurements and their conditions, as saved in [`FILE`](crate::experiment::Experiment::FILE).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScaleData {
    /// [`FORM`](crate::experiment::Experiment::FORM), checked on reading.
    pub schema: String,
    /// Host of the measurement.
    pub host: HostFacts,
    /// Command line of the measurement.
    pub command: String,
    /// Date of the measurement, and version of the program.
    pub generated: String,
    /// The rounds, in order.
    pub rounds: Vec<Round>,
}

impl ScaleData {
    fn starts(&self, of: impl Fn(&Round) -> Option<&Start>) -> Vec<&Start> {
        self.rounds.iter().filter_map(of).collect()
    }

    /// Results with what they are of: an id, words, and the longest median allowed.
    fn all_starts(&self) -> Vec<(String, String, f64, Vec<&Start>)> {
        let limits = [2.0, 10.0];
        let sizes = CONTRACTS.iter().zip(limits).enumerate();
        let mut all: Vec<_> = sizes
            .map(|(i, (n, limit))| {
                let words = format!("from the service's start until {n} contracts are in force");
                (format!("contracts{n}"), words, limit, self.starts(|round| round.starts.get(i)))
            })
            .collect();
        let words = format!("the same of {IN_ONE_FILE} contracts in one file");
        all.push(("one_file".to_owned(), words, 10.0, self.starts(|round| Some(&round.one_file))));
        all
    }
}

/// A time that was too long to be seen counts as endless.
fn seconds(times: impl Iterator<Item = Option<f64>>) -> Vec<f64> {
    times.map(|time| time.unwrap_or(f64::MAX)).collect()
}

/// The claims of a result.
#[must_use]
pub fn claims(data: &ScaleData) -> Vec<Claim> {
    let (mut all, mut failed) = (Vec::new(), Vec::new());
    for (id, words, limit, starts) in data.all_starts() {
        let times = seconds(starts.iter().map(|start| start.in_force_s));
        failed.extend(starts.iter().map(|start| start.failed.len() as f64));
        let id = format!("daemon.scale.{id}");
        all.push(
            Claim::new(id, format!("{words}, median"), quantile(&times, 0.5), "s", times.len())
                .at_most(limit),
        );
    }
    let words = "contracts that failed on the way";
    let sum = failed.iter().sum();
    all.push(Claim::new("daemon.scale.failed", words, sum, "contracts", failed.len()).at_most(0.0));
    let large: Vec<&Large> = data.rounds.iter().map(|round| &round.large).collect();
    let longest = |values: &[f64]| values.iter().copied().fold(0.0, f64::max);
    let times = seconds(large.iter().map(|of| of.in_force_s));
    let restored: Vec<f64> = large.iter().flat_map(|of| of.restored_s.clone()).collect();
    let ended: Vec<f64> = large.iter().map(|of| of.ended_s).collect();
    let left = large.iter().map(|of| of.left.len()).sum::<usize>();
    all.extend([
        Claim::new(
            "daemon.scale.threads",
            format!("from the contract of a VM with {THREADS} threads until all are in it, median"),
            quantile(&times, 0.5),
            "s",
            times.len(),
        )
        .at_most(3.0),
        Claim::new(
            "daemon.scale.restored",
            "until a neighbour's setting that was changed meanwhile is set again, the longest",
            longest(&restored),
            "s",
            restored.len(),
        )
        .at_most(1.0),
        Claim::new(
            "daemon.scale.ended",
            "from SIGTERM meanwhile to the end of the service, the longest",
            longest(&ended),
            "s",
            ended.len(),
        )
        .at_most(2.0),
        Claim::new(
            "daemon.scale.left",
            "settings that were not put back after that",
            left as f64,
            "settings",
            large.len(),
        )
        .at_most(0.0),
    ]);
    all
}

impl Experiment for ScaleData {
    const FORM: &str = "rtvirtio-daemon-scale/1";
    const FILE: &str = "daemon-scale.json";
    const TITLE: &str = "rtvirtio: the service at scale";

    fn report(&self) -> anyhow::Result<ExperimentReport> {
        let lead = format!(
            "The service on Linux {} with {} CPUs; VMs are processes that sleep; {}.",
            self.host.kernel, self.host.cpus, self.command
        );
        let row = |name: String, values: &[f64]| {
            let number = |share| format!("{:.2}", quantile(values, share));
            vec![name, values.len().to_string(), number(0.0), number(0.5), number(1.0)]
        };
        let mut rows: Vec<Vec<String>> = self
            .all_starts()
            .into_iter()
            .map(|(_, words, _, starts)| row(words, &seconds(starts.iter().map(|start| start.in_force_s))))
            .collect();
        let large =
            |of: fn(&Large) -> f64| self.rounds.iter().map(|round| of(&round.large)).collect::<Vec<_>>();
        let restored: Vec<f64> =
            self.rounds.iter().flat_map(|round| round.large.restored_s.clone()).collect();
        rows.push(row(
            format!("a VM of {THREADS} threads"),
            &seconds(self.rounds.iter().map(|round| round.large.in_force_s)),
        ));
        rows.push(row("a neighbour's setting is set again meanwhile".to_owned(), &restored));
        rows.push(row("SIGTERM meanwhile".to_owned(), &large(|of| of.ended_s)));
        rows.push(row("all is put back after that".to_owned(), &large(|of| of.back_s)));
        let times = table("times, s", &["", "n", "shortest", "median", "longest"], rows);
        let section =
            Section { title: "The service at scale".to_owned(), tables: vec![times], ..Section::default() };
        ExperimentReport::of_data(self, self.host.clone(), claims(self), lead, vec![section])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::saved::Saved as _;

    #[test]
    fn what_never_came_or_failed_is_no_claim_that_holds() {
        let start = |in_force_s| Start { in_force_s, failed: Vec::new() };
        let large = Large { in_force_s: Some(1.0), restored_s: vec![0.5], ended_s: 0.1, ..Large::default() };
        let round =
            Round { starts: vec![start(Some(1.0)), start(Some(9.0))], one_file: start(Some(3.0)), large };
        let mut data = ScaleData {
            schema: ScaleData::SCHEMA.to_owned(),
            host: HostFacts { cpus: 1, ..HostFacts::default() },
            command: String::new(),
            generated: String::new(),
            rounds: vec![round],
        };
        let missed = |data: &ScaleData| {
            claims(data).into_iter().filter(|claim| !claim.met).map(|claim| claim.id).collect::<Vec<_>>()
        };
        assert_eq!(missed(&data), Vec::<String>::new());
        data.rounds[0].one_file = start(None);
        data.rounds[0].starts[1].failed.push("vm: why".to_owned());
        data.rounds[0].large.left.push("group".to_owned());
        assert_eq!(missed(&data), ["daemon.scale.one_file", "daemon.scale.failed", "daemon.scale.left"]);
    }
}
