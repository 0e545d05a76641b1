//! virtio-blk requests as a guest writes them (virtio 1.2, section 5.2.6). All input is untrusted;
//! all output is validated.
//!
//! A driver chooses the framing (section 2.7.4): the header may span descriptors, the status byte
//! may share one with data. So the readable part is one byte string whose first 16 bytes are the
//! header, and the writable part is one whose last byte is the status.

mod segments;

pub use rtvirtio_domain_resources::backing::{Limits, SECTOR};
use rtvirtio_sched::Op;
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestAddress, GuestMemory, Permissions};

pub use self::segments::Segments;

/// Largest number of data segments of a request, offered to the guest as `seg_max`.
pub const SEGMENTS: usize = 126;
/// Parts of the guest's memory that a request's data may consist of: a segment may lie across the
/// border of two regions.
pub const SLICES: usize = 2 * SEGMENTS;
/// Length of the serial number.
pub const ID_LEN: usize = 20;
/// Largest number of sectors of one discard or write-zeroes, offered to the guest.
pub const MAX_DISCARD_SECTORS: u32 = 1 << 22;

/// Status of success, `VIRTIO_BLK_S_OK`.
pub const OK: u8 = 0;
/// Status of an I/O error, `VIRTIO_BLK_S_IOERR`.
pub const IO_ERROR: u8 = 1;
/// Status of an unsupported request, `VIRTIO_BLK_S_UNSUPP`.
pub const UNSUPPORTED: u8 = 2;

/// A range of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Guest physical address.
    pub addr: GuestAddress,
    /// Length of the range, in bytes.
    pub len: u32,
}

/// A request whose header, ranges and flags are validated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parsed {
    /// Goes to the scheduler. Its data segments are in the caller's list.
    Io {
        /// Operation, with the data direction.
        op: Op,
        /// Offset on the disk, in bytes.
        offset: u64,
        /// Length in bytes; 0 for a flush.
        len: u64,
        /// The header's second field: Linux's I/O priority.
        priority: u32,
        /// Whether zeroing may deallocate the range.
        unmap: bool,
        /// Address of the status byte.
        status: GuestAddress,
    },
    /// Completes at once, with the serial number in the caller's segments.
    Id { status: GuestAddress },
    /// A transfer of no bytes: completes at once.
    Empty { status: GuestAddress },
    /// Completes at once, without the device.
    Refused {
        status: GuestAddress,
        /// Reason, for the counters.
        why: Refused,
    },
}

/// Reasons for which a request with a status byte is not carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// Header, data or status outside of the memory that is shared with this process.
    OutsideMemory,
    /// Sectors beyond the end of the disk.
    OutsideDisk,
    /// A write to a disk that is read-only.
    ReadOnly,
    /// A type, flag or number of ranges that was not offered.
    Unsupported,
    /// Contradicts itself: data in the wrong direction, parts of sectors, too many segments.
    Invalid,
}

impl Refused {
    /// All reasons, in the order of their counters.
    pub const ALL: [Self; 5] =
        [Self::OutsideMemory, Self::OutsideDisk, Self::ReadOnly, Self::Unsupported, Self::Invalid];

    /// The status that the guest gets.
    #[must_use]
    pub fn code(self) -> u8 {
        if self == Self::Unsupported { UNSUPPORTED } else { IO_ERROR }
    }

    /// Name of the reason in status and trace.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::OutsideMemory => "outside_memory",
            Self::OutsideDisk => "outside_disk",
            Self::ReadOnly => "read_only",
            Self::Unsupported => "unsupported",
            Self::Invalid => "invalid",
        }
    }
}

/// A chain without a status byte, or an invalid one: it completes with length 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// No writable byte for the status.
    #[error("no place for the status")]
    NoStatus,
    /// A readable descriptor after a writable one (virtio 1.2, section 2.7.4.2).
    #[error("readable after writable descriptors")]
    Order,
    /// Shorter than a header.
    #[error("no whole header")]
    Header,
    /// More descriptors than offered.
    #[error("too many descriptors")]
    TooMany,
    /// Outside of the guest's memory.
    #[error("outside of the guest's memory")]
    Memory,
}

