//! What late requests waited for, as far as counters can tell: the host, which stood still, or the
//! disk, which did.
//!
//! A histogram tells how many requests of an interval were late and not when. The stalls of the
//! same interval are known to the moment. A stall of length `S` touches the requests that arrive
//! while it lasts and those in flight when it begins: at a mean rate `r` and depth `d` about
//! `r S + d`. No more late requests than that are laid to it, so an interval without a stall lays
//! nothing to one, and a short stall does not explain many. The host comes first, because a disk
//! whose host stands still completes nothing either. It is an estimate: requests come unevenly, a
//! queue takes time to shrink after a stall, and a late request that a stall touched may have been
//! late without it.

use rtvirtio_units::Nanos;
use serde::{Deserialize, Serialize};

/// Stalls within an interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stood {
    /// Their sum.
    pub total: Nanos,
    /// How many.
    pub count: u64,
}

/// One interval between two looks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LateInterval {
    /// Requests above the target.
    pub late: u64,
    /// Requests per second.
    pub rate: f64,
    /// Mean number in flight.
    pub depth: f64,
    /// When the host stood still; `None` where that is not known.
    pub host: Option<Stood>,
    /// When the disk did, without the host's stalls; `None` where that is not known.
    pub disk: Option<Stood>,
}

/// Late requests by what they waited for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LateCauses {
    /// Those of intervals in which the host was watched; of the others nothing is known.
    pub told: u64,
    /// Of these, laid to stalls of the host.
    pub host: u64,
    /// Laid to standstills of the disk; `None` where it was not watched all the time.
    pub disk: Option<u64>,
    /// Laid to neither: neighbours, limits, CPU time, what the disk takes while it works, and a
    /// disk that was not watched.
    pub other: u64,
}

/// Lays the late requests of some intervals to stalls of the host and of the disk.
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
    // What was laid to a disk that was then lost from sight stands with the rest.
    all.other = all.told - all.host - all.disk.unwrap_or(0);
    all
}

/// Requests that some stalls touch.
fn touched(stood: Stood, interval: &LateInterval) -> u64 {
    let arrive = interval.rate.max(0.0) * stood.total.0 as f64 / 1e9;
    // Without any in flight a request that arrives is touched all the same.
    let in_flight = stood.count as f64 * interval.depth.max(0.0);
    (arrive + in_flight).ceil() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interval(late: u64, host_ms: u64, disk_ms: u64) -> LateInterval {
        let stood = |ms| Some(Stood { total: Nanos::from_millis(ms), count: u64::from(ms > 0) });
        LateInterval { late, rate: 1_000.0, depth: 2.0, host: stood(host_ms), disk: stood(disk_ms) }
    }

    #[test]
    fn late_requests_are_laid_to_stalls_no_further_than_these_reach() {
        // 20 ms at 1000/s and two in flight: 22 requests.
        let all = causes(&[interval(30, 20, 0), interval(5, 0, 0)]);
        assert_eq!(all, LateCauses { told: 35, host: 22, disk: Some(0), other: 13 });
        // The host comes first, and what is left is the disk's.
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
