//! Mutexes whose holder may have panicked: the data of one here is consistent after each statement.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Waits for the lock.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
