//! isol-bench's four questions (IISWC 2025) to every way of dividing a device that Linux, QEMU and
//! rtvirtio have: overhead, fairness, priority against device use, and bursts.
//!
//! VMs are fio in cgroups, or QEMU guests, on a device that is made for them. Each mode is applied
//! and put back by the journal for each run; one that the host lacks is left out with the reason.

mod measure;
mod modes;
mod page;

pub use measure::measure;
pub use modes::{Case, Mode};

use rtvirtio_learn::statistic::median;
use rtvirtio_measure::HostFacts;
use rtvirtio_model::Profile;
use rtvirtio_spec::LabKind;
use rtvirtio_units::Nanos;
use serde::{Deserialize, Serialize};

use crate::claims::Claim;
use crate::experiment::Experiment;
use crate::report::ExperimentReport;

/// Options of the experiment.
#[derive(Clone, Debug)]
pub struct IsolationOptions {
    /// Device, `twin:NAME`, `file:PATH` or `/dev/nullbN`.
    pub device: String,
    /// Kind of the VMs.
    pub vm: LabKind,
    /// Modes to run; all when empty.
    pub only: Vec<Mode>,
    /// Questions, 1 to 4; all when empty.
    pub questions: Vec<u8>,
    /// Repetitions of every case.
    pub rounds: usize,
    /// Length of each run.
    pub length: Nanos,
}

/// Requests of one VM in a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmOutcome {
    /// Completed requests per second.
    pub rate: f64,
    /// Completed bytes per second.
    pub bytes: f64,
    /// Completed requests.
    pub n: u64,
    /// Median latency.
    pub p50_ns: Nanos,
    /// 99th percentile.
    pub p99_ns: Nanos,
}

/// A run of a case under a mode.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IsolationRun {
    /// Repetition, from 0.
    pub round: usize,
    /// Load, and what is asked of the mode.
    pub case: Case,
    /// Way to divide the device.
    pub mode: Mode,
    pub vms: Vec<VmOutcome>,
    /// Time of each burst of the first VM, from its start to the end of its last request.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bursts_ns: Vec<Nanos>,
}

impl IsolationRun {
    /// Bytes per second of all VMs.
    fn bytes(&self) -> f64 {
        self.vms.iter().map(|vm| vm.bytes).sum()
    }

    /// Jain's index of the VMs' bytes over their weights: 1 where all have their share, 1/n where
    /// one has everything; 0 of nothing.
    fn jain(&self) -> f64 {
        let of = |(vm, weight): (&VmOutcome, u32)| vm.bytes / f64::from(weight);
        let shares = self.vms.iter().zip(self.case.weights()).map(of);
        let (sum, squares) = shares.fold((0.0, 0.0), |(sum, squares), x| (sum + x, squares + x * x));
        if squares > 0.0 { sum * sum / (self.vms.len() as f64 * squares) } else { 0.0 }
    }

    /// p99 in ms: the first VM's where it has priority, else the highest.
    fn p99_ms(&self) -> f64 {
        let judged = if self.case.strength().is_some() { 1 } else { self.vms.len() };
        self.vms.iter().take(judged).map(|vm| vm.p99_ns.as_millis_f64()).fold(0.0, f64::max)
    }

    /// Median time of a burst, in ms; `None` without bursts.
    fn burst_ms(&self) -> Option<f64> {
        let all: Vec<f64> = self.bursts_ns.iter().map(|time| time.as_millis_f64()).collect();
        (!all.is_empty()).then(|| median(all))
    }
}

/// A case that was left out under a mode.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Skipped {
    pub mode: Mode,
    pub case: Case,
    /// Reason for the user.
    pub why: String,
}

/// Runs with their conditions, as saved in [`Experiment::FILE`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IsolationData {
    /// [`IsolationData::FORM`], checked on reading.
    pub schema: String,
    /// Host of the measurement.
    pub host: HostFacts,
    /// Command line of the measurement.
    pub command: String,
    /// Date of the last run, and version of the program.
    pub generated: String,
    /// Profile that limits, targets and plans rest on.
    pub profile: Profile,
    /// Runs in the order in which they were made.
    pub runs: Vec<IsolationRun>,
    /// Modes and cases that cannot be run on the host.
    pub skipped: Vec<Skipped>,
}

/// Name of a kind of VM, as on the command line.
fn vm_kind(kind: LabKind) -> &'static str {
    if kind == LabKind::Qemu { "qemu" } else { "process" }
}

