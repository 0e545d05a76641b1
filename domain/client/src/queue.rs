//! The driver's side of one virtqueue (virtio 1.2, section 2.7).

use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use vmm_sys_util::eventfd::EventFd;

use crate::memory::SharedMemory;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
/// Descriptors of a request: header, data, status.
const CHAIN: u16 = 3;
/// Stride of headers, each with its status byte.
const HEADER_STRIDE: usize = 64;
const PAGE: usize = 4_096;

/// A virtio-blk request of at most one data buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlkRequest {
    /// virtio-blk's type: 0 reads, 1 writes, 4 flushes.
    pub kind: u32,
    /// Linux's I/O priority (`ioprio`), in the header.
    pub priority: u32,
    /// First sector of 512 bytes.
    pub sector: u64,
    /// Bytes of data; 0 for a request without a data descriptor.
    pub len: u32,
}

/// A completed virtio-blk request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlkCompletion {
    /// Slot of the request.
    pub slot: u16,
    /// virtio-blk's status; 0 is success.
    pub status: u8,
}

/// A split virtqueue and the driver's side of its indices.
#[derive(Debug)]
pub struct ClientQueue {
    mem: Arc<SharedMemory>,
    size: u16,
    desc: usize,
    avail: usize,
    used: usize,
    headers: usize,
    data: usize,
    buffer: usize,
    free: Vec<u16>,
    next_avail: u16,
    next_used: u16,
    /// The available index at the last kick decision.
    kicked: u16,
    event_idx: bool,
    /// Notifies the back end.
    pub kick: EventFd,
    /// Notifies this side (vring call).
    pub call: EventFd,
}

fn page_aligned(bytes: usize) -> usize {
    bytes.next_multiple_of(PAGE)
}

impl ClientQueue {
    /// Bytes of memory of a queue of `size` descriptors, with `buffer` bytes of data for each
    /// request.
    #[must_use]
    pub fn bytes(size: u16, buffer: usize) -> usize {
        let (n, slots) = (usize::from(size), usize::from(size / CHAIN));
        page_aligned(16 * n)
            + page_aligned(6 + 2 * n)
            + page_aligned(6 + 8 * n)
            + page_aligned(HEADER_STRIDE * slots)
            + slots * page_aligned(buffer)
    }

    /// A queue at offset `at` of the memory.
    pub(crate) fn new(
        mem: Arc<SharedMemory>,
        at: usize,
        size: u16,
        buffer: usize,
        event_idx: bool,
    ) -> std::io::Result<Self> {
        let (n, slots) = (usize::from(size), size / CHAIN);
        let desc = at;
        let avail = desc + page_aligned(16 * n);
        let used = avail + page_aligned(6 + 2 * n);
        let headers = used + page_aligned(6 + 8 * n);
        let data = headers + page_aligned(HEADER_STRIDE * usize::from(slots));
        let flags = vmm_sys_util::eventfd::EFD_NONBLOCK;
        Ok(Self {
            mem,
            size,
            desc,
            avail,
            used,
            headers,
            data,
            buffer: page_aligned(buffer),
            free: (0..slots).rev().collect(),
            next_avail: 0,
            next_used: 0,
            kicked: 0,
            event_idx,
            kick: EventFd::new(flags)?,
            call: EventFd::new(flags)?,
        })
    }

    /// Descriptors of the queue.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Offsets of the descriptor table, the available ring and the used ring.
    #[must_use]
    pub fn ring_offsets(&self) -> (usize, usize, usize) {
        (self.desc, self.avail, self.used)
    }

    /// Number of free request slots.
    #[must_use]
    pub fn free_slots(&self) -> usize {
        self.free.len()
    }

    /// Offset of a slot's data.
    #[must_use]
    pub fn data(&self, slot: u16) -> usize {
        self.data + usize::from(slot) * self.buffer
    }

    /// Offset of a slot's header, whose status byte is 16 bytes behind it.
    #[must_use]
    pub fn header(&self, slot: u16) -> usize {
        self.headers + HEADER_STRIDE * usize::from(slot)
    }

    fn write_descriptor(&self, index: u16, at: usize, len: u32, flags: u16, next: u16) {
        self.write_descriptor_raw(index, SharedMemory::BASE + at as u64, len, flags, next);
    }

    /// Writes any descriptor; `address` is a guest address.
    pub fn write_descriptor_raw(&self, index: u16, address: u64, len: u32, flags: u16, next: u16) {
        let offset = self.desc + 16 * usize::from(index);
        self.mem.write(offset, &address.to_le_bytes());
        self.mem.write(offset + 8, &len.to_le_bytes());
        self.mem.write(offset + 12, &flags.to_le_bytes());
        self.mem.write(offset + 14, &next.to_le_bytes());
    }

    /// Adds a request to the available ring; returns its slot, or `None` when all are in use.
    ///
    /// # Panics
    /// More data than the buffer of a slot.
    pub fn push(&mut self, request: &BlkRequest) -> Option<u16> {
        self.push_as(request, request.kind == 0 || request.kind == 8)
    }

    /// Adds a request whose data the device writes, of whatever type: firmware sets flags in it.
    ///
    /// # Panics
    /// As [`ClientQueue::push`].
    pub fn push_read(&mut self, request: &BlkRequest) -> Option<u16> {
        self.push_as(request, true)
    }

