//! Disks for a running I/O domain. Its process opens no files, so another one (`rtvirtio iod
//! reload`) opens what the configuration adds, with the checks of a start, and passes open files,
//! locks and bound sockets over the control socket.
//!
//! All locks belong to open files (`flock`, `O_EXCL`, open-file-description locks), so they are
//! held without a gap, and last as long as the I/O domain keeps the files.

use std::collections::BTreeSet;
use std::fs::File as OpenFile;
use std::io::{self, IoSlice, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rtvirtio_domain_config::{Disk, File, parent_dir};
use rtvirtio_domain_protocol::Command;
use rtvirtio_domain_protocol::handover::{
    DISK_DESCRIPTORS, DiskFacts, LockFacts, PORT_DESCRIPTORS, PortFacts,
};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::backing::{Backing, BackingConfig, BackingError, Geometry};
use crate::disk_lock::{DiskLock, DiskUse, identity};
use crate::disks::{OpenedDisks, take_locks};
use crate::error::OpenError;
use crate::handover_port::{self, OpenedPort, PassedPort};
use crate::listen::{AdoptedSocket, BoundSocket};
use crate::socket_group;

/// A disk that this process has opened for a running I/O domain.
#[derive(Debug)]
pub struct OpenedDisk {
    facts: DiskFacts,
    backing: Backing,
    lock: OpenFile,
    socket: BoundSocket,
}

/// Opens the disks in `names` of a configuration, with the checks of a start, for the process `pid`
/// of the user `uid`, which may hold the locks of files that they share with its disks.
///
/// # Errors
/// The first error of a start; nothing stays open then.
pub fn open(file: &File, names: &BTreeSet<String>, pid: u32, uid: u32) -> Result<Vec<OpenedDisk>, OpenError> {
    let file = related(file, names)?;
    let opened = OpenedDisks::open(&file, take_locks(Some(pid)), |disk| names.contains(&disk.name))?;
    let disks = file.devices.iter().flat_map(|d| &d.disks).zip(opened.backings.into_iter().flatten());
    let own = rustix::process::geteuid().as_raw();
    let mut all = Vec::new();
    for (disk, backing) in disks.filter(|(disk, _)| names.contains(&disk.name)) {
        let lock = opened.locks.iter().find(|lock| lock.identity == backing.identity);
        let failed = |source| OpenError::Disk { disk: disk.name.clone(), source };
        let replaced = || failed(BackingError::Replaced { path: disk.path.clone() });
        let lock = lock.ok_or_else(replaced)?;
        let group = socket_group::resolve(disk.socket_group.as_deref())
            .map_err(|source| OpenError::disk_path(disk, "socket_group", source))?;
        let socket = BoundSocket::bind(&disk.socket, Some(uid).filter(|uid| *uid != own), group)
            .map_err(|source| OpenError::disk_path(disk, "socket", source))?;
        let copy = lock.file().try_clone();
        let io = |source| BackingError::Io { path: disk.path.clone(), what: "cannot pass on", source };
        let facts = DiskFacts {
            name: disk.name.clone(),
            path: disk.path.clone(),
            socket: disk.socket.clone(),
            len: backing.len,
            block: backing.block,
            discard: backing.limits.discard,
            direct: backing.direct,
            read_only: backing.limits.read_only,
            lock: lock.held().map(|held| LockFacts { read_only: held.read_only, shared: held.shared }),
        };
        all.push(OpenedDisk { facts, backing, lock: copy.map_err(|e| failed(io(e)))?, socket });
    }
    Ok(all)
}

/// The disks in `names`, and those on the same files: overlaps and locks concern these too.
fn related(file: &File, names: &BTreeSet<String>) -> Result<File, OpenError> {
    let identity_of = |disk: &Disk| std::fs::metadata(&disk.path).map(|meta| identity(&meta));
    let mut wanted = BTreeSet::new();
    for disk in file.devices.iter().flat_map(|d| &d.disks).filter(|d| names.contains(&d.name)) {
        let source = |source| BackingError::Io { path: disk.path.clone(), what: "cannot open", source };
        let id = identity_of(disk).map_err(source);
        wanted.insert(id.map_err(|source| OpenError::Disk { disk: disk.name.clone(), source })?);
    }
    let mut file = file.clone();
    for device in &mut file.devices {
        // A disk whose file is gone needs no check.
        device.disks.retain(|disk| identity_of(disk).is_ok_and(|id| wanted.contains(&id)));
    }
    Ok(file)
}

/// Disks and ports that this process has opened for a running I/O domain.
#[derive(Debug, Default)]
pub struct Opened {
    /// Disks with their files, locks and sockets.
    pub disks: Vec<OpenedDisk>,
    /// Ports with their uplinks and sockets.
    pub ports: Vec<OpenedPort>,
}

impl Opened {
    /// Opens disks and ports of a configuration, given by their names: as [`open`] and
    /// [`handover_port::open`].
    ///
    /// # Errors
    /// The first error of a start; nothing stays open then.
    pub fn open(
        file: &File,
        [disks, ports]: [&BTreeSet<String>; 2],
        pid: u32,
        uid: u32,
    ) -> Result<Self, OpenError> {
        let disks = if disks.is_empty() { Vec::new() } else { open(file, disks, pid, uid)? };
        Ok(Self { disks, ports: handover_port::open(file, ports, uid)? })
    }

    /// Sends a reload with these disks and ports over a connection to the control socket. The
    /// descriptors of each disk and then of each port precede the line, with a space of JSON.
    pub fn send_reload(&self, stream: &UnixStream, force: bool) -> io::Result<()> {
        self.disks.iter().try_for_each(|disk| send_descriptors(stream, &disk.descriptors()))?;
        self.ports.iter().try_for_each(|port| send_descriptors(stream, &port.descriptors()))?;
        let disks = self.disks.iter().map(|disk| disk.facts().clone()).collect();
        let ports = self.ports.iter().map(|port| port.facts().clone()).collect();
        let command = Command::Reload { force, disks, ports };
        (&mut &*stream).write_all(command.line()?.as_bytes())
    }

    /// Keeps the sockets, because the I/O domain serves them now.
    pub fn release(self) {
        self.disks.into_iter().for_each(OpenedDisk::release);
        self.ports.into_iter().for_each(OpenedPort::release);
    }
}

/// Sends up to [`DISK_DESCRIPTORS`] descriptors with a space of JSON, ahead of the line of a
/// command.
pub fn send_descriptors(stream: &UnixStream, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DISK_DESCRIPTORS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::other("no room for three descriptors: a defect"));
    }
    sendmsg(stream, &[IoSlice::new(b" ")], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

impl OpenedDisk {
    /// Properties for the request.
    #[must_use]
    pub fn facts(&self) -> &DiskFacts {
        &self.facts
    }

    /// Descriptors in the order of the request: file, lock, socket.
    #[must_use]
    pub fn descriptors(&self) -> [BorrowedFd<'_>; DISK_DESCRIPTORS] {
        [self.backing.file.as_fd(), self.lock.as_fd(), self.socket.fd()]
    }

    /// Keeps the socket, because the I/O domain serves the disk now.
    pub fn release(self) {
        self.socket.release();
    }
}

/// A disk that another process has opened for this one.
#[derive(Debug)]
pub struct PassedDisk {
    facts: DiskFacts,
    file: OpenFile,
    lock: OpenFile,
    socket: OwnedFd,
}

/// Disks and ports that another process has opened for this one.
#[derive(Debug, Default)]
pub struct Passed {
    /// Disks with their files, locks and sockets.
    pub disks: Vec<PassedDisk>,
    /// Ports with their uplinks and sockets.
    pub ports: Vec<PassedPort>,
}

impl Passed {
    /// Pairs facts and descriptors of a request; `None` where their numbers differ.
    #[must_use]
    pub fn pair(disks: Vec<DiskFacts>, ports: Vec<PortFacts>, descriptors: Vec<OwnedFd>) -> Option<Self> {
        let needed = disks.len() * DISK_DESCRIPTORS + ports.len() * PORT_DESCRIPTORS;
        if descriptors.len() != needed {
            return None;
        }
        let mut descriptors = descriptors.into_iter();
        let disks = disks.into_iter().map(|facts| PassedDisk::take(facts, &mut descriptors)).collect();
        let disks: Option<Vec<PassedDisk>> = disks;
        let ports = ports.into_iter().map(|facts| PassedPort::take(facts, &mut descriptors)).collect();
        let ports: Option<Vec<PassedPort>> = ports;
        Some(Self { disks: disks?, ports: ports? })
    }

    /// Whether nothing was passed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.disks.is_empty() && self.ports.is_empty()
    }
}

