//! Rates of the file as whole numbers of tokens per second: exact, or refused.

use rtvirtio_sched::{Bucket, MAX_BURST, Tspec};
use rtvirtio_units::Iops;

/// Largest deviation of a rate that counts as the one that is written.
const EXACT: f64 = 1e-3;
/// Token units per request: with a part of a request as the token, "1/min" and "2.5/s" are whole
/// numbers of tokens per second.
const PER_REQUEST: [u64; 3] = [1, 60_000_000, 60_000];

/// Rounds a rate to a whole number per second; `None` where the deviation is over `EXACT`.
pub(crate) fn whole(rate: f64) -> Option<u64> {
    let rounded = rate.round();
    let is_exact = rounded >= 1.0 && (rounded - rate).abs() <= rate * EXACT;
    is_exact.then_some(rounded as u64)
}

/// Tokens of a request with which a rate is a whole number of tokens per second.
fn per_request(rate: f64, burst: u64) -> Option<u64> {
    let fits = |per: u64| burst.checked_mul(per).is_some_and(|tokens| tokens <= MAX_BURST);
    let is_whole = |per: u64| per != 1 || rate.fract() == 0.0;
    let counts = |per: u64| whole(rate * per as f64).is_some();
    PER_REQUEST
        .into_iter()
        .find(|per| fits(*per) && is_whole(*per) && counts(*per))
        // A burst this large is never combined with a few requests per second.
        .or_else(|| whole(rate).map(|_| 1))
}

/// The limit of requests, and the tokens of one.
pub(crate) fn requests(rate: f64, burst: u64, peak: Option<f64>) -> (Tspec, u64) {
    let per = per_request(rate, burst).unwrap_or(1);
    let tokens = |rate: f64| (rate * per as f64).round() as u64;
    (Tspec { rate: tokens(rate), burst: burst.saturating_mul(per), peak: peak.map(tokens) }, per)
}

/// The bucket of a few frames per second, and the tokens of one. A rate of 0 admits none.
pub(crate) fn bucket(rate: Iops) -> (Bucket, u64) {
    let burst = if rate.0 > 0.0 { (rate.0 / 2.0).ceil().max(1.0) as u64 } else { 0 };
    let (tspec, per) = requests(rate.0, burst, None);
    (Bucket::new(tspec.rate, tspec.burst), per)
}

/// Refuses a rate of requests that cannot be counted exactly.
pub(crate) fn check_requests(key: &str, rate: f64, burst: u64) -> Result<(), String> {
    if per_request(rate, burst).is_some() {
        return Ok(());
    }
    Err(format!(
        "`{key}`: {} cannot be counted exactly with a burst of {burst}; give a whole number per second, or a smaller burst",
        Iops(rate)
    ))
}

/// Refuses a rate of bytes, or of device time in ns, that is not a whole number.
pub(crate) fn check_whole(key: &str, rate: f64, unit: &str) -> Result<(), String> {
    if whole(rate).is_some() {
        return Ok(());
    }
    Err(format!("`{key}`: {rate} {unit} per second are no whole number; give one, 1 at least"))
}

#[cfg(test)]
mod tests {
    use rtvirtio_units::Nanos;

    use super::*;

    #[test]
    fn a_rate_below_one_per_second_is_exact() {
        for (text, ns) in [
            ("1/min", 60_000_000_000u64),
            ("0.5/s", 2_000_000_000),
            ("90/min", 666_666_667),
            ("2.5/s", 400_000_000),
            ("3/s", 333_333_334),
        ] {
            let (mut bucket, per) = bucket(text.parse().unwrap());
            let frames = bucket.burst() / per;
            bucket.take(Nanos(0), frames * per);
            assert_eq!(bucket.ready_at(Nanos(0), per), Nanos(ns), "{text}");
        }
        let (never, per) = bucket("0/s".parse().unwrap());
        assert_eq!(never.ready_at(Nanos(0), per), Nanos(u64::MAX));
    }

    #[test]
    fn whole_rates_count_requests() {
        assert_eq!(requests(500.0, 1, Some(2_000.0)), (Tspec { rate: 500, burst: 1, peak: Some(2_000) }, 1));
        let (tspec, per) = requests(1.0 / 60.0, 2, None);
        assert_eq!((tspec.rate, tspec.burst, per), (1_000_000, 120_000_000, 60_000_000));
        assert_eq!(requests(1_500.5, 3_000, None).1, 60_000, "a larger burst has larger tokens");
        assert!(check_requests("frames", 0.5, 1 << 33).is_err());
        assert!(check_requests("frames", 1e6 + 0.5, 1 << 33).is_ok(), "within a thousandth");
        assert!(check_requests("frames", 0.0, 1).is_err());
        assert!(check_whole("bytes", 0.4, "bytes").is_err() && check_whole("bytes", 1.5, "bytes").is_err());
        assert!(check_whole("bytes", 1e6, "bytes").is_ok());
    }
}
