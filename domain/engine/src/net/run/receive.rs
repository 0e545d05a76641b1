//! Frames to the VMs.

use std::io;

use rtvirtio_domain_resources::uplink::Uplink;
use rtvirtio_sched::{Class, Next, Op, Piece, Priority, Request, VmId};
use rtvirtio_units::Nanos;

use super::NetLoop;
use crate::engine::{TraceCommand as _, now};
use crate::feature::net as feature;
use crate::net::command::NetCommand;
use crate::net::frame::{Delivery, Frame, HEADER, complete_checksum, segmentation};
use crate::net::port::{Delivered, Port, RX};
use crate::net::segment::Cut;
use crate::net::trace::{Fate, FrameEvent};
use crate::net::uplink;

/// Frames read for a VM in one turn.
const READ_BATCH: u32 = 16;
/// Time until an uplink that failed is read again.
const RETRY_NS: u64 = 100_000_000;
/// Frames delivered in one round.
const DELIVER_BATCH: u32 = 128;

impl NetLoop {
    /// Reads frames for all VMs that can receive them. Returns whether there was one.
    pub(super) fn read_uplinks(&mut self, time: Nanos) -> bool {
        let mut any = false;
        for i in 0..self.ports.len() {
            let port = self.after(self.first, i);
            self.resume(port, time);
            if self.read_for(port, time) {
                any = true;
                self.lap(Some(port));
            }
        }
        any
    }

