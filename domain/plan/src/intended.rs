//! Bounds of tasks with a rate from the intended starts of their requests.
//!
//! A bound from the submission says nothing about how late the submission is. A guest that stands
//! still submits late, and a task that makes one request at a time also falls behind a stall of the
//! device: it makes up for what it missed, one request after the other. A reservation covers
//! requests at once as long as they are submitted no later than it counts ([`counted_delay`]), so
//! the delays of guest and device must sum to no more than that.

use rtvirtio_capacity::{
    DeviceModel, Reserve, Shape, counted_delay, has_closed_loop_target, longest_from_intended, longest_stall,
    promised,
};
use rtvirtio_spec::{Arrival, Task, Vm};
use rtvirtio_units::Nanos;

use crate::promise::IntendedBound;

/// Device and reservations of a plan, as the bounds need them.
pub(crate) struct Reserved<'a> {
    pub device: &'a DeviceModel,
    pub shape: Shape,
    /// Reservations of all VMs.
    pub all: Vec<Reserve>,
    /// Latency within the guest.
    pub guest: Nanos,
}

impl Reserved<'_> {
    /// Bound of a promised task whose requests take no longer than `bound` from their submission,
    /// of which the VM's own caps hold them back for `held`. `None` where its delay may be longer
    /// than what the reservation counts, or is not known: closed loops without a rate in the same
    /// VM use the reservation up, a cap holds each request back anew, and a task in an open loop
    /// does not submit beyond its depth.
    pub(crate) fn intended_bound(
        &self,
        (vm, task): (&Vm, &Task),
        bound: Nanos,
        held: Nanos,
    ) -> Option<IntendedBound> {
        let rate = task.rate.filter(|_| !promised(task).is_empty() && !has_closed_loop_target(vm))?;
        let most = longest_stall(vm, self.shape.catch_up);
        if task.arrival == Arrival::Open {
            let all = Nanos(bound.0.saturating_add(most.0));
            let in_flight = f64::from(task.at_once()) + rate.0 * all.as_secs_f64();
            return (in_flight <= f64::from(task.depth)).then_some(IntendedBound { bound: all, stall: most });
        }
        let device = longest_from_intended((vm, task), self.device, self.shape, &self.all)?;
        let turn = Nanos(device.0.saturating_add(self.guest.0));
        let behind = turn.0.saturating_sub((1e9 / rate.0) as u64);
        let counted = counted_delay(vm, task, self.device, self.shape);
        let stall = Nanos(counted.0.checked_sub(behind).filter(|_| held == Nanos(0))?.min(most.0));
        Some(IntendedBound { bound: Nanos(stall.0.saturating_add(bound.0.max(turn.0))), stall })
    }
}
