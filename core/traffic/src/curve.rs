//! Network calculus: arrival curves, service, and the service left by other traffic.
//!
//! Sources: RFC 2215 (TSPEC); Le Boudec and Thiran, Network Calculus (2001): delay and backlog
//! (theorems 1.4.1 and 1.4.2), service left by other traffic (theorem 6.2.1); (alpha, Delta): Mok,
//! Feng and Chen (RTAS 2001), as in the I/O-domain paper, section III-B2.

use serde::{Deserialize, Serialize};

/// At most `min(peak t + piece, rate t + burst)` in any interval of t seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Arrival {
    /// Long-run rate, per second.
    pub rate: f64,
    /// Amount beyond the rate that may come at once.
    pub burst: f64,
    /// Peak per second, and the amount that may come at once under it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak: Option<(f64, f64)>,
}

impl Arrival {
    /// Largest amount in an interval of `t` seconds.
    #[must_use]
    pub fn at(&self, t: f64) -> f64 {
        let long = self.rate * t + self.burst;
        self.peak.map_or(long, |(peak, piece)| long.min(peak * t + piece))
    }

    /// Time at which the rate limits instead of the peak, in seconds.
    fn bend(&self) -> f64 {
        match self.peak {
            Some((peak, piece)) if peak > self.rate => ((self.burst - piece) / (peak - self.rate)).max(0.0),
            _ => 0.0,
        }
    }

    /// Longest time for which a token bucket of this curve delays traffic with this burst and no
    /// higher rate, in seconds: the largest horizontal distance of the curves,
    /// `(burst - b) / rate` and `(burst - piece) / peak` (Le Boudec and Thiran, section 1.5).
    #[must_use]
    pub fn holds_back(&self, burst: f64) -> f64 {
        let long = (burst - self.burst) / self.rate;
        let short = self.peak.map_or(0.0, |(peak, piece)| (burst - piece) / peak);
        long.max(short).max(0.0)
    }

    /// Largest excess of this curve over `other` in any interval; `None` when it grows without
    /// bound.
    ///
    /// Both are concave and piecewise linear, so the difference is largest where one of them bends,
    /// or at 0.
    #[must_use]
    pub fn excess_over(&self, other: &Self) -> Option<f64> {
        let slope = |a: &Self| a.peak.map_or(a.rate, |(peak, _)| peak.min(a.rate));
        // Smaller differences are rounding errors.
        if slope(self) > slope(other) * (1.0 + 1e-9) {
            return None;
        }
        let at = |t: f64| self.at(t) - other.at(t);
        Some([0.0, self.bend(), other.bend()].map(at).into_iter().fold(0.0, f64::max))
    }
}

/// Service of a backlogged flow: `alpha` per second after a gap of `delta` seconds without service.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Service {
    /// alpha: long-run rate, per second.
    pub alpha: f64,
    /// Delta: longest time without service, in seconds.
    pub delta: f64,
}

impl Service {
    /// Longest delay of traffic within `arrival`, in seconds; `None` when its rate exceeds alpha.
    #[must_use]
    pub fn delay(&self, arrival: &Arrival) -> Option<f64> {
        if arrival.rate > self.alpha {
            return None;
        }
        // The horizontal distance is largest at a bend.
        let at = |t: f64| self.delta + arrival.at(t) / self.alpha - t;
        Some(at(0.0).max(at(arrival.bend())))
    }

    /// Largest backlog of traffic within `arrival`; `None` when its rate exceeds alpha.
    #[must_use]
    pub fn backlog(&self, arrival: &Arrival) -> Option<f64> {
        if arrival.rate > self.alpha {
            return None;
        }
        let at = |t: f64| arrival.at(t) - self.alpha * (t - self.delta).max(0.0);
        Some(at(self.delta).max(at(arrival.bend())).max(at(0.0)))
    }

    /// Service left by neighbours within `arrival`, in any order of service; `None` when nothing is
    /// left.
    ///
    /// `alpha (t - delta) - rate t - burst` is `(alpha - rate) (t - T)` with
    /// `T = (alpha delta + burst) / (alpha - rate)`.
    #[must_use]
    pub fn left_by(&self, arrival: &Arrival) -> Option<Self> {
        let left = self.alpha - arrival.rate;
        (left > 0.0).then(|| Self { alpha: left, delta: (self.alpha * self.delta + arrival.burst) / left })
    }

