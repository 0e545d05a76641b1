//! Token buckets, exact to the nanosecond.
//!
//! A bucket of rate r (tokens per second) and burst b admits at most `r t + b` tokens in any
//! interval of length t, and admits a request at the first nanosecond at which that holds. Levels
//! are kept in billionths of a token, so that a nanosecond at rate r adds exactly r of them:
//! nothing is rounded, and nothing waits for a tick. (Firecracker's limiter wakes every 100 ms,
//! SPDK's every 1 ms.)
//!
//! Range: a level is at most `burst * 10^9` and fits 64 bits for bursts up to `MAX_BURST`; products
//! with the elapsed time are taken in 128 bits.

use rtvirtio_units::Nanos;
use serde::{Deserialize, Serialize};

use crate::request::Op;

/// Billionths in a token; also nanoseconds in a second, which is why a level needs no division.
const SCALE: u64 = 1_000_000_000;

/// Largest burst, in tokens.
pub const MAX_BURST: u64 = 1 << 34;

/// Longest time to pay off a debt.
const LONGEST_DEBT_NS: u64 = 3_600 * SCALE;

/// A traffic specification after RFC 2215: in any interval t at most
/// `min(M + peak t, burst + rate t)`, with M one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tspec {
    /// Tokens per second in the long run.
    pub rate: u64,
    /// Tokens beyond the rate.
    pub burst: u64,
    /// Most tokens per second within the burst.
    pub peak: Option<u64>,
}

/// A token bucket with a lazily updated level.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    rate: u64,
    /// The burst, in billionths.
    full: u64,
    /// Tokens at `at`, in billionths.
    level: u64,
    at: Nanos,
}

impl Bucket {
    /// A full bucket at time 0. `burst` is limited to `MAX_BURST`.
    #[must_use]
    pub fn new(rate: u64, burst: u64) -> Self {
        let full = burst.min(MAX_BURST) * SCALE;
        Self { rate, full, level: full, at: Nanos(0) }
    }

    /// The burst, in tokens.
    #[must_use]
    pub fn burst(&self) -> u64 {
        self.full / SCALE
    }

    /// The first moment not before `from` at which `tokens` are available; `u64::MAX` when they
    /// never are.
    ///
    /// A request for more than the burst is never admitted: [`crate::Config`] refuses bursts below
    /// one piece.
    #[must_use]
    pub fn ready_at(&self, from: Nanos, tokens: u64) -> Nanos {
        let from = from.max(self.at);
        let need = u128::from(tokens) * u128::from(SCALE);
        if need > u128::from(self.full) {
            return Nanos(u64::MAX);
        }
        let missing = (need as u64).saturating_sub(self.level_at(from));
        if missing == 0 {
            return from;
        }
        if self.rate == 0 {
            return Nanos(u64::MAX);
        }
        Nanos(from.0.saturating_add(missing.div_ceil(self.rate)))
    }

    /// Takes `tokens` at `now`, which is not before [`Bucket::ready_at`]. A clock that runs
    /// backwards counts as standing still.
    pub fn take(&mut self, now: Nanos, tokens: u64) {
        let now = now.max(self.at);
        self.level = self.level_at(now).saturating_sub(tokens.saturating_mul(SCALE));
        self.at = now;
    }

    /// Takes `tokens` that were used without being available: the next tokens pay off the debt.
    ///
    /// A debt is a bucket that stays empty until `now + missing / rate`, rounded up to the
    /// nanosecond, but for an hour at most: device time has no upper bound, and the VM must be
    /// served again.
    pub fn overdraw(&mut self, now: Nanos, tokens: u64) {
        let now = now.max(self.at);
        let need = u128::from(tokens) * u128::from(SCALE);
        let level = self.level_at(now);
        self.at = now;
        match need.checked_sub(u128::from(level)) {
            None | Some(0) => self.level = level - need as u64,
            Some(missing) => {
                self.level = 0;
                let wait = match u128::from(self.rate) {
                    0 => u64::MAX,
                    rate => u64::try_from(missing.div_ceil(rate)).unwrap_or(u64::MAX),
                };
                self.at = Nanos(now.0.saturating_add(wait.min(LONGEST_DEBT_NS)));
            }
        }
    }

