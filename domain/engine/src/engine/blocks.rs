//! Requests that are no whole blocks of their device, whose blocks are larger than the guest's.
//!
//! A read takes the whole blocks into the bounce buffer. A write reads them first, puts the guest's
//! bytes in and writes them back. Other writes to these blocks wait meanwhile: one of both would be
//! lost.

use std::collections::VecDeque;

/// The whole blocks of a device that hold a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockRange {
    /// First byte, on the backing.
    pub start: u64,
    /// End, on the backing.
    pub end: u64,
    /// Bytes of the first block before the piece.
    pub skip: usize,
    /// Whether the piece is less than these blocks.
    pub is_partial: bool,
}

impl BlockRange {
    /// Blocks of `block` bytes that hold `len` bytes at `offset`.
    pub fn around(offset: u64, len: u64, block: u32) -> Self {
        let block = u64::from(block.max(1));
        let start = offset / block * block;
        let end = offset.saturating_add(len).div_ceil(block).saturating_mul(block);
        Self { start, end, skip: (offset - start) as usize, is_partial: end - start != len }
    }

    /// Blocks that lie whole in `len` bytes at `offset`; `None` without any.
    pub fn within(offset: u64, len: u64, block: u32) -> Option<Self> {
        let block = u64::from(block.max(1));
        let start = offset.div_ceil(block).saturating_mul(block);
        let end = offset.saturating_add(len) / block * block;
        (start < end).then_some(Self { start, end, skip: 0, is_partial: false })
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.end - self.start
    }

    /// Whether one of both writes would be lost if they were carried out at once.
    fn conflicts(&self, other: &Self) -> bool {
        (self.is_partial || other.is_partial) && self.start < other.end && other.start < self.end
    }
}

/// Writes of one disk that are in flight, and those that wait for them, by the slot of their piece.
#[derive(Debug, Default)]
pub struct BlockWrites {
    inflight: Vec<(u32, BlockRange)>,
    waiting: VecDeque<(u32, BlockRange)>,
    /// The waiting ones are being started.
    pub is_starting: bool,
}

impl BlockWrites {
    /// Adds a write. Returns whether it may start; otherwise [`BlockWrites::next`] names it later.
    pub fn begin(&mut self, slot: u32, blocks: BlockRange) -> bool {
        let all = self.inflight.iter().chain(&self.waiting);
        let may_start = !all.into_iter().any(|(_, other)| blocks.conflicts(other));
        match may_start {
            true => self.inflight.push((slot, blocks)),
            false => self.waiting.push_back((slot, blocks)),
        }
        may_start
    }

    /// Removes a write that has ended, if it is one.
    pub fn end(&mut self, slot: u32) {
        self.inflight.retain(|(other, _)| *other != slot);
    }

    /// The first of those that wait for none any more: it counts as in flight.
    pub fn next(&mut self) -> Option<u32> {
        let is_free = |at: usize, blocks: &BlockRange| {
            let before = self.inflight.iter().chain(self.waiting.range(..at));
            !before.into_iter().any(|(_, other)| blocks.conflicts(other))
        };
        let at = self.waiting.iter().enumerate().position(|(at, (_, blocks))| is_free(at, blocks))?;
        let write = self.waiting.remove(at)?;
        self.inflight.push(write);
        Some(write.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_whole_blocks() {
        let of = |offset, len| {
            let r = BlockRange::around(offset, len, 4_096);
            (r.start, r.end, r.skip, r.is_partial)
        };
        assert_eq!(of(8_192, 4_096), (8_192, 12_288, 0, false));
        assert_eq!(of(8_704, 512), (8_192, 12_288, 512, true));
        assert_eq!(of(8_192, 512), (8_192, 12_288, 0, true));
        assert_eq!(of(12_287, 2), (8_192, 16_384, 4_095, true));
        let inner = |offset, len| BlockRange::within(offset, len, 4_096).map(|r| (r.start, r.end));
        assert_eq!(inner(512, 8_192), Some((4_096, 8_192)));
        assert_eq!(inner(512, 4_096), None);
        assert_eq!(inner(4_096, 8_192), Some((4_096, 12_288)));
        assert_eq!(inner(0, 0), None);
    }

    #[test]
    fn writes_to_one_block_follow_each_other_in_order() {
        let mut writes = BlockWrites::default();
        let sector = |n: u64| BlockRange::around(n * 512, 512, 4_096);
        let whole = |n: u64| BlockRange::around(n * 4_096, 4_096, 4_096);
        assert!(writes.begin(0, sector(0)));
        assert!(!writes.begin(1, whole(0)), "the sector's write would bring back old data");
        assert!(!writes.begin(2, sector(1)));
        assert!(writes.begin(3, sector(8)), "another block");
        assert!(writes.begin(4, whole(2)) && writes.begin(5, whole(2)), "the guest's own affair");
        assert_eq!(writes.next(), None);
        writes.end(3);
        assert_eq!(writes.next(), None);
        writes.end(0);
        assert_eq!(writes.next(), Some(1));
        assert_eq!(writes.next(), None, "the third waits for the second");
        writes.end(1);
        assert_eq!((writes.next(), writes.next()), (Some(2), None));
        for slot in [2, 4, 5] {
            writes.end(slot);
        }
        assert!(writes.inflight.is_empty() && writes.waiting.is_empty());
    }
}
