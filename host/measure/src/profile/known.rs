//! Whether a point is known to the error that a plan can bear.
//!
//! **Rates** enter predictions in proportion, and a plan by the formulas keeps a margin of
//! [`MARGIN`]. So a rate is known when half of the 95 % interval of its mean is at most that share
//! of it.
//!
//! **Tails**: the formulas aim to be within a factor of [`MODEL`], and a plan looks for settings
//! that bear a factor of [`SPARE`]. The error of the model and that of the profile are taken as
//! independent factors, so the squares of their logarithms add, and a tail is known when its upper
//! bound at 95 % is at most
//!
//! ```text
//! exp(sqrt(ln(SPARE)^2 - ln(MODEL)^2)) = 2.33
//! ```
//!
//! times what the profile shows. A tail that falls fast is known after a few thousand requests, a
//! heavy one not even after all of the time.

use rtvirtio_stats::{pot, student_t};
use rtvirtio_units::{Nanos, Percentile};

use super::{Cell, Point};

/// Safety margin of plans by the formulas (`rtvirtio_planner::PlanOptions::safety`).
pub const MARGIN: f64 = 0.2;
/// Factor by which a prediction may be too low under the margin that a plan looks for
/// (`rtvirtio_planner::PlanOptions::enough`).
pub const SPARE: f64 = 4.0;
/// Factor within which the formulas aim to predict tails.
const MODEL: f64 = 3.0;
/// Confidence of the bounds.
const CONFIDENCE: f64 = 0.95;
/// The tail that is bounded, as a share.
const TAIL: f64 = 0.9999;
/// Fall of the rate from one depth to the next that noise alone may cause.
pub(super) const NOISE: f64 = 0.10;
/// Measurements after which such a fall is the device's own.
const REPEATED: usize = 3;
/// Samples that show p99.99 itself.
const CARRIED: f64 = 1e4;
/// Samples of which order statistics bound a tail whose shape is up to 1 to the error that a plan
/// bears.
const PRECISE: f64 = 1e5;

/// Largest factor by which the tail may be longer than the profile shows.
pub(super) fn bearable_tail() -> f64 {
    (SPARE.ln().powi(2) - MODEL.ln().powi(2)).sqrt().exp()
}

/// Factor by which p99.99 may be longer than the profile shows it, at 95 %: by order statistics
/// where there are enough samples for that. With fewer the straight line in logarithms from p99 to
/// the largest, by which the models go too, is continued to the share that would be enough:
///
/// ```text
/// factor = (largest / p99) ^ (ln(needed / n) / ln(n / 100)) * largest / shown
/// ```
///
/// Infinite where p99 itself has no bound.
pub(super) fn tail_factor(point: &Point) -> f64 {
    let at = |share: f64| point.latencies.at(Percentile(share * 100.0)).min(point.max).0.max(1) as f64;
    let n = usize::try_from(point.latencies.n()).unwrap_or(usize::MAX);
    let shown = point.latencies.tail().min(point.max).0.max(1) as f64;
    let (samples, largest) = (n as f64, point.max.0.max(1) as f64);
    if samples < needed(0.99) {
        return f64::INFINITY;
    }
    match pot::spare_samples(n, TAIL, CONFIDENCE) {
        Some(0) => largest / shown,
        Some(spare) => at((n - spare) as f64 / samples) / shown,
        None => continued(samples, at(0.99), largest) * largest / shown,
    }
}

/// Samples with which a tail would be known whose line stays as it is, and a tenth more. From
/// [`CARRIED`] on p99.99 is no longer the largest, which is further from its bound until order
/// statistics are precise: then [`PRECISE`], or twice as many as there are.
pub(super) fn samples_wanted(point: &Point) -> f64 {
    let n = point.latencies.n() as f64;
    if n < needed(0.99) {
        return 10.0 * needed(0.99);
    }
    let p99 = point.latencies.at(Percentile(99.0)).min(point.max).0.max(1) as f64;
    let slope = (point.max.0 as f64 / p99).max(1.0).ln() / (n / 100.0).ln();
    let by_line = 1.1 * needed(TAIL) / bearable_tail().powf(1.0 / slope);
    if n.max(by_line) < CARRIED { by_line } else { PRECISE.max(2.0 * n) }
}

/// Factor by which p99.99 lies beyond the largest of so many samples on the line from p99.
fn continued(samples: f64, p99: f64, largest: f64) -> f64 {
    let needed = needed(TAIL);
    let further = (needed / samples).max(1.0).ln() / (samples / 100.0).ln();
    (largest / p99).max(1.0).powf(further)
}

