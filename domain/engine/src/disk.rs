//! A disk of a running I/O domain: its part of a file, its configuration for the engine and the
//! control thread, and its server.

use rtvirtio_domain_config::Disk;
use rtvirtio_domain_resources::backing::Backing;
use rtvirtio_domain_resources::disk_lock::Identity;
use rtvirtio_domain_resources::listen::SocketListener;

use crate::confine::StartThread;
use crate::engine::{self, EngineHandle};
use crate::error::DomainError;
use crate::memory::Trust;
use crate::vhost_user::{DeviceInfo, VhostUserServer};

/// Part of a file that a disk occupies.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(crate) name: String,
    pub(crate) identity: Identity,
    start: u64,
    size: u64,
    pub(crate) shared: bool,
    pub(crate) read_only: bool,
}

impl Part {
    pub(crate) fn new(disk: &Disk, backing: &Backing) -> Self {
        Self {
            name: disk.name.clone(),
            identity: backing.identity,
            start: backing.start,
            size: backing.limits.size,
            shared: disk.shared,
            read_only: disk.read_only,
        }
    }

    /// Size of the part, in bytes.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        let is_meant = (self.shared && other.shared) || (self.read_only && other.read_only);
        !is_meant
            && self.identity == other.identity
            && self.start < other.start + other.size
            && other.start < self.start + self.size
    }
}

/// A disk that is served.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) part: Part,
    pub(crate) server: VhostUserServer,
}

impl Member {
    pub(crate) fn new(part: Part, server: VhostUserServer) -> Self {
        Self { part, server }
    }

    pub(crate) fn name(&self) -> &str {
        &self.part.name
    }

    pub(crate) fn server(&self) -> &VhostUserServer {
        &self.server
    }
}

/// A disk as its engine serves it.
pub(crate) fn engine_disk(disk: &Disk, backing: Backing) -> engine::Disk {
    engine::Disk {
        name: disk.name.clone(),
        backing,
        serial: disk.serial.clone().unwrap_or_else(|| disk.name.clone()),
        queues: disk.queues,
    }
}

/// A disk as its control thread sees it.
pub(crate) fn disk_info(disk: &Disk, backing: &Backing, vm: usize) -> DeviceInfo {
    DeviceInfo {
        name: disk.name.clone(),
        vm,
        features: crate::feature::blk::offered(&backing.limits),
        config: crate::blk::config_space(&backing.limits, disk.queues, [backing.guest_block, backing.block])
            .to_vec(),
        queues: disk.queues,
        largest_queue: crate::inflight::MAX_QUEUE_SIZE,
        trust: Trust::new(disk.trust, disk.hugepages),
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
