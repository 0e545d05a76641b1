//! The lock of a disk that moves between I/O domains with its guest.
//!
//! Both I/O domains have the disk open, and neither may keep the other from that: a target is
//! ready before its source stops. So the disk is locked while a guest uses it, and no longer. The
//! lock is one of the open file that does the I/O: after a kill it lasts until the kernel has
//! completed the last request of that file.

use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rtvirtio_kernel::holders::image_lock::{lock_in_use, unlock_in_use};

/// Interval of attempts.
const RETRY: Duration = Duration::from_millis(5);

/// Reasons for which a disk is not used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UseLockError {
    /// Use by a guest of another I/O domain.
    #[error(
        "another I/O domain serves this disk to a guest, and two would destroy it: one begins when the other's guest has stopped, as a migration does it"
    )]
    InUse,
    /// The file system does not lock.
    #[error("it cannot be locked, which `migrate` needs: {0}")]
    Io(#[from] io::Error),
}

/// The lock on a disk's part of its file.
#[derive(Debug)]
pub struct UseLock {
    file: Arc<File>,
    start: u64,
    writes: bool,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Size of the part, in bytes, which grows with the disk.
    size: u64,
    is_locked: bool,
}

impl UseLock {
    /// The lock of a part of a file, in bytes, which is free still. `file` shares the open file
    /// that does the I/O.
    #[must_use]
    pub fn new(file: Arc<File>, start: u64, size: u64, writes: bool) -> Self {
        Self { file, start, writes, state: Mutex::new(State { size, is_locked: false }) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn try_acquire(&self) -> io::Result<bool> {
        let mut state = self.state();
        let is_locked = lock_in_use(&self.file, self.start, state.size, self.writes)?;
        state.is_locked |= is_locked;
        Ok(is_locked)
    }

    /// Takes the lock; waits up to `timeout` for another I/O domain that stops or has died.
    pub fn acquire(&self, timeout: Duration) -> Result<(), UseLockError> {
        let begin = Instant::now();
        while !self.try_acquire()? {
            if begin.elapsed() >= timeout {
                return Err(UseLockError::InUse);
            }
            std::thread::sleep(RETRY);
        }
        Ok(())
    }

    /// Gives the lock back. Nothing may be in flight.
    pub fn release(&self) -> io::Result<()> {
        let mut state = self.state();
        unlock_in_use(&self.file, self.start, state.size)?;
        state.is_locked = false;
        Ok(())
    }

    /// Gives the part another size, in bytes. A part that is locked is locked up to its new end
    /// after that; after an error it is as before.
    pub fn set_size(&self, size: u64) -> Result<(), UseLockError> {
        let mut state = self.state();
        let (old, start) = (state.size, self.start);
        if state.is_locked && size > old && !lock_in_use(&self.file, start + old, size - old, self.writes)? {
            return Err(UseLockError::InUse);
        }
        if state.is_locked && size < old {
            unlock_in_use(&self.file, start + size, old - size)?;
        }
        state.size = size;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_locked_by_one_open_file_at_a_time() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let path = dir.path().join("disk");
        std::fs::write(&path, [0; 8_192]).unwrap();
        let of = |start, writes| {
            let file = File::options().read(true).write(true).open(&path).unwrap();
            UseLock::new(Arc::new(file), start, 4_096, writes)
        };
        let soon = Duration::from_millis(1);
        let (first, same, other) = (of(0, true), of(0, true), of(4_096, true));
        first.acquire(soon).unwrap();
        first.acquire(soon).unwrap();
        other.acquire(soon).unwrap();
        assert!(matches!(same.acquire(soon), Err(UseLockError::InUse)));
        let waits = std::thread::spawn(move || same.acquire(Duration::from_secs(60)).map(|()| same));
        std::thread::sleep(Duration::from_millis(20));
        first.release().unwrap();
        let same = waits.join().unwrap().unwrap();
        assert!(first.acquire(soon).is_err());
        drop(same);
        let (reader, another) = (of(0, false), of(0, false));
        reader.acquire(soon).unwrap();
        another.acquire(soon).unwrap();
        assert!(first.acquire(soon).is_err());
        // Closed with the last descriptor of its open file.
        drop((reader, another));
        first.acquire(soon).unwrap();
    }

    #[test]
    fn the_end_of_a_disk_that_grows_is_locked_too() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let path = dir.path().join("disk");
        std::fs::write(&path, [0; 16_384]).unwrap();
        let of = |start| {
            let file = File::options().read(true).write(true).open(&path).unwrap();
            UseLock::new(Arc::new(file), start, 4_096, true)
        };
        let soon = Duration::from_millis(1);
        let (grows, next) = (of(0), of(4_096));
        grows.acquire(soon).unwrap();
        next.acquire(soon).unwrap();
        assert!(matches!(grows.set_size(8_192), Err(UseLockError::InUse)));
        next.release().unwrap();
        grows.set_size(8_192).unwrap();
        assert!(next.acquire(soon).is_err());
        grows.release().unwrap();
        next.acquire(soon).unwrap();
        assert!(grows.acquire(soon).is_err(), "it has its new size at the next use too");
        grows.set_size(4_096).unwrap();
        grows.acquire(soon).unwrap();
        next.release().unwrap();
        grows.set_size(8_192).unwrap();
        grows.set_size(4_096).unwrap();
        next.acquire(soon).unwrap();
    }
}
