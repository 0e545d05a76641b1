//! The requests of one VM: a list for each class, level and direction, over a fixed number of
//! slots.

use rtvirtio_units::Nanos;

use crate::priority::{Class, LEVELS, Priority};
use crate::request::{Direction, Op, Request};

/// Lists of transfers, the most important class and level first; reads have even and writes odd
/// indices.
const TRANSFER_LISTS: usize = 3 * LEVELS as usize * 2;
/// The list of flushes, whatever their priority; odd, because they count as writes.
const FLUSH_LIST: usize = TRANSFER_LISTS + 1;
/// The list of deallocations (discards and zeroing), whatever their priority; odd too.
const DEALLOCATION_LIST: usize = FLUSH_LIST + 2;
/// Number of lists of a VM.
pub const LISTS: usize = DEALLOCATION_LIST + 1;

/// Marks the end of a list.
const NONE: u32 = u32::MAX;

/// A set of lists, one bit each.
pub type Mask = u64;

/// All lists of transfers.
pub const TRANSFERS: Mask = (1 << TRANSFER_LISTS) - 1;

/// The list of flushes.
pub const FLUSHES: Mask = 1 << FLUSH_LIST;

/// The list of deallocations.
pub const DEALLOCATIONS: Mask = 1 << DEALLOCATION_LIST;

/// All lists of a direction.
pub const fn direction_mask(direction: Direction) -> Mask {
    const READS: Mask = 0x5555_5555_5555_5555;
    READS << direction.index()
}

/// All lists of a class.
pub const fn class_mask(class: Class) -> Mask {
    0xffff << (16 * class as u32)
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    request: Request,
    /// Bytes submitted to the device so far.
    submitted: u64,
    /// Pieces at the device.
    inflight: u32,
    /// Whether all of the request is submitted, or cancelled.
    fully_submitted: bool,
    in_use: bool,
    /// Order of arrival within the VM.
    sequence: u64,
    next: u32,
}

/// The first request of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    pub slot: u32,
    pub op: Op,
    /// Bytes already submitted to the device.
    pub submitted: u64,
    /// Bytes not yet submitted.
    pub remaining: u64,
    pub arrival: Nanos,
    pub sequence: u64,
    pub priority: Priority,
    pub tag: u64,
}

/// Outstanding requests of one VM: queued and in flight.
#[derive(Debug)]
pub struct Queue {
    /// Slots that were used so far; room for all of them is reserved.
    slots: Vec<Slot>,
    depth: usize,
    /// The first of the slots that were used and are free.
    free: u32,
    heads: [u32; LISTS],
    tails: [u32; LISTS],
    /// Lists that are not empty.
    nonempty: Mask,
    sequence: u64,
    outstanding: usize,
    backlog: usize,
    /// Deallocations among `outstanding` and `backlog`.
    deallocations_outstanding: usize,
    deallocation_backlog: usize,
}

impl Queue {
    /// Room for `depth` outstanding requests.
    pub fn new(depth: u32) -> Self {
        let depth = depth as usize;
        Self {
            slots: Vec::with_capacity(depth),
            depth,
            free: NONE,
            heads: [NONE; LISTS],
            tails: [NONE; LISTS],
            nonempty: 0,
            sequence: 0,
            outstanding: 0,
            backlog: 0,
            deallocations_outstanding: 0,
            deallocation_backlog: 0,
        }
    }

    /// Requests queued and in flight.
    pub fn outstanding(&self) -> usize {
        self.outstanding
    }

    /// Requests that are not completely submitted.
    pub fn backlog(&self) -> usize {
        self.backlog
    }

    /// Discards and zeroing that are not completely submitted.
    pub fn deallocation_backlog(&self) -> usize {
        self.deallocation_backlog
    }

    /// Outstanding requests without deallocations.
    pub fn transfers_outstanding(&self) -> usize {
        self.outstanding - self.deallocations_outstanding
    }

    /// Lists that are not empty.
    pub fn nonempty(&self) -> Mask {
        self.nonempty
    }

    /// Adds a request; `None` when all slots are in use.
    pub fn push(&mut self, request: Request) -> Option<u32> {
        let slot = Slot {
            request,
            submitted: 0,
            inflight: 0,
            fully_submitted: false,
            in_use: true,
            sequence: self.sequence,
            next: NONE,
        };
        let i = self.take_slot(slot)?;
        self.sequence += 1;
        self.outstanding += 1;
        self.backlog += 1;
        let list = list_index(&request);
        self.deallocations_outstanding += usize::from(list == DEALLOCATION_LIST);
        self.deallocation_backlog += usize::from(list == DEALLOCATION_LIST);
        if self.heads[list] == NONE {
            self.heads[list] = i;
        } else {
            let tail = self.tails[list] as usize;
            self.slots[tail].next = i;
        }
        self.tails[list] = i;
        self.nonempty |= 1 << list;
        Some(i)
    }

