//! Causes of missed targets as the product names them, against those that were planted.
//!
//! A VM with a declared task and target runs next to one neighbour on a twin. Before each run a
//! cause is planted, or two, with a strength drawn from the seed; the run is that of `verify`, and
//! the first cause that it names is compared. The rules do not see the seed.

mod guest;
mod measure;
mod page;
mod paging;
mod plant;
mod spec;
mod undo;

use std::collections::BTreeMap;

use rtvirtio_blame::CauseKind;
use rtvirtio_measure::HostFacts;
use rtvirtio_spec::LabKind;
use rtvirtio_units::Nanos;
use serde::{Deserialize, Serialize};

use crate::claims::Claim;

pub use measure::measure;
pub use plant::{Kind, PlantedCause, SLOW_BY, draw};
pub(crate) use undo::set_throttle;

/// Least share of right first causes.
const RIGHT: f64 = 0.95;
/// Largest share of wrong first causes.
const WRONG: f64 = 0.01;

/// Options of the experiment.
#[derive(Clone, Debug)]
pub struct BlameOptions {
    /// Device, `twin:NAME`.
    pub device: String,
    /// Kind of the VM whose target is judged.
    pub vm: LabKind,
    /// Kinds to plant; all that fit the VM when empty.
    pub only: Vec<Kind>,
    pub rounds: usize,
    /// Length of each run.
    pub length: Nanos,
    /// Seed of order and strengths.
    pub seed: u64,
}

/// A run with what was planted and named.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlameRun {
    /// Planted causes: one, or two at once.
    pub planted: Vec<PlantedCause>,
    /// Their settings in words.
    pub settings: Vec<String>,
    /// Whether the target was missed.
    pub missed: bool,
    /// Requests of the task.
    pub n: u64,
    /// Requests above the target.
    pub late: u64,
    /// 99th percentile of its latencies.
    pub p99_ns: Nanos,
    /// Causes named, the first one first.
    pub named: Vec<CauseKind>,
    /// Facts that could not be read.
    pub unread: Vec<String>,
    /// Causes as `verify` prints them; empty without a missed target.
    pub words: String,
    /// Reason for which the run has no result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
}

/// Outcome of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The first cause named is one of those planted.
    Right,
    /// The first cause named was not planted.
    Wrong,
    /// The target was missed, and no cause is named.
    Unseen,
    /// The target was not missed: the run is left out.
    NoMiss,
    /// The run has no result: it is left out.
    Failed,
}

impl BlameRun {
    /// Compares the first cause named with those planted.
    #[must_use]
    pub fn answer(&self) -> Answer {
        if self.failed.is_some() {
            return Answer::Failed;
        }
        if !self.missed {
            return Answer::NoMiss;
        }
        match self.named.first() {
            None => Answer::Unseen,
            Some(first) if self.planted.iter().any(|one| one.kind.cause() == Some(*first)) => Answer::Right,
            Some(_) => Answer::Wrong,
        }
    }

    /// Names of what was planted.
    fn label(&self) -> String {
        let names: Vec<&str> = self.planted.iter().map(|one| one.kind.name()).collect();
        names.join(" + ")
    }

    fn is_control(&self) -> bool {
        self.planted.iter().all(|one| one.kind == Kind::Nothing)
    }
}

/// Runs of one planted kind, or pair.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MatrixRow {
    /// Planted causes.
    pub planted: String,
    /// Runs by the cause that was named first.
    pub named: BTreeMap<String, usize>,
    /// Runs without a cause named.
    pub unseen: usize,
    /// Runs whose target was not missed.
    pub no_miss: usize,
    /// Runs without a result.
    pub failed: usize,
}

/// Runs by what was planted, single causes first, and by what was named.
#[must_use]
pub fn matrix(runs: &[BlameRun]) -> Vec<MatrixRow> {
    let mut rows: BTreeMap<(usize, String), MatrixRow> = BTreeMap::new();
    for run in runs {
        let row = rows.entry((run.planted.len(), run.label())).or_default();
        match (run.answer(), run.named.first()) {
            (Answer::Failed, _) => row.failed += 1,
            (Answer::NoMiss, _) => row.no_miss += 1,
            (_, Some(first)) => *row.named.entry(name_of(*first)).or_default() += 1,
            (_, None) => row.unseen += 1,
        }
    }
    rows.into_iter().map(|((_, planted), row)| MatrixRow { planted, ..row }).collect()
}

