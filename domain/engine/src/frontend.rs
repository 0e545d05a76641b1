//! The control thread of one VM: what its QEMU says over the socket.
//!
//! Everything here is between one QEMU and us. Whatever it says, or takes its time for, concerns its own disk.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use vhost::VhostUserMemoryRegionBase;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVirtioFeatures, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{BackendReqHandler, Error, GpuBackend, Result, VhostUserBackendReqHandlerMut};
use vm_memory::GuestAddress;

use crate::blk::{Limits, config_space};
use crate::confine::{Confine, Role};
use crate::engine::{Command, EngineHandle, VringStart};
use crate::inflight::Region;
use crate::listen::Listening;
use crate::memory::GuestMem;

/// Largest queue of virtio 1.2, which is what QEMU allows too.
const MAX_QUEUE: u32 = 1_024;

/// Bits of virtio and virtio-blk features (virtio 1.2, sections 6 and 5.2.3).
mod feature {
    pub const SEG_MAX: u64 = 1 << 2;
    pub const GEOMETRY: u64 = 1 << 4;
    pub const READ_ONLY: u64 = 1 << 5;
    pub const BLOCK_SIZE: u64 = 1 << 6;
    pub const FLUSH: u64 = 1 << 9;
    pub const TOPOLOGY: u64 = 1 << 10;
    pub const QUEUES: u64 = 1 << 12;
    pub const DISCARD: u64 = 1 << 13;
    pub const WRITE_ZEROES: u64 = 1 << 14;
    pub const INDIRECT: u64 = 1 << 28;
    pub const EVENT_IDX: u64 = 1 << 29;
    pub const VERSION_1: u64 = 1 << 32;
}

/// What a control thread knows of the disk.
#[derive(Clone, Debug)]
pub struct DiskInfo {
    /// For logs and the thread's name.
    pub name: String,
    /// Number of the VM in its engine.
    pub vm: usize,
    /// What may be asked of it.
    pub limits: Limits,
    /// Bytes of a block.
    pub block: u32,
    /// Queues offered.
    pub queues: u16,
    /// Its QEMU may bring huge pages.
    pub hugepages: bool,
}

#[derive(Default)]
struct Setup {
    size: u32,
    /// Descriptor table, available and used ring, in QEMU's addresses.
    addresses: Option<(u64, u64, u64)>,
    base: u16,
    kick: Option<File>,
    call: Option<File>,
    enabled: bool,
    running: bool,
}

/// One connection.
struct Attachment {
    disk: DiskInfo,
    engine: EngineHandle,
    features: u64,
    mem: Option<Arc<GuestMem>>,
    inflight: Option<Arc<Region>>,
    queues: Vec<Setup>,
}

fn said(disk: &str, what: &str, e: impl std::fmt::Display) -> Error {
    crate::log::line(disk, format_args!("{what}: {e}"));
    Error::ReqHandlerError(io::Error::other(format!("{what}: {e}")))
}

/// Only eventfds are taken: anything else could make us wait, or turn in circles.
fn eventfd(disk: &str, file: Option<File>) -> Result<Option<File>> {
    let Some(file) = file else { return Ok(None) };
    let link = std::fs::read_link(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file)))
        .map_err(|e| said(disk, "descriptor", e))?;
    if link.as_os_str() == "anon_inode:[eventfd]" {
        return Ok(Some(file));
    }
    Err(said(disk, "kick or call", format!("{} is no eventfd", link.display())))
}

impl Attachment {
    fn new(disk: DiskInfo, engine: EngineHandle) -> Self {
        let queues = (0..disk.queues).map(|_| Setup::default()).collect();
        Self { disk, engine, features: 0, mem: None, inflight: None, queues }
    }

    fn offered(&self) -> u64 {
        let mut f = feature::SEG_MAX
            | feature::GEOMETRY
            | feature::BLOCK_SIZE
            | feature::FLUSH
            | feature::TOPOLOGY
            | feature::QUEUES
            | feature::INDIRECT
            | feature::EVENT_IDX
            | feature::VERSION_1
            | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
        if self.disk.limits.read_only {
            f |= feature::READ_ONLY;
        }
        if self.disk.limits.discard {
            f |= feature::DISCARD | feature::WRITE_ZEROES;
        }
        f
    }

