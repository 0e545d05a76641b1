//! The step between the paper's network and the forest: its network with our features, log latency
//! and quantile loss.
//!
//! For comparison only. Networks of the median and of the 0.95 quantile of ln(tail / slice model's
//! tail), calibrated as the forest is, by the networks of the folds that did not learn from a run.

use rtvirtio_model::Profile;
use rtvirtio_model::learned::WIDTH;
use rtvirtio_stats::Rows;
use rtvirtio_stats::conformal::calibrate;
use serde::Serialize;

use rtvirtio_learn::dataset::Point;
use rtvirtio_learn::train::{TrainSettings, equal_runs, median, rows};
use rtvirtio_paper::ensemble::{Ensemble, Scratch};
use rtvirtio_paper::mlp::Loss;
use rtvirtio_paper::network::{self, EPOCHS};

/// Quantile of the upper network.
const HIGH: f64 = 0.95;

/// Scores of the networks on held-out runs.
#[derive(Clone, Debug, Serialize)]
pub struct Networks {
    /// Held-out tasks that the scores are over.
    pub n: usize,
    /// Typical factor between expected and measured.
    pub factor: f64,
    /// Share of tails below the bound.
    pub coverage: f64,
    /// Median of bound over measured.
    pub sharpness: f64,
}

/// Fits on some points and judges on the others.
///
/// # Errors
/// Runs that cannot be read, and networks that cannot be fitted.
pub fn evaluate(
    train: &[Point],
    test: &[Point],
    profile: &Profile,
    settings: &TrainSettings,
) -> anyhow::Result<Networks> {
    let (known, unseen) = (rows(train, profile)?, rows(test, profile)?);
    let groups: Vec<usize> = known.iter().map(|r| r.condition).collect();
    let mut table = Rows::new(WIDTH);
    for (row, weight) in known.iter().zip(equal_runs(&groups)) {
        table.push(&row.x, row.actual.ln() - row.x[0], weight)?;
    }
    let fit = |quantile| {
        let options = network::options(EPOCHS, settings.seed, Loss::Pinball { quantile });
        Ensemble::fit(&table, &groups, &options)
    };
    let ((middle, _), (high, out_of_fold)) = (fit(0.5)?, fit(HIGH)?);
    let off = known.iter().zip(&out_of_fold).map(|(r, h)| r.actual.ln() - r.x[0] - h);
    let score = calibrate(&off.collect::<Vec<f64>>(), &groups, settings.miss)?.score;
    let mut scratch = Scratch::default();
    let (mut factors, mut ratios) = (Vec::new(), Vec::new());
    for row in &unseen {
        let expected = row.x[0] + middle.predict_with(&row.x, &mut scratch)?;
        let upper = row.x[0] + high.predict_with(&row.x, &mut scratch)? + score;
        factors.push((row.actual.ln() - expected).abs().exp());
        ratios.push(upper.exp() / row.actual);
    }
    let below = ratios.iter().filter(|r| **r >= 1.0).count();
    Ok(Networks {
        n: ratios.len(),
        factor: median(factors),
        coverage: below as f64 / ratios.len().max(1) as f64,
        sharpness: median(ratios),
    })
}