impl IsolationData {
    /// Median over the rounds, and their number; `None` without runs.
    fn median(
        &self,
        case: Case,
        mode: Mode,
        figure: impl Fn(&IsolationRun) -> Option<f64>,
    ) -> Option<(f64, usize)> {
        let runs = self.runs.iter().filter(|run| (run.case, run.mode) == (case, mode));
        let all: Vec<f64> = runs.filter_map(figure).collect();
        let n = all.len();
        (n > 0).then(|| (median(all), n))
    }

    /// Modes that were left out, for each reason with the cases.
    fn left_out(&self) -> Vec<(Mode, &str, String)> {
        let mut found: Vec<(Mode, &str, Vec<&str>)> = Vec::new();
        for Skipped { mode, case, why } in &self.skipped {
            match found.iter_mut().find(|(other, reason, _)| other == mode && *reason == why.as_str()) {
                Some((_, _, cases)) => cases.push(case.name()),
                None => found.push((*mode, why.as_str(), vec![case.name()])),
            }
        }
        found.into_iter().map(|(mode, why, cases)| (mode, why, cases.join(", "))).collect()
    }

    /// Modes with runs.
    fn modes(&self) -> impl Iterator<Item = Mode> + '_ {
        Mode::ALL.into_iter().filter(move |mode| self.runs.iter().any(|run| run.mode == *mode))
    }

    /// The claims of a result; none has a limit.
    #[must_use]
    pub fn claims(&self) -> Vec<Claim> {
        let mut claims = Vec::new();
        for mode in self.modes() {
            let name = mode.name();
            let mut add = |id: &str, what: &str, found: Option<(f64, usize)>, unit: &str| {
                if let Some((value, n)) = found {
                    let question = &id[..2];
                    let id = format!("isolation.{question}.{name}.{}", id[2..].trim_start_matches('.'));
                    claims.push(Claim::new(id, format!("{what}, {name}"), value, unit, n));
                }
            };
            let over_none = |case, figure: fn(&IsolationRun) -> f64| {
                let (value, n) = self.median(case, mode, |run| Some(figure(run)))?;
                let (base, _) = self.median(case, Mode::Plain, |run| Some(figure(run)))?;
                (base > 0.0).then(|| (value / base, n))
            };
            let p99 = over_none(Case::Apps4, IsolationRun::p99_ms);
            add("D1.p99_over_none", "p99 of four VMs with a read in flight, over that of none", p99, "times");
            let bytes = over_none(Case::Batch, IsolationRun::bytes);
            add("D1.rate_over_none", "rate of four VMs that always read, over that of none", bytes, "times");
            for case in Case::ALL.into_iter().filter(|case| case.question() == 2) {
                let jain = self.median(case, mode, |run| Some(run.jain()));
                add(&format!("D2.jain.{}", case.name()), "Jain's index of bytes over weights", jain, "index");
            }
            let p99 = self.median(Case::Strong, mode, |run| Some(run.p99_ms()));
            add("D3.p99_ms", "p99 of the VM with priority where others are held back most", p99, "ms");
            let used = over_none(Case::Strong, IsolationRun::bytes);
            add("D3.use_over_none", "bytes of all VMs in the same runs, over those of none", used, "times");
            let burst = self.median(Case::Bursts, mode, IsolationRun::burst_ms);
            add("D4.burst_ms", "median time of a burst of reads next to three VMs that read", burst, "ms");
        }
        claims
    }
}

impl Experiment for IsolationData {
    const FORM: &str = "rtvirtio-isolation/1";
    const FILE: &str = "isolation.json";
    const TITLE: &str = "rtvirtio: isolation by ten ways to divide a device";

    fn report(&self) -> anyhow::Result<ExperimentReport> {
        let lead = format!(
            "{} runs on {}, Linux {} with {} CPUs, VMM {}; {}, {}.",
            self.runs.len(),
            self.host.device,
            self.host.kernel,
            self.host.cpus,
            self.host.vmm,
            self.command,
            self.generated
        );
        let sections = page::sections(self);
        let mut report = ExperimentReport::of_data(self, self.host.clone(), self.claims(), lead, sections)?;
        for (mode, why, cases) in self.left_out() {
            report.text.push_str(&format!("{} was left out of {cases}: {why}\n", mode.name()));
        }
        Ok(report)
    }
}

#[cfg(test)]
mod tests;
