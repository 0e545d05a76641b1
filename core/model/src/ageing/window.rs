//! Counters of one window, and the ratio to the profile that they tell.

use super::Part;
use super::profiled::Profiled;
use crate::ServiceLine;

/// Least requests of a direction in a window that are judged: of service times whose deviation is
/// their mean, the mean of so many deviates by 4.5 %.
const FEWEST: u64 = 500;

/// Requests of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Completed {
    /// Number of requests.
    pub n: u64,
    /// Bytes of these.
    pub bytes: u64,
    /// Sum of their times in the device and its queue, s.
    pub time_s: f64,
}

/// Counters of a device over one window.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AgeingWindow {
    /// Length of the window, s.
    pub seconds: f64,
    pub read: Completed,
    pub write: Completed,
    /// Time in which at least one request was in the device, s.
    pub busy_s: f64,
    /// Sum of the times of all requests in the device, s.
    pub in_flight_s: f64,
    /// Longest time in which requests were in the device and none was completed, without the
    /// host's stalls, s; `None` where nothing watched.
    pub standstill_s: Option<f64>,
    pub flushes: u64,
    /// Sum of their times, s.
    pub flush_s: f64,
    /// Time in which the host stood still, s; 0 where it did not, or nothing watched.
    pub host_stalled_s: f64,
}

/// Ends between which a ratio to the profile is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Ratio {
    pub low: f64,
    pub high: f64,
}

impl AgeingWindow {
    /// Ratio of a part to the profile; `None` where too few requests were seen, or the profile
    /// does not have them.
    pub(super) fn ratio(&self, part: Part, profiled: &Profiled) -> Option<Ratio> {
        let service = profiled.service();
        let (done, line) = match part {
            Part::Reads => (&self.read, &service.read),
            Part::Writes => (&self.write, service.write.as_ref()?),
            Part::Standstills => {
                let ratio = self.standstill_s? / profiled.longest_s().filter(|longest| *longest > 0.0)?;
                return Some(Ratio { low: ratio, high: ratio });
            }
        };
        let expected = alone(done, line, service.block.0);
        if done.n < FEWEST || expected <= 0.0 {
            return None;
        }
        let high = done.time_s / expected;
        let low = ((done.time_s - self.waited_s()) / expected).max(0.0);
        high.is_finite().then_some(Ratio { low, high })
    }

    /// Upper bound of the time that requests waited, for each other, for flushes and for the host,
    /// s.
    ///
    /// A device that serves several at once has more in flight than wait. A stall of the host of
    /// length S holds the requests in flight for S, and those that come meanwhile for S / 2 on
    /// average; one stall of the sum of all lengths holds them longest. A flush of mean length f
    /// holds those that come meanwhile for f, twice as long as one of constant length.
    fn waited_s(&self) -> f64 {
        let each_other = (self.in_flight_s - self.busy_s).max(0.0);
        let seconds = self.seconds.max(f64::MIN_POSITIVE);
        let rate = (self.read.n + self.write.n) as f64 / seconds;
        let (stalled, depth) = (self.host_stalled_s.max(0.0), self.in_flight_s / seconds);
        let flush = self.flush_s / self.flushes.max(1) as f64;
        each_other
            + rate * (stalled * stalled / 2.0 + self.flush_s * flush)
            + depth * (stalled + self.flush_s)
    }
}

/// Time that requests would have taken one after the other, as profiled, s.
fn alone(done: &Completed, line: &ServiceLine, block: u64) -> f64 {
    let more = done.bytes.saturating_sub(done.n.saturating_mul(block));
    done.n as f64 * line.alone + more as f64 * line.alone_per_byte
}
