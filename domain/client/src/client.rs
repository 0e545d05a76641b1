//! A vhost-user connection to the back end of a disk.

use std::io::{self, Read as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserHeaderFlag};
use vhost::vhost_user::{Frontend, VhostUserFrontend, VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use vhost::{VhostBackend, VringConfigData};

use crate::memory::SharedMemory;
use crate::queue::ClientQueue;

pub(crate) const EVENT_IDX: u64 = 1 << 29;
pub(crate) const VERSION_1: u64 = 1 << 32;
const FLUSH: u64 = 1 << 9;
const QUEUES: u64 = 1 << 12;
/// `VIRTIO_BLK_F_SEG_MAX`, `_BLK_SIZE` and `_TOPOLOGY`, which change no request.
const FIRMWARE: u64 = 1 << 2 | 1 << 6 | 1 << 10;

/// Options of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Virtqueues, each with its own request slots.
    pub queues: u16,
    /// Descriptors of each queue; each request takes three.
    pub size: u16,
    /// Data buffer of each request, in bytes.
    pub buffer: usize,
    /// Seals the memory, as QEMU does.
    pub sealed: bool,
    /// Shares the memory in slots of this many bytes each, added one by one; 0 for one table.
    pub slot: usize,
    /// Features that the driver knows: of the offered ones it accepts these, as far as the client
    /// has them. Firmware knows few.
    pub features: u64,
    /// Starts the queues. Otherwise that is left to [`Client::raw`].
    pub started: bool,
}

impl Options {
    /// The default, for constants.
    pub const DEFAULT: Self = Self {
        queues: 1,
        size: 512,
        buffer: 4_096,
        sealed: true,
        slot: 0,
        features: u64::MAX,
        started: true,
    };
}

impl Default for Options {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// Causes of a failed connection.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The back end refused, or is absent.
    #[error("{}: {what}: {source}", socket.display())]
    Backend {
        /// Socket of the back end.
        socket: PathBuf,
        /// vhost-user operation that failed, for the message.
        what: &'static str,
        /// Error of the vhost-user front end.
        source: vhost::Error,
    },
    /// A failure on this side: memory or a descriptor.
    #[error("{what}: {source}")]
    Io {
        /// Object that was created, for the message.
        what: &'static str,
        source: io::Error,
    },
}

/// A disk over vhost-user, its queues started or left to the test.
pub struct Client {
    pub(crate) frontend: Frontend,
    /// Memory shared with the back end.
    pub mem: Arc<SharedMemory>,
    /// Virtqueues in order of their index.
    pub queues: Vec<ClientQueue>,
    /// Size of the disk in bytes; 0 from a back end without protocol features.
    pub capacity: u64,
    /// Channel for notices of the back end; `None` where it sends none.
    pub notices: Option<UnixStream>,
    /// Features in use, but for that of logging.
    pub(crate) features: u64,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("queues", &self.queues.len()).finish_non_exhaustive()
    }
}

impl Client {
    /// Connects and starts all queues.
    pub fn connect(socket: &Path, options: Options) -> Result<Self, ClientError> {
        let io = |what| move |source| ClientError::Io { what, source };
        let backend = |what| backend_error(socket, what);
        let each = ClientQueue::bytes(options.size, options.buffer);
        let len = each * usize::from(options.queues);
        let mem = Arc::new(SharedMemory::new(len, options.sealed).map_err(io("memory"))?);
        let mut frontend =
            Frontend::connect(socket, options.queues.into()).map_err(backend("cannot connect"))?;
        frontend.set_owner().map_err(backend("set owner"))?;
        let offered = frontend.get_features().map_err(backend("get features"))?;
        let protocol = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
        let known = (EVENT_IDX | VERSION_1 | FLUSH | QUEUES | FIRMWARE) & options.features;
        let features = offered & (known | protocol);
        frontend.set_features(features).map_err(backend("set features"))?;
        let (mut capacity, mut notices) = (0, None);
        if features & protocol != 0 {
            let there = frontend.get_protocol_features().map_err(backend("get protocol features"))?;
            let mut wanted = VhostUserProtocolFeatures::CONFIG
                | VhostUserProtocolFeatures::MQ
                | VhostUserProtocolFeatures::REPLY_ACK
                | VhostUserProtocolFeatures::LOG_SHMFD
                | VhostUserProtocolFeatures::BACKEND_REQ;
            if options.slot > 0 {
                wanted |= VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS;
            }
            frontend.set_protocol_features(there & wanted).map_err(backend("set protocol features"))?;
            // Every message asks for a reply from here on, so that refusals are seen.
            if there.contains(VhostUserProtocolFeatures::REPLY_ACK) {
                frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
            }
            if there.contains(VhostUserProtocolFeatures::BACKEND_REQ) {
                let (ours, theirs) = UnixStream::pair().map_err(io("channel"))?;
                frontend.set_backend_request_fd(&theirs).map_err(backend("set the channel"))?;
                notices = Some(ours);
            }
            capacity = read_capacity(&mut frontend).map_err(backend("get config"))?;
        }
        if options.slot == 0 {
            share_memory(&frontend, &mem).map_err(backend("set memory table"))?;
        }
        for slot in mem.slots(options.slot) {
            frontend.add_mem_region(&slot).map_err(backend("add a memory region"))?;
        }
        let mut queues = Vec::new();
        for i in 0..usize::from(options.queues) {
            let at = i * each;
            let event_idx = features & EVENT_IDX != 0;
            let queue = ClientQueue::new(Arc::clone(&mem), at, options.size, options.buffer, event_idx)
                .map_err(io("queue"))?;
            if options.started {
                start_queue(&mut frontend, i, &mem, &queue, features & protocol != 0)
                    .map_err(backend("start a queue"))?;
            }
            queues.push(queue);
        }
        Ok(Self { frontend, mem, queues, capacity, notices, features })
    }

