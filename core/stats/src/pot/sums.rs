//! The sums over the excesses that the likelihood of a generalised Pareto distribution consists of.
//!
//! With `ratio = shape / scale` the log-likelihood of N excesses y is
//! `-N ln(scale) - L - L / (ratio scale)`, `L = sum ln(1 + ratio y)`: all data enter through a
//! function of one number (Davison 1984; Grimshaw, Technometrics 35, 1993). Given the ratio the
//! best shape is `L / N`, which rises with the ratio. The search runs over
//! `t = ln(1 + ratio max(y))`, where every real number is admissible.

use super::PotError;

/// Excesses prepared for the likelihood.
#[derive(Clone, Debug)]
pub(super) struct Sums {
    /// Excesses in rising order, all above zero.
    excesses: Vec<f64>,
    mean: f64,
}

/// The maximum of the likelihood among the shapes allowed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Peak {
    pub(super) shape: f64,
    pub(super) scale: f64,
    pub(super) log_likelihood: f64,
    /// Whether the shape is inside the allowed ones, not at their edge.
    pub(super) inside: bool,
}

/// Range of `t` that is searched: beyond it 1 + ratio y has no digits left, or one excess outweighs
/// 10^17 others.
const SEARCH: (f64, f64) = (-30.0, 40.0);
/// Points of the first, coarse search.
const COARSE: usize = 32;

impl Sums {
    /// Of finite excesses above zero, of which at least three differ.
    pub(super) fn new(excesses: &[f64]) -> Result<Self, PotError> {
        let mut rising = excesses.to_vec();
        rising.sort_unstable_by(f64::total_cmp);
        let different = 1 + rising.windows(2).filter(|y| y[0] < y[1]).count();
        if different < 3 {
            return Err(PotError::TooFew { have: different, need: 3 });
        }
        let mean = rising.iter().sum::<f64>() / rising.len() as f64;
        Ok(Self { excesses: rising, mean })
    }

    pub(super) fn count(&self) -> f64 {
        self.excesses.len() as f64
    }

    pub(super) fn max(&self) -> f64 {
        self.excesses[self.excesses.len() - 1]
    }

    /// Excesses in rising order.
    pub(super) fn excesses(&self) -> &[f64] {
        &self.excesses
    }

    /// `(L, L / ratio)` for a ratio above `-1 / max`.
    pub(super) fn logs(&self, ratio: f64) -> (f64, f64) {
        if (ratio * self.max()).abs() < 1e-3 {
            if ratio == 0.0 {
                return (0.0, self.mean * self.count());
            }
            let sum: f64 = self.excesses.iter().map(|y| (ratio * y).ln_1p()).sum();
            return (sum, sum / ratio);
        }
        // One logarithm for eight factors: each is below 1e18 and above 1e-14, so no product
        // overflows.
        let sum: f64 = self
            .excesses
            .chunks(8)
            .map(|eight| eight.iter().map(|y| 1.0 + ratio * y).product::<f64>().ln())
            .sum();
        (sum, sum / ratio)
    }

    /// The ratio at a place `t` of the search, for excesses up to `max`.
    pub(super) fn ratio(t: f64, max: f64) -> f64 {
        t.exp_m1() / max
    }

    /// The highest likelihood with a shape in `shapes`.
    pub(super) fn peak(&self, shapes: (f64, f64)) -> Peak {
        let low = self.place_of_shape(shapes.0);
        let high = self.place_of_shape(shapes.1);
        let value = |t| self.at(t).log_likelihood;
        let (best, _) = maximum(low, high, COARSE, 1e-7, value);
        let margin = 1e-6 * (high - low);
        Peak { inside: best > low + margin && best < high - margin, ..self.at(best) }
    }

    /// The best shape and scale for the ratio at `t`, with their log-likelihood.
    fn at(&self, t: f64) -> Peak {
        let (sum, over_ratio) = self.logs(Self::ratio(t, self.max()));
        let n = self.count();
        let (shape, scale) = (sum / n, over_ratio / n);
        Peak { shape, scale, log_likelihood: -n * (scale.ln() + shape + 1.0), inside: true }
    }

    /// `t` at which the best shape is `shape`, or the end of the search.
    fn place_of_shape(&self, shape: f64) -> f64 {
        let (mut low, mut high) = SEARCH;
        for _ in 0..60 {
            let middle = 0.5 * (low + high);
            if self.at(middle).shape < shape { low = middle } else { high = middle }
        }
        0.5 * (low + high)
    }

    /// Unbiased estimates of `E[Y]` and `E[Y (1 - F(Y))]`.
    pub(super) fn weighted_moments(&self) -> (f64, f64) {
        let n = self.count();
        let weighted = |(i, y): (usize, &f64)| y * (n - 1.0 - i as f64) / (n - 1.0);
        (self.mean, self.excesses.iter().enumerate().map(weighted).sum::<f64>() / n)
    }
}

/// Place and value of the maximum of `f` in `low..=high`: the best of `coarse` + 1 even steps, then
/// golden section around it until it is known to `close`.
pub(super) fn maximum(low: f64, high: f64, coarse: usize, close: f64, f: impl Fn(f64) -> f64) -> (f64, f64) {
    let place = |i: usize| low + (high - low) * i as f64 / coarse as f64;
    let mut best = (0, f64::NEG_INFINITY);
    for i in 0..=coarse {
        let value = f(place(i));
        if value > best.1 {
            best = (i, value);
        }
    }
    let (mut a, mut b) = (place(best.0.saturating_sub(1)), place((best.0 + 1).min(coarse)));
    let golden = 0.5 * (5f64.sqrt() - 1.0);
    let (mut c, mut d) = (b - golden * (b - a), a + golden * (b - a));
    let (mut fc, mut fd) = (f(c), f(d));
    while b - a > close {
        if fc >= fd {
            (b, d, fd) = (d, c, fc);
            c = b - golden * (b - a);
            fc = f(c);
        } else {
            (a, c, fc) = (c, d, fd);
            d = a + golden * (b - a);
            fd = f(d);
        }
    }
    let ends = [(place(best.0), best.1), (c, fc), (d, fd)];
    ends.into_iter().fold((low, f64::NEG_INFINITY), |m, e| if e.1 > m.1 { e } else { m })
}
