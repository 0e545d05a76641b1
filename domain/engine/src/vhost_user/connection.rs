//! The vhost-user messages of one QEMU: features, memory, queues.

mod dirty_log;
mod slots;
mod start;

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vhost::VhostUserMemoryRegionBase;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVirtioFeatures, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Error, GpuBackend, Result, VhostUserBackendReqHandlerMut};

use self::dirty_log::WriteLog;
use super::DeviceInfo;
use super::descriptors;
use crate::engine::{EngineHandle, Kick, QueueCommand, QueueId};
use crate::inflight::Region;
use crate::memory::{GuestMem, MEMORY_SLOTS};

/// Largest configuration space, in bytes.
const CONFIG_SPACE: u32 = 256;

#[derive(Default)]
struct VringSetup {
    /// Number of descriptors; `None` until one is accepted, and after one that was refused: a queue
    /// that the front end takes to be of another size is not served.
    size: Option<u16>,
    /// Descriptor table, available and used ring, as QEMU addresses.
    addresses: Option<(u64, u64, u64)>,
    /// Guest address at which writes to the used ring are logged, if they are.
    log_address: Option<u64>,
    base: u16,
    kick: Option<Kick>,
    call: Option<File>,
    enabled: bool,
    running: bool,
}

/// State of a connection to a QEMU.
pub(super) struct Connection<C: From<QueueCommand>> {
    device: DeviceInfo,
    engine: EngineHandle<C>,
    features: u64,
    mem: Option<Arc<GuestMem>>,
    log: WriteLog,
    /// Sizes of regions that were reported as left out.
    left_out: Vec<u64>,
    /// Bytes that were reported as pinned, and as not.
    pinned: (u64, u64),
    inflight: Option<Arc<Region>>,
    queues: Vec<VringSetup>,
    /// Whether one of the queues is served.
    in_use: Arc<AtomicBool>,
    /// Version of the configuration space that the front end has read, or notice of which it has.
    config_version: Option<u64>,
}

fn log_and_reject(device: &str, what: &str, e: impl std::fmt::Display) -> Error {
    crate::log::line(device, format_args!("{what}: {e}"));
    Error::ReqHandlerError(io::Error::other(format!("{what}: {e}")))
}

/// Logs and refuses a message that this back end does not support.
fn reject<T>(device: &DeviceInfo, what: &str, why: &str) -> Result<T> {
    Err(log_and_reject(&device.name, what, why))
}

impl<C: From<QueueCommand>> Connection<C> {
    pub(super) fn new(device: DeviceInfo, engine: EngineHandle<C>, in_use: Arc<AtomicBool>) -> Self {
        let queues = (0..device.queues).map(|_| VringSetup::default()).collect();
        Self {
            device,
            engine,
            features: 0,
            mem: None,
            log: WriteLog::default(),
            left_out: Vec::new(),
            pinned: (0, 0),
            inflight: None,
            queues,
            in_use,
            config_version: None,
        }
    }

    /// Takes the channel to the front end. Returns whether there is one.
    pub(super) fn set_channel(&mut self, channel: Option<OwnedFd>) -> bool {
        let is_there = channel.is_some();
        self.device.config.set_channel(channel);
        is_there
    }

    /// Notifies the front end of contents that it has not read: QEMU ignores a notification before
    /// it starts a queue, and reads nothing again when it reconnects to another process.
    fn notify_unread(&mut self) {
        let version = Some(self.device.config.version());
        if std::mem::replace(&mut self.config_version, version) == version {
            return;
        }
        if let Err(e) = self.device.config.notify() {
            crate::log::line(&self.device.name, format_args!("it is not notified of its disk's size: {e}"));
        }
    }

    /// Whether the features are set that make a message per queue valid.
    pub(super) fn has_features(&self) -> bool {
        self.features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() != 0
    }

    fn offered_features(&self) -> u64 {
        self.device.features
            | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
            | VhostUserVirtioFeatures::LOG_ALL.bits()
    }

    fn queue(&mut self, index: u32) -> Result<&mut VringSetup> {
        let Self { queues, device, .. } = self;
        let offered = queues.len();
        queues.get_mut(index as usize).ok_or_else(|| {
            log_and_reject(&device.name, &format!("queue {index}"), format_args!("there are {offered}"))
        })
    }

