//! Separate forest and calibration for runs in which BFQ does not idle, where they are sharper.

use rtvirtio_model::learned::{LN_SLICE, NonIdlingModel, SLICE_KEPT};
use rtvirtio_stats::conformal::{ConformalError, Quantile};
use rtvirtio_stats::forest::ForestError;
use rtvirtio_units::Nanos;

use super::{
    Bounded, Row, Start, TrainError, TrainSettings, bounded_forest, calibrated, equal_runs, host_stalls,
    median,
};

/// Start of the bounds here. The ratio to the slice model has short tails, so a quantile supported
/// by several neighbours is as good a start as one supported by few, and the remaining error is
/// smoother than latency itself (`docs/results/accuracy.md` has figures of alternatives).
const START: Start = Start {
    high: 0.9,
    leaf: 6,
    base: |row| row.x[LN_SLICE],
    // One leaf holds saturated runs and others, where the slice model is right about both.
    lost: |row| 1.0 - row.x[SLICE_KEPT],
};

/// Separate bounds with and without idling.
pub(super) struct Split {
    pub(super) non_idling: NonIdlingModel,
    /// Score of the common forest where BFQ idles.
    pub(super) idling: Quantile,
    /// Addition for the host's own stalls where BFQ idles.
    pub(super) idling_host: Option<Nanos>,
}

/// Separate bounds for runs in which BFQ does not idle, where they are sharper than those of the
/// common forest `one`, or where that misses significantly more of them than allowed (beyond random
/// variation: one standard error). Both are judged by trees that did not see a row. `None` where
/// one forest is better, and where too few such conditions were measured for the confidence.
///
/// Choosing between two bounds by the runs that calibrated both may cost some of their confidence;
/// the remaining difference shows in `rtvirtio-bench accuracy`, which fits and chooses again
/// in each part.
pub(super) fn split(
    one: &Bounded,
    rows: &[Row],
    settings: &TrainSettings,
) -> Result<Option<Split>, TrainError> {
    let (non_idle, of_one): (Vec<Row>, Vec<f64>) = part(rows, &one.uppers, true);
    let own = match bounded_forest(&non_idle, &START, settings) {
        Ok(own) => own,
        Err(
            TrainError::Forest(ForestError::TooFewGroups { .. })
            | TrainError::Conformal(ConformalError::TooFewGroups { .. } | ConformalError::Empty),
        ) => return Ok(None),
        Err(e) => return Err(e),
    };
    let over = |uppers: &[f64]| {
        median(non_idle.iter().zip(uppers).map(|(r, upper)| upper - r.actual.ln()).collect())
    };
    if over(&own.uppers) >= over(&of_one) && !misses_more(&non_idle, &of_one, settings.miss) {
        return Ok(None);
    }
    let (idle, starts) = part(rows, &one.starts, false);
    let (idling, idling_host) = match calibrated(&idle, &starts, settings.miss) {
        Ok(idling) => {
            let uppers: Vec<f64> = starts.iter().map(|s| s + idling.score).collect();
            (idling, host_stalls(&idle, &uppers, settings.miss)?)
        }
        // Too few runs that idle: the bound of all runs is used.
        Err(ConformalError::TooFewGroups { .. } | ConformalError::Empty) => {
            (one.bound, host_stalls(rows, &one.uppers, settings.miss)?)
        }
        Err(e) => return Err(e.into()),
    };
    let host_stalls = host_stalls(&non_idle, &own.uppers, settings.miss)?;
    let non_idling = NonIdlingModel { forest: own.forest, high: own.high, bound: own.bound, host_stalls };
    Ok(Some(Split { non_idling, idling, idling_host }))
}

/// Rows and their values, of runs in which BFQ does not idle (`flows`) or of the others.
fn part(rows: &[Row], of: &[f64], flows: bool) -> (Vec<Row>, Vec<f64>) {
    let selected = rows.iter().zip(of).filter(|(r, _)| r.regime.is_non_idling() == flows);
    selected.map(|(r, v)| (r.clone(), *v)).unzip()
}