const HEADER: u32 = 16;

/// Parses a chain; its data segments replace the contents of `segments`.
///
/// # Errors
/// [`Malformed`] when no status can be written.
pub fn parse<M: GuestMemory>(
    mem: &M,
    chain: impl Iterator<Item = Descriptor>,
    limits: &Limits,
    segments: &mut Segments,
) -> Result<Parsed, Malformed> {
    segments.clear();
    let mut header = [0u8; HEADER as usize];
    let mut got = 0u32;
    // Readable and writable segments are in one list; the first `readable` ones are readable.
    let mut readable = 0;
    let mut last_writable: Option<Segment> = None;
    let mut fits = true;
    let mut descriptors = 0;
    for descriptor in chain {
        descriptors += 1;
        if descriptors > SEGMENTS + 2 + HEADER as usize {
            return Err(Malformed::TooMany);
        }
        let (addr, len) = (descriptor.addr(), descriptor.len());
        if descriptor.is_write_only() {
            // The previous segment was not the last, so all of it is data.
            if let Some(segment) = last_writable.take() {
                fits &= segments.push(segment);
            }
            if len > 0 {
                last_writable = Some(Segment { addr, len });
            }
            continue;
        }
        if last_writable.is_some() || segments.len() > readable {
            return Err(Malformed::Order);
        }
        let part = len.min(HEADER - got);
        if part > 0 {
            let to = &mut header[got as usize..(got + part) as usize];
            mem.read_slice(to, addr).map_err(|_| Malformed::Memory)?;
            got += part;
        }
        if len > part {
            let addr = GuestAddress(addr.0.checked_add(part.into()).ok_or(Malformed::Memory)?);
            fits &= segments.push(Segment { addr, len: len - part });
            readable = segments.len();
        }
    }
    let last = last_writable.ok_or(Malformed::NoStatus)?;
    let status = GuestAddress(last.addr.0.checked_add(u64::from(last.len) - 1).ok_or(Malformed::Memory)?);
    if last.len > 1 {
        fits &= segments.push(Segment { addr: last.addr, len: last.len - 1 });
    }
    if got < HEADER {
        return Err(Malformed::Header);
    }
    // An invalid request needs no device time, so it must not reach the scheduler.
    if !mem.check_range(status, 1, Permissions::ReadWrite) {
        return Err(Malformed::Memory);
    }
    if !fits {
        return Ok(Parsed::Refused { status, why: Refused::Invalid });
    }
    if let Err(why) = check_segments(mem, segments) {
        return Ok(Parsed::Refused { status, why });
    }
    let word = |i: usize| u32::from_le_bytes([header[i], header[i + 1], header[i + 2], header[i + 3]]);
    let sector = u64::from(word(8)) | u64::from(word(12)) << 32;
    let request = RequestHeader { kind: word(0), priority: word(4), sector, readable, status };
    Ok(request.check(mem, limits, segments))
}

/// Checks that data lies in the guest's memory, in at most [`SLICES`] parts: a walk over hundreds
/// of regions for each segment would take the time of the other VMs.
fn check_segments<M: GuestMemory>(mem: &M, segments: &[Segment]) -> Result<(), Refused> {
    let mut left = SLICES;
    for segment in segments {
        let slices = mem.get_slices(segment.addr, segment.len as usize, Permissions::ReadWrite);
        for slice in slices.map_err(|_| Refused::OutsideMemory)? {
            slice.map_err(|_| Refused::OutsideMemory)?;
            left = left.checked_sub(1).ok_or(Refused::Invalid)?;
        }
    }
    Ok(())
}

