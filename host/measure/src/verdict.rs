//! Whether a target is met, missed, or not proven either way.
//!
//! A target `p <= T` allows a share `1 - p` of all requests above `T`. With `k` of `n` requests
//! above it:
//!
//! - **missed** when the measured percentile lies above `T` (nearest rank: `k > n - ceil(p n)`), or
//!   the rate was not kept;
//! - **met** when the one-sided 95 % upper confidence bound of the true share is at most `1 - p`:
//!   the exact binomial bound of Clopper and Pearson (Biometrika 26, 1934), that is
//!   `P(X <= k) <= 5 %` for `X ~ Binomial(n, 1 - p)`. Without any exceedance that is `p^n <= 5 %`,
//!   for p99.99 `n >= 29 956`;
//! - **unproven** otherwise.
//!
//! The bound takes requests as independent. Stalls hit neighbouring requests together, so a rare
//! long stall may be missing from a run whose verdict is `met`; several runs at different times are
//! the remedy, not a larger `n` in one run.

use rtvirtio_spec::Target;
use rtvirtio_units::{Iops, Percentile};

use crate::Verdict;

/// Significance of `met`: 1 - 0.95.
const ALPHA: f64 = 0.05;
/// Share of the declared rate above which the rate counts as kept.
pub const RATE_KEPT: f64 = 0.99;

/// Counts of a run, against one target.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Evidence {
    /// Number of requests that count: completed ones, and those still waiting at the end for longer
    /// than the target.
    pub n: u64,
    /// Number of them whose latency is above the target.
    pub exceedances: u64,
    /// Rate that was declared; `None` for a task without one.
    pub declared: Option<Iops>,
    /// Rate that was kept, see [`crate::run`].
    pub achieved: Iops,
}

/// Verdict, with its reason in a few words.
#[derive(Clone, Debug, PartialEq)]
pub struct Judgement {
    /// Result against the target.
    pub verdict: Verdict,
    /// Reason for it, with numbers.
    pub why: String,
}

/// Judges one target by the counts of a run.
#[must_use]
pub fn judge(target: Target, evidence: &Evidence) -> Judgement {
    let Evidence { n, exceedances: k, declared, achieved } = *evidence;
    let Target { percentile, latency } = target;
    let say = |verdict, why| Judgement { verdict, why };
    let mut reasons = Vec::new();
    if k > allowed(n, percentile) {
        reasons.push(format!("{k} of {n} above {latency}"));
    }
    if let Some(declared) = declared {
        if achieved.0 < declared.0 * RATE_KEPT {
            reasons.push(format!("{achieved} instead of {declared}"));
        }
    }
    if !reasons.is_empty() {
        return say(Verdict::Missed, reasons.join("; "));
    }
    if at_most(k, n, percentile.exceedance()) <= ALPHA {
        return say(Verdict::Met, format!("{k} of {n} above {latency}"));
    }
    let found = format!("{k} of {n} above {latency}");
    let Some(needed) = samples_needed(k, percentile) else {
        return say(Verdict::Unproven, format!("{found}; no number of samples can show {percentile}"));
    };
    let more = needed.saturating_sub(n);
    let rate = declared.map_or(achieved.0, |d| d.0);
    let longer = if rate > 0.0 {
        format!(", {:.0} s more at {}", (more as f64 / rate).ceil(), Iops(rate))
    } else {
        String::new()
    };
    say(Verdict::Unproven, format!("{found}; {percentile} needs {needed} samples{longer}"))
}

/// Most exceedances with which the measured percentile (sample `ceil(p n)` in rising order) still
/// keeps the target.
#[must_use]
pub fn allowed(n: u64, percentile: Percentile) -> u64 {
    // The margin undoes the rounding of 1 - 0.9999: at n = 10 000 one exceedance is allowed, not
    // none.
    (n as f64 * percentile.exceedance() + 1e-6).floor() as u64
}

/// Smallest `n` at which `k` exceedances show the percentile at 95 %; `None` for p100, which no
/// sample can show.
#[must_use]
pub fn samples_needed(k: u64, percentile: Percentile) -> Option<u64> {
    let share = percentile.exceedance();
    if share <= 0.0 {
        return None;
    }
    let enough = |n: u64| at_most(k, n, share) <= ALPHA;
    let mut high = k.saturating_add(1);
    while !enough(high) {
        high = high.checked_mul(2)?;
    }
    let mut low = high / 2;
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if enough(middle) { high = middle } else { low = middle }
    }
    Some(high)
}

/// `P(X <= k)` for `X ~ Binomial(n, p)`, exact below the mean. At or above the mean, where only
/// "far more than 5 %" matters, it is 1/2: the median lies between `floor(np)` and `ceil(np)` (Kaas
/// and Buhrman, Statistica Neerlandica 34, 1980).
fn at_most(k: u64, n: u64, p: f64) -> f64 {
    if k >= n || p <= 0.0 {
        return 1.0;
    }
    if p >= 1.0 {
        return 0.0;
    }
    if k as f64 >= n as f64 * p {
        return 0.5;
    }
    let (nf, kf) = (n as f64, k as f64);
    // ln of the last term, then downwards: P(X = i - 1) / P(X = i) = i (1 - p) / ((n - i + 1) p).
    let last =
        ln_factorial(n) - ln_factorial(k) - ln_factorial(n - k) + kf * p.ln() + (nf - kf) * (-p).ln_1p();
    let (mut term, mut sum) = (1.0f64, 1.0f64);
    let mut i = kf;
    while i >= 1.0 {
        term *= i * (1.0 - p) / ((nf - i + 1.0) * p);
        sum += term;
        if term < sum * 1e-17 {
            break;
        }
        i -= 1.0;
    }
    (last + sum.ln()).exp().min(1.0)
}

/// `ln n!`: a sum for small `n`, Stirling's series above (error below 1e-12 relative at n = 32).
fn ln_factorial(n: u64) -> f64 {
    if n < 32 {
        return (2..=n).map(|i| (i as f64).ln()).sum();
    }
    let x = n as f64;
    let inv = 1.0 / x;
    let series = inv / 12.0 - inv.powi(3) / 360.0 + inv.powi(5) / 1260.0;
    x * x.ln() - x + 0.5 * (std::f64::consts::TAU * x).ln() + series
}

#[cfg(test)]
mod tests;
