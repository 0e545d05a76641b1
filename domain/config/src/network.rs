//! Networks and their ports: the keys of the file, and checks that types do not express.

use std::collections::BTreeSet;
use std::path::PathBuf;

use rtvirtio_sched::{LINK_STALL, Policy};
use rtvirtio_units::{Bytes, BytesPerSec, Iops, Mac, Nanos, Ratio};
use serde::Deserialize;

use crate::error::FileError;
use crate::text::{default_policy, default_true, default_weight, parse_optional_text, parse_text};

/// Largest frame without its FCS, of a network whose MTU is not given: 1500 bytes of payload,
/// Ethernet's header and a VLAN tag.
const DEFAULT_MTU: u16 = 1_500;
/// Longest `rx_coalesce`: under a flood of frames the guest's receive buffers last no longer.
const LONGEST_COALESCE: Nanos = Nanos::from_millis(10);

/// A network: ports of VMs that share one uplink.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Network {
    /// Name of its thread, and in the status.
    pub name: String,
    /// Path from the ports to the link.
    #[serde(default)]
    pub uplink: UplinkKind,
    /// The interface of a `packet` uplink.
    pub interface: Option<String>,
    /// Rate of the link behind the ports, in bytes per second: frames to it are ordered, and leave
    /// at 99 % of this rate. Without it, frames go at once, and nothing can be reserved.
    #[serde(default, deserialize_with = "parse_optional_text")]
    pub link: Option<BytesPerSec>,
    /// Largest payload of a frame, in bytes.
    #[serde(default = "default_mtu")]
    pub mtu: u16,
    /// The scheduler's policy toward the link.
    #[serde(default = "default_policy")]
    pub policy: Policy,
    /// Longest time in which the host does not run the thread; for admission.
    #[serde(default = "default_stall", deserialize_with = "parse_text")]
    pub stall: Nanos,
    /// CPUs of its thread; any when empty.
    #[serde(default)]
    pub cpus: Vec<usize>,
    /// `SCHED_FIFO` priority of its thread.
    pub fifo: Option<u8>,
    /// Most CPU time of its thread, as a share of a CPU; no limit when not given.
    #[serde(default, deserialize_with = "parse_optional_text")]
    pub cpu_budget: Option<Ratio>,
    /// The period of that budget.
    #[serde(default = "default_cpu_period", deserialize_with = "parse_text")]
    pub cpu_period: Nanos,
    /// Time of polling before the thread sleeps; adapts when not given.
    #[serde(default, deserialize_with = "parse_optional_text")]
    pub poll: Option<Nanos>,
    /// Ports of VMs, `[[network.port]]`.
    #[serde(default, rename = "port")]
    pub ports: Vec<Port>,
}

fn default_mtu() -> u16 {
    DEFAULT_MTU
}

fn default_stall() -> Nanos {
    LINK_STALL
}

fn default_cpu_period() -> Nanos {
    Nanos::from_millis(10)
}

/// Path from the ports of a network to the link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum UplinkKind {
    /// A tap for each port, on a bridge of the administrator.
    #[default]
    Tap,
    /// An interface that belongs to the network alone, by a packet socket for each port.
    Packet,
}

