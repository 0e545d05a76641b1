//! How sharp the bound would be if the host's own stalls were known beforehand.
//!
//! Part of every tail is not of our making: the hypervisor below, or the kernel with interrupts off, stops a CPU for milliseconds.
//! A prediction cannot know when; a look back can, because a probe counted it. The same bound, fitted and judged with the probe's
//! numbers as two more inputs, tells how much of its width is due to the host.

use rtvirtio_model::Profile;
use rtvirtio_model::learned::WIDTH;
use rtvirtio_stats::forest::Scratch;
use rtvirtio_stats::mlp::Rows;
use serde::Serialize;

use crate::dataset::Point;
use crate::train::{HIGH, Row, TrainError, TrainSettings, bounded_forest, equal_runs, median, rows};

/// Inputs from the probe.
const MORE: usize = 2;

/// What the bound would be.
#[derive(Clone, Debug, Serialize)]
pub struct GivenHost {
    /// Held-out tasks.
    pub n: usize,
    /// Share of them below the bound.
    pub coverage: f64,
    /// Median of bound over measured.
    pub sharpness: f64,
}

/// Fits on some points and judges on the others, as [`crate::accuracy::evaluate`] does.
///
/// # Errors
/// [`TrainError`].
pub fn given_host(
    train: &[Point],
    test: &[Point],
    profile: &Profile,
    settings: &TrainSettings,
) -> Result<GivenHost, TrainError> {
    let (known, unseen) = (rows(train, profile)?, rows(test, profile)?);
    let groups: Vec<usize> = known.iter().map(|r| r.condition).collect();
    let mut table = Rows::new(WIDTH + MORE);
    for (row, weight) in known.iter().zip(equal_runs(&groups)) {
        table.push(&inputs(row, train), row.actual.ln(), weight)?;
    }
    let (forest, bound) = bounded_forest(&table, &known, settings)?;
    let mut scratch = Scratch::default();
    let mut ratios = Vec::with_capacity(unseen.len());
    for row in &unseen {
        let mut quantile = [0.0];
        forest.predict_with(&inputs(row, test), &[HIGH], &mut scratch, &mut quantile)?;
        let upper = quantile[0] + bound.quantile(row.regime.category()).score;
        ratios.push(upper.exp() / row.actual);
    }
    let below = ratios.iter().filter(|r| **r >= 1.0).count();
    Ok(GivenHost {
        n: ratios.len(),
        coverage: below as f64 / ratios.len().max(1) as f64,
        sharpness: median(ratios),
    })
}

fn inputs(row: &Row, points: &[Point]) -> Vec<f64> {
    let noise = &points[row.point].noise;
    // Below 10 us nothing is seen of it.
    let ln = |ns: u64| (ns as f64).max(1e4).ln();
    row.x.iter().copied().chain([ln(noise.max_ns.0), ln(noise.stalled_ns.0)]).collect()
}
