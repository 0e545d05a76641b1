//! Disks and ports whose servers are closed.

use rtvirtio_sched::{IndexVec, VmId};

use crate::disk::Member;
use crate::network::RunningNetwork;

/// Disks and ports whose servers are closed, with the names of their devices and networks.
/// Dropping them waits until nothing of them is in flight.
#[derive(Debug, Default)]
pub(crate) struct Closed {
    pub(crate) devices: Vec<(String, IndexVec<VmId, Option<Member>>)>,
    pub(crate) networks: Vec<(String, RunningNetwork)>,
}

impl Closed {
    /// Devices and networks of which something is in flight still, with their disks and ports.
    pub(crate) fn unended(&self) -> Vec<String> {
        let mut all = Vec::new();
        for (device, places) in &self.devices {
            let left = places.iter().flatten().filter(|disk| !disk.server.has_ended());
            let left: Vec<&str> = left.map(Member::name).collect();
            if !left.is_empty() {
                all.push(format!("device {device} (disks: {})", left.join(", ")));
            }
        }
        for (network, running) in &self.networks {
            let left = running.members().filter(|(_, port)| !port.server.has_ended());
            let left: Vec<&str> = left.map(|(_, port)| port.name.as_str()).collect();
            if !left.is_empty() {
                all.push(format!("network {network} (ports: {})", left.join(", ")));
            }
        }
        all
    }
}
