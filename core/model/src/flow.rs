//! A task's load on the device, and the effect of a rate limit on it.

use rtvirtio_spec::{Op, Task};

/// Length over which blk-throttle counts, s (`DFL_THROTL_SLICE`, HZ / 10, `block/blk-throttle.c`; a
/// fifth of it on disks without rotation from Linux 6.10 until the fix, in 6.12.63 for example, and
/// before 6.10 where `BLK_DEV_THROTTLING_LOW` is built in). Elapsed time is rounded up to whole
/// slices (`tg_within_iops_limit`), so all requests that a limit allows for a slice may come at its
/// begin. Measured on 6.18: a neighbour of 32 in flight, limited to 682/s, filled the device for
/// others as often as its depth allows; limited to 200/s, twenty requests at a time.
pub(crate) const THROTTLE_SLICE: f64 = 0.1;

/// Requests per second that blk-throttle lets through under a limit: it counts whole requests in a
/// slice, and takes back the rest with each slice that has passed (`throtl_trim_slice`). Measured
/// on 6.18 with one request in flight and with 32: 19/s lets 10.2 through, 78/s 70.3, 198/s 190.2,
/// 1005/s 1000.2. Below one in a slice it may err either way (6/s: 4.2, 9/s: 15.6), and the limit
/// itself stands for it.
#[must_use]
pub fn throttled_rate(limit: f64) -> f64 {
    let per_slice = limit / THROTTLE_STEP;
    if per_slice >= 1.0 { per_slice.floor() * THROTTLE_STEP } else { limit }
}

/// Requests per second of one in each [`THROTTLE_SLICE`]: blk-throttle holds multiples exactly.
pub const THROTTLE_STEP: f64 = 10.0;

/// Operation of a request on the device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Access {
    pub(crate) op: Op,
    /// Whether each write is followed by a flush.
    pub(crate) sync: bool,
}

impl Access {
    pub(crate) fn from_task(task: &Task) -> Self {
        Self { op: task.op, sync: task.sync.is_some() }
    }
}

/// Load of one task on the device.
#[derive(Clone)]
pub(crate) struct Flow {
    /// Index of the task's VM.
    pub(crate) vm: usize,
    pub(crate) op: Op,
    pub(crate) access: Access,
    /// Mean bytes per request, for the load.
    pub(crate) block: f64,
    /// Bytes of the largest request, for the tail.
    pub(crate) largest: f64,
    /// Offered requests per second after the VM's cap.
    pub(crate) rate: f64,
    /// Whether a request is always waiting: no declared rate and no cap that limits the task.
    pub(crate) flood: bool,
    /// Requests that a cap allows for a [`THROTTLE_SLICE`], which may all come at its begin; `None`
    /// where no cap determines the rate. Those of the VM's tasks with rates are among them: a flood
    /// uses up the allowance. A task whose declared rate exceeds the cap has a request waiting at
    /// all times, like a flood.
    pub(crate) allowed: Option<f64>,
    /// Most requests in flight.
    pub(crate) depth: f64,
    /// Requests that come at once; 1 where they come evenly.
    pub(crate) at_once: f64,
    /// Share of the declared rate that the VM's cap lets through.
    pub(crate) through_cap: f64,
    /// Time of the largest request on an idle device, s.
    pub(crate) service: f64,
    /// Device time that the mean request takes from others, s.
    pub(crate) cost: f64,
    /// Device time that the largest request takes from others, s.
    pub(crate) most: f64,
    /// Whether the spec declares a rate.
    pub(crate) declared: bool,
    /// Share of requests that may lie above the predicted latency.
    pub(crate) exceedance: f64,
}

impl Flow {
    /// Whether the task is always backlogged: without a rate, or with a rate above its VM's cap.
    pub(crate) fn steady(&self) -> bool {
        self.flood || self.allowed.is_some()
    }

    /// Requests in flight at once that the tail must allow for.
    pub(crate) fn burst(&self) -> f64 {
        self.allowed.map_or(self.depth, |allowed| self.depth.min(1.0 + allowed))
    }

    /// Requests of every [`THROTTLE_SLICE`] that a cap allows beyond the queue depth: the flow is
    /// not limited until they are through.
    pub(crate) fn beyond_queue(&self) -> f64 {
        self.allowed.map_or(0.0, |allowed| (1.0 + allowed - self.depth).max(0.0))
    }

    /// Device time of `n` requests at once for a tail, s: with a mix of sizes one of the largest,
    /// the others mean.
    pub(crate) fn cost_in_flight(&self, n: f64) -> f64 {
        self.cost * n + (self.most - self.cost) * n.min(1.0)
    }

    /// Requests of a burst beyond its first.
    pub(crate) fn more_at_once(&self) -> f64 {
        self.at_once - 1.0
    }

    /// Requests of the same burst before the one of which the tail speaks: of N that come at once,
    /// a share e of all is behind the first `N (1 - e)`.
    pub(crate) fn ahead_in_burst(&self) -> f64 {
        (self.at_once * (1.0 - self.exceedance)).ceil() - 1.0
    }

    /// Device time per request when the task runs alone at its own depth, s.
    pub(crate) fn exclusive(&self) -> f64 {
        self.cost.max(self.service / self.depth.max(1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_lets_whole_requests_of_a_slice_through() {
        let all = [(9.0, 9.0), (10.0, 10.0), (19.0, 10.0), (70.0, 70.0), (78.0, 70.0), (1_005.0, 1_000.0)];
        for (limit, rate) in all {
            assert_eq!(throttled_rate(limit), rate, "{limit}");
        }
    }
}
