//! Accuracy of predictions and bounds on runs that the model has not learned from.

use std::collections::BTreeSet;
use std::sync::Arc;

use rtvirtio_learn::condition::conditions;
use rtvirtio_learn::dataset::Point;
use rtvirtio_learn::statistic::median;
use rtvirtio_learn::train::{TrainError, TrainSettings, fewest, fit};
use rtvirtio_model::learned::Regime;
use rtvirtio_model::{HostModel, Profile};
use rtvirtio_paper::PaperModels;
use rtvirtio_stats::Random;
use serde::Serialize;

use super::coverage::{Evaluation, coverage_by, wilson};
use super::held_out::predict_held_out;
use super::rates::Rates;

pub use super::held_out::HeldOut;

/// The models of one device that are judged together.
#[derive(Clone, Debug)]
pub struct Models {
    /// Ours, learned on the device.
    pub host: Arc<HostModel>,
    /// Models of the RT-VirtIO paper.
    pub paper: PaperModels,
}

impl Models {
    /// Without the paper's models.
    #[must_use]
    pub fn of_host(host: HostModel) -> Self {
        Self { host: Arc::new(host), paper: PaperModels::default() }
    }

    /// Fits all of them on measured runs.
    ///
    /// # Errors
    /// [`TrainError`], and networks that cannot be fitted.
    pub fn fit(
        points: &[Point],
        profile: &Profile,
        generated: &str,
        settings: &TrainSettings,
    ) -> anyhow::Result<Self> {
        let host = Arc::new(fit(points, profile, generated, settings)?);
        Ok(Self { host, paper: PaperModels::fit(points, profile, settings.seed)? })
    }
}

/// Default number of folds in cross-validation.
pub const FOLDS: usize = 5;

/// Accuracy of one predictor.
#[derive(Clone, Debug, Serialize)]
pub struct Score {
    /// Name of the predictor.
    pub model: &'static str,
    /// Tasks that it predicted.
    pub n: usize,
    /// Median of predicted / actual.
    pub bias: f64,
    /// Median of max(predicted / actual, actual / predicted): the typical factor by which it is
    /// wrong.
    pub factor: f64,
    /// 90th percentile of that factor.
    pub factor_p90: f64,
    /// Share of tasks whose tail was above the prediction.
    pub underestimated: f64,
    /// Median of actual - predicted in ms, as in the paper's Fig. 6.
    pub error_ms: f64,
    /// Share of errors in [-500, 0] ms.
    pub paper_band: f64,
}

/// Accuracy of the bound for tails as measured, with the host's own stalls.
#[derive(Clone, Debug, Serialize)]
pub struct WithHost {
    /// Number of held-out tasks.
    pub n: usize,
    /// Number of runs with host stalls so long that their share of the tail is unknown: judged
    /// here, and nowhere else.
    pub unknown: usize,
    /// Addition to the bound for the host's stalls, ms; the median of several models.
    pub adds_ms: f64,
    /// Share of tails below the bound.
    pub coverage: f64,
    /// Median of bound over measured tail.
    pub sharpness: f64,
    /// Coverage by group, worst first: name, n, share.
    pub groups: Vec<Group>,
}

/// A group of tasks: its name, how many, and the share of tails below the bound.
pub type Group = (String, usize, f64);

/// Result of one evaluation.
#[derive(Clone, Debug, Serialize)]
pub struct Accuracy {
    /// Runs that the model was fitted on; the largest number of several models.
    pub trained: usize,
    /// Number of held-out runs.
    pub held_out: usize,
    /// Accuracy of each predictor.
    pub scores: Vec<Score>,
    /// Coverage of the bound, overall.
    pub coverage: f64,
    /// 95 % interval of the coverage, as if each run had one task: tasks of one run are correlated.
    pub coverage_interval: [f64; 2],
    /// Accuracy of the bound with the host's own stalls, for tails as measured; absent where stalls
    /// are not known: then all else here is of tails as measured.
    pub with_host: Option<WithHost>,
    /// Coverage by group, worst first: name, n, share.
    pub groups: Vec<Group>,
    /// Median of upper / actual.
    pub sharpness: f64,
    /// Median of upper / actual by regime: name, n, median.
    pub sharpness_by_regime: Vec<(String, usize, f64)>,
    /// Accuracy of predicted rates where BFQ idles; after `Accuracy::as_measured_with` also of
    /// runs whose tails without the host's stalls are unknown.
    pub idling_rates: Rates,
    /// Same as `Accuracy::idling_rates`, where BFQ does not idle.
    pub non_idling_rates: Rates,
    /// Held-out tasks with their forecasts.
    pub held: Vec<HeldOut>,
}

/// Fits our model on `train` and judges it on the other points.
pub fn evaluate(
    train: &[Point],
    test: &[Point],
    profile: &Profile,
    settings: &TrainSettings,
) -> Result<Accuracy, TrainError> {
    judge(&[(Models::of_host(fit(train, profile, "", settings)?), test.to_vec())], profile)
}

