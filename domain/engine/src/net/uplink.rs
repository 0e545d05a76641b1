//! Frames of a port's uplink, each with virtio-net's header before it.

use std::io;
use std::os::fd::AsFd as _;

use rtvirtio_domain_resources::uplink::{Kind, TUN_F_CSUM, TUN_F_TSO, Uplink};

use super::frame::{HEADER, LEGACY_HEADER};
use super::packet;
use crate::feature::net as feature;

/// Leaves checksums and segmentation of frames to a guest with these features.
pub(super) fn set_offloads(uplink: &Uplink, features: u64) -> io::Result<()> {
    let mut offloads = 0;
    if features & feature::GUEST_CSUM != 0 {
        offloads |= TUN_F_CSUM;
        // A large segment takes several buffers.
        for (tso, bit) in feature::GUEST_TSO.into_iter().zip(TUN_F_TSO) {
            offloads |= if features & tso != 0 && features & feature::MRG_RXBUF != 0 { bit } else { 0 };
        }
    }
    uplink.set_offloads(offloads)
}

/// Reads a frame; returns its length with the header.
///
/// # Errors
/// `WouldBlock` when there is none; the kernel's.
pub(super) fn read(uplink: &Uplink, buffer: &mut [u8]) -> io::Result<usize> {
    match uplink.kind() {
        Kind::Tap | Kind::Datagram => Ok(rustix::io::read(uplink, buffer)?),
        Kind::Packet => packet::read(uplink.as_fd(), buffer),
    }
}

/// Hands over a frame.
///
/// # Errors
/// The kernel's: the frame is lost then.
pub(super) fn write(uplink: &Uplink, bytes: &mut [u8]) -> io::Result<()> {
    match uplink.kind() {
        Kind::Tap | Kind::Datagram => rustix::io::write(uplink, bytes)?,
        Kind::Packet => {
            let shift = HEADER - LEGACY_HEADER;
            if bytes.len() < HEADER {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            bytes.copy_within(..LEGACY_HEADER, shift);
            rustix::io::write(uplink, &bytes[shift..])?
        }
    };
    Ok(())
}
