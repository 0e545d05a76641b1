//! Time that work waits for a CPU: at most, in a CPU contract, and by estimate, without one.
//!
//! A budget Q in each period P may come at the start of one period and at the end of the next:
//! nothing for 2 (P - Q), then Q in each P (supply of the periodic resource model, Shin and Lee,
//! RTSS 2003, section 3). Solved for the time, work of W takes no longer than
//! `W + (P - Q) (1 + ceil(W / Q))`: 10 units in Q = 4, P = 20 take at most 10 + 16 * 4 = 74.
//!
//! The kernel detects only at a tick that a budget is used up, and takes the excess from the
//! periods that follow: a debt, which counts as work that is done before. The bound is about work
//! that the VM does alone: other work of the VM uses up the same budget.
//!
//! Without a contract no wait is bounded. The mean of observed waits gives an estimate: in a queue
//! near saturation waits are exponential (Kingman, "The single server queue in heavy traffic",
//! Proc. Cambridge Phil. Soc. 57, 1961), so that a share `1 - p` of them is longer than
//! `mean * ln(1 / (1 - p))`.

use rtvirtio_units::{Nanos, Percentile};

use crate::cpus::beyond;

/// Longest time of work in a periodic resource, after a debt of so much work. No overflow for times
/// of a spec, below 61 s with budgets from 1 ms; beyond them the time saturates.
fn response(work: Nanos, debt: Nanos, budget: Nanos, period: Nanos) -> Nanos {
    let (all, q) = (work.0.saturating_add(debt.0), budget.0.max(1));
    let stops = all.div_ceil(q).saturating_add(1);
    Nanos(all.saturating_add(period.0.saturating_sub(q).saturating_mul(stops)))
}

/// Later messages of a stream for which [`response_of_stream`] is exact.
const LATER: u32 = 1_000;

/// Longest response of any message of a stream, after a debt: of work each, so many at once, and
/// beyond them `rate` a second. `None` where the budget carries no such rate.
///
/// Message k beyond those at once comes `k / rate` later, behind the work of all before it: it may
/// take longer than the first ones where its work begins another budget. The linear lower bound of
/// the supply, `Q/P (t - 2 (P - Q))`, bounds all of them.
#[must_use]
pub fn response_of_stream(
    work: Nanos,
    (at_once, rate): (u32, f64),
    debt: Nanos,
    budget: Nanos,
    period: Nanos,
) -> Option<Nanos> {
    let (q, p) = (budget.0.max(1) as f64, period.0 as f64);
    let (carried, gap) = (work.0 as f64 * p / q, 1e9 / rate);
    if carried > gap * (1.0 + 1e-9) {
        return None;
    }
    let first = work.0.saturating_mul(at_once.max(1).into());
    let linear = 2.0 * (p - q).max(0.0) + (first as f64 + debt.0 as f64) * p / q;
    let mut longest = response(Nanos(first), debt, budget, period);
    for later in 1..=LATER {
        if linear - f64::from(later) * (gap - carried) <= longest.0 as f64 {
            return Some(longest);
        }
        let all = first.saturating_add(work.0.saturating_mul(later.into()));
        let took = response(Nanos(all), debt, budget, period);
        longest = longest.max(Nanos(took.0.saturating_sub((f64::from(later) * gap) as u64)));
    }
    Some(longest.max(Nanos(linear.ceil() as u64)))
}

/// Estimate of a percentile of waits with this mean; at the 100th percentile that of p99.9999.
#[must_use]
pub fn tail_of_waits(mean: Nanos, percentile: Percentile) -> Nanos {
    Nanos((mean.0 as f64 * (1.0 / beyond(percentile)).ln()).round() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Against the supply function itself, at every unit of time.
    #[test]
    fn the_response_is_the_inverse_of_the_supply() {
        for (q, p) in [(4u64, 20u64), (1, 1), (3, 7), (10, 10)] {
            // The least supply in t: nothing for 2 (P - Q), then Q in each P.
            let supply = |t: u64| {
                let Some(left) = t.checked_sub(2 * (p - q)) else { return 0 };
                left / p * q + (left % p).min(q)
            };
            for w in 1..40 {
                let t = response(Nanos(w), Nanos(0), Nanos(q), Nanos(p)).0;
                assert!(supply(t) >= w && supply(t - 1) < w, "Q {q} P {p} W {w}: {t}");
            }
        }
    }

    /// A server that detects its overrun only at a tick and pays it back, from every phase of the
    /// tick: 1500 periods each.
    #[test]
    fn a_throttled_server_with_ticks_keeps_the_bound() {
        for (q, p, tick) in [(4u64, 20u64, 4u64), (10, 20, 4), (2, 10, 4), (20, 50, 10), (5, 7, 1)] {
            let (bound, mut worst) = (|w| response(Nanos(w), Nanos(tick), Nanos(q), Nanos(p)).0, [0; 12]);
            for phase in 0..tick {
                // Unit of time at which each unit of work ends.
                let (mut ends, mut used, mut throttled) = (vec![0], 0, false);
                for t in 0..1500 * p {
                    if t % p == 0 {
                        used -= used.min(q);
                        throttled = used >= q;
                    }
                    if (t + phase) % tick == 0 {
                        throttled |= used >= q;
                    }
                    if !throttled {
                        used += 1;
                        ends.push(t + 1);
                    }
                }
                for (w, worst) in (1..).zip(&mut worst) {
                    let longest = ends.windows(w + 1).map(|of| of[w] - of[0]).max();
                    *worst = longest.unwrap_or(0).max(*worst);
                }
            }
            for (w, worst) in (1..).zip(worst) {
                assert!(worst <= bound(w), "Q {q} P {p} tick {tick} W {w}: {worst} > {}", bound(w));
            }
        }
    }

    /// Each message of a stream against the least supply.
    #[test]
    fn no_message_of_a_stream_takes_longer() {
        let of = |q, p, debt, work, at_once, gap: u64| {
            let stream = (at_once, 1e9 / gap as f64);
            response_of_stream(Nanos(work), stream, Nanos(debt), Nanos(q), Nanos(p)).map(|of| of.0)
        };
        for (q, p, debt, work, at_once, gap) in [
            (5u64, 20u64, 4u64, 1u64, 1u32, 5u64),
            (5, 20, 4, 1, 1, 4),
            (4, 20, 4, 3, 2, 16),
            (3, 7, 1, 2, 4, 5),
            (10, 10, 0, 1, 1, 1),
        ] {
            let bound = of(q, p, debt, work, at_once, gap).unwrap();
            for k in 0..300 {
                let all = debt + work * (u64::from(at_once) + k);
                let end = response(Nanos(all), Nanos(0), Nanos(q), Nanos(p)).0;
                assert!(end.saturating_sub(k * gap) <= bound, "Q {q} P {p}: {k} ends at {end}, {bound}");
            }
        }
        // One begins another budget, 5 later: 6 + 15 * 3 less 5, where the first takes 35.
        assert_eq!(of(5, 20, 4, 1, 1, 5), Some(46));
        assert_eq!(of(5, 20, 4, 1, 1, 3), None, "more than the budget");
    }

    #[test]
    fn a_tail_is_the_mean_times_the_logarithm() {
        let tail = |p| tail_of_waits(Nanos(1_000), Percentile(p)).0;
        assert_eq!([tail(0.0), tail(99.0), tail(99.99), tail(100.0)], [0, 4605, 9210, 13816]);
    }
}
