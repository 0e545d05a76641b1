//! A forest and a calibration of their own for runs in which BFQ does not idle, where that is sharper.

use rtvirtio_model::learned::{FlowingModel, LN_SLICE, WIDTH};
use rtvirtio_stats::conformal::Mondrian;
use rtvirtio_stats::forest::{Forest, ForestOptions};
use rtvirtio_stats::mlp::Rows;

use super::{Bounded, Row, TrainError, TrainSettings, equal_runs, median};

/// Fewest conditions that a forest of their own is fitted on.
const FEWEST: usize = 20;
/// Level of the quantile that these bounds start from: what the slice model leaves has short tails, and a quantile that few neighbours carry is no better a start than
/// one that several do (`docs/model.md` has the figures of others).
const HIGH: f64 = 0.9;
/// Fewest tasks in a leaf: what is left to learn is smoother than latency itself.
const LEAF: usize = 6;

/// Splits one forest's bounds in two classes where that makes those of runs that flow sharper, or where they did not hold there. Both are judged by trees that did not see
/// a row. With too few runs that flow all stays as it is.
///
/// # Errors
/// [`TrainError`].
pub(super) fn apart(one: Bounded, rows: &[Row], settings: &TrainSettings) -> Result<Bounded, TrainError> {
    let at: Vec<usize> = (0..rows.len()).filter(|i| rows[*i].regime.flows()).collect();
    let of = |i: &usize| rows[*i].condition;
    let groups: Vec<usize> = at.iter().map(of).collect();
    if groups.iter().collect::<std::collections::BTreeSet<_>>().len() < FEWEST {
        return Ok(one);
    }
    let mut table = Rows::new(WIDTH);
    for (i, w) in at.iter().zip(equal_runs(&groups)) {
        table.push(&rows[*i].x, rows[*i].actual.ln() - rows[*i].x[LN_SLICE], w)?;
    }
    let lost: Vec<f64> = at.iter().map(|i| rows[*i].lost).collect();
    let options =
        ForestOptions { trees: settings.trees, seed: settings.seed, leaf: LEAF, ..ForestOptions::default() };
    let (forest, report) = Forest::fit(&table, &lost, &groups, &[HIGH], &options)?;
    let mut starts = one.starts.clone();
    for (i, q) in at.iter().zip(&report.quantiles) {
        starts[*i] = q[0] + rows[*i].x[LN_SLICE];
    }
    let scores: Vec<f64> = rows.iter().zip(&starts).map(|(r, start)| r.actual.ln() - start).collect();
    let all: Vec<usize> = rows.iter().map(|r| r.condition).collect();
    let classes: Vec<usize> = rows.iter().map(|r| r.regime.class()).collect();
    let bound = Mondrian::calibrate(&scores, &all, &classes, settings.miss)?;
    let uppers: Vec<f64> = starts.iter().zip(&classes).map(|(s, c)| s + bound.quantile(*c).score).collect();

    let over = |uppers: &[f64]| median(at.iter().map(|i| uppers[*i] - rows[*i].actual.ln()).collect());
    let runs = groups.iter().collect::<std::collections::BTreeSet<_>>().len() as f64;
    let above = at.iter().zip(equal_runs(&groups)).filter(|(i, _)| one.uppers[**i] < rows[**i].actual.ln());
    let missed = above.map(|(_, w)| w).sum::<f64>() / runs;
    if over(&uppers) >= over(&one.uppers) && missed <= settings.miss {
        return Ok(one);
    }
    Ok(Bounded { flowing: Some(FlowingModel { forest, high: HIGH }), bound, starts, uppers, ..one })
}