    /// The level in billionths at a moment not before `at`.
    fn level_at(&self, t: Nanos) -> u64 {
        let gained = u128::from(t.0 - self.at.0) * u128::from(self.rate);
        let level = u128::from(self.level) + gained;
        level.min(u128::from(self.full)) as u64
    }
}

/// Tokens that one piece takes from a regulator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Charge {
    /// Requests: 1 for the first piece of a request, 0 for the others.
    pub requests: u64,
    /// Bytes moved or zeroed.
    pub bytes: u64,
    /// Device time in ns.
    pub time: u64,
}

impl Charge {
    /// The charge of a piece of `len` bytes that costs `time` ns; `first` for the first piece of
    /// its request.
    #[must_use]
    pub fn for_piece(op: Op, len: u64, first: bool, time: u64) -> Self {
        // Zeroing counts as written: a device without a better way writes the zeroes.
        let bytes = if op.moves_data() || op == Op::WriteZeroes { len } else { 0 };
        Self { requests: u64::from(first), bytes, time }
    }
}

/// A limit that also holds when the device is otherwise idle (not work-conserving).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cap {
    /// Tokens are requests, `per_request` for each.
    pub requests: Option<Tspec>,
    /// Tokens of a request in `requests`, for rates that are no whole number of requests per
    /// second; 0 counts as 1.
    pub per_request: u64,
    /// Tokens are bytes of data or zeroes.
    pub bytes: Option<Tspec>,
    /// Tokens are ns of device time.
    pub time: Option<Tspec>,
}

/// The buckets of one VM and direction.
#[derive(Clone, Debug)]
pub struct Regulator {
    /// Long-run and peak bucket for requests, bytes and time.
    buckets: [[Option<Bucket>; 2]; 3],
    per_request: u64,
    unlimited: bool,
    capped: bool,
    cap_hits: u64,
}

impl Regulator {
    /// From a cap; `most` is the largest charge of one piece.
    #[must_use]
    pub fn new(cap: &Cap, most: Charge) -> Self {
        let per_request = cap.per_request.max(1);
        let most = [most.requests.saturating_mul(per_request), most.bytes, most.time];
        let specs = [cap.requests, cap.bytes, cap.time];
        let buckets = std::array::from_fn(|i| match specs[i] {
            None => [None, None],
            Some(spec) => {
                [Some(Bucket::new(spec.rate, spec.burst)), spec.peak.map(|p| Bucket::new(p, most[i].max(1)))]
            }
        });
        let unlimited = specs.iter().all(Option::is_none);
        Self { unlimited, buckets, per_request, capped: false, cap_hits: 0 }
    }

    fn tokens(&self, charge: &Charge) -> [u64; 3] {
        [charge.requests.saturating_mul(self.per_request), charge.bytes, charge.time]
    }

    /// The first moment from `now` on at which a piece is admitted.
    #[must_use]
    pub fn ready_at(&self, now: Nanos, charge: &Charge) -> Nanos {
        if self.unlimited {
            return now;
        }
        let mut ready = now;
        for (pair, tokens) in self.buckets.iter().zip(self.tokens(charge)) {
            for bucket in pair.iter().flatten() {
                // Requests queued before the burst was reduced go with a full bucket.
                ready = ready.max(bucket.ready_at(now, tokens.min(bucket.burst())));
            }
        }
        ready
    }

    /// Charges a piece to all buckets.
    pub fn take(&mut self, now: Nanos, charge: &Charge) {
        self.capped = false;
        if self.unlimited {
            return;
        }
        let tokens = self.tokens(charge);
        for (pair, tokens) in self.buckets.iter_mut().zip(tokens) {
            for bucket in pair.iter_mut().flatten() {
                if tokens > bucket.burst() {
                    bucket.overdraw(now, tokens);
                } else {
                    bucket.take(now, tokens);
                }
            }
        }
    }

