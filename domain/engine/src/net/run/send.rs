//! Frames from the VMs.

use std::io;

use rtvirtio_domain_config::{Mac, OFFLOADED_FRAME, SHORTEST_FRAME};
use rtvirtio_sched::{Class, Next, Op, Piece, Priority, Request, VmId};
use rtvirtio_units::Nanos;
use virtio_queue::QueueT;

use super::NetLoop;
use crate::engine::{TraceCommand as _, TraceWriter, now};
use crate::net::command::NetCommand;
use crate::net::frame::{Delivery, Frame, HEADER, is_valid_header, segmentation};
use crate::net::port::{Fetched, Port, TX};
use crate::net::segment::Cut;
use crate::net::trace::{Fate, FrameEvent};
use crate::net::uplink;

/// Frames fetched from a VM in one turn, and their time limit: chains may be long.
const FETCH_BATCH: u32 = 32;
const FETCH_BATCH_NS: u64 = 50_000;
/// Frames sent to the uplinks in one round.
const SEND_BATCH: u32 = 64;

impl NetLoop {
    /// Fetches frames of all VMs. Returns whether there was one.
    pub(super) fn fetch_all(&mut self, time: Nanos) -> bool {
        let mut any = false;
        for i in 0..self.ports.len() {
            let port = self.after(self.first, i);
            if self.ports[port].needs_fetch() {
                any |= self.fetch_from(port, time);
                self.lap(Some(port));
            }
        }
        any
    }

    fn fetch_from(&mut self, i: VmId, time: Nanos) -> bool {
        let dropped = |trace: &mut Option<Box<TraceWriter<FrameEvent>>>, member, fate, len: usize| {
            if let Some(trace) = trace {
                trace.record(FrameEvent { member, ..FrameEvent::dropped(i, true, fate, len - HEADER, time) });
            }
        };
        let switches = self.switches;
        let features = {
            let vring = self.ports[i].slots[usize::from(TX)].vring.as_mut();
            vring.map_or(0, |vring| {
                vring.broken |= vring.queue.disable_notification(&vring.mem.mem).is_err();
                vring.features
            })
        };
        let mut fetched = 0;
        while fetched < FETCH_BATCH && self.ports[i].needs_fetch() {
            if fetched % 8 == 7 && now().0 - time.0 > FETCH_BATCH_NS {
                break;
            }
            let port = &mut self.ports[i];
            if port.cutters[usize::from(TX)].is_busy() {
                fetched += 1;
                self.fetch_cut(i, time);
                continue;
            }
            let len = match port.fetch() {
                Fetched::Empty => break,
                Fetched::Malformed => {
                    fetched += 1;
                    port.drops.malformed += 1;
                    port.hold.fruitless += 1;
                    dropped(&mut self.trace, port.member, Fate::Malformed, HEADER);
                    continue;
                }
                Fetched::TooLong => {
                    fetched += 1;
                    port.drops.too_long += 1;
                    port.hold.fruitless += 1;
                    dropped(&mut self.trace, port.member, Fate::TooLong, HEADER);
                    continue;
                }
                Fetched::Frame(len) => len,
            };
            fetched += 1;
            let Some(bytes) = port.fetched().map(|buffer| &buffer[..len]) else { break };
            let frame = Frame::parse(&bytes[HEADER..]).filter(|_| is_valid_header(bytes, features));
            let ipv6 = segmentation(bytes);
            let cut = ipv6.and_then(|_| Cut::parse(bytes));
            let Some(frame) = frame.filter(|_| ipv6.is_some() == cut.is_some()) else {
                port.drops.malformed += 1;
                port.hold.fruitless += 1;
                dropped(&mut self.trace, port.member, Fate::Malformed, len);
                continue;
            };
            if !port.rules.may_send(&frame) {
                port.drops.spoofed += 1;
                port.hold.fruitless += 1;
                dropped(&mut self.trace, port.member, Fate::Spoofed, len);
                continue;
            }
            if !port.rules.may_send_to_link(&frame) {
                port.drops.link_local += 1;
                port.hold.fruitless += 1;
                dropped(&mut self.trace, port.member, Fate::LinkLocal, len);
                continue;
            }
            let priority = port.rules.priority(&frame);
            let passes_whole = port.settings.whole[usize::from(TX)];
            let longest = if passes_whole { OFFLOADED_FRAME as usize } else { self.largest_frame };
            let is_cut = cut.filter(|_| {
                let taken = |to: &Port| to.takes_whole(ipv6 == Some(true));
                let inside = |mac| self.ports.iter().find(|p| p.uplink.is_some() && p.rules.mac() == mac);
                // A group may have a member that receives no segments.
                !passes_whole
                    || switches && frame.destination.is_group()
                    || switches && inside(frame.destination).is_some_and(|to| !taken(to))
            });
            let port = &mut self.ports[i];
            match is_cut {
                Some(cut) if cut.longest() > longest => {
                    port.drops.too_long += 1;
                    port.hold.fruitless += 1;
                    dropped(&mut self.trace, port.member, Fate::TooLong, len);
                }
                Some(cut) => {
                    if passes_whole {
                        let Port { tx, cutters, .. } = port;
                        let Some(whole) = tx.first_free() else { break };
                        cutters[usize::from(TX)].buffer()[..len].copy_from_slice(&whole[..len]);
                    }
                    port.cutters[usize::from(TX)].begin(cut, len, priority);
                }
                None if len - HEADER <= longest && port.move_fetched(len) => {
                    self.enqueue_fetched(i, len, priority, time)
                }
                None => {
                    port.drops.too_long += 1;
                    port.hold.fruitless += 1;
                    dropped(&mut self.trace, port.member, Fate::TooLong, len);
                }
            }
        }
        // More is fetched in the next round, when there is room.
        self.pending |= self.ports[i].needs_fetch();
        fetched > 0
    }

