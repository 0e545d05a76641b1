//! Intended start times of a task's requests.

use rtvirtio_spec::{Arrival, Task};

use crate::MeasureError;

/// Pace of a task's requests: bytes per second and direction, as fio itself holds a rate.
///
/// fio issues request `i` of a direction not before `floor(i * block * 1e6 / bytes_per_second)` us
/// after its start (`usec_for_io` in fio's backend.c); reads and writes of a mixed task are spaced
/// apart from each other. With a mix of sizes the bytes are evenly spaced: a request is due when
/// the earlier ones have taken their time, so the rate is kept on average.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FioRate {
    read: Option<u64>,
    write: Option<u64>,
    /// Bytes of a request; mean of a mix.
    block: u64,
    /// Bytes of the largest request where sizes differ.
    largest: Option<u64>,
}

/// Largest number of streams that an open task is made of.
const MAX_STREAMS: u32 = 64;
/// Most streams of a task whose requests come at once: a process of fio's each.
const MAX_AT_ONCE: u32 = 128;
/// Largest relative deviation of a stream's rate from the mean.
const DRIFT: f64 = 0.05;

impl FioRate {
    /// Paces of a task's requests, one per fio section; empty when the task has no rate.
    ///
    /// A closed loop is one section. An open loop of depth `d` is `d` sections (at most 64, and at
    /// most one per request and second) that together have the declared rate, each with one request
    /// in flight. Their rates differ by up to 5 %, so that they do not stay in step: requests come
    /// neither evenly nor in bursts. (fio has a mode for open loops, `io_submit_mode=offload`, but
    /// before 3.42 it hangs at its start more often than not: fio commit 736c2015; see
    /// `docs/explanation/measuring.md`.)
    ///
    /// A task whose requests come N at once is N sections with the same rate, which stay in step:
    /// one request of each is due at once.
    ///
    /// # Errors
    /// [`MeasureError::Unsupported`] when a rate is so low that fio's whole bytes per second miss
    /// it by more than 0.1 %, and for more requests at once than 128.
    pub fn from_task(task: &Task) -> Result<Vec<Self>, MeasureError> {
        let Some(rate) = task.rate else { return Ok(Vec::new()) };
        let at_once = task.at_once();
        if at_once > MAX_AT_ONCE {
            return Err(MeasureError::Unsupported {
                task: task.name.clone(),
                reason: format!(
                    "its {at_once} requests at once would need a process of fio's each, of which there are at most {MAX_AT_ONCE}"
                ),
            });
        }
        if at_once > 1 {
            return (0..at_once).map(|_| Self::at(task, rate.0 / f64::from(at_once))).collect();
        }
        let streams = match task.arrival {
            Arrival::Closed => 1,
            Arrival::Open => (rate.0 as u32).clamp(1, MAX_STREAMS).min(task.depth.max(1)),
        };
        // Multiples of the golden ratio: no two streams ever get the same rate, and no number of
        // periods brings all of them together.
        let weight = |k: u32| {
            let fraction = (f64::from(k) * 0.618_033_988_749_895).fract();
            if streams == 1 { 1.0 } else { 1.0 + DRIFT * (2.0 * fraction - 1.0) }
        };
        let sum: f64 = (0..streams).map(weight).sum();
        (0..streams).map(|k| Self::at(task, rate.0 * weight(k) / sum)).collect()
    }

    fn at(task: &Task, rate: f64) -> Result<Self, MeasureError> {
        let direction = |share: f64| {
            if share <= 0.0 {
                return Ok(None);
            }
            let exact = rate * share * task.mean_block();
            let whole = exact.round();
            if !(1.0..1e15).contains(&whole) || (whole - exact).abs() > exact * 1e-3 {
                return Err(MeasureError::Unsupported {
                    task: task.name.clone(),
                    reason: format!("fio cannot pace {exact} bytes per second; choose another rate"),
                });
            }
            Ok(Some(whole as u64))
        };
        let writes = task.op.write_share();
        Ok(Self {
            read: direction(1.0 - writes)?,
            write: direction(writes)?,
            block: task.mean_block().round() as u64,
            largest: (!task.mix.is_empty()).then_some(task.block.0),
        })
    }

    /// Intended start of request `i` (from 0) of one direction, in ns since the job's start; `None`
    /// when the task has no requests of this direction.
    #[must_use]
    pub fn intended_ns(&self, write: bool, i: u64) -> Option<u64> {
        self.intended_after(write, u128::from(i) * u128::from(self.block))
    }

    /// Intended start of the request that follows this many bytes of its direction, in ns since the
    /// job's start; `None` when the task has no requests of this direction.
    #[must_use]
    pub fn intended_after(&self, write: bool, bytes: u128) -> Option<u64> {
        let bps = if write { self.write } else { self.read }?;
        let us = bytes.checked_mul(1_000_000)? / u128::from(bps);
        u64::try_from(us.checked_mul(1_000)?).ok()
    }

    /// Bytes that a request counts in the schedule: its own where sizes differ, else the task's
    /// block size.
    #[must_use]
    pub fn bytes_of(&self, logged: u64) -> u64 {
        if self.largest.is_some() { logged } else { self.block }
    }

    /// Bytes assumed for a request that was not made: the mean.
    #[must_use]
    pub fn mean_bytes(&self) -> u64 {
        self.block.max(1)
    }

    /// Bytes by which completed requests may lag behind the schedule: the next request of a mix may
    /// be the largest.
    #[must_use]
    pub fn slack_bytes(&self) -> u64 {
        self.largest.unwrap_or(0)
    }

    /// Number of requests of one direction due to start before `ns` since the job's start.
    #[must_use]
    pub fn due_before(&self, write: bool, ns: u64) -> u64 {
        let Some(bps) = (if write { self.write } else { self.read }) else { return 0 };
        // A first guess by division, then at most two steps: the intended starts are rounded down
        // to whole microseconds.
        let guess = u128::from(ns) * u128::from(bps) / (u128::from(self.block) * 1_000_000_000);
        let mut n = u64::try_from(guess).unwrap_or(u64::MAX);
        while self.intended_ns(write, n).is_some_and(|t| t < ns) {
            n += 1;
        }
        n
    }

    /// Option `rate_iops=` where the rates are whole, else `rate=` in bytes per second.
    pub(super) fn option(&self) -> String {
        let both: Vec<u64> = [self.read, self.write].into_iter().flatten().collect();
        // For a mix fio would assume the smallest size for all.
        let whole = self.largest.is_none() && both.iter().all(|bps| bps % self.block == 0);
        let values: Vec<String> =
            both.iter().map(|bps| if whole { bps / self.block } else { *bps }.to_string()).collect();
        format!("{}={}", if whole { "rate_iops" } else { "rate" }, values.join(","))
    }
}
