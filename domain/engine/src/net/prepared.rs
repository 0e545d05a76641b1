//! Attach and detach of ports while a network runs. All memory is allocated before, and freed
//! after, by the control thread: the other VMs wait for the network's thread.

use std::fmt;

use rtvirtio_domain_config::{Network, PortId};
use rtvirtio_domain_resources::uplink::Uplink;
use rtvirtio_sched::{MembershipError, PreparedVm, Scheduler};

use super::port::Port;

/// A port that a network can serve at once.
pub struct PreparedPort {
    pub(super) port: Port,
    pub(super) tx: PreparedVm,
    pub(super) rx: PreparedVm,
}

impl PreparedPort {
    /// Allocates the memory of a port of a configuration. `port_id` is its index in
    /// the file.
    ///
    /// # Errors
    /// An invalid configuration, or one without this port.
    pub fn new(network: &Network, port_id: PortId, uplink: Uplink) -> Result<Self, MembershipError> {
        let config = network.ports.get(port_id.0).ok_or(MembershipError::Vacant(port_id.vm()))?;
        Ok(Self {
            tx: Scheduler::prepare(&network.tx_sched(), port_id.vm())?,
            rx: Scheduler::prepare(&network.rx_sched(), port_id.vm())?,
            port: Port::new(network, config, uplink),
        })
    }
}

/// Empty port that takes the place of a removed one.
pub struct VacantPort(pub(super) Port);

impl VacantPort {
    /// Allocates an empty port.
    #[must_use]
    pub fn new() -> Self {
        Self(Port::vacant())
    }
}

impl Default for VacantPort {
    fn default() -> Self {
        Self::new()
    }
}

/// Memory of a removed port: its uplink closes when this is dropped.
pub struct DetachedPort {
    pub(super) _port: Port,
    pub(super) _schedulers: [PreparedVm; 2],
}

impl fmt::Debug for PreparedPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PreparedPort").field("port", &self.port.name).finish_non_exhaustive()
    }
}

impl fmt::Debug for VacantPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VacantPort").finish_non_exhaustive()
    }
}

impl fmt::Debug for DetachedPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DetachedPort").finish_non_exhaustive()
    }
}