/// Fewest samples whose largest is an upper bound of this percentile.
fn needed(share: f64) -> f64 {
    pot::samples_needed(share, CONFIDENCE).map_or(f64::INFINITY, |n| n as f64)
}

/// Whether `n` samples with this p99 and this largest show p99.99 to the error that a plan bears.
#[must_use]
pub fn tail_is_known(n: u64, p99: Nanos, largest: Nanos) -> bool {
    let enough = n as f64 >= needed(0.99);
    enough && continued(n as f64, p99.0.max(1) as f64, largest.0 as f64) <= bearable_tail()
}

/// Half of the 95 % interval of the mean rate of each point, relative to it; infinite where the
/// repetitions do not show it.
///
/// Two repetitions say little about their deviation, so that of all points here counts, and a
/// point's own where that is larger. A point that was measured once has the error of the others.
pub(super) fn rate_errors(points: &[&Point]) -> Vec<f64> {
    let mean = |p: &Point| p.iops.iter().sum::<f64>() / p.iops.len() as f64;
    let squares = |p: &Point| p.iops.iter().map(|rate| (rate / mean(p) - 1.0).powi(2)).sum::<f64>();
    let freedom = |p: &Point| p.iops.len().saturating_sub(1);
    let usable = |p: &Point| mean(p) > 0.0;
    let of_all: usize = points.iter().filter(|p| usable(p)).map(|p| freedom(p)).sum();
    let pooled = points.iter().filter(|p| usable(p)).map(|p| squares(p)).sum::<f64>() / of_all.max(1) as f64;
    let error = |p: &&Point| {
        let p: &Point = p;
        if !usable(p) || of_all == 0 {
            return f64::INFINITY;
        }
        let variance = pooled.max(squares(p) / freedom(p).max(1) as f64);
        student_t(of_all) * (variance / p.iops.len() as f64).sqrt()
    };
    points.iter().map(error).collect()
}

/// Sets the error of each point's rate. Points of one direction share their deviation.
pub(super) fn set_errors(cells: &mut [Cell]) {
    for writes in [false, true] {
        let of: Vec<usize> = (0..cells.len()).filter(|i| cells[*i].series.writes() == writes).collect();
        let errors = rate_errors(&of.iter().map(|i| &cells[*i].point).collect::<Vec<_>>());
        for (i, error) in of.into_iter().zip(errors) {
            cells[i].point.error = error;
        }
    }
}

/// Whether the tail may be longer than a plan bears, where models read it.
pub(super) fn tail_is_open(point: &Point) -> bool {
    point.tail && tail_factor(point) > bearable_tail()
}

/// Indices of the points that are not known, after [`set_errors`].
pub(super) fn unknown(cells: &[Cell]) -> Vec<usize> {
    let open = |i: &usize| cells[*i].point.error > MARGIN || tail_is_open(&cells[*i].point);
    let mut unknown: Vec<usize> = (0..cells.len()).filter(open).collect();
    for (i, pair) in cells.windows(2).enumerate() {
        let alike = pair[0].series == pair[1].series && pair[0].block == pair[1].block;
        let rate = |cell: &Cell| cell.point.iops.iter().copied().fold(0.0, f64::max);
        if alike && rate(&pair[1]) < rate(&pair[0]) * (1.0 - NOISE) {
            // Something may have disturbed the one, or the other.
            unknown.extend((i..i + 2).filter(|i| cells[*i].point.iops.len() < REPEATED));
        }
    }
    unknown.sort_unstable();
    unknown.dedup();
    unknown
}

#[cfg(test)]
mod tests {
    use rtvirtio_stats::Latencies;
    use rtvirtio_units::Bytes;

    use super::super::series::Series;
    use super::*;

    /// `n` latencies whose share above x is (100 us / x)^(1 / slope).
    fn tail(n: u64, slope: f64) -> Point {
        let of = |i: u64| Nanos((1e5 * (n as f64 / (n - i) as f64).powf(slope)) as u64);
        let latencies: Latencies = (0..n).map(of).collect();
        Point { iops: vec![1e4, 1.01e4], max: latencies.max(), latencies, tail: true, error: 0.0 }
    }

    fn rates(iops: &[f64]) -> Point {
        Point { iops: iops.to_vec(), ..tail(5_000, 0.1) }
    }

