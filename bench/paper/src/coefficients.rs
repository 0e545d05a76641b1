//! The influence coefficients of the analytical model (RT-VirtIO paper, Table III), fitted to
//! measured runs of this host.
//!
//! Least squares of the latency itself, as the paper trains, over the paced tasks of runs like the
//! paper's, with BFQ idling; every run has the same weight. The guest's coefficients need runs of
//! guests; process VMs leave them at Table III's values.

use rtvirtio_learn::condition::{inputs, paper_domain};
use rtvirtio_learn::dataset::{Outcome, Point};
use rtvirtio_learn::load::Stream;
use rtvirtio_model::{Analytical, Coefficients, Config, Profile, TailModel};
use rtvirtio_spec::Spec;

use crate::minimize::{MinimizeOptions, nelder_mead};

/// Fewest runs that determine the three coefficients.
const FEWEST: usize = 20;

/// Symbols of the coefficients that are fitted.
pub const NAMES: [&str; 3] = ["lambda_phi", "lambda_TS_H", "lambda_SI_H"];

/// Limits of lambda of the weight, of `timeout_sync` and of `slice_idle`. A weight's coefficient
/// above 20 gives a VM more than the host has even at a share of 5 %; E(SI) must stay positive at
/// the default, so its lambda ends below 1.
pub const LIMITS: [(f64, f64); 3] = [(0.01, 20.0), (0.0, 20.0), (0.0, 0.99)];

/// Start of the search: the published coefficients.
pub const START: [f64; 3] =
    [Coefficients::TABLE_III.weight, Coefficients::TABLE_III.host_timeout, Coefficients::TABLE_III.host_idle];

/// Errors of fitting coefficients.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CalibrateError {
    /// Fewer runs than coefficients need.
    #[error(
        "{have} runs like the paper's (idling BFQ, 4 KiB reads at a rate), {need} are needed to tell its coefficients apart: measure more"
    )]
    TooFew {
        /// Number of runs like the paper's.
        have: usize,
        /// Least number of runs: 20.
        need: usize,
    },
    /// All fitted coefficients ended at their limits.
    #[error("the runs do not determine any of the paper's coefficients: all ended at their limits")]
    Undetermined,
}

/// A run: spec, settings and the measured tail of each task in s, `None` for tasks without a rate.
struct Run {
    spec: Spec,
    config: Config,
    tails: Vec<Option<f64>>,
}

/// Runs like the paper's, in the form of the fit.
pub struct PaperRuns(Vec<Run>);

/// Selects runs like the paper's: `slice_idle` from 1 ms. Other runs (floods, writes, no idling)
/// pull the coefficients to their limits, where no setting has an effect any more and the paper's
/// search finds nothing to do.
#[must_use]
pub fn of_the_paper(points: &[Point]) -> Vec<Point> {
    points.iter().filter(|p| paper_domain(p) && p.knobs.slice_idle.0 > 0).cloned().collect()
}

/// Whether a coefficient is at an end of its range.
#[must_use]
pub fn at_limit(at: &[f64], i: usize) -> bool {
    let (low, high) = LIMITS[i];
    (at[i] - low).min(high - at[i]) < 1e-3 * (high - low)
}

/// Fits the coefficients, without intervals. A coefficient that ends at its limit is set to Table
/// III's, and the others are fitted again: there the runs show no effect of the setting.
///
/// # Errors
/// [`CalibrateError`], also where the runs determine no coefficient.
pub fn fitted(points: &[Point], profile: &Profile) -> Result<Coefficients, CalibrateError> {
    let runs = PaperRuns::from_points(&of_the_paper(points))?;
    let best = runs.solve(&runs.all(), profile, &START, &LIMITS);
    runs.determined(profile, best)
}

impl PaperRuns {
    /// From points that are all like the paper's, in their order.
    ///
    /// # Errors
    /// [`CalibrateError::TooFew`].
    pub fn from_points(points: &[Point]) -> Result<Self, CalibrateError> {
        let tail = |s: &Stream, r: &Outcome| s.rate.map(|_| r.tail().as_secs_f64().max(1e-6));
        let runs: Vec<Run> = points
            .iter()
            .map(|p| {
                let (spec, config) = inputs(p);
                Run { spec, config, tails: p.tasks().map(|(_, s, r)| tail(s, r)).collect() }
            })
            .collect();
        if runs.len() < FEWEST {
            return Err(CalibrateError::TooFew { have: runs.len(), need: FEWEST });
        }
        Ok(Self(runs))
    }

