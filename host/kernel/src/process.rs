//! `/proc/PID`: processes, their open files, and signals that reach no other process.
//!
//! Process ids are reused. [`ProcessId`] identifies a process for good by its start time and can be
//! stored; [`Process`] holds a pidfd (pidfd_open(2)) while this program runs.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, pidfd_open, pidfd_send_signal, waitpid};
use serde::{Deserialize, Serialize};

use crate::task::{self, Membership};
use crate::{HostError, Root, is_gone, unless_gone};

/// Process, identified by id and start time.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProcessId {
    /// Process id in this PID namespace.
    pub pid: u32,
    /// Start time in clock ticks since boot (proc_pid_stat(5), field 22).
    pub start_time: u64,
}

impl ProcessId {
    /// Process that has this id at the moment; `None` when there is none, or only a zombie.
    pub fn find(pid: u32) -> io::Result<Option<Self>> {
        Ok(start_time(pid)?.map(|start_time| Self { pid, start_time }))
    }

    /// Prefix of the name of a directory of this process, `rtvirtio-WHAT-PID-START-`: a directory
    /// left after `kill -9` can be told from one that a living process uses.
    #[must_use]
    pub fn prefix(what: &str) -> String {
        let pid = std::process::id();
        let start = start_time(pid).ok().flatten().unwrap_or_default();
        format!("rtvirtio-{what}-{pid}-{start}-")
    }

    /// Whether the process still runs. A zombie does not; with an unreadable `stat` it does.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        start_time(self.pid).map_or(true, |start| start == Some(self.start_time))
    }

    /// Terminates the process (SIGTERM) and kills it when it has not ended within `patience`.
    pub fn stop(&self, patience: Duration) {
        self.signal(Signal::TERM);
        if !self.wait(patience) {
            self.signal(Signal::KILL);
            // A process that SIGKILL does not end within the patience is stuck in the kernel.
            let _ = self.wait(patience);
        }
    }

    /// Sends a signal unless the process is gone. The start time is compared after the pidfd is
    /// open, so the id cannot be reused in between; without a certain match no signal is sent.
    pub fn signal(&self, signal: Signal) {
        let Ok(Some(process)) = Process::open(self.pid) else { return };
        if start_time(self.pid).is_ok_and(|start| start == Some(self.start_time)) {
            // A process that is gone already needs no signal.
            let _ = process.signal(signal);
        }
    }

    /// Waits until the process is gone; false when it still exists after `patience`. Reaps it when
    /// it is a child of this process.
    #[must_use]
    pub fn wait(&self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        while self.is_alive() {
            if Instant::now() > deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        if let Some(pid) = raw(self.pid) {
            // ECHILD for a process that is no child.
            let _ = waitpid(Some(pid), WaitOptions::NOHANG);
        }
        true
    }
}

/// Field 22 of `/proc/PID/stat`; `None` for a missing process or a zombie.
fn start_time(pid: u32) -> io::Result<Option<u64>> {
    match task::stat_at(&Root::default(), path(pid, "stat")) {
        Ok(stat) if matches!(stat.state, 'Z' | 'X') => Ok(None),
        Ok(stat) => Ok(Some(stat.start)),
        Err(e) if e.is_gone() => Ok(None),
        Err(e) => Err(e.into_io()),
    }
}

/// Process held by a pidfd: never another one that got the same id.
#[derive(Debug)]
pub struct Process {
    pid: Pid,
    fd: OwnedFd,
}

impl Process {
    /// Process that has this id at the moment; `None` when there is none.
    pub fn open(pid: u32) -> io::Result<Option<Self>> {
        let Some(id) = raw(pid) else { return Ok(None) };
        let fd = unless_gone(pidfd_open(id, PidfdFlags::empty()).map_err(io::Error::from))?;
        Ok(fd.map(|fd| Self { pid: id, fd }))
    }

