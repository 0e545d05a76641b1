//! One task as the device sees it, and how a limit lets it through.

use rtvirtio_spec::{Op, Task};

/// Length over which blk-throttle counts, s (`DFL_THROTL_SLICE`, HZ / 10, `block/blk-throttle.c`; a
/// fifth of it on disks without rotation from Linux 6.10 until it was mended, in 6.12.63 for one,
/// and before 6.10 where `BLK_DEV_THROTTLING_LOW` is built in). It rounds the time that has passed
/// up to whole slices (`tg_within_iops_limit`), so that what a limit allows for a slice may all
/// come at its begin. Measured on 6.18: a neighbour of 32 in flight, held to 682/s, filled the
/// device for others as often as its depth allows; held to 200/s, twenty requests at a time.
pub(crate) const THROTTLE_SLICE: f64 = 0.1;

/// What a request does to the device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Access {
    pub(crate) op: Op,
    /// Whether a flush belongs to it.
    pub(crate) sync: bool,
}

impl Access {
    pub(crate) fn of(task: &Task) -> Self {
        Self { op: task.op, sync: task.sync.is_some() }
    }
}

/// One task as the device sees it.
#[derive(Clone)]
pub(crate) struct Flow {
    /// Index of its VM.
    pub(crate) vm: usize,
    pub(crate) op: Op,
    pub(crate) access: Access,
    /// Mean bytes per request: what its load is made of.
    pub(crate) block: f64,
    /// Bytes of its largest request: what a tail has to expect.
    pub(crate) largest: f64,
    /// Requests per second that it offers after its VM's cap.
    pub(crate) rate: f64,
    /// Whether it always has a request waiting: no declared rate and no cap that limits it.
    pub(crate) flood: bool,
    /// Where its rate is a cap's doing, the requests that the cap allows for a [`THROTTLE_SLICE`],
    /// which may all come at its begin. Those of the VM's tasks with rates are among them: a flood
    /// takes what there is. A task with a rate that the cap is below has a request waiting at all
    /// times, as a flood has.
    pub(crate) allowed: Option<f64>,
    /// Most requests in flight.
    pub(crate) depth: f64,
    /// Share of the declared rate that the VM's cap lets through.
    pub(crate) through_cap: f64,
    /// Time of its largest request on an idle device, s.
    pub(crate) service: f64,
    /// Device time that its mean request takes from others, s.
    pub(crate) cost: f64,
    /// Device time that its largest request takes from others, s.
    pub(crate) most: f64,
    /// Whether a rate was declared.
    pub(crate) declared: bool,
    /// Share of requests that may lie above the predicted latency.
    pub(crate) exceedance: f64,
}

impl Flow {
    /// Whether it asks for as much as it may get: without a rate, or with one that its VM's cap is
    /// below.
    pub(crate) fn steady(&self) -> bool {
        self.flood || self.allowed.is_some()
    }

    /// Requests of this flow that the tail must expect in flight at once.
    pub(crate) fn burst(&self) -> f64 {
        self.allowed.map_or(self.depth, |allowed| self.depth.min(1.0 + allowed))
    }

    /// Requests of every [`THROTTLE_SLICE`] that a cap allows beyond what can be in flight at once:
    /// the flow goes unchecked until they are through.
    pub(crate) fn beyond_queue(&self) -> f64 {
        self.allowed.map_or(0.0, |allowed| (1.0 + allowed - self.depth).max(0.0))
    }

    /// Device time of `n` of its requests at once, s, as a tail expects it: of a mix the largest
    /// and as many mean ones as there are more.
    pub(crate) fn cost_in_flight(&self, n: f64) -> f64 {
        self.cost * n + (self.most - self.cost) * n.min(1.0)
    }

    /// Device time per request when it has the device to itself at its own depth, s.
    pub(crate) fn exclusive(&self) -> f64 {
        self.cost.max(self.service / self.depth.max(1.0))
    }
}
