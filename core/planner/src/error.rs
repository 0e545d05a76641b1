//! Errors of planning.

use rtvirtio_model::ModelError;

/// Errors that leave no plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// The model cannot use its inputs, or covers no configuration of the space.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A setting that the kernel would accept and that would change nothing.
    #[error("{setting} cannot act: {why}")]
    CannotAct {
        /// Name of the knob, for the user.
        setting: String,
        /// The reason and the remedy.
        why: String,
    },
    /// A value outside of the knob's range.
    #[error("{setting}: value `{value}` is not valid; {remedy}")]
    BadValue {
        /// Name of the knob, for the user.
        setting: String,
        /// Value of the setting.
        value: String,
        /// Values that the knob takes.
        remedy: String,
    },
    /// A setting for a VM that the spec does not have.
    #[error("{setting}: the spec has no VM `{vm}`; plan again for this spec")]
    NoSuchVm {
        /// Name of the knob, for the user.
        setting: String,
        vm: String,
    },
    /// A device that io.cost divides: what a search chooses rests on predictions.
    #[error(
        "io.cost divides the device, and no model covers that: switch it off with what set it (`echo 'MAJ:MIN enable=0' \
         >/sys/fs/cgroup/io.cost.qos`), or leave the device to it"
    )]
    UnderIoCost,
    /// A device on which a plan's latency targets are in force.
    #[error(
        "io.latency of a plan is in force, and no model covers that: revert that plan first, or leave the device to it"
    )]
    UnderIoLatency,
    /// Options with which no plan is possible, and why.
    #[error("plan options: {0}")]
    BadOptions(String),
}
