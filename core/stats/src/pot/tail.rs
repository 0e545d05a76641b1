//! The thresholds that were tried and the one that was chosen.

use serde::{Deserialize, Serialize};

use super::cluster::{automatic_gap, clusters, effective_number, extremal_index};
use super::goodness::{anderson_darling, p_value};
use super::gpd::{GpdFit, Method, fit_sums};
use super::steady::{EVEN, growth, unevenness};
use super::sums::Sums;
use super::{Gap, PotError, Record, Settings};

/// The highest threshold is used where none passes at the level of the settings, unless it fails at
/// this level.
const HOPELESS: f64 = 0.01;
/// Thresholds with more exceedances are skipped: they only cost time, and p99.99 needs fewer.
const MOST_EXCEEDANCES: usize = 20_000;

/// A threshold and the fit above it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Threshold {
    /// Candidate quantile of the sample.
    pub quantile: f64,
    /// Threshold in the unit of the values.
    pub level: f64,
    /// Number of values above the threshold.
    pub exceedances: usize,
    /// Number of clusters by runs declustering.
    pub clusters: usize,
    /// Largest distance inside a cluster, in the time of the record.
    pub gap: f64,
    /// Extremal index by the intervals estimator, in (0, 1]; the runs estimate is
    /// `clusters / exceedances`.
    pub extremal_index: f64,
    /// Independent exceedances that the `exceedances` are worth: the smaller one of
    /// [`effective_number`] of the clusters and `extremal_index * exceedances`.
    pub effective: f64,
    /// Dispersion of the clusters over ten parts of the record: 9 on average by chance.
    pub dispersion: f64,
    /// Distribution of the excesses.
    pub gpd: GpdFit,
    /// Anderson-Darling statistic of the fit.
    pub anderson_darling: f64,
    /// p-value of the statistic, after division by `exceedances / effective`: the first-order
    /// correction for clusters of Rao and Scott (JASA 76, 1981).
    pub p_value: f64,
}

/// The tail of a record.
#[derive(Clone, Debug)]
pub struct Pot {
    pub(super) record: Record,
    /// Candidates in rising order, each with its excesses.
    pub(super) thresholds: Vec<(Threshold, Sums)>,
    chosen: usize,
}

impl Pot {
    /// Finds the threshold and fits the tail.
    ///
    /// The threshold is the lowest one from which on all candidates with enough clusters pass the
    /// Anderson-Darling test; the highest one when it fails by little. (Bader, Yan and Zhang,
    /// Annals of Applied Statistics 12, 2018, stop by the false discovery rate instead; after ten
    /// rejected thresholds that rejects a good one too.) A threshold whose shape is held at its
    /// lower edge passes: the tail is shorter than the fit, the bounds are too high. One whose
    /// clusters lie unevenly fails.
    ///
    /// # Errors
    /// [`PotError::BadSetting`], [`PotError::TooFew`] clusters at every candidate,
    /// [`PotError::Grows`] for a complete series whose latencies grow, [`PotError::Uneven`] where
    /// the slow requests lie in few parts of the record, [`PotError::NoFit`] when none fits,
    /// [`PotError::BadRecord`] for a record that reaches down to none.
    pub fn fit(record: Record, settings: &Settings) -> Result<Self, PotError> {
        settings.check()?;
        if let Some(s) = record.series().and_then(growth) {
            return Err(PotError::Grows { s });
        }
        let mut thresholds = Vec::new();
        let mut refused = PotError::BadRecord("the record does not reach down to any threshold");
        for quantile in settings.quantiles.iter().rev() {
            match candidate(&record, *quantile, settings) {
                Some(Ok(found)) => thresholds.push(found),
                Some(Err(error)) => refused = error,
                None => {}
            }
        }
        thresholds.reverse();
        let Some((highest, _)) = thresholds.last() else { return Err(refused) };
        let (p_value, dispersion) = (highest.p_value, highest.dispersion);
        if dispersion > EVEN {
            return Err(PotError::Uneven { dispersion });
        }
        let fails = |(t, _): &(Threshold, Sums)| !passes(t, settings.significance);
        let good = thresholds.iter().rposition(fails).map_or(0, |i| i + 1);
        if good == thresholds.len() && !passes(highest, HOPELESS) {
            return Err(PotError::NoFit { p_value });
        }
        let chosen = good.min(thresholds.len() - 1);
        Ok(Self { record, thresholds, chosen })
    }

    /// The threshold that the fit has chosen.
    #[must_use]
    pub fn threshold(&self) -> &Threshold {
        &self.thresholds[self.chosen].0
    }

    /// Every threshold with enough clusters, in rising order.
    pub fn candidates(&self) -> impl Iterator<Item = &Threshold> {
        self.thresholds.iter().map(|(t, _)| t)
    }

    /// The chosen threshold and all higher ones.
    pub(super) fn chosen_and_above(&self) -> &[(Threshold, Sums)] {
        &self.thresholds[self.chosen..]
    }
}

fn passes(threshold: &Threshold, significance: f64) -> bool {
    let shorter = threshold.gpd.method == Method::Edge && threshold.gpd.shape < 0.0;
    threshold.dispersion <= EVEN && (threshold.p_value > significance || shorter)
}

/// Fits the excesses of a candidate; `None` where the record does not reach it, or has too many.
fn candidate(
    record: &Record,
    quantile: f64,
    settings: &Settings,
) -> Option<Result<(Threshold, Sums), PotError>> {
    let level = record.threshold(quantile)?;
    let above = record.above(level);
    if above.excesses.len() > MOST_EXCEEDANCES {
        return None;
    }
    let extremal_index = extremal_index(&above.times);
    let gap = match settings.gap {
        Gap::Time(time) => record.in_requests(time),
        Gap::Automatic => automatic_gap(&above.times, extremal_index),
    };
    let runs = clusters(&above.times, gap);
    if runs.len() < settings.min_clusters {
        return Some(Err(PotError::TooFew { have: runs.len(), need: settings.min_clusters }));
    }
    let sums = match Sums::new(&above.excesses) {
        Ok(sums) => sums,
        Err(error) => return Some(Err(error)),
    };
    let effective = effective_number(&runs).min(extremal_index * sums.count());
    let gpd = fit_sums(&sums, effective);
    let anderson_darling = anderson_darling(sums.excesses(), &gpd);
    let threshold = Threshold {
        quantile,
        level,
        exceedances: above.excesses.len(),
        clusters: runs.len(),
        gap: record.in_time(gap),
        extremal_index,
        effective,
        dispersion: unevenness(runs.iter().map(|r| above.times[r.start]), record.n()),
        gpd,
        anderson_darling,
        p_value: p_value(anderson_darling * effective / sums.count(), gpd.shape),
    };
    Some(Ok((threshold, sums)))
}
