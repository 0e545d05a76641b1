//! The VMs of a run, and regulators of their tasks.

use std::any::Any;
use std::error::Error;
use std::fmt;

use rtvirtio_apply::Binding;
use rtvirtio_kernel::HostError;
use rtvirtio_measure::VmKind;
use rtvirtio_measure::workload::VmLoad;
use rtvirtio_spec::Spec;

/// Errors of VMs to be measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RigError {
    /// Cancelled by the user.
    #[error("cancelled")]
    Cancelled,
    /// A kernel file cannot be read or written.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The VMs cannot be created or reached.
    #[error(transparent)]
    Vms(Box<dyn Error + Send + Sync>),
}

/// VMs on one device, for consecutive runs.
pub trait Rig {
    /// Files of the settings of the device and of each VM.
    fn binding(&self) -> Result<Binding, RigError>;

    /// Kind of the VMs.
    fn kind(&self) -> VmKind;

    /// Number of VMs on the device.
    fn vms(&self) -> usize;

    /// Placement of the tasks of each VM of a spec, in spec order.
    fn loads(&self, spec: &Spec) -> Result<Vec<VmLoad>, RigError>;
}

/// Limits VMs beyond the settings, from the start of their tasks to their end.
pub trait Regulator: fmt::Debug + Send + Sync {
    /// Starts the regulator. Dropping the returned value stops it and undoes its changes.
    fn start(&self, binding: &Binding, spec: &Spec) -> Result<Box<dyn Any + Send>, RegulatorError>;
}

/// Errors of starting a regulator.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegulatorError {
    /// A kernel file cannot be read or written.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The regulator's thread cannot be started.
    #[error("cannot start a thread for the regulator: {0}")]
    Thread(std::io::Error),
}
