//! The influence coefficients of the analytical model (RT-VirtIO paper, Table III), fitted to measured runs of this host.
//!
//! Least squares of the latency itself, as the paper trains, over the paced tasks of runs of the kind that the paper measured, with BFQ idling; every run counts alike. Intervals come from
//! refitting on conditions drawn with replacement (tasks of one run are alike, and so are runs of one condition). The guest's coefficients need runs
//! of guests; process VMs leave them at Table III's values.

use rtvirtio_model::{Analytical, Coefficients, Profile, TailModel};
use rtvirtio_spec::Spec;
use rtvirtio_stats::Random;
use serde::Serialize;

use crate::dataset::Point;
use crate::repeat::conditions;
use crate::stats::bootstrap::Bootstrap;
use crate::stats::minimize::{MinimizeError, MinimizeOptions, nelder_mead};
use crate::train::{inputs, median, paper_domain};

/// Refits for the intervals, the fewest with which the smallest and the largest are a 95 % interval.
const REPLICATES: usize = 39;
/// Confidence of the intervals.
const CONFIDENCE: f64 = 0.95;
/// Fewest runs: fewer do not tell three coefficients apart.
const FEWEST: usize = 20;

/// A fitted coefficient.
#[derive(Clone, Debug, Serialize)]
pub struct Fit {
    /// Its symbol.
    pub name: &'static str,
    /// Fitted value.
    pub value: f64,
    /// 95 % interval.
    pub interval: [f64; 2],
    /// Table III.
    pub published: f64,
    /// Whether the fit ended at a limit of what makes sense: then the data do not determine it.
    pub at_limit: bool,
}

/// A calibration and what it leaves unexplained.
#[derive(Clone, Debug, Serialize)]
pub struct Calibration {
    /// Runs under BFQ that it was fitted on.
    pub runs: usize,
    /// Their paced tasks.
    pub tasks: usize,
    /// The three host coefficients.
    pub fits: Vec<Fit>,
    /// Typical factor between prediction and measurement: median of max(p/a, a/p), with Table III and fitted.
    pub factor: [f64; 2],
    /// Share of the variance of ln(measured) that the fitted model explains; negative when a constant would do better.
    pub r_squared: f64,
    /// Deciles of ln(measured / predicted) after the fit.
    pub residuals: Vec<f64>,
    /// Those that models use, [`fitted`]: of Table III where these runs do not determine one; none where they determine none.
    #[serde(skip)]
    pub used: Option<Coefficients>,
}

impl Calibration {
    /// Name, and value that models use.
    #[must_use]
    pub fn in_use(&self) -> Vec<(&'static str, f64)> {
        let used = self.used.unwrap_or(Coefficients::TABLE_III);
        NAMES.into_iter().zip([used.weight, used.host_timeout, used.host_idle]).collect()
    }
}

/// Why there is no calibration.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CalibrateError {
    /// Too few runs.
    #[error(
        "{have} runs like the paper's (idling BFQ, 4 KiB reads at a rate), {need} are needed to tell its coefficients apart: measure more"
    )]
    TooFew {
        /// Runs given.
        have: usize,
        /// Runs needed.
        need: usize,
    },
    /// The fit ended at the limits of what makes sense.
    #[error("the runs do not determine any of the paper's coefficients: all ended at their limits")]
    Undetermined,
    /// The fit.
    #[error(transparent)]
    Minimize(#[from] MinimizeError),
}

/// What a run says: its inputs and each measured tail in s, `None` for tasks without a rate.
struct Run {
    spec: Spec,
    config: rtvirtio_model::Config,
    tails: Vec<Option<f64>>,
}

/// Limits of lambda of the weight, of `timeout_sync` and of `slice_idle`. A weight's coefficient above 20 gives a VM more than the
/// host has even at a share of 5 %; E(SI) must stay positive at the default, so its lambda ends below 1.
const LIMITS: [(f64, f64); 3] = [(0.01, 20.0), (0.0, 20.0), (0.0, 0.99)];

