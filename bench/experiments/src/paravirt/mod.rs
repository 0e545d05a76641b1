//! Paravirtual scheduling: a guest that reports its urgent tasks, and its neighbour, on one core.
//! The RT hypervisor paper's section 5, on stock kernels.
//!
//! VM A has a timed task (cyclictest each [`INTERVAL_US`]) and a background job that uses all CPU
//! time; VM B computes. Compared with: no priorities, and A always above B.

mod chain;
mod guests;
mod interrupts;
mod measure;
mod page;

pub use chain::{Chain, Span, Step, StepKind};
pub use interrupts::Answers;
pub use measure::{ParavirtOptions, measure};
pub use page::{report_in_box, svg};

use rtvirtio_learn::statistic::median;
use rtvirtio_measure::HostFacts;
use rtvirtio_urgency_host::Raises;
use serde::{Deserialize, Serialize};

use crate::claims::Claim;
pub use crate::cyclictest::INTERVAL_US;
use crate::cyclictest::Latencies;

/// File name of [`Piece::Chain`] alone: [`ParavirtOptions::file`].
pub const CHAIN_FILE: &str = "cpu-paravirt-chain.json";

/// Results of `rtvirtio-lab box` (a host in QEMU with an emulated CPU), by the host's kernel.
pub const BOX_FILES: [&str; 4] = [
    "cpu-paravirt-box.json",
    "cpu-paravirt-box-rt.json",
    "cpu-paravirt-box-interrupts.json",
    "cpu-paravirt-box-rt-interrupts.json",
];

/// Priorities of the two VMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Setup {
    /// Both VMs are ordinary, each in a group of its own.
    None,
    /// A has a contract with real-time priorities.
    Always,
    /// Priorities of `Always` without A's background job, which then cannot use up the budget: the
    /// best latency that A can have next to B.
    Alone,
    /// Contract of `Always`, while A's guest reports its urgent tasks.
    Urgency,
}

impl Setup {
    /// In the order of the table.
    pub const ALL: [Self; 4] = [Self::None, Self::Always, Self::Alone, Self::Urgency];

    /// Description in tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "no priority",
            Self::Always => "A above B always",
            Self::Alone => "the same, no background job",
            Self::Urgency => "A says what is urgent",
        }
    }
}

/// A part of the experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Both VMs at once, in all set-ups.
    Both,
    /// Cost of reports without urgent work.
    Cost,
    /// Latency of a promotion.
    Promotions,
    /// A guest with false reports.
    Lies,
    /// Requests for an urgent task, with and without promotion by KVM's interrupts; only where it
    /// is named, and under KVM.
    Interrupts,
    /// From a timer by a read in the I/O domain to the answer, once; only where it is named.
    Chain,
}

impl Piece {
    /// All pieces: those of a round in order, then those that run once.
    pub const ALL: [Self; 6] =
        [Self::Both, Self::Cost, Self::Promotions, Self::Lies, Self::Interrupts, Self::Chain];
}

impl std::fmt::Display for Piece {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Both => "both",
            Self::Cost => "cost",
            Self::Promotions => "promotions",
            Self::Lies => "lies",
            Self::Interrupts => "interrupts",
            Self::Chain => "chain",
        })
    }
}

impl std::str::FromStr for Piece {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|piece| piece.to_string() == name);
        found.ok_or_else(|| format!("one of {}", Self::ALL.map(|piece| piece.to_string()).join(", ")))
    }
}

/// Latencies and work of one run of both VMs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Both {
    /// Priorities of the VMs.
    pub setup: Setup,
    /// Latencies of A's timed task.
    pub latencies: Latencies,
    /// Rate of A's background job, pieces of work per second.
    pub background: f64,
    /// Rate of B, pieces of work per second.
    pub batch: f64,
    /// Promotions of A's vCPU; 0 without reports.
    pub promotions: u64,
    /// CPU time that A's vCPU had above its floor, in s.
    pub boosted: f64,
    /// Least weight of A at its floor, as a share of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<f64>,
    /// Causes and delays of the promotions of A's vCPU, with the warm-up; `None` without reports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub raises: Option<Raises>,
}