    fn queue(&mut self, index: u32) -> Result<&mut Setup> {
        self.queues.get_mut(index as usize).ok_or(Error::InvalidParam)
    }

    /// Starts a queue as soon as all is known of it.
    fn try_start(&mut self, index: u32) -> Result<()> {
        let name = self.disk.name.clone();
        let gone = |e| said(&name, "engine", e);
        let (mem, features, vm) = (self.mem.clone(), self.features, self.disk.vm);
        let enabled_by_message = features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() != 0;
        let inflight = self.inflight.as_ref().and_then(|r| r.queue(index as u16));
        let engine = self.engine.clone();
        let setup = self.queue(index)?;
        if setup.running || setup.kick.is_none() || (enabled_by_message && !setup.enabled) {
            return Ok(());
        }
        let (Some(mem), Some((desc, avail, used))) = (mem, setup.addresses) else { return Ok(()) };
        let place =
            |what, user| mem.translate(user).ok_or_else(|| said(&name, what, "not in the guest's memory"));
        let (desc, avail, used): (GuestAddress, GuestAddress, GuestAddress) =
            (place("descriptor table", desc)?, place("available ring", avail)?, place("used ring", used)?);
        let copy = |f: &Option<File>| f.as_ref().map(File::try_clone).transpose();
        let fds = copy(&setup.kick).and_then(|k| Ok((k, copy(&setup.call)?)));
        let (kick, call) = fds.map_err(|e| said(&name, "descriptors", e))?;
        let Some(kick) = kick else { return Ok(()) };
        let start = Box::new(VringStart {
            mem: Arc::clone(&mem),
            size: setup.size as u16,
            desc,
            avail,
            used,
            base: setup.base,
            event_idx: features & feature::EVENT_IDX != 0,
            write_through: features & feature::FLUSH == 0,
            kick,
            call,
            inflight,
        });
        let done =
            engine.ask(|reply| Command::Start { vm, index: index as u16, start, reply }).map_err(gone)?;
        done.map_err(|e| said(&name, "queue", e))?;
        setup.running = true;
        Ok(())
    }

    /// Stops a queue when all that was taken from it is answered.
    fn stop(&mut self, index: u32) -> Result<()> {
        let (vm, engine, name) = (self.disk.vm, self.engine.clone(), self.disk.name.clone());
        let setup = self.queue(index)?;
        if std::mem::take(&mut setup.running) {
            setup.base = engine
                .ask(|reply| Command::Stop { vm, index: index as u16, reply })
                .map_err(|e| said(&name, "engine", e))?;
        }
        Ok(())
    }

    fn stop_all(&mut self) -> Result<()> {
        (0..self.queues.len() as u32).try_for_each(|i| self.stop(i))
    }

    fn start_all(&mut self) -> Result<()> {
        (0..self.queues.len() as u32).try_for_each(|i| self.try_start(i))
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        // What the guest asked and did not get is in its in-flight memory; nothing is answered to nobody.
        let vm = self.disk.vm;
        let _ = self.engine.ask(|reply| Command::Disconnect { vm, reply });
    }
}

