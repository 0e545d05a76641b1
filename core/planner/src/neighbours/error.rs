//! Errors of choosing limits.

use rtvirtio_model::ModelError;
use rtvirtio_traffic::{Actuator, ChooseError, CompileError};

use super::VictimOutlook;

/// Errors that leave no choice of limits.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum NeighbourError {
    /// No VM has a target, and no service was asked for.
    #[error("no VM has a target: give a task one, or say what a VM must get with --alpha-delta VM=RATE,TIME")]
    NoVictim,
    /// There is no VM to limit.
    #[error("every VM has a target or its own `traffic`: there is no VM to choose a limit for")]
    NoNeighbour,
    /// A name that the spec does not have.
    #[error("the spec has no VM \"{vm}\"")]
    NoSuchVm {
        /// Name of the VM, as given.
        vm: String,
    },
    /// Neither a profile nor a curve was given.
    #[error("there is neither a profile nor a curve to choose from")]
    NoBasis,
    /// A regulator that does not limit disk I/O.
    #[error("{actuator} does not limit the requests of disks: choose io-max, throttle-v1 or io-domain")]
    NotOfDisks {
        /// Regulator as given.
        actuator: Actuator,
    },
    /// A regulator that counts merged requests as one.
    #[error(
        "{actuator} joins neighbouring requests before it counts them, so that it bounds none of a VM's requests: choose io-max, throttle-v1 or io-domain"
    )]
    Joins {
        /// Regulator as given.
        actuator: Actuator,
    },
    /// Neither profile nor curve bounds flushes.
    #[error(
        "vm {vm}: task {task} syncs its writes, and what a flush delays is in neither profile line nor curve: leave it out, or plan with --domain"
    )]
    Synced {
        vm: String,
        /// Task that syncs its writes.
        task: String,
    },
    /// A VM with a target and best-effort work.
    #[error(
        "vm {vm}: task {task} has no target, and a limit of the VM would hold back its other tasks too: move it into a VM of its own"
    )]
    Mixed {
        vm: String,
        /// Task without a target.
        task: String,
    },
    /// A load without a bound.
    #[error(
        "vm {vm}: task {task} has a target and no rate, so that it leaves the other targets nothing: give it a rate"
    )]
    Unpaced {
        vm: String,
        /// Task with a target and without a rate.
        task: String,
    },
    /// The cost of writes was not measured.
    #[error(
        "vm {vm} writes, and the profile has no measured writes: measure them, which destroys the device's data (`rtvirtio profile --allow-write`), or give a curve"
    )]
    NoWrites { vm: String },
    /// The curve is of other traffic.
    #[error("the curve does not fit the spec: {why}")]
    OtherCurve {
        /// Difference between curve and spec.
        why: String,
    },
    /// The profile cannot be used.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The curve cannot be used.
    #[error(transparent)]
    Curve(#[from] ChooseError),
    /// The regulator cannot take the limit.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// No limit is small enough.
    #[error("{}", out_of_reach(victim, rates))]
    OutOfReach {
        /// First victim whose need is not met at the smallest limits.
        victim: Box<VictimOutlook>,
        /// Smallest limits, as text.
        rates: String,
    },
}

impl NeighbourError {
    /// Whether the request exceeds the device's capacity.
    #[must_use]
    pub fn is_infeasible(&self) -> bool {
        matches!(self, Self::OutOfReach { .. } | Self::Unpaced { .. })
    }
}

fn out_of_reach(victim: &VictimOutlook, rates: &str) -> String {
    let name = victim.task.as_ref().map_or_else(|| victim.vm.clone(), |t| format!("{}/{t}", victim.vm));
    let what = if victim.task.is_some() { "latency" } else { "Delta" };
    let bound =
        victim.bound.map_or_else(|| format!("no bound of {what}"), |b| format!("{what} {:.2} ms", b * 1e3));
    format!(
        "even with neighbours at {rates}, the worst case leaves {name} alpha {:.1}/s and {bound}, and it asks for {:.1}/s and {:.2} ms: ask for less, or choose a regulator with a smaller burst (--actuator)",
        victim.alpha,
        victim.rate,
        victim.within * 1e3
    )
}