    /// Queues the next frame of a segment that is being segmented.
    fn fetch_cut(&mut self, i: VmId, time: Nanos) {
        let Port { tx, cutters, .. } = &mut self.ports[i];
        let Some(buffer) = tx.first_free() else { return };
        if let Some((len, priority)) = cutters[usize::from(TX)].next_into(buffer) {
            self.enqueue_fetched(i, len, priority, time);
        }
    }

    /// Queues the frame in the first free buffer of a port, for the link.
    pub(super) fn enqueue_fetched(&mut self, i: VmId, len: usize, priority: Priority, time: Nanos) {
        let port = &mut self.ports[i];
        let Some(slot) = port.tx.take(len, time) else { return };
        let len = ((len - HEADER) as u64).max(SHORTEST_FRAME);
        let request = Request { tag: slot.into(), op: Op::Write, len, priority, arrival: time };
        if self.tx.submit(i, request).is_err() {
            // The tables have the same size, so this is a defect; the buffer is not lost.
            port.tx.release(slot);
            port.drops.malformed += 1;
        } else {
            port.sent.meter.on_submit(time);
            port.hold.useful += 1;
        }
    }

    /// Sends all frames that the scheduler admits; returns the moment of the next one.
    pub(super) fn dispatch_to_link(&mut self) -> Nanos {
        for _ in 0..SEND_BATCH {
            let time = now();
            while let Some((at, piece)) = self.link.pop_completed(time) {
                let _ = self.tx.complete(at, &piece);
            }
            match self.tx.next(time) {
                Next::Piece(piece) => {
                    if let Some(at) = self.regulator_wakeup.take_if(|at| time >= *at) {
                        self.regulator_lateness.record(Nanos(time.0 - at.0));
                    }
                    self.send(time, piece);
                    self.lap(Some(piece.vm));
                }
                Next::Wait(at) => {
                    self.regulator_wakeup = Some(at);
                    return at;
                }
                Next::Full => {
                    self.regulator_wakeup = None;
                    return self.link.next_completion().unwrap_or(Nanos(u64::MAX));
                }
                Next::Idle => {
                    self.regulator_wakeup = None;
                    return Nanos(u64::MAX);
                }
            }
        }
        self.pending = true;
        Nanos(0)
    }

