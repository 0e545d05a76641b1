//! Profile likelihood of a quantile beyond the threshold.
//!
//! The quantile q with exceedance probability c lies `d = q - u` above the threshold u. With the
//! share z of requests above u, and shape and scale of the excesses,
//! `d = scale (( z / c)^shape - 1) / shape`. For each d the likelihood of all three is maximised
//! under that condition; the d whose maximum is not much lower than the highest one form the
//! interval (Coles 2001, sections 2.6.6 and 4.3.3, here with the share z as a third parameter).
//!
//! With `ratio = shape / scale` and `x = 1 / scale` the condition reads
//! `ln z = ln c + x ln(1 + ratio d) / ratio`, and for a given ratio the log-likelihood is a concave
//! function of x whose cost does not depend on the data: see [`super::sums`].

use super::gpd::{SHAPES, grow, shrink};
use super::sums::{Sums, maximum};

/// Likelihood of one threshold's exceedances.
pub(super) struct Profile<'a> {
    pub(super) sums: &'a Sums,
    /// Number of requests in all.
    pub(super) n: f64,
    /// Independent exceedances for each exceedance, in (0, 1]: the log-likelihood counts that much
    /// (the magnitude adjustment of Ribatet, Cooley and Davison, Statistica Sinica 22, 2012).
    pub(super) weight: f64,
    /// Exceedance probability of the quantile, below the share of exceedances.
    pub(super) exceedance: f64,
}

/// Farthest quantile of the search, in units of the best one.
const FARTHEST: f64 = 1e9;
/// Precision of an end, in standard errors; and of a ratio, on the logarithmic scale of the search.
const CLOSE: f64 = 1e-3;
/// Range of the search over the ratio, as in [`super::sums`].
const SEARCH: (f64, f64) = (-10.0, 25.0);
/// Half the width of the search next to a known maximum.
const NEAR: f64 = 1.5;

#[derive(Clone, Copy)]
struct Point {
    distance: f64,
    log_likelihood: f64,
    /// Ratio at the maximum.
    ratio: f64,
}

impl Profile<'_> {
    /// The end of the likelihood interval above the most likely distance: where the square root of
    /// the adjusted deviance reaches `z`. Infinite where it never does.
    pub(super) fn end(&self, z: f64) -> f64 {
        let best = self.best();
        if z <= 0.0 {
            return best.distance;
        }
        let mut inner = best;
        loop {
            let outer = self.at(inner.distance * 1.4, inner.ratio);
            if self.errors(&best, &outer) >= z {
                return self.between(&best, inner, outer, z);
            }
            if (outer.distance / best.distance).ln() > FARTHEST.ln() {
                return f64::INFINITY;
            }
            inner = outer;
        }
    }

    /// Distance from the most likely point in standard errors: the root of the adjusted deviance.
    fn errors(&self, best: &Point, point: &Point) -> f64 {
        (2.0 * self.weight * (best.log_likelihood - point.log_likelihood)).max(0.0).sqrt()
    }

    /// Distance between two points at which `z` standard errors are reached. They grow nearly
    /// linearly with the logarithm of the distance, so false position needs a few steps.
    fn between(&self, best: &Point, mut inner: Point, mut outer: Point, z: f64) -> f64 {
        for _ in 0..60 {
            let (low, high) = (self.errors(best, &inner), self.errors(best, &outer));
            let share = if high.is_finite() { ((z - low) / (high - low)).clamp(0.02, 0.98) } else { 0.5 };
            let distance = inner.distance * (outer.distance / inner.distance).powf(share);
            let middle = self.at(distance, inner.ratio);
            let errors = self.errors(best, &middle);
            if (errors - z).abs() <= CLOSE {
                return distance;
            }
            if errors < z { inner = middle } else { outer = middle }
        }
        outer.distance
    }

    /// The most likely distance.
    fn best(&self) -> Point {
        let peak = self.sums.peak(SHAPES);
        let (n, above) = (self.n, self.sums.count());
        let share = above / n;
        let rest = if n > above { (n - above) * (-share).ln_1p() } else { 0.0 };
        Point {
            distance: peak.scale * grow(peak.shape, (share / self.exceedance).ln()),
            log_likelihood: peak.log_likelihood + above * share.ln() + rest,
            ratio: peak.shape / peak.scale,
        }
    }

    /// The highest log-likelihood with the quantile at `distance`; the search begins around the
    /// ratio `near`.
    fn at(&self, distance: f64, near: f64) -> Point {
        let longest = self.sums.max().max(distance);
        let value = |t: f64| self.at_ratio(Sums::ratio(t, longest), distance);
        let point = |(t, log_likelihood)| Point { distance, log_likelihood, ratio: Sums::ratio(t, longest) };
        let centre = (near * longest).max(SEARCH.0.exp_m1()).ln_1p();
        let (t, best) = maximum(centre - NEAR, centre + NEAR, 2, CLOSE, value);
        if best.is_finite() && (t - centre).abs() < 0.9 * NEAR {
            return point((t, best));
        }
        point(maximum(SEARCH.0, SEARCH.1, 36, CLOSE, value))
    }

    /// The highest log-likelihood for one ratio: maximum over x within the admissible shapes.
    fn at_ratio(&self, ratio: f64, d: f64) -> f64 {
        let (logs, over_ratio) = self.sums.logs(ratio);
        let reach = shrink(ratio, d);
        let above = self.sums.count();
        let slope = above * reach - over_ratio;
        let rest = self.n - above;
        let lowest = (ratio / SHAPES.1).max(ratio / SHAPES.0);
        let highest = -self.exceedance.ln() / reach;
        if lowest >= highest {
            return f64::NEG_INFINITY;
        }
        // Share of exceedances at x.
        let share = |x: f64| self.exceedance * (reach * x).exp();
        let derivatives = |x: f64| {
            let z = share(x);
            let bend = rest * reach * z / (1.0 - z);
            (above / x + slope - bend, -above / (x * x) - bend * reach / (1.0 - z))
        };
        let x = falling_root(lowest, highest, derivatives);
        above * (x.ln() + self.exceedance.ln()) + slope * x + rest * (-share(x)).ln_1p() - logs
    }
}

/// Zero of a falling function in `low..high`, or the end nearest to it: Newton's method on `(f,
/// f')`, by halves where it would leave the bracket.
fn falling_root(low: f64, high: f64, f: impl Fn(f64) -> (f64, f64)) -> f64 {
    let (mut low, mut high) = (low, high);
    let mut x = 0.5 * (low + high);
    for _ in 0..60 {
        let (value, slope) = f(x);
        if value > 0.0 {
            low = x
        } else {
            high = x
        }
        let newton = x - value / slope;
        let next = if newton > low && newton < high { newton } else { 0.5 * (low + high) };
        if (next - x).abs() <= 1e-10 * x {
            return next;
        }
        x = next;
    }
    x
}