    #[test]
    fn a_light_tail_is_known_early_and_a_heavy_one_late() {
        assert!((bearable_tail() - 2.33).abs() < 0.01, "{}", bearable_tail());
        let factor = |n, slope| tail_factor(&tail(n, slope));
        assert!(factor(200, 0.0).is_infinite(), "too few for p99");
        assert!(factor(2_000, 0.2) < 2.0 && factor(2_000, 0.6) > 4.0);
        // The line continued: (29 956 / 5 000)^0.5.
        assert!((factor(5_000, 0.5) - 2.447).abs() < 0.02, "{}", factor(5_000, 0.5));
        // As for a result without its samples.
        let known = |n, largest| tail_is_known(n, Nanos(1_000_000), Nanos(largest));
        assert!(!known(298, 1_000_000) && known(1_600, 2_000_000) && !known(1_600, 3_000_000));
        assert!(factor(40_000, 1.5) > factor(1_000_000, 1.5) && factor(1_000_000, 1.5) < 1.5);
    }

    #[test]
    fn so_many_samples_as_are_wanted_make_a_tail_known() {
        let known = |n, slope| tail_factor(&tail(n, slope)) <= bearable_tail();
        for slope in [0.35, 0.5, 0.6] {
            let wanted = samples_wanted(&tail(1_000, slope)) as u64;
            assert!(wanted > 1_000 && known(wanted, slope), "{slope}: {wanted}");
            // Not many more than that.
            assert!(!known(wanted * 3 / 4, slope), "{slope}: {wanted}");
        }
        assert_eq!(samples_wanted(&tail(1_000, 0.9)), PRECISE);
        assert!(known(PRECISE as u64, 0.9) && !known(12_000, 0.9));
        assert_eq!(
            (samples_wanted(&tail(10, 0.0)), samples_wanted(&tail(60_000, 1.0))),
            (2_990.0, 120_000.0)
        );
    }

    #[test]
    fn more_samples_never_make_a_tail_less_known() {
        for slope in [0.1, 0.3, 0.6, 1.0] {
            let factors = [1_000, 3_000, 9_000].map(|n| tail_factor(&tail(n, slope)));
            assert!(factors.windows(2).all(|f| f[1] <= f[0] * 1.01), "{slope}: {factors:?}");
        }
    }

    #[test]
    fn a_point_measured_once_has_the_error_of_the_others() {
        let (one, steady, other) = (rates(&[9e3]), rates(&[1e4, 1.02e4]), rates(&[2e4, 2.04e4]));
        assert!(rate_errors(&[&one]).iter().all(|e| e.is_infinite()), "nothing to compare");
        let errors = rate_errors(&[&one, &steady, &other]);
        // Deviation 1.4 %, Student's t of two degrees 4.303.
        assert!((errors[0] - 0.0602).abs() < 1e-3 && errors[1] < errors[0], "{errors:?}");
        let errors = rate_errors(&[&one, &steady, &rates(&[1e4, 2e4])]);
        assert!(errors.iter().all(|e| *e > MARGIN) && errors[2] > errors[1], "{errors:?}");
        assert!(rate_errors(&[&rates(&[0.0, 0.0]), &steady])[0].is_infinite());
    }

    #[test]
    fn what_is_not_known_is_measured_again() {
        let cell = |depth, point| Cell { series: Series::Read, depth, block: Bytes(4096), point };
        let steady = |rate: f64| rates(&[rate, rate * 1.01]);
        let mut cells = vec![cell(1, steady(1e4)), cell(2, steady(2e4)), cell(4, steady(3e4))];
        let unknown = |cells: &mut Vec<Cell>| {
            set_errors(cells);
            unknown(cells)
        };
        assert!(unknown(&mut cells).is_empty());
        cells[0].point = tail(2_000, 0.6);
        assert_eq!(unknown(&mut cells), [0]);
        cells[0].point.tail = false;
        assert!(unknown(&mut cells).is_empty(), "no model reads it");
        // A disturbed one, or one that was served by a cache: which is not known.
        cells[1].point.iops = vec![4e4];
        assert_eq!(unknown(&mut cells), [1, 2]);
        cells[1].point.iops = vec![4e4; 3];
        assert_eq!(unknown(&mut cells), [2]);
        cells[2].point.iops = vec![3e4; 3];
        assert!(unknown(&mut cells).is_empty());
        // Writes that vary say nothing about reads.
        let varying = Cell { series: Series::Write, ..cell(1, rates(&[1e4, 1.5e4])) };
        cells.push(varying);
        assert_eq!(unknown(&mut cells), [3]);
    }
}
