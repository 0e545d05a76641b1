//! The token bucket against its definition, for all small rates, bursts and request sequences.
//!
//! Definition: at most `burst + rate t` tokens in any interval of length t, and each request at the
//! first nanosecond at which that holds for all intervals that end with it. The test tries one
//! nanosecond after another against all intervals, in exact integers.

use std::ops::RangeInclusive;

use rtvirtio_sched::Bucket;
use rtvirtio_units::Nanos;

/// A token, in tokens per second times nanoseconds.
const TOKEN: u64 = 1_000_000_000;
/// Longest wait that is searched: beyond it no small case admits a request.
const LONGEST: u64 = 64;

/// Whether `tokens` more at `now` keep every interval that ends at `now` within the envelope.
fn within_envelope(taken: &[(u64, u64)], now: u64, tokens: u64, rate: u64, burst: u64) -> bool {
    let mut sum = tokens;
    tokens <= burst
        && taken.iter().rev().all(|(at, n)| {
            sum += n;
            sum * TOKEN <= burst * TOKEN + rate * (now - at)
        })
}

/// The first nanosecond from `from` on at which `tokens` are admitted.
fn first_admitted(taken: &[(u64, u64)], from: u64, tokens: u64, rate: u64, burst: u64) -> u64 {
    (from..from + LONGEST).find(|t| within_envelope(taken, *t, tokens, rate, burst)).unwrap_or(u64::MAX)
}

/// Admits requests in all possible sequences, and returns the number of checks.
fn all_sequences(bucket: &Bucket, taken: &mut Vec<(u64, u64)>, now: u64, more: usize, of: &Case) -> u64 {
    if more == 0 {
        return 0;
    }
    let mut judged = 0;
    for gap in of.gaps {
        for tokens in of.tokens.clone() {
            let from = now + gap;
            let ready = bucket.ready_at(Nanos(from), tokens).0;
            let right = first_admitted(taken, from, tokens, of.rate, of.burst);
            assert_eq!(
                ready, right,
                "rate {} burst {}: {tokens} at {from} after {taken:?}",
                of.rate, of.burst
            );
            judged += 1;
            if ready == u64::MAX {
                continue;
            }
            for at in of.later.iter().map(|later| ready + later) {
                let mut next = bucket.clone();
                next.take(Nanos(at), tokens);
                taken.push((at, tokens));
                judged += all_sequences(&next, taken, at, more - 1, of);
                taken.pop();
            }
        }
    }
    judged
}

struct Case {
    rate: u64,
    burst: u64,
    /// Times between two requests.
    gaps: &'static [u64],
    /// Tokens of a request.
    tokens: RangeInclusive<u64>,
    /// Times from the first admitted moment on at which tokens are taken.
    later: &'static [u64],
}

/// A tenth of a token to two tokens per nanosecond, and rates with remainders.
const RATES: [u64; 7] = [0, 100_000_000, 142_857_143, 333_333_333, 700_000_000, 1_000_000_000, 2_000_000_001];

#[test]
fn all_short_sequences() {
    let mut judged = 0;
    for rate in RATES {
        for burst in 0..=3 {
            let case = Case { rate, burst, gaps: &[0, 1, 2, 5], tokens: 0..=burst + 1, later: &[0, 2] };
            judged += all_sequences(&Bucket::new(rate, burst), &mut Vec::new(), 0, 4, &case);
        }
    }
    assert!(judged > 1_000_000, "{judged}");
}

/// Single tokens: longer sequences, in which the remainders of nanoseconds add up.
#[test]
fn all_longer_sequences_of_single_tokens() {
    let mut judged = 0;
    for rate in RATES {
        for burst in 1..=2 {
            let case = Case { rate, burst, gaps: &[0, 1, 7], tokens: 1..=1, later: &[0] };
            judged += all_sequences(&Bucket::new(rate, burst), &mut Vec::new(), 0, 9, &case);
        }
    }
    assert!(judged > 50_000, "{judged}");
}

/// A clock that goes back counts as standing still.
#[test]
fn all_ways_back() {
    for rate in RATES {
        for (forth, back) in (0..12).flat_map(|f| (0..=f).map(move |b| (f, b))) {
            let mut bucket = Bucket::new(rate, 2);
            bucket.take(Nanos(forth), 2);
            let at_rest = bucket.ready_at(Nanos(forth), 1);
            assert_eq!(bucket.ready_at(Nanos(forth - back), 1), at_rest);
            bucket.take(Nanos(forth - back), 0);
            assert_eq!(bucket.ready_at(Nanos(forth), 1), at_rest, "rate {rate}: {forth} back {back}");
        }
    }
}
