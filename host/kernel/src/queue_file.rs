//! Writes to the files of a disk's queue (`/sys/block/DISK/queue/`).
//!
//! The kernel freezes the queue for most of them: the writer sleeps, and no signal wakes it, until
//! every request in the queue has ended (`blk_mq_freeze_queue_wait()`), and each new request of the
//! disk waits meanwhile. A disk that completes nothing would block the writer forever, with all the
//! locks that it holds. So such a disk is not written to, and the write is made by a child process,
//! which is abandoned after a time. Waits for many disks that hang have a limit together: all VMs
//! wait meanwhile. The limit of the call that waits ([`WaitLimit`]) counts too.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::device_io::{Requests, in_driver};
use crate::process::ProcessId;
use crate::{Root, WaitLimit, atomic_write, trusted};

/// Time without a completion after which a disk with requests in flight counts as hung.
const LOOK: Duration = Duration::from_secs(1);
/// Longest time for the kernel to accept a write.
const LIMIT: Duration = Duration::from_secs(5);
/// Longest pause between two looks at the disk's counters, or at the writing process.
const PAUSE: Duration = Duration::from_millis(20);
const SHORT: Duration = Duration::from_micros(200);

/// Time for which a disk that was found hung is not watched again, unless it has completed a
/// request since: a plan has several settings for each disk. After that it is watched for
/// [`LEAST`].
const KNOWN: Duration = Duration::from_secs(10);
/// Longest sum of timed-out waits for disks in [`WINDOW`].
const SUM: Duration = Duration::from_secs(6);
const WINDOW: Duration = Duration::from_secs(60);
/// Shortest watch of a disk, once the time for all is over: one at work completes requests within
/// it.
const LEAST: Duration = Duration::from_millis(100);
/// Addition to the error of a disk that was watched for less than [`LOOK`].
const NOT_LONGER: &str =
    "; other disks hang too, or the time for all waits is over, so it was not watched for longer";
/// Prefix of the file that notes a process which has not returned from its write, for other
/// processes: the name of its disk follows.
const NOTE: &str = "/run/rtvirtio-queue.";
/// Largest size of such a note, in bytes.
const NOTE_LIMIT: u64 = 64;

/// Processes that have not returned from their write, by the directory of their disk.
static UNDER_WAY: Mutex<BTreeMap<PathBuf, libc::pid_t>> = Mutex::new(BTreeMap::new());
/// Noted processes that were waited for in vain, by the path of the note.
static OUTLASTED: Mutex<BTreeMap<PathBuf, ProcessId>> = Mutex::new(BTreeMap::new());
/// Disks that were found hung, by their directory.
static STOOD_STILL: Mutex<BTreeMap<PathBuf, StoodStill>> = Mutex::new(BTreeMap::new());
/// Waits of this process for disks that hang.
static WAITS: Mutex<Waits> = Mutex::new(Waits { since: None, spent: Duration::ZERO });

/// Disk that was found hung.
#[derive(Clone, Copy, Debug)]
struct StoodStill {
    /// Begin of the first watch.
    since: Instant,
    /// End of the last watch.
    found: Instant,
    /// Number of requests completed until then.
    completed: u64,
}

/// Sum of timed-out waits within [`WINDOW`] from `since` on.
#[derive(Debug, Default)]
struct Waits {
    since: Option<Instant>,
    spent: Duration,
}

impl Waits {
    fn is_current(&self, now: Instant) -> bool {
        self.since.is_some_and(|since| now.saturating_duration_since(since) < WINDOW)
    }

    /// Time for a wait that needs `most`: what is left for all disks, and at least `least`.
    fn allow(&self, least: Duration, most: Duration, now: Instant) -> Duration {
        let spent = if self.is_current(now) { self.spent } else { Duration::ZERO };
        SUM.saturating_sub(spent).max(least).min(most)
    }

    fn spend(&mut self, time: Duration, now: Instant) {
        if !self.is_current(now) {
            (self.since, self.spent) = (Some(now), Duration::ZERO);
        }
        self.spent += time;
    }
}

fn allowed(waits: &Mutex<Waits>, least: Duration, most: Duration) -> Duration {
    let of_all = waits.lock().unwrap_or_else(PoisonError::into_inner).allow(least, most, Instant::now());
    WaitLimit::wait(of_all)
}

fn spend(waits: &Mutex<Waits>, begin: Instant) {
    waits.lock().unwrap_or_else(PoisonError::into_inner).spend(begin.elapsed(), Instant::now());
}

