//! Unix sockets at a path: bound with an explicit mode, removed at the end, and never in the place
//! of anything but a dead socket.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rtvirtio_domain_config::parent_dir;
use rtvirtio_kernel::{Root, process};
use rustix::fs::{AtFlags, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Connections waiting for accept.
const BACKLOG: i32 = 128;

/// A listening socket; its name is removed when it is dropped.
#[derive(Debug)]
pub struct SocketListener {
    path: PathBuf,
    /// Device and inode of the bound name: only that one is removed.
    identity: (u64, u64),
    listener: UnixListener,
}

impl SocketListener {
    /// Listens at `path`, for processes of the same user only (mode 0600). A dead socket there is
    /// replaced; any other file is not.
    ///
    /// # Errors
    /// [`io::ErrorKind::AddrInUse`] when another process listens there,
    /// [`io::ErrorKind::AlreadyExists`] when another kind of file is there; all errors of the
    /// kernel. The text contains the path.
    pub fn bind(path: &Path) -> io::Result<Self> {
        Self::bind_for_group(path, None)
    }

    /// Listens for members of a group too (mode 0660), given its id.
    ///
    /// # Errors
    /// As [`Self::bind`], or when the socket cannot be given to the group.
    pub fn bind_for_group(path: &Path, group: Option<u32>) -> io::Result<Self> {
        let bound = BoundSocket::bind(path, None, group)?;
        rustix::net::listen(&bound.listener.listener, BACKLOG).map_err(|e| named(path)(e.into()))?;
        Ok(bound.listener)
    }

    /// Listens on a socket that another process has bound at `path`: the listener is this process.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] when the name leads elsewhere; all errors of the kernel.
    pub fn adopt(path: &Path, socket: OwnedFd) -> io::Result<Self> {
        let meta = std::fs::symlink_metadata(path).map_err(named(path))?;
        let bound = rustix::net::getsockname(&socket).map_err(|e| named(path)(e.into()))?;
        let bound = SocketAddrUnix::try_from(bound).ok();
        let is_there = bound.and_then(|a| Some(a.path_bytes()? == path.as_os_str().as_bytes()));
        if !meta.file_type().is_socket() || is_there != Some(true) {
            let text = format!("{}: the socket is not bound there", path.display());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        rustix::net::listen(&socket, BACKLOG).map_err(|e| named(path)(e.into()))?;
        Ok(Self { path: path.to_owned(), identity: identity(&meta), listener: UnixListener::from(socket) })
    }
}

/// A bound socket of another process that does not listen yet.
#[derive(Debug)]
pub struct AdoptedSocket {
    /// Path at which it is bound.
    pub path: PathBuf,
    pub(crate) socket: OwnedFd,
}

impl AdoptedSocket {
    /// Starts to listen on the socket.
    pub fn listen(self) -> io::Result<SocketListener> {
        SocketListener::adopt(&self.path, self.socket)
    }
}

/// A bound socket that does not listen yet: connections are refused, and QEMU tries again.
#[derive(Debug)]
pub struct BoundSocket {
    listener: SocketListener,
}

impl BoundSocket {
    /// Binds as [`SocketListener::bind_for_group`] does. With an `owner` the name is that user's.
    pub fn bind(path: &Path, owner: Option<u32>, group: Option<u32>) -> io::Result<Self> {
        let named = named(path);
        let _lock = lock_directory(path);
        let socket = bind_socket(path).map_err(&named)?;
        let name = File::from(
            rustix::fs::open(path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
                .map_err(|e| named(e.into()))?,
        );
        let meta = name.metadata().map_err(&named)?;
        let listener = UnixListener::from(socket);
        let listener = SocketListener { path: path.to_owned(), identity: identity(&meta), listener };
        set_mode_and_owner(&name, &meta, owner, group).map_err(named)?;
        Ok(Self { listener })
    }

    /// Descriptor of the socket, for the process that will listen.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.listener.listener.as_fd()
    }

    /// Keeps the name, because another process listens on the socket.
    pub fn release(mut self) {
        self.listener.identity = (0, 0);
    }
}

impl SocketListener {
    /// The listener, for `accept` and polling.
    #[must_use]
    pub fn listener(&self) -> &UnixListener {
        &self.listener
    }
}

impl Drop for SocketListener {
    fn drop(&mut self) {
        // The name may be gone with its directory, and a file of another process stays.
        if std::fs::symlink_metadata(&self.path).is_ok_and(|there| identity(&there) == self.identity) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Lets one process at a time remove a dead socket in a directory and bind its own. Otherwise, of
/// two concurrent starts, the second takes the first one's socket, which does not listen yet, for
/// dead. An unavailable lock prevents nothing.
fn lock_directory(path: &Path) -> Option<File> {
    let dir = parent_dir(path);
    // Any user with access to the directory can hold its lock, so a process waits for it only once.
    static HELD: AtomicBool = AtomicBool::new(false);
    // own file
    let dir = File::open(dir).ok()?;
    let tries = if HELD.load(Ordering::Relaxed) { 1 } else { 200 };
    for _ in 0..tries {
        match rustix::fs::flock(&dir, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK | Errno::INTR) => std::thread::sleep(Duration::from_millis(5)),
            _ => return Some(dir),
        }
    }
    HELD.store(true, Ordering::Relaxed);
    None
}

fn named(path: &Path) -> impl Fn(io::Error) -> io::Error + '_ {
    move |e| io::Error::new(e.kind(), format!("{}: {e}", path.display()))
}

fn identity(meta: &Metadata) -> (u64, u64) {
    (meta.dev(), meta.ino())
}

/// Binds a socket without listening.
fn bind_socket(path: &Path) -> io::Result<OwnedFd> {
    let address = SocketAddrUnix::new(path)?;
    loop {
        let socket = socket(SocketFlags::CLOEXEC)?;
        // The name gets this mode, less the umask's bits (unix_bind_bsd of Linux): no other user
        // can connect before `set_mode_and_owner`.
        rustix::fs::fchmod(&socket, Mode::from_raw_mode(0o600))?;
        match rustix::net::bind(&socket, &address) {
            Err(Errno::ADDRINUSE) => remove_stale(path, &address)?,
            done => return done.map(|()| socket).map_err(Into::into),
        }
    }
}

fn socket(flags: SocketFlags) -> rustix::io::Result<OwnedFd> {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

/// Removes a socket without a listener.
fn remove_stale(path: &Path, address: &SocketAddrUnix) -> io::Result<()> {
    match probe(path, address)? {
        SocketState::Absent => Ok(()),
        SocketState::Stale(seen) => {
            // Another process may have bound the name meanwhile.
            let there = match std::fs::symlink_metadata(path) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
                other => other?,
            };
            if identity(&there) == seen { std::fs::remove_file(path) } else { Ok(()) }
        }
        SocketState::Listening(connected) => {
            let pid = connected.and_then(|connected| peer_pid(&connected).ok());
            Err(io::Error::new(io::ErrorKind::AddrInUse, in_use(pid)))
        }
        SocketState::NotASocket(kind) => Err(not_a_socket(kind)),
    }
}

/// The process at the other end of a connection.
pub(crate) fn peer_pid(connected: &OwnedFd) -> io::Result<u32> {
    let peer = rustix::net::sockopt::socket_peercred(connected)?;
    Ok(peer.pid.as_raw_nonzero().get().unsigned_abs())
}

/// Error text where another process listens at a path, with the remedy. A QEMU that listens is the
/// user's VM, set up for a back end that connects.
pub(crate) fn in_use(pid: Option<u32>) -> String {
    let program = pid.and_then(|pid| process::program(&Root::default(), pid).ok().flatten());
    let program = program.unwrap_or_default();
    match pid {
        Some(pid) if program.starts_with("qemu") || program == "kvm" => format!(
            "a QEMU, process {pid}, listens there itself (server=on; libvirt's mode='server'): the I/O domain listens and QEMU connects, so start that VM with reconnect-ms=20 (QEMU before 9.2: reconnect=1) in place of server=on, or with mode='client'"
        ),
        Some(pid) => format!("process {pid} listens there; stop it, or choose another path"),
        None => "another process listens there; stop it, or choose another path".to_owned(),
    }
}

/// The error where a path leads to another kind of file.
pub(crate) fn not_a_socket(kind: &str) -> io::Error {
    let text = format!("there is {kind}, which is not removed; choose another path");
    io::Error::new(io::ErrorKind::AlreadyExists, text)
}

/// State of a socket's path.
#[derive(Debug)]
pub(crate) enum SocketState {
    /// No file at the path.
    Absent,
    /// A dead socket; device and inode.
    Stale((u64, u64)),
    /// A socket with a listener; connected, unless its backlog is full.
    Listening(Option<OwnedFd>),
    /// A file of another kind, in words.
    NotASocket(&'static str),
}

/// Probes a path, and connects to a socket there without waiting.
pub(crate) fn probe(path: &Path, address: &SocketAddrUnix) -> io::Result<SocketState> {
    let meta = match std::fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(SocketState::Absent),
        other => other?,
    };
    let kind = meta.file_type();
    if !kind.is_socket() {
        return Ok(SocketState::NotASocket(match () {
            () if kind.is_file() => "a regular file",
            () if kind.is_dir() => "a directory",
            () if kind.is_symlink() => "a symbolic link",
            () if kind.is_block_device() => "a block device",
            () => "something that is no socket",
        }));
    }
    let probe = socket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
    match rustix::net::connect(&probe, address) {
        // A full backlog (EAGAIN) belongs to a listener too.
        Ok(()) => Ok(SocketState::Listening(Some(probe))),
        // `PROTOTYPE`: a socket of another type, such as syslog's.
        Err(Errno::AGAIN | Errno::INPROGRESS | Errno::PROTOTYPE) => Ok(SocketState::Listening(None)),
        Err(Errno::CONNREFUSED) => Ok(SocketState::Stale(identity(&meta))),
        Err(Errno::NOENT) => Ok(SocketState::Absent),
        Err(e) => Err(io::Error::new(
            io::Error::from(e).kind(),
            format!("cannot find out whether another process listens there: {}", io::Error::from(e)),
        )),
    }
}

/// Sets mode and group of a bound name through its descriptor: the path may lead to another file by
/// now.
fn set_mode_and_owner(
    name: &File,
    meta: &Metadata,
    owner: Option<u32>,
    group: Option<u32>,
) -> io::Result<()> {
    if !meta.file_type().is_socket() {
        return Err(io::Error::other("another process has replaced the socket"));
    }
    if let Some(owner) = owner.filter(|owner| *owner != meta.uid()) {
        rustix::fs::chownat(name.as_fd(), c"", Some(Uid::from_raw(owner)), None, AtFlags::EMPTY_PATH)
            .map_err(|e| {
                let e = io::Error::from(e);
                io::Error::new(e.kind(), format!("cannot give the socket to user {owner}: {e}"))
            })?;
    }
    let mode = if let Some(group) = group {
        rustix::fs::chownat(name.as_fd(), c"", None, Some(Gid::from_raw(group)), AtFlags::EMPTY_PATH)
            .map_err(|e| {
                let e = io::Error::from(e);
                io::Error::new(e.kind(), format!("cannot give the socket to group {group}: {e}"))
            })?;
        0o660
    } else {
        0o600
    };
    // chmod(2) accepts no `O_PATH` descriptor before Linux 6.6; its name in /proc works.
    let through = format!("/proc/self/fd/{}", name.as_raw_fd());
    std::fs::set_permissions(through, std::fs::Permissions::from_mode(mode))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    fn mode(path: &Path) -> u32 {
        std::fs::symlink_metadata(path).unwrap().mode() & 0o7777
    }

    /// Files other than sockets stay, and the error names their kind.
    #[test]
    fn only_a_socket_is_replaced() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let path = dir.path().join("s");
        std::fs::write(&path, "precious").unwrap();
        let refused = SocketListener::bind(&path).unwrap_err();
        assert!(refused.to_string().contains("a regular file, which is not removed"), "{refused}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let refused = SocketListener::bind(&link).unwrap_err();
        assert!(refused.to_string().contains("a symbolic link"), "{refused}");
        assert!(link.symlink_metadata().unwrap().is_symlink());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
        let refused = SocketListener::bind(dir.path()).unwrap_err();
        assert!(refused.to_string().contains("a directory"), "{refused}");
        // A dead socket.
        std::fs::remove_file(&path).unwrap();
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        drop(SocketListener::bind(&path).unwrap());
        assert!(!path.exists());
    }

    #[test]
    fn a_socket_of_another_type_is_in_use() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let path = dir.path().join("s");
        let _log = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
        assert_eq!(SocketListener::bind(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
    }

    #[test]
    fn modes_are_explicit() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let path = dir.path().join("s");
        let listening = SocketListener::bind(&path).unwrap();
        assert_eq!(mode(&path), 0o600);
        drop(listening);
        // Giving a socket to one's own group needs no privileges.
        let group = rustix::process::getgid().as_raw();
        let listening = SocketListener::bind_for_group(&path, Some(group)).unwrap();
        assert_eq!((mode(&path), path.symlink_metadata().unwrap().gid()), (0o660, group));
        assert!(UnixStream::connect(&path).is_ok());
        drop(listening);
        if rustix::process::geteuid().is_root() {
            let listening = SocketListener::bind_for_group(&path, Some(65_534)).unwrap();
            assert_eq!(path.symlink_metadata().unwrap().gid(), 65_534);
            drop(listening);
        }
    }
}
