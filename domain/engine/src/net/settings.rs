//! Settings of a port that follow from its keys, and its counters.

use rtvirtio_domain_config::{Network, Port};
use rtvirtio_units::Nanos;

/// Settings from those keys of a port that can change while it is served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PortSettings {
    /// Time for which the thread sleeps beyond the moment at which a frame to the VM is admitted.
    pub coalesce: Nanos,
    /// Least time between two notifications of frames to the VM.
    pub notify_interval: Nanos,
    /// Large segments pass whole: to the VM, and from it.
    pub whole: [bool; 2],
    /// Weight of its slice of the thread's CPU budget: its reserved rate, in bytes per second.
    pub cpu_weight: u64,
}

impl PortSettings {
    #[must_use]
    pub fn new(network: &Network, port: &Port) -> Self {
        Self {
            coalesce: port.delivery_slack(),
            notify_interval: port.notify_interval(),
            whole: network.passes_whole(port),
            cpu_weight: port.reserved().round() as u64,
        }
    }
}

/// Frames that were not passed on, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drops {
    /// From the VM: another source address or VLAN.
    pub spoofed: u64,
    /// From the VM: of the link's own protocols, without `link_local`.
    pub link_local: u64,
    /// From the VM: no valid chain, header or frame.
    pub malformed: u64,
    /// From the VM: longer than the MTU of the network, or of the uplink.
    pub too_long: u64,
    /// From the VM: the uplink refused it.
    pub refused: u64,
    /// To the VM: beyond its limit on broadcasts.
    pub broadcast: u64,
    /// To the VM: for another VLAN or address.
    pub filtered: u64,
    /// To the VM: it had no buffers, or its queue was full.
    pub no_buffer: u64,
    /// To the VM: a large segment that it cannot take.
    pub segmented: u64,
}
