//! Ethernet frames: the fields that decide their destination, and virtio-net's header before them.

use rtvirtio_domain_config::{Mac, Port};
use rtvirtio_sched::Priority;

pub use rtvirtio_domain_resources::uplink::HEADER;

use crate::feature::net as feature;

/// Length of the header of a legacy driver without mergeable buffers.
pub const LEGACY_HEADER: usize = 10;
/// Length of Ethernet's header.
pub(super) const ETHERNET: usize = 14;
/// Length of a tag, with the type of what is behind it.
pub(super) const TAG: usize = 4;
/// Lengths of IP headers without options.
pub(super) const IPV4_HEADER: usize = 20;
pub(super) const IPV6_HEADER: usize = 40;

pub(super) const VLAN: u16 = 0x8100;
const SERVICE_VLAN: u16 = 0x88a8;
/// EtherTypes of outer tags before IEEE 802.1ad, which switches still accept as one.
const OLD_SERVICE_VLANS: [u16; 3] = [0x9100, 0x9200, 0x9300];
/// MAC control (IEEE 802.3, annex 31): PAUSE stops the receiver's link.
const MAC_CONTROL: u16 = 0x8808;
/// The addresses that no bridge forwards (IEEE 802.1Q, table 8-1) begin with these bytes.
const LINK_LOCAL: [u8; 5] = [0x01, 0x80, 0xc2, 0, 0];
/// The reserved identifier: no port may be of it.
const UNKNOWN_VLAN: u16 = 0xfff;
pub(super) const IPV4: u16 = 0x0800;
pub(super) const IPV6: u16 = 0x86dd;

/// Flag of the header: the checksum is left to the receiver.
pub(super) const NEEDS_CSUM: u8 = 1;
/// Flag of the header: the checksum is known to be right.
const DATA_VALID: u8 = 2;
/// Type of segmentation: TCP over IPv4 and IPv6, and a flag in addition to them.
pub(super) const GSO_TCPV4: u8 = 1;
pub(super) const GSO_TCPV6: u8 = 4;
pub(super) const GSO_ECN: u8 = 0x80;

/// The fields of a frame that decide its destination and class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Destination MAC address.
    pub destination: Mac,
    /// Source MAC address.
    pub source: Mac,
    /// Identifier of the outer VLAN, 0 for none, and priority code point of the outer tag.
    pub vlan: Option<(u16, u8)>,
    /// Differentiated services code point of an IP packet.
    pub dscp: Option<u8>,
    /// Whether it is of the link's own protocols, and can change the next switch's or host's state.
    pub link_local: bool,
}

impl Frame {
    /// Parses a frame without its FCS; `None` for one that is too short.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let header = bytes.get(..ETHERNET)?;
        let address = |at: usize| Some(Mac(header.get(at..at + 6)?.try_into().ok()?));
        let (kind, at) = content(bytes)?;
        let dscp = match kind {
            IPV4 => bytes.get(at + 1).map(|tos| tos >> 2),
            IPV6 => word(bytes, at).map(|v| ((v >> 6) & 0x3f) as u8),
            _ => None,
        };
        let destination = address(0)?;
        let [prefix @ .., last] = destination.0;
        let link_local = prefix == LINK_LOCAL && last < 0x10 || kind == MAC_CONTROL;
        Some(Self { destination, source: address(6)?, vlan: vlan(bytes, kind, at), dscp, link_local })
    }
}

fn word(frame: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(frame.get(at..at + 2)?.try_into().ok()?))
}

fn is_tag(kind: u16) -> bool {
    kind == VLAN || kind == SERVICE_VLAN
}

/// EtherType of a frame's content behind an outer and an inner tag, and its offset; `None` for a
/// frame that ends before.
pub(super) fn content(frame: &[u8]) -> Option<(u16, usize)> {
    let (mut kind, mut at) = (word(frame, ETHERNET - 2)?, ETHERNET);
    for _ in 0..2 {
        if !is_tag(kind) {
            break;
        }
        kind = word(frame, at + 2)?;
        at += TAG;
    }
    Some((kind, at))
}

/// The VLAN of a frame whose content has this type and offset, and the priority of its outer tag. A
/// tag with identifier 0 carries a priority only: receivers remove it, and use the next one. A tag
/// of an old type is not parsed: its VLAN depends on the receiver.
fn vlan(frame: &[u8], kind: u16, content: usize) -> Option<(u16, u8)> {
    let mut tags = (ETHERNET..content).step_by(TAG).filter_map(|at| word(frame, at));
    let is_unread = is_tag(kind) || OLD_SERVICE_VLANS.contains(&kind);
    let Some(outer) = tags.next() else { return is_unread.then_some((UNKNOWN_VLAN, 0)) };
    let id = [outer].into_iter().chain(tags).map(|tag| tag & 0xfff).find(|id| *id != 0);
    // A third tag is not parsed.
    let id = id.unwrap_or(if is_unread { UNKNOWN_VLAN } else { 0 });
    Some((id, (outer >> 13) as u8))
}

/// Addresses, VLANs and classes of a port's frames.
#[derive(Clone, Debug)]
pub struct PortRules {
    mac: Mac,
    vlans: Vec<u16>,
    link_local: bool,
    multicast: Vec<Mac>,
    /// Bit n: this priority code point is urgent.
    urgent_pcp: u8,
    /// Bit n: this code point is urgent.
    urgent_dscp: u64,
}

/// Decision about a frame to a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// Deliver to the port.
    Accept,
    /// Deliver as long as the port's limit on broadcasts allows.
    Limited,
    /// Not for this port.
    Drop,
}

