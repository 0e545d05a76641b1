//! Feature bits that are offered to guests (virtio 1.2, sections 5.1.3, 5.2.3 and 6).

/// Feature bit of `VIRTIO_RING_F_INDIRECT_DESC`.
pub const INDIRECT: u64 = 1 << 28;
/// Feature bit of `VIRTIO_RING_F_EVENT_IDX`.
pub const EVENT_IDX: u64 = 1 << 29;
/// Feature bit of `VIRTIO_F_VERSION_1`.
pub const VERSION_1: u64 = 1 << 32;

/// Feature bits of virtio-blk.
pub mod blk {
    use super::{EVENT_IDX, INDIRECT, VERSION_1};
    use crate::blk::Limits;

    /// Feature bit of `VIRTIO_BLK_F_FLUSH`.
    pub const FLUSH: u64 = 1 << 9;
    const SEG_MAX: u64 = 1 << 2;
    const GEOMETRY: u64 = 1 << 4;
    const READ_ONLY: u64 = 1 << 5;
    const BLOCK_SIZE: u64 = 1 << 6;
    const TOPOLOGY: u64 = 1 << 10;
    const QUEUES: u64 = 1 << 12;
    const DISCARD: u64 = 1 << 13;
    const WRITE_ZEROES: u64 = 1 << 14;

    /// The features of a disk.
    #[must_use]
    pub fn offered(limits: &Limits) -> u64 {
        let mut f =
            SEG_MAX | GEOMETRY | BLOCK_SIZE | FLUSH | TOPOLOGY | QUEUES | INDIRECT | EVENT_IDX | VERSION_1;
        if limits.read_only {
            f |= READ_ONLY;
        }
        if limits.discard {
            f |= DISCARD | WRITE_ZEROES;
        }
        f
    }
}

/// Feature bits of virtio-net.
pub mod net {
    use super::{EVENT_IDX, INDIRECT, VERSION_1};

    /// `VIRTIO_NET_F_CSUM`: the guest leaves checksums to the host.
    pub const CSUM: u64 = 1 << 0;
    /// `VIRTIO_NET_F_GUEST_CSUM`: the guest accepts frames without a checksum.
    pub const GUEST_CSUM: u64 = 1 << 1;
    /// `VIRTIO_NET_F_GUEST_TSO4` and `_TSO6`: the guest accepts large segments.
    pub const GUEST_TSO: [u64; 2] = [1 << 7, 1 << 8];
    /// `VIRTIO_NET_F_HOST_TSO4` and `_TSO6`: the guest sends large segments.
    pub const HOST_TSO: [u64; 2] = [1 << 11, 1 << 12];
    /// `VIRTIO_NET_F_MRG_RXBUF`: a frame may take several buffers.
    pub const MRG_RXBUF: u64 = 1 << 15;

    /// The features of a port; `offload` leaves checksums and large segments to the host. Those of
    /// the configuration space (address, MTU, link state) are the VMM's.
    #[must_use]
    pub fn offered(offload: bool) -> u64 {
        let from_guest = CSUM | HOST_TSO[0] | HOST_TSO[1];
        let to_guest = GUEST_CSUM | GUEST_TSO[0] | GUEST_TSO[1];
        let offloads = if offload { from_guest | to_guest } else { 0 };
        offloads | MRG_RXBUF | INDIRECT | EVENT_IDX | VERSION_1
    }

    /// Whether a guest with these features receives large TCP segments whole, over IPv4 or IPv6.
    #[must_use]
    pub fn takes_segments(features: u64, ipv6: bool) -> bool {
        let needed = GUEST_CSUM | GUEST_TSO[usize::from(ipv6)] | MRG_RXBUF;
        features & needed == needed
    }
}
