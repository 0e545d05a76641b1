//! Devices that front ends have begun to use, for a thread that looks at their sizes.

use std::collections::BTreeSet;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

#[derive(Debug, Default)]
struct Names {
    /// Each once: a front end may begin as often as it likes.
    new: BTreeSet<String>,
    is_closed: bool,
}

/// Names of devices that front ends have begun to use, until they are taken.
#[derive(Debug, Default)]
pub struct FirstUses {
    names: Mutex<Names>,
    changed: Condvar,
}

impl FirstUses {
    fn names(&self) -> MutexGuard<'_, Names> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn add(&self, name: &str) {
        self.names().new.insert(name.to_owned());
        self.changed.notify_one();
    }

    /// Takes a name, waiting for one; `None` once [`Self::close`] was called.
    pub(crate) fn next(&self) -> Option<String> {
        let waits = |names: &mut Names| names.new.is_empty() && !names.is_closed;
        let mut names = self.changed.wait_while(self.names(), waits).unwrap_or_else(PoisonError::into_inner);
        if names.is_closed { None } else { names.new.pop_first() }
    }

    pub(crate) fn close(&self) {
        self.names().is_closed = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_taken_once_and_none_after_the_end() {
        let uses = FirstUses::default();
        for name in ["a", "b", "a"] {
            uses.add(name);
        }
        assert_eq!([uses.next(), uses.next()], [Some("a".to_owned()), Some("b".to_owned())]);
        std::thread::scope(|threads| {
            let waits = threads.spawn(|| uses.next());
            uses.close();
            assert_eq!(waits.join().unwrap(), None);
        });
    }
}
