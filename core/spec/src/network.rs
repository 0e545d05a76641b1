//! Networks of a spec: what they are, the ports of VMs on them, and what VMs send and receive.

use rtvirtio_units::{Bytes, BytesPerSec, Iops, Mac, SHORTEST_FRAME, WIRE_OVERHEAD};
use serde::{Deserialize, Serialize};

use crate::types::Target;

/// A network: an uplink that VMs share.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Network {
    /// Name in the file; a file with one network need not give it.
    pub name: Option<String>,
    /// What is behind the VMs' ports.
    pub uplink: Uplink,
    /// Rate of the link that they share.
    pub link: BytesPerSec,
    /// Largest payload of a frame, in bytes.
    pub mtu: u32,
}

/// What is behind the ports of a network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Uplink {
    /// A tap for each port, on a bridge of the administrator.
    Tap,
    /// An interface that belongs to the network alone.
    Packet {
        /// Its name.
        interface: String,
    },
}

/// A VM's port on a network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Nic {
    /// Position of the network in [`HostSpec::networks`](crate::HostSpec::networks).
    pub network: usize,
    /// The VM's address.
    pub mac: Mac,
    /// The tap of an [`Uplink::Tap`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tap: Option<String>,
}

/// Frames that a VM sends or receives.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Flow {
    /// Name, unique among flows and tasks of its VM.
    pub name: String,
    /// Position of its port in [`Vm::nics`](crate::Vm::nics).
    pub nic: usize,
    /// Seen from the VM.
    pub direction: Direction,
    /// Length of each frame without its FCS.
    pub frame: Bytes,
    /// Frames per second.
    pub rate: Iops,
    /// Frames that may come at once.
    pub burst: u32,
    /// By which the network knows its frames as urgent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mark: Option<Mark>,
    /// What it must get; `None` for one that takes what is left.
    pub target: Option<Target>,
}

/// Direction of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// From the VM.
    Tx,
    /// To the VM.
    Rx,
}

/// What marks a frame as urgent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Mark {
    /// Priority code point of its VLAN tag (IEEE 802.1Q), 0 to 7.
    Pcp(u8),
    /// Differentiated services code point of its IP header (RFC 2474), 0 to 63.
    Dscp(u8),
}

impl Network {
    /// Its name; `net0` where the file gives none.
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
    /// Bytes of a frame on the wire.
    #[must_use]
    pub fn on_the_wire(&self) -> Bytes {
        Bytes(self.frame.0.max(SHORTEST_FRAME) + WIRE_OVERHEAD)
    }
}