/// The chain of a head that was in flight in the previous process: it is not in the available ring
/// any more. Every step is bounded, as in `virtio_queue`'s own chains.
pub fn chain_at<M: GuestMemory>(
    mem: &M,
    table: GuestAddress,
    size: u16,
    head: u16,
) -> impl Iterator<Item = Descriptor> + '_ {
    let (mut table, mut size, mut next, mut left) = (table, size, Some(head), size);
    let (mut indirect, mut bytes) = (false, 0u32);
    std::iter::from_fn(move || {
        loop {
            let index = next.filter(|i| *i < size && left > 0)?;
            left -= 1;
            let at = table.0.checked_add(u64::from(index) * 16)?;
            let descriptor: Descriptor = mem.read_obj(GuestAddress(at)).ok()?;
            if descriptor.refers_to_indirect_table() {
                let count = u16::try_from(descriptor.len() / 16).ok()?;
                if indirect || descriptor.len() % 16 != 0 || count == 0 {
                    return None;
                }
                (table, size, next, left, indirect) = (descriptor.addr(), count, Some(0), count, true);
                continue;
            }
            bytes = bytes.checked_add(descriptor.len())?;
            next = descriptor.has_next().then(|| descriptor.next());
            return Some(descriptor);
        }
    })
}

/// `VIRTIO_BLK_T_BARRIER` of legacy drivers, a flag of the type that firmware still sets (SLOF).
/// Requests in flight have no order, so it asks for nothing, as in QEMU.
const BARRIER: u32 = 1 << 31;

struct RequestHeader {
    kind: u32,
    priority: u32,
    sector: u64,
    readable: usize,
    status: GuestAddress,
}

impl RequestHeader {
    fn check<M: GuestMemory>(&self, mem: &M, limits: &Limits, segments: &mut Segments) -> Parsed {
        let refuse = |why| self.refuse(why);
        let all_readable = self.readable == segments.len();
        match self.kind & !BARRIER {
            // VIRTIO_BLK_T_IN
            0 if self.readable > 0 => refuse(Refused::Invalid),
            0 => self.transfer(Op::Read, limits, segments),
            // VIRTIO_BLK_T_OUT
            1 if limits.read_only => refuse(Refused::ReadOnly),
            1 if !all_readable => refuse(Refused::Invalid),
            1 => self.transfer(Op::Write, limits, segments),
            // VIRTIO_BLK_T_FLUSH
            4 => Parsed::Io {
                op: Op::Flush,
                offset: 0,
                len: 0,
                priority: self.priority,
                unmap: false,
                status: self.status,
            },
            // VIRTIO_BLK_T_GET_ID
            8 if self.readable == 0 => Parsed::Id { status: self.status },
            // VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES
            11 | 13 if !limits.discard => refuse(Refused::Unsupported),
            11 | 13 if limits.read_only => refuse(Refused::ReadOnly),
            11 | 13 if !all_readable => refuse(Refused::Invalid),
            11 => self.deallocation(mem, Op::Discard, limits, segments),
            13 => self.deallocation(mem, Op::WriteZeroes, limits, segments),
            _ => refuse(Refused::Unsupported),
        }
    }

    fn refuse(&self, why: Refused) -> Parsed {
        Parsed::Refused { status: self.status, why }
    }

    fn transfer(&self, op: Op, limits: &Limits, segments: &[Segment]) -> Parsed {
        let len: u64 = segments.iter().map(|s| u64::from(s.len)).sum();
        match self.byte_offset(self.sector, len, limits) {
            Ok(_) if len == 0 => Parsed::Empty { status: self.status },
            Ok(offset) => {
                Parsed::Io { op, offset, len, priority: self.priority, unmap: false, status: self.status }
            }
            Err(why) => self.refuse(why),
        }
    }

