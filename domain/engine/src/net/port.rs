//! A port: its queues, its frames, and its counters.

use std::path::PathBuf;
use std::sync::mpsc::SyncSender;

use rtvirtio_domain_config::{Mac, Network, OFFLOADED_FRAME, Port as PortConfig};
use rtvirtio_domain_resources::uplink::Uplink;
use rtvirtio_sched::{Bucket, Meter};
use rtvirtio_stats::LatencyRecorder;
use rtvirtio_units::Nanos;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress};

use super::frame::{HEADER, LEGACY_HEADER, PortRules};
use super::hold::Hold;
use super::moderation::Moderation;
use super::pool::FramePool;
use super::segment::Cutter;
use super::settings::{Drops, PortSettings};
use super::uplink;
use crate::blk::Segment;
use crate::engine::PromiseCounters;
use crate::engine::queue_id::QueueId;
use crate::engine::slot::QueueSlot;
use crate::engine::urgency_eventfd::UrgencyEventfd;
use crate::engine::vring::Vring;
use crate::feature::{VERSION_1, net as feature};
use crate::memory::Memory;

/// Index of the queue of frames to the VM.
pub const RX: QueueId = QueueId(0);
/// Index of the queue of frames from the VM.
pub const TX: QueueId = QueueId(1);
/// Queues of a port.
pub const QUEUES: usize = 2;
/// Frames to a VM that were read and wait for tokens: few, so that the kernel drops what a flood
/// has beyond the cap.
const RX_FRAMES: u32 = 16;
/// Bytes of the largest frame to a VM, or segment from another VM, and its header.
const LARGEST_RECEIVED: usize = HEADER + OFFLOADED_FRAME as usize;
/// Largest number of descriptors of a frame. Linux uses at most 19; a chain of more is refused.
const MAX_DESCRIPTORS: usize = 64;
/// Largest number of chains of a frame to the VM.
const MAX_CHAINS: usize = 256;

/// Counters of one direction.
#[derive(Debug)]
pub struct FlowMeter {
    pub frames: u64,
    pub bytes: u64,
    pub latencies: LatencyRecorder,
    pub meter: Meter,
}

impl FlowMeter {
    fn new() -> Self {
        Self { frames: 0, bytes: 0, latencies: LatencyRecorder::default(), meter: Meter::default() }
    }

    /// Records a frame that is passed on.
    pub fn record(&mut self, now: Nanos, since: Nanos, bytes: u64, more: bool) {
        self.frames += 1;
        self.bytes += bytes;
        self.latencies.record(Nanos(now.0.saturating_sub(since.0)));
        self.meter.on_complete(now, bytes, more);
    }
}

/// A port and its state in the event loop.
#[derive(Debug)]
pub struct Port {
    pub name: String,
    /// Number that no other port of this network has or had.
    pub member: u32,
    pub rules: PortRules,
    /// Tap or packet socket; `None` for a vacant place.
    pub uplink: Option<Uplink>,
    pub slots: [QueueSlot; QUEUES],
    /// Frames from the VM that wait for the link.
    pub tx: FramePool,
    /// Frames to the VM that wait for its tokens.
    pub rx: FramePool,
    /// Token bucket of broadcast and unlisted multicast frames to the VM.
    pub broadcast: Bucket,
    /// Tokens of one of these frames.
    pub broadcast_frame: u64,
    /// Time at which frames to unlisted groups are accepted again; `None` while they are.
    pub groups_again_at: Option<Nanos>,
    /// Whether the uplink may hold frames.
    pub readable: bool,
    /// Whether the poll of the uplink is armed.
    pub poll_armed: bool,
    /// Time at which a failed uplink is read again: its poll would complete at once.
    pub retry_at: Option<Nanos>,
    pub settings: PortSettings,
    /// Large segments that are being segmented: to the VM, and from it.
    pub cutters: [Cutter; 2],
    pub sent: FlowMeter,
    pub received: FlowMeter,
    pub promises: [PromiseCounters; 2],
    pub drops: Drops,
    pub hold: Hold,
    pub broken_queues: u64,
    pub urgency: UrgencyEventfd,
    /// Moderation of notifications of frames to the VM.
    pub moderation: Moderation,
    /// Answered when nothing of the port is in flight after a disconnect.
    pub disconnect_reply: Option<SyncSender<()>>,
    /// Buffers of the frame that is being written to the VM.
    segments: Vec<Segment>,
    chains: Vec<(u16, u32)>,
}

/// Result of a fetch from the VM's queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fetched {
    /// The frame is in the buffer of [`Port::fetched`], with this length.
    Frame(usize),
    /// The chain is invalid; it is completed.
    Malformed,
    /// The chain is longer than any frame of the network; it is completed.
    TooLong,
    /// The queue is empty.
    Empty,
}

