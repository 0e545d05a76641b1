//! Requests and pieces in flight: tables of fixed size.

use std::sync::Arc;

use rtvirtio_domain_resources::backing::LARGEST_BLOCK;
use rtvirtio_sched::{Op, Piece};
use rtvirtio_units::Nanos;
use vm_memory::GuestAddress;

use super::blocks::BlockRange;
use super::queue_id::QueueId;
use super::room;
use crate::blk::{SLICES, Segments};
use crate::memory::GuestMem;

/// A request of a VM between fetch and completion.
#[derive(Debug)]
pub struct InflightRequest {
    /// Queue and generation: completions for a stopped queue are dropped.
    pub queue: QueueId,
    pub generation: u32,
    pub head: u16,
    pub op: Op,
    /// Offset on the backing, in bytes.
    pub offset: u64,
    pub len: u64,
    pub unmap: bool,
    pub status: GuestAddress,
    /// Data in guest memory.
    pub segments: Segments,
    pub failed: bool,
    /// Result of the kernel for the last piece that failed: an error number, or bytes.
    pub result: i32,
    pub unsupported: bool,
    /// Whether all pieces that failed found no room.
    pub lacks_room: bool,
    /// Arrival of a request that has waited for room.
    pub arrived: Option<Nanos>,
    pub write_through: bool,
    /// Time of the first piece's submission; 0 until then.
    pub submitted_at: Nanos,
    /// Whether that piece was submitted under a reservation.
    pub reserved: bool,
    /// Promised times of the reservation, as long as all pieces are submitted under it.
    pub promise: PieceWindow,
    /// The memory of the segments: mapped as long as the kernel may write to it, also after a
    /// disconnect.
    pub mem: Option<Arc<GuestMem>>,
    pub in_use: bool,
}

impl InflightRequest {
    fn new() -> Self {
        Self {
            queue: QueueId(0),
            generation: 0,
            head: 0,
            op: Op::Flush,
            offset: 0,
            len: 0,
            unmap: false,
            status: GuestAddress(0),
            segments: Segments::default(),
            failed: false,
            result: 0,
            unsupported: false,
            lacks_room: false,
            arrived: None,
            write_through: false,
            submitted_at: Nanos(0),
            reserved: false,
            promise: PieceWindow::default(),
            mem: None,
            in_use: false,
        }
    }

    /// Notes the submission of a piece. Time and class are those of the first one.
    pub fn mark_submitted(&mut self, time: Nanos, piece: &Piece) {
        if self.submitted_at == Nanos(0) {
            (self.submitted_at, self.reserved) = (time, piece.reserved);
        }
        self.promise.extend(piece);
    }

    /// Resets the state to that of a request of which nothing is submitted.
    pub fn reset(&mut self) {
        (self.failed, self.unsupported, self.submitted_at) = (false, false, Nanos(0));
        (self.lacks_room, self.arrived) = (false, None);
        self.promise = PieceWindow::default();
    }

    /// Notes the kernel's result for a piece that failed.
    pub fn fail(&mut self, op: Op, result: i32) {
        self.lacks_room = room::lacks_room(op, result) && (!self.failed || self.lacks_room);
        (self.failed, self.result) = (true, result);
    }

    /// Prepares a request that found no room, and arrived then, for another attempt. No reservation
    /// promises its time.
    pub fn retry(&mut self, arrival: Nanos) {
        let arrived = self.arrived.unwrap_or(arrival);
        self.reset();
        self.arrived = Some(arrived);
        self.promise.has_unreserved = true;
    }
}

/// Time from which, and until which, the reservations of a request's pieces promise its completion.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PieceWindow {
    eligible_at: Nanos,
    due: Nanos,
    /// Whether a piece was submitted without a reservation, as a share of the rest.
    has_unreserved: bool,
}

impl PieceWindow {
    fn extend(&mut self, piece: &Piece) {
        self.has_unreserved |= !piece.reserved;
        self.eligible_at = self.eligible_at.max(piece.eligible_at);
        self.due = self.due.max(piece.due);
    }

    /// Judges a request that completes at `time`: its time since the reservation covered it, and
    /// whether that is longer than promised. `None` without a promise.
    pub fn judge(&self, time: Nanos) -> Option<(Nanos, bool)> {
        let promised = !self.has_unreserved && self.due > Nanos(0) && self.due < Nanos(u64::MAX);
        promised.then(|| (Nanos(time.0.saturating_sub(self.eligible_at.0)), time > self.due))
    }
}

/// The requests of one VM. Address space for all of them is reserved at once; a slot takes memory
/// when it is first used. Freed slots are used again first, so the table takes as much as the VM
/// once had outstanding.
#[derive(Debug)]
pub struct RequestTable {
    slots: Vec<InflightRequest>,
    /// Slots that were used and are free.
    free: Vec<u32>,
    depth: usize,
}

impl RequestTable {
    /// Room for `depth` requests.
    pub fn new(depth: u32) -> Self {
        let depth = depth as usize;
        Self { slots: Vec::with_capacity(depth), free: Vec::with_capacity(depth), depth }
    }

