//! Why there is no plan.

use rtvirtio_model::ModelError;

/// Why there is no plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// The model cannot use its inputs, or covers no configuration of the space.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A setting that the kernel would accept and that would change nothing.
    #[error("{setting} cannot act: {why}")]
    CannotAct {
        /// The setting, for the user.
        setting: String,
        /// The reason and the remedy.
        why: String,
    },
    /// A value that is not one of the knob's.
    #[error("{setting}: value `{value}` is not valid; {remedy}")]
    BadValue {
        /// The setting, for the user.
        setting: String,
        /// The value found.
        value: String,
        /// What it may be.
        remedy: String,
    },
    /// A setting for a VM that the spec does not have.
    #[error("{setting}: the spec has no VM `{vm}`; plan again for this spec")]
    NoSuchVm {
        /// The setting, for the user.
        setting: String,
        /// Name of the VM.
        vm: String,
    },
    /// Options that contradict themselves.
    #[error("plan options: {0}")]
    BadOptions(String),
}