    fn push_as(&mut self, request: &BlkRequest, is_read: bool) -> Option<u16> {
        assert!(request.len as usize <= self.buffer, "{} bytes of {}", request.len, self.buffer);
        let slot = self.free.pop()?;
        let (head, record) = (slot * CHAIN, self.headers + HEADER_STRIDE * usize::from(slot));
        self.mem.write(record, &request.kind.to_le_bytes());
        self.mem.write(record + 4, &request.priority.to_le_bytes());
        self.mem.write(record + 8, &request.sector.to_le_bytes());
        self.mem.write(record + 16, &[0xff]);
        if request.len == 0 {
            self.write_descriptor(head, record, 16, NEXT, head + 2);
        } else {
            self.write_descriptor(head, record, 16, NEXT, head + 1);
            let direction = if is_read { WRITE } else { 0 };
            self.write_descriptor(head + 1, self.data(slot), request.len, NEXT | direction, head + 2);
        }
        self.write_descriptor(head + 2, record + 16, 1, WRITE, 0);
        self.add_avail(head);
        Some(slot)
    }

    /// Asks for no calls (`VIRTQ_AVAIL_F_NO_INTERRUPT`), as firmware that polls does.
    pub fn disable_calls(&mut self) {
        self.mem.publish(self.avail, 1);
    }

    /// Adds a request with its data, which is written first: a back end that polls the ring takes
    /// the request without a kick.
    ///
    /// # Panics
    /// As [`ClientQueue::push`]; more data than the buffer of a slot.
    pub fn push_with(&mut self, request: &BlkRequest, data: &[u8]) -> Option<u16> {
        assert!(data.len() <= self.buffer, "{} bytes of {}", data.len(), self.buffer);
        self.mem.write(self.data(*self.free.last()?), data);
        self.push(request)
    }

    /// Sets the available index to any value, for attacks.
    pub fn set_avail_index(&mut self, index: u16) {
        self.mem.publish(self.avail + 2, index);
    }

    /// Adds the chain that starts at `head` to the available ring, valid or not.
    pub fn add_avail(&mut self, head: u16) {
        let offset = self.avail + 4 + 2 * usize::from(self.next_avail % self.size);
        self.mem.write(offset, &head.to_le_bytes());
        self.next_avail = self.next_avail.wrapping_add(1);
        self.mem.publish(self.avail + 2, self.next_avail);
    }

    /// Kicks the back end, if it wants to be notified.
    pub fn notify(&mut self) -> std::io::Result<()> {
        fence(Ordering::SeqCst);
        let (old, new) = (self.kicked, self.next_avail);
        self.kicked = new;
        let wanted = if self.event_idx {
            // The event index behind the used ring: the back end's threshold for the next kick.
            let event =
                self.mem.shared_index(self.used + 4 + 8 * usize::from(self.size)).load(Ordering::Acquire);
            new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
        } else {
            self.mem.shared_index(self.used).load(Ordering::Acquire) & 1 == 0
        };
        if wanted { self.kick.write(1) } else { Ok(()) }
    }

    /// Takes the next completion from the used ring.
    pub fn pop_used(&mut self) -> Option<BlkCompletion> {
        if self.mem.shared_index(self.used + 2).load(Ordering::Acquire) == self.next_used {
            return None;
        }
        let offset = self.used + 4 + 8 * usize::from(self.next_used % self.size);
        self.next_used = self.next_used.wrapping_add(1);
        let id = self.mem.read(offset, 4);
        let head = u16::from_le_bytes([id[0], id[1]]);
        let slot = head / CHAIN;
        let status = self.mem.byte(self.headers + HEADER_STRIDE * usize::from(slot) + 16);
        self.free.push(slot);
        Some(BlkCompletion { slot, status })
    }

    /// Whether the used ring holds a completion.
    #[must_use]
    pub fn has_used(&self) -> bool {
        self.mem.shared_index(self.used + 2).load(Ordering::Acquire) != self.next_used
    }

    /// Takes the next used element as it is, for chains that were added raw: head and length.
    pub fn pop_used_raw(&mut self) -> Option<(u32, u32)> {
        if self.mem.shared_index(self.used + 2).load(Ordering::Acquire) == self.next_used {
            return None;
        }
        let offset = self.used + 4 + 8 * usize::from(self.next_used % self.size);
        self.next_used = self.next_used.wrapping_add(1);
        let e = self.mem.read(offset, 8);
        Some((u32::from_le_bytes([e[0], e[1], e[2], e[3]]), u32::from_le_bytes([e[4], e[5], e[6], e[7]])))
    }

    /// The descriptor that notifies this side, to be waited for.
    #[must_use]
    pub fn call_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open as long as `call`, which the queue owns.
        unsafe { BorrowedFd::borrow_raw(self.call.as_raw_fd()) }
    }

    /// Asks for a call at the next completion. Check the used ring once more after this.
    pub fn enable_call(&mut self) {
        if self.event_idx {
            self.mem.publish(self.avail + 4 + 2 * usize::from(self.size), self.next_used);
        }
        fence(Ordering::SeqCst);
    }
}
