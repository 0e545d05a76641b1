//! The data segments of a request, in memory of a fixed size.

use std::ops::Deref;

use vm_memory::GuestAddress;

use super::{SEGMENTS, Segment};

const NONE: Segment = Segment { addr: GuestAddress(0), len: 0 };

/// At most [`SEGMENTS`] data segments. Memory of theirs is part of the value: a guest's request
/// allocates nothing.
#[derive(Debug)]
pub struct Segments {
    len: usize,
    all: [Segment; SEGMENTS],
}

impl Default for Segments {
    fn default() -> Self {
        Self { len: 0, all: [NONE; SEGMENTS] }
    }
}

impl Segments {
    pub(super) fn clear(&mut self) {
        self.len = 0;
    }

    /// Adds a segment; `false` when there is no room.
    pub(super) fn push(&mut self, segment: Segment) -> bool {
        let Some(place) = self.all.get_mut(self.len) else { return false };
        *place = segment;
        self.len += 1;
        true
    }
}

impl Deref for Segments {
    type Target = [Segment];

    fn deref(&self) -> &[Segment] {
        self.all.get(..self.len).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_there_is_room_for_are_refused() {
        let mut segments = Segments::default();
        let segment = |i: usize| Segment { addr: GuestAddress(i as u64), len: 1 };
        for i in 0..SEGMENTS {
            assert!(segments.push(segment(i)));
        }
        assert!(!segments.push(segment(0)));
        assert!(segments.iter().enumerate().all(|(i, s)| *s == segment(i)) && segments.len() == SEGMENTS);
        segments.clear();
        assert!(segments.is_empty());
    }
}
