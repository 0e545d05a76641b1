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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rtvirtio_model::learned::{ModelFileError, Regime};
    use rtvirtio_model::{HostModel, Learned, TailModel, UpperBasis};
    use rtvirtio_stats::Random;
    use rtvirtio_units::Nanos;

    use super::super::tests::{made_up, profile, quick};
    use super::super::{fit, inputs};
    use crate::accuracy::judge;
    use crate::dataset::Point;

    fn regime(point: &Point) -> Regime {
        let (spec, config) = inputs(point);
        Regime::of(&spec, &config)
    }

    /// Runs that follow the slice model within a tenth, but where BFQ idles by chance within a factor of ten.
    fn chancy(n: usize, seed: u64) -> Vec<Point> {
        let mut points = made_up(n, 0.1, seed);
        let mut random = Random::new(seed);
        for point in points.iter_mut().filter(|p| !regime(p).flows()) {
            let factor = (2.3 * random.normal()).exp();
            point.results.iter_mut().for_each(|r| r.p9999 = Nanos((r.p9999.0 as f64 * factor) as u64));
        }
        points
    }

    #[test]
    fn chance_where_bfq_idles_does_not_widen_the_bounds_elsewhere() {
        let model = fit(&chancy(400, 1), &profile(), "", &quick()).unwrap();
        let flowing = model.flowing.clone().expect("a part of its own");
        // The same without it.
        let mut one = HostModel { flowing: None, ..model.clone() };
        one.bound.categories.clear();
        let test = chancy(200, 9);
        let of = |model: &HostModel| judge(&[(Arc::new(model.clone()), test.clone())], &profile()).unwrap();
        let (n, coverage, sharpness) = of(&model).flowing();
        let (_, _, before) = of(&one).flowing();
        assert!(n > 100 && coverage > 0.97, "{coverage} of {n}");
        assert!(sharpness < 2.0 && sharpness < 0.6 * before, "{sharpness} after {before}");
        // It says that its confidence is of runs like these, and where a load lies outside of these.
        let point = test.iter().find(|p| regime(p).flows()).unwrap();
        let (mut spec, config) = inputs(point);
        let learned = Learned::bound(Arc::new(model.clone()));
        let upper =
            |spec: &_| learned.forecast(&profile(), spec, &config).unwrap().swap_remove(0).upper.unwrap();
        assert_eq!(upper(&spec).basis, UpperBasis::Regime);
        spec.vms[0].tasks[0].rate = Some(rtvirtio_units::Iops(1e6));
        assert_eq!(upper(&spec).basis, UpperBasis::Extrapolated);
        // From a file as it was, and never one that leads nowhere.
        let text = serde_json::to_string(&model).unwrap();
        assert_eq!(HostModel::from_json(&text).unwrap(), model);
        let mut damaged = model;
        let empty = rtvirtio_model::learned::FlowingModel { high: 0.2, ..flowing };
        damaged.flowing = Some(empty);
        let told = damaged.check().unwrap_err();
        assert!(matches!(&told, ModelFileError::Damaged(what) if what.contains("does not idle")), "{told}");
    }

    #[test]
    fn with_a_handful_of_runs_that_flow_there_is_one_forest() {
        let all = chancy(400, 3);
        let idling = all.iter().filter(|p| !regime(p).flows());
        let few: Vec<Point> =
            idling.chain(all.iter().filter(|p| regime(p).flows()).take(10)).cloned().collect();
        assert!(fit(&few, &profile(), "", &quick()).unwrap().flowing.is_none());
    }
}
