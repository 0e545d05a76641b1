//! Causes of late requests, as far as counters show: stalls of the host, or standstills of the
//! disk.
//!
//! A histogram has the number of late requests of an interval and not their times. The stalls of
//! the same interval are known exactly. A stall of length `S` delays the requests that arrive while
//! it lasts and those in flight when it begins: at a mean rate `r` and depth `d` about `r S + d`.
//! No more late requests than that are attributed to it, so an interval without a stall attributes
//! nothing to one, and a short stall does not explain many. The host comes first, because a disk
//! whose host stalls completes nothing either. It is an estimate: requests arrive unevenly, a queue
//! takes time to drain after a stall, and a late request during a stall may have been late without
//! it.

use rtvirtio_units::Nanos;
use serde::{Deserialize, Serialize};

/// Stalls within an interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StallTotal {
    /// Sum of their lengths.
    pub total: Nanos,
    /// Number of stalls in the interval.
    pub count: u64,
}

/// Interval between two readings of the counters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LateInterval {
    /// Requests above the target.
    pub late: u64,
    /// Mean rate in requests per second.
    pub rate: f64,
    /// Mean number in flight.
    pub depth: f64,
    /// Stalls of the host; `None` where these are not known.
    pub host: Option<StallTotal>,
    /// Standstills of the disk, less the host's stalls; `None` where these are not known.
    pub disk: Option<StallTotal>,
}

/// Number of late requests by cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LateCauses {
    /// Late requests of intervals in which the host was watched; the causes of others are unknown.
    pub told: u64,
    /// Part of them caused by stalls of the host.
    pub host: u64,
    /// Part caused by standstills of the disk; `None` where it was not watched all the time.
    pub disk: Option<u64>,
    /// Part with other causes: neighbours, limits, CPU time, service times of the disk, and a disk
    /// that was not watched.
    pub other: u64,
}

/// Attributes the late requests of some intervals to stalls of the host and of the disk.
#[must_use]
pub fn causes(intervals: &[LateInterval]) -> LateCauses {
    let mut all = LateCauses { disk: Some(0), ..LateCauses::default() };
    for one in intervals {
        let Some(host) = one.host else { continue };
        let of_host = touched(host, one).min(one.late);
        let of_disk = one.disk.map(|disk| touched(disk, one).min(one.late - of_host));
        all.told += one.late;
        all.host += of_host;
        all.disk = all.disk.zip(of_disk).map(|(sum, one)| sum + one);
    }
    // Requests attributed to a disk that was not watched later count as other.
    all.other = all.told - all.host - all.disk.unwrap_or(0);
    all
}

/// Number of requests that arrive during some stalls or are in flight at their start.
fn touched(stood: StallTotal, interval: &LateInterval) -> u64 {
    let arrive = interval.rate.max(0.0) * stood.total.0 as f64 / 1e9;
    // With none in flight, a request that arrives is delayed all the same.
    let in_flight = stood.count as f64 * interval.depth.max(0.0);
    (arrive + in_flight).ceil() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interval(late: u64, host_ms: u64, disk_ms: u64) -> LateInterval {
        let stood = |ms| Some(StallTotal { total: Nanos::from_millis(ms), count: u64::from(ms > 0) });
        LateInterval { late, rate: 1_000.0, depth: 2.0, host: stood(host_ms), disk: stood(disk_ms) }
    }

    #[test]
    fn late_requests_are_laid_to_stalls_no_further_than_these_reach() {
        // 20 ms at 1000/s and two in flight: 22 requests.
        let all = causes(&[interval(30, 20, 0), interval(5, 0, 0)]);
        assert_eq!(all, LateCauses { told: 35, host: 22, disk: Some(0), other: 13 });
        // The host comes first, and the disk explains the remaining late requests.
        let all = causes(&[interval(100, 20, 50)]);
        assert_eq!(all, LateCauses { told: 100, host: 22, disk: Some(52), other: 26 });
        let all = causes(&[interval(10, 20, 50)]);
        assert_eq!(all, LateCauses { told: 10, host: 10, disk: Some(0), other: 0 });
    }

    #[test]
    fn what_nothing_watched_is_laid_to_nothing() {
        let blind = LateInterval { host: None, ..interval(10, 0, 50) };
        assert_eq!(causes(&[blind]), LateCauses { disk: Some(0), ..LateCauses::default() });
        let half = LateInterval { disk: None, ..interval(100, 50, 0) };
        let all = causes(&[half, interval(5, 0, 1)]);
        assert_eq!(all, LateCauses { told: 105, host: 52, disk: None, other: 53 });
    }
}
