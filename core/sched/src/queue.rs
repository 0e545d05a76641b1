//! The waiting requests of one VM: a list for each class, level and direction, over a fixed number of slots.

use rtvirtio_units::Nanos;

use crate::priority::{Class, LEVELS, Priority};
use crate::request::{Direction, Op, Request};

/// Lists of transfers: the most important class and level first, reads and writes in turn.
const TRANSFER_LISTS: usize = 3 * LEVELS as usize * 2;
/// The list of flushes: whatever their priority, and at an odd place, for they count as writes.
const FLUSH_LIST: usize = TRANSFER_LISTS + 1;
/// The list of deallocations (discards and zeroing): whatever their priority, at an odd place too.
const DEALLOCATION_LIST: usize = FLUSH_LIST + 2;
/// Lists of a VM.
pub const LISTS: usize = DEALLOCATION_LIST + 1;

/// The end of a list.
const NONE: u32 = u32::MAX;

/// A set of lists, a bit each.
pub type Mask = u64;

/// All lists but those of flushes and deallocations.
pub const TRANSFERS: Mask = (1 << TRANSFER_LISTS) - 1;

/// The list of flushes.
pub const FLUSHES: Mask = 1 << FLUSH_LIST;

/// The list of deallocations.
pub const DEALLOCATIONS: Mask = 1 << DEALLOCATION_LIST;

/// All lists of a direction.
pub const fn of_direction(direction: Direction) -> Mask {
    const READS: Mask = 0x5555_5555_5555_5555;
    READS << direction.index()
}

/// All lists of a class.
pub const fn of_class(class: Class) -> Mask {
    0xffff << (16 * class as u32)
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    request: Request,
    /// Bytes given to the device so far.
    given: u64,
    /// Pieces at the device.
    in_flight: u32,
    /// Nothing of it is left to give.
    all_given: bool,
    used: bool,
    /// Order of arrival within the VM.
    sequence: u64,
    next: u32,
}

/// The oldest request of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    pub slot: u32,
    pub op: Op,
    /// Bytes already given.
    pub given: u64,
    /// Bytes still to give.
    pub rest: u64,
    pub arrival: Nanos,
    pub sequence: u64,
    pub priority: Priority,
    pub tag: u64,
}

/// Waiting and running requests of one VM.
#[derive(Debug)]
pub struct Queue {
    slots: Vec<Slot>,
    free: u32,
    heads: [u32; LISTS],
    tails: [u32; LISTS],
    /// Which lists hold something.
    filled: Mask,
    sequence: u64,
    held: usize,
    waiting: usize,
    /// Deallocations of `held` and of `waiting`.
    deallocations_held: usize,
    deallocations_waiting: usize,
}

impl Queue {
    /// Room for `depth` requests, waiting and running.
    pub fn new(depth: u32) -> Self {
        let empty = Request { tag: 0, op: Op::Flush, len: 0, priority: Priority::NORMAL, arrival: Nanos(0) };
        let slot = |i: u32| Slot {
            request: empty,
            given: 0,
            in_flight: 0,
            all_given: false,
            used: false,
            sequence: 0,
            next: if i + 1 < depth { i + 1 } else { NONE },
        };
        Self {
            slots: (0..depth).map(slot).collect(),
            free: if depth > 0 { 0 } else { NONE },
            heads: [NONE; LISTS],
            tails: [NONE; LISTS],
            filled: 0,
            sequence: 0,
            held: 0,
            waiting: 0,
            deallocations_held: 0,
            deallocations_waiting: 0,
        }
    }

    /// Requests waiting and running.
    pub fn held(&self) -> usize {
        self.held
    }

    /// Requests of which something is still to give.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// Discards and zeroing requests of which something is still to give.
    pub fn deallocations_waiting(&self) -> usize {
        self.deallocations_waiting
    }

    /// Requests waiting and running that are no deallocations.
    pub fn transfers_held(&self) -> usize {
        self.held - self.deallocations_held
    }

    /// Which lists hold something.
    pub fn filled(&self) -> Mask {
        self.filled
    }