    /// A free slot, which stays free until it is marked as used.
    pub fn first_free(&mut self) -> Option<(u32, &mut InflightRequest)> {
        if self.free.is_empty() && self.slots.len() < self.depth {
            self.free.push(self.slots.len() as u32);
            self.slots.push(InflightRequest::new());
        }
        let i = *self.free.last()?;
        self.slots.get_mut(i as usize).map(|s| (i, s))
    }

    /// Marks the slot of [`RequestTable::first_free`] as used.
    pub fn mark_used(&mut self) {
        if let Some(i) = self.free.pop() {
            self.slots[i as usize].in_use = true;
        }
    }

    /// A slot in use.
    pub fn get(&mut self, i: u32) -> Option<&mut InflightRequest> {
        self.slots.get_mut(i as usize).filter(|s| s.in_use)
    }

    /// Frees the slot of a request, if it is in use.
    pub fn release(&mut self, i: u32) {
        if let Some(slot) = self.slots.get_mut(i as usize).filter(|s| s.in_use) {
            slot.in_use = false;
            slot.mem = None;
            self.free.push(i);
        }
    }
}

/// A slot for a piece in flight.
#[derive(Debug)]
pub struct PieceSlot {
    pub piece: Option<Piece>,
    /// Read by io_uring until the piece completes.
    pub iovecs: Vec<libc::iovec>,
    /// Aligned memory, for guests whose buffers are not aligned.
    pub bounce: BounceBuffer,
    pub bounced: bool,
    /// For a read or write that is no whole blocks of the device: these, in the bounce buffer.
    pub blocks: Option<BlockRange>,
    /// Their contents are read, to be written with the guest's bytes.
    pub is_reading_first: bool,
    /// Time of the first refusal of the piece by the kernel, for want of memory.
    pub refused_since: Option<Nanos>,
}

// SAFETY: the pointers of `iovecs` are set and used by the engine's thread alone; a slot moves to
// it before its first use.
unsafe impl Send for PieceSlot {}

impl PieceSlot {
    /// A free slot for pieces of at most `largest` bytes.
    pub fn new(largest: u64) -> std::io::Result<Self> {
        Ok(Self {
            piece: None,
            iovecs: Vec::new(),
            bounce: BounceBuffer::new(largest as usize + 2 * LARGEST_BLOCK as usize)?,
            bounced: false,
            blocks: None,
            is_reading_first: false,
            refused_since: None,
        })
    }
}

impl PieceSlot {
    /// Whether this result of the kernel is that of all of the piece.
    pub fn is_whole(&self, piece: &Piece, result: i32) -> bool {
        let len = self.blocks.map_or(piece.len, |blocks| blocks.len());
        if piece.op.moves_data() { i64::from(result) == len as i64 } else { result >= 0 }
    }

    /// Makes room for the iovecs of the largest piece, at the first use of the slot. Slots of
    /// flushes have none.
    pub fn reserve_iovecs(&mut self) {
        if self.iovecs.capacity() < SLICES {
            self.iovecs.reserve_exact(SLICES);
        }
    }

    /// The only iovec, if there is one. Pieces are far smaller than 4 GiB.
    pub fn only(&self) -> Option<(*mut u8, u32)> {
        let [only] = self.iovecs.as_slice() else { return None };
        Some((only.iov_base.cast(), u32::try_from(only.iov_len).ok()?))
    }

    /// Makes the first `len` bytes of the bounce buffer the only iovec.
    pub fn map_bounce(&mut self, len: u64) {
        self.iovecs.clear();
        let base = self.bounce.as_mut_ptr().cast();
        self.iovecs.push(libc::iovec { iov_base: base, iov_len: len as usize });
    }
}

/// Page-aligned memory for unaligned guest buffers.
#[derive(Debug)]
pub struct BounceBuffer {
    at: *mut u8,
    len: usize,
}

// SAFETY: it owns its memory, and only the engine's thread uses it.
unsafe impl Send for BounceBuffer {}

impl BounceBuffer {
    /// Maps `len` bytes, page-aligned.
    pub fn new(len: usize) -> std::io::Result<Self> {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        // SAFETY: a new private mapping, without other references.
        let at = unsafe {
            mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)?
        };
        Ok(Self { at: at.cast(), len })
    }

    /// Length of the mapping, in bytes.
    pub fn size(&self) -> usize {
        self.len
    }

    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.at
    }

    /// The first `len` bytes.
    pub fn bytes(&mut self, len: usize) -> &mut [u8] {
        // SAFETY: the mapping has `self.len` bytes, lives as long as `self`, and no piece with it
        // is in flight meanwhile.
        unsafe { std::slice::from_raw_parts_mut(self.at, len.min(self.len)) }
    }
}

impl Drop for BounceBuffer {
    fn drop(&mut self) {
        // SAFETY: it was mapped with this length by `new`, and no reference to it is left.
        let _ = unsafe { rustix::mm::munmap(self.at.cast(), self.len) };
    }
}