/// A VM's network interface over vhost-user.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Port {
    /// Name of the VM.
    pub name: String,
    /// Path of the vhost-user socket.
    pub socket: PathBuf,
    /// Group whose members may connect, by name or number: mode 0660, otherwise 0600.
    pub socket_group: Option<String>,
    /// The tap of a `tap` uplink.
    pub tap: Option<String>,
    /// The VM's address: the source of all its frames, and the destination of those that it gets.
    pub mac: Mac,
    /// VLANs that the VM may use; any when empty.
    #[serde(default)]
    pub vlans: Vec<u16>,
    /// Allows frames of the link's own protocols: to 01:80:c2:00:00:00 to 0f (spanning tree, LACP,
    /// LLDP, PTP's peer delay), and PAUSE.
    #[serde(default)]
    pub link_local: bool,
    /// Multicast addresses whose frames are exempt from the limit on unlisted ones.
    #[serde(default)]
    pub multicast: Vec<Mac>,
    /// Limit of broadcast and unlisted multicast frames to the VM, per second.
    #[serde(default = "default_broadcast", deserialize_with = "parse_text")]
    pub broadcast: Iops,
    /// Leaves checksums and TCP segmentation to the host, in both directions.
    #[serde(default = "default_true")]
    pub offload: bool,
    /// Accepts huge pages; its QEMU is trusted not to punch holes into them.
    #[serde(default)]
    pub hugepages: bool,
    /// Trusts the front end with its memory and descriptors, as for disks.
    #[serde(default)]
    pub trust: bool,
    /// Frames of the VM that the network holds at most, in each direction.
    #[serde(default = "default_depth")]
    pub depth: u32,
    /// Weight in the sharing of what is not reserved.
    #[serde(default = "default_weight")]
    pub weight: u32,
    /// Reservation of the link for all frames but the urgent ones.
    pub reserve: Option<RateConfig>,
    /// Reservation of the link for its urgent frames.
    pub urgent: Option<RateConfig>,
    /// Priority code points (IEEE 802.1Q) of urgent frames.
    #[serde(default)]
    pub urgent_pcp: Vec<u8>,
    /// Differentiated services code points of urgent frames.
    #[serde(default)]
    pub urgent_dscp: Vec<u8>,
    /// Cap on frames from the VM: they wait.
    #[serde(default)]
    pub tx_cap: FrameCap,
    /// Cap on frames to the VM: they are dropped by the kernel when its queue is full.
    #[serde(default)]
    pub rx_cap: FrameCap,
    /// Least time between two notifications of the VM of frames to it; none when not given.
    #[serde(default, deserialize_with = "parse_optional_text")]
    pub rx_coalesce: Option<Nanos>,
}

fn default_broadcast() -> Iops {
    Iops(100.0)
}

fn default_depth() -> u32 {
    64
}

/// A reservation of the link, counted on the wire: a frame has
/// [`WIRE_OVERHEAD`](rtvirtio_units::WIRE_OVERHEAD) more bytes than its length without the FCS.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RateConfig {
    /// Sustained rate of bytes on the wire.
    #[serde(deserialize_with = "parse_text")]
    pub rate: BytesPerSec,
    /// Burst of bytes on the wire.
    #[serde(deserialize_with = "parse_text")]
    pub burst: Bytes,
    /// Longest time from the moment at which a frame is within rate and burst until it is sent.
    #[serde(deserialize_with = "parse_text")]
    pub deadline: Nanos,
}

/// Token-bucket caps (RFC 2215's TSPEC); each is optional. Bytes are those of frames, without FCS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FrameCap {
    /// Sustained rate of frames; no cap when not given.
    #[serde(default, deserialize_with = "parse_optional_text")]
    pub frames: Option<Iops>,
    /// Burst of frames; those of 2 ms when not given, at least 1.
    pub frames_burst: Option<u64>,
    /// Sustained rate of bytes; no cap when not given.
    #[serde(default, deserialize_with = "parse_optional_text")]
    pub bytes: Option<BytesPerSec>,
    /// Burst of bytes; those of 2 ms when not given, at least the largest frame.
    #[serde(default, deserialize_with = "parse_optional_text")]
    pub bytes_burst: Option<Bytes>,
    /// Peak rate over the sustained rate; unlimited when not given.
    pub peak: Option<f64>,
}

impl FrameCap {
    /// Whether nothing is capped.
    #[must_use]
    pub fn is_none(&self) -> bool {
        self.frames.is_none() && self.bytes.is_none()
    }
}

impl Port {
    /// A port with the defaults of the file for all other keys.
    #[must_use]
    pub fn new(name: String, socket: PathBuf, mac: Mac) -> Self {
        Self {
            name,
            socket,
            socket_group: None,
            tap: None,
            mac,
            vlans: Vec::new(),
            link_local: false,
            multicast: Vec::new(),
            broadcast: default_broadcast(),
            offload: default_true(),
            hugepages: false,
            trust: false,
            depth: default_depth(),
            weight: default_weight(),
            reserve: None,
            urgent: None,
            urgent_pcp: Vec::new(),
            urgent_dscp: Vec::new(),
            tx_cap: FrameCap::default(),
            rx_cap: FrameCap::default(),
            rx_coalesce: None,
        }
    }
}