impl PortRules {
    #[must_use]
    pub fn new(port: &Port) -> Self {
        Self {
            mac: port.mac,
            vlans: port.vlans.clone(),
            link_local: port.link_local,
            multicast: port.multicast.clone(),
            urgent_pcp: port.urgent_pcp.iter().fold(0, |set, pcp| set | 1 << (pcp & 7)),
            urgent_dscp: port.urgent_dscp.iter().fold(0, |set, dscp| set | 1 << (dscp & 63)),
        }
    }

    /// MAC address of the port.
    #[must_use]
    pub fn mac(&self) -> Mac {
        self.mac
    }

    /// VLANs in which the port is announced; 0 is without a tag.
    #[must_use]
    pub fn tags(&self) -> Vec<u16> {
        if self.vlans.is_empty() { vec![0] } else { self.vlans.clone() }
    }

    fn allows_vlan(&self, frame: &Frame) -> bool {
        let id = frame.vlan.map_or(0, |(id, _)| id);
        self.vlans.is_empty() || self.vlans.contains(&id)
    }

    /// Whether the port may send a frame: its own address as the source, and a VLAN of its own.
    #[must_use]
    pub fn may_send(&self, frame: &Frame) -> bool {
        frame.source == self.mac && self.allows_vlan(frame)
    }

    /// Whether the port may send a frame as far as the link's own protocols are concerned.
    #[must_use]
    pub fn may_send_to_link(&self, frame: &Frame) -> bool {
        self.link_local || !frame.link_local
    }

    /// Decision about a frame to this port.
    #[must_use]
    pub fn delivery(&self, frame: &Frame) -> Delivery {
        if !self.allows_vlan(frame) {
            Delivery::Drop
        } else if frame.destination == self.mac || self.multicast.contains(&frame.destination) {
            Delivery::Accept
        } else if frame.destination.is_group() {
            Delivery::Limited
        } else {
            Delivery::Drop
        }
    }

    #[must_use]
    pub fn priority(&self, frame: &Frame) -> Priority {
        let pcp = frame.vlan.is_some_and(|(_, pcp)| self.urgent_pcp >> pcp & 1 == 1);
        let dscp = frame.dscp.is_some_and(|dscp| self.urgent_dscp >> dscp & 1 == 1);
        if pcp || dscp { Priority::URGENT } else { Priority::NORMAL }
    }
}

/// A 16-bit field of virtio-net's header; little-endian for modern drivers, as on the machines that
/// legacy drivers run on here.
pub(super) fn field(header: &[u8], at: usize) -> usize {
    header.get(at..at + 2).map_or(0, |b| usize::from(u16::from_le_bytes([b[0], b[1]])))
}

/// Whether a guest's header describes the frame after it and uses nothing that was not negotiated.
#[must_use]
pub fn is_valid_header(bytes: &[u8], features: u64) -> bool {
    let Some((header, frame)) = bytes.split_at_checked(HEADER) else { return false };
    let (flags, kind) = (header[0], header[1]);
    if flags & !(NEEDS_CSUM | DATA_VALID) != 0 {
        return false;
    }
    if flags & NEEDS_CSUM != 0 && (features & feature::CSUM == 0 || !has_checksum_behind(header, frame)) {
        return false;
    }
    let allowed = match kind & !GSO_ECN {
        0 => return kind == 0,
        GSO_TCPV4 => features & feature::HOST_TSO[0] != 0,
        GSO_TCPV6 => features & feature::HOST_TSO[1] != 0,
        _ => false,
    };
    let (headers, segment) = (field(header, 2), field(header, 4));
    allowed && flags & NEEDS_CSUM != 0 && segment > 0 && headers < frame.len()
}

/// Whether the checksum that is left to the receiver lies within the frame, and behind the headers
/// that are checked here: it is written after that, so that it could change source, VLAN or
/// priority.
fn has_checksum_behind(header: &[u8], frame: &[u8]) -> bool {
    let (start, offset) = (field(header, 6), field(header, 8));
    let Some((kind, at)) = content(frame) else { return false };
    let headers = match kind {
        IPV4 => IPV4_HEADER,
        IPV6 => IPV6_HEADER,
        _ => 0,
    };
    start >= at + headers && start + offset + 2 <= frame.len()
}

/// Whether the sender has left segmentation to the receiver: of TCP over IPv6, or IPv4.
#[must_use]
pub fn segmentation(bytes: &[u8]) -> Option<bool> {
    bytes.get(1).filter(|kind| **kind != 0).map(|kind| kind & !GSO_ECN == GSO_TCPV6)
}

/// Completes a checksum that the sender has left to the receiver: the sum from `csum_start` to the
/// end, at `csum_offset` (virtio 1.2, section 5.1.6.2; RFC 1071). That of a large segment is
/// completed when the segment is segmented.
pub fn complete_checksum(bytes: &mut [u8]) {
    let Some((header, frame)) = bytes.split_at_mut_checked(HEADER) else { return };
    if header[0] & NEEDS_CSUM == 0 || header[1] != 0 {
        return;
    }
    header[0] = 0;
    let (start, offset) = (field(header, 6), field(header, 8));
    header[6..10].fill(0);
    if start + offset + 2 > frame.len() {
        return;
    }
    let mut sum = 0u64;
    for pair in frame[start..].chunks(2) {
        sum += u64::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    // A sum of 0 is sent as its other form: 0 means "no checksum" to UDP.
    let sum = match !(sum as u16) {
        0 => 0xffff,
        sum => sum,
    };
    frame[start + offset..start + offset + 2].copy_from_slice(&sum.to_be_bytes());
}

#[cfg(test)]
#[path = "frame_tests.rs"]
mod tests;
