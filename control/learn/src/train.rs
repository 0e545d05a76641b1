//! Fits a host model to measured runs.

use rtvirtio_model::learned::{HOST_MODEL_SCHEMA, HostModel, NAMES, Regime, WIDTH, features};
use rtvirtio_model::{ModelError, Profile};
use rtvirtio_stats::conformal::{ConformalError, Quantile, calibrate};
use rtvirtio_stats::forest::{Forest, ForestError, ForestOptions};
use rtvirtio_stats::{Rows, RowsError};
use rtvirtio_units::Nanos;

use crate::condition::{conditions, lost};
use crate::dataset::Point;

mod guests;
mod non_idling;

pub use crate::condition::inputs;
pub use crate::statistic::median;
pub use guests::fit_guests;

/// Share of runs whose tail may lie above the bound.
pub const MISS: f64 = 0.01;

/// Fewest conditions for a model at 99 %.
pub const FEWEST: usize = fewest(MISS);

/// Fewest conditions for a bound that a share `miss` of runs may miss: a fifth more than the 1 /
/// miss that conformal prediction needs. Runs of one condition count as one.
#[must_use]
pub const fn fewest(miss: f64) -> usize {
    (1.2 / miss + 0.5) as usize
}

/// Errors of fitting a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// Too few conditions for the confidence.
    #[error(
        "runs of {have} different conditions, {need} are needed for a bound at {percent:.0} %: measure for longer"
    )]
    TooFew {
        /// Confidence asked for, %.
        percent: f64,
        /// Number of conditions given.
        have: usize,
        /// Least number of conditions.
        need: usize,
    },
    /// The host's stalls are known for some tails only.
    #[error(
        "the host's own stalls are known of {known} of {of} tails and would be in the others: measure all runs in the same way"
    )]
    Mixed {
        /// Number of tails with known stalls.
        known: usize,
        /// Number of all tails.
        of: usize,
    },
    /// The latency added by a lone guest was not measured.
    #[error(
        "what a guest adds when it runs alone was not measured before these runs: measure them again with `rtvirtio-bench sweep --qemu N`, into a new file"
    )]
    NoGuest,
    /// Too few conditions in guests for any confidence.
    #[error(
        "guests ran {have} different conditions, {need} are needed for a bound at {percent:.0} %: measure more with `rtvirtio-bench sweep --qemu N`"
    )]
    TooFewGuests {
        /// Lowest confidence tried, %.
        percent: f64,
        /// Number of conditions given.
        have: usize,
        /// Least number of conditions.
        need: usize,
    },
    /// Runs in guests and of processes have different lengths.
    #[error(
        "runs last {guests} s in guests and {processes} s as processes, and longer ones have longer tails: measure both for as long"
    )]
    OtherLength {
        /// Length of runs in guests, s.
        guests: f64,
        /// Length of runs of process VMs, s.
        processes: f64,
    },
    /// A run that the formulas cannot read.
    #[error("run {id}: {source}")]
    Point {
        /// Name of the run.
        id: String,
        /// Error of the formulas.
        source: ModelError,
    },
    /// The forest cannot be fitted.
    #[error(transparent)]
    Forest(#[from] ForestError),
    /// A row of features is invalid.
    #[error(transparent)]
    Row(#[from] RowsError),
    /// The bound cannot be calibrated.
    #[error(transparent)]
    Conformal(#[from] ConformalError),
}

/// A task of one run, as input of the learned models.
#[derive(Clone, Debug)]
pub struct Row {
    /// Index of the run in the points given.
    pub point: usize,
    /// Index of the condition: runs of the same load under the same settings are never on both
    /// sides of a fold.
    pub condition: usize,
    /// Features of the forest.
    pub x: [f64; WIDTH],
    /// Regime of the run.
    pub regime: Regime,
    /// Measured tail, s: less the host's own stalls where they are known.
    pub actual: f64,
    /// Measured tail with the host's stalls, s; `None` where they are not known.
    pub with_host: Option<f64>,
    /// Share of the declared rate that was lost.
    pub lost: f64,
}

/// Rows of the tasks with a rate: those without one have no target to meet.
///
/// # Errors
/// [`TrainError::Point`].
pub fn rows(points: &[Point], profile: &Profile) -> Result<Vec<Row>, TrainError> {
    let mut out = Vec::new();
    let mut condition_of = vec![0; points.len()];
    for (c, members) in conditions(points).into_iter().enumerate() {
        members.into_iter().for_each(|i| condition_of[i] = c);
    }
    for (i, point) in points.iter().enumerate() {
        let (spec, config) = inputs(point);
        let (x, _) = features(profile, &spec, &config, point.seconds)
            .map_err(|source| TrainError::Point { id: point.id.clone(), source })?;
        let regime = Regime::from_config(&spec, &config);
        for (task, (_, stream, outcome)) in point.tasks().enumerate() {
            let Some(lost) = lost(stream, outcome) else { continue };
            out.push(Row {
                point: i,
                condition: condition_of[i],
                x: x[task],
                regime,
                actual: outcome.tail().as_secs_f64().max(1e-6),
                with_host: outcome.p9999_awake.map(|_| outcome.p9999.as_secs_f64().max(1e-6)),
                lost,
            });
        }
    }
    Ok(out)
}

/// Settings of a fit.
#[derive(Clone, Debug)]
pub struct TrainSettings {
    /// Number of trees of the forest.
    pub trees: usize,
    /// Seed of all random choices.
    pub seed: u64,
    /// Share of runs that may lie above the bound.
    pub miss: f64,
}

impl Default for TrainSettings {
    fn default() -> Self {
        Self { trees: 150, seed: 1, miss: MISS }
    }
}

/// Runs whose tails are comparable: if the host's stalls are known in more than half of the runs,
/// those runs; else all of them, with tails as measured.
#[must_use]
pub fn comparable(points: &[Point]) -> Vec<Point> {
    let known = |p: &&Point| p.tasks().all(|(_, s, r)| s.rate.is_none() || r.p9999_awake.is_some());
    let with: Vec<Point> = points.iter().filter(known).cloned().collect();
    if 2 * with.len() > points.len() {
        return with;
    }
    let mut all = points.to_vec();
    all.iter_mut().flat_map(|p| &mut p.results).for_each(|r| r.p9999_awake = None);
    all
}

/// Addition to the bounds for tails as measured, with the host's own stalls, to hold in a share
/// `1 - miss` of runs like these; `None` where the runs do not separate the stalls. `uppers` are
/// ln(bound in s) by trees that did not see the row.
fn host_stalls(rows: &[Row], uppers: &[f64], miss: f64) -> Result<Option<Nanos>, TrainError> {
    let over = |(r, upper): (&Row, &f64)| Some(r.with_host? - upper.exp());
    let Some(over) = rows.iter().zip(uppers).map(over).collect::<Option<Vec<f64>>>() else { return Ok(None) };
    let groups: Vec<usize> = rows.iter().map(|r| r.condition).collect();
    Ok(Some(Nanos::from_secs_f64(calibrate(&over, &groups, miss)?.score.max(0.0))))
}

/// Fits a model on points of one device.
///
/// The scores of the bound come from trees that did not learn from a row's condition.
///
/// # Errors
/// [`TrainError`]; too few runs are refused.
pub fn fit(
    points: &[Point],
    profile: &Profile,
    generated: &str,
    settings: &TrainSettings,
) -> Result<HostModel, TrainError> {
    let (have, need) = (conditions(points).len(), fewest(settings.miss));
    if have < need {
        return Err(TrainError::TooFew { percent: 100.0 * (1.0 - settings.miss), have, need });
    }
    let rows = rows(points, profile)?;
    let known = rows.iter().filter(|r| r.with_host.is_some()).count();
    if known != 0 && known != rows.len() {
        return Err(TrainError::Mixed { known, of: rows.len() });
    }
    let one = bounded_forest(&rows, &Start::of_all(settings.miss), settings)?;
    let split = non_idling::split(&one, &rows, settings)?;
    let (bound, host_stalls, non_idling) = match split {
        Some(split) => (split.idling, split.idling_host, Some(split.non_idling)),
        None => (one.bound, host_stalls(&rows, &one.uppers, settings.miss)?, None),
    };
    Ok(HostModel {
        schema: HOST_MODEL_SCHEMA.to_owned(),
        profile: profile.clone(),
        features: NAMES.iter().map(|n| (*n).to_owned()).collect(),
        seconds: median(points.iter().map(|p| p.seconds).collect()),
        points: points.len(),
        rows: rows.len(),
        generated: generated.to_owned(),
        forest: one.forest,
        high: one.high,
        bound,
        host_stalls,
        non_idling,
        guests: None,
    })
}

/// Bound before calibration.
struct Start {
    /// Level of the forest's quantile.
    high: f64,
    /// Least number of tasks in a leaf.
    leaf: usize,
    /// ln of the latency, in s, to which the forest learns the ratio.
    base: fn(&Row) -> f64,
    /// Share of the rate that the forest assumes lost.
    lost: fn(&Row) -> f64,
}

impl Start {
    /// For rows of all regimes: the tail itself, from the quantile of the bound.
    fn of_all(miss: f64) -> Self {
        Self { high: 1.0 - miss, leaf: ForestOptions::default().leaf, base: |_| 0.0, lost: |_| 0.0 }
    }
}

/// A forest with a calibrated score of its high quantile.
struct Bounded {
    forest: Forest,
    high: f64,
    bound: Quantile,
    /// ln(high quantile in s) of each row by the trees that did not see it.
    starts: Vec<f64>,
    /// ln(bound in s) of each row: its start plus the score.
    uppers: Vec<f64>,
}

/// Fits a forest on rows and calibrates its bound.
///
/// Conformalised quantile regression (Romano, Patterson and Candes 2019): the quantile reflects the
/// uncertainty of a tail, the score its error on runs that the trees did not see.
fn bounded_forest(rows: &[Row], start: &Start, settings: &TrainSettings) -> Result<Bounded, TrainError> {
    let groups: Vec<usize> = rows.iter().map(|r| r.condition).collect();
    let lost: Vec<f64> = rows.iter().map(|r| r.lost - (start.lost)(r)).collect();
    let mut table = Rows::new(WIDTH);
    for (r, w) in rows.iter().zip(equal_runs(&groups)) {
        table.push(&r.x, r.actual.ln() - (start.base)(r), w)?;
    }
    let options = ForestOptions {
        trees: settings.trees,
        seed: settings.seed,
        leaf: start.leaf,
        ..ForestOptions::default()
    };
    let (forest, report) = Forest::fit(&table, &lost, &groups, &[start.high], &options)?;
    let starts: Vec<f64> = rows.iter().zip(&report.quantiles).map(|(r, q)| q[0] + (start.base)(r)).collect();
    let bound = calibrated(rows, &starts, settings.miss)?;
    let uppers = starts.iter().map(|s| s + bound.score).collect();
    Ok(Bounded { forest, high: start.high, bound, starts, uppers })
}

/// Score that the excess of tails over `starts` exceeds in at most a share `miss` of new runs.
fn calibrated(rows: &[Row], starts: &[f64], miss: f64) -> Result<Quantile, ConformalError> {
    let scores: Vec<f64> = rows.iter().zip(starts).map(|(r, start)| r.actual.ln() - start).collect();
    let groups: Vec<usize> = rows.iter().map(|r| r.condition).collect();
    calibrate(&scores, &groups, miss)
}

/// Row weights that give every run the same total weight.
#[must_use]
pub fn equal_runs(groups: &[usize]) -> Vec<f64> {
    let mut sizes = std::collections::BTreeMap::new();
    for g in groups {
        *sizes.entry(g).or_insert(0usize) += 1;
    }
    groups.iter().map(|g| 1.0 / sizes[g] as f64).collect()
}

#[cfg(test)]
mod tests;
