//! Signals for `rtvirtio keep`, which follows a VM's urgency: it raises the VM's vCPUs before they
//! are interrupted for a real-time request or an urgent frame.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rtvirtio_sched::VmId;

use crate::disk::Member;
use crate::engine::Command;
use crate::net::NetCommand;
use crate::running::{Running, State};

/// Reasons for which an eventfd is not signalled.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum UrgentError {
    /// A disk that the I/O domain does not have.
    #[error("there is no disk \"{0}\"")]
    NoDisk(String),
    /// A port that the I/O domain does not have.
    #[error("there is no port \"{0}\"")]
    NoPort(String),
    /// The engine of a disk or port has ended.
    #[error("the engine of \"{0}\" has ended")]
    Ended(String),
}

impl Running {
    /// Signals this eventfd whenever real-time requests of these disks have completed, or urgent
    /// frames to these ports were delivered, before the guests are notified; `None` for no more.
    /// Fails without an effect if a name is unknown.
    pub fn signal_urgent(
        &self,
        disks: &[String],
        ports: &[String],
        eventfd: Option<OwnedFd>,
    ) -> Result<(), UrgentError> {
        let eventfd = eventfd.map(Arc::new);
        let state = self.state();
        let disks = disks.iter().map(|name| {
            let place = disk(&state, name).ok_or_else(|| UrgentError::NoDisk(name.clone()))?;
            Ok((name, place))
        });
        let disks: Vec<_> = disks.collect::<Result<_, UrgentError>>()?;
        let ports = ports.iter().map(|name| {
            let place = port(&state, name).ok_or_else(|| UrgentError::NoPort(name.clone()))?;
            Ok((name, place))
        });
        let ports: Vec<_> = ports.collect::<Result<_, UrgentError>>()?;
        for (name, (device, vm)) in disks {
            let (_, engine) = &self.engines()[device];
            let eventfd = eventfd.clone();
            let before = engine.ask(|reply| Command::SignalUrgent { vm, eventfd, reply });
            drop(before.map_err(|_| UrgentError::Ended(name.clone()))?);
        }
        for (name, (network, port)) in ports {
            let engine = state.networks[network].engine.handle();
            let eventfd = eventfd.clone();
            let before = engine.ask(|reply| NetCommand::SignalUrgent { port, eventfd, reply });
            drop(before.map_err(|_| UrgentError::Ended(name.clone()))?);
        }
        Ok(())
    }
}

/// Device and place of a disk.
fn disk(state: &State, name: &str) -> Option<(usize, VmId)> {
    state.places.iter().enumerate().find_map(|(device, places)| {
        let is_it = |member: &Option<Member>| member.as_ref().is_some_and(|m| m.name() == name);
        Some((device, places.position(is_it)?))
    })
}

/// Network and place of a port.
fn port(state: &State, name: &str) -> Option<(usize, VmId)> {
    state.networks.iter().enumerate().find_map(|(network, running)| {
        let (place, _) = running.members().find(|(_, member)| member.name == name)?;
        Some((network, place))
    })
}
