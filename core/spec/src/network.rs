//! Networks of a spec, the ports of VMs on them, and the flows of VMs.

use rtvirtio_units::{Bytes, BytesPerSec, Iops, Mac, SHORTEST_FRAME, WIRE_OVERHEAD};
use serde::{Deserialize, Serialize};

use crate::goal::Target;

/// A network: an uplink that VMs share.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Network {
    /// Name in the file; a file with one network need not give it.
    pub name: Option<String>,
    /// Host side of the VMs' ports.
    pub uplink: Uplink,
    /// Rate of the shared link.
    pub link: BytesPerSec,
    /// Largest payload of a frame, in bytes.
    pub mtu: u32,
}

/// Host side of a network's ports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Uplink {
    /// A tap for each port, on a bridge set up by the administrator.
    Tap,
    /// A host interface used by the network alone.
    Packet {
        /// Name of the interface.
        interface: String,
    },
}

/// A VM's port on a network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Nic {
    /// Index of the network in [`HostSpec::networks`](crate::HostSpec::networks).
    pub network: usize,
    /// MAC address of the VM.
    pub mac: Mac,
    /// Name of the tap on an [`Uplink::Tap`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tap: Option<String>,
}

/// Frames that a VM sends or receives.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Flow {
    /// Name, unique among flows and tasks of its VM.
    pub name: String,
    /// Index of its port in [`Vm::nics`](crate::Vm::nics).
    pub nic: usize,
    /// Direction as seen from the VM.
    pub direction: Direction,
    /// Length of each frame without its FCS.
    pub frame: Bytes,
    /// Rate in frames per second.
    pub rate: Iops,
    /// Number of frames that may come at once.
    pub burst: u32,
    /// Mark by which the network treats its frames as urgent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mark: Option<Mark>,
    /// Latency target; `None` for a best-effort flow.
    pub target: Option<Target>,
}

/// Direction of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// Sent by the VM.
    Tx,
    /// Received by the VM.
    Rx,
}

/// Header field that marks a frame as urgent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Mark {
    /// Priority code point of its VLAN tag (IEEE 802.1Q), 0 to 7.
    Pcp(u8),
    /// Differentiated services code point of its IP header (RFC 2474), 0 to 63.
    Dscp(u8),
}

impl Network {
    /// Name of the network; `net0` where the file gives none.
    #[must_use]
    pub fn name(&self) -> &str {
        self.name.as_deref().unwrap_or("net0")
    }

    /// Largest frame without its FCS, in bytes: Ethernet's header, two VLAN tags and the payload.
    #[must_use]
    pub fn largest_frame(&self) -> Bytes {
        Bytes(u64::from(self.mtu) + 22)
    }
}

impl Flow {
    /// Length of a frame on the wire, in bytes.
    #[must_use]
    pub fn on_the_wire(&self) -> Bytes {
        Bytes(self.frame.0.max(SHORTEST_FRAME) + WIRE_OVERHEAD)
    }
}
