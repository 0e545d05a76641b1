//! Time for which a VM's own limits hold back its declared requests.

use crate::tspec::{Tspec, Unit};

/// Demand of one task or flow on the limits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stream {
    /// Bytes of its smallest and largest request.
    pub bytes: [f64; 2],
    /// Requests per second; infinite for one that takes what it gets.
    pub rate: f64,
    /// Requests that may come at once.
    pub at_once: f64,
}

/// Longest time in seconds for which limits of one direction hold a request back; `None` when
/// nothing bounds that.
///
/// A limit alone: [`Arrival::holds_back`](crate::Arrival::holds_back). Of two limits each request
/// waits for both. Where all requests are alike, both are curves of requests, and the later of the
/// two counts. Otherwise a request may wait for one limit behind requests that waited for the
/// other: with `u` and `v` of their rates in use, both times add up where `u + v <= 1`, and beyond
/// that nothing is promised.
#[must_use]
pub fn held_back(limits: &[Tspec], streams: &[Stream]) -> Option<f64> {
    let sizes = || streams.iter().flat_map(|of| of.bytes);
    let are_alike = sizes().all(|size| sizes().next() == Some(size));
    let (mut longest, mut sum, mut used) = (0.0f64, 0.0, 0.0);
    // A cap of the I/O domain has one `peak`, a multiple of the rate, for bytes and requests.
    let times = limits.iter().find_map(|of| Some(of.peak? as f64 / of.rate as f64));
    for limit in limits {
        let (mut rate, mut burst) = (0.0, 0.0);
        for of in streams {
            let each = if limit.unit == Unit::Bytes { of.bytes[1] } else { 1.0 };
            rate += of.rate * each;
            burst += of.at_once * each;
        }
        let mut cap = limit.arrival();
        if let (None, Some(times)) = (limit.peak, times) {
            cap.peak =
                Some((cap.rate * times, if limit.unit == Unit::Bytes { limit.largest as f64 } else { 1.0 }));
        }
        if rate > cap.rate {
            return None;
        }
        let held = cap.holds_back(burst);
        (longest, sum, used) = (longest.max(held), sum + held, used + rate / cap.rate);
    }
    match limits.len() {
        0 | 1 => Some(longest),
        _ if are_alike => Some(longest),
        _ if used <= 1.0 => Some(sum),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(unit: Unit, rate: u64, burst: u64) -> Tspec {
        Tspec { unit, rate, burst, peak: None, largest: 1 }
    }

    fn stream(bytes: [f64; 2], rate: f64, at_once: f64) -> Stream {
        Stream { bytes, rate, at_once }
    }

    #[test]
    fn of_two_limits_the_slower_counts_where_requests_are_alike() {
        let both = [limit(Unit::Bytes, 1_000, 100), limit(Unit::Requests, 20, 1)];
        let alike = [stream([100.0; 2], 5.0, 4.0), stream([100.0; 2], 1.0, 1.0)];
        // 500 bytes of which 100 go at once: 0.4 s; 5 requests of which 1 goes at once: 0.2 s.
        assert_eq!(held_back(&both[..1], &alike), Some(0.4));
        assert_eq!(held_back(&both[1..], &alike), Some(0.2));
        assert_eq!(held_back(&both, &alike), Some(0.4));
        assert_eq!(held_back(&[], &alike), Some(0.0));
    }

    /// A cap of the I/O domain has one peak for bytes and requests: of requests one goes at once.
    #[test]
    fn a_peak_of_bytes_holds_for_requests_too() {
        let bytes = Tspec { peak: Some(2_000), ..limit(Unit::Bytes, 1_000, 100_000) };
        let both = [bytes, limit(Unit::Requests, 20, 32)];
        let burst = [stream([1.0; 2], 1.0, 33.0)];
        // By the burst one request waits for 0.05 s, by the peak of 40/s 32 wait for 0.8 s.
        let held = held_back(&both, &burst).unwrap();
        assert!((held - 0.8).abs() < 1e-9, "{held}");
        assert_eq!(held_back(&both[1..], &burst), Some(0.05));
    }

    #[test]
    fn times_add_up_where_sizes_differ_and_more_than_the_limits_is_no_promise() {
        let both = [limit(Unit::Bytes, 1_000, 100), limit(Unit::Requests, 20, 1)];
        let differing = |rate| [stream([50.0, 100.0], rate, 5.0)];
        let sum = held_back(&both, &differing(6.0)).unwrap();
        assert!((sum - 0.6).abs() < 1e-9, "0.4 s of bytes and 0.2 s of requests: {sum}");
        // 9/s: nine tenths of the bytes and nine twentieths of the requests.
        assert_eq!(held_back(&both, &differing(9.0)), None);
        assert!(held_back(&both[..1], &differing(9.0)).is_some());
        assert_eq!(held_back(&both[1..], &differing(21.0)), None);
        assert_eq!(held_back(&both, &differing(f64::INFINITY)), None);
    }
}
