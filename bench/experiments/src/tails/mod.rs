//! Accuracy of tails estimated from few samples: long runs are cut into pieces, and each piece's
//! estimate of p99.99 is compared with that of the whole run, which has enough samples for it.

mod measure;
mod page;

pub use measure::{TailsOptions, measure};

use rtvirtio_measure::HostFacts;
use rtvirtio_measure::noise::Noise;
use rtvirtio_measure::tail::{TailEstimate, estimate};
use rtvirtio_measure::verdict::allowed;
use rtvirtio_model::Elevator;
use rtvirtio_stats::pot::{can_carry, samples_needed};
use rtvirtio_units::{Iops, Nanos, Percentile};
use serde::{Deserialize, Serialize};

use crate::claims::Claim;
use rtvirtio_learn::design::{HEAVY, LIGHT, MAX_VMS, MEDIUM, Neighbour};
use rtvirtio_learn::load::{Knobs, Stream};
use rtvirtio_learn::statistic::median;

/// The estimated percentile, as a share.
const P: f64 = 0.9999;
/// Confidence of the evaluated bounds, that of [`rtvirtio_measure::tail`].
const PROMISED: f64 = rtvirtio_measure::tail::CONFIDENCE.0;

/// A load under one setting of the host.
#[derive(Clone, Debug, PartialEq)]
pub struct Setup {
    /// Name in results.
    pub name: &'static str,
    /// Streams of the VMs.
    pub vms: Vec<Vec<Stream>>,
    /// BFQ settings of the host.
    pub knobs: Knobs,
}

/// Tails of four kinds: waiting for slices, waiting for requests, and both kinds of neighbour.
#[must_use]
pub fn setups() -> Vec<Setup> {
    let all = |vms: usize| vec![[LIGHT, MEDIUM, HEAVY].map(Stream::paced).to_vec(); vms];
    let beside = |neighbour: Neighbour| [all(MAX_VMS - 1), vec![vec![neighbour.stream()]]].concat();
    let bfq = Knobs::default_bfq(MAX_VMS);
    let no_idling = Knobs { slice_idle: Nanos(0), low_latency: false, ..bfq.clone() };
    let none = Knobs { elevator: Elevator::None, ..bfq.clone() };
    vec![
        Setup { name: "default BFQ", vms: all(MAX_VMS), knobs: bfq },
        Setup { name: "BFQ without idling", vms: all(MAX_VMS), knobs: no_idling.clone() },
        Setup { name: "none beside a flood", vms: beside(Neighbour::Flood), knobs: none },
        Setup {
            name: "BFQ without idling beside a writer",
            vms: beside(Neighbour::Writer),
            knobs: no_idling,
        },
    ]
}

/// The estimates of one piece.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Piece {
    /// Requests of the piece.
    pub n: u64,
    /// Longest latency, used where no percentile is known.
    pub max_ns: Nanos,
    /// Estimate of the percentile; absent where the samples give none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub estimate_ns: Option<Nanos>,
    /// Upper bound of the percentile; absent where the samples give none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upper_ns: Option<Nanos>,
}

/// Percentile and pieces of one task of a long run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TaskTails {
    /// Declared rate of the task.
    pub rate: Iops,
    /// Requests in the whole run.
    pub n: u64,
    /// p99.99 of the whole run.
    pub p9999_ns: Nanos,
    /// Pieces in the order of time, without those with enough requests to show the percentile.
    pub pieces: Vec<Piece>,
}