/// Runs of the kind that the paper measured: its `slice_idle` begins at 1 ms. Runs of another kind (floods, writes, no idling) pull the coefficients to their
/// limits, where no setting has an effect any more and the paper's search finds nothing to do.
fn of_the_paper(points: &[Point]) -> Vec<Point> {
    points.iter().filter(|p| paper_domain(p) && p.knobs.slice_idle.0 > 0).cloned().collect()
}

/// Those in the form of the fit.
fn runs(points: &[Point]) -> Result<Vec<Run>, CalibrateError> {
    let runs: Vec<Run> = points
        .iter()
        .map(|p| {
            let (spec, config) = inputs(p);
            let tail = |s: &crate::load::Stream, r: &crate::dataset::Outcome| {
                s.rate.map(|_| r.tail().as_secs_f64().max(1e-6))
            };
            let tails = p.tasks().map(|(_, s, r)| tail(s, r)).collect();
            Run { spec, config, tails }
        })
        .collect();
    if runs.len() < FEWEST {
        return Err(CalibrateError::TooFew { have: runs.len(), need: FEWEST });
    }
    Ok(runs)
}

const START: [f64; 3] =
    [Coefficients::TABLE_III.weight, Coefficients::TABLE_III.host_timeout, Coefficients::TABLE_III.host_idle];

/// Only the coefficients, without intervals. One that ends at its limit is that of Table III, and the others are fitted beside it: such a fit says
/// that a setting has no effect because the runs do not show it.
///
/// # Errors
/// [`CalibrateError`], also where the runs determine none.
pub fn fitted(points: &[Point], profile: &Profile) -> Result<Coefficients, CalibrateError> {
    let runs = runs(&of_the_paper(points))?;
    let all: Vec<usize> = (0..runs.len()).collect();
    determined(&runs, profile, solve(&runs, &all, profile, &START, &LIMITS)?)
}

/// The same from the best of all three.
fn determined(runs: &[Run], profile: &Profile, mut best: Vec<f64>) -> Result<Coefficients, CalibrateError> {
    let all: Vec<usize> = (0..runs.len()).collect();
    let mut limits = LIMITS;
    loop {
        let undetermined = |i: &usize| limits[*i] == LIMITS[*i] && at_limit(&best, *i);
        let Some(i) = (0..NAMES.len()).find(undetermined) else { return Ok(coefficients(&best)) };
        limits[i] = (START[i], START[i]);
        if limits.iter().zip(LIMITS).all(|(now, free)| *now != free) {
            return Err(CalibrateError::Undetermined);
        }
        best = solve(runs, &all, profile, &START, &limits)?;
    }
}

const NAMES: [&str; 3] = ["lambda_phi", "lambda_TS_H", "lambda_SI_H"];

/// Whether a coefficient is at an end of its range.
fn at_limit(at: &[f64], i: usize) -> bool {
    let (low, high) = LIMITS[i];
    (at[i] - low).min(high - at[i]) < 1e-3 * (high - low)
}

/// Fits the coefficients, with intervals and what the fit leaves unexplained.
///
/// # Errors
/// [`CalibrateError`].
pub fn calibrate(points: &[Point], profile: &Profile, seed: u64) -> Result<Calibration, CalibrateError> {
    let points = of_the_paper(points);
    let runs = runs(&points)?;
    let all: Vec<usize> = (0..runs.len()).collect();
    let start = START;
    let best = solve(&runs, &all, profile, &start, &LIMITS)?;
    let mut random = Random::new(seed);
    let mut drawn: Vec<Vec<f64>> = vec![Vec::new(); 3];
    let groups = conditions(&points);
    for _ in 0..REPLICATES {
        let sample: Vec<usize> =
            groups.iter().flat_map(|_| groups[random.below(groups.len())].iter().copied()).collect();
        for (to, v) in drawn.iter_mut().zip(solve(&runs, &sample, profile, &best, &LIMITS)?) {
            to.push(v);
        }
    }
    let fits = (0..3)
        .map(|i| Fit {
            name: NAMES[i],
            value: best[i],
            interval: interval(drawn[i].clone()),
            published: start[i],
            at_limit: at_limit(&best, i),
        })
        .collect();
    let errors =
        |at: &[f64]| -> Vec<f64> { all.iter().flat_map(|&i| residuals(&runs[i], profile, at)).collect() };
    let (before, after) = (errors(&start), errors(&best));
    let factor = |e: &[f64]| median(e.iter().map(|v| v.abs().exp()).collect());
    let actual: Vec<f64> = runs.iter().flat_map(|r| r.tails.iter().flatten().map(|t| t.ln())).collect();
    let mean = actual.iter().sum::<f64>() / actual.len().max(1) as f64;
    let total: f64 = actual.iter().map(|a| (a - mean).powi(2)).sum();
    let left: f64 = after.iter().map(|e| e * e).sum();
    Ok(Calibration {
        runs: runs.len(),
        tasks: after.len(),
        fits,
        factor: [factor(&before), factor(&after)],
        r_squared: 1.0 - left / total.max(f64::MIN_POSITIVE),
        residuals: deciles(after),
        used: determined(&runs, profile, best).ok(),
    })
}