/// Whether the kernel may freeze the queue for a write to this file; an elevator's tunables are a
/// directory below, and are set at once.
#[must_use]
pub fn is_queue_file(path: &Path) -> bool {
    let dir = path.parent();
    dir.is_some_and(|dir| dir.ends_with("queue")) && path.starts_with("/sys")
}

/// Writes one whole value, unless the disk hangs.
///
/// # Errors
/// As [`Root::write`]. Kind `TimedOut` where the disk has requests and completes none, and nothing
/// was written; or where the kernel did not accept the value in time, and may accept it later.
pub fn write(root: &Root, path: &Path, value: &str) -> io::Result<()> {
    write_within(root, path, value, &WAITS)
}

fn write_within(root: &Root, path: &Path, value: &str, waits: &Mutex<Waits>) -> io::Result<()> {
    may_use_within(root, path, waits)?;
    let (begin, during) = (Instant::now(), allowed(waits, LEAST, LOOK));
    if let Some(still) = stands_still(root, path, during) {
        spend(waits, begin);
        let short = if during < LOOK { NOT_LONGER } else { "" };
        let text = format!(
            "the disk has {} requests in flight and has completed none for {:.1} s, so the kernel would block the \
             writer of this setting until it does: check the disk, and try again{short}",
            still.requests,
            still.during.as_secs_f64()
        );
        return Err(io::Error::new(io::ErrorKind::TimedOut, text));
    }
    let begin = Instant::now();
    let written = write_apart(root, path, value, allowed(waits, LOOK, LIMIT));
    if written.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::TimedOut) {
        spend(waits, begin);
    }
    written
}

/// Writes in a child process, which is abandoned after `limit`.
fn write_apart(root: &Root, path: &Path, value: &str, limit: Duration) -> io::Result<()> {
    // Noted before it writes: this process may be killed first, and the value arrives after any
    // that others write meanwhile.
    let (pid, go) = spawn(&root.at(path), value.as_bytes())?;
    let noted = note(root, path, pid);
    rustix::io::write(&go, &[1])?;
    drop(go);
    let begin = Instant::now();
    let mut pause = SHORT;
    while begin.elapsed() < limit {
        if let Some(result) = ended(pid) {
            if let Some((note, text)) = noted {
                remove_note(&root.at(note), text.as_bytes());
            }
            return result;
        }
        std::thread::sleep(pause);
        pause = (2 * pause).min(PAUSE);
    }
    // It stays noted.
    UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner).insert(disk_of(path).to_owned(), pid);
    let text = format!(
        "the kernel has not taken `{value}` within {:.1} s, and takes it when the disk has completed its requests: \
         check the disk, then `rtvirtio revert`",
        limit.as_secs_f64()
    );
    Err(io::Error::new(io::ErrorKind::TimedOut, text))
}

/// Notes a process that is to write, for others. Returns path and text of the note; without one,
/// only the error that the caller gets tells of a write that hangs.
fn note(root: &Root, path: &Path, pid: libc::pid_t) -> Option<(PathBuf, String)> {
    let process = ProcessId::find(u32::try_from(pid).ok()?).ok().flatten()?;
    let (note, text) = (note_of(path)?, format!("{} {}\n", process.pid, process.start_time));
    atomic_write(&root.at(&note), text.as_bytes()).ok()?;
    Some((note, text))
}

/// Removes a note that still has this text.
fn remove_note(note: &Path, text: &[u8]) {
    if trusted::read_own(note, NOTE_LIMIT).is_ok_and(|found| found == text) {
        let _ = std::fs::remove_file(note);
    }
}

/// Directory of a queue file's disk.
fn disk_of(path: &Path) -> &Path {
    path.parent().and_then(Path::parent).unwrap_or(path)
}

fn note_of(path: &Path) -> Option<PathBuf> {
    let disk = disk_of(path).file_name()?.to_str()?;
    Some(format!("{NOTE}{disk}").into())
}

/// Checks that a disk's queue files can be used: not while an earlier write to one of them, by
/// whichever process, has not returned, because then even a read may wait for it. A slow write of
/// another process is waited for, a second at most, and once for each such process; less once many
/// disks hang.
///
/// # Errors
/// Kind `TimedOut`; as the system calls report where the state is unknown.
pub fn may_use(root: &Root, path: &Path) -> io::Result<()> {
    may_use_within(root, path, &WAITS)
}

