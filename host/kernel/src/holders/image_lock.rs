//! QEMU's image locks: open-file-description locks on single bytes, so that two QEMU processes do
//! not write one image.
//!
//! Byte `100 + n` is read-locked for each permission `n` that a user has, byte `200 + n` for each
//! that it does not share with others (`raw_apply_lock_bytes()` in QEMU's `block/file-posix.c`,
//! permissions in `include/block/block-common.h`). A conflict is detected with a write lock that is
//! tested and never set.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// First byte for permissions that are held (`RAW_LOCK_PERM_BASE`).
const HELD: i64 = 100;
/// First byte for permissions that are not shared (`RAW_LOCK_SHARED_BASE`).
const NOT_SHARED: i64 = 200;

/// First byte of the locks of disks in use, far behind any image: QEMU's bytes stay free.
const IN_USE: i64 = 1 << 62;

/// `BLK_PERM_CONSISTENT_READ`: reads see consistent data.
const READ: i64 = 0;
/// `BLK_PERM_WRITE`: data may be written.
const WRITE: i64 = 1;
/// `BLK_PERM_RESIZE`: the image may be resized.
const RESIZE: i64 = 3;

/// Use of an image, and the uses that others are allowed meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sharing {
    /// Whether the image is written.
    pub writes: bool,
    /// Whether others may write it too, as with QEMU's `share-rw=on`.
    pub others_write: bool,
}

impl Sharing {
    fn held(self) -> &'static [i64] {
        if self.writes { &[READ, WRITE] } else { &[READ] }
    }

    fn not_shared(self) -> &'static [i64] {
        if self.others_write { &[] } else { &[WRITE, RESIZE] }
    }
}

/// The image is in use by another open file in a way that conflicts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conflict;

/// Locks an image as QEMU does; the locks go with the last descriptor of this open file. With a
/// conflict nothing stays locked.
///
/// # Errors
/// When the file system has no such locks, or the file is not open for reading.
pub fn lock_image(file: &File, sharing: Sharing) -> io::Result<Result<(), Conflict>> {
    let done = try_lock(file, sharing);
    if !matches!(done, Ok(Ok(()))) {
        // All bytes at once: unlocking a byte that is not locked is no error.
        set(file, HELD, NOT_SHARED + 64 - HELD, libc::F_UNLCK)?;
    }
    done
}

/// Takes the same locks by another open file of a process that has [`lock_image`]d it already,
/// without testing for conflicts again: they last until that file's last request has ended, also
/// after the process was killed.
///
/// # Errors
/// As [`lock_image`]; a write lock of another process, which QEMU never sets.
pub fn hold_image(file: &File, sharing: Sharing) -> io::Result<()> {
    for byte in bytes(sharing) {
        if !set(file, byte, 1, libc::F_RDLCK)? {
            return Err(io::ErrorKind::WouldBlock.into());
        }
    }
    Ok(())
}

/// Locks a part of an image for a user of it, to the exclusion of other open files that lock it so;
/// of its writers only where it does not write itself. `false` when another one has it.
///
/// # Errors
/// The file system has no such locks, or the file is not open for this use.
pub fn lock_in_use(file: &File, start: u64, len: u64, writes: bool) -> io::Result<bool> {
    let (start, len) = in_use(start, len)?;
    set(file, start, len, if writes { libc::F_WRLCK } else { libc::F_RDLCK })
}

/// Gives the lock of [`lock_in_use`] back.
pub fn unlock_in_use(file: &File, start: u64, len: u64) -> io::Result<()> {
    let (start, len) = in_use(start, len)?;
    set(file, start, len, libc::F_UNLCK).map(drop)
}

fn in_use(start: u64, len: u64) -> io::Result<(i64, i64)> {
    let beyond = || io::Error::from(io::ErrorKind::InvalidInput);
    let start = i64::try_from(start).ok().and_then(|start| IN_USE.checked_add(start)).ok_or_else(beyond)?;
    let len = i64::try_from(len).ok().filter(|len| *len > 0).ok_or_else(beyond)?;
    start.checked_add(len).map(|_| (start, len)).ok_or_else(beyond)
}

/// Bytes to lock for this use.
fn bytes(sharing: Sharing) -> impl Iterator<Item = i64> {
    let held = sharing.held().iter().map(|n| HELD + n);
    held.chain(sharing.not_shared().iter().map(|n| NOT_SHARED + n))
}

fn try_lock(file: &File, sharing: Sharing) -> io::Result<Result<(), Conflict>> {
    // Locked first and tested after, so that of two at once not both succeed.
    for byte in bytes(sharing) {
        if !set(file, byte, 1, libc::F_RDLCK)? {
            return Ok(Err(Conflict));
        }
    }
    let theirs = sharing.held().iter().map(|n| NOT_SHARED + n);
    for byte in theirs.chain(sharing.not_shared().iter().map(|n| HELD + n)) {
        if is_locked(file, byte)? {
            return Ok(Err(Conflict));
        }
    }
    Ok(Ok(()))
}

fn lock(start: i64, len: i64, kind: i32) -> libc::flock {
    // SAFETY: all zeroes is a value of this plain structure; `l_pid` must be 0 for these locks.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as _;
    lock.l_whence = libc::SEEK_SET as _;
    lock.l_start = start;
    lock.l_len = len;
    lock
}

/// Sets or clears a lock; false when another open file has a write lock there.
fn set(file: &File, start: i64, len: i64, kind: i32) -> io::Result<bool> {
    let lock = lock(start, len, kind);
    // SAFETY: the descriptor is open and `lock` outlives the call.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &lock) } == 0 {
        return Ok(true);
    }
    let e = io::Error::last_os_error();
    match e.raw_os_error() {
        Some(libc::EAGAIN | libc::EACCES) => Ok(false),
        _ => Err(e),
    }
}

fn is_locked(file: &File, byte: i64) -> io::Result<bool> {
    let mut lock = lock(byte, 1, libc::F_WRLCK);
    // SAFETY: as above; the kernel writes what it found into `lock`.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &mut lock) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(i32::from(lock.l_type) != libc::F_UNLCK)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WRITER: Sharing = Sharing { writes: true, others_write: false };
    const READER: Sharing = Sharing { writes: false, others_write: false };
    const SHARED: Sharing = Sharing { writes: true, others_write: true };

    /// Pairs of uses, compatible and not, as in QEMU's table.
    #[test]
    fn users_that_go_together() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let path = dir.path().join("image");
        std::fs::write(&path, "").unwrap();
        let goes = |first: Sharing, second: Sharing| {
            let (a, b) = (File::open(&path).unwrap(), File::open(&path).unwrap());
            assert_eq!(lock_image(&a, first).unwrap(), Ok(()));
            let done = lock_image(&b, second).unwrap();
            if done.is_err() {
                // No lock stays behind: the first user can come again, once children that other
                // tests start meanwhile have closed the descriptors that they inherit.
                drop(a);
                let c = File::open(&path).unwrap();
                let free = || lock_image(&c, WRITER).unwrap().is_ok();
                rtvirtio_testkit::site::wait_for("the locks have gone", free);
            }
            done.is_ok()
        };
        assert!(!goes(WRITER, WRITER));
        assert!(!goes(WRITER, READER));
        assert!(!goes(READER, WRITER));
        assert!(goes(READER, READER));
        assert!(goes(SHARED, SHARED));
        assert!(!goes(SHARED, WRITER));
        assert!(!goes(READER, SHARED));
    }
}