    /// Process id at the time of `Process::open`.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// Sends a signal; none to a process that has ended, which is no error.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        unless_gone(pidfd_send_signal(&self.fd, signal).map_err(io::Error::from)).map(drop)
    }

    /// Waits for its end for at most `patience`; returns whether it has ended.
    pub fn has_ended(&self, patience: Duration) -> io::Result<bool> {
        let deadline = Instant::now() + patience;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).map_err(|_| io::ErrorKind::InvalidInput)?;
            // Readable from its end on, also for a zombie.
            match poll(&mut [PollFd::new(&self.fd, PollFlags::IN)], Some(&left)) {
                Ok(n) => return Ok(n > 0),
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Terminates the process (SIGTERM), and kills it (SIGKILL) when it has not ended within
    /// `patience`; returns whether it has ended after as long again.
    pub fn stop(&self, patience: Duration) -> io::Result<bool> {
        self.signal(Signal::TERM)?;
        if self.has_ended(patience)? {
            return Ok(true);
        }
        self.signal(Signal::KILL)?;
        self.has_ended(patience)
    }
}

fn raw(pid: u32) -> Option<Pid> {
    i32::try_from(pid).ok().and_then(Pid::from_raw)
}

/// Access mode of an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenMode {
    /// Whether it may be written to.
    pub writes: bool,
    /// Whether its reads and writes bypass the page cache (`O_DIRECT`).
    pub direct: bool,
}

/// Open descriptor of a process (proc_pid_fd(5), proc_pid_fdinfo(5)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    pid: u32,
    number: u32,
}

impl Descriptor {
    /// Number of the descriptor in its process.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// `/proc/PID/fd/N` on the host. Following it leads to the open file itself, also where its
    /// name is gone or in another mount namespace.
    #[must_use]
    pub fn link(&self) -> PathBuf {
        path(self.pid, "fd").join(self.number.to_string())
    }

    /// Target of the link, such as `/dev/sda`, `socket:[1234]` or `/x (deleted)`. Unlike following
    /// the link, reading it never waits for a file system's server.
    ///
    /// # Errors
    /// `NotFound` when it is closed meanwhile; as readlink(2) reports.
    pub fn target(&self, root: &Root) -> io::Result<PathBuf> {
        fs::read_link(root.at(self.link()))
    }

    /// Access mode, by `flags:` of `/proc/PID/fdinfo/N`. A program may change `O_DIRECT` at any
    /// time (fcntl(2)).
    ///
    /// # Errors
    /// `NotFound` when it is closed meanwhile; as read(2) reports; text of another form.
    pub fn mode(&self, root: &Root) -> io::Result<OpenMode> {
        let info = self.info(root)?;
        let text = info.lines().find_map(|line| line.strip_prefix("flags:"));
        let flags = text.and_then(|t| i32::from_str_radix(t.trim(), 8).ok());
        let flags = flags.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no flags in fdinfo"))?;
        let writes = flags & libc::O_ACCMODE != libc::O_RDONLY;
        Ok(OpenMode { writes, direct: flags & libc::O_DIRECT != 0 })
    }

    /// Ranges, first and last byte, of the open-file-description locks that this file holds, in
    /// `lock:` of `/proc/PID/fdinfo/N` (fcntl(2), F_OFD_SETLK).
    ///
    /// # Errors
    /// `NotFound` when it is closed meanwhile; as read(2) reports.
    pub fn file_locks(&self, root: &Root) -> io::Result<Vec<(u64, u64)>> {
        let info = self.info(root)?;
        let locks = info.lines().filter_map(|line| line.strip_prefix("lock:"));
        // `1: OFDLCK ADVISORY  READ -1 fe:00:9978033 100 101`; the last byte may be `EOF`.
        let range = |line: &str| {
            let words: Vec<&str> = line.split_ascii_whitespace().collect();
            let [.., first, last] = words[..] else { return None };
            let last = if last == "EOF" { Some(u64::MAX) } else { last.parse().ok() };
            words.contains(&"OFDLCK").then_some((first.parse().ok()?, last?))
        };
        Ok(locks.filter_map(range).collect())
    }

    /// Text of `/proc/PID/fdinfo/N`: flags in octal, locks.
    ///
    /// # Errors
    /// `NotFound` when it is closed meanwhile; as read(2) reports.
    pub fn info(&self, root: &Root) -> io::Result<String> {
        fs::read_to_string(root.at(path(self.pid, "fdinfo").join(self.number.to_string())))
    }
}

fn path(pid: u32, file: &str) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}/{file}"))
}

/// All processes, ascending; kernel threads are processes too.
pub fn pids(root: &Root) -> Result<Vec<u32>, HostError> {
    task::numbers(root, PathBuf::from("/proc"))
}

