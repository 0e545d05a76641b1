//! The whole chain of an urgent task, with records of each element: its timer fires, it runs, reads
//! its disk in the I/O domain, and answers; its own VM's background job and a batch VM compute and
//! read at full speed meanwhile.

mod judge;
mod run;
mod test_bed;

pub use run::run;
pub use test_bed::DiskTestBed;

use std::collections::BTreeMap;

use rtvirtio_units::Nanos;
use rtvirtio_urgency_host::Raises;
use serde::{Deserialize, Serialize};

use crate::claims::Claim;
use crate::page::Section;
use crate::page::xy::table;
use crate::stats::rank::nearest_rank;

/// Period of the cycles.
pub const PERIOD: Nanos = Nanos::from_micros(10_000);
/// Longest allowed promotion: an urgent vCPU that waits at its floor for longer is an inversion.
pub const RAISE: Nanos = Nanos::from_micros(100);

/// A step of a cycle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StepKind {
    /// From the timer until the task runs: its vCPU must have the core.
    Timer,
    /// From the first run of the task until it reads.
    Ask,
    /// From the read until the I/O domain has fetched it. The vCPU must have the core until it has
    /// kicked the I/O domain; the time of the kick is not recorded, so all of the step counts.
    Kick,
    /// Until the I/O domain submits the read.
    Domain,
    /// Until the device has completed it.
    Device,
    /// Until the task has its data: its vCPU must have the core again.
    Answer,
}

impl StepKind {
    /// All steps, in order.
    pub const ALL: [Self; 6] = [Self::Timer, Self::Ask, Self::Kick, Self::Domain, Self::Device, Self::Answer];

    /// Description in tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Timer => "timer fires, the task runs",
            Self::Ask => "the task reads",
            Self::Kick => "the domain has the read",
            Self::Domain => "the domain submits it",
            Self::Device => "the device completes it",
            Self::Answer => "the task has its data",
        }
    }
}

/// Distribution of a duration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// Number of measurements.
    pub n: u64,
    /// Median duration.
    pub p50: Nanos,
    /// 99th percentile of the duration.
    pub p99: Nanos,
    /// Longest duration.
    pub max: Nanos,
}

impl Span {
    /// Distribution of lengths in ns.
    #[must_use]
    pub fn from_lengths(mut lengths: Vec<u64>) -> Self {
        lengths.sort_unstable();
        let at = |share| Nanos(nearest_rank(&lengths, share).unwrap_or(0));
        Self { n: lengths.len() as u64, p50: at(0.5), p99: at(0.99), max: at(1.0) }
    }
}

/// Results of one step in all judged cycles.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// Step that is described.
    pub kind: StepKind,
    /// Duration of the step.
    pub length: Span,
    /// Priorities at the begin of the step, with the number of cycles: of the vCPU's thread, or the
    /// class of the request.
    pub priorities: BTreeMap<String, u64>,
    /// Cycles in which the step waited for work that is not urgent, or may have: the vCPU's thread
    /// was an ordinary one, or the I/O domain submitted another VM's request first.
    pub behind: u64,
    /// The longest such wait.
    pub longest_behind: Nanos,
    /// Cycles of `behind` that are inversions: of a vCPU beyond `RAISE`, of a request in any
    /// case.
    pub inversions: u64,
}

/// Results of a run of the chain.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Chain {
    /// Cycles of the task.
    pub cycles: u64,
    /// Cycles of which all steps are recorded: only these are judged.
    pub seen: u64,
    /// From the timer to the answer by the guest's clock, in all cycles.
    pub total: Span,
    /// Threads and requests with their priorities, as reported by the kernel and the I/O domain.
    pub elements: Vec<(String, String)>,
    /// Steps in the order of a cycle.
    pub steps: Vec<Step>,
    /// The neighbour's requests at the device when one of the task's was submitted: maximum and
    /// mean. They cannot be recalled.
    pub ahead: (u64, f64),
    /// The device's window in the I/O domain.
    pub window: u32,
    /// Rate of the neighbour's requests, per second.
    pub neighbour: f64,
    /// Causes of the vCPU's promotions, as in `threads --json`.
    pub raises: Raises,
    /// Moments and requests lost for lack of space in the records.
    pub lost: (u64, u64),
}

impl Chain {
    /// Inversions in all steps.
    #[must_use]
    pub fn inversions(&self) -> u64 {
        self.steps.iter().map(|step| step.inversions).sum()
    }

