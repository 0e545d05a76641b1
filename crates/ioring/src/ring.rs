//! The ring. `super::sync` says over which primitives.

use std::fmt;
use std::mem::MaybeUninit;

use super::sync::{AtomicBool, Ordering, Shared, UnsafeCell, fence, share, sides};

/// One place, and who owns it.
///
/// While `full` is false the value belongs to the producer, while it is true to the consumer. Only the producer makes it true, only the consumer makes it false, and each does so when it is done
/// with the value. All of what is unsafe here rests on this, and on nothing that the other side keeps.
struct Slot<T> {
    full: AtomicBool,
    value: UnsafeCell<MaybeUninit<T>>,
}

// SAFETY: two threads reach a slot, and `full` lets one of them at a time touch the value (see `Slot`). A value moves from one thread to the other, for which `T: Send` is enough.
unsafe impl<T: Send> Sync for Slot<T> {}

impl<T> Slot<T> {
    fn new() -> Self {
        Self { full: AtomicBool::new(false), value: UnsafeCell::new(MaybeUninit::uninit()) }
    }

    /// Acquire: who finds that the slot has become his sees all that the other side did to the value before.
    fn is_full(&self) -> bool {
        self.full.load(Ordering::Acquire)
    }

    /// # Safety
    /// The caller is the only producer, and has found the slot empty since it filled it last.
    unsafe fn fill(&self, value: T) {
        // SAFETY: the slot is empty, so it is the caller's alone until the store below.
        self.value.with_mut(|at| unsafe { (*at).write(value) });
        // Release: the value is there before the flag says so. The paper's store barrier.
        self.full.store(true, Ordering::Release);
    }

    /// # Safety
    /// The caller is the only consumer, and has found the slot full since it took from it last.
    unsafe fn take(&self) -> T {
        // SAFETY: the slot is full, so its value is there, and it is the caller's alone until the store below; after that nobody reads it again before it is written anew.
        let value = self.value.with(|at| unsafe { (*at).assume_init_read() });
        // Release: the value is out before the producer may write over it.
        self.full.store(false, Ordering::Release);
        value
    }
}

impl<T> Drop for Slot<T> {
    fn drop(&mut self) {
        // Relaxed: nobody else is left, and the count of sides ordered what they did before this.
        if self.full.load(Ordering::Relaxed) {
            // SAFETY: the slot is full, so the value is there, and `take` has not moved it out.
            self.value.with_mut(|at| unsafe { (*at).assume_init_drop() });
        }
    }
}

/// The ring is full; the item comes back.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Full<T>(
    /// What was not taken.
    pub T,
);

impl<T> fmt::Debug for Full<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Full(..)")
    }
}

impl<T> fmt::Display for Full<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the ring is full")
    }
}

impl<T> std::error::Error for Full<T> {}

/// A ring of `capacity` slots, all of which can be full at once. One of no slots is always full and always empty.
///
/// This is the only allocation: the slots, freed when both sides are gone, with what is left in them.
#[must_use]
pub fn ring<T>(capacity: usize) -> (Producer<T>, Consumer<T>) {
    let slots = share((0..capacity).map(|_| Slot::new()).collect());
    (Producer { slots: slots.clone(), at: 0 }, Consumer { slots, at: 0 })
}

/// Whether the other side is gone. Acquire, for the count is read without an order: all that the other side did is seen after this.
fn alone<T>(slots: &Shared<T>) -> bool {
    let gone = sides(slots) < 2;
    fence(Ordering::Acquire);
    gone
}

/// The place after `at`.
fn after(at: usize, len: usize) -> usize {
    // No division, and no need for a power of two; the branch is predicted.
    if at + 1 < len { at + 1 } else { 0 }
}

/// The side that puts in. There is one, and it can be sent to another thread.
pub struct Producer<T> {
    slots: Shared<Slot<T>>,
    /// The slot to fill next. The consumer neither knows nor needs it.
    at: usize,
}

impl<T> Producer<T> {
    /// Puts an item in.
    ///
    /// # Errors
    /// [`Full`], with the item: the consumer has not taken what this slot holds from the last time around.
    pub fn push(&mut self, item: T) -> Result<(), Full<T>> {
        let Some(slot) = self.slots.get(self.at).filter(|s| !s.is_full()) else { return Err(Full(item)) };
        // SAFETY: there is one `Producer` of a ring, and it is borrowed here; the slot was found empty just now.
        unsafe { slot.fill(item) };
        self.at = after(self.at, self.slots.len());
        Ok(())
    }

    /// Puts in what the iterator gives, for as long as there is room; how many it was. An item is asked for only when there is a place for it, so none is lost.
    pub fn push_from(&mut self, items: &mut impl Iterator<Item = T>) -> usize {
        let mut n = 0;
        while let Some(slot) = self.slots.get(self.at).filter(|s| !s.is_full()) {
            let Some(item) = items.next() else { break };
            // SAFETY: there is one `Producer` of a ring, and it is borrowed here; the slot was found empty, and nobody else fills it.
            unsafe { slot.fill(item) };
            self.at = after(self.at, self.slots.len());
            n += 1;
        }
        n
    }

    /// Whether [`Producer::push`] would fail now. The consumer may change that at any time.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.slots.get(self.at).is_none_or(Slot::is_full)
    }

    /// Number of slots.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// The consumer is gone: nobody will take what is put in.
    #[must_use]
    pub fn is_alone(&self) -> bool {
        alone(&self.slots)
    }
}

/// The side that takes out. There is one, and it can be sent to another thread.
pub struct Consumer<T> {
    slots: Shared<Slot<T>>,
    /// The slot to empty next. The producer neither knows nor needs it.
    at: usize,
}

impl<T> Consumer<T> {
    /// Takes the oldest item out; `None` when there is none.
    pub fn pop(&mut self) -> Option<T> {
        let slot = self.slots.get(self.at).filter(|s| s.is_full())?;
        // SAFETY: there is one `Consumer` of a ring, and it is borrowed here; the slot was found full just now.
        let item = unsafe { slot.take() };
        self.at = after(self.at, self.slots.len());
        Some(item)
    }

    /// Takes at most `most` items out, oldest first; how many it was. An item is out of the ring when `each` sees it.
    pub fn pop_into(&mut self, most: usize, mut each: impl FnMut(T)) -> usize {
        let mut n = 0;
        while n < most {
            let Some(item) = self.pop() else { break };
            n += 1;
            each(item);
        }
        n
    }

    /// Whether [`Consumer::pop`] would find nothing now. The producer may change that at any time.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        !self.slots.get(self.at).is_some_and(Slot::is_full)
    }

    /// Number of slots.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// The producer is gone: when [`Consumer::pop`] finds nothing after this was true, nothing will ever come.
    #[must_use]
    pub fn is_alone(&self) -> bool {
        alone(&self.slots)
    }
}

impl<T> fmt::Debug for Producer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Producer").field("capacity", &self.capacity()).finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for Consumer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Consumer").field("capacity", &self.capacity()).finish_non_exhaustive()
    }
}
