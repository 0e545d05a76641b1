//! Frames of a packet socket, with the VLAN tag that the kernel strips (`PACKET_AUXDATA` of
//! packet(7)). Without it a tagged frame looks like one of no VLAN.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use rtvirtio_domain_resources::uplink::PACKET_AUXDATA;

use super::frame::{ETHERNET, HEADER, LEGACY_HEADER, NEEDS_CSUM, TAG, VLAN, field};

/// Socket option of `linux/if_packet.h`.
const TP_STATUS_VLAN_VALID: u32 = 1 << 4;
const TP_STATUS_VLAN_TPID_VALID: u32 = 1 << 6;

/// Offset of the tag in a frame, behind its addresses.
const TAG_AT: usize = ETHERNET - 2;

/// Layout of `struct tpacket_auxdata`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct AuxData {
    status: u32,
    _lengths: [u32; 2],
    _offsets: [u16; 2],
    vlan_tci: u16,
    vlan_tpid: u16,
}

impl AuxData {
    fn tag(&self) -> Option<[u8; TAG]> {
        let has = |status: u32| self.status & status != 0;
        let kind = if has(TP_STATUS_VLAN_TPID_VALID) { self.vlan_tpid } else { VLAN };
        let ([a, b], [c, d]) = (kind.to_be_bytes(), self.vlan_tci.to_be_bytes());
        has(TP_STATUS_VLAN_VALID).then_some([a, b, c, d])
    }
}

/// Reads a frame with virtio-net's header before it, and its tag inserted; returns the length of
/// both, and 0 for a frame that does not fit with its tag.
///
/// # Errors
/// `WouldBlock` when there is none; other errors of the kernel.
pub(super) fn read(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<usize> {
    // The kernel's header lacks the number of buffers.
    let shift = HEADER - LEGACY_HEADER;
    let Some(behind) = buffer.get_mut(shift..) else { return Ok(0) };
    let (len, tag) = receive(socket, behind)?;
    buffer.copy_within(shift..shift + LEGACY_HEADER.min(len), 0);
    if let Some(count) = buffer.get_mut(LEGACY_HEADER..HEADER) {
        count.fill(0);
    }
    let len = len + shift;
    Ok(tag.map_or(len, |tag| insert(buffer, len, tag)))
}

fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<(usize, Option<[u8; TAG]>)> {
    let mut part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // Aligned as control messages are, with room for one of this kind.
    let mut control = [0u64; 8];
    // SAFETY: zeroes are a valid value of this plain structure.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control);
    // SAFETY: the kernel writes at most as much as the two buffers hold, which outlive the call.
    let len = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, 0) };
    let len = usize::try_from(len).map_err(|_| io::Error::last_os_error())?;
    let mut tag = None;
    // SAFETY: the kernel has filled in the message, whose control buffer is still there; the
    // macros return headers within it or null, and one of this kind is followed by this structure.
    unsafe {
        let mut next = libc::CMSG_FIRSTHDR(&raw const message);
        while let Some(header) = next.as_ref() {
            if header.cmsg_level == libc::SOL_PACKET && header.cmsg_type == PACKET_AUXDATA {
                tag = libc::CMSG_DATA(next).cast::<AuxData>().read_unaligned().tag();
            }
            next = libc::CMSG_NXTHDR(&raw const message, next);
        }
    }
    Ok((len, tag))
}

/// Inserts a tag into a frame; returns the new length with the header before it.
fn insert(buffer: &mut [u8], len: usize, tag: [u8; TAG]) -> usize {
    let at = HEADER + TAG_AT;
    if len < at || len + TAG > buffer.len() {
        return 0;
    }
    buffer.copy_within(at..len, at + TAG);
    buffer[at..at + TAG].copy_from_slice(&tag);
    // Offsets in the frame, in the header.
    for (place, is_set) in [(2, buffer[1] != 0), (6, buffer[0] & NEEDS_CSUM != 0)] {
        let moved = (field(buffer, place) + TAG) as u16;
        if is_set {
            buffer[place..place + 2].copy_from_slice(&moved.to_le_bytes());
        }
    }
    len + TAG
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_is_put_back_and_what_points_behind_it_moves() {
        let frame: Vec<u8> = (0..40).collect();
        let mut buffer = [vec![0; HEADER], frame.clone(), vec![0; TAG]].concat();
        assert_eq!(insert(&mut buffer, HEADER + 40, [0x81, 0, 0x80, 5]), HEADER + 44);
        let expected = [&frame[..12], &[0x81, 0, 0x80, 5][..], &frame[12..]].concat();
        assert_eq!((&buffer[..HEADER], &buffer[HEADER..]), (&[0; HEADER][..], &expected[..]));
        let mut buffer = [vec![0; HEADER], frame, vec![0; TAG]].concat();
        (buffer[0], buffer[1], buffer[2], buffer[6], buffer[8]) = (NEEDS_CSUM, 1, 54, 34, 16);
        insert(&mut buffer, HEADER + 40, [0x81, 0, 0, 5]);
        assert_eq!((field(&buffer, 2), field(&buffer, 6), field(&buffer, 8)), (58, 38, 16));
        // No room, and no frame.
        assert_eq!(insert(&mut [0; HEADER + 40], HEADER + 40, [0; TAG]), 0);
        assert_eq!(insert(&mut [0; HEADER + 40], HEADER + 5, [0; TAG]), 0);
    }

    #[test]
    fn a_tag_is_there_where_the_kernel_says_so() {
        let of = |status| AuxData { status, vlan_tci: 0x8005, vlan_tpid: 0x88a8, ..AuxData::default() }.tag();
        assert_eq!(of(1), None);
        assert_eq!(of(TP_STATUS_VLAN_VALID), Some([0x81, 0, 0x80, 5]));
        assert_eq!(of(TP_STATUS_VLAN_VALID | TP_STATUS_VLAN_TPID_VALID), Some([0x88, 0xa8, 0x80, 5]));
    }
}
