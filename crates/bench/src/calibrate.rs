//! The influence coefficients of the analytical model (RT-VirtIO paper, Table III), fitted to measured runs of this host.
//!
//! Least squares of ln(predicted / measured) over the paced tasks of runs under BFQ, every run counting alike. Intervals come from
//! refitting on conditions drawn with replacement (tasks of one run are alike, and so are runs of one condition). The guest's coefficients need runs
//! of guests; process VMs leave them at Table III's values.

use rtvirtio_model::{Analytical, Coefficients, Elevator, Profile, TailModel};
use rtvirtio_spec::Spec;
use rtvirtio_stats::Random;
use rtvirtio_stats::minimize::{MinimizeError, MinimizeOptions, nelder_mead};
use serde::Serialize;

use crate::dataset::Point;
use crate::repeat::conditions;
use crate::train::{inputs, median};

/// Refits for the intervals, the fewest with which the smallest and the largest are a 95 % interval.
const REPLICATES: usize = 39;
/// Confidence of the intervals.
const CONFIDENCE: f64 = 0.95;
/// Fewest runs under BFQ: fewer do not tell three coefficients apart.
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
    /// The coefficients.
    #[serde(skip)]
    pub coefficients: Coefficients,
}

/// Why there is no calibration.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CalibrateError {
    /// Too few runs.
    #[error("{have} runs under BFQ, {need} are needed to tell the coefficients apart: measure more")]
    TooFew {
        /// Runs given.
        have: usize,
        /// Runs needed.
        need: usize,
    },
    /// The fit.
    #[error(transparent)]
    Minimize(#[from] MinimizeError),
}

/// What a run says: its inputs and the logarithm of each measured tail, `None` for tasks without a rate.
struct Run {
    spec: Spec,
    config: rtvirtio_model::Config,
    logs: Vec<Option<f64>>,
}

/// Limits of lambda of the weight, of `timeout_sync` and of `slice_idle`. A weight's coefficient above 20 gives a VM more than the
/// host has even at a share of 5 %; E(SI) must stay positive at the default, so its lambda ends below 1.
const LIMITS: [(f64, f64); 3] = [(0.01, 20.0), (0.0, 20.0), (0.0, 0.99)];

/// Runs under BFQ.
fn bfq(points: &[Point]) -> Vec<Point> {
    points.iter().filter(|p| p.knobs.elevator == Elevator::Bfq).cloned().collect()
}

/// Runs under BFQ in the form of the fit.
fn runs(points: &[Point]) -> Result<Vec<Run>, CalibrateError> {
    let runs: Vec<Run> = bfq(points)
        .iter()
        .map(|p| {
            let (spec, config) = inputs(p);
            let log = |s: &crate::load::Stream, r: &crate::dataset::Outcome| {
                s.rate.map(|_| r.tail().as_secs_f64().max(1e-6).ln())
            };
            let logs = p.tasks().map(|(_, s, r)| log(s, r)).collect();
            Run { spec, config, logs }
        })
        .collect();
    if runs.len() < FEWEST {
        return Err(CalibrateError::TooFew { have: runs.len(), need: FEWEST });
    }
    Ok(runs)
}

const START: [f64; 3] =
    [Coefficients::TABLE_III.weight, Coefficients::TABLE_III.host_timeout, Coefficients::TABLE_III.host_idle];

/// Only the coefficients, without intervals.
///
/// # Errors
/// [`CalibrateError`].
pub fn fitted(points: &[Point], profile: &Profile) -> Result<Coefficients, CalibrateError> {
    let runs = runs(points)?;
    let all: Vec<usize> = (0..runs.len()).collect();
    Ok(coefficients(&solve(&runs, &all, profile, &START)?))
}

/// Fits the coefficients, with intervals and what the fit leaves unexplained.
///
/// # Errors
/// [`CalibrateError`].
pub fn calibrate(points: &[Point], profile: &Profile, seed: u64) -> Result<Calibration, CalibrateError> {
    let runs = runs(points)?;
    let all: Vec<usize> = (0..runs.len()).collect();
    let start = START;
    let best = solve(&runs, &all, profile, &start)?;
    let mut random = Random::new(seed);
    let mut drawn: Vec<Vec<f64>> = vec![Vec::new(); 3];
    let groups = conditions(&bfq(points));
    for _ in 0..REPLICATES {
        let sample: Vec<usize> =
            groups.iter().flat_map(|_| groups[random.below(groups.len())].iter().copied()).collect();
        for (to, v) in drawn.iter_mut().zip(solve(&runs, &sample, profile, &best)?) {
            to.push(v);
        }
    }
    let names = ["lambda_phi", "lambda_TS_H", "lambda_SI_H"];
    let fits = (0..3)
        .map(|i| Fit {
            name: names[i],
            value: best[i],
            interval: interval(drawn[i].clone()),
            published: start[i],
            at_limit: {
                let (low, high) = LIMITS[i];
                (best[i] - low).min(high - best[i]) < 1e-3 * (high - low)
            },
        })
        .collect();
    let errors =
        |at: &[f64]| -> Vec<f64> { all.iter().flat_map(|&i| residuals(&runs[i], profile, at)).collect() };
    let (before, after) = (errors(&start), errors(&best));
    let factor = |e: &[f64]| median(e.iter().map(|v| v.abs().exp()).collect());
    let actual: Vec<f64> = runs.iter().flat_map(|r| r.logs.iter().flatten().copied()).collect();
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
        coefficients: coefficients(&best),
    })
}

fn coefficients(at: &[f64]) -> Coefficients {
    Coefficients { weight: at[0], host_timeout: at[1], host_idle: at[2], ..Coefficients::TABLE_III }
}

/// ln(measured / predicted) of each paced task; nothing where the model does not speak.
fn residuals(run: &Run, profile: &Profile, at: &[f64]) -> Vec<f64> {
    let model = Analytical { coefficients: coefficients(at), ..Analytical::default() };
    let Ok(forecasts) = model.forecast(profile, &run.spec, &run.config) else { return Vec::new() };
    run.logs
        .iter()
        .zip(forecasts)
        .filter_map(|(log, f)| log.map(|log| log - f.latency_ns.as_secs_f64().max(1e-6).ln()))
        .collect()
}

fn solve(
    runs: &[Run],
    sample: &[usize],
    profile: &Profile,
    start: &[f64],
) -> Result<Vec<f64>, MinimizeError> {
    let objective = |at: &[f64]| {
        sample
            .iter()
            .map(|&i| {
                let r = residuals(&runs[i], profile, at);
                r.iter().map(|e| e * e).sum::<f64>() / r.len().max(1) as f64
            })
            .sum::<f64>()
    };
    let options = MinimizeOptions {
        x_tolerance: 1e-3,
        f_tolerance: 1e-6,
        max_evaluations: 300,
        restarts: 1,
        ..MinimizeOptions::default()
    };
    Ok(nelder_mead(objective, start, &LIMITS, &options)?.point)
}

/// Replicates of rank `(R + 1) level`, rounded outwards (Davison and Hinkley 1997, section 5.2.1).
fn interval(mut v: Vec<f64>) -> [f64; 2] {
    v.sort_unstable_by(f64::total_cmp);
    let rank = ((v.len() + 1) as f64 * (1.0 - CONFIDENCE) / 2.0 + 1e-9).floor().max(1.0) as usize;
    let at = |index: Option<usize>| index.and_then(|i| v.get(i)).copied().unwrap_or(f64::NAN);
    [at(Some(rank - 1)), at(v.len().checked_sub(rank))]
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
