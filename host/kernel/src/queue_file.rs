//! Writes to the files of a disk's queue (`/sys/block/DISK/queue/`).
//!
//! The kernel freezes the queue for most of them: the writer sleeps, and no signal wakes it, until
//! every request in the queue has ended (`blk_mq_freeze_queue_wait()`), and each new request of the
//! disk waits meanwhile. A disk that completes nothing would keep the writer for good, with all the
//! locks that it holds. So such a disk is left alone, and the write is made by a process of its
//! own, which is left behind after a time.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::Root;

/// A disk that has requests and completes none for so long is left alone.
const LOOK: Duration = Duration::from_secs(1);
/// How long the kernel may take for a write.
const LIMIT: Duration = Duration::from_secs(5);
/// Between two looks at the disk, and at the process that writes.
const PAUSE: Duration = Duration::from_millis(20);
const SHORT: Duration = Duration::from_micros(200);

/// Processes that have not come back from their write, by its file.
static UNDER_WAY: Mutex<BTreeMap<PathBuf, libc::pid_t>> = Mutex::new(BTreeMap::new());

/// Whether the kernel may freeze the queue for a write to this file; an elevator's tunables lie a
/// directory lower, and are set at once.
#[must_use]
pub fn is_queue_file(path: &Path) -> bool {
    let dir = path.parent();
    dir.is_some_and(|dir| dir.ends_with("queue")) && path.starts_with("/sys")
}

/// Writes one whole value.
///
/// # Errors
/// As [`Root::write`]. Kind `TimedOut` where the disk has requests and completes none, and nothing
/// was written; or where the kernel did not take the value in time, and may take it later.
pub fn write(root: &Root, path: &Path, value: &str) -> io::Result<()> {
    may_use(path)?;
    if let Some(requests) = stands_still(root, path, LOOK) {
        let text = format!(
            "the disk has {requests} requests in flight and has completed none for {} s, so the kernel would hold \
             whoever changes this until it does: see to the disk, and try again",
            LOOK.as_secs()
        );
        return Err(io::Error::new(io::ErrorKind::TimedOut, text));
    }
    write_apart(root, path, value, LIMIT)
}

/// Writes in a process of its own, which is left behind after `limit`.
fn write_apart(root: &Root, path: &Path, value: &str, limit: Duration) -> io::Result<()> {
    let pid = spawn(&root.at(path), value.as_bytes())?;
    let end = Instant::now() + limit;
    let mut pause = SHORT;
    while Instant::now() < end {
        if let Some(result) = ended(pid) {
            return result;
        }
        std::thread::sleep(pause);
        pause = (2 * pause).min(PAUSE);
    }
    UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner).insert(path.to_owned(), pid);
    let text = format!(
        "the kernel has not taken `{value}` within {} s, and takes it when the disk has completed its requests: see to \
         the disk, then `rtvirtio revert`",
        limit.as_secs()
    );
    Err(io::Error::new(io::ErrorKind::TimedOut, text))
}

/// Whether the file can be used: not while an earlier write to it has not come back, for then even
/// a read may wait for that.
///
/// # Errors
/// Kind `TimedOut`.
pub fn may_use(path: &Path) -> io::Result<()> {
    let mut under_way = UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner);
    under_way.retain(|_, pid| ended(*pid).is_none());
    if under_way.contains_key(path) {
        let text = "an earlier write to it still waits for the disk, which completes no requests";
        return Err(io::Error::new(io::ErrorKind::TimedOut, text));
    }
    Ok(())
}

/// How many requests the disk has in flight, where it has some and completes none for so long; a
/// disk of which that cannot be told is not one.
fn stands_still(root: &Root, path: &Path, during: Duration) -> Option<u64> {
    let disk = path.parent()?.parent()?;
    let first = Counters::read(root, disk)?;
    let end = Instant::now() + during;
    loop {
        let now = Counters::read(root, disk)?;
        if now.inflight == 0 || now.completed != first.completed {
            return None;
        }
        if Instant::now() >= end {
            return Some(now.inflight);
        }
        std::thread::sleep(PAUSE);
    }
}

struct Counters {
    inflight: u64,
    completed: u64,
}

impl Counters {
    /// Of `inflight` and `stat` (`Documentation/block/stat.rst`).
    fn read(root: &Root, disk: &Path) -> Option<Self> {
        let numbers = |file: &str| -> Option<Vec<u64>> {
            let text = root.read(disk.join(file)).ok()?;
            text.split_ascii_whitespace().map(|word| word.parse().ok()).collect()
        };
        let (inflight, stat) = (numbers("inflight")?, numbers("stat")?);
        // Reads, writes, discards, flushes; older kernels count fewer kinds.
        let completed = [0, 4, 11, 15].iter().filter_map(|at| stat.get(*at)).sum();
        Some(Self { inflight: inflight.iter().sum(), completed })
    }
}

/// Starts a process that writes, and does nothing else.
fn spawn(path: &Path, value: &[u8]) -> io::Result<libc::pid_t> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: fork(2) copies this process; the child runs the branch below only, which calls
    // nothing but functions that are safe after a fork of a process with threads
    // (signal-safety(7)), on memory that was prepared before, and ends itself.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            // SAFETY: as above; `path` ends with a zero byte and `value` has `value.len()` bytes.
            unsafe {
                // A lock of ours must not live on with it.
                libc::syscall(libc::SYS_close_range, 0, libc::c_uint::MAX, 0);
                let fd = libc::open(path.as_ptr(), libc::O_WRONLY | libc::O_TRUNC | libc::O_CLOEXEC);
                if fd < 0 {
                    libc::_exit(*libc::__errno_location());
                }
                match libc::write(fd, value.as_ptr().cast(), value.len()) {
                    -1 => libc::_exit(*libc::__errno_location()),
                    n if n.unsigned_abs() == value.len() => libc::_exit(0),
                    _ => libc::_exit(libc::ENOSPC),
                }
            }
        }
        pid => Ok(pid),
    }
}

/// What became of the write of a process; `None` while it is under way.
fn ended(pid: libc::pid_t) -> Option<io::Result<()>> {
    let mut status = 0;
    // SAFETY: `status` is an integer that outlives the call; `pid` is a child of this process that
    // nothing else waits for.
    match unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) } {
        0 => None,
        -1 => match io::Error::last_os_error() {
            e if e.kind() == io::ErrorKind::Interrupted => None,
            e => Some(Err(e)),
        },
        _ if libc::WIFEXITED(status) => Some(match libc::WEXITSTATUS(status) {
            0 => Ok(()),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }),
        _ => Some(Err(io::Error::other("the process that writes it was killed"))),
    }
}

#[cfg(test)]
mod tests;