/// Id of the process or thread that was created last in this PID namespace (proc_loadavg(5)): as
/// long as it stays the same, none was created.
pub fn last_created(root: &Root) -> Result<u32, HostError> {
    const PATH: &str = "/proc/loadavg";
    let text = root.read(PATH)?;
    let last = text.split_whitespace().nth(4).and_then(|n| n.parse().ok());
    last.ok_or_else(|| task::form(PATH.into(), &text, "a load average with a process number"))
}

/// The open descriptors of a process, ascending.
pub fn descriptors(root: &Root, pid: u32) -> Result<Vec<Descriptor>, HostError> {
    let numbers = task::numbers(root, path(pid, "fd"))?;
    Ok(numbers.into_iter().map(|number| Descriptor { pid, number }).collect())
}

/// Process of a thread (`Tgid` in `/proc/TID/status`, which exists for every thread).
///
/// # Errors
/// When the thread is gone, or belongs to another pid namespace.
pub fn of_thread(root: &Root, tid: u32) -> Result<u32, HostError> {
    let path = path(tid, "status");
    let text = root.read(&path)?;
    let tgid = text.lines().find_map(|l| l.strip_prefix("Tgid:")).and_then(|t| t.trim().parse().ok());
    tgid.ok_or_else(|| task::form(path, "no Tgid", "a task's status"))
}

/// CPU time that all threads of a process have used, those that have ended included, in steps of 10
/// ms.
pub fn cpu_time(root: &Root, pid: u32) -> Result<Duration, HostError> {
    Ok(task::stat_at(root, path(pid, "stat"))?.cpu_time)
}

/// Full name of a process: unlike in `stat` not truncated for kernel threads since Linux 5.17.
pub fn name(root: &Root, pid: u32) -> Result<String, HostError> {
    let path = path(pid, "comm");
    let bytes = fs::read(root.at(&path)).map_err(|source| HostError::Read { path, source })?;
    Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
}

/// Path of a process's executable (`/proc/PID/exe`), also where an update has replaced its file
/// since; `None` for a process that has ended, and for a thread of the kernel.
///
/// # Errors
/// When the link cannot be read, as by another user.
pub fn executable(root: &Root, pid: u32) -> Result<Option<PathBuf>, HostError> {
    let path = path(pid, "exe");
    let link = fs::read_link(root.at(&path)).map_err(|source| HostError::Read { path, source });
    let Some(link) = unless_gone(link)? else { return Ok(None) };
    let replaced = link.as_os_str().as_bytes().strip_suffix(b" (deleted)");
    let replaced = replaced.map(|path| PathBuf::from(OsStr::from_bytes(path)));
    Ok(Some(replaced.unwrap_or(link)))
}

/// File name of a process's [`executable`], without the wrapping of NixOS
/// (`.qemu-system-x86_64-wrapped`). Any process gives itself a [`name`], as QEMU does with `-name
/// process=`; this one is the kernel's.
pub fn program(root: &Root, pid: u32) -> Result<Option<String>, HostError> {
    let Some(path) = executable(root, pid)? else { return Ok(None) };
    let file = path.file_name().unwrap_or_default().to_string_lossy();
    let wrapped = file.strip_prefix('.').and_then(|file| file.strip_suffix("-wrapped"));
    Ok(Some(wrapped.unwrap_or(&file).to_owned()))
}

/// The [`program`] of a process, or its [`name`] where only root and its owner may read that: of
/// another user's process nothing better can be seen without root.
pub fn program_or_name(root: &Root, pid: u32) -> Result<Option<String>, HostError> {
    match program(root, pid) {
        Err(e) if e.is_errno(Errno::ACCESS) => unless_gone(name(root, pid)),
        found => found,
    }
}

/// Whether a process runs an executable of this file name as root; no other user can start one so.
/// False for a process that has ended, and for a thread of the kernel.
pub fn is_of_root(root: &Root, pid: u32, file: &str) -> Result<bool, HostError> {
    Ok(program(root, pid)?.as_deref() == Some(file) && unless_gone(user(root, pid))? == Some(0))
}

