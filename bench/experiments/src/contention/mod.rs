//! The RT-VirtIO paper's Figs. 2 and 5: growth of tails with contention, and accuracy of
//! predictions over settings.
//!
//! The paper does not print the rates of its Fig. 2; here 1, 2 and 3 workloads are a light, a light
//! and a medium, and one of each kind per VM. Its Fig. 5 varies `slice_idle` with `timeout_sync`
//! (a), the weight of one VM (b), and compares the three kinds of tasks (c).

mod compare;
mod measure;
mod page;
mod report;

pub use measure::{ContentionOptions, measure};
pub use report::report;

use rtvirtio_units::Nanos;
use serde::Serialize;

use rtvirtio_learn::dataset::{Outcome, Point, unpack};
use rtvirtio_learn::design::{HEAVY, LIGHT, MAX_VMS, MEDIUM};
use rtvirtio_learn::load::{Knobs, Stream};
use rtvirtio_learn::statistic::median;

/// Prefix of the name of a dataset.
pub const PREFIX: &str = "contention-";

/// Figure of the paper that a set-up belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Figure {
    /// 1 to 3 workloads on one and on four VMs, default BFQ.
    Fig2,
    /// 4 VMs with a heavy task: `slice_idle` and `timeout_sync`.
    Fig5a,
    /// 4 VMs with a heavy task: the weight of the first.
    Fig5b,
    /// 4 VMs with a task of each kind, default BFQ, and without idling.
    Fig5c,
}

impl Figure {
    /// All figures, in the paper's order.
    pub const ALL: [Self; 4] = [Self::Fig2, Self::Fig5a, Self::Fig5b, Self::Fig5c];

    /// Name in ids and tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Fig2 => "fig2",
            Self::Fig5a => "fig5a",
            Self::Fig5b => "fig5b",
            Self::Fig5c => "fig5c",
        }
    }
}

/// A load under one setting of the host.
#[derive(Clone, Debug, PartialEq)]
pub struct Setup {
    /// Figure that shows the set-up.
    pub figure: Figure,
    /// Label in the figure.
    pub label: String,
    /// Streams of the VMs.
    pub vms: Vec<Vec<Stream>>,
    /// BFQ settings of the host.
    pub knobs: Knobs,
}

impl Setup {
    /// Unique name, such as `fig2/1 VM x 1 tasks`.
    #[must_use]
    pub fn name(&self) -> String {
        format!("{}/{}", self.figure.name(), self.label)
    }

    /// Id of the dataset's point of a repetition.
    #[must_use]
    pub fn id(&self, repetition: usize) -> String {
        format!("{}/{repetition}", self.name())
    }
}

/// Set-ups of all figures.
#[must_use]
pub fn setups() -> Vec<Setup> {
    let load = |vms: usize, rates: &[f64]| vec![rates.iter().map(|r| Stream::paced(*r)).collect(); vms];
    let kinds = [LIGHT, MEDIUM, HEAVY];
    let mut out = Vec::new();
    for n in 1..=kinds.len() {
        for vms in [1, MAX_VMS] {
            out.push(Setup {
                figure: Figure::Fig2,
                label: format!("{vms} VM x {n} tasks"),
                vms: load(vms, &kinds[..n]),
                knobs: Knobs::default_bfq(vms),
            });
        }
    }
    let heavy = load(MAX_VMS, &[HEAVY]);
    for (idle, timeout) in [(0, 124), (1, 32), (1, 124), (4, 32), (4, 124), (8, 32), (8, 124)] {
        let mut knobs = Knobs::default_bfq(MAX_VMS);
        knobs.slice_idle = Nanos::from_millis(idle);
        knobs.timeout_sync = Nanos::from_millis(timeout);
        out.push(Setup {
            figure: Figure::Fig5a,
            label: format!("SI {idle} TS {timeout}"),
            vms: heavy.clone(),
            knobs,
        });
    }
    for weight in [50, 100, 300, 500, 700] {
        let mut knobs = Knobs::default_bfq(MAX_VMS);
        knobs.weights[0] = weight;
        out.push(Setup {
            figure: Figure::Fig5b,
            label: format!("weight {weight}"),
            vms: heavy.clone(),
            knobs,
        });
    }
    for (label, idle) in [("default", None), ("SI 0", Some(Nanos(0)))] {
        let mut knobs = Knobs::default_bfq(MAX_VMS);
        knobs.slice_idle = idle.unwrap_or(knobs.slice_idle);
        out.push(Setup { figure: Figure::Fig5c, label: label.to_owned(), vms: load(MAX_VMS, &kinds), knobs });
    }
    out
}

/// Values of one quantity over the repetitions.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Measured {
    /// Values in ms, one for each repetition.
    pub ms: Vec<f64>,
}

impl Measured {
    /// Median, smallest and largest; zeros without values.
    #[must_use]
    pub fn spread(&self) -> (f64, f64, f64) {
        let low = self.ms.iter().copied().reduce(f64::min).unwrap_or(0.0);
        let high = self.ms.iter().copied().reduce(f64::max).unwrap_or(0.0);
        (median(self.ms.clone()), low, high)
    }
}

/// Results of a set-up.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Figure of the paper.
    pub figure: Figure,
    /// Label; for Fig. 5c with the kind of task.
    pub label: String,
    /// Mean latency over all requests of the row's tasks.
    pub mean: Measured,
    /// p99.99 as measured, the median over the row's tasks.
    pub tail: Measured,
    /// p99.99 less the host's own stalls, where known: the tail that the learned models predict.
    pub awake: Measured,
    /// Index, in spec order, of the task whose predictions are drawn for the row.
    pub task: usize,
}