impl PassedDisk {
    fn take(facts: DiskFacts, descriptors: &mut impl Iterator<Item = OwnedFd>) -> Option<Self> {
        let (file, lock, socket) = (descriptors.next()?, descriptors.next()?, descriptors.next()?);
        Some(Self { facts, file: file.into(), lock: lock.into(), socket })
    }

    #[must_use]
    pub fn name(&self) -> &str {
        &self.facts.name
    }

    /// Takes the disk into this process, as the configuration has it.
    ///
    /// # Errors
    /// [`OpenError`] where the configuration has it otherwise by now.
    pub fn adopt(self, disk: &Disk) -> Result<AdoptedDisk, OpenError> {
        let failed = |source| OpenError::Disk { disk: disk.name.clone(), source };
        let io = |what| move |source: io::Error| BackingError::Io { path: disk.path.clone(), what, source };
        let Self { facts, file, lock, socket } = self;
        let (path, read_only, direct) = (&disk.path, disk.read_only, !disk.cached);
        let is_same = facts.path == *path && facts.socket == disk.socket;
        if !is_same || facts.read_only != read_only || facts.direct != direct {
            // The configuration was changed between the two reads of it.
            return Err(failed(BackingError::Replaced { path: path.clone() }));
        }
        let ids = file.metadata().and_then(|f| Ok((identity(&f), identity(&lock.metadata()?))));
        let (id, locked) = ids.map_err(io("cannot inspect it")).map_err(failed)?;
        if id != locked {
            return Err(failed(BackingError::Replaced { path: path.clone() }));
        }
        let geometry =
            Geometry { len: facts.len, block: facts.block, discard: facts.discard && disk.discard };
        let backing = Backing::with_geometry(&BackingConfig::from(disk), file, geometry).map_err(failed)?;
        let held = facts.lock.map(|l| DiskUse { read_only: l.read_only, shared: l.shared });
        let lock = held.map(|held| DiskLock::adopt(path, lock, held)).transpose();
        let lock = lock.map_err(io("cannot inspect it")).map_err(failed)?;
        let socket = AdoptedSocket { path: disk.socket.clone(), socket };
        Ok(AdoptedDisk { backing, lock, socket })
    }
}

/// A passed disk in this process.
#[derive(Debug)]
pub struct AdoptedDisk {
    /// Open file of the disk.
    pub backing: Backing,
    /// `None` where this process holds the lock already.
    pub lock: Option<DiskLock>,
    /// Bound socket that does not listen yet.
    pub socket: AdoptedSocket,
}

/// Directories from which an I/O domain may remove sockets.
#[must_use]
pub fn socket_directories(file: &File) -> BTreeSet<PathBuf> {
    let disks = file.devices.iter().flat_map(|d| &d.disks).map(|d| &d.socket);
    let ports = file.networks.iter().flat_map(|n| &n.ports).map(|p| &p.socket);
    disks.chain(ports).chain([&file.control]).map(|p| parent_dir(p).to_owned()).collect::<BTreeSet<_>>()
}

/// Whether a socket lies in one of some directories, by the text of its path.
#[must_use]
pub fn is_below(directories: &BTreeSet<PathBuf>, socket: &Path) -> bool {
    directories.contains(parent_dir(socket))
}