/// Result of a delivery to the VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivered {
    Yes,
    NoBuffer,
}

impl Port {
    /// A port without a guest.
    pub fn new(network: &Network, config: &PortConfig, uplink: Uplink) -> Self {
        let tx = FramePool::new(config.depth, HEADER + network.largest_sent() as usize);
        let rx = FramePool::new(config.depth.min(RX_FRAMES), LARGEST_RECEIVED);
        Self::with_pools(config, PortSettings::new(network, config), [tx, rx], Some(uplink))
    }

    /// A vacant place: without buffers, so that no frame passes.
    pub fn vacant() -> Self {
        let config = PortConfig::new(String::new(), PathBuf::new(), Mac::BROADCAST);
        let pools = [FramePool::new(0, 0), FramePool::new(0, 0)];
        Self::with_pools(&config, PortSettings::default(), pools, None)
    }

    fn with_pools(
        config: &PortConfig,
        settings: PortSettings,
        [tx, rx]: [FramePool; 2],
        uplink: Option<Uplink>,
    ) -> Self {
        let largest = if uplink.is_some() { LARGEST_RECEIVED } else { 0 };
        let (broadcast, broadcast_frame) = config.broadcast_bucket();
        Self {
            name: config.name.clone(),
            member: 0,
            rules: PortRules::new(config),
            uplink,
            slots: Default::default(),
            tx,
            rx,
            broadcast,
            broadcast_frame,
            groups_again_at: None,
            readable: true,
            poll_armed: false,
            retry_at: None,
            settings,
            cutters: [Cutter::new(largest), Cutter::new(largest)],
            sent: FlowMeter::new(),
            received: FlowMeter::new(),
            promises: [PromiseCounters::default(); 2],
            drops: Drops::default(),
            hold: Hold::default(),
            broken_queues: 0,
            urgency: UrgencyEventfd::default(),
            moderation: Moderation::default(),
            disconnect_reply: None,
            segments: Vec::with_capacity(MAX_DESCRIPTORS * 4),
            chains: Vec::with_capacity(MAX_CHAINS),
        }
    }

    fn vring(&mut self, queue: QueueId) -> Option<&mut Vring> {
        self.slots[usize::from(queue)].vring.as_mut().filter(|v| !v.broken && v.stopping.is_none())
    }

    /// Whether the VM may have frames to send, and a buffer is free.
    pub fn needs_fetch(&mut self) -> bool {
        let has_work = |port: &mut Self| {
            port.cutters[usize::from(TX)].is_busy() || port.vring(TX).is_some_and(|vring| vring.active)
        };
        self.hold.until.is_none() && self.tx.has_free() && has_work(self)
    }

    /// Whether the limit on broadcasts allows one now, which is then charged.
    pub fn takes_broadcast(&mut self, now: Nanos) -> bool {
        let allows = self.broadcast.ready_at(now, self.broadcast_frame) <= now;
        if allows {
            self.broadcast.take(now, self.broadcast_frame);
        }
        allows
    }

    /// Whether large segments pass to the VM whole.
    pub fn takes_whole(&self, is_ipv6: bool) -> bool {
        let features = self.slots[usize::from(RX)].vring.as_ref().map_or(0, |vring| vring.features);
        self.settings.whole[usize::from(RX)] && feature::takes_segments(features, is_ipv6)
    }

    /// Lets the kernel segment frames to the VM, and complete checksums, where the VM or a cap
    /// needs that.
    pub fn set_offloads(&self, features: u64) {
        let whole = self.settings.whole[usize::from(RX)];
        let features =
            if whole { features } else { features & !(feature::GUEST_TSO[0] | feature::GUEST_TSO[1]) };
        if let Some(Err(e)) = self.uplink.as_ref().map(|uplink| uplink::set_offloads(uplink, features)) {
            crate::log::write_line(format_args!("{}: offloads: {e}", self.name));
        }
    }

    /// Whether a frame from the uplink has a buffer here, and one of the VM. Without one of the VM,
    /// asks for a kick.
    pub fn can_receive(&mut self) -> bool {
        let is_cutting = self.cutters[usize::from(RX)].is_busy();
        if !(self.readable || is_cutting) || !self.rx.has_free() || self.hold.until.is_some() {
            return false;
        }
        let waiting = self.rx.taken() as u16;
        let Some(vring) = self.vring(RX).filter(|vring| vring.active) else { return false };
        let mem = std::sync::Arc::clone(&vring.mem);
        for _ in 0..2 {
            let Ok(available) = vring.queue.avail_idx(&mem.mem, std::sync::atomic::Ordering::Acquire) else {
                vring.broken = true;
                break;
            };
            if available.0.wrapping_sub(vring.queue.next_avail()) > waiting {
                return true;
            }
            if !matches!(vring.queue.enable_notification(&mem.mem), Ok(true)) {
                break;
            }
            // The VM's buffers suffice for the waiting frames only: no kick announces more.
            if waiting > 0 {
                return false;
            }
        }
        vring.active = waiting > 0;
        self.broken_queues += u64::from(self.slots[usize::from(RX)].vring.as_ref().is_some_and(|v| v.broken));
        false
    }

