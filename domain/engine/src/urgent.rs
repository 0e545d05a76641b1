//! Signals to what follows a VM's urgency (`rtvirtio keep`): it raises the VM's vCPUs before they
//! are interrupted for a real-time request.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::engine::Command;
use crate::running::Running;

/// Why an eventfd is not signalled.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum UrgentError {
    /// A disk that the domain does not have.
    #[error("there is no disk \"{0}\"")]
    NoDisk(String),
    /// The engine of a disk has ended.
    #[error("the engine of disk \"{0}\" has ended")]
    Ended(String),
}

impl Running {
    /// Signals this eventfd whenever real-time requests of these disks have completed, before the
    /// guests are notified; `None` for no more. All or none of them.
    ///
    /// # Errors
    /// [`UrgentError`].
    pub fn signal_urgent(&self, disks: &[String], eventfd: Option<OwnedFd>) -> Result<(), UrgentError> {
        let eventfd = eventfd.map(Arc::new);
        let state = self.state();
        let mut places = Vec::new();
        for name in disks {
            let found = state.places.iter().enumerate().find_map(|(device, places)| {
                let is_it = |member: &Option<_>| {
                    member.as_ref().is_some_and(|m: &crate::running_state::Member| m.name() == name)
                };
                Some((device, places.iter().position(is_it)?))
            });
            places.push(found.ok_or_else(|| UrgentError::NoDisk(name.clone()))?);
        }
        for ((device, vm), name) in places.into_iter().zip(disks) {
            let (_, engine) = &self.engines()[device];
            let eventfd = eventfd.clone();
            let before = engine.ask(|reply| Command::SignalUrgent { vm, eventfd, reply });
            drop(before.map_err(|_| UrgentError::Ended(name.clone()))?);
        }
        Ok(())
    }
}