fn coefficients(at: &[f64]) -> Coefficients {
    Coefficients { weight: at[0], host_timeout: at[1], host_idle: at[2], ..Coefficients::TABLE_III }
}

/// Measured and predicted tail of each paced task, s; nothing where the model does not speak.
fn pairs(run: &Run, profile: &Profile, at: &[f64]) -> Vec<(f64, f64)> {
    let model = Analytical { coefficients: coefficients(at), ..Analytical::default() };
    let Ok(forecasts) = model.forecast(profile, &run.spec, &run.config) else { return Vec::new() };
    let both = run.tails.iter().zip(forecasts);
    both.filter_map(|(tail, f)| tail.map(|tail| (tail, f.latency_ns.as_secs_f64()))).collect()
}

/// ln(measured / predicted) of each paced task.
fn residuals(run: &Run, profile: &Profile, at: &[f64]) -> Vec<f64> {
    pairs(run, profile, at).into_iter().map(|(a, p)| a.ln() - p.max(1e-6).ln()).collect()
}

/// Mean squared error of the latency over the paced tasks of a run, s^2.
fn squared_error(run: &Run, profile: &Profile, at: &[f64]) -> f64 {
    let pairs = pairs(run, profile, at);
    pairs.iter().map(|(a, p)| (a - p) * (a - p)).sum::<f64>() / pairs.len().max(1) as f64
}

fn solve(
    runs: &[Run],
    sample: &[usize],
    profile: &Profile,
    start: &[f64],
    limits: &[(f64, f64)],
) -> Result<Vec<f64>, MinimizeError> {
    let objective = |at: &[f64]| sample.iter().map(|&i| squared_error(&runs[i], profile, at)).sum::<f64>();
    let options = MinimizeOptions {
        x_tolerance: 1e-3,
        f_tolerance: 1e-6,
        max_evaluations: 300,
        restarts: 1,
        ..MinimizeOptions::default()
    };
    Ok(nelder_mead(objective, start, limits, &options)?.point)
}

/// Percentile interval of the refits; NaN of none.
fn interval(mut v: Vec<f64>) -> [f64; 2] {
    v.sort_unstable_by(f64::total_cmp);
    let drawn = Bootstrap { estimate: f64::NAN, replicates: v, failed: 0, block: 1.0 };
    drawn.percentile_interval(CONFIDENCE).map_or([f64::NAN; 2], |i| [i.low, i.high])
}

fn deciles(mut v: Vec<f64>) -> Vec<f64> {
    v.sort_unstable_by(f64::total_cmp);
    (0..=10).filter_map(|i| v.get((v.len().saturating_sub(1)) * i / 10).copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interval_is_of_the_ranks_that_it_says() {
        let of = |n: u32| interval((1..=n).rev().map(f64::from).collect());
        // 1 of 40 gaps between 39 values is 2.5 %, 5 of 200 between 199.
        assert_eq!(of(39), [1.0, 39.0]);
        assert_eq!(of(199), [5.0, 195.0]);
        assert_eq!(of(3), [1.0, 3.0]);
        assert!(interval(Vec::new()).iter().all(|v| v.is_nan()));
    }
}
