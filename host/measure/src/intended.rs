//! Latency from the intended start of a request.
//!
//! fio counts a request's latency from when it made the request. In a closed loop a request that is
//! late is also made late: a device that stalls for one second under a task of 1000/s shows up as
//! *one* slow request, though a thousand were due in that second. (The error is known as
//! coordinated omission.) The intended start of each request is known, `i / rate` since the job's
//! start, so the time that it waited to be made can be added.
//!
//! One request in flight (closed loop, depth 1). Requests are served in order; with the intended
//! starts `a_i` and fio's latencies `l_i` the completions are at least
//!
//! ```text
//! c_i = max(max(a_i, c_(i-1)) + l_i, t_i)        L_i = c_i - a_i
//! ```
//!
//! The inner part is Lindley's recursion (D. V. Lindley, 1952, The theory of queues with a single
//! server) written with completions: `W_i = max(0, W_(i-1) + l_(i-1) - (a_i - a_(i-1)))`,
//! `L_i = W_i + l_i`. The outer part uses the log's own time stamp `t_i`, the completion rounded
//! down to 1 ms: it covers delays that no `l_i` contains, such as a virtual CPU that did not run.
//! Therefore `L_i` is never above the true value and, because `t_i` bounds the completion from both
//! sides, never more than 1 ms below it. Reads and writes of a mixed task have intended starts of
//! their own and share the one server, in the log's order.
//!
//! Several in flight (depth > 1). The log is in the order of completion. Requests are put into the
//! order of their start, `t_i - l_i`, then the `k`-th of each direction gets the `k`-th intended
//! start, and `L = max(l, t - a)`. The order is known to 1 ms, so requests made within the same ms
//! may change places: `L` is known to 1 ms plus as many periods as requests were made in 1 ms.
//!
//! For a mix of sizes `a_i` follows from the bytes of the requests before, which the log has: fio
//! spaces bytes, not requests.
//!
//! Where the log's time is the machine's clock instead of time since the job's start
//! (`LogClock::Monotonic`), the start is derived from the requests: none completes before `a_i +
//! l_i`, and a request without delay completes then. The least of `t_i - (a_i + l_i)` is the start
//! in whole ms, exactly (with several in flight to 1 ms), unless every single request was made 1 ms
//! too late; then `L_i` is too small by the least of these delays.

use crate::fio::{FioRate, Sample};

/// Completed request with its place in the schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timed {
    /// Intended start in ns since the job's start.
    pub intended_ns: u64,
    /// Completion in ns since the job's start, with the accuracy of the module's text.
    pub done_ns: u64,
    /// Latency from the intended start, in ns.
    pub latency_ns: u64,
    /// Latency counted by fio, in ns.
    pub fio_ns: u64,
    pub write: bool,
    /// Bytes that the request counts in the schedule.
    pub bytes: u64,
}

/// Latencies from the intended start, in the log's order. Samples of a direction without a pace are
/// left out; the caller compares the number.
#[must_use]
pub fn from_intended_start(samples: &[Sample], pace: &FioRate, depth: u32) -> Vec<Timed> {
    if depth <= 1 { one_in_flight(samples, pace) } else { several_in_flight(samples, pace) }
}

/// Start of the job in whole ms of the log's clock; see the module's text. `None` for an empty log.
#[must_use]
pub fn job_start_ms(samples: &[Sample], pace: &FioRate, depth: u32) -> Option<u64> {
    let mut order: Vec<usize> = (0..samples.len()).collect();
    if depth > 1 {
        order = by_start(samples);
    }
    let mut next = [0u128; 2];
    let mut least: Option<u64> = None;
    for i in order {
        let s = &samples[i];
        let before = &mut next[usize::from(s.write)];
        let Some(intended_ns) = pace.intended_after(s.write, *before) else { continue };
        *before += u128::from(pace.bytes_of(s.bytes));
        let start = s.time_ms.saturating_sub(intended_ns.saturating_add(s.lat_ns) / 1_000_000);
        least = Some(least.map_or(start, |l| l.min(start)));
    }
    least
}

/// Indices in the order of the requests' starts, as exactly as the log has them.
fn by_start(samples: &[Sample]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..samples.len()).collect();
    order.sort_by_key(|i| (samples[*i].time_ms * 1_000_000).saturating_sub(samples[*i].lat_ns));
    order
}

fn one_in_flight(samples: &[Sample], pace: &FioRate) -> Vec<Timed> {
    let mut next = [0u128; 2];
    let mut free_at = 0u64;
    let mut timed = Vec::with_capacity(samples.len());
    for s in samples {
        let before = &mut next[usize::from(s.write)];
        let Some(intended_ns) = pace.intended_after(s.write, *before) else { continue };
        let bytes = pace.bytes_of(s.bytes);
        *before += u128::from(bytes);
        let done_ns = intended_ns.max(free_at).saturating_add(s.lat_ns).max(s.time_ms * 1_000_000);
        free_at = done_ns;
        timed.push(Timed {
            intended_ns,
            done_ns,
            latency_ns: done_ns - intended_ns,
            fio_ns: s.lat_ns,
            write: s.write,
            bytes,
        });
    }
    timed
}

fn several_in_flight(samples: &[Sample], pace: &FioRate) -> Vec<Timed> {
    let mut next = [0u128; 2];
    let mut timed = vec![None; samples.len()];
    for i in by_start(samples) {
        let s = &samples[i];
        let before = &mut next[usize::from(s.write)];
        let Some(intended_ns) = pace.intended_after(s.write, *before) else { continue };
        let bytes = pace.bytes_of(s.bytes);
        *before += u128::from(bytes);
        let latency_ns = s.lat_ns.max((s.time_ms * 1_000_000).saturating_sub(intended_ns));
        timed[i] = Some(Timed {
            intended_ns,
            done_ns: intended_ns.saturating_add(latency_ns),
            latency_ns,
            fio_ns: s.lat_ns,
            write: s.write,
            bytes,
        });
    }
    timed.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests;