    /// Inversions, recorded cycles and duration as claims.
    #[must_use]
    pub fn claims(&self) -> Vec<Claim> {
        let seen = usize::try_from(self.seen).unwrap_or(usize::MAX);
        let cycles = usize::try_from(self.cycles).unwrap_or(usize::MAX);
        let what = "steps from a guest's timer by its read in the I/O domain to its answer in which what is urgent waited behind what is not: its vCPU for longer \
                    than 100 us at the floor, its request at all; next to a batch VM";
        let share = "cycles of which each step is recorded";
        let total = "p99 from the timer to the answer, by the guest's clock";
        vec![
            Claim::new("paravirt.chain.inversions", what, self.inversions() as f64, "steps", seen)
                .at_most(0.0),
            Claim::new(
                "paravirt.chain.seen",
                share,
                self.seen as f64 / (self.cycles as f64).max(1.0),
                "share",
                cycles,
            ),
            Claim::new("paravirt.chain.p99_us", total, self.total.p99.0 as f64 / 1e3, "us", cycles),
        ]
    }

    /// Section of the page on the chain.
    #[must_use]
    pub fn section(&self) -> Section {
        let us = |time: Nanos| format!("{:.0}", time.0 as f64 / 1e3);
        let row = |step: &Step| {
            let priorities: Vec<String> =
                step.priorities.iter().map(|(of, n)| format!("{of}: {n}")).collect();
            vec![
                step.kind.name().to_owned(),
                step.length.n.to_string(),
                us(step.length.p50),
                us(step.length.p99),
                us(step.length.max),
                priorities.join(", "),
                step.behind.to_string(),
                us(step.longest_behind),
                step.inversions.to_string(),
            ]
        };
        let head = [
            "step",
            "cycles",
            "p50 us",
            "p99 us",
            "longest us",
            "what is urgent has when it begins",
            "may have waited behind what is not",
            "longest us",
            "inversions",
        ];
        let of = |(name, priority): &(String, String)| vec![name.clone(), priority.clone()];
        let text = format!(
            "A timed task of VM A wakes each {PERIOD}, reads 4 KiB from its disk in the I/O domain, and answers; A has a background job, VM B computes and keeps reads outstanding. \
             {} of {} cycles are recorded in each step; from timer to answer p50 {} us, p99 {} us, longest {} us. B made {:.0} requests a second, and had {} at most ({:.1} in the mean) at the \
             device, whose window is {}, when one of A's was submitted. The vCPU was raised {} times for a timer and {} times for completions. Lost to the records: {} \
             moments, {} requests. The guest's times are on the host's clock with an error of some microseconds.",
            self.seen,
            self.cycles,
            us(self.total.p50),
            us(self.total.p99),
            us(self.total.max),
            self.neighbour,
            self.ahead.0,
            self.ahead.1,
            self.window,
            self.raises.timer.n(),
            self.raises.completions,
            self.lost.0,
            self.lost.1,
        );
        Section {
            title: "The whole chain: timer, task, read, answer".to_owned(),
            text: vec![text],
            plots: Vec::new(),
            tables: vec![
                table("elements", &["element", "priority"], self.elements.iter().map(of).collect()),
                table("steps", &head, self.steps.iter().map(row).collect()),
            ],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inversions_of_all_steps_are_claimed() {
        let step = |kind, inversions| Step {
            kind,
            length: Span::from_lengths(vec![3, 1, 2]),
            priorities: BTreeMap::from([("fifo 97".to_owned(), 3)]),
            behind: inversions,
            longest_behind: Nanos(1),
            inversions,
        };
        let mut chain = Chain {
            cycles: 4,
            seen: 3,
            total: Span::from_lengths(vec![1_000, 2_000, 9_000]),
            elements: vec![("the domain's thread".to_owned(), "fifo 30".to_owned())],
            steps: StepKind::ALL.into_iter().zip([0, 0, 0, 2, 0, 1]).map(|(k, n)| step(k, n)).collect(),
            ahead: (3, 1.5),
            window: 4,
            neighbour: 100.0,
            raises: Raises::default(),
            lost: (0, 0),
        };
        assert_eq!(chain.steps[0].length, Span { n: 3, p50: Nanos(2), p99: Nanos(3), max: Nanos(3) });
        let of = |chain: &Chain| chain.claims().into_iter().map(|c| (c.value, c.met)).collect::<Vec<_>>();
        assert_eq!(of(&chain), [(3.0, false), (0.75, true), (9.0, true)]);
        let tables = chain.section().tables;
        assert_eq!((tables[0].rows.len(), tables[1].rows.len()), (1, 6));
        chain.steps.clear();
        assert!(of(&chain)[0].1);
        // Without recorded cycles the limit is not met.
        chain.seen = 0;
        assert!(!of(&chain)[0].1);
    }
}