    /// Waits for a notice that the configuration has changed, and reads the size of the disk again.
    ///
    /// # Errors
    /// No notice comes within a time, or it is another one; the back end refuses.
    pub fn changed_capacity(&mut self, timeout: Duration) -> io::Result<u64> {
        let channel = self.notices.as_mut().ok_or(io::ErrorKind::NotConnected)?;
        channel.set_read_timeout(Some(timeout))?;
        let mut notice = [0; 12];
        channel.read_exact(&mut notice)?;
        if notice[..] != [2u32, 1, 0].map(u32::to_ne_bytes).concat() {
            return Err(io::Error::other("another message than that of a change"));
        }
        self.capacity = read_capacity(&mut self.frontend).map_err(io::Error::other)?;
        Ok(self.capacity)
    }

    /// Ring addresses of a queue, for `set_vring_addr`.
    ///
    /// # Panics
    /// A queue that there is not.
    #[must_use]
    pub fn ring_addresses(&self, index: usize) -> VringConfigData {
        ring_addresses(&self.mem, &self.queues[index])
    }

    /// Resets the first queue and starts it anew, as the driver of an operating system does with a
    /// queue that the firmware has left alive. Returns the index in the available ring at which the
    /// old one stopped.
    ///
    /// # Panics
    /// A connection without queues, or too little memory for the new one.
    pub fn hand_over(&mut self, features: u64, size: u16, buffer: usize) -> vhost::Result<u32> {
        self.frontend.set_vring_enable(0, false)?;
        let base = self.frontend.get_vring_base(0)?;
        let protocol = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
        let offered = self.frontend.get_features()?;
        let known = EVENT_IDX | VERSION_1 | FLUSH | FIRMWARE;
        let features = offered & (known & features | protocol);
        self.frontend.set_features(features)?;
        let bytes = ClientQueue::bytes(size, buffer);
        self.mem.write(0, &vec![0; bytes]);
        let event_idx = features & EVENT_IDX != 0;
        let queue = ClientQueue::new(Arc::clone(&self.mem), 0, size, buffer, event_idx);
        let failed = |e| vhost::Error::VhostUserProtocol(vhost::vhost_user::Error::ReqHandlerError(e));
        self.queues[0] = queue.map_err(failed)?;
        start_queue(&mut self.frontend, 0, &self.mem, &self.queues[0], true)?;
        Ok(base)
    }

    /// Whether the back end has closed the connection.
    pub fn raw_is_closed(&mut self) -> bool {
        self.frontend.get_features().is_err()
    }

    /// The raw connection, for invalid messages.
    pub fn raw(&mut self) -> &mut Frontend {
        &mut self.frontend
    }
}

/// The error of an operation on a back end.
pub(crate) fn backend_error(socket: &Path, what: &'static str) -> impl FnOnce(vhost::Error) -> ClientError {
    let socket = socket.to_owned();
    move |source| ClientError::Backend { socket, what, source }
}

/// Sends the memory table: all memory as one region.
pub(crate) fn share_memory(frontend: &Frontend, mem: &SharedMemory) -> vhost::Result<()> {
    frontend.set_mem_table(&[mem.region(0, mem.len())]).map(drop)
}

/// Addresses of descriptor table, used and available ring in this process.
pub(crate) fn ring_addresses(mem: &SharedMemory, queue: &ClientQueue) -> VringConfigData {
    let (desc, avail, used) = queue.ring_offsets();
    let place = |offset: usize| mem.address() + offset as u64;
    VringConfigData {
        queue_max_size: queue.size(),
        queue_size: queue.size(),
        flags: 0,
        desc_table_addr: place(desc),
        used_ring_addr: place(used),
        avail_ring_addr: place(avail),
        log_addr: None,
    }
}

/// Starts a queue from index 0.
pub(crate) fn start_queue(
    frontend: &mut Frontend,
    index: usize,
    mem: &SharedMemory,
    queue: &ClientQueue,
    enable: bool,
) -> vhost::Result<()> {
    frontend.set_vring_num(index, queue.size())?;
    frontend.set_vring_addr(index, &ring_addresses(mem, queue))?;
    frontend.set_vring_base(index, 0)?;
    frontend.set_vring_call(index, &queue.call)?;
    frontend.set_vring_kick(index, &queue.kick)?;
    if enable { frontend.set_vring_enable(index, true) } else { Ok(()) }
}

/// Size of the disk, in bytes.
fn read_capacity(frontend: &mut Frontend) -> vhost::Result<u64> {
    let (_, config) = frontend.get_config(0, 60, VhostUserConfigFlags::WRITABLE, &[0; 60])?;
    let sectors = config.get(0..8).and_then(|bytes| bytes.try_into().ok());
    Ok(sectors.map_or(0, |bytes| u64::from_le_bytes(bytes) * 512))
}