    /// Indices of all runs, for `PaperRuns::solve`.
    #[must_use]
    pub fn all(&self) -> Vec<usize> {
        (0..self.0.len()).collect()
    }

    /// Measured tails of the paced tasks, run by run, s.
    pub fn tails(&self) -> impl Iterator<Item = f64> {
        self.0.iter().flat_map(|run| run.tails.iter().flatten().copied())
    }

    /// Coefficients within `limits` with the least error on a sample of runs, which may hold a run
    /// several times.
    #[must_use]
    pub fn solve(
        &self,
        sample: &[usize],
        profile: &Profile,
        start: &[f64],
        limits: &[(f64, f64)],
    ) -> Vec<f64> {
        let objective =
            |at: &[f64]| sample.iter().map(|&i| squared_error(&self.0[i], profile, at)).sum::<f64>();
        let options =
            MinimizeOptions { x_tolerance: 1e-3, f_tolerance: 1e-6, max_evaluations: 300, restarts: 1 };
        nelder_mead(objective, start, limits, &options).point
    }

    /// Same as [`fitted`], from the best fit of all three coefficients.
    ///
    /// # Errors
    /// As of [`fitted`].
    pub fn determined(&self, profile: &Profile, mut best: Vec<f64>) -> Result<Coefficients, CalibrateError> {
        let all = self.all();
        let mut limits = LIMITS;
        loop {
            let undetermined = |i: &usize| limits[*i] == LIMITS[*i] && at_limit(&best, *i);
            let Some(i) = (0..NAMES.len()).find(undetermined) else { return Ok(coefficients(&best)) };
            limits[i] = (START[i], START[i]);
            if limits.iter().zip(LIMITS).all(|(fixed, free)| *fixed != free) {
                return Err(CalibrateError::Undetermined);
            }
            best = self.solve(&all, profile, &START, &limits);
        }
    }

    /// ln(measured / predicted) of the paced tasks of all runs.
    #[must_use]
    pub fn residuals(&self, profile: &Profile, at: &[f64]) -> Vec<f64> {
        let tasks = self.0.iter().flat_map(|run| pairs(run, profile, at));
        tasks.map(|(a, p)| a.ln() - p.max(1e-6).ln()).collect()
    }
}

fn coefficients(at: &[f64]) -> Coefficients {
    Coefficients { weight: at[0], host_timeout: at[1], host_idle: at[2], ..Coefficients::TABLE_III }
}

/// Measured and predicted tail of each paced task, s; empty where the model does not apply.
fn pairs(run: &Run, profile: &Profile, at: &[f64]) -> Vec<(f64, f64)> {
    let model = Analytical { coefficients: coefficients(at), ..Analytical::default() };
    let Ok(forecasts) = model.forecast(profile, &run.spec, &run.config) else { return Vec::new() };
    let both = run.tails.iter().zip(forecasts);
    both.filter_map(|(tail, f)| tail.map(|tail| (tail, f.latency_ns.as_secs_f64()))).collect()
}

/// Mean squared error of the latency over the paced tasks of a run, s^2.
fn squared_error(run: &Run, profile: &Profile, at: &[f64]) -> f64 {
    let pairs = pairs(run, profile, at);
    pairs.iter().map(|(a, p)| (a - p) * (a - p)).sum::<f64>() / pairs.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use rtvirtio_learn::synthetic::{by_equations, profile};

    use super::*;

    #[test]
    fn what_the_runs_do_not_determine_stays_as_published() {
        let published = Coefficients::TABLE_III;
        let truth = Coefficients { weight: 2.0, host_timeout: 0.0, host_idle: 0.0, ..published };
        let fit = fitted(&by_equations(truth), &profile()).unwrap();
        assert_eq!((fit.host_timeout, fit.host_idle), (published.host_timeout, published.host_idle));
        assert!(fit.weight > 2.0, "{fit:?}: less for the weights, because the rest costs more than it did");
    }
}