/// Effective user of a process (proc_pid_status(5)).
pub fn user(root: &Root, pid: u32) -> Result<u32, HostError> {
    let path = path(pid, "status");
    let text = root.read(&path)?;
    let ids = text.lines().find_map(|line| line.strip_prefix("Uid:"));
    // Order: real, effective, saved, file system.
    let user = ids.and_then(|ids| ids.split_ascii_whitespace().nth(1)).and_then(|id| id.parse().ok());
    user.ok_or_else(|| task::form(path, "no Uid", "a task's status"))
}

/// Command line of a process (proc_pid_cmdline(5)), the program's name first; empty for a kernel
/// thread. A process can change the text that is read here. Bytes that are not UTF-8 are replaced.
pub fn command_line(root: &Root, pid: u32) -> Result<Vec<String>, HostError> {
    let path = path(pid, "cmdline");
    let bytes = fs::read(root.at(&path)).map_err(|source| HostError::Read { path, source })?;
    let bytes = bytes.strip_suffix(&[0]).unwrap_or(&bytes);
    if bytes.is_empty() {
        return Ok(Vec::new());
    }
    Ok(bytes.split(|b| *b == 0).map(|w| String::from_utf8_lossy(w).into_owned()).collect())
}

/// Bytes of a process that are locked into RAM, and all bytes that it has in RAM (`VmLck`,
/// `VmRSS`).
///
/// # Errors
/// When the process is gone, or is a kernel thread, which has no memory.
pub fn locked_memory(root: &Root, pid: u32) -> Result<(u64, u64), HostError> {
    let path = path(pid, "status");
    let text = root.read(&path)?;
    let bytes = |key: &str| {
        let line = text.lines().find_map(|l| l.strip_prefix(key))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    };
    bytes("VmLck:")
        .zip(bytes("VmRSS:"))
        .ok_or_else(|| task::form(path, "no VmLck", "the status of a process with memory"))
}

/// Soft limit of locked memory (RLIMIT_MEMLOCK) as the kernel prints it: bytes or `unlimited`.
/// `None` where the list has no such line. `pid` of `None` is this process.
pub fn memlock_limit(root: &Root, pid: Option<u32>) -> Result<Option<String>, HostError> {
    let text = root.read(pid.map_or("/proc/self/limits".into(), |pid| path(pid, "limits")))?;
    let line = text.lines().find_map(|l| l.strip_prefix("Max locked memory"));
    Ok(line.and_then(|l| l.split_whitespace().next()).map(str::to_owned))
}

/// Cgroups of a process's first thread, one for each hierarchy.
pub fn cgroups(root: &Root, pid: u32) -> Result<Vec<Membership>, HostError> {
    task::cgroups_at(root, &path(pid, "cgroup"))
}

/// Whether a process has a UNIX socket open that is bound to this path, such as QEMU its monitor's
/// (proc_net(5), proc_pid_fd(5)). The thread ids that a monitor in another PID namespace reports
/// name other threads here, and the wrong one must not become real-time.
pub fn serves(root: &Root, pid: u32, socket: &Path) -> Result<bool, HostError> {
    let table = root.read(path(pid, "net/unix"))?;
    let file = |path: &Path| fs::metadata(root.at(path)).ok().map(|m| (m.dev(), m.ino()));
    let ours = file(socket);
    let bound = |line: &str| {
        let mut fields = line.split_ascii_whitespace().skip(6);
        let inode = format!("socket:[{}]", fields.next()?);
        // Name as given to bind(2): it may be relative to a directory of QEMU's, or lead through
        // other links than ours.
        let name = Path::new(fields.next()?);
        let same = socket.ends_with(name) || (name.is_absolute() && ours.is_some() && file(name) == ours);
        same.then_some(inode)
    };
    let inodes: BTreeSet<String> = table.lines().filter_map(bound).collect();
    for descriptor in descriptors(root, pid)? {
        match descriptor.target(root) {
            Ok(link) if link.to_str().is_some_and(|l| inodes.contains(l)) => return Ok(true),
            Ok(_) => {}
            // Closed meanwhile.
            Err(e) if is_gone(&e) => {}
            Err(source) => return Err(HostError::Read { path: descriptor.link(), source }),
        }
    }
    Ok(false)
}

/// Process at the other end of a connection: for a client the one that called listen(2)
/// (`SO_PEERCRED` in unix(7)); `None` for one outside of this PID namespace.
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

#[cfg(test)]
mod tests;