/// Cost of reports without urgent work, from one run with or without them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// Whether the guest reports and the host follows.
    pub reports: bool,
    /// Mean latency of an ordinary cyclictest, in us.
    pub latency_us: f64,
    /// Wake-ups of that cyclictest.
    pub wakeups: u64,
    /// Round trips of a byte between two threads, per second.
    pub switches: f64,
}

/// Effect of a false report in one run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Lie {
    /// Kind of the false report; `urgent` is the truth of a guest with endless urgent work.
    pub kind: String,
    /// Rate of B, pieces of work per second.
    pub batch: f64,
    /// CPU time that A's vCPU had above its floor, in s.
    pub boosted: f64,
    /// Notices, and the number of ignored ones.
    pub notices: [u64; 2],
    /// Length of the run, s.
    pub seconds: f64,
    /// Whether the thread that follows the page ended by itself.
    pub panicked: bool,
}

/// Contents of [`FILE`](crate::experiment::Experiment::FILE) and [`CHAIN_FILE`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ParavirtData {
    /// [`FORM`](crate::experiment::Experiment::FORM), checked on reading.
    pub schema: String,
    /// Host of the measurement.
    pub host: HostFacts,
    /// Command line of the measurement.
    pub command: String,
    /// Date of the last round, and version of the program.
    pub generated: String,
    /// Whether the CPUs were kept from sleeping.
    pub awake: bool,
    /// The kernel's name of the mechanism that holds the contract.
    pub backend: String,
    /// The contract, as `2ms in 3ms`.
    pub contract: String,
    /// CPU time above the floor in each second, in ns.
    pub budget_ns: u64,
    /// Whether the guest rings a doorbell.
    pub doorbell: bool,
    /// Both VMs at once.
    pub both: Vec<Both>,
    /// Runs without urgent work.
    pub cost: Vec<Cost>,
    /// From the guest's report to the level that the host shows it, in us, for each round.
    pub promotions: Vec<Latencies>,
    /// Runs with a false report.
    pub lies: Vec<Lie>,
    /// Latencies of requests for an urgent task.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub interrupts: Vec<Answers>,
    /// Steps from the timer to the answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chain: Option<Chain>,
}

impl ParavirtData {
    /// Latencies of a set-up, all rounds together.
    #[must_use]
    pub fn latencies(&self, setup: Setup) -> Latencies {
        let mut all = Latencies::default();
        self.runs_of(setup).for_each(|b| all.merge(&b.latencies));
        all
    }

    /// Causes and delays of the promotions of A's vCPU in all rounds.
    #[must_use]
    pub fn raises(&self) -> Raises {
        self.both.iter().filter_map(|b| b.raises).fold(Raises::default(), |sum, of| sum.with(&of))
    }

    /// The runs of a set-up, in order of the rounds.
    pub fn runs_of(&self, setup: Setup) -> impl Iterator<Item = &Both> {
        self.both.iter().filter(move |b| b.setup == setup)
    }

    /// Ratio of a value under one set-up to that under another, for each round.
    fn ratios(&self, of: Setup, over: Setup, value: impl Fn(&Both) -> f64) -> Vec<f64> {
        self.runs_of(of).zip(self.runs_of(over)).map(|(a, b)| value(a) / value(b).max(1e-9)).collect()
    }

    /// Ratio of a value with reports to that without, for each round.
    fn cost_ratios(&self, value: impl Fn(&Cost) -> f64) -> Vec<f64> {
        let with = self.cost.iter().filter(|c| c.reports);
        with.zip(self.cost.iter().filter(|c| !c.reports))
            .map(|(w, o)| value(w) / value(o).max(1e-9))
            .collect()
    }

