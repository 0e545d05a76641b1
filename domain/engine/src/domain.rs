//! A running I/O domain: all devices and networks of a configuration.

use std::io;
use std::path::{Path, PathBuf};

use crate::backing::{Backing, BackingConfig, BackingError};
use crate::check::take_locks;
use crate::config::{Disk, File, Poll};
use crate::confine::{Confine, Spawner, StartThread};
use crate::disk_lock::{DiskLock, DiskUse, Identity, identity};
use crate::engine::{self, Engine, EngineConfig, EngineError, EngineHandle};
use crate::listen::SocketListener;
use crate::net::uplink::UplinkError;
use crate::network::OpenedNetwork;
use crate::running::{Member, Running, RunningParts};
use crate::socket_group;
use crate::vhost_user::{DeviceInfo, VhostUserServer};

/// Causes for which an I/O domain does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DomainError {
    /// A disk cannot be opened.
    #[error("disk \"{disk}\": {source}")]
    Disk {
        /// Name of the disk.
        disk: String,
        /// Error of its backing.
        source: BackingError,
    },
    /// Two disks of which one is written overlap.
    #[error(
        "disks \"{first}\" and \"{second}\" lie on the same part of one file, and at least one of them is written; give each its own part, or set `shared = true` for both if their guests coordinate their writes"
    )]
    Overlap {
        /// Name of the first disk.
        first: String,
        /// Name of the second disk.
        second: String,
    },
    /// Two paths of the configuration lead to the same file.
    #[error("{first} and {second} lead to the same file, {}; give each its own", path.display())]
    Collision {
        /// Key and owner of the first path.
        first: String,
        /// Key and owner of the second path.
        second: String,
        /// The second path, as configured.
        path: PathBuf,
    },
    /// A socket, group or directory that cannot be used.
    #[error("{what}: {source}")]
    Path {
        /// Key of the path, and its disk or port.
        what: String,
        /// The cause, with the path.
        source: io::Error,
    },
    /// The uplink of a port cannot be opened.
    #[error("port \"{port}\": {source}")]
    Uplink {
        /// Name of the port.
        port: String,
        /// Error of the tap or interface.
        source: UplinkError,
    },
    /// A network cannot start.
    #[error("network \"{network}\": {source}")]
    Network {
        /// Name of the network.
        network: String,
        /// Error of its thread or uplink.
        source: EngineError,
    },
    /// An engine cannot start.
    #[error("device \"{device}\": {source}")]
    Engine {
        /// Name of the device.
        device: String,
        /// Error of its thread.
        source: EngineError,
    },
    /// A socket cannot be served.
    #[error("{device}: {source}")]
    Socket {
        /// Disk or port of the socket, with its name.
        device: String,
        /// Error of the listener or its thread.
        source: io::Error,
    },
}

impl DomainError {
    pub(crate) fn path(disk: &Disk, key: &str, source: io::Error) -> Self {
        Self::Path { what: format!("`{key}` of disk \"{}\"", disk.name), source }
    }
}

/// All files, locks and sockets of an I/O domain, open. No guest is served yet: this is the moment
/// to drop the right to open anything else.
#[derive(Debug)]
pub struct OpenedDomain {
    file: File,
    /// The disks of each device.
    backings: Vec<Vec<Backing>>,
    sockets: Vec<Vec<SocketListener>>,
    locks: Vec<DiskLock>,
    networks: Vec<OpenedNetwork>,
}

/// A running I/O domain; it ends when this is dropped.
#[derive(Debug)]
pub struct Domain {
    // Servers end before the engines that they use.
    running: Running,
    engines: Vec<(String, Engine)>,
    /// Whether the rings of all networks are restricted.
    is_restricted: bool,
}

impl OpenedDomain {
    /// Opens all disks, then listens. QEMU may connect from now on; it waits.
    ///
    /// # Errors
    /// [`DomainError`]; nothing stays open then.
    pub fn open(file: &File) -> Result<Self, DomainError> {
        let OpenedDisks { backings, locks } = OpenedDisks::open(file, take_locks(None), |_| true)?;
        let mut sockets = Vec::new();
        for device in &file.devices {
            let listen = |disk: &crate::config::Disk| {
                let group = socket_group::resolve(disk.socket_group.as_deref())
                    .map_err(|source| DomainError::path(disk, "socket_group", source))?;
                SocketListener::bind_for_group(&disk.socket, group)
                    .map_err(|source| DomainError::path(disk, "socket", source))
            };
            sockets.push(device.disks.iter().map(listen).collect::<Result<Vec<_>, _>>()?);
        }
        let networks = file.networks.iter().map(OpenedNetwork::open).collect::<Result<_, _>>()?;
        Ok(Self { file: file.clone(), backings, sockets, locks, networks })
    }

