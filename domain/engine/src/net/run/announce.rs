//! The frame by which switches learn where a guest is after its migration.

use rtvirtio_domain_config::Mac;
use rtvirtio_sched::VmId;
use rtvirtio_units::Nanos;

use super::NetLoop;
use crate::engine::AnnounceError;
use crate::net::frame::{ETHERNET, Frame, HEADER, TAG, VLAN};

/// EtherType of RARP (RFC 903).
const RARP: u16 = 0x8035;
/// Ethernet and IPv4, the lengths of their addresses, and a reverse request.
const REQUEST: [u8; 8] = [0, 1, 8, 0, 6, 4, 0, 3];
/// Shortest frame without its FCS.
const SHORTEST: usize = 60;

/// Writes a RARP request of an address for itself, as QEMU sends it, with a tag unless the VLAN is
/// 0. Returns its length; `None` if the buffer is too small.
fn write_request(buffer: &mut [u8], mac: Mac, vlan: u16) -> Option<usize> {
    let tag = if vlan == 0 { 0 } else { TAG };
    let (len, buffer) = (SHORTEST + tag, buffer.get_mut(..SHORTEST + tag)?);
    buffer.fill(0);
    buffer[..6].copy_from_slice(&Mac::BROADCAST.0);
    buffer[6..12].copy_from_slice(&mac.0);
    if tag > 0 {
        buffer[12..14].copy_from_slice(&VLAN.to_be_bytes());
        buffer[14..16].copy_from_slice(&vlan.to_be_bytes());
    }
    let at = ETHERNET + tag;
    buffer[at - 2..at].copy_from_slice(&RARP.to_be_bytes());
    buffer[at..at + 8].copy_from_slice(&REQUEST);
    // Sender and target: the address itself, and no IP address.
    buffer[at + 8..at + 14].copy_from_slice(&mac.0);
    buffer[at + 18..at + 24].copy_from_slice(&mac.0);
    Some(len)
}

impl NetLoop {
    /// Sends the frame of a port's own address, as if its guest had sent it: under its rules and
    /// caps, and in each of its VLANs.
    pub(super) fn announce(&mut self, i: VmId, mac: Mac, time: Nanos) -> Result<(), AnnounceError> {
        let port = self.ports.get(i).filter(|port| port.uplink.is_some()).ok_or(AnnounceError::NoPort)?;
        if mac != port.rules.mac() {
            return Err(AnnounceError::OtherAddress { mac, own: port.rules.mac() });
        }
        for vlan in port.rules.tags() {
            let port = &mut self.ports[i];
            let buffer = port.tx.first_free().ok_or(AnnounceError::NoBuffer)?;
            let (header, frame) = buffer.split_at_mut_checked(HEADER).ok_or(AnnounceError::NoBuffer)?;
            header.fill(0);
            let len = write_request(frame, mac, vlan).ok_or(AnnounceError::NoBuffer)?;
            let parsed = Frame::parse(&frame[..len]).filter(|frame| port.rules.may_send(frame));
            let priority = port.rules.priority(&parsed.ok_or(AnnounceError::NotAllowed)?);
            self.enqueue_fetched(i, HEADER + len, priority, time);
        }
        self.pending = true;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_request_is_that_of_qemu() {
        let mac = Mac([0x52, 0x54, 0, 0, 0, 0xa]);
        let mut buffer = [0xff; 64];
        assert_eq!(write_request(&mut buffer, mac, 0), Some(60));
        let frame = Frame::parse(&buffer[..60]).unwrap();
        assert_eq!((frame.source, frame.destination, frame.vlan), (mac, Mac::BROADCAST, None));
        assert_eq!(buffer[12..22], [0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3]);
        assert_eq!((&buffer[22..28], &buffer[32..38]), (&mac.0[..], &mac.0[..]));
        assert!(buffer[28..32].iter().chain(&buffer[38..60]).all(|byte| *byte == 0));
        assert_eq!(write_request(&mut buffer, mac, 7), Some(64));
        assert_eq!(Frame::parse(&buffer).unwrap().vlan, Some((7, 0)));
        assert_eq!(buffer[16..18], [0x80, 0x35]);
        assert_eq!(write_request(&mut buffer[..59], mac, 0), None);
    }
}