    /// Service left by neighbours within `arrival` to a flow that has `own` requests outstanding at
    /// all times, where the oldest request is served first and at most `others` of the neighbours'
    /// are outstanding; counted in requests. `None` when nothing is left.
    ///
    /// Requests served before one of the flow's are older, so they were outstanding when that
    /// request arrived: `own - 1` of the flow, and `others` of the neighbours. A regulator that
    /// delays some of these does not change the bound.
    ///
    /// - alpha: of `own + others` served in a row `own` are the flow's, and the neighbours have no
    ///   more than their rate: `max(alpha - rate, alpha own / (own + others))`.
    /// - delta: between two completions of the flow no more than `others` of the neighbours' are
    ///   served: `delta + others / alpha`. [`Service::left_by`] counts a burst below that.
    ///
    /// For a flow that is itself within an arrival curve this is the delay bound of FIFO service,
    /// `T + (sum of bursts) / C` (Le Boudec and Thiran, section 6.2.2), where a closed loop's burst
    /// is at most its outstanding requests.
    #[must_use]
    pub fn fifo_left_by(&self, arrival: &Arrival, own: f64, others: f64) -> Option<Self> {
        let blind = self.left_by(arrival);
        let share = if own > 0.0 { own / (own + others) } else { 0.0 };
        let alpha = (self.alpha * share).max(blind.map_or(0.0, |left| left.alpha));
        let turn = self.delta + others / self.alpha;
        (alpha > 0.0).then(|| Self { alpha, delta: blind.map_or(turn, |left| left.delta.min(turn)) })
    }

    /// Longest time without service that neighbours within `arrival` leave, in seconds: as
    /// [`Service::left_by`], but shorter where their peak spreads a burst.
    #[must_use]
    pub fn gap_left_by(&self, arrival: &Arrival) -> Option<f64> {
        let long = self.left_by(arrival)?.delta;
        let short = arrival.peak.and_then(|(peak, piece)| {
            self.left_by(&Arrival { rate: peak, burst: piece, peak: None }).map(|left| left.delta)
        });
        Some(short.map_or(long, |short| short.min(long)))
    }