fn may_use_within(root: &Root, path: &Path, waits: &Mutex<Waits>) -> io::Result<()> {
    let mut under_way = UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner);
    under_way.retain(|_, pid| ended(*pid).is_none());
    let mut is_under_way = under_way.contains_key(disk_of(path));
    drop(under_way);
    if let Some(note) = note_of(path).map(|note| root.at(note)).filter(|_| !is_under_way) {
        let (begin, timeout) = (Instant::now(), allowed(waits, LEAST, LOOK));
        while let Some(process) = noted(&note)? {
            let outlasted = || OUTLASTED.lock().unwrap_or_else(PoisonError::into_inner);
            if begin.elapsed() >= timeout || outlasted().get(&note) == Some(&process) {
                spend(waits, begin);
                outlasted().insert(note, process);
                is_under_way = true;
                break;
            }
            std::thread::sleep(PAUSE);
        }
    }
    if is_under_way {
        let text = "an earlier write to its queue has not returned: the kernel waits for the disk to complete all its \
                    requests";
        return Err(io::Error::new(io::ErrorKind::TimedOut, text));
    }
    Ok(())
}

/// Process that a note names, if it still lives; the note of one that has ended is removed.
fn noted(note: &Path) -> io::Result<Option<ProcessId>> {
    let text = match trusted::read_own(note, NOTE_LIMIT) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(io::Error::new(e.kind(), format!("{}: {e}", note.display()))),
        Ok(text) => text,
    };
    let process = parse_note(&text).filter(ProcessId::is_alive);
    if process.is_none() {
        remove_note(note, &text);
    }
    Ok(process)
}

fn parse_note(text: &[u8]) -> Option<ProcessId> {
    let (pid, start_time) = std::str::from_utf8(text).ok()?.trim().split_once(' ')?;
    Some(ProcessId { pid: pid.parse().ok()?, start_time: start_time.parse().ok()? })
}

/// Disk with requests of which it completes none.
#[derive(Debug, PartialEq, Eq)]
struct Still {
    /// Number of requests in flight.
    requests: u64,
    /// Time since the begin of the first watch.
    during: Duration,
}

/// Requests in flight, if the disk has some and completes none for `during`, or less where it was
/// found so before; `None` otherwise, or if unknown.
fn stands_still(root: &Root, path: &Path, during: Duration) -> Option<Still> {
    let disk = path.parent()?.parent()?;
    let first = Counters::read(root, disk)?;
    let known = || STOOD_STILL.lock().unwrap_or_else(PoisonError::into_inner);
    let (begin, key) = (Instant::now(), root.at(disk));
    let before = known().get(&key).copied().filter(|of| of.completed == first.completed);
    let during = match before {
        Some(of) if of.found.elapsed() < KNOWN => Duration::ZERO,
        Some(_) => during.min(LEAST),
        None => during,
    };
    let since = before.map_or(begin, |of| of.since);
    loop {
        let now = Counters::read(root, disk)?;
        if now.inflight == 0 || now.completed != first.completed {
            known().remove(&key);
            return None;
        }
        if begin.elapsed() >= during {
            known().insert(key, StoodStill { since, found: Instant::now(), completed: now.completed });
            return Some(Still { requests: now.inflight, during: since.elapsed() });
        }
        std::thread::sleep(PAUSE);
    }
}

struct Counters {
    inflight: u64,
    completed: u64,
}

impl Counters {
    /// Reads `inflight` and `stat` (`Documentation/block/stat.rst`).
    fn read(root: &Root, disk: &Path) -> Option<Self> {
        let inflight = in_driver(&root.read(disk.join("inflight")).ok()?)?;
        let completed = Requests::parse(&root.read(disk.join("stat")).ok()?)?.completed;
        Some(Self { inflight, completed })
    }
}

/// Starts a child process that only writes the value, when it gets a byte by the pipe that is
/// returned; without, it ends.
fn spawn(path: &Path, value: &[u8]) -> io::Result<(libc::pid_t, OwnedFd)> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let (wait, go) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    // SAFETY: fork(2) copies this process; the child runs the branch below only, which calls
    // nothing but functions that are safe after a fork of a process with threads
    // (signal-safety(7)), on memory that was prepared before, and ends itself.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            // SAFETY: as above; `path` ends with a zero byte and `value` has `value.len()` bytes.
            unsafe {
                // Locks of ours must not live on in the child.
                libc::dup2(wait.as_raw_fd(), 0);
                libc::syscall(libc::SYS_close_range, 1, libc::c_uint::MAX, 0);
                let mut byte = 0_u8;
                if libc::read(0, (&raw mut byte).cast(), 1) != 1 {
                    libc::_exit(libc::ECANCELED);
                }
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
        pid => Ok((pid, go)),
    }
}

/// Result of the write of a child process; `None` while it is under way.
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