/// Judges all models together on points that they were not fitted on.
pub fn judge(models: &[(Models, Vec<Point>)], profile: &Profile) -> Result<Accuracy, TrainError> {
    let trained = models.iter().map(|(model, _)| model.host.points).max().unwrap_or(0);
    let held_out = models.iter().map(|(_, test)| test.len()).sum();
    let mut all = Vec::new();
    for (model, test) in models {
        all.extend(predict_held_out(model, test, profile)?);
    }
    summarise(trained, held_out, all, &[])
}

impl Accuracy {
    /// Judges the bound for tails as measured on `others` too: runs in which the host stalled for
    /// so long that its share of the tail is unknown.
    pub fn as_measured_with(
        self,
        model: &Models,
        others: &[Point],
        profile: &Profile,
    ) -> Result<Self, TrainError> {
        summarise(self.trained, self.held_out, self.held, &predict_held_out(model, others, profile)?)
    }
}

/// Accuracy of the bound where BFQ does not idle, as in most plans.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NonIdling {
    /// Number of held-out tasks.
    pub n: usize,
    /// Share of tails below the bound.
    pub coverage: f64,
    /// Median of bound over tail.
    pub sharpness: f64,
}

impl Accuracy {
    /// Accuracy where BFQ does not idle, as [`Accuracy::coverage`]; and for tails as measured where
    /// the host's stalls are known.
    #[must_use]
    pub fn non_idling(&self) -> (NonIdling, Option<NonIdling>) {
        let held = || self.held.iter().filter(|h| h.is_non_idling());
        let measured = held().map(|h| Some(h.upper_with_host_ms? / h.with_host_ms.max(1e-6)));
        (
            NonIdling::from_ratios(held().map(HeldOut::bound_over_tail).collect()),
            measured.collect::<Option<Vec<f64>>>().map(NonIdling::from_ratios),
        )
    }
}

impl NonIdling {
    /// From the ratio of bound to tail of each task.
    fn from_ratios(over: Vec<f64>) -> Self {
        let below = over.iter().filter(|ratio| **ratio >= 1.0).count();
        let coverage = below as f64 / over.len().max(1) as f64;
        Self { n: over.len(), coverage, sharpness: median(over) }
    }
}

impl WithHost {
    /// `None` where the stalls of the held-out runs are not known.
    fn from_held_out(held: &[HeldOut], others: &[HeldOut]) -> Result<Option<Self>, TrainError> {
        let all = || held.iter().chain(others);
        let Some(uppers) = all().map(|h| h.upper_with_host_ms).collect::<Option<Vec<f64>>>() else {
            return Ok(None);
        };
        let (share, groups) =
            coverage(&all().collect::<Vec<_>>(), &|h| (h.with_host_ms, h.upper_with_host_ms.unwrap_or(0.0)))?;
        Ok(Some(Self {
            n: uppers.len(),
            unknown: others.iter().map(|h| h.id.as_str()).collect::<BTreeSet<_>>().len(),
            adds_ms: median(all().zip(&uppers).map(|(h, upper)| upper - h.upper_ms).collect()),
            coverage: share,
            sharpness: median(all().zip(&uppers).map(|(h, u)| u / h.with_host_ms.max(1e-6)).collect()),
            groups,
        }))
    }
}

/// Splits points into `k` pairs of a training and a test set; each condition is tested once. Runs
/// of one condition stay together.
#[must_use]
pub fn folds(points: &[Point], k: usize, seed: u64) -> Vec<(Vec<Point>, Vec<Point>)> {
    let mut groups = conditions(points);
    Random::new(seed).shuffle(&mut groups);
    let take = |of: &dyn Fn(usize) -> bool| -> Vec<Point> {
        let taken = groups.iter().enumerate().filter(|(g, _)| of(*g));
        taken.flat_map(|(_, members)| members).map(|&i| points[i].clone()).collect()
    };
    (0..k).map(|f| (take(&|g| g % k != f), take(&|g| g % k == f))).collect()
}

/// 95 % interval of the share of tasks below their bound, as if each run had only one: tasks of one
/// run are correlated.
fn interval_by_runs(held: &[HeldOut], share: f64) -> [f64; 2] {
    let runs = held.iter().map(|h| h.id.as_str()).collect::<BTreeSet<_>>().len();
    let below = (share * runs as f64).floor() as usize;
    wilson(below, runs, 0.95).map_or([0.0, 1.0], |i| [i.low, i.high])
}