    /// Checks the number of descriptors that a front end asks for.
    fn check_size(&self, index: u32, num: u32) -> Result<u16> {
        let most = self.device.largest_queue;
        let size = u16::try_from(num).ok().filter(|size| size.is_power_of_two() && *size <= most);
        size.ok_or_else(|| {
            let why = format!("it must be a power of two, and {most} at most");
            log_and_reject(&self.device.name, &format!("queue {index} of {num} descriptors"), why)
        })
    }
}

impl<C: From<QueueCommand>> Drop for Connection<C> {
    fn drop(&mut self) {
        // Requests without a completion are in the in-flight memory; nothing is completed without a
        // connection.
        let vm = self.device.vm;
        let is_idle = self.engine.ask(|reply| QueueCommand::Disconnect { vm, reply: Some(reply) }).is_ok();
        self.in_use.store(false, Ordering::Relaxed);
        if is_idle {
            self.release_disk();
        }
        self.device.config.set_channel(None);
    }
}

impl<C: From<QueueCommand>> VhostUserBackendReqHandlerMut for Connection<C> {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.stop_all()?;
        self.publish_use();
        Ok(())
    }

    fn reset_device(&mut self) -> Result<()> {
        self.stop_all()?;
        self.publish_use();
        for q in &mut self.queues {
            *q = VringSetup::default();
        }
        self.inflight = None;
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(self.offered_features())
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        if features & !self.offered_features() != 0 {
            // The connection ends with this error, which is logged there.
            return Err(Error::FeatureMismatch);
        }
        self.features = features;
        self.apply_log()
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _: Option<bool>,
    ) -> Result<Option<Vec<VhostUserMemoryRegionBase>>> {
        self.set_table(regions, files)?;
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        let accepted = self.check_size(index, num);
        let setup = self.queue(index)?;
        if setup.running && accepted.as_ref().ok() == setup.size.as_ref() {
            return Ok(());
        }
        let was_running = setup.running;
        // The front end uses the size that it asked for, whatever the reply.
        setup.size = None;
        self.stop_for_good(index)?;
        let size = accepted?;
        if was_running {
            let what = format!("queue {index} of {size} descriptors");
            return reject(&self.device, &what, "it was served with another number, and is stopped");
        }
        self.queue(index)?.size = Some(size);
        self.try_start(index)
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        log: u64,
    ) -> Result<()> {
        let addresses = Some((descriptor, available, used));
        let is_logged = flags.contains(VhostUserVringAddrFlags::VHOST_VRING_F_LOG);
        let setup = self.queue(index)?;
        setup.log_address = is_logged.then_some(log);
        // Sent again while the guest uses its disk, when logging begins and ends.
        if setup.running && setup.addresses == addresses {
            self.check_ring(index)?;
            return self.apply_log();
        }
        self.stop(index)?;
        self.queue(index)?.addresses = addresses;
        self.apply_log()?;
        self.try_start(index)
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        self.queue(index)?.base = base as u16;
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        self.stop_for_good(index)?;
        let q = self.queue(index)?;
        // By the specification, the ring stays stopped until the next kick descriptor.
        q.kick = None;
        q.call = None;
        Ok(VhostUserVringState::new(index, q.base.into()))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let kick = descriptors::kick(fd, self.device.trust);
        let kick = kick.map_err(|e| log_and_reject(&self.device.name, "kick", e))?;
        self.stop(index.into())?;
        self.queue(index.into())?.kick = kick;
        self.try_start(index.into())
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let fd = descriptors::call(fd, self.device.trust);
        let fd = fd.map_err(|e| log_and_reject(&self.device.name, "call", e))?;
        let (vm, name) = (self.device.vm, self.device.name.clone());
        let engine = self.engine.clone();
        let q = self.queue(index.into())?;
        q.call =
            fd.as_ref().map(File::try_clone).transpose().map_err(|e| log_and_reject(&name, "call", e))?;
        if q.running {
            engine
                .ask(|reply| QueueCommand::Call { vm, queue: QueueId(index.into()), call: fd, reply })
                .map_err(|e| log_and_reject(&name, "engine", e))?;
        }
        Ok(())
    }

    fn set_vring_err(&mut self, _: u8, _: Option<File>) -> Result<()> {
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        // Nobody handles other messages (NET_SET_MTU, SET_STATUS).
        let mut offered = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
            | VhostUserProtocolFeatures::LOG_SHMFD
            | VhostUserProtocolFeatures::RESET_DEVICE;
        if !self.device.config.is_empty() {
            offered |= VhostUserProtocolFeatures::CONFIG | VhostUserProtocolFeatures::BACKEND_REQ;
        } else {
            offered |= VhostUserProtocolFeatures::RARP;
        }
        if self.device.has_inflight {
            offered |= VhostUserProtocolFeatures::INFLIGHT_SHMFD;
        }
        Ok(offered)
    }

    fn set_protocol_features(&mut self, _: u64) -> Result<()> {
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.device.queues.into())
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        self.queue(index)?.enabled = enable;
        if enable { self.try_start(index) } else { self.stop_for_good(index) }
    }

    fn get_config(&mut self, offset: u32, size: u32, _: VhostUserConfigFlags) -> Result<Vec<u8>> {
        // Fields that newer QEMUs ask for read as zero.
        let (mut space, version) = self.device.config.read();
        let (from, to) = (offset as usize, offset as usize + size as usize);
        if to > CONFIG_SPACE as usize {
            return reject(&self.device, "configuration space", &format!("{to} bytes of {CONFIG_SPACE}"));
        }
        self.config_version = Some(version);
        space.resize(CONFIG_SPACE as usize, 0);
        Ok(space[from..to].to_vec())
    }

    fn set_config(&mut self, _: u32, _: &[u8], _: VhostUserConfigFlags) -> Result<()> {
        // No field is writable: the cache mode was not offered.
        reject(&self.device, "configuration space", "it cannot be written")
    }

    fn set_gpu_socket(&mut self, _: GpuBackend) -> Result<()> {
        reject(&self.device, "GPU socket", "there is no GPU")
    }

    fn get_shared_object(&mut self, _: VhostUserSharedMsg) -> Result<File> {
        reject(&self.device, "shared object", "there are none")
    }

    fn get_inflight_fd(&mut self, layout: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        let (queues, size) = (layout.num_queues, layout.queue_size);
        if queues > self.device.queues || size > self.device.largest_queue {
            let (most, largest) = (self.device.queues, self.device.largest_queue);
            let why = format!("{queues} queues of {size}; there are {most}, of {largest} at most");
            return reject(&self.device, "in flight", &why);
        }
        let (file, made) =
            Region::create(queues, size).map_err(|e| log_and_reject(&self.device.name, "in flight", e))?;
        let copy = file.try_clone().map_err(|e| log_and_reject(&self.device.name, "in flight", e))?;
        let region =
            Region::open(copy, &made).map_err(|e| log_and_reject(&self.device.name, "in flight", e))?;
        self.inflight = Some(Arc::new(region));
        Ok((made, file))
    }

    fn set_inflight_fd(&mut self, layout: &VhostUserInflight, file: File) -> Result<()> {
        self.stop_all()?;
        let region =
            Region::open(file, layout).map_err(|e| log_and_reject(&self.device.name, "in flight", e))?;
        self.inflight = Some(Arc::new(region));
        self.start_all()
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(MEMORY_SLOTS as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _: Option<bool>,
    ) -> Result<Option<VhostUserMemoryRegionBase>> {
        self.add_slot(region, &file)?;
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        self.remove_slot(region)
    }

    fn set_device_state_fd(
        &mut self,
        _: VhostTransferStateDirection,
        _: VhostTransferStatePhase,
        _: File,
    ) -> Result<Option<File>> {
        reject(&self.device, "migration", "it is not offered")
    }

    fn check_device_state(&mut self) -> Result<()> {
        reject(&self.device, "migration", "it is not offered")
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        reject(&self.device, "shared memory", "there is none")
    }

    fn set_log_base(&mut self, log: &VhostUserLog, file: File) -> Result<()> {
        self.set_log(log, &file)
    }
}
