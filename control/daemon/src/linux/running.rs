//! Running VMs for the observer.

use std::sync::Arc;

use rtvirtio_kernel::ProcessId;
use rtvirtio_vmm::threads::Named;
use rtvirtio_workflow::contracts::InForce;

use super::{LinuxHost, Tracked};
use crate::daemon::Daemon;
use crate::desired::Desired;

impl Daemon<LinuxHost> {
    /// The VMs that run now, with their contracts, for the observer.
    #[must_use]
    pub fn running(&self) -> Vec<Arc<RunningVm>> {
        self.host_ref().running(self.desired())
    }
}

/// A running VM for the observer.
#[derive(Debug)]
pub struct RunningVm {
    /// Contract as last read.
    pub contract: crate::Contract,
    /// Processes found by its lookup.
    pub processes: Vec<ProcessId>,
    /// Threads as named by its monitor.
    pub named: Named,
    /// CPU contract in force; `None` without one.
    pub cpu: Option<InForce>,
}

impl LinuxHost {
    fn running(&self, desired: &Desired) -> Vec<Arc<RunningVm>> {
        let one = |(name, tracked): (&String, &Tracked)| {
            let found = tracked.found.as_ref()?;
            let contract = desired.contract_of(name)?;
            Some(Arc::new(RunningVm {
                contract: contract.clone(),
                processes: found.processes.clone(),
                named: found.handle.named.clone(),
                cpu: tracked.saved.as_ref().and_then(|saved| saved.cpu.clone()),
            }))
        };
        self.tracked.iter().filter_map(one).collect()
    }
}
