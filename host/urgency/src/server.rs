//! Server of `ivshmem-doorbell` devices (QEMU's `docs/specs/ivshmem-spec.rst`): it gives each QEMU
//! that connects the page's memory and two eventfds, and nothing else.
//!
//! QEMU needs the server only when it starts: the process that follows the page takes the eventfd
//! from QEMU itself ([`take_eventfd`]), by the number that the kernel gives each eventfd. So this
//! process and that one may be restarted at any time.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rtvirtio_apply::{ApplyError, StateDir};
use rtvirtio_urgency::page::LEAST_SIZE;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use serde::{Deserialize, Serialize};

use crate::UrgencyError;

/// Version of the protocol between server and QEMU.
const PROTOCOL: i64 = 0;
/// Peer numbers of the host and of QEMU.
const HOST: i64 = 0;
const GUEST: i64 = 1;
/// Interval at which `cancelled` is checked.
const LISTEN: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
/// Message number that announces the shared memory.
const MEMORY: i64 = -1;
/// Value for the doorbell register that signals the host's only vector: peer and vector.
pub const DOORBELL: u32 = (HOST as u32) << 16;

/// Data for the process that follows the page; in a file next to the socket.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Served {
    /// Number `eventfd-id` of the host's eventfd (proc_pid_fdinfo(5)).
    doorbell: u64,
}

fn sibling_path(socket: &Path, extension: &str) -> PathBuf {
    let mut name = socket.as_os_str().to_owned();
    name.push(extension);
    name.into()
}

/// Directory of a socket, in which no other user can put a file or a link, and the name of the
/// socket in it.
fn place(socket: &Path) -> Result<(StateDir, &str), UrgencyError> {
    let parent = socket.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = socket.file_name().and_then(OsStr::to_str);
    let name = name.ok_or_else(|| UrgencyError::io("use", socket)(io::ErrorKind::InvalidInput.into()))?;
    match StateDir::open(parent) {
        Ok(dir) => Ok((dir, name)),
        Err(ApplyError::UntrustedState { path, why }) => Err(UrgencyError::Place { dir: path, why }),
        Err(e) => Err(e.into()),
    }
}

#[must_use]
pub fn memory_file(socket: &Path) -> PathBuf {
    sibling_path(socket, ".page")
}

/// Socket at which QEMU gets memory and doorbell.
#[derive(Debug)]
pub struct Server {
    listener: UnixListener,
    socket: PathBuf,
    dir: StateDir,
    memory: File,
    /// QEMU's connection: QEMU would take its end for the end of its peer.
    connected: Option<UnixStream>,
    /// Locked as long as it listens.
    _lock: File,
}

impl Server {
    /// Listens at a socket that only this user can connect to, in a directory that no other user
    /// can write to. The memory's file stays when the server ends, and is used again; a socket
    /// without a server is replaced.
    ///
    /// # Errors
    /// When another server listens there, or a file cannot be made.
    pub fn bind(socket: &Path) -> Result<Self, UrgencyError> {
        let (dir, name) = place(socket)?;
        let page = memory_file(socket);
        let opened = |extension: &str| dir.open_file(&format!("{name}{extension}"), 0o600);
        let memory = opened(".page").map_err(UrgencyError::io("open", &page))?;
        memory.set_len(LEAST_SIZE as u64).map_err(UrgencyError::io("size", &page))?;
        let path = sibling_path(socket, ".lock");
        let lock = opened(".lock").map_err(UrgencyError::io("open", &path))?;
        match rtvirtio_kernel::flock::lock(&lock) {
            Ok(true) => {}
            Ok(false) => return Err(UrgencyError::io("listen at", socket)(io::ErrorKind::AddrInUse.into())),
            Err(e) => return Err(UrgencyError::io("lock", path)(e)),
        }
        // As this process has the lock, no server listens at it.
        if fs::symlink_metadata(socket).is_ok_and(|m| m.file_type().is_socket()) {
            fs::remove_file(socket).map_err(UrgencyError::io("remove", socket))?;
        }
        let listener = UnixListener::bind(socket).map_err(UrgencyError::io("listen at", socket))?;
        fs::set_permissions(socket, fs::Permissions::from_mode(0o600))
            .map_err(UrgencyError::io("chmod", socket))?;
        Ok(Self { listener, socket: socket.to_owned(), dir, memory, connected: None, _lock: lock })
    }