    /// Starts all engines, then serves. Each thread is confined before it reads guest input.
    ///
    /// # Errors
    /// [`DomainError`]; no thread runs then.
    pub fn start(self, confine: &Confine) -> Result<Domain, DomainError> {
        let Self { file, backings, sockets, locks, networks } = self;
        let spawner = Spawner::start(confine).map_err(|source| DomainError::Path {
            what: "cannot start the thread that starts those of disks attached later".into(),
            source,
        })?;
        let mut engines = Vec::new();
        let mut places = Vec::new();
        for ((device, backings), sockets) in file.devices.iter().zip(backings).zip(sockets) {
            let mut members = Vec::new();
            let parts = device.disks.iter().zip(&backings).zip(sockets).enumerate();
            for (vm, ((disk, backing), socket)) in parts {
                members.push((Member::part_of(disk, backing), disk_info(disk, backing, vm), socket));
            }
            let disks = device.disks.iter().zip(backings).map(|(disk, b)| engine_disk(disk, b));
            let config = EngineConfig {
                name: device.name.clone(),
                cpus: device.cpus.clone(),
                fifo: device.fifo,
                poll: Poll::new(file.power, device.poll, device.fifo),
                pass_priority: device.pass_priority,
                confine: confine.clone(),
            };
            let started = Engine::start(config, &device.sched(), disks.collect())
                .map_err(|source| DomainError::Engine { device: device.name.clone(), source })?;
            let handle = started.handle();
            engines.push((device.name.clone(), started));
            let serve = |(part, info, socket)| {
                let server = serve_disk(info, socket, &handle, confine)?;
                Ok(Some(Member::new(part, server)))
            };
            places.push(members.into_iter().map(serve).collect::<Result<Vec<_>, DomainError>>()?);
        }
        let handles = engines.iter().map(|(name, e)| (name.clone(), e.handle())).collect();
        let pairs = file.networks.iter().zip(networks);
        let networks = pairs.map(|(network, opened)| opened.start(network, file.power, confine));
        let networks = networks.collect::<Result<Vec<_>, _>>()?;
        let is_restricted = networks.iter().all(|n| n.engine.is_restricted());
        let parts = RunningParts { places, locks, networks };
        let running = Running::new(file, handles, parts, Box::new(spawner));
        Ok(Domain { running, engines, is_restricted })
    }
}

/// The engine's part of a disk.
pub(crate) fn engine_disk(disk: &Disk, backing: Backing) -> engine::Disk {
    engine::Disk {
        name: disk.name.clone(),
        backing,
        serial: disk.serial.clone().unwrap_or_else(|| disk.name.clone()),
        queues: disk.queues,
    }
}

/// The vhost-user part of a disk.
pub(crate) fn disk_info(disk: &Disk, backing: &Backing, vm: usize) -> DeviceInfo {
    DeviceInfo {
        name: disk.name.clone(),
        vm,
        features: crate::feature::blk::offered(&backing.limits),
        config: crate::blk::config_space(&backing.limits, disk.queues, backing.block).to_vec(),
        queues: disk.queues,
        largest_queue: crate::inflight::MAX_QUEUE_SIZE,
        hugepages: disk.hugepages,
        has_inflight: true,
    }
}

/// Serves a disk's socket.
pub(crate) fn serve_disk(
    info: DeviceInfo,
    socket: SocketListener,
    engine: &EngineHandle,
    threads: &dyn StartThread,
) -> Result<VhostUserServer, DomainError> {
    let device = format!("disk \"{}\"", info.name);
    VhostUserServer::start(info, socket, engine.clone(), threads)
        .map_err(|source| DomainError::Socket { device, source })
}

/// The open and locked disks of a configuration.
#[derive(Debug)]
pub(crate) struct OpenedDisks {
    /// The disks of each device.
    pub(crate) backings: Vec<Vec<Backing>>,
    pub(crate) locks: Vec<DiskLock>,
}

impl OpenedDisks {
    /// Locks and opens all disks; refuses overlaps, and image formats of the disks that `checked`
    /// accepts. A start, `--check`, a dry run and an attach all come through here.
    pub(crate) fn open(
        file: &File,
        take: impl Fn(&Path, DiskUse) -> Result<DiskLock, BackingError>,
        checked: impl Fn(&Disk) -> bool,
    ) -> Result<Self, DomainError> {
        let locks = lock_files(file, take)?;
        let backings = open_backings(file, &locks, &checked)?;
        Ok(Self { backings, locks })
    }
}