impl VhostUserBackendReqHandlerMut for Attachment {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.stop_all()
    }

    fn reset_device(&mut self) -> Result<()> {
        self.stop_all()?;
        for q in &mut self.queues {
            *q = Setup::default();
        }
        self.inflight = None;
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(self.offered())
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        if features & !self.offered() != 0 {
            return Err(Error::FeatureMismatch);
        }
        self.features = features;
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _: Option<bool>,
    ) -> Result<Option<Vec<VhostUserMemoryRegionBase>>> {
        let mem = GuestMem::map(regions, files, self.disk.hugepages)
            .map_err(|e| said(&self.disk.name, "memory", e))?;
        self.stop_all()?;
        self.mem = Some(Arc::new(mem));
        self.start_all()?;
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        if num == 0 || num > MAX_QUEUE || !num.is_power_of_two() {
            return Err(Error::InvalidParam);
        }
        self.queue(index)?.size = num;
        Ok(())
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _: u64,
    ) -> Result<()> {
        self.stop(index)?;
        self.queue(index)?.addresses = Some((descriptor, available, used));
        self.try_start(index)
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        self.queue(index)?.base = base as u16;
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        self.stop(index)?;
        let q = self.queue(index)?;
        // The specification: the ring is stopped until the next kick descriptor comes.
        q.kick = None;
        q.call = None;
        Ok(VhostUserVringState::new(index, q.base.into()))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let fd = eventfd(&self.disk.name, fd)?;
        self.stop(index.into())?;
        self.queue(index.into())?.kick = fd;
        self.try_start(index.into())
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let fd = eventfd(&self.disk.name, fd)?;
        let (vm, name) = (self.disk.vm, self.disk.name.clone());
        let engine = self.engine.clone();
        let q = self.queue(index.into())?;
        q.call = fd.as_ref().map(File::try_clone).transpose().map_err(|e| said(&name, "call", e))?;
        if q.running {
            engine
                .ask(|reply| Command::Call { vm, index: index.into(), call: fd, reply })
                .map_err(|e| said(&name, "engine", e))?;
        }
        Ok(())
    }

    fn set_vring_err(&mut self, _: u8, _: Option<File>) -> Result<()> {
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::RESET_DEVICE
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD)
    }

    fn set_protocol_features(&mut self, _: u64) -> Result<()> {
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.disk.queues.into())
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        self.queue(index)?.enabled = enable;
        if enable { self.try_start(index) } else { self.stop(index) }
    }

    fn get_config(&mut self, offset: u32, size: u32, _: VhostUserConfigFlags) -> Result<Vec<u8>> {
        // A newer QEMU asks for fields that we do not have: zeroes.
        let mut space = config_space(&self.disk.limits, self.disk.queues, self.disk.block).to_vec();
        let (from, to) = (offset as usize, offset as usize + size as usize);
        if to > 256 {
            return Err(Error::InvalidParam);
        }
        space.resize(256, 0);
        Ok(space[from..to].to_vec())
    }

    fn set_config(&mut self, _: u32, _: &[u8], _: VhostUserConfigFlags) -> Result<()> {
        // Nothing of it can be written: the write cache's mode was not offered.
        Err(Error::InvalidOperation("the configuration cannot be written"))
    }

    fn set_gpu_socket(&mut self, _: GpuBackend) -> Result<()> {
        Err(Error::InvalidOperation("no GPU"))
    }

    fn get_shared_object(&mut self, _: VhostUserSharedMsg) -> Result<File> {
        Err(Error::InvalidOperation("no shared objects"))
    }

    fn get_inflight_fd(&mut self, told: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        let (queues, size) = (told.num_queues, told.queue_size);
        if queues > self.disk.queues || u32::from(size) > MAX_QUEUE {
            return Err(Error::InvalidParam);
        }
        let (file, made) = Region::create(queues, size).map_err(|e| said(&self.disk.name, "in flight", e))?;
        let copy = file.try_clone().map_err(|e| said(&self.disk.name, "in flight", e))?;
        let region = Region::open(copy, &made).map_err(|e| said(&self.disk.name, "in flight", e))?;
        self.inflight = Some(Arc::new(region));
        Ok((made, file))
    }

    fn set_inflight_fd(&mut self, told: &VhostUserInflight, file: File) -> Result<()> {
        self.stop_all()?;
        let region = Region::open(file, told).map_err(|e| said(&self.disk.name, "in flight", e))?;
        self.inflight = Some(Arc::new(region));
        self.start_all()
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Err(Error::InvalidOperation("no memory slots"))
    }

    fn add_mem_region(
        &mut self,
        _: &VhostUserSingleMemoryRegion,
        _: File,
        _: Option<bool>,
    ) -> Result<Option<VhostUserMemoryRegionBase>> {
        Err(Error::InvalidOperation("no memory slots"))
    }

    fn remove_mem_region(&mut self, _: &VhostUserSingleMemoryRegion) -> Result<()> {
        Err(Error::InvalidOperation("no memory slots"))
    }

    fn set_device_state_fd(
        &mut self,
        _: VhostTransferStateDirection,
        _: VhostTransferStatePhase,
        _: File,
    ) -> Result<Option<File>> {
        Err(Error::InvalidOperation("no migration"))
    }

    fn check_device_state(&mut self) -> Result<()> {
        Err(Error::InvalidOperation("no migration"))
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        Err(Error::InvalidOperation("no shared memory"))
    }

    fn set_log_base(&mut self, _: &VhostUserLog, _: File) -> Result<()> {
        Err(Error::InvalidOperation("no migration"))
    }
}