/// Rows of a set-up: one, or one for each kind of task in Fig. 5c. In Fig. 5b only the first VM
/// counts, whose weight changes.
#[must_use]
pub fn rows(setup: &Setup, points: &[Point]) -> Vec<Row> {
    let name = setup.name();
    let of: Vec<&Point> =
        points.iter().filter(|p| p.id.rsplit_once('/').is_some_and(|(n, _)| n == name)).collect();
    let tasks = setup.vms[0].len();
    let tails = |counts: &dyn Fn(usize) -> bool, tail: fn(&Outcome) -> Nanos| {
        let of_run = |p: &&Point| {
            let tasks = p.results.iter().enumerate().filter(|(i, _)| counts(*i));
            median(tasks.map(|(_, r)| tail(r).as_millis_f64()).collect())
        };
        Measured { ms: of.iter().map(of_run).collect() }
    };
    let row = |label: String, task: usize, counts: &dyn Fn(usize) -> bool| Row {
        figure: setup.figure,
        label,
        mean: Measured { ms: of.iter().map(|p| mean_ms(p, counts)).collect() },
        tail: tails(counts, |r| r.p9999),
        awake: tails(counts, Outcome::tail),
        task,
    };
    match setup.figure {
        Figure::Fig5b => vec![row(setup.label.clone(), 0, &|i| i < tasks)],
        Figure::Fig5c => (0..tasks)
            .map(|kind| {
                let name = ["light", "medium", "heavy"].get(kind).copied().unwrap_or("task");
                row(format!("{}, {name}", setup.label), kind, &|i| i % tasks == kind)
            })
            .collect(),
        Figure::Fig2 | Figure::Fig5a => vec![row(setup.label.clone(), 0, &|_| true)],
    }
}

/// Mean over all requests of some tasks, from their histograms: to 2 %.
fn mean_ms(point: &Point, counts: &dyn Fn(usize) -> bool) -> f64 {
    let (mut sum, mut n) = (0.0, 0u64);
    for (_, r) in point.results.iter().enumerate().filter(|(i, _)| counts(*i)) {
        for (edge, count) in unpack(&r.hist).unwrap_or_default() {
            // The bucket's middle: edges are 4.4 % apart.
            sum += edge.as_millis_f64() / 2f64.powf(1.0 / 32.0) * count as f64;
            n += count;
        }
    }
    sum / n.max(1) as f64
}

/// Growth from one VM to four.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Growth {
    /// Growth of the mean as measured.
    pub mean: f64,
    /// Growth of p99.99 as measured.
    pub tail: f64,
    /// Growth of p99.99 less the host's own stalls, which are most of the latency of a VM alone.
    pub awake: f64,
}

/// Growth in Fig. 2, for 1, 2 and 3 workloads: ratios of medians.
#[must_use]
pub fn growth(rows: &[Row]) -> Vec<Growth> {
    let fig2: Vec<&Row> = rows.iter().filter(|r| r.figure == Figure::Fig2 && !r.tail.ms.is_empty()).collect();
    fig2.chunks_exact(2)
        .map(|pair| {
            let ratio = |of: &dyn Fn(&Row) -> f64| of(pair[1]) / of(pair[0]).max(1e-6);
            Growth {
                mean: ratio(&|r| r.mean.spread().0),
                tail: ratio(&|r| r.tail.spread().0),
                awake: ratio(&|r| r.awake.spread().0),
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use rtvirtio_measure::VmKind;
    use rtvirtio_measure::noise::Noise;
    use rtvirtio_units::Iops;

    use super::*;
    use rtvirtio_learn::synthetic::alike;

    fn point(setup: &Setup, repetition: usize, tail_ms: u64) -> Point {
        let tail = Nanos::from_millis(tail_ms);
        let outcome = alike(100, Iops(100.0), tail);
        Point {
            id: setup.id(repetition),
            device: "qlc-nvme".to_owned(),
            kind: VmKind::Process,
            scheme: "contention".to_owned(),
            seed: 1,
            seconds: 8.0,
            knobs: setup.knobs.clone(),
            classes: None,
            vms: setup.vms.clone(),
            noise: Noise::default(),
            disk: None,
            results: vec![outcome; setup.vms.iter().map(Vec::len).sum()],
        }
    }

    #[test]
    fn names_are_unique_and_fig_2_pairs_one_vm_with_four() {
        let all = setups();
        let mut ids: Vec<String> = all.iter().map(|s| s.id(0)).collect();
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), all.len());
        let points: Vec<Point> = all
            .iter()
            .flat_map(|s| (0..3).map(move |r| point(s, r, if s.vms.len() == 1 { 2 } else { 40 + r as u64 })))
            .collect();
        let measured_rows: Vec<Row> = all.iter().flat_map(|s| rows(s, &points)).collect();
        assert_eq!(growth(&measured_rows).len(), 3);
        for g in growth(&measured_rows) {
            assert!((g.tail - 20.5).abs() < 0.01 && (g.mean / 20.5 - 1.0).abs() < 0.05, "{g:?}");
            assert_eq!(g.tail, g.awake, "nothing is known of stalls");
        }
        // The host's stalls may be most of the latency of a VM alone: they are reported separately,
        // not subtracted silently.
        let mut points = points;
        for p in points.iter_mut().filter(|p| p.vms.len() == 1) {
            p.results.iter_mut().for_each(|r| r.p9999_awake = Some(Nanos::from_millis(1)));
        }
        let rows: Vec<Row> = all.iter().flat_map(|s| rows(s, &points)).collect();
        assert!(growth(&rows).iter().all(|g| (g.tail - 20.5).abs() < 0.01 && (g.awake - 41.0).abs() < 0.01));
        assert_eq!(measured_rows.iter().filter(|r| r.figure == Figure::Fig5c).count(), 6);
        assert!(measured_rows.iter().all(|r| r.tail.ms.len() == 3));
    }
}