/// Locks each file and device once, whatever the number of its disks.
fn lock_files(
    file: &File,
    take: impl Fn(&Path, DiskUse) -> Result<DiskLock, BackingError>,
) -> Result<Vec<DiskLock>, DomainError> {
    let mut by_identity: Vec<(Identity, Vec<&Disk>)> = Vec::new();
    for disk in file.devices.iter().flat_map(|d| &d.disks) {
        let meta = std::fs::metadata(&disk.path).map_err(|source| DomainError::Disk {
            disk: disk.name.clone(),
            source: BackingError::Io { path: disk.path.clone(), what: "cannot open", source },
        })?;
        let identity = identity(&meta);
        match by_identity.iter_mut().find(|(known, _)| *known == identity) {
            Some((_, disks)) => disks.push(disk),
            None => by_identity.push((identity, vec![disk])),
        }
    }
    let lock = |(_, disks): (Identity, Vec<&Disk>)| {
        let wanted =
            DiskUse { read_only: disks.iter().all(|d| d.read_only), shared: disks.iter().all(|d| d.shared) };
        take(&disks[0].path, wanted)
            .map_err(|source| DomainError::Disk { disk: disks[0].name.clone(), source })
    };
    by_identity.into_iter().map(lock).collect()
}

/// Opens all disks; refuses other image formats and overlaps.
fn open_backings(
    file: &File,
    locks: &[DiskLock],
    checked: &impl Fn(&Disk) -> bool,
) -> Result<Vec<Vec<Backing>>, DomainError> {
    let mut backings: Vec<Vec<Backing>> = Vec::new();
    for device in &file.devices {
        let open = |disk: &Disk| {
            open_locked(disk, locks, checked(disk))
                .map_err(|source| DomainError::Disk { disk: disk.name.clone(), source })
        };
        backings.push(device.disks.iter().map(open).collect::<Result<_, _>>()?);
    }
    refuse_overlaps(file, &backings)?;
    for lock in locks {
        refuse_formats(file, &backings, lock, checked)?;
    }
    Ok(backings)
}

fn open_locked(disk: &Disk, locks: &[DiskLock], checked: bool) -> Result<Backing, BackingError> {
    let io = |source| BackingError::Io { path: disk.path.clone(), what: "cannot open", source };
    let there = identity(&std::fs::metadata(&disk.path).map_err(io)?);
    let lock = locks.iter().find(|lock| lock.identity == there);
    let lock = lock.ok_or_else(|| BackingError::Replaced { path: disk.path.clone() })?;
    // Checked before the size, which is the container's.
    if checked && disk.format.is_none() {
        lock.refuse_format(disk.offset.0, None)?;
    }
    let mut backing = Backing::open_locked(&BackingConfig::from(disk), lock)?;
    backing.limits.discard &= disk.discard;
    Ok(backing)
}

/// Checks the start and the end of a file for image formats, for its first and last disk. Disks
/// with `format = "raw"` are not checked: their guests may write any bytes, and no other disk of
/// the file is refused for it.
fn refuse_formats(
    file: &File,
    backings: &[Vec<Backing>],
    lock: &DiskLock,
    checked: impl Fn(&Disk) -> bool,
) -> Result<(), DomainError> {
    let disks = file.devices.iter().flat_map(|d| &d.disks).zip(backings.iter().flatten());
    let on_it: Vec<(&Disk, &Backing)> = disks.filter(|(_, b)| b.identity == lock.identity).collect();
    let first = on_it.iter().map(|(_, b)| b.start).min();
    let last = on_it.iter().map(|(_, b)| b.start + b.limits.size).max();
    for (disk, backing) in on_it.iter().filter(|(disk, _)| checked(disk) && disk.format.is_none()) {
        let failed = |source| DomainError::Disk { disk: disk.name.clone(), source };
        let end = lock.len().map_err(failed)?;
        let is_last = last == Some(backing.start + backing.limits.size);
        lock.refuse_format(backing.start, is_last.then_some(end)).map_err(failed)?;
        if first == Some(backing.start) && backing.start > 0 {
            lock.refuse_format(0, None).map_err(failed)?;
        }
    }
    Ok(())
}

fn refuse_overlaps(file: &File, backings: &[Vec<Backing>]) -> Result<(), DomainError> {
    let named = || {
        let disks = file.devices.iter().flat_map(|d| &d.disks);
        disks.zip(backings.iter().flatten()).enumerate()
    };
    for (i, (first, a)) in named() {
        for (_, (second, b)) in named().skip(i + 1) {
            let meant = first.shared && second.shared;
            if a.overlaps(b) && !meant && !(a.limits.read_only && b.limits.read_only) {
                return Err(DomainError::Overlap { first: first.name.clone(), second: second.name.clone() });
            }
        }
    }
    Ok(())
}

impl Domain {
    /// Handles of all engines.
    #[must_use]
    pub fn handles(&self) -> Vec<(String, EngineHandle)> {
        self.engines.iter().map(|(name, e)| (name.clone(), e.handle())).collect()
    }

    /// State of the running disks and ports, for threads that change or describe it.
    #[must_use]
    pub fn running(&self) -> Running {
        self.running.clone()
    }

    /// Whether the kernel refuses every io_uring operation that the engines do not use.
    #[must_use]
    pub fn is_ring_restricted(&self) -> bool {
        self.is_restricted && self.engines.iter().all(|(_, e)| e.is_restricted())
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        self.running.end();
        self.engines.clear();
    }
}