fn summarise(
    trained: usize,
    held_out: usize,
    held: Vec<HeldOut>,
    others: &[HeldOut],
) -> Result<Accuracy, TrainError> {
    let (share, groups) = coverage(&held.iter().collect::<Vec<_>>(), &|h| (h.actual_ms, h.upper_ms))?;
    let sharpness_by_regime = Regime::ALL
        .iter()
        .map(|r| {
            let of: Vec<f64> =
                held.iter().filter(|h| h.regime == r.name()).map(HeldOut::bound_over_tail).collect();
            (r.name().to_owned(), of.len(), median(of))
        })
        .collect();
    let scores = vec![
        score("bound (expected)", &held, &|h| Some(h.expected_ms)),
        score("slice", &held, &|h| Some(h.slice_ms)),
        score("analytical, Table III", &held, &|h| h.analytical_ms),
        score("analytical, fitted", &held, &|h| h.fitted_ms),
        score("rt-virtio-mlp", &held, &|h| h.mlp_ms),
    ];
    Ok(Accuracy {
        trained,
        held_out,
        scores,
        coverage: share,
        coverage_interval: interval_by_runs(&held, share),
        with_host: WithHost::from_held_out(&held, others)?,
        groups,
        sharpness: median(held.iter().map(HeldOut::bound_over_tail).collect()),
        sharpness_by_regime,
        idling_rates: Rates::from_held_out(held.iter().chain(others).filter(|h| !h.is_non_idling())),
        non_idling_rates: Rates::from_held_out(held.iter().chain(others).filter(|h| h.is_non_idling())),
        held,
    })
}

/// Share of tails below their bounds, overall and by group, worst first. `judged` gives tail and
/// bound.
fn coverage(
    held: &[&HeldOut],
    judged: &dyn Fn(&HeldOut) -> (f64, f64),
) -> Result<(f64, Vec<Group>), TrainError> {
    let (actual, upper): (Vec<f64>, Vec<f64>) = held.iter().map(|h| judged(h)).unzip();
    let mut groups = Vec::new();
    let mut by = |name: &str, key: &dyn Fn(&HeldOut) -> String| -> Result<Evaluation, TrainError> {
        let mut names: Vec<String> = held.iter().map(|h| key(h)).collect();
        names.sort();
        names.dedup();
        let of: Vec<usize> = held.iter().map(|h| names.binary_search(&key(h)).unwrap_or_default()).collect();
        let e = coverage_by(&actual, &upper, &of)?;
        groups.extend(e.categories.iter().map(|(i, c)| (format!("{name} {}", names[*i]), c.n, c.share)));
        Ok(e)
    };
    let overall = by("VMs", &|h| h.vms.to_string())?.overall;
    by("regime", &|h| h.regime.to_owned())?;
    by("elevator", &|h| format!("{:?}", h.elevator))?;
    by("load with", &|h| if h.writes { "writes" } else { "reads only" }.to_owned())?;
    by("load", &|h| {
        if h.load < 0.3 {
            "below 30 %"
        } else if h.load < 0.6 {
            "30 to 60 %"
        } else {
            "above 60 %"
        }
        .to_owned()
    })?;
    groups.sort_by(|a, b| a.2.total_cmp(&b.2));
    Ok((overall.share, groups))
}

/// Fewest runs of a learning curve from which on the typical factor of the expected tail is within
/// a tenth of that with all runs; `None` where only the last size is: then more runs would help.
#[must_use]
pub fn enough(curve: &[Accuracy]) -> Option<usize> {
    let factor = |a: &Accuracy| a.scores[0].factor;
    let good = 1.1 * factor(curve.last()?);
    let late = curve.iter().rposition(|a| factor(a) > good).map_or(0, |i| i + 1);
    curve.get(late).filter(|_| late + 1 < curve.len()).map(|a| a.trained)
}

fn score(model: &'static str, held: &[HeldOut], of: &dyn Fn(&HeldOut) -> Option<f64>) -> Score {
    let pairs: Vec<(f64, f64)> =
        held.iter().filter_map(|h| of(h).map(|p| (p.max(1e-6), h.actual_ms.max(1e-6)))).collect();
    let n = pairs.len();
    let mut factors: Vec<f64> = pairs.iter().map(|(p, a)| (p / a).max(a / p)).collect();
    factors.sort_unstable_by(f64::total_cmp);
    let share = |count: usize| if n == 0 { 0.0 } else { count as f64 / n as f64 };
    Score {
        model,
        n,
        bias: median(pairs.iter().map(|(p, a)| p / a).collect()),
        factor: median(factors.clone()),
        factor_p90: factors.get((n * 9 / 10).min(n.saturating_sub(1))).copied().unwrap_or(0.0),
        underestimated: share(pairs.iter().filter(|(p, a)| a > p).count()),
        error_ms: median(pairs.iter().map(|(p, a)| a - p).collect()),
        paper_band: share(pairs.iter().filter(|(p, a)| (-500.0..=0.0).contains(&(a - p))).count()),
    }
}

/// Learning curve: accuracy over the number of points, for sizes with enough conditions for a
/// bound.
pub fn learning_curve(
    train: &[Point],
    test: &[Point],
    profile: &Profile,
    sizes: &[usize],
    settings: &TrainSettings,
) -> Result<Vec<Accuracy>, TrainError> {
    sizes
        .iter()
        .filter(|n| **n <= train.len() && conditions(&train[..**n]).len() >= fewest(settings.miss))
        .map(|&n| evaluate(&train[..n], test, profile, settings))
        .collect()
}

#[cfg(test)]
mod tests;