impl TaskTails {
    /// Cuts a run. `series` holds intended start since the run's begin, and latency, in ns, in the
    /// order of the starts. `None` where even the whole run has too few requests for the
    /// percentile.
    #[must_use]
    pub fn cut(rate: Iops, series: &[(u64, u64)], piece: Nanos) -> Option<Self> {
        if (series.len() as u64) < samples_needed(P, PROMISED)? {
            return None;
        }
        // From the same numbers as the pieces: a histogram rounds up, and the piece with that very
        // request would seem to be below.
        let mut sorted: Vec<u64> = series.iter().map(|s| s.1).collect();
        sorted.sort_unstable();
        let longer = allowed(sorted.len() as u64, Percentile::P9999) as usize;
        let p9999 = Nanos(*sorted.get(sorted.len().checked_sub(1 + longer)?)?);
        let begin = series.first()?.0;
        let end = series.last()?.0;
        let whole = (end - begin) / piece.0.max(1);
        let of = |k: u64| {
            let from = series.partition_point(|(t, _)| *t < begin + k * piece.0);
            let to = series.partition_point(|(t, _)| *t < begin + (k + 1) * piece.0);
            let latencies: Vec<u64> = series[from..to].iter().map(|s| s.1).collect();
            // As in results: with enough requests the percentile itself is reported.
            if can_carry(latencies.len(), P) {
                return None;
            }
            let guess: Option<TailEstimate> = estimate(&latencies, Percentile::P9999).ok();
            Some(Piece {
                n: latencies.len() as u64,
                max_ns: Nanos(latencies.iter().copied().max().unwrap_or(0)),
                estimate_ns: guess.as_ref().map(|g| g.estimate_ns),
                upper_ns: guess.and_then(|g| g.upper_ns),
            })
        };
        let pieces = (0..whole).filter_map(of).collect();
        Some(Self { rate, n: series.len() as u64, p9999_ns: p9999, pieces })
    }
}

/// A run under one set-up.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LongRun {
    pub setup: String,
    /// Stalls of the host during the run.
    pub noise: Noise,
    /// Tasks with a rate, without those left out.
    pub tasks: Vec<TaskTails>,
    /// Tasks with a rate whose percentile even the whole run does not show: too few requests, or
    /// some that were never sent. These have the worst tails.
    pub left_out: usize,
}

/// Measurements and their conditions, as saved in [`FILE`](crate::experiment::Experiment::FILE).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TailsData {
    /// [`FORM`](crate::experiment::Experiment::FORM), checked on reading.
    pub schema: String,
    /// Host of the measurement.
    pub host: HostFacts,
    /// Command line of the measurement.
    pub command: String,
    /// Date of the last run, and version of the program.
    pub generated: String,
    /// Length of each run, s.
    pub seconds: f64,
    pub piece_ns: Nanos,
    /// Runs of all set-ups.
    pub runs: Vec<LongRun>,
}

/// Summary of some pieces.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Summary {
    /// Number of pieces summed up.
    pub pieces: usize,
    /// Pieces with an upper bound.
    pub bounded: usize,
    /// Share of the bounds that are not below the whole run's percentile.
    pub coverage: f64,
    /// Median of bound over the whole run's percentile.
    pub upper: f64,
    /// Median of estimate over the whole run's percentile.
    pub estimate: f64,
    /// Share of all pieces whose longest request is not below the whole run's percentile.
    pub by_longest: f64,
}

/// Computes the summary of the pieces of some tasks.
#[must_use]
pub fn summary<'a>(tasks: impl Iterator<Item = &'a TaskTails>) -> Summary {
    let (mut uppers, mut estimates, mut longest) = (Vec::new(), Vec::new(), Vec::new());
    for task in tasks {
        let over = |ns: Nanos| ns.0 as f64 / task.p9999_ns.0.max(1) as f64;
        for piece in &task.pieces {
            longest.push(over(piece.max_ns));
            uppers.extend(piece.upper_ns.map(over));
            estimates.extend(piece.estimate_ns.map(over));
        }
    }
    let covered = |of: &[f64]| of.iter().filter(|o| **o >= 1.0).count() as f64 / of.len().max(1) as f64;
    Summary {
        pieces: longest.len(),
        bounded: uppers.len(),
        coverage: covered(&uppers),
        by_longest: covered(&longest),
        upper: median(uppers),
        estimate: median(estimates),
    }
}

/// The claims of a result.
#[must_use]
pub fn claims(data: &TailsData) -> Vec<Claim> {
    let all = summary(data.runs.iter().flat_map(|r| &r.tasks));
    let (piece, tasks) = (data.piece_ns, data.runs.iter().map(|r| r.tasks.len()).sum::<usize>());
    let left_out: usize = data.runs.iter().map(|r| r.left_out).sum();
    vec![
        Claim::new(
            "tails.upper.coverage",
            format!("bounds (95 %) of p99.99 from {piece} of a task that are not below p99.99 of its whole run of {} s; {tasks} tasks, {left_out} left out",
                data.seconds),
            all.coverage,
            "share",
            all.bounded,
        )
        .at_least(PROMISED),
        Claim::new(
            "tails.upper.given",
            "pieces too short to show p99.99 for which there is a bound: the others have too few independent slow requests, or no distribution fits",
            all.bounded as f64 / all.pieces.max(1) as f64,
            "share",
            all.pieces,
        ),
        Claim::new("tails.upper.over_truth", "bound over p99.99 of the whole run, median", all.upper, "ratio", all.bounded),
        Claim::new("tails.estimate.over_truth", "estimate over p99.99 of the whole run, median", all.estimate, "ratio", all.bounded),
        Claim::new(
            "tails.longest.coverage",
            "the same pieces whose longest request, which replaces p99.99 without an estimate, is not below p99.99 of the whole run",
            all.by_longest,
            "share",
            all.pieces,
        ),
    ]
}

