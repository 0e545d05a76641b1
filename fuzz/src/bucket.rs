//! Token buckets against their definition: at most `burst + rate t` tokens in any interval of
//! length t, and no delay beyond what that requires.
//!
//! The definition is computed from all admitted tokens, in exact integers; the bucket keeps one
//! number.
//!
//! Layout of the input: rate (8 bytes), burst (5 bytes), then steps of 8 bytes: clock advance (4
//! bytes, and its shift in the fifth), tokens (2 bytes, times a power of two in the last).

use rtvirtio_sched::Bucket;
use rtvirtio_units::Nanos;

/// Nanoseconds in a second, and units of a level in a token.
const SCALE: u128 = 1_000_000_000;
/// Most steps of one input: the definition checks all pairs.
const MOST: usize = 64;
/// Largest burst of a bucket.
const MAX_BURST: u64 = 1 << 34;

/// All admitted tokens, and the envelope.
pub struct Envelope {
    rate: u64,
    burst: u64,
    taken: Vec<(u64, u64)>,
}

impl Envelope {
    /// No tokens are admitted yet.
    pub fn new(rate: u64, burst: u64) -> Self {
        Self { rate, burst: burst.min(MAX_BURST), taken: Vec::new() }
    }

    /// The first nanosecond from `from` on at which `tokens` more keep every interval within the
    /// envelope; `u64::MAX` when none does.
    pub fn ready_at(&self, from: u64, tokens: u64) -> u64 {
        if tokens > self.burst {
            return u64::MAX;
        }
        let mut ready = u128::from(from);
        let mut sum = u128::from(tokens);
        // Intervals that start with each admitted request.
        for (at, n) in self.taken.iter().rev() {
            sum += u128::from(*n);
            let beyond = (sum - u128::from(self.burst).min(sum)) * SCALE;
            if beyond > 0 {
                if self.rate == 0 {
                    return u64::MAX;
                }
                ready = ready.max(u128::from(*at) + beyond.div_ceil(u128::from(self.rate)));
            }
        }
        u64::try_from(ready).unwrap_or(u64::MAX)
    }

    /// Admits `tokens`.
    pub fn take(&mut self, at: u64, tokens: u64) {
        self.taken.push((at, tokens));
    }
}

/// Plays the steps of an input.
///
/// # Panics
/// The bucket and the definition name different nanoseconds.
pub fn play(data: &[u8]) {
    let Some((head, steps)) = data.split_first_chunk::<13>() else { return };
    let rate = u64::from_le_bytes(head[..8].try_into().expect("eight bytes"));
    let burst = head[8..].iter().rev().fold(0u64, |b, byte| b << 8 | u64::from(*byte));
    let (mut bucket, mut envelope) = (Bucket::new(rate, burst), Envelope::new(rate, burst));
    let (mut now, mut last) = (0u64, 0u64);
    for step in steps.chunks_exact(8).take(MOST) {
        let gap = u64::from(u32::from_le_bytes([step[0], step[1], step[2], step[3]])) << (step[4] % 33);
        let tokens = u64::from(u16::from_le_bytes([step[5], step[6]])) << (step[7] % 40);
        // A clock that goes back counts as standing still.
        now = if step[4] & 0x80 != 0 { now.saturating_sub(gap) } else { now.saturating_add(gap) };
        let ready = bucket.ready_at(Nanos(now), tokens).0;
        assert_eq!(
            ready,
            envelope.ready_at(now.max(last), tokens),
            "rate {rate} burst {burst} at {now}: {tokens}"
        );
        if ready < u64::MAX {
            bucket.take(Nanos(ready), tokens);
            envelope.take(ready, tokens);
            (now, last) = (ready, ready);
        }
    }
}