impl Network {
    /// A network with the defaults of the file for all other keys.
    #[must_use]
    pub fn new(name: String) -> Self {
        Self {
            name,
            uplink: UplinkKind::default(),
            interface: None,
            link: None,
            mtu: default_mtu(),
            policy: default_policy(),
            stall: default_stall(),
            cpus: Vec::new(),
            fifo: None,
            cpu_budget: None,
            cpu_period: default_cpu_period(),
            poll: None,
            ports: Vec::new(),
        }
    }

    /// Checks what the types do not express.
    ///
    /// # Errors
    /// [`FileError::Network`]: a value that makes no sense, or a reservation that is not admitted.
    pub fn check(&self) -> Result<(), FileError> {
        let wrong = |what: String| Err(FileError::Network { network: self.name.clone(), what });
        if !(68..=9_216).contains(&self.mtu) {
            return wrong(format!("`mtu` is {}; it must be 68 to 9216", self.mtu));
        }
        match (self.uplink, &self.interface) {
            (UplinkKind::Packet, None) => {
                return wrong(
                    "`uplink = \"packet\"` needs `interface`, the one that it has to itself".into(),
                );
            }
            (UplinkKind::Tap, Some(_)) => {
                return wrong("`interface` belongs to `uplink = \"packet\"`; a port names its `tap`".into());
            }
            _ => {}
        }
        if self.link.is_some_and(|link| !(1e3..=50e9).contains(&link.0)) {
            return wrong("`link` must be 8kbit/s to 400Gbit/s".into());
        }
        if !(Nanos::from_micros(500)..=Nanos::from_millis(1_000)).contains(&self.cpu_period) {
            return wrong("`cpu_period` must be 500us to 1s".into());
        }
        if let Some(Err(e)) = self.cpu_limit().map(|limit| limit.check(self.ports.len())) {
            return wrong(format!("`cpu_budget`: {}", self.cpu_remedy(&e)));
        }
        let (mut macs, mut taps) = (BTreeSet::new(), BTreeSet::new());
        for port in &self.ports {
            let of = |what: String| wrong(format!("port \"{}\": {what}", port.name));
            if port.mac.is_group() {
                return of(format!("`mac` {} is a group address", port.mac));
            }
            if !macs.insert(port.mac) {
                return of(format!("`mac` {} is there twice", port.mac));
            }
            match (self.uplink, &port.tap) {
                (UplinkKind::Tap, None) => return of("`tap` is missing".into()),
                (UplinkKind::Packet, Some(_)) => {
                    return of("`tap` belongs to `uplink = \"tap\"`".into());
                }
                (UplinkKind::Tap, Some(tap)) if !taps.insert(tap.clone()) => {
                    return of(format!("`tap` {tap} is there twice"));
                }
                _ => {}
            }
            if let Some(address) = port.multicast.iter().find(|m| !m.is_group()) {
                return of(format!("`multicast`: {address} is no group address"));
            }
            if let Some(vlan) = port.vlans.iter().find(|vlan| **vlan > 4_094) {
                return of(format!("`vlans`: {vlan} is no VLAN; 0 to 4094"));
            }
            if let Some(pcp) = port.urgent_pcp.iter().find(|pcp| **pcp > 7) {
                return of(format!("`urgent_pcp`: {pcp} is no priority code point; 0 to 7"));
            }
            if let Some(dscp) = port.urgent_dscp.iter().find(|dscp| **dscp > 63) {
                return of(format!("`urgent_dscp`: {dscp} is no code point; 0 to 63"));
            }
            port.check_rates(self).map_err(|what| FileError::Network {
                network: self.name.clone(),
                what: format!("port \"{}\": {what}", port.name),
            })?;
            if port.depth < 2 || port.depth > 4_096 {
                return of(format!("`depth` is {}; it must be 2 to 4096", port.depth));
            }
            if let Some(time) = port.rx_coalesce.filter(|time| *time > LONGEST_COALESCE) {
                return of(format!("`rx_coalesce` is {time}; it must be {LONGEST_COALESCE} at most"));
            }
            let reserves = port.reserve.is_some() || port.urgent.is_some();
            if reserves && self.link.is_none() {
                return of("a reservation needs `link` of the network: the rate that it is a part of".into());
            }
            if port.urgent.is_some() && port.urgent_pcp.is_empty() && port.urgent_dscp.is_empty() {
                return of("`urgent` needs `urgent_pcp` or `urgent_dscp`: which frames are urgent".into());
            }
        }
        self.admit()
    }
}