    /// Whether a frame of the VM may be too large for a buffer of `tx`.
    fn fetches_segments(&self) -> bool {
        let features = self.slots[usize::from(TX)].vring.as_ref().map_or(0, |vring| vring.features);
        features & (feature::HOST_TSO[0] | feature::HOST_TSO[1]) != 0 && !self.settings.whole[usize::from(TX)]
    }

    /// The buffer of [`Port::fetch`].
    pub fn fetched(&mut self) -> Option<&mut [u8]> {
        if self.fetches_segments() {
            return Some(self.cutters[usize::from(TX)].buffer());
        }
        self.tx.first_free()
    }

    /// Moves the frame of [`Port::fetch`] into the free buffer of `tx`; whether it fits.
    pub fn move_fetched(&mut self, len: usize) -> bool {
        if !self.fetches_segments() {
            return true;
        }
        let Self { tx, cutters, .. } = self;
        let to = tx.first_free().and_then(|buffer| buffer.get_mut(..len));
        to.map(|to| to.copy_from_slice(&cutters[usize::from(TX)].buffer()[..len])).is_some()
    }

    /// Copies the next frame of the VM into the buffer of [`Port::fetched`], and completes its
    /// chain.
    pub fn fetch(&mut self) -> Fetched {
        let fetches_segments = self.fetches_segments();
        let Self { name, slots, tx, cutters, broken_queues, .. } = self;
        let Some(vring) = slots[usize::from(TX)].vring.as_mut() else { return Fetched::Empty };
        let buffer = if fetches_segments { Some(cutters[usize::from(TX)].buffer()) } else { tx.first_free() };
        let Some(buffer) = buffer else { return Fetched::Empty };
        let mem = std::sync::Arc::clone(&vring.mem);
        for retry in [false, true] {
            let Ok(mut chains) = vring.queue.iter(&mem.mem) else { break };
            if let Some(chain) = chains.next() {
                let head = chain.head_index();
                let copied = copy_from_guest(&mem.mem, chain, buffer, vring.features);
                if mem.is_lost() {
                    break;
                }
                vring.add_used(head, 0);
                return copied;
            }
            match vring.queue.enable_notification(&mem.mem) {
                Ok(false) => {
                    vring.active = false;
                    return Fetched::Empty;
                }
                // The queue holds something; when it cannot be read after this, it never can.
                Ok(true) if !retry && vring.queue.disable_notification(&mem.mem).is_ok() => {}
                _ => break,
            }
        }
        vring.broken = true;
        vring.log_loss(name);
        *broken_queues += 1;
        Fetched::Empty
    }

    /// Copies a frame of `rx` to the VM.
    pub fn deliver(&mut self, slot: u32) -> Delivered {
        let Self { name, slots, rx, segments, chains, broken_queues, .. } = self;
        let serving = slots[usize::from(RX)].vring.as_mut().filter(|v| !v.broken && v.stopping.is_none());
        let Some(vring) = serving else { return Delivered::NoBuffer };
        let bytes = rx.bytes(slot);
        let mem = std::sync::Arc::clone(&vring.mem);
        let header = header_length(vring.features);
        let mergeable = vring.features & feature::MRG_RXBUF != 0;
        let len = bytes.len() - HEADER + header;
        let before = vring.queue.next_avail();
        segments.clear();
        chains.clear();
        if !gather_buffers(&mem.mem, &mut vring.queue, len, mergeable, segments, chains) {
            // The chains go back to the VM: a frame takes all of its buffers or none.
            vring.queue.set_next_avail(before);
            if mem.is_lost() {
                vring.broken = true;
                vring.log_loss(name);
                *broken_queues += 1;
            }
            return Delivered::NoBuffer;
        }
        if header == HEADER {
            let count = chains.len() as u16;
            bytes[LEGACY_HEADER..HEADER].copy_from_slice(&count.to_le_bytes());
        }
        let parts = [&bytes[..header], &bytes[HEADER..]];
        if write_segments(&mem.mem, segments, &parts).is_err() || mem.is_lost() {
            vring.broken = true;
        }
        publish(vring, chains);
        vring.log_loss(name);
        *broken_queues += u64::from(vring.broken);
        if vring.broken { Delivered::NoBuffer } else { Delivered::Yes }
    }
}