/// Name of a cause, as in results.
fn name_of(kind: CauseKind) -> String {
    let value = serde_json::to_value(kind).ok();
    value.as_ref().and_then(serde_json::Value::as_str).map_or_else(|| format!("{kind:?}"), str::to_owned)
}

/// Measurements and their conditions, as saved in [`FILE`](crate::experiment::Experiment::FILE).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlameData {
    /// [`FORM`](crate::experiment::Experiment::FORM), checked on reading.
    pub schema: String,
    /// Host of the measurement.
    pub host: HostFacts,
    /// Command line of the measurement.
    pub command: String,
    /// Date of the last run, and version of the program.
    pub generated: String,
    /// Kind of the VM: `qemu` or `process`.
    pub vm: String,
    /// Seed of order and strengths.
    pub seed: u64,
    /// Length of each run, s.
    pub seconds: f64,
    /// Runs in the order measured.
    pub runs: Vec<BlameRun>,
    /// Counts of these runs by planted and named cause.
    pub matrix: Vec<MatrixRow>,
}

/// Number of runs by answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Right first causes.
    pub right: usize,
    /// Wrong first causes.
    pub wrong: usize,
    /// Missed targets without a cause named.
    pub unseen: usize,
    /// Runs left out because the target was not missed.
    pub no_miss: usize,
    /// Runs left out because they have no result.
    pub failed: usize,
}

impl Counts {
    /// Counts of some runs.
    #[must_use]
    pub fn from_runs<'a>(runs: impl Iterator<Item = &'a BlameRun>) -> Self {
        let mut counts = Self::default();
        for run in runs {
            *match run.answer() {
                Answer::Right => &mut counts.right,
                Answer::Wrong => &mut counts.wrong,
                Answer::Unseen => &mut counts.unseen,
                Answer::NoMiss => &mut counts.no_miss,
                Answer::Failed => &mut counts.failed,
            } += 1;
        }
        counts
    }

    /// Missed targets, of which shares are.
    #[must_use]
    pub fn missed(&self) -> usize {
        self.right + self.wrong + self.unseen
    }

    fn share(&self, part: usize) -> f64 {
        part as f64 / self.missed().max(1) as f64
    }
}

/// The claims of a result.
#[must_use]
pub fn claims(data: &BlameData) -> Vec<Claim> {
    let planted = |n: Option<usize>| {
        let has = move |run: &&BlameRun| !run.is_control() && n.is_none_or(|n| run.planted.len() == n);
        Counts::from_runs(data.runs.iter().filter(has))
    };
    let (all, single, pair) = (planted(None), planted(Some(1)), planted(Some(2)));
    let control = Counts::from_runs(data.runs.iter().filter(|run| run.is_control()));
    let claim = |id: &str, what: &str, counts: &Counts, part: usize| {
        Claim::new(id, what, counts.share(part), "share", counts.missed())
    };
    let left_out = format!(
        "missed targets with one or two planted causes, one of which is the first named; left out: {} not missed, {} without result",
        all.no_miss, all.failed
    );
    vec![
        claim("blame.right", &left_out, &all, all.right).at_least(RIGHT),
        claim("blame.wrong", "the same, where the first named was not planted", &all, all.wrong)
            .at_most(WRONG),
        claim("blame.unseen", "the same, where none is named", &all, all.unseen),
        claim("blame.right.single", "right with one cause planted", &single, single.right),
        claim("blame.right.pair", "right with two causes at once", &pair, pair.right),
        claim(
            "blame.nothing.named",
            "missed targets without a planted cause for which one is named: a stall of the host may be a real one",
            &control,
            control.wrong,
        ),
    ]
}

#[cfg(test)]
mod tests;
