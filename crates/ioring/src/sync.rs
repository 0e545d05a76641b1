//! What the ring is made of: the standard library's, in the shape of `loom`'s.

pub(crate) use std::sync::atomic::{AtomicBool, Ordering, fence};

/// Slots that both sides hold; freed by whoever goes last.
pub(crate) type Shared<T> = std::sync::Arc<[T]>;

pub(crate) fn share<T>(slots: Vec<T>) -> Shared<T> {
    slots.into()
}

/// How many sides are left.
pub(crate) fn sides<T>(slots: &Shared<T>) -> usize {
    std::sync::Arc::strong_count(slots)
}

/// A cell whose accesses have a beginning and an end, which is what `loom` checks.
pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

impl<T> UnsafeCell<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    pub(crate) fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
        f(self.0.get())
    }

    pub(crate) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}