    /// Charges device time beyond the charge at submission, in ns.
    pub(crate) fn overdraw_time(&mut self, now: Nanos, time: u64) {
        for bucket in self.buckets[2].iter_mut().flatten() {
            bucket.overdraw(now, time);
        }
    }

    /// Whether the cap limits bytes.
    pub(crate) fn limits_bytes(&self) -> bool {
        self.buckets[1].iter().any(Option::is_some)
    }

    /// Records that the cap delays a piece; each piece counts once.
    pub(crate) fn note_capped(&mut self) {
        self.cap_hits += u64::from(!self.capped);
        self.capped = true;
    }

    /// Number of pieces that waited for this cap.
    #[must_use]
    pub fn cap_hits(&self) -> u64 {
        self.cap_hits
    }

    pub(crate) fn with_cap_hits(mut self, cap_hits: u64) -> Self {
        self.cap_hits = cap_hits;
        self
    }
}

/// Guaranteed service: `rate` and `burst` of device time, each piece within `deadline` of its
/// arrival.
///
/// Requests within rate and burst have the deadline `arrival + deadline`. A request that arrives
/// too early for them gets the deadline of the moment at which the bucket admits it; until then it
/// competes for the unreserved rest, and service from that is not charged to the reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reservation {
    /// ns of device time per second; 10^9 is all of a device that serves one piece at a time.
    pub rate: u64,
    /// Burst, in ns of device time.
    pub burst: u64,
    /// Longest time from arrival to completion.
    pub deadline: Nanos,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_first_nanosecond_is_exact() {
        // 3 requests per second, burst of 2: the third is admitted after a third of a second,
        // exactly.
        let mut bucket = Bucket::new(3, 2);
        bucket.take(Nanos(0), 2);
        assert_eq!(bucket.ready_at(Nanos(0), 1), Nanos(333_333_334));
        // The fraction of a nanosecond is not lost: three thirds are a second.
        bucket.take(Nanos(333_333_334), 1);
        assert_eq!(bucket.ready_at(Nanos(333_333_334), 1), Nanos(666_666_667));
        bucket.take(Nanos(666_666_667), 1);
        assert_eq!(bucket.ready_at(Nanos(666_666_667), 1), Nanos(1_000_000_000));
    }

    #[test]
    fn what_is_never_admitted_is_ready_at_the_end_of_time() {
        assert_eq!(Bucket::new(10, 5).ready_at(Nanos(0), 6), Nanos(u64::MAX));
        let mut bucket = Bucket::new(0, 5);
        bucket.take(Nanos(0), 5);
        assert_eq!(bucket.ready_at(Nanos(7), 1), Nanos(u64::MAX));
        assert_eq!(bucket.ready_at(Nanos(7), 0), Nanos(7));
    }

    #[test]
    fn a_debt_is_paid_before_the_next_piece() {
        let mut bucket = Bucket::new(1_000, 10);
        bucket.overdraw(Nanos(0), 4);
        assert_eq!(bucket.ready_at(Nanos(0), 6), Nanos(0));
        // 6 tokens are left and 16 are used: 10 are missing, which take 10 ms, and one more takes 1
        // ms.
        bucket.overdraw(Nanos(0), 16);
        assert_eq!(bucket.ready_at(Nanos(0), 1), Nanos(11_000_000));
        let mut slow = Bucket::new(1, 1);
        slow.overdraw(Nanos(0), 1 << 40);
        assert_eq!(slow.ready_at(Nanos(0), 1), Nanos(3_601 * SCALE));
        let mut never = Bucket::new(0, 5);
        never.overdraw(Nanos(3), 6);
        assert_eq!(never.ready_at(Nanos(3), 1), Nanos(u64::MAX));
    }

    #[test]
    fn a_clock_that_runs_backwards_stands_still() {
        let mut bucket = Bucket::new(1_000, 1);
        bucket.take(Nanos(5_000_000), 1);
        assert_eq!(bucket.ready_at(Nanos(1), 1), Nanos(6_000_000));
        bucket.take(Nanos(0), 1);
        assert_eq!(bucket.ready_at(Nanos(0), 1), Nanos(6_000_000));
    }

    /// Whether `more` tokens at `now` exceed `rate t + burst` in some interval that ends now.
    fn exceeds_envelope(taken: &[(Nanos, u64)], now: Nanos, more: u64, rate: u64, burst: u64) -> bool {
        let scaled = |n: u64, by: u64| u128::from(n) * u128::from(by);
        (0..taken.len()).any(|i| {
            let sum = taken[i..].iter().map(|(_, n)| n).sum::<u64>() + more;
            scaled(sum, SCALE) > scaled(rate, now.0 - taken[i].0.0) + scaled(burst, SCALE)
        })
    }

    #[test]
    fn a_request_beyond_the_burst_goes_with_a_full_bucket_and_is_paid() {
        let cap = Cap { bytes: Some(Tspec { rate: 1_000, burst: 10, peak: None }), ..Cap::default() };
        let of = |bytes| Charge { requests: 1, bytes, time: 0 };
        let mut regulator = Regulator::new(&cap, of(10));
        regulator.take(Nanos(0), &of(4));
        assert_eq!(regulator.ready_at(Nanos(0), &of(30)), Nanos(4_000_000));
        regulator.take(Nanos(4_000_000), &of(30));
        assert_eq!(regulator.ready_at(Nanos(4_000_000), &of(1)), Nanos(25_000_000));
    }

    proptest! {
        /// At most `rate t + burst` in every interval, and no piece is delayed longer than that
        /// requires.
        #[test]
        fn the_envelope_is_kept_and_used(
            rate in 1u64..5_000_000_000,
            burst in 1u64..1_000_000,
            steps in prop::collection::vec((0u64..2_000_000, 1u64..1_000_000), 1..40),
        ) {
            let mut bucket = Bucket::new(rate, burst);
            let mut now = Nanos(0);
            let mut taken: Vec<(Nanos, u64)> = Vec::new();
            for (pause, tokens) in steps {
                let tokens = tokens.min(burst);
                now = Nanos(now.0 + pause);
                let ready = bucket.ready_at(now, tokens);
                if ready > now {
                    // One nanosecond earlier some interval would exceed the envelope.
                    let early = Nanos(ready.0 - 1);
                    prop_assert!(bucket.level_at(early) < tokens * SCALE);
                    prop_assert!(exceeds_envelope(&taken, early, tokens, rate, burst));
                }
                now = ready;
                bucket.take(now, tokens);
                taken.push((now, tokens));
                prop_assert!(!exceeds_envelope(&taken, now, 0, rate, burst));
            }
        }

        /// The peak holds within the burst too.
        #[test]
        fn the_peak_holds_within_the_burst(rate in 1u64..1_000, extra in 1u64..100_000, burst in 1u64..100, n in 2usize..60) {
            let cap = Cap { requests: Some(Tspec { rate, burst, peak: Some(rate + extra) }), ..Cap::default() };
            let one = Charge { requests: 1, bytes: 0, time: 0 };
            let mut regulator = Regulator::new(&cap, one);
            let mut now = Nanos(0);
            let mut times = Vec::new();
            for _ in 0..n {
                now = regulator.ready_at(now, &one);
                regulator.take(now, &one);
                times.push(now.0);
            }
            for i in 0..n {
                for j in i..n {
                    let (count, t) = ((j - i + 1) as u128, u128::from(times[j] - times[i]));
                    prop_assert!(count * u128::from(SCALE) <= t * u128::from(rate + extra) + u128::from(SCALE));
                    prop_assert!(count * u128::from(SCALE) <= t * u128::from(rate) + u128::from(burst) * u128::from(SCALE));
                }
            }
        }
    }
}
