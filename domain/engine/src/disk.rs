//! A disk of a running I/O domain: its part of a file, its configuration for the engine and the
//! control thread, and its server.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::sync::Arc;

use rtvirtio_domain_config::{Disk, OnFull};
use rtvirtio_domain_resources::OpenError;
use rtvirtio_domain_resources::backing::{Backing, BackingError};
use rtvirtio_domain_resources::disk_lock::Identity;
use rtvirtio_domain_resources::listen::SocketListener;
use rtvirtio_domain_resources::use_lock::UseLock;
use rtvirtio_sched::VmId;

use crate::engine::{self, EngineHandle};
use crate::error::DomainError;
use crate::memory::Trust;
use crate::vhost_user::{DeviceInfo, FrontEnds, VhostUserServer};

/// Part of a file that a disk occupies.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(crate) name: String,
    pub(crate) identity: Identity,
    start: u64,
    size: u64,
    /// Block size, in bytes: the size is a multiple of it.
    pub(crate) block: u32,
    pub(crate) shared: bool,
    pub(crate) read_only: bool,
    /// The file, for its length.
    file: Arc<File>,
}

impl Part {
    /// Part of a disk that is open.
    pub(crate) fn new(disk: &Disk, backing: &Backing) -> Result<Self, OpenError> {
        let file = backing.file.try_clone().map_err(|source| {
            let source = BackingError::Io { path: disk.path.clone(), what: "cannot inspect it", source };
            OpenError::Disk { disk: disk.name.clone(), source }
        })?;
        Ok(Self {
            name: disk.name.clone(),
            identity: backing.identity,
            start: backing.start,
            size: backing.limits.size,
            block: backing.block.max(backing.guest_block),
            shared: disk.allows_other_writers(),
            read_only: disk.read_only,
            file: Arc::new(file),
        })
    }

    /// The lock of a disk that may move.
    fn use_lock(&self) -> UseLock {
        UseLock::new(Arc::clone(&self.file), self.start, self.size, !self.read_only)
    }

    /// Copy with another size.
    pub(crate) fn with_size(&self, size: u64) -> Self {
        Self { size, ..self.clone() }
    }

    /// Size that the disk may have by now: up to the end of its file, in whole blocks.
    ///
    /// # Errors
    /// The length of the file or device cannot be read.
    pub(crate) fn room(&self) -> io::Result<u64> {
        // The offset is of no use to others: all I/O names its own.
        let len = (&*self.file).seek(SeekFrom::End(0))?;
        let block = u64::from(self.block);
        Ok(len.saturating_sub(self.start) / block * block)
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
    pub(crate) fn name(&self) -> &str {
        &self.part.name
    }

    /// Gives the disk a larger size, and its front end notice of it. `false` where none is
    /// connected that takes notices.
    ///
    /// # Errors
    /// The front end does not take the notice.
    pub(crate) fn grow(&mut self, size: u64) -> io::Result<bool> {
        self.part = self.part.with_size(size);
        self.server.config().set_size(size);
        self.server.config().notify()
    }
}

/// A disk as its engine serves it.
pub(crate) fn engine_disk(disk: &Disk, backing: Backing) -> engine::Disk {
    // A write beyond the end of a device that has gone finds no room either.
    let is_file = || backing.file.metadata().is_ok_and(|of| of.is_file());
    let waits_for_room = disk.on_full.map_or_else(is_file, |on_full| on_full == OnFull::Wait);
    engine::Disk {
        name: disk.name.clone(),
        backing,
        serial: disk.serial.clone().unwrap_or_else(|| disk.name.clone()),
        queues: disk.queues,
        waits_for_room,
    }
}

/// A disk as its control thread sees it.
pub(crate) fn disk_info(disk: &Disk, backing: &Backing, vm: VmId, part: &Part) -> DeviceInfo {
    DeviceInfo {
        name: disk.name.clone(),
        vm,
        features: crate::feature::blk::offered(&backing.limits),
        config: crate::blk::config_space(&backing.limits, disk.queues, [backing.guest_block, backing.block])
            .to_vec()
            .into(),
        queues: disk.queues,
        largest_queue: crate::inflight::MAX_QUEUE_SIZE,
        trust: Trust::new(disk.trust, disk.hugepages),
        has_inflight: true,
        use_lock: disk.migrate.then(|| Arc::new(part.use_lock())),
        first_uses: None,
        pinner: None,
    }
}

pub(crate) fn serve_disk(
    info: DeviceInfo,
    socket: SocketListener,
    engine: &EngineHandle,
    front_ends: &FrontEnds,
) -> Result<VhostUserServer, DomainError> {
    let device = format!("disk \"{}\"", info.name);
    // A disk that moves may have grown where its guest comes from.
    let first_uses = info.use_lock.is_some().then(|| Arc::clone(front_ends.first_uses()));
    let info = DeviceInfo { first_uses, ..info };
    VhostUserServer::start(info, socket, engine.clone(), front_ends)
        .map_err(|source| DomainError::Socket { device, source })
}
