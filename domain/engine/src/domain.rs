//! A running I/O domain: all devices and networks of a configuration.

use std::sync::Arc;

use rtvirtio_domain_config::{Disk, File, Poll};
use rtvirtio_domain_resources::backing::Backing;
use rtvirtio_domain_resources::disk_lock::DiskLock;
use rtvirtio_domain_resources::disks::{OpenedDisks, take_locks};
use rtvirtio_domain_resources::listen::SocketListener;
use rtvirtio_domain_resources::{OpenError, socket_group};
use rtvirtio_sched::{IndexVec, VmId};

use crate::confine::{Confine, Role, Spawner};
use crate::disk::{Member, Part, disk_info, engine_disk, serve_disk};
use crate::engine::{Engine, EngineConfig, EngineHandle, buffers};
use crate::error::DomainError;
use crate::log::write_line;
use crate::memory::Pinner;
use crate::network::OpenedNetwork;
use crate::running::{Running, State};
use crate::vhost_user::{DeviceInfo, FrontEnds};

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
            let listen = |disk: &Disk| {
                let group = socket_group::resolve(disk.socket_group.as_deref())
                    .map_err(|source| OpenError::disk_path(disk, "socket_group", source))?;
                SocketListener::bind_for_group(&disk.socket, group)
                    .map_err(|source| OpenError::disk_path(disk, "socket", source))
            };
            sockets.push(device.disks.iter().map(listen).collect::<Result<Vec<_>, OpenError>>()?);
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
        let front_ends = Spawner::start(confine)
            .and_then(|threads| FrontEnds::start(Box::new(threads), confine))
            .map_err(|source| OpenError::Path {
                what: "cannot start the threads that serve front ends".into(),
                source,
            })?;
        let mut engines = Vec::new();
        let mut places = Vec::new();
        for ((device, backings), sockets) in file.devices.iter().zip(backings).zip(sockets) {
            let mut members = Vec::new();
            let parts = (0..).map(VmId).zip(device.disks.iter().zip(&backings).zip(sockets));
            let mut buffers = 0;
            for (vm, ((disk, backing), socket)) in parts {
                let part = Part::new(disk, backing)?;
                let pinner = pinner_of(disk, buffers);
                buffers = pinner.as_ref().map_or(buffers, |pinner| pinner.row().end);
                let info = DeviceInfo { pinner, ..disk_info(disk, backing, vm, &part) };
                members.push((part, info, socket));
            }
            let disks = device.disks.iter().zip(backings).map(|(disk, b)| engine_disk(disk, b));
            let config = EngineConfig {
                buffers,
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
                let server = serve_disk(info, socket, &handle, &front_ends)?;
                Ok(Some(Member { part, server }))
            };
            places.push(members.into_iter().map(serve).collect::<Result<IndexVec<_, _>, DomainError>>()?);
        }
        let handles = engines.iter().map(|(name, e)| (name.clone(), e.handle())).collect();
        let pairs = file.networks.iter().zip(networks);
        let networks = pairs.map(|(network, opened)| opened.start(network, file.power, confine, &front_ends));
        let networks = networks.collect::<Result<Vec<_>, _>>()?;
        let is_restricted = networks.iter().all(|n| n.engine.is_restricted());
        let running = Running::new(State { file, places, locks, networks }, handles, front_ends);
        let watched = running.clone();
        confine
            .spawn("iod-growth", Role::Control, move || watched.watch_first_uses())
            .map_err(|source| OpenError::Path { what: "cannot start a thread".into(), source })?;
        Ok(Domain { running, engines, is_restricted })
    }
}

/// The ring that pins the memory of a disk's guest, where its configuration says so, with places
/// in the engine's table from `row` on. Without one requests go as without the key.
fn pinner_of(disk: &Disk, row: u32) -> Option<Arc<Pinner>> {
    match buffers::pinner(disk.pin?, row) {
        Ok(pinner) => Some(Arc::new(pinner)),
        Err(e) => {
            let name = &disk.name;
            write_line(format_args!("{name}: `pin` has no effect here, it needs Linux 6.13: {e}"));
            None
        }
    }
}

impl Domain {
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
