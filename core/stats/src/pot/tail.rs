//! The thresholds that were tried and the one that was chosen.

use super::PotError;
use super::cluster::{automatic_gap, clusters, effective_number, extremal_index};
use super::goodness::{anderson_darling, p_value};
use super::gpd::{GpdFit, Method, fit};
use super::record::Record;
use super::steady::{EVEN, growth, unevenness};
use super::sums::Sums;

/// Number of quantiles of the sample that are tried as thresholds.
const CANDIDATES: i32 = 24;
/// Fewest clusters a threshold needs.
const MIN_CLUSTERS: usize = 30;
/// Level of the tests by which a threshold is chosen; a larger one chooses higher thresholds.
const SIGNIFICANCE: f64 = 0.1;
/// The highest threshold is used where none passes at that level, unless it fails at this one.
const HOPELESS: f64 = 0.01;
/// Thresholds with more exceedances are skipped: they only cost time, and p99.99 needs fewer.
const MOST_EXCEEDANCES: usize = 20_000;

/// A threshold and the fit above it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Threshold {
    /// Candidate quantile of the sample.
    pub quantile: f64,
    /// Threshold in the unit of the values.
    pub level: f64,
    /// Number of values above the threshold.
    pub exceedances: usize,
    /// Number of clusters by runs declustering.
    pub clusters: usize,
    /// Independent exceedances that the `exceedances` are worth: by the sizes of the clusters
    /// (Kish), or the extremal index times the `exceedances` where that is less.
    pub effective: f64,
    /// Dispersion of the clusters over ten parts of the record: 9 on average by chance.
    pub dispersion: f64,
    /// Distribution of the excesses.
    pub gpd: GpdFit,
    /// p-value of the Anderson-Darling statistic, after division by `exceedances / effective`: the
    /// first-order correction for clusters of Rao and Scott (JASA 76, 1981).
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
    /// [`PotError::TooFew`] clusters at every candidate, [`PotError::Grows`] where latencies grow,
    /// [`PotError::Uneven`] where the slow requests lie in few parts of the record,
    /// [`PotError::NoFit`] when none fits, [`PotError::NotFinite`].
    pub fn fit(latencies: &[f64]) -> Result<Self, PotError> {
        let record = Record::new(latencies)?;
        if let Some(s) = growth(&record.values) {
            return Err(PotError::Grows { s });
        }
        let mut thresholds = Vec::new();
        let mut refused = PotError::BadRecord("the record does not reach down to any threshold");
        for i in (0..CANDIDATES).rev() {
            match candidate(&record, 1.0 - 0.2 * 0.75f64.powi(i)) {
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
        let fails = |(t, _): &(Threshold, Sums)| !passes(t, SIGNIFICANCE);
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

    /// The chosen threshold and all higher ones.
    pub(super) fn chosen_and_above(&self) -> &[(Threshold, Sums)] {
        &self.thresholds[self.chosen..]
    }
}

fn passes(threshold: &Threshold, significance: f64) -> bool {
    let shorter = threshold.gpd.method == Method::Edge && threshold.gpd.shape < 0.0;
    threshold.dispersion <= EVEN && (threshold.p_value > significance || shorter)
}

/// Fits the excesses of a candidate; `None` where there are too many.
fn candidate(record: &Record, quantile: f64) -> Option<Result<(Threshold, Sums), PotError>> {
    let level = record.threshold(quantile);
    let above = record.above(level);
    if above.excesses.len() > MOST_EXCEEDANCES {
        return None;
    }
    let extremal_index = extremal_index(&above.times);
    let runs = clusters(&above.times, automatic_gap(&above.times, extremal_index));
    if runs.len() < MIN_CLUSTERS {
        return Some(Err(PotError::TooFew { have: runs.len(), need: MIN_CLUSTERS }));
    }
    let sums = match Sums::new(&above.excesses) {
        Ok(sums) => sums,
        Err(error) => return Some(Err(error)),
    };
    let effective = effective_number(&runs).min(extremal_index * sums.count());
    let gpd = fit(&sums);
    let anderson_darling = anderson_darling(sums.excesses(), &gpd);
    let threshold = Threshold {
        quantile,
        level,
        exceedances: above.excesses.len(),
        clusters: runs.len(),
        effective,
        dispersion: unevenness(runs.iter().map(|r| above.times[r.start]), record.n()),
        gpd,
        p_value: p_value(anderson_darling * effective / sums.count(), gpd.shape),
    };
    Some(Ok((threshold, sums)))
}