    /// Puts a request into a free slot, one that was used before if there is one.
    fn take_slot(&mut self, slot: Slot) -> Option<u32> {
        if let Some(free) = self.slots.get_mut(self.free as usize) {
            let next = std::mem::replace(free, slot).next;
            return Some(std::mem::replace(&mut self.free, next));
        }
        if self.slots.len() == self.depth {
            return None;
        }
        self.slots.push(slot);
        Some(self.slots.len() as u32 - 1)
    }

    /// The oldest request of the most important list of a set.
    pub fn head(&self, mask: Mask) -> Option<Head> {
        let nonempty = self.nonempty & mask;
        (nonempty != 0).then(|| self.list_head(nonempty.trailing_zeros() as usize))
    }

    /// The oldest request of all lists of a set.
    pub fn oldest(&self, mask: Mask) -> Option<Head> {
        let mut nonempty = self.nonempty & mask;
        let mut oldest: Option<Head> = None;
        while nonempty != 0 {
            let head = self.list_head(nonempty.trailing_zeros() as usize);
            if oldest.is_none_or(|o| head.sequence < o.sequence) {
                oldest = Some(head);
            }
            nonempty &= nonempty - 1;
        }
        oldest
    }

    fn list_head(&self, list: usize) -> Head {
        let slot = self.heads[list];
        let s = &self.slots[slot as usize];
        Head {
            slot,
            op: s.request.op,
            submitted: s.submitted,
            remaining: s.request.len - s.submitted,
            arrival: s.request.arrival,
            sequence: s.sequence,
            priority: s.request.priority,
            tag: s.request.tag,
        }
    }

    /// Submits `len` bytes of a head to the device; a head that is completely submitted leaves its
    /// list.
    pub fn submit(&mut self, head: &Head, len: u64) {
        let slot = &mut self.slots[head.slot as usize];
        slot.submitted += len;
        slot.inflight += 1;
        if slot.submitted < slot.request.len {
            return;
        }
        slot.fully_submitted = true;
        let (list, next) = (list_index(&slot.request), slot.next);
        self.unlink_head(list, next);
    }

    /// Records the completion of a piece. Returns the request when that was its last piece, `Err`
    /// for a slot without a piece in flight.
    pub fn complete(&mut self, slot: u32) -> Result<Option<Request>, ()> {
        let s = self.slots.get_mut(slot as usize).filter(|s| s.in_use && s.inflight > 0).ok_or(())?;
        s.inflight -= 1;
        if s.inflight > 0 || !s.fully_submitted {
            return Ok(None);
        }
        let request = s.request;
        self.release(slot);
        Ok(Some(request))
    }

    /// Cancels the backlog and passes each request without a piece in flight to `cancelled`. Others
    /// end with their last piece.
    pub fn cancel_backlog(&mut self, mut cancelled: impl FnMut(Request)) {
        for list in 0..LISTS {
            let mut i = self.heads[list];
            while i != NONE {
                let s = &mut self.slots[i as usize];
                let next = s.next;
                s.fully_submitted = true;
                self.backlog -= 1;
                if s.inflight == 0 {
                    cancelled(s.request);
                    self.release(i);
                }
                i = next;
            }
            self.heads[list] = NONE;
            self.tails[list] = NONE;
        }
        self.deallocation_backlog = 0;
        self.nonempty = 0;
    }

    /// Cancels the remainder of a request with pieces in flight: it ends with the last of them.
    pub fn cancel_remainder(&mut self, slot: u32) {
        let Some(s) = self.slots.get_mut(slot as usize) else { return };
        let list = list_index(&s.request);
        // Pieces are taken from the head of a list only, so a request with a piece in flight is a
        // head.
        if !s.in_use || s.fully_submitted || self.heads[list] != slot {
            return;
        }
        s.submitted = s.request.len;
        s.fully_submitted = true;
        let next = s.next;
        self.unlink_head(list, next);
    }

    /// Cancels queued discards, and passes each without a piece in flight to `cancelled`.
    pub fn cancel_discards(&mut self, mut cancelled: impl FnMut(Request)) {
        let mut i = std::mem::replace(&mut self.heads[DEALLOCATION_LIST], NONE);
        self.tails[DEALLOCATION_LIST] = NONE;
        self.nonempty &= !DEALLOCATIONS;
        while i != NONE {
            let s = &mut self.slots[i as usize];
            let (request, next, running) = (s.request, s.next, s.inflight > 0);
            if request.op == Op::Discard {
                s.fully_submitted = true;
                self.backlog -= 1;
                self.deallocation_backlog -= 1;
                if !running {
                    self.release(i);
                    cancelled(request);
                }
            } else {
                // Zeroing stays queued, in the same order.
                s.next = NONE;
                match self.tails[DEALLOCATION_LIST] {
                    NONE => self.heads[DEALLOCATION_LIST] = i,
                    tail => self.slots[tail as usize].next = i,
                }
                self.tails[DEALLOCATION_LIST] = i;
                self.nonempty |= DEALLOCATIONS;
            }
            i = next;
        }
    }

