//! All devices of a configuration, running.

use std::io;

use crate::backing::{Backing, BackingConfig, BackingError};
use crate::config::{Device, File};
use crate::confine::Confine;
use crate::engine::{self, Engine, EngineConfig, EngineError, EngineHandle};
use crate::frontend::{DiskInfo, Frontend};
use crate::listen::Listening;
use crate::reload::Reloader;

/// Why a domain does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DomainError {
    /// A disk.
    #[error("disk \"{disk}\": {source}")]
    Disk {
        /// Which.
        disk: String,
        /// Why.
        source: BackingError,
    },
    /// Two disks on the same bytes.
    #[error(
        "disks \"{first}\" and \"{second}\" lie on the same part of one file, and at least one of them is written; give each its own part, or say `shared = true` for both if their guests know of each other"
    )]
    Overlap {
        /// One.
        first: String,
        /// The other.
        second: String,
    },
    /// An engine.
    #[error("device \"{device}\": {source}")]
    Engine {
        /// Which.
        device: String,
        /// Why.
        source: EngineError,
    },
    /// A socket.
    #[error("disk \"{disk}\": {source}")]
    Socket {
        /// Which.
        disk: String,
        /// Why.
        source: io::Error,
    },
}

/// All that a domain reaches by a path, open: its disks, its locks, its sockets. Nobody is served yet, so this is the place to give up the right to open anything else.
#[derive(Debug)]
pub struct Opened {
    file: File,
    /// For each device, its disks.
    backings: Vec<Vec<Backing>>,
    sockets: Vec<Vec<Listening>>,
    locks: Vec<std::fs::File>,
}

/// A running domain; it ends when this is dropped.
#[derive(Debug)]
pub struct Domain {
    // Frontends end before the engines that they talk to.
    frontends: Vec<Frontend>,
    /// Files of which several disks are parts are locked once for all of them.
    _locks: Vec<std::fs::File>,
    engines: Vec<(String, Engine)>,
    file: File,
}

impl Opened {
    /// Opens all disks, then listens. A guest's QEMU may connect from here on; it waits.
    ///
    /// # Errors
    /// [`DomainError`]; nothing is left then.
    pub fn open(file: &File) -> Result<Self, DomainError> {
        let mut backings: Vec<Vec<Backing>> = Vec::new();
        for device in &file.devices {
            let mut disks: Vec<Backing> = Vec::new();
            for disk in &device.disks {
                // Disks of one file take its lock once; whether they collide is found out below.
                let mut config = BackingConfig::from(disk);
                config.shared |= file
                    .devices
                    .iter()
                    .flat_map(|d| &d.disks)
                    .any(|d| d.name != disk.name && d.path == disk.path);
                let mut backing = Backing::open(&config)
                    .map_err(|source| DomainError::Disk { disk: disk.name.clone(), source })?;
                backing.limits.discard &= disk.discard;
                disks.push(backing);
            }
            backings.push(disks);
        }
        refuse_overlaps(file, &backings)?;
        let locks = locks(file)?;
        let mut sockets = Vec::new();
        for device in &file.devices {
            let listen = |disk: &crate::config::Disk| {
                Listening::start(&disk.socket)
                    .map_err(|source| DomainError::Socket { disk: disk.name.clone(), source })
            };
            sockets.push(device.disks.iter().map(listen).collect::<Result<Vec<_>, _>>()?);
        }
        Ok(Self { file: file.clone(), backings, sockets, locks })
    }

    /// Starts all engines, then serves. Each thread is confined before it sees a byte of a guest's.
    ///
    /// # Errors
    /// [`DomainError`]; nothing runs then.
    pub fn start(self, confine: &Confine) -> Result<Domain, DomainError> {
        let Self { file, backings, sockets, locks } = self;
        let mut domain =
            Domain { frontends: Vec::new(), _locks: locks, engines: Vec::new(), file: file.clone() };
        for ((device, backings), sockets) in file.devices.iter().zip(backings).zip(sockets) {
            let infos: Vec<DiskInfo> = infos(device, &backings);
            let disks = device.disks.iter().zip(backings).map(|(disk, backing)| engine::Disk {
                name: disk.name.clone(),
                backing,
                serial: disk.serial.clone().unwrap_or_else(|| disk.name.clone()),
                queues: disk.queues,
            });
            let config = EngineConfig {
                name: device.name.clone(),
                cpus: device.cpus.clone(),
                fifo: device.fifo,
                poll: device.poll,
                pass_priority: device.pass_priority,
                confine: confine.clone(),
            };
            let started = Engine::start(config, &device.sched(), disks.collect())
                .map_err(|source| DomainError::Engine { device: device.name.clone(), source })?;
            let handle = started.handle();
            domain.engines.push((device.name.clone(), started));
            for (info, socket) in infos.into_iter().zip(sockets) {
                let disk = info.name.clone();
                let frontend = Frontend::start(info, socket, handle.clone(), confine)
                    .map_err(|source| DomainError::Socket { disk, source })?;
                domain.frontends.push(frontend);
            }
        }
        Ok(domain)
    }
}

fn infos(device: &Device, backings: &[Backing]) -> Vec<DiskInfo> {
    let infos = device.disks.iter().zip(backings).enumerate().map(|(vm, (disk, b))| DiskInfo {
        name: disk.name.clone(),
        vm,
        limits: b.limits,
        block: b.block,
        queues: disk.queues,
        hugepages: disk.hugepages,
    });
    infos.collect()
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
    /// To ask the engines.
    #[must_use]
    pub fn handles(&self) -> Vec<(String, EngineHandle)> {
        self.engines.iter().map(|(name, e)| (name.clone(), e.handle())).collect()
    }

    /// To give the engines another configuration while they serve.
    #[must_use]
    pub fn reloader(&self) -> Reloader {
        Reloader::new(self.file.clone(), self.handles())
    }

    /// Whether the kernel refuses every io_uring operation that the engines do not use.
    #[must_use]
    pub fn is_ring_restricted(&self) -> bool {
        self.engines.iter().all(|(_, e)| e.is_restricted())
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // All at once, and then each is waited for.
        self.frontends.iter().for_each(Frontend::close);
        self.frontends.clear();
        self.engines.clear();
    }
}

/// Locks of files that several disks are parts of.
fn locks(file: &File) -> Result<Vec<std::fs::File>, DomainError> {
    let mut by_path: std::collections::BTreeMap<_, Vec<_>> = std::collections::BTreeMap::new();
    for disk in file.devices.iter().flat_map(|d| &d.disks) {
        by_path.entry(&disk.path).or_default().push(disk);
    }
    let parted = by_path.values().filter(|disks| disks.len() > 1 && !disks.iter().all(|d| d.shared));
    parted
        .map(|disks| {
            let read_only = disks.iter().all(|d| d.read_only);
            crate::backing::lock_file(&disks[0].path, read_only)
                .map_err(|source| DomainError::Disk { disk: disks[0].name.clone(), source })
        })
        .collect()
}