/// Length of virtio-net's header under these features.
fn header_length(features: u64) -> usize {
    if features & (VERSION_1 | feature::MRG_RXBUF) == 0 { LEGACY_HEADER } else { HEADER }
}

/// Copies a chain; the length is that with a header of [`HEADER`] bytes.
fn copy_from_guest(
    mem: &Memory,
    chain: impl Iterator<Item = virtio_queue::desc::split::Descriptor>,
    buffer: &mut [u8],
    features: u64,
) -> Fetched {
    let header = header_length(features);
    // A shorter header leaves the number of buffers out, which has no meaning here.
    let shift = HEADER - header;
    let mut len = 0;
    for (i, descriptor) in chain.enumerate() {
        if i >= MAX_DESCRIPTORS || descriptor.is_write_only() {
            return Fetched::Malformed;
        }
        let part = descriptor.len() as usize;
        let Some(to) = buffer.get_mut(shift + len..shift + len + part) else { return Fetched::TooLong };
        if mem.read_slice(to, descriptor.addr()).is_err() {
            return Fetched::Malformed;
        }
        len += part;
    }
    if shift > 0 {
        buffer.copy_within(shift..shift + header, 0);
        buffer[header..HEADER].fill(0);
    }
    if len > header { Fetched::Frame(len + shift) } else { Fetched::Malformed }
}

/// Takes chains whose writable buffers hold `len` bytes.
fn gather_buffers(
    mem: &Memory,
    queue: &mut Queue,
    len: usize,
    mergeable: bool,
    segments: &mut Vec<Segment>,
    chains: &mut Vec<(u16, u32)>,
) -> bool {
    let mut room = 0;
    while room < len {
        if chains.len() == chains.capacity() || (!mergeable && !chains.is_empty()) {
            return false;
        }
        let Ok(mut available) = queue.iter(mem) else { return false };
        let Some(chain) = available.next() else { return false };
        let head = chain.head_index();
        let before = room;
        // Readable descriptors count too: a walk over them costs as much.
        for descriptor in chain.take(MAX_DESCRIPTORS).filter(|descriptor| descriptor.is_write_only()) {
            if room >= len || segments.len() == segments.capacity() {
                break;
            }
            let part = (descriptor.len() as usize).min(len - room);
            segments.push(Segment { addr: descriptor.addr(), len: part as u32 });
            room += part;
        }
        if room == before {
            // A chain without room is useless, and stays with the VM.
            return false;
        }
        chains.push((head, (room - before) as u32));
    }
    true
}

/// Writes consecutive parts into consecutive segments.
fn write_segments(
    mem: &Memory,
    segments: &[Segment],
    parts: &[&[u8]; 2],
) -> Result<(), vm_memory::GuestMemoryError> {
    let (mut part, mut from) = (0, 0);
    for segment in segments {
        let (mut at, mut left) = (segment.addr.0, segment.len as usize);
        while left > 0 && part < parts.len() {
            let n = left.min(parts[part].len() - from);
            mem.write_slice(&parts[part][from..from + n], GuestAddress(at))?;
            (at, left, from) = (at + n as u64, left - n, from + n);
            if from == parts[part].len() {
                (part, from) = (part + 1, 0);
            }
        }
    }
    Ok(())
}

/// Completes the chains of one frame. The VM must see all of them at once: Linux drops a frame of
/// which it sees a part.
fn publish(vring: &mut Vring, chains: &[(u16, u32)]) {
    let Some(((head, len), rest)) = chains.split_first() else { return };
    if rest.is_empty() {
        return vring.add_used(*head, *len);
    }
    let mem = std::sync::Arc::clone(&vring.mem);
    let (ring, size) = (vring.queue.used_ring(), vring.queue.size());
    let mut next = vring.queue.next_used();
    for (head, len) in chains {
        let at = GuestAddress(ring + 4 + 8 * u64::from(next % size));
        let element = u64::from(*head) | u64::from(*len) << 32;
        vring.broken |= *head >= size || mem.mem.write_obj(element.to_le(), at).is_err();
        next = next.wrapping_add(1);
    }
    if vring.broken {
        return;
    }
    let index = GuestAddress(ring + 2);
    let stored = mem.mem.store(next.to_le(), index, std::sync::atomic::Ordering::Release);
    vring.broken |= stored.is_err();
    vring.queue.set_next_used(next);
    // The queue does not know how many entries are new.
    vring.force_notify = true;
}