    /// For each kind of false report, the median over the rounds of B's work over that next to an
    /// honest guest with as much urgent work.
    #[must_use]
    pub fn neighbour_ratios(&self) -> Vec<(String, f64)> {
        let honest: Vec<f64> = self.lies.iter().filter(|l| l.kind == HONEST).map(|l| l.batch).collect();
        let mut kinds: Vec<&str> =
            self.lies.iter().map(|l| l.kind.as_str()).filter(|k| *k != HONEST).collect();
        kinds.dedup();
        let mut all: Vec<(String, f64)> = Vec::new();
        for kind in kinds {
            if all.iter().any(|(known, _)| known == kind) {
                continue;
            }
            let of_kind = self.lies.iter().filter(|l| l.kind == kind);
            let ratios = of_kind.zip(&honest).map(|(l, honest)| l.batch / honest.max(1e-9)).collect();
            all.push((kind.to_owned(), median(ratios)));
        }
        all
    }
}

/// Report of an honest guest with endless urgent work.
pub const HONEST: &str = "urgent";
/// Kinds of false reports.
pub const LIES: [&str; 6] = ["idle", "interrupt", "storm", "nonsense", "torn", "address"];

/// Number of samples as a claim has it.
fn count(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

/// Claims of the measured pieces.
#[must_use]
pub fn claims(data: &ParavirtData) -> Vec<Claim> {
    let mut claims = Vec::new();
    let [none, always, alone, urgency] = Setup::ALL.map(|s| data.latencies(s));
    let n = count(none.n().min(always.n()).min(alone.n()).min(urgency.n()));
    let rounds = data.runs_of(Setup::Urgency).count();
    if rounds > 0 {
        let over = |a: &Latencies, b: &Latencies| a.at(0.999) as f64 / b.at(0.999).max(1) as f64;
        // A's background job may use up A's budget, and A's task then waits for the next period.
        let best = if alone.at(0.999) < always.at(0.999) { &alone } else { &always };
        let what = "p99.9 of A's timed task while A has a background job and says what is urgent, over A above B always, with or without that job, \
                    whichever is better; all rounds together";
        claims.push(
            Claim::new("paravirt.urgent.p999_over_always", what, over(&urgency, best), "times", n)
                .at_most(1.25),
        );
        let what = "the same over A above B always with its background job";
        claims.push(Claim::new(
            "paravirt.urgent.p999_over_always.job",
            what,
            over(&urgency, &always),
            "times",
            n,
        ));
        let what = "the same over no priority, with its background job";
        claims.push(Claim::new("paravirt.urgent.p999_over_none", what, over(&urgency, &none), "times", n));
        let work = |of, over, value: fn(&Both) -> f64| median(data.ratios(of, over, value));
        let what = "B's work while A says what is urgent, over no priority; median over the rounds";
        let batch = work(Setup::Urgency, Setup::None, |b| b.batch);
        claims.push(Claim::new("paravirt.batch.over_none", what, batch, "times", rounds).at_least(0.9));
        let what = "B's work with A above B always, over no priority; median over the rounds";
        let batch = work(Setup::Always, Setup::None, |b| b.batch);
        claims.push(Claim::new("paravirt.batch.always_over_none", what, batch, "times", rounds));
    }
    let latency = data.cost_ratios(|c| c.latency_us);
    let switches = data.cost_ratios(|c| c.switches);
    let n = latency.len();
    if n > 0 {
        let what = "mean latency of an ordinary cyclictest with reports over without, less 1; nothing is urgent, median over the rounds";
        claims
            .push(Claim::new("paravirt.cost.latency", what, median(latency) - 1.0, "share", n).at_most(0.03));
        let what =
            "context switches a second that are lost by reports, of those without; median over the rounds";
        claims.push(
            Claim::new("paravirt.cost.switches", what, 1.0 - median(switches), "share", n).at_most(0.03),
        );
    }
    let mut promotions = Latencies::default();
    data.promotions.iter().for_each(|p| promotions.merge(p));
    if promotions.n() > 0 {
        let what = if data.doorbell {
            "p99 from a report to the level that the host shows, less what a thread of the host sees on the same core"
        } else {
            "p99 from a report to the level that the host shows, without a doorbell, less what a thread of the host sees on the same core"
        };
        let value = promotions.at_beyond_floor(0.99).unwrap_or_else(|| promotions.at(0.99));
        let n = count(promotions.n());
        claims.push(Claim::new("paravirt.promote_p99_us", what, value as f64, "us", n).at_most(100.0));
        let what = "the same with the host's own stalls";
        claims.push(Claim::new("paravirt.promote_p99_us.all", what, promotions.at(0.99) as f64, "us", n));
    }
    let ratios = data.neighbour_ratios();
    if !ratios.is_empty() {
        let rounds = data.lies.iter().filter(|l| l.kind == HONEST).count();
        let worst = ratios.iter().map(|(_, r)| 1.0 - r).fold(f64::MIN, f64::max);
        let what = "work that B loses next to a guest that lies, of that next to an honest one with urgent work without end; worst lie, median over the rounds";
        claims.push(Claim::new("paravirt.liar.neighbour_change", what, worst, "share", rounds).at_most(0.03));
        let panics = data.lies.iter().filter(|l| l.panicked).count();
        let what = "times that the host's thread ended by itself next to a guest that lies";
        claims.push(
            Claim::new("paravirt.liar.panics", what, panics as f64, "times", data.lies.len()).at_most(0.0),
        );
        let worst = data.lies.iter().map(|l| l.boosted / l.seconds.max(1e-9)).fold(0.0, f64::max);
        let what =
            "CPU time above the floor in each second that a guest got by any lie, over its budget for tasks";
        let budget = data.budget_ns as f64 / 1e9;
        claims.push(Claim::new(
            "paravirt.liar.boost_over_budget",
            what,
            worst / budget,
            "times",
            data.lies.len(),
        ));
    }
    claims.extend(interrupts::claims(&data.interrupts));
    claims.extend(data.chain.iter().flat_map(Chain::claims));
    claims
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::saved::Saved as _;

    fn lie(kind: &str, batch: f64) -> Lie {
        Lie { kind: kind.to_owned(), batch, boosted: 1.0, notices: [0, 0], seconds: 4.0, panicked: false }
    }

    #[test]
    fn the_better_baseline_and_the_worst_lie_count() {
        let both = |setup, us, batch| {
            let mut latencies = Latencies::default();
            latencies.add(us);
            Both {
                setup,
                latencies,
                background: 1.0,
                batch,
                promotions: 0,
                boosted: 0.0,
                weight: None,
                raises: None,
            }
        };
        let host = HostFacts { cpus: 2, ..HostFacts::default() };
        let data = ParavirtData {
            schema: ParavirtData::SCHEMA.to_owned(),
            host,
            budget_ns: 500_000_000,
            doorbell: true,
            both: vec![
                both(Setup::None, 900, 100.0),
                both(Setup::Always, 300, 5.0),
                both(Setup::Alone, 100, 90.0),
                both(Setup::Urgency, 120, 95.0),
            ],
            lies: vec![
                lie(HONEST, 50.0),
                lie("torn", 49.0),
                lie("storm", 60.0),
                lie(HONEST, 40.0),
                lie("torn", 38.0),
            ],
            ..ParavirtData::default()
        };
        let all = claims(&data);
        let value = |id: &str| all.iter().find(|c| c.id == id).map(|c| (c.value, c.met)).unwrap();
        assert_eq!(value("paravirt.urgent.p999_over_always"), (1.2, true));
        assert_eq!(value("paravirt.batch.over_none"), (0.95, true));
        let (change, met) = value("paravirt.liar.neighbour_change");
        assert!((change - 0.035).abs() < 1e-9 && !met, "{change}: median of 0.98 and 0.95");
        assert_eq!(value("paravirt.liar.boost_over_budget").0, 0.5);
    }
}