    /// The only range of a discard or write-zeroes: sector, number of sectors, flags.
    fn deallocation<M: GuestMemory>(
        &self,
        mem: &M,
        op: Op,
        limits: &Limits,
        segments: &mut Segments,
    ) -> Parsed {
        let mut range = [0u8; 16];
        let mut got = 0;
        for s in segments.iter() {
            let Some(to) = range.get_mut(got..got + s.len as usize) else { break };
            if mem.read_slice(to, s.addr).is_err() {
                return self.refuse(Refused::OutsideMemory);
            }
            got += s.len as usize;
        }
        let whole: u64 = segments.iter().map(|s| u64::from(s.len)).sum();
        segments.clear();
        // One range is offered; more are unsupported, not an I/O error, as in QEMU.
        if whole > 16 {
            return self.refuse(Refused::Unsupported);
        }
        if whole != 16 || got != 16 {
            return self.refuse(Refused::Invalid);
        }
        let word = |i: usize| u32::from_le_bytes([range[i], range[i + 1], range[i + 2], range[i + 3]]);
        let sector = u64::from(word(0)) | u64::from(word(4)) << 32;
        let (sectors, flags) = (word(8), word(12));
        // Flag 0 allows zeroing to deallocate; it is invalid for a discard (section 5.2.6.2).
        if flags > 1 || (op == Op::Discard && flags != 0) {
            return self.refuse(Refused::Unsupported);
        }
        if sectors > MAX_DISCARD_SECTORS {
            return self.refuse(Refused::Invalid);
        }
        let len = u64::from(sectors) * SECTOR;
        match self.byte_offset(sector, len, limits) {
            Ok(_) if len == 0 => Parsed::Empty { status: self.status },
            Ok(offset) => Parsed::Io {
                op,
                offset,
                len,
                priority: self.priority,
                unmap: flags == 1,
                status: self.status,
            },
            Err(why) => self.refuse(why),
        }
    }

    /// The byte offset of a range of whole sectors within the disk.
    fn byte_offset(&self, sector: u64, len: u64, limits: &Limits) -> Result<u64, Refused> {
        if len % SECTOR != 0 {
            return Err(Refused::Invalid);
        }
        let offset = sector.checked_mul(SECTOR).ok_or(Refused::OutsideDisk)?;
        let end = offset.checked_add(len).ok_or(Refused::OutsideDisk)?;
        if end <= limits.size { Ok(offset) } else { Err(Refused::OutsideDisk) }
    }
}

/// The configuration space of the disk (`struct virtio_blk_config`); the blocks of guest and device
/// are in bytes.
#[must_use]
pub fn config_space(limits: &Limits, queues: u16, [block, physical]: [u32; 2]) -> [u8; 60] {
    let mut c = [0u8; 60];
    let sectors = limits.size / SECTOR;
    c[0..8].copy_from_slice(&sectors.to_le_bytes());
    c[12..16].copy_from_slice(&(SEGMENTS as u32).to_le_bytes());
    // Geometry for old BIOSes: 16 heads of 63 sectors, as many cylinders as fit.
    let cylinders = (sectors / (16 * 63)).min(u64::from(u16::MAX)) as u16;
    c[16..18].copy_from_slice(&cylinders.to_le_bytes());
    (c[18], c[19]) = (16, 63);
    c[20..24].copy_from_slice(&block.to_le_bytes());
    // Topology: blocks of the device as a power of two of the guest's, which begin with one, and
    // which requests should be at least.
    let ratio = (physical / block.max(1)).max(1);
    c[24] = ratio.ilog2() as u8;
    c[26..28].copy_from_slice(&u16::try_from(ratio).unwrap_or(1).to_le_bytes());
    // Write-back cache: the guest must flush.
    c[32] = 1;
    c[34..36].copy_from_slice(&queues.to_le_bytes());
    c[36..40].copy_from_slice(&MAX_DISCARD_SECTORS.to_le_bytes());
    c[40..44].copy_from_slice(&1u32.to_le_bytes());
    c[44..48].copy_from_slice(&(block.max(physical) / SECTOR as u32).max(1).to_le_bytes());
    c[48..52].copy_from_slice(&MAX_DISCARD_SECTORS.to_le_bytes());
    c[52..56].copy_from_slice(&1u32.to_le_bytes());
    c[56] = 1;
    c
}

#[cfg(test)]
#[path = "blk_tests.rs"]
mod tests;