    /// Removes the head of a list; `next` is the request behind it.
    fn unlink_head(&mut self, list: usize, next: u32) {
        self.backlog -= 1;
        self.deallocation_backlog -= usize::from(list == DEALLOCATION_LIST);
        self.heads[list] = next;
        if next == NONE {
            self.tails[list] = NONE;
            self.nonempty &= !(1 << list);
        }
    }

    fn release(&mut self, slot: u32) {
        let s = &mut self.slots[slot as usize];
        s.in_use = false;
        s.next = self.free;
        let deallocates = s.request.op.deallocates();
        self.free = slot;
        self.outstanding -= 1;
        self.deallocations_outstanding -= usize::from(deallocates);
    }
}

fn list_index(request: &Request) -> usize {
    if request.op == Op::Flush {
        return FLUSH_LIST;
    }
    if request.op.deallocates() {
        return DEALLOCATION_LIST;
    }
    let p = request.priority;
    (p.class as usize * LEVELS as usize + usize::from(p.level.min(LEVELS - 1))) * 2
        + request.op.direction().index()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Mask = Mask::MAX;

    fn request(tag: u64, class: Class, op: Op, len: u64) -> Request {
        Request { tag, op, len, priority: Priority { class, level: 0 }, arrival: Nanos(tag) }
    }

    #[test]
    fn classes_in_order_and_each_list_fifo() {
        let mut q = Queue::new(8);
        for (tag, class) in
            [(1, Class::Idle), (2, Class::BestEffort), (3, Class::RealTime), (4, Class::RealTime)]
        {
            q.push(request(tag, class, Op::Read, 4096)).unwrap();
        }
        let mut order = Vec::new();
        while let Some(head) = q.head(ALL) {
            q.submit(&head, head.remaining);
            order.push(head.tag);
        }
        assert_eq!(order, [3, 4, 2, 1]);
        assert_eq!(q.backlog(), 0);
        assert_eq!(q.outstanding(), 4);
    }

    #[test]
    fn masks_separate_directions_and_classes() {
        let mut q = Queue::new(4);
        q.push(request(1, Class::BestEffort, Op::Write, 1)).unwrap();
        q.push(request(2, Class::BestEffort, Op::Read, 1)).unwrap();
        assert_eq!(q.head(direction_mask(Direction::Write)).unwrap().tag, 1);
        assert_eq!(q.head(direction_mask(Direction::Read)).unwrap().tag, 2);
        assert_eq!(q.head(class_mask(Class::RealTime)), None);
        assert_eq!(q.oldest(class_mask(Class::BestEffort)).unwrap().tag, 1);
    }

    #[test]
    fn a_request_completes_with_its_last_piece() {
        let mut q = Queue::new(1);
        q.push(request(7, Class::BestEffort, Op::Write, 10)).unwrap();
        assert!(q.push(request(8, Class::BestEffort, Op::Write, 10)).is_none(), "one slot only");
        let head = q.head(ALL).unwrap();
        q.submit(&head, 6);
        // The first piece completes before the second is submitted: the request is not complete.
        assert_eq!(q.complete(head.slot), Ok(None));
        let head = q.head(ALL).unwrap();
        assert_eq!((head.submitted, head.remaining), (6, 4));
        q.submit(&head, 4);
        assert_eq!(q.complete(head.slot).unwrap().unwrap().tag, 7);
        assert_eq!(q.complete(head.slot), Err(()), "nothing runs there any more");
        assert!(q.push(request(8, Class::BestEffort, Op::Write, 10)).is_some());
    }

    #[test]
    fn cancelling_leaves_pieces_in_flight() {
        let mut q = Queue::new(4);
        for tag in 1..=3 {
            q.push(request(tag, Class::BestEffort, Op::Write, 10)).unwrap();
        }
        let head = q.head(ALL).unwrap();
        q.submit(&head, 4);
        let mut gone = Vec::new();
        q.cancel_backlog(|r| gone.push(r.tag));
        assert_eq!(gone, [2, 3]);
        assert_eq!((q.outstanding(), q.backlog(), q.nonempty()), (1, 0, 0));
        assert_eq!(q.complete(head.slot).unwrap().unwrap().tag, 1);
        assert_eq!(q.outstanding(), 0);
    }
}