    /// Waits for a QEMU and sends it memory and eventfds; false when `cancelled` returns true
    /// first. The connection of the previous QEMU, which must have ended, is closed.
    pub fn serve_one(&mut self, cancelled: &dyn Fn() -> bool) -> Result<bool, UrgencyError> {
        let failed = |e: io::Error| UrgencyError::io("serve", &self.socket)(e);
        loop {
            if cancelled() {
                return Ok(false);
            }
            let mut listener = [PollFd::new(&self.listener, PollFlags::IN)];
            match poll(&mut listener, Some(&LISTEN)) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => break,
                Err(e) => return Err(failed(e.into())),
            }
        }
        let (stream, _) = self.listener.accept().map_err(failed)?;
        // A peer that disconnects here is no QEMU, and does not affect the last one's files.
        send(&stream, PROTOCOL, None).map_err(|e| failed(e.into()))?;
        self.connected = None;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let event = || eventfd(0, flags).map_err(|e| failed(e.into()));
        let (host, guest) = (event()?, event()?);
        let doorbell = eventfd_id(std::process::id(), host.as_raw_fd().unsigned_abs()).map_err(failed)?;
        let doorbell = doorbell.ok_or_else(|| {
            failed(io::Error::new(io::ErrorKind::Unsupported, "this kernel numbers no eventfds (Linux 5.2)"))
        })?;
        // Written before QEMU can run its guest.
        let path = sibling_path(&self.socket, ".json");
        let text = serde_json::to_vec(&Served { doorbell }).map_err(|e| failed(e.into()))?;
        let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
        self.dir.replace(name, 0o600, &text).map_err(UrgencyError::io("write", &path))?;
        let send = |number, fd| send(&stream, number, fd).map_err(|e| failed(e.into()));
        send(GUEST, None)?;
        send(MEMORY, Some(self.memory.as_fd()))?;
        send(HOST, Some(host.as_fd()))?;
        send(GUEST, Some(guest.as_fd()))?;
        self.connected = Some(stream);
        Ok(true)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The lock is still held, so the socket is this server's.
        let _ = fs::remove_file(&self.socket);
    }
}

/// Sends a message: 8 bytes, little-endian, with at most one descriptor.
fn send(stream: &UnixStream, number: i64, fd: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
    let bytes = number.to_le_bytes();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = fd.map(|fd| [fd]);
    if let Some(fds) = &fds {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    // Eight bytes are sent in one piece.
    sendmsg(stream, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL).map(drop)
}

/// Number that the kernel has given an eventfd of a process; `None` for any other file.
fn eventfd_id(pid: u32, fd: u32) -> io::Result<Option<u64>> {
    let text = fs::read_to_string(format!("/proc/{pid}/fdinfo/{fd}"))?;
    let id = text.lines().find_map(|line| line.strip_prefix("eventfd-id:"));
    Ok(id.and_then(|id| id.trim().parse().ok()))
}

/// Doorbell of the page at a socket, taken from the QEMU that got it there.
///
/// # Errors
/// When QEMU does not have it, as when it was connected to an earlier server of the socket.
pub fn take_eventfd(vm: &str, socket: &Path, qemu: u32) -> Result<OwnedFd, UrgencyError> {
    let path = sibling_path(socket, ".json");
    // The path of the socket comes from QEMU.
    let (dir, name) = place(socket)?;
    let text = dir.read(&format!("{name}.json")).map_err(UrgencyError::io("read", &path))?;
    let served: Served =
        serde_json::from_slice(&text).map_err(|e| UrgencyError::io("read", &path)(e.into()))?;
    let missing = |why: String| UrgencyError::NoMemory { vm: vm.to_owned(), why };
    let pid = i32::try_from(qemu).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| missing(format!("there is no process {qemu}")))?;
    let failed = |e: rustix::io::Errno| UrgencyError::io("take the doorbell of", socket)(e.into());
    let process = pidfd_open(pid, PidfdFlags::empty()).map_err(failed)?;
    let dir = PathBuf::from(format!("/proc/{qemu}/fd"));
    for entry in fs::read_dir(&dir).map_err(UrgencyError::io("list", &dir))?.flatten() {
        let Some(fd) = entry.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else { continue };
        // A descriptor that was closed meanwhile is skipped.
        if eventfd_id(qemu, fd).ok().flatten() != Some(served.doorbell) {
            continue;
        }
        let raw = i32::try_from(fd).unwrap_or(-1);
        let taken = pidfd_getfd(&process, raw, PidfdGetfdFlags::empty()).map_err(failed)?;
        // The number may be another file's by now.
        let id = eventfd_id(std::process::id(), taken.as_raw_fd().unsigned_abs()).ok().flatten();
        if id == Some(served.doorbell) {
            return Ok(taken);
        }
    }
    Err(missing(format!("{} was served to another QEMU: start this one again", socket.display())))
}
