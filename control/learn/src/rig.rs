//! The VMs of a run, and regulators of their tasks.

use std::any::Any;
use std::error::Error;
use std::fmt;

use rtvirtio_apply::Binding;
use rtvirtio_kernel::HostError;
use rtvirtio_measure::VmKind;
use rtvirtio_measure::workload::VmLoad;
use rtvirtio_spec::Spec;

/// Why VMs cannot be measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RigError {
    /// The user stopped it.
    #[error("cancelled")]
    Cancelled,
    /// A kernel file.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The maker of the VMs.
    #[error(transparent)]
    Vms(Box<dyn Error + Send + Sync>),
}

/// VMs on one device, for one run after the other.
pub trait Rig {
    /// Where the settings of the device and of each VM are.
    ///
    /// # Errors
    /// When the device or the hierarchy of the block I/O controller cannot be found.
    fn binding(&self) -> Result<Binding, RigError>;

    /// Kind of the VMs.
    fn kind(&self) -> VmKind;

    /// How many VMs there are.
    fn vms(&self) -> usize;

    /// Where the tasks of each VM of a spec run, in spec order.
    ///
    /// # Errors
    /// When there is no hierarchy of the block I/O controller.
    fn loads(&self, spec: &Spec) -> Result<Vec<VmLoad>, RigError>;
}

/// Regulates VMs beyond the settings, from the start of their tasks to their end.
pub trait Regulator: fmt::Debug + Send + Sync {
    /// Starts it. Dropping what it returns stops it and puts back what it changed.
    ///
    /// # Errors
    /// When a VM's cgroup or its files are missing, or no thread can be started.
    fn start(&self, binding: &Binding, spec: &Spec) -> Result<Box<dyn Any + Send>, RegulatorError>;
}

/// Why a regulator does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegulatorError {
    /// A kernel file.
    #[error(transparent)]
    Host(#[from] HostError),
    /// Its thread.
    #[error("cannot start a thread for the regulator: {0}")]
    Thread(std::io::Error),
}