    /// Adds a request; `None` when there is no room.
    pub fn push(&mut self, request: Request) -> Option<u32> {
        let i = self.free;
        let slot = self.slots.get_mut(i as usize)?;
        self.free = slot.next;
        let sequence = self.sequence;
        *slot = Slot { request, given: 0, in_flight: 0, all_given: false, used: true, sequence, next: NONE };
        self.sequence += 1;
        self.held += 1;
        self.waiting += 1;
        let list = list_of(&request);
        self.deallocations_held += usize::from(list == DEALLOCATION_LIST);
        self.deallocations_waiting += usize::from(list == DEALLOCATION_LIST);
        if self.heads[list] == NONE {
            self.heads[list] = i;
        } else {
            let tail = self.tails[list] as usize;
            self.slots[tail].next = i;
        }
        self.tails[list] = i;
        self.filled |= 1 << list;
        Some(i)
    }

    /// The oldest request of the most important list of a set.
    pub fn head(&self, mask: Mask) -> Option<Head> {
        let filled = self.filled & mask;
        (filled != 0).then(|| self.of_list(filled.trailing_zeros() as usize))
    }

    /// The oldest request of all lists of a set.
    pub fn oldest(&self, mask: Mask) -> Option<Head> {
        let mut filled = self.filled & mask;
        let mut oldest: Option<Head> = None;
        while filled != 0 {
            let head = self.of_list(filled.trailing_zeros() as usize);
            if oldest.is_none_or(|o| head.sequence < o.sequence) {
                oldest = Some(head);
            }
            filled &= filled - 1;
        }
        oldest
    }

    fn of_list(&self, list: usize) -> Head {
        let slot = self.heads[list];
        let s = &self.slots[slot as usize];
        Head {
            slot,
            op: s.request.op,
            given: s.given,
            rest: s.request.len - s.given,
            arrival: s.request.arrival,
            sequence: s.sequence,
            priority: s.request.priority,
            tag: s.request.tag,
        }
    }

    /// Gives `len` bytes of a head to the device; a head of which nothing is left leaves its list.
    pub fn give(&mut self, head: &Head, len: u64) {
        let slot = &mut self.slots[head.slot as usize];
        slot.given += len;
        slot.in_flight += 1;
        if slot.given < slot.request.len {
            return;
        }
        slot.all_given = true;
        let (list, next) = (list_of(&slot.request), slot.next);
        self.leave(list, next);
    }

    /// A piece came back; the request when that was its last one, `Err` for a slot that holds no running piece.
    pub fn take_back(&mut self, slot: u32) -> Result<Option<Request>, ()> {
        let s = self.slots.get_mut(slot as usize).filter(|s| s.used && s.in_flight > 0).ok_or(())?;
        s.in_flight -= 1;
        if s.in_flight > 0 || !s.all_given {
            return Ok(None);
        }
        let request = s.request;
        self.release(slot);
        Ok(Some(request))
    }

    /// Drops all that waits and tells of each request that is thereby gone. Of requests that run in part, only the rest is dropped: they end with their last piece.
    pub fn drop_waiting(&mut self, mut gone: impl FnMut(Request)) {
        for list in 0..LISTS {
            let mut i = self.heads[list];
            while i != NONE {
                let s = &mut self.slots[i as usize];
                let next = s.next;
                s.all_given = true;
                self.waiting -= 1;
                if s.in_flight == 0 {
                    gone(s.request);
                    self.release(i);
                }
                i = next;
            }
            self.heads[list] = NONE;
            self.tails[list] = NONE;
        }
        self.deallocations_waiting = 0;
        self.filled = 0;
    }

    /// Of a request that runs in part, the rest is dropped: it ends with the pieces that are at the device.
    pub fn abandon(&mut self, slot: u32) {
        let Some(s) = self.slots.get_mut(slot as usize) else { return };
        let list = list_of(&s.request);
        // Pieces are given of the first of a list only, so one of which a piece runs is the first of its list.
        if !s.used || s.all_given || self.heads[list] != slot {
            return;
        }
        s.given = s.request.len;
        s.all_given = true;
        let next = s.next;
        self.leave(list, next);
    }