    fn send(&mut self, time: Nanos, piece: Piece) {
        let (i, slot) = (piece.vm, piece.tag as u32);
        let sent_at = if self.ordered {
            self.link.submit(time, piece)
        } else {
            let _ = self.tx.complete(time, &piece);
            time
        };
        let port = &mut self.ports[i];
        let bytes = port.tx.bytes(slot);
        let len = (bytes.len() - HEADER) as u64;
        let destination = Frame::parse(&bytes[HEADER..]).map(|frame| frame.destination);
        let own = self.switches && destination.is_some_and(|to| self.pass_inside(i, slot, to, time));
        let port = &mut self.ports[i];
        let mut fate = Fate::Passed;
        if !own {
            let written = match &port.uplink {
                Some(uplink) => uplink::write(uplink, port.tx.bytes(slot)),
                None => Ok(()),
            };
            match written {
                Err(e) if e.raw_os_error() == Some(libc::EMSGSIZE) => {
                    port.drops.too_long += 1;
                    fate = Fate::TooLong;
                }
                Err(e) if e.kind() != io::ErrorKind::Interrupted => {
                    port.drops.refused += 1;
                    fate = Fate::Refused;
                }
                Ok(()) | Err(_) => {}
            }
        }
        let arrival = port.tx.arrival(slot);
        port.tx.release(slot);
        if piece.due > Nanos(0) && piece.due < Nanos(u64::MAX) {
            let class = usize::from(piece.priority.class != Class::RealTime);
            let took = Nanos(sent_at.0.saturating_sub(piece.eligible_at.0));
            port.promises[class].record(took, sent_at > piece.due);
        }
        let more = port.tx.taken() > 0;
        port.sent.record(time, arrival, len, more);
        if self.trace.is_some() {
            self.record(FrameEvent {
                port: i,
                sent: true,
                fate,
                len,
                priority: piece.priority,
                reserved: piece.reserved,
                arrival,
                wait: Nanos(time.0.saturating_sub(arrival.0)),
                passing: Nanos(sent_at.0.saturating_sub(time.0)),
                ..NetCommand::EMPTY
            });
        }
    }

    /// Copies a frame to the ports that it is for; whether no other receiver exists.
    fn pass_inside(&mut self, from: VmId, slot: u32, to: Mac, time: Nanos) -> bool {
        let mut is_inside = false;
        for other in self.ports.indices().filter(|other| *other != from) {
            let (before, after) = self.ports.split_at_mut(from.max(other));
            let (Some(low), Some(high)) = (before.get_mut(from.min(other)), after.first_mut()) else {
                continue;
            };
            let (source, port) = if from < other { (low, high) } else { (high, low) };
            if port.uplink.is_none() {
                continue;
            }
            let bytes = source.tx.bytes(slot);
            let Some(frame) = Frame::parse(&bytes[HEADER..]) else { return false };
            match port.rules.delivery(&frame) {
                Delivery::Drop => continue,
                Delivery::Limited if !port.takes_broadcast(time) => {
                    port.drops.broadcast += 1;
                    let len = bytes.len() - HEADER;
                    self.record(FrameEvent::dropped(other, false, Fate::Broadcast, len, time));
                    continue;
                }
                Delivery::Limited => {}
                Delivery::Accept => is_inside |= !to.is_group(),
            }
            let len = bytes.len();
            let Some(buffer) = port.rx.first_free().and_then(|buffer| buffer.get_mut(..len)) else {
                port.drops.no_buffer += 1;
                self.record(FrameEvent::dropped(other, false, Fate::NoBuffer, len - HEADER, time));
                continue;
            };
            buffer.copy_from_slice(bytes);
            self.enqueue_received(other, len, time, frame);
        }
        is_inside
    }
}
