//! A task's load on the device, and the effect of a rate limit on it.

use rtvirtio_spec::{Op, Task};

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