    /// Drops discards that wait, and tells of each that is thereby gone.
    pub fn drop_discards(&mut self, mut gone: impl FnMut(Request)) {
        let mut i = std::mem::replace(&mut self.heads[DEALLOCATION_LIST], NONE);
        self.tails[DEALLOCATION_LIST] = NONE;
        self.filled &= !DEALLOCATIONS;
        while i != NONE {
            let s = &mut self.slots[i as usize];
            let (request, next, running) = (s.request, s.next, s.in_flight > 0);
            if request.op == Op::Discard {
                s.all_given = true;
                self.waiting -= 1;
                self.deallocations_waiting -= 1;
                if !running {
                    self.release(i);
                    gone(request);
                }
            } else {
                // It stays, in the same order.
                s.next = NONE;
                match self.tails[DEALLOCATION_LIST] {
                    NONE => self.heads[DEALLOCATION_LIST] = i,
                    tail => self.slots[tail as usize].next = i,
                }
                self.tails[DEALLOCATION_LIST] = i;
                self.filled |= DEALLOCATIONS;
            }
            i = next;
        }
    }

    /// The first request of a list is all given; `next` is the one behind it.
    fn leave(&mut self, list: usize, next: u32) {
        self.waiting -= 1;
        self.deallocations_waiting -= usize::from(list == DEALLOCATION_LIST);
        self.heads[list] = next;
        if next == NONE {
            self.tails[list] = NONE;
            self.filled &= !(1 << list);
        }
    }

    fn release(&mut self, slot: u32) {
        let s = &mut self.slots[slot as usize];
        s.used = false;
        s.next = self.free;
        let deallocates = s.request.op.deallocates();
        self.free = slot;
        self.held -= 1;
        self.deallocations_held -= usize::from(deallocates);
    }
}

fn list_of(request: &Request) -> usize {
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
    fn classes_come_in_order_and_each_list_is_first_in_first_out() {
        let mut q = Queue::new(8);
        for (tag, class) in
            [(1, Class::Idle), (2, Class::BestEffort), (3, Class::RealTime), (4, Class::RealTime)]
        {
            q.push(request(tag, class, Op::Read, 4096)).unwrap();
        }
        let mut order = Vec::new();
        while let Some(head) = q.head(ALL) {
            q.give(&head, head.rest);
            order.push(head.tag);
        }
        assert_eq!(order, [3, 4, 2, 1]);
        assert_eq!(q.waiting(), 0);
        assert_eq!(q.held(), 4);
    }

    #[test]
    fn masks_part_directions_and_classes() {
        let mut q = Queue::new(4);
        q.push(request(1, Class::BestEffort, Op::Write, 1)).unwrap();
        q.push(request(2, Class::BestEffort, Op::Read, 1)).unwrap();
        assert_eq!(q.head(of_direction(Direction::Write)).unwrap().tag, 1);
        assert_eq!(q.head(of_direction(Direction::Read)).unwrap().tag, 2);
        assert_eq!(q.head(of_class(Class::RealTime)), None);
        assert_eq!(q.oldest(of_class(Class::BestEffort)).unwrap().tag, 1);
    }

    #[test]
    fn a_request_is_back_when_all_its_pieces_are() {
        let mut q = Queue::new(1);
        q.push(request(7, Class::BestEffort, Op::Write, 10)).unwrap();
        assert!(q.push(request(8, Class::BestEffort, Op::Write, 10)).is_none(), "one slot only");
        let head = q.head(ALL).unwrap();
        q.give(&head, 6);
        // The first piece is back before the second is given: it is not the end.
        assert_eq!(q.take_back(head.slot), Ok(None));
        let head = q.head(ALL).unwrap();
        assert_eq!((head.given, head.rest), (6, 4));
        q.give(&head, 4);
        assert_eq!(q.take_back(head.slot).unwrap().unwrap().tag, 7);
        assert_eq!(q.take_back(head.slot), Err(()), "nothing runs there any more");
        assert!(q.push(request(8, Class::BestEffort, Op::Write, 10)).is_some());
    }

    #[test]
    fn dropping_leaves_what_runs() {
        let mut q = Queue::new(4);
        for tag in 1..=3 {
            q.push(request(tag, Class::BestEffort, Op::Write, 10)).unwrap();
        }
        let head = q.head(ALL).unwrap();
        q.give(&head, 4);
        let mut gone = Vec::new();
        q.drop_waiting(|r| gone.push(r.tag));
        assert_eq!(gone, [2, 3]);
        assert_eq!((q.held(), q.waiting(), q.filled()), (1, 0, 0));
        assert_eq!(q.take_back(head.slot).unwrap().unwrap().tag, 1);
        assert_eq!(q.held(), 0);
    }
}
