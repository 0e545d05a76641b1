//! The part of a model that is learned from runs in QEMU guests.
//!
//! A guest is not a process with a delay: all its tasks are one queue of the host's scheduler, so
//! under idling BFQ, or next to a writer, the same load has other tails, a hundred times shorter or
//! longer (`docs/results/accuracy.md`, In guests). A forest of its own, on runs in guests alone,
//! leaves the predictions for process VMs as they are.

use rtvirtio_spec::{Kernel, Vm, VmCpu};
use rtvirtio_stats::conformal::Quantile;
use rtvirtio_stats::forest::{Forest, Scratch};
use rtvirtio_units::Nanos;
use serde::{Deserialize, Serialize};

use super::estimate::{Estimate, check_bound, check_forest, estimate};
use super::features::WIDTH;
use crate::guest::measured_guest;
use crate::load::is_guest;
use crate::types::{Elevator, GuestPoint, Profile, VmConfig};

/// Part of a learned model for QEMU guests.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GuestModel {
    /// A guest of this kind alone on the host, measured before the runs.
    pub guest: GuestPoint,
    /// Number of training runs.
    pub points: usize,
    /// Number of tasks in these runs.
    pub rows: usize,
    /// ln(latency in s) of the measured tasks with the host's stalls, because it is unknown whether
    /// a guest waited during one; each with the share of its declared rate that was lost.
    pub forest: Forest,
    /// Level of the forest's quantile that the bound starts from, 0 to 1.
    pub high: f64,
    /// Calibrated score `ln(latency) - high quantile`. Its confidence is lower than that of the
    /// bound for process VMs where guests ran fewer conditions.
    pub bound: Quantile,
}

impl GuestModel {
    /// Confidence of the bound, 0 to 1.
    #[must_use]
    pub fn confidence(&self) -> f64 {
        1.0 - self.bound.miss
    }

    /// Checks the part as read from a file; the error describes the damage.
    pub(super) fn check(&self) -> Result<(), String> {
        let in_guests = |what: &dyn std::fmt::Display| format!("of guests, {what}");
        if !self.guest.is_of_guest() {
            return Err(in_guests(&"they were none"));
        }
        self.guest.check().map_err(|what| in_guests(&what))?;
        check_forest(&self.forest, self.high, 0.0..=1.0).map_err(|what| in_guests(&what))?;
        check_bound(&self.bound).map_err(|what| in_guests(&what))
    }

    /// Whether the guests of a profile may be of the kind of the training runs: a profile without a
    /// guest does not contradict, see [`unlike_measured`].
    pub(super) fn is_of(&self, profile: &Profile) -> bool {
        measured_guest(profile).is_none_or(|g| g.kind == self.guest.kind)
    }

    /// Estimate of one row, in absolute terms.
    pub(super) fn estimate(&self, row: &[f64; WIDTH], scratch: &mut Scratch) -> Result<Estimate, String> {
        estimate(&self.forest, self.high, row, scratch).map_err(|e| e.to_string())
    }

    /// Upper bound of a row, s, before widening for extrapolation.
    pub(super) fn upper(&self, estimate: &Estimate, stall: Nanos) -> f64 {
        estimate.upper(self.bound.score, stall)
    }
}

/// Property of a guest that no measured run had and no feature shows: in sweeps guests have the
/// standard kernel, no elevator of their own and unlimited CPU time. A kind of guest that was not
/// measured is unknown.
pub(super) fn unlike_measured(vm: &Vm, set: &VmConfig, given: &Profile) -> Option<&'static str> {
    if !is_guest(vm) {
        None
    } else if set.guest_elevator != Elevator::None {
        Some("the guest's elevator")
    } else if vm.kernel != Kernel::Standard {
        Some("the guest's kernel")
    } else if vm.cpu != VmCpu::default() {
        Some("the guest's CPU time")
    } else if measured_guest(given).is_none() {
        Some("kind of guest")
    } else {
        None
    }
}
