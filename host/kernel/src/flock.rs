//! Processes that hold the lock (flock(2)) of a file.
//!
//! A name or a process id identifies nothing for sure: any user can start a process of that name,
//! and ids are reused. The lock belongs to an open file, so only a process that could open the
//! file, or inherited it, holds it; and the kernel drops it when the last such process ends,
//! however it ends. A process is found by `/proc/PID/fd` and `/proc/PID/fdinfo`
//! (proc_pid_fdinfo(5)) and signalled through a pidfd that was open before it was inspected.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::thread;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::process::{Process, descriptors, pids};
use crate::{HostError, Root, unless_gone};

#[cfg(test)]
mod tests;

/// Attempts before the lock counts as held: another process may hold it for the moment in which it
/// tests it, and a child of a former holder shares it until its `execve`.
const TRIES: u32 = 10;
/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(20);

/// Result of the search for a lock's holders.
#[derive(Debug, Default)]
pub struct Search {
    /// Processes that have the locked file open: several, where one has started the other.
    pub holders: Vec<Process>,
    /// Processes that could not be inspected, with the reason: any of them may be a holder too.
    pub unknown: Vec<(u32, io::Error)>,
}

/// Whether the lock of a file is held by another open file at this moment, possibly one that a
/// child of a former holder has until its `execve`. Takes and drops a shared lock for a moment.
pub fn is_held(file: &File) -> io::Result<bool> {
    match flock(file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => flock(file, FlockOperation::Unlock)?,
        Err(Errno::WOULDBLOCK) => return Ok(true),
        Err(e) => return Err(e.into()),
    }
    Ok(false)
}

/// Takes the lock of a file, for as long as this open file is open here or in a process that
/// inherits it; false when another open file holds it.
pub fn lock(file: &File) -> io::Result<bool> {
    for attempt in 0..TRIES {
        if attempt > 0 {
            thread::sleep(PAUSE);
        }
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(true),
            Err(Errno::WOULDBLOCK) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(false)
}

/// Looks for the processes that hold the lock of the file at `path`, which is open as `file`. This
/// process is not among them.
pub fn search(path: &Path, file: &File) -> io::Result<Search> {
    let meta = file.metadata()?;
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let wanted = Wanted { name, id: (meta.dev(), meta.ino()) };
    let own = std::process::id();
    let mut search = Search::default();
    for pid in pids(&Root::default()).map_err(HostError::into_io)? {
        if pid == own {
            continue;
        }
        match inspect(pid, &wanted) {
            Ok(Some(process)) => search.holders.push(process),
            Ok(None) => {}
            Err(e) => search.unknown.push((pid, e)),
        }
    }
    Ok(search)
}

struct Wanted<'a> {
    name: &'a OsStr,
    /// Device and inode of the locked file.
    id: (u64, u64),
}

impl Wanted<'_> {
    /// Whether a link of `/proc/PID/fd` can be the file. Only such a link is inspected further:
    /// stat(2) of another may wait for a dead server, readlink(2) never does.
    fn may_be(&self, link: &Path) -> bool {
        let name = link.file_name().unwrap_or_default().as_bytes();
        name.strip_suffix(b" (deleted)").unwrap_or(name) == self.name.as_bytes()
    }
}

/// The process, when it holds the lock.
fn inspect(pid: u32, wanted: &Wanted<'_>) -> io::Result<Option<Process>> {
    let Some(process) = Process::open(pid)? else { return Ok(None) };
    let root = Root::default();
    let opened = unless_gone(descriptors(&root, pid)).map_err(HostError::into_io)?;
    let Some(opened) = opened else { return Ok(None) };
    for fd in opened {
        let Some(link) = unless_gone(fd.target(&root))? else { continue };
        if !wanted.may_be(&link) {
            continue;
        }
        let Some(meta) = unless_gone(fs::metadata(fd.link()))? else { continue };
        if (meta.dev(), meta.ino()) != wanted.id {
            continue;
        }
        let info = unless_gone(fd.info(&root))?;
        if info.is_some_and(|info| has_lock(&info)) {
            return Ok(Some(process));
        }
    }
    Ok(None)
}

/// Whether the open file of this `/proc/PID/fdinfo` holds an exclusive flock(2).
fn has_lock(info: &str) -> bool {
    let words = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        words.next() == Some("lock:") && {
            // Number, kind, advisory or mandatory, read or write.
            let words: Vec<&str> = words.skip(1).take(3).collect();
            matches!(words.as_slice(), ["FLOCK", _, "WRITE"])
        }
    };
    info.lines().any(words)
}