    fn read_for(&mut self, i: VmId, time: Nanos) -> bool {
        let mut any = false;
        for _ in 0..READ_BATCH {
            let port = &mut self.ports[i];
            if !port.can_receive() {
                return any;
            }
            if port.cutters[usize::from(RX)].is_busy() {
                any = true;
                self.receive_cut(i, time);
                continue;
            }
            let Some(uplink) = &port.uplink else { return any };
            let Some(buffer) = port.rx.first_free() else { return any };
            let len = match uplink::read(uplink, buffer) {
                Ok(len) => len,
                Err(e) => {
                    port.readable = e.kind() == io::ErrorKind::Interrupted;
                    if !matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) {
                        // The interface is down or gone.
                        port.retry_at = Some(Nanos(time.0 + RETRY_NS));
                    }
                    return any;
                }
            };
            any = true;
            let event = |fate| FrameEvent::dropped(i, false, fate, len.saturating_sub(HEADER), time);
            let Some(frame) = buffer.get(HEADER..len).and_then(Frame::parse) else {
                port.drops.filtered += 1;
                self.record(event(Fate::Filtered));
                continue;
            };
            match port.rules.delivery(&frame) {
                Delivery::Drop => {
                    port.drops.filtered += 1;
                    self.record(event(Fate::Filtered));
                }
                Delivery::Limited if !port.takes_broadcast(time) => {
                    port.drops.broadcast += 1;
                    port.close_groups(time);
                    self.record(event(Fate::Broadcast));
                }
                Delivery::Limited | Delivery::Accept => self.enqueue_received(i, len, time, frame),
            }
        }
        self.pending = true;
        any
    }

    /// Queues the frame in the first free buffer of a port.
    pub(super) fn enqueue_received(&mut self, i: VmId, len: usize, time: Nanos, frame: Frame) {
        let port = &mut self.ports[i];
        let priority = port.rules.priority(&frame);
        let Some(ipv6) = port.rx.first_free().map(|buffer| segmentation(&buffer[..len])) else { return };
        if ipv6.is_some_and(|ipv6| !port.takes_whole(ipv6)) {
            if !port.cut_received(len, priority) {
                port.drops.segmented += 1;
                self.record(FrameEvent::dropped(i, false, Fate::Segmented, len - HEADER, time));
            }
            return;
        }
        self.enqueue_to_vm(i, len, priority, time);
    }

    /// Queues the next frame of a segment that is being segmented.
    fn receive_cut(&mut self, i: VmId, time: Nanos) {
        let Port { rx, cutters, .. } = &mut self.ports[i];
        let Some(buffer) = rx.first_free() else { return };
        if let Some((len, priority)) = cutters[usize::from(RX)].next_into(buffer) {
            self.enqueue_to_vm(i, len, priority, time);
        }
    }

    fn enqueue_to_vm(&mut self, i: VmId, len: usize, priority: Priority, time: Nanos) {
        let port = &mut self.ports[i];
        let features = port.slots[usize::from(RX)].vring.as_ref().map_or(0, |v| v.features);
        let Some(bytes) = port.rx.first_free().map(|buffer| &mut buffer[..len]) else { return };
        if features & feature::GUEST_CSUM == 0 {
            complete_checksum(bytes);
        }
        // The burst of a cap covers frames of the network's MTU only.
        if !port.settings.whole[usize::from(RX)] && len - HEADER > self.largest_frame {
            port.drops.segmented += 1;
            return self.record(FrameEvent::dropped(i, false, Fate::Segmented, len - HEADER, time));
        }
        let Some(slot) = port.rx.take(len, time) else { return };
        let request =
            Request { tag: slot.into(), op: Op::Read, len: (len - HEADER) as u64, priority, arrival: time };
        if self.rx.submit(i, request).is_err() {
            port.rx.release(slot);
            port.drops.no_buffer += 1;
            self.record(FrameEvent::dropped(i, false, Fate::NoBuffer, len - HEADER, time));
        } else {
            port.received.meter.on_submit(time);
        }
    }

    /// Delivers all frames that the scheduler admits; returns the moment of the next one.
    pub(super) fn dispatch_to_vms(&mut self) -> Nanos {
        for _ in 0..DELIVER_BATCH {
            let time = now();
            match self.rx.next(time) {
                Next::Piece(piece) => {
                    self.deliver(time, &piece);
                    self.lap(Some(piece.vm));
                }
                // A few frames at once, within their burst: each wake-up costs more than a frame.
                Next::Wait(at) => {
                    let longest =
                        self.ports.iter().filter(|p| p.rx.taken() > 0).map(|p| p.settings.coalesce).min();
                    return Nanos(at.0.saturating_add(longest.unwrap_or_default().0));
                }
                Next::Full | Next::Idle => return Nanos(u64::MAX),
            }
        }
        self.pending = true;
        Nanos(0)
    }

    fn deliver(&mut self, time: Nanos, piece: &Piece) {
        let _ = self.rx.complete(time, piece);
        let port = &mut self.ports[piece.vm];
        let slot = piece.tag as u32;
        let arrival = port.rx.arrival(slot);
        let delivered = port.deliver(slot);
        port.rx.release(slot);
        let more = port.rx.taken() > 0;
        match delivered {
            Delivered::Yes => {
                port.hold.useful += 1;
                port.urgency.note(piece.priority.class);
                if piece.priority.class == Class::RealTime {
                    port.moderation.note_urgent();
                }
                port.received.record(now(), arrival, piece.len, more);
            }
            Delivered::NoBuffer => {
                port.drops.no_buffer += 1;
                port.received.meter.on_complete(time, 0, more);
            }
        }
        // The next check of the queue asks for a kick when there are new buffers.
        if delivered == Delivered::NoBuffer && !more {
            if let Some(vring) = port.slots[usize::from(RX)].vring.as_mut() {
                vring.active = true;
            }
        }
        if self.trace.is_some() {
            self.record(FrameEvent {
                port: piece.vm,
                fate: if delivered == Delivered::Yes { Fate::Passed } else { Fate::NoBuffer },
                len: piece.len,
                priority: piece.priority,
                arrival,
                wait: Nanos(time.0.saturating_sub(arrival.0)),
                passing: Nanos(now().0.saturating_sub(time.0)),
                ..NetCommand::EMPTY
            });
        }
    }

    /// Resumes what was put off until now: reads of an uplink that failed, frames to groups.
    fn resume(&mut self, i: VmId, time: Nanos) {
        let port = &mut self.ports[i];
        if port.retry_at.is_some_and(|at| time >= at) {
            (port.retry_at, port.readable) = (None, true);
        }
        if port.groups_again_at.is_some_and(|at| time >= at) {
            port.groups_again_at = None;
            let _ = port.uplink.as_mut().map(|uplink| uplink.accept_groups(true));
        }
    }

    /// Time at which the next port resumes.
    pub(super) fn next_resume(&self) -> Nanos {
        let moments = self.ports.iter().flat_map(|port| [port.groups_again_at, port.retry_at]);
        moments.flatten().min().unwrap_or(Nanos(u64::MAX))
    }
}

impl Port {
    /// Starts to segment the frame in the first free buffer; `false` if it cannot be segmented, or
    /// another one is.
    fn cut_received(&mut self, len: usize, priority: Priority) -> bool {
        let Self { rx, cutters, .. } = self;
        let (Some(buffer), cutter) = (rx.first_free(), &mut cutters[usize::from(RX)]) else { return false };
        let segment = &buffer[..len];
        let Some(cut) = Cut::parse(segment).filter(|_| !cutter.is_busy()) else { return false };
        cutter.buffer()[..len].copy_from_slice(segment);
        cutter.begin(cut, len, priority);
        true
    }

    /// Stops frames to unlisted groups in the kernel until half of their burst is there again.
    fn close_groups(&mut self, time: Nanos) {
        let half = self.broadcast.burst().div_ceil(2).max(self.broadcast_frame);
        let again = self.broadcast.ready_at(time, half);
        let closes = |uplink: &mut Uplink| uplink.accept_groups(false).is_ok();
        if self.groups_again_at.is_none() && self.uplink.as_mut().is_some_and(closes) {
            self.groups_again_at = Some(again.max(Nanos(time.0 + 1_000_000)));
        }
    }
}