    /// Service of a flow behind its own regulator with a queue that never empties. One unit of
    /// service of `largest` is due each `largest / rate`, and Delta is at most that plus the
    /// service's own.
    #[must_use]
    pub fn regulated(&self, own: &Arrival, largest: f64) -> Self {
        let rate = own.peak.map_or(own.rate, |(peak, _)| peak.min(own.rate));
        Self { alpha: self.alpha.min(rate), delta: self.delta + largest / rate }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_peak_counts_until_the_burst_is_used_up() {
        let a = Arrival { rate: 10.0, burst: 50.0, peak: Some((20.0, 10.0)) };
        assert_eq!((a.at(0.0), a.at(1.0), a.at(4.0), a.at(10.0)), (10.0, 30.0, 90.0, 150.0));
        let free = Arrival { peak: None, ..a };
        assert_eq!(free.at(0.0), 50.0);
        assert_eq!(free.excess_over(&a), Some(40.0));
        assert_eq!(a.excess_over(&free), Some(0.0));
        assert_eq!(Arrival { rate: 11.0, ..free }.excess_over(&a), None);
    }

    #[test]
    fn a_token_bucket_into_a_rate_and_latency_server() {
        let server = Service { alpha: 100.0, delta: 0.01 };
        let flow = Arrival { rate: 40.0, burst: 20.0, peak: None };
        // delta + b / alpha, and b + r delta.
        assert!((server.delay(&flow).unwrap() - 0.21).abs() < 1e-12);
        assert!((server.backlog(&flow).unwrap() - 20.4).abs() < 1e-12);
        assert_eq!(server.delay(&Arrival { rate: 101.0, ..flow }), None);
        let left = server.left_by(&flow).unwrap();
        assert!((left.alpha - 60.0).abs() < 1e-12 && (left.delta - 21.0 / 60.0).abs() < 1e-12, "{left:?}");
        assert_eq!(server.left_by(&Arrival { rate: 100.0, ..flow }), None);
        // A peak below the service shortens the gap caused by a large burst.
        let slow = Arrival { peak: Some((50.0, 1.0)), ..flow };
        assert!((server.gap_left_by(&slow).unwrap() - 2.0 / 50.0).abs() < 1e-12);
        assert_eq!(server.gap_left_by(&flow), Some(left.delta));
        let own = server.regulated(&flow, 1.0);
        assert!((own.alpha - 40.0).abs() < 1e-12 && (own.delta - 0.035).abs() < 1e-12, "{own:?}");
    }

    #[test]
    fn first_come_first_served_leaves_its_share_of_what_is_outstanding() {
        let server = Service { alpha: 1_000.0, delta: 0.002 };
        let of = |rate, burst| server.fifo_left_by(&Arrival { rate, burst, peak: None }, 16.0, 16.0);
        // A small burst counts as in any order, a large one at most as the outstanding requests.
        assert_eq!(of(100.0, 2.0), server.left_by(&Arrival { rate: 100.0, burst: 2.0, peak: None }));
        let large = of(300.0, 500.0).unwrap();
        assert!((large.alpha - 700.0).abs() < 1e-9 && (large.delta - 0.018).abs() < 1e-12, "{large:?}");
        // A neighbour without an effective limit takes half.
        let half = of(5_000.0, 50.0).unwrap();
        assert!((half.alpha - 500.0).abs() < 1e-9 && (half.delta - 0.018).abs() < 1e-12, "{half:?}");
        assert_eq!(server.fifo_left_by(&Arrival { rate: 1_000.0, burst: 1.0, peak: None }, 0.0, 4.0), None);
    }

    /// Completions of a flow with `own` requests outstanding, in seconds: one at a time, the oldest
    /// first; a neighbour with `others` outstanding has a token bucket.
    fn oldest_first(speed: f64, own: usize, others: usize, bucket: &Arrival, count: usize) -> Vec<f64> {
        let (mut now, mut tokens, mut filled) = (0.0, bucket.burst, 0.0);
        let mut waiting = [vec![0.0; own], vec![0.0; others]];
        let mut done = Vec::new();
        while done.len() < count {
            tokens = (tokens + (now - filled) * bucket.rate).min(bucket.burst);
            filled = now;
            let older = waiting[1].first().is_some_and(|at| *at <= waiting[0][0]);
            let neighbour = older && tokens >= 1.0;
            now += 1.0 / speed;
            let of = usize::from(neighbour);
            waiting[of].remove(0);
            waiting[of].push(now);
            if neighbour {
                tokens -= 1.0;
            } else {
                done.push(now);
            }
        }
        done
    }

    proptest! {
        /// Neither alpha nor Delta of a closed loop is worse than the bound.
        #[test]
        fn what_is_left_first_come_first_served_holds(
            own in 1usize..20, others in 1usize..20, rate in 1.0f64..3_000.0, burst in 1.0f64..100.0,
        ) {
            let server = Service { alpha: 1_000.0, delta: 0.0 };
            let bucket = Arrival { rate, burst, peak: None };
            let left = server.fifo_left_by(&bucket, own as f64, others as f64).unwrap();
            let at = oldest_first(server.alpha, own, others, &bucket, 2_000);
            let gap = at.windows(2).map(|two| two[1] - two[0]).fold(0.0, f64::max);
            prop_assert!(gap <= left.delta + 1.0 / server.alpha + 1e-9, "{gap} {left:?}");
            // The first burst, and what is outstanding at the end, are no part of the long run.
            let most = (at.len() as f64 + burst) / left.alpha + (own + others) as f64 / server.alpha;
            let last = at[at.len() - 1];
            prop_assert!(last <= most + 1e-9, "{last} {left:?}");
        }

        /// No interval exceeds by more than the bound, and some interval does by as much.
        #[test]
        fn the_excess_is_the_largest_over_all_intervals(
            rate in 1.0f64..100.0, burst in 1.0f64..500.0, peak in 1.0f64..5.0, piece in 1.0f64..50.0,
            rate2 in 0.5f64..1.0, burst2 in 1.0f64..500.0, peak2 in prop::option::of(1.0f64..5.0),
        ) {
            let asked = Arrival { rate, burst: burst.max(piece), peak: Some((rate * peak, piece)) };
            let kept = Arrival {
                rate: rate * rate2,
                burst: burst2.max(piece),
                peak: peak2.map(|p| (rate * rate2 * p, piece)),
            };
            let bound = kept.excess_over(&asked).unwrap();
            let mut seen = 0.0f64;
            for i in 0..20_000 {
                let t = f64::from(i) * 0.05;
                seen = seen.max(kept.at(t) - asked.at(t));
                prop_assert!(kept.at(t) - asked.at(t) <= bound + 1e-6);
            }
            prop_assert!(seen >= bound - 0.05 * rate * 5.0 - 1e-6, "{seen} {bound}");
        }

        /// No delay is longer than the bound, for arrivals as early as the curve permits.
        #[test]
        fn the_delay_holds(alpha in 50.0f64..100.0, delta in 0.0f64..0.5, rate in 1.0f64..50.0, burst in 1.0f64..100.0) {
            let (server, flow) = (Service { alpha, delta }, Arrival { rate, burst, peak: None });
            let bound = server.delay(&flow).unwrap();
            for i in 0..1_000 {
                let t = f64::from(i) * 0.01;
                let served_at = delta + flow.at(t) / alpha;
                prop_assert!(served_at - t <= bound + 1e-9);
            }
        }
    }
}
