//! A virtio-net front end without a VM.

use std::path::Path;
use std::sync::Arc;

use vhost::VhostBackend;
use vhost::vhost_user::message::VhostUserHeaderFlag;
use vhost::vhost_user::{Frontend, VhostUserFrontend, VhostUserProtocolFeatures, VhostUserVirtioFeatures};

use crate::client::{ClientError, EVENT_IDX, VERSION_1, backend_error, share_memory, start_queue};
use crate::memory::SharedMemory;
use crate::queue::ClientQueue;

/// Feature bit of `VIRTIO_NET_F_MRG_RXBUF`.
const MRG_RXBUF: u64 = 1 << 15;
/// Length of virtio-net's header.
pub const HEADER: usize = 12;
/// Flag `VIRTQ_DESC_F_WRITE`: the device writes the buffer.
const WRITE: u16 = 2;
/// Descriptors of a queue, of which a third are used: each frame takes one.
const SIZE: u16 = 1_024;
/// Bytes of a buffer.
const BUFFER: usize = 4_096;

/// A network port over vhost-user, with one queue pair.
pub struct NetClient {
    pub(crate) frontend: Frontend,
    /// Memory shared with the back end.
    pub mem: Arc<SharedMemory>,
    /// Queue of frames to this side.
    pub rx: ClientQueue,
    /// Queue of frames from this side.
    pub tx: ClientQueue,
    buffers: u16,
    free: Vec<u16>,
    /// The features in use.
    pub features: u64,
}

impl std::fmt::Debug for NetClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NetClient").field("features", &self.features).finish_non_exhaustive()
    }
}

impl NetClient {
    /// Buffers of a direction.
    pub const BUFFERS: u16 = SIZE / 3;

    /// Connects, starts both queues, and provides all buffers.
    pub fn connect(socket: &Path) -> Result<Self, ClientError> {
        Self::connect_with(socket, 0)
    }

    /// Connects as [`NetClient::connect`] does, with further features where they are offered.
    pub fn connect_with(socket: &Path, more: u64) -> Result<Self, ClientError> {
        Self::connect_sized(socket, more, SIZE)
    }

    /// Connects with queues of `size` descriptors, and a third as many buffers.
    pub fn connect_sized(socket: &Path, more: u64, size: u16) -> Result<Self, ClientError> {
        let io = |what| move |source| ClientError::Io { what, source };
        let backend = |what| backend_error(socket, what);
        let each = ClientQueue::bytes(size, BUFFER);
        let mem = Arc::new(SharedMemory::new(2 * each, true).map_err(io("memory"))?);
        let mut frontend = Frontend::connect(socket, 2).map_err(backend("cannot connect"))?;
        frontend.set_owner().map_err(backend("set owner"))?;
        let offered = frontend.get_features().map_err(backend("get features"))?;
        let protocol = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
        let features = offered & (EVENT_IDX | VERSION_1 | MRG_RXBUF | protocol | more);
        frontend.set_features(features).map_err(backend("set features"))?;
        if features & protocol != 0 {
            let there = frontend.get_protocol_features().map_err(backend("get protocol features"))?;
            let wanted = VhostUserProtocolFeatures::MQ
                | VhostUserProtocolFeatures::REPLY_ACK
                | VhostUserProtocolFeatures::LOG_SHMFD;
            frontend.set_protocol_features(there & wanted).map_err(backend("set protocol features"))?;
            if there.contains(VhostUserProtocolFeatures::REPLY_ACK) {
                frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
            }
        }
        share_memory(&frontend, &mem).map_err(backend("set memory table"))?;
        let buffers = size / 3;
        let mut queues = Vec::new();
        for i in 0..2 {
            let event_idx = features & EVENT_IDX != 0;
            let mut queue =
                ClientQueue::new(Arc::clone(&mem), i * each, size, BUFFER, event_idx).map_err(io("queue"))?;
            if i == 0 {
                for slot in 0..buffers {
                    provide(&mut queue, slot);
                }
            }
            start_queue(&mut frontend, i, &mem, &queue, features & protocol != 0)
                .map_err(backend("start a queue"))?;
            queues.push(queue);
        }
        let (Some(tx), Some(mut rx)) = (queues.pop(), queues.pop()) else {
            return Err(io("queue")(std::io::Error::other("no queues")));
        };
        rx.notify().map_err(io("kick"))?;
        Ok(Self { frontend, mem, rx, tx, buffers, free: (0..buffers).rev().collect(), features })
    }

    /// Queues a frame without a kick; `false` when all buffers are in use.
    ///
    /// # Panics
    /// A frame larger than a buffer.
    pub fn queue(&mut self, frame: &[u8]) -> bool {
        self.queue_with_header(&[0; HEADER], frame)
    }

    /// Queues a frame with any header, for attacks.
    ///
    /// # Panics
    /// As [`NetClient::queue`].
    pub fn queue_with_header(&mut self, header: &[u8; HEADER], frame: &[u8]) -> bool {
        assert!(HEADER + frame.len() <= BUFFER, "a frame of {} bytes", frame.len());
        self.reclaim();
        let Some(slot) = self.free.pop() else { return false };
        let at = self.tx.data(slot);
        self.mem.write(at, header);
        self.mem.write(at + HEADER, frame);
        let len = (HEADER + frame.len()) as u32;
        self.tx.write_descriptor_raw(slot, SharedMemory::BASE + at as u64, len, 0, 0);
        self.tx.add_avail(slot);
        true
    }

    /// Takes back the buffers of frames that were fetched.
    fn reclaim(&mut self) {
        while let Some((head, _)) = self.tx.pop_used_raw() {
            self.free.push(head as u16);
        }
    }

    /// Frames that were queued and not fetched.
    pub fn unfetched(&mut self) -> usize {
        self.reclaim();
        usize::from(self.buffers) - self.free.len()
    }

    /// Sends a frame; `false` when all buffers are in use.
    pub fn send(&mut self, frame: &[u8]) -> std::io::Result<bool> {
        let queued = self.queue(frame);
        self.tx.notify()?;
        Ok(queued)
    }

    /// The next frame, without its header.
    ///
    /// # Panics
    /// A frame in more than one buffer.
    pub fn receive(&mut self) -> Option<Vec<u8>> {
        let (head, len) = self.rx.pop_used_raw()?;
        let (slot, len) = (head as u16, len as usize);
        let frame = self.mem.read(self.rx.data(slot), len);
        assert_eq!(u16::from_le_bytes([frame[10], frame[11]]), 1, "one buffer");
        provide(&mut self.rx, slot);
        let _ = self.rx.notify();
        Some(frame[HEADER..].to_vec())
    }
}

/// Provides a buffer for a frame.
fn provide(queue: &mut ClientQueue, slot: u16) {
    let at = SharedMemory::BASE + queue.data(slot) as u64;
    queue.write_descriptor_raw(slot, at, BUFFER as u32, WRITE, 0);
    queue.add_avail(slot);
}