#[cfg(test)]
mod tests {
    use rtvirtio_stats::Random;

    use super::*;
    use crate::saved::Saved as _;

    /// 100 s at 1000/s with exponential latencies: p99.99 is 9.21 means.
    fn run(scale: impl Fn(u64) -> f64) -> TaskTails {
        let mut random = Random::new(3);
        let series: Vec<(u64, u64)> = (0..100_000u64)
            .map(|i| (i * 1_000_000, (-(1.0 - random.unit()).ln() * scale(i) * 1e6) as u64 + 50_000))
            .collect();
        TaskTails::cut(Iops(1000.0), &series, Nanos::from_millis(5_000)).unwrap()
    }

    #[test]
    fn pieces_are_judged_by_the_whole() {
        let task = run(|_| 1.0);
        assert_eq!(task.pieces.len(), 19, "the last one is not whole");
        assert!(task.pieces.iter().all(|p| (4_999..=5_001).contains(&p.n)));
        let s = summary([&task].into_iter());
        assert_eq!((s.pieces, s.bounded), (19, 19));
        assert!(
            s.coverage > 0.5 && s.upper > 1.0 && s.upper < 2.0 && (0.7..1.3).contains(&s.estimate),
            "{s:?}"
        );
        assert!(s.by_longest < 1.0, "{s:?}");
    }

    #[test]
    fn a_tail_that_comes_from_one_moment_is_not_covered_by_the_others() {
        let task = run(|i| if (30_000..31_000).contains(&i) { 50.0 } else { 1.0 });
        assert!(summary([&task].into_iter()).coverage < 0.5);
    }

    #[test]
    fn too_few_requests_have_no_truth() {
        let series: Vec<(u64, u64)> = (0..20_000).map(|i| (i * 1000, 5)).collect();
        assert_eq!(TaskTails::cut(Iops(1.0), &series, Nanos(1_000_000)), None);
    }

    #[test]
    fn the_piece_with_the_very_request_is_not_below() {
        // 100 s at 1000/s: ten of 100 000 may be longer than p99.99. Twelve are long, each in a
        // piece of its own; the last one is not whole.
        let long = |i: u64| if i % 9_000 == 500 { 1_000_000 + i } else { 1_000 };
        let series: Vec<(u64, u64)> = (0..100_000u64).map(|i| (i * 1_000_000, long(i))).collect();
        let task = TaskTails::cut(Iops(1000.0), &series, Nanos::from_millis(5_000)).unwrap();
        assert_eq!(task.p9999_ns, Nanos(1_009_500), "the second shortest of them, not rounded");
        let holding = task.pieces.iter().filter(|p| p.max_ns >= task.p9999_ns).count();
        assert_eq!(holding, 10);
    }

    #[test]
    fn the_coverage_is_claimed_at_the_level_that_is_promised() {
        let task = run(|_| 1.0);
        let host = HostFacts { cpus: 2, ..HostFacts::default() };
        let mut data = TailsData {
            schema: TailsData::SCHEMA.to_owned(),
            host,
            command: String::new(),
            generated: String::new(),
            seconds: 100.0,
            piece_ns: Nanos::from_millis(10_000),
            runs: vec![LongRun {
                setup: "x".to_owned(),
                noise: Noise::default(),
                tasks: vec![task],
                left_out: 0,
            }],
        };
        let back: TailsData = serde_json::from_str(&serde_json::to_string(&data).unwrap()).unwrap();
        assert_eq!(back, data);
        assert_eq!(claims(&data)[0].at_least, Some(0.95));
        data.runs.clear();
        assert!(!claims(&data)[0].met, "nothing was measured");
        assert_eq!(setups().len(), 4);
    }
}