/// Whether more runs are above `uppers` than the share `miss` explains, by more than a standard
/// error.
fn misses_more(rows: &[Row], uppers: &[f64], miss: f64) -> bool {
    let groups: Vec<usize> = rows.iter().map(|r| r.condition).collect();
    let weights = equal_runs(&groups);
    let runs: f64 = weights.iter().sum();
    // A row that defines a score lies at its bound, up to rounding.
    let above = |(r, upper): (&Row, &f64)| r.actual.ln() > upper + 1e-9;
    let missed: f64 = rows.iter().zip(uppers).zip(&weights).filter(|(r, _)| above(*r)).map(|(_, w)| w).sum();
    missed > runs * miss + (runs * miss * (1.0 - miss)).sqrt()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rtvirtio_model::learned::{ModelFileError, NonIdlingModel};
    use rtvirtio_model::{HostModel, Learned, TailModel, UpperBasis};
    use rtvirtio_stats::Random;
    use rtvirtio_units::Nanos;

    use super::super::{fit, inputs};
    use crate::condition::regime;
    use crate::dataset::Point;
    use crate::synthetic::{profile, quick, synthetic_runs};

    /// Runs that follow the slice model within a tenth, but where BFQ idles at random within a
    /// factor of ten.
    fn chancy(n: usize, seed: u64) -> Vec<Point> {
        let mut points = synthetic_runs(n, 0.1, seed);
        let mut random = Random::new(seed);
        for point in points.iter_mut().filter(|p| !regime(p).is_non_idling()) {
            let factor = (2.3 * random.normal()).exp();
            point.results.iter_mut().for_each(|r| r.p9999 = Nanos((r.p9999.0 as f64 * factor) as u64));
        }
        points
    }

    #[test]
    fn chance_where_bfq_idles_makes_a_part_of_its_own() {
        let model = fit(&chancy(400, 1), &profile(), "", &quick()).unwrap();
        let non_idling = model.non_idling.clone().expect("a part of its own");
        let test = chancy(200, 9);
        // Its confidence is of runs like these; it names loads outside of
        // these.
        let point = test.iter().find(|p| regime(p).is_non_idling()).unwrap();
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
        let spoil: [fn(&mut NonIdlingModel); 5] = [
            |f| f.high = 0.2,
            |f| f.bound.miss = 0.05,
            |f| f.bound.score = 1e3,
            |f| f.forest.secondary_targets[0] = -1.1,
            |f| *f.forest.targets.last_mut().unwrap() = 1e3,
        ];
        for change in spoil {
            let mut part = non_idling.clone();
            change(&mut part);
            let message = HostModel { non_idling: Some(part), ..model.clone() }.check().unwrap_err();
            assert!(
                matches!(&message, ModelFileError::Damaged(what) if what.contains("does not idle")),
                "{message}"
            );
        }
    }

    #[test]
    fn a_bound_leaves_no_room_for_a_loss_where_it_holds() {
        let mut model = fit(&chancy(400, 1), &profile(), "", &quick()).unwrap();
        // As if half of each rate had been lost in the measured runs.
        let part = model.non_idling.as_mut().expect("a part of its own");
        part.forest.secondary_targets.iter_mut().for_each(|c| *c = 0.5);
        let learned = Learned::bound(Arc::new(model));
        let (mut shown, mut guessed) = (0, 0);
        for point in chancy(200, 9).iter().filter(|p| regime(p).is_non_idling()) {
            let (spec, config) = inputs(point);
            for forecast in learned.forecast(&profile(), &spec, &config).unwrap() {
                let room = forecast.promised().as_secs_f64() / point.seconds;
                let upper = forecast.upper.as_ref().unwrap();
                if upper.basis == UpperBasis::Extrapolated {
                    assert!(forecast.rate_kept <= 0.5, "{forecast:?}");
                    guessed += 1;
                } else {
                    assert!(forecast.rate_kept >= 1.0 - room - 1e-9, "{forecast:?}");
                    shown += usize::from(forecast.rate_kept > 0.99);
                }
            }
        }
        assert!(shown > 80 && guessed > 0, "{shown} {guessed}");
    }

    #[test]
    fn a_limit_below_the_rates_takes_them_whatever_was_measured() {
        let mut model = fit(&chancy(400, 1), &profile(), "", &quick()).unwrap();
        // No task lost anything.
        model.forest.secondary_targets.iter_mut().for_each(|c| *c = 0.0);
        let learned = Learned::bound(Arc::new(model));
        let points = chancy(200, 9);
        let point = points.iter().find(|p| !regime(p).is_non_idling()).unwrap();
        let (spec, mut config) = inputs(point);
        let kept = |config: &_| learned.forecast(&profile(), &spec, config).unwrap()[0].rate_kept;
        assert_eq!(kept(&config), 1.0);
        let rate = spec.vms[0].declared_rate();
        config.vms[0].cap = Some(rtvirtio_units::Iops(rate.0 / 2.0));
        assert!(kept(&config) <= 0.5 + 1e-9, "{}", kept(&config));
    }

    #[test]
    fn with_a_handful_of_non_idling_runs_there_is_one_forest() {
        let all = chancy(260, 3);
        let idling = all.iter().filter(|p| !regime(p).is_non_idling());
        let few: Vec<Point> =
            idling.chain(all.iter().filter(|p| regime(p).is_non_idling()).take(10)).cloned().collect();
        assert!(fit(&few, &profile(), "", &quick()).unwrap().non_idling.is_none());
    }
}
