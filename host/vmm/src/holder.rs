//! The process that holds the lock (flock(2)) of a file.
//!
//! A name or a process id tells nothing for sure: any user can start a process of that name, and
//! ids are used again. The lock belongs to an open file, so only a process that could open the
//! file, or inherited it, holds it; and the kernel drops it when the last such process ends,
//! however it ends. A process is found by `/proc/PID/fd` and `/proc/PID/fdinfo`
//! (proc_pid_fdinfo(5)) and signalled through a pidfd that was open before it was looked at.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

#[cfg(test)]
mod tests;

/// Another process may hold the lock for the moment in which it looks at it: so many tries before
/// it counts as held.
const TRIES: u32 = 10;
/// Between two of them.
const PAUSE: Duration = Duration::from_millis(20);

/// A process, by a pidfd: never another one that got the same id.
#[derive(Debug)]
pub struct Process {
    pid: Pid,
    fd: OwnedFd,
}

/// What is known of the holder of a lock.
#[derive(Debug, Default)]
pub struct Search {
    /// Processes that have the locked file open. Several share it when one has started the other.
    pub holders: Vec<Process>,
    /// Processes that could not be inspected, with the reason: any of them may be a holder too.
    pub unknown: Vec<(u32, io::Error)>,
}

/// Whether the lock of a file is held by another open file. Takes and drops a shared lock for a
/// moment.
///
/// # Errors
/// As flock(2) says.
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
///
/// # Errors
/// As flock(2) says.
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
///
/// # Errors
/// When the file or the list of processes cannot be read.
pub fn search(path: &Path, file: &File) -> io::Result<Search> {
    let meta = file.metadata()?;
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let wanted = Wanted { name, id: (meta.dev(), meta.ino()) };
    let own = std::process::id();
    let mut search = Search::default();
    for entry in fs::read_dir("/proc")? {
        let pid = entry?.file_name().to_str().and_then(|name| name.parse::<u32>().ok());
        let Some(pid) = pid.filter(|pid| *pid != own) else { continue };
        match inspect(pid, &wanted) {
            Ok(Some(process)) => search.holders.push(process),
            Ok(None) => {}
            Err(e) => search.unknown.push((pid, e)),
        }
    }
    Ok(search)
}

/// The process at the other end of a connection, which for a client is the one that began to listen
/// (`SO_PEERCRED` in unix(7)); `None` for one outside of this PID namespace.
///
/// # Errors
/// As getsockopt(2) says.
pub fn peer(stream: &UnixStream) -> io::Result<Option<u32>> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = libc::socklen_t::try_from(size_of_val(&peer)).map_err(io::Error::other)?;
    let fd = stream.as_raw_fd();
    // SAFETY: the kernel writes at most `len` bytes to `peer`, which is that large and may hold any
    // bits; both outlive the call.
    let done = unsafe {
        let to = std::ptr::from_mut(&mut peer).cast();
        libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, to, &mut len)
    };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(u32::try_from(peer.pid).ok().filter(|pid| *pid > 0))
}

struct Wanted<'a> {
    name: &'a OsStr,
    /// Device and inode.
    id: (u64, u64),
}

impl Wanted<'_> {
    /// Whether a link of `/proc/PID/fd` can be the file. Only such a one is looked at more closely:
    /// stat(2) of another may wait for a dead server, readlink(2) never does.
    fn may_be(&self, link: &Path) -> bool {
        let name = link.file_name().unwrap_or_default().as_bytes();
        name.strip_suffix(b" (deleted)").unwrap_or(name) == self.name.as_bytes()
    }
}

/// The process, when it holds the lock.
fn inspect(pid: u32, wanted: &Wanted<'_>) -> io::Result<Option<Process>> {
    let Some(process) = Process::open(pid)? else { return Ok(None) };
    let dir = PathBuf::from(format!("/proc/{pid}"));
    let Some(fds) = there(fs::read_dir(dir.join("fd")))? else { return Ok(None) };
    for fd in fds {
        let Some(fd) = there(fd)? else { continue };
        let Some(link) = there(fs::read_link(fd.path()))? else { continue };
        if !wanted.may_be(&link) {
            continue;
        }
        let Some(meta) = there(fs::metadata(fd.path()))? else { continue };
        if (meta.dev(), meta.ino()) != wanted.id {
            continue;
        }
        let info = there(fs::read_to_string(dir.join("fdinfo").join(fd.file_name())))?;
        if info.is_some_and(|info| has_lock(&info)) {
            return Ok(Some(process));
        }
    }
    Ok(None)
}

/// What is there; `None` when it is gone, which is no error: descriptors are closed and processes
/// end meanwhile.
fn there<T>(done: io::Result<T>) -> io::Result<Option<T>> {
    match done {
        Ok(it) => Ok(Some(it)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) if e.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => Ok(None),
        Err(e) => Err(e),
    }
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

impl Process {
    /// The process that has this id now; `None` when there is none.
    ///
    /// # Errors
    /// As pidfd_open(2) says.
    pub fn open(pid: u32) -> io::Result<Option<Self>> {
        let Some(id) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
        let fd = there(pidfd_open(id, PidfdFlags::empty()).map_err(io::Error::from))?;
        Ok(fd.map(|fd| Self { pid: id, fd }))
    }

    /// Its id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// Sends a signal; none to a process that has ended, which is no error.
    ///
    /// # Errors
    /// As pidfd_send_signal(2) says.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        there(pidfd_send_signal(&self.fd, signal).map_err(io::Error::from)).map(drop)
    }

    /// Waits until it has ended, for at most `patience`; whether it has.
    ///
    /// # Errors
    /// As poll(2) says.
    pub fn has_ended(&self, patience: Duration) -> io::Result<bool> {
        let deadline = Instant::now() + patience;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).map_err(|_| io::ErrorKind::InvalidInput)?;
            // Readable from its end on, also while it waits to be reaped.
            match poll(&mut [PollFd::new(&self.fd, PollFlags::IN)], Some(&left)) {
                Ok(n) => return Ok(n > 0),
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Asks it to end (SIGTERM), and kills it (SIGKILL) when it has not ended within `patience`;
    /// whether it has ended then, within as long again.
    ///
    /// # Errors
    /// As the system calls say.
    pub fn stop(&self, patience: Duration) -> io::Result<bool> {
        self.signal(Signal::TERM)?;
        if self.has_ended(patience)? {
            return Ok(true);
        }
        self.signal(Signal::KILL)?;
        self.has_ended(patience)
    }
}