/// A socket that is served by a thread of its own, one QEMU after the other.
#[derive(Debug)]
pub struct Frontend {
    stop: Arc<AtomicBool>,
    connection: Arc<Mutex<Option<UnixStream>>>,
    socket: Listening,
    engine: EngineHandle,
    vm: usize,
    thread: Option<JoinHandle<()>>,
}

impl Frontend {
    /// Serves a disk's socket by a thread, which is confined when this returns.
    ///
    /// # Errors
    /// When the thread cannot be made or confined.
    pub fn start(
        disk: DiskInfo,
        socket: Listening,
        engine: EngineHandle,
        confine: &Confine,
    ) -> io::Result<Self> {
        let listener = socket.listener().try_clone()?;
        let stop = Arc::new(AtomicBool::new(false));
        let connection = Arc::new(Mutex::new(None));
        let (stopped, current) = (Arc::clone(&stop), Arc::clone(&connection));
        let (vm, handle) = (disk.vm, engine.clone());
        let name: String = format!("vm-{}", disk.name).chars().take(15).collect();
        let thread = confine.spawn(&name, Role::Frontend, move || {
            while !stopped.load(Ordering::Acquire) {
                let Ok((stream, _)) = listener.accept() else {
                    if stopped.load(Ordering::Acquire) {
                        break;
                    }
                    // Out of descriptors, say: that passes, and QEMU tries again.
                    std::thread::sleep(std::time::Duration::from_millis(50));
                    continue;
                };
                // Known before it is asked whether to stop: either this thread or the one that closes sees the other.
                let Ok(copy) = stream.try_clone() else {
                    // Nothing could end this connection later. Its QEMU tries again.
                    std::thread::sleep(std::time::Duration::from_millis(50));
                    continue;
                };
                if let Ok(mut current) = current.lock() {
                    *current = Some(copy);
                }
                if stopped.load(Ordering::Acquire) {
                    break;
                }
                // A defect that one QEMU can reach is between it and us: its connection ends, and the next one is served.
                if catch_unwind(AssertUnwindSafe(|| serve(stream, &disk, &engine))).is_err() {
                    crate::log::line(&disk.name, "a defect ended the connection");
                }
                if let Ok(mut current) = current.lock() {
                    *current = None;
                }
            }
        })?;
        Ok(Self { stop, connection, socket, engine: handle, vm, thread: Some(thread) })
    }
}

fn serve(stream: UnixStream, disk: &DiskInfo, engine: &EngineHandle) {
    let attachment = Arc::new(Mutex::new(Attachment::new(disk.clone(), engine.clone())));
    let mut handler = BackendReqHandler::from_stream(stream, attachment);
    loop {
        match handler.handle_request() {
            Ok(()) => {}
            // A message that is refused is told to QEMU where it asked for an answer; the connection goes on.
            Err(Error::ReqHandlerError(_) | Error::InvalidParam | Error::InvalidOperation(_)) => {}
            Err(Error::Disconnected) => break,
            Err(e) => {
                crate::log::line(&disk.name, format_args!("connection ends: {e}"));
                break;
            }
        }
    }
}

impl Frontend {
    /// Ends the connection and the listener; the thread ends soon. Dropping waits for it, so several are closed first and
    /// then dropped.
    pub fn close(&self) {
        self.stop.store(true, Ordering::Release);
        if let Ok(current) = self.connection.lock() {
            if let Some(stream) = current.as_ref() {
                let _ = rustix::net::shutdown(stream.as_fd(), rustix::net::Shutdown::Both);
            }
        }
        // The thread may wait for a queue to stop, which takes as long as the guest's requests: they are dropped, and their
        // QEMU keeps what was in flight.
        let (reply, _) = std::sync::mpsc::sync_channel(1);
        let _ = self.engine.send(Command::Disconnect { vm: self.vm, reply });
        // Wakes the thread that accepts, also when the socket's name was removed.
        let _ = rustix::net::shutdown(self.socket.listener().as_fd(), rustix::net::Shutdown::Both);
    }
}

impl Drop for Frontend {
    fn drop(&mut self) {
        self.close();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
