//! From io_uring completions to the used ring.

use std::io;
use std::os::fd::AsRawFd;

use rtvirtio_sched::{Class, CompletedRequest, Op, VmId};
use rtvirtio_units::Nanos;

use super::EventLoop;
use crate::blk::{self, Refused};
use crate::engine::data::{copy_to_guest, mark_read};
use crate::engine::queue_host::QueueHost;
use crate::engine::queue_id::QueueId;
use crate::engine::trace::TraceEvent;
use crate::engine::uring::{Completion, CompletionToken};
use crate::engine::vring::Vring;

/// Time for which a piece is submitted again that the kernel refuses (`EAGAIN`: no memory for a
/// request). After that the piece has failed, and its guest gets an I/O error.
const REFUSED_NS: u64 = 5_000_000_000;

impl EventLoop {
    pub(super) fn handle_cqe(&mut self, time: Nanos, completion: Completion) -> io::Result<()> {
        match completion.token {
            CompletionToken::Ignored | CompletionToken::Uplink(_) => Ok(()),
            CompletionToken::Piece(index) => {
                self.had_completions = true;
                self.on_completion(time, index, completion.result)
            }
            CompletionToken::Kick(token) => self.on_kick(token, completion),
            CompletionToken::Call(token) => self.on_call(token),
            CompletionToken::Doorbell => {
                let mut count = [0u8; 8];
                let _ = rustix::io::read(&self.doorbell, &mut count);
                self.run_commands(time)?;
                if completion.more {
                    Ok(())
                } else {
                    self.ring.arm_poll(self.doorbell.as_raw_fd(), CompletionToken::Doorbell)
                }
            }
        }
    }

    /// The kernel completes an operation of a piece.
    pub(super) fn on_completion(&mut self, time: Nanos, index: u32, result: i32) -> io::Result<()> {
        let Some(slot) = self.pieces.get(index as usize) else { return Ok(()) };
        let Some(piece) = slot.piece else { return Ok(()) };
        let mut result = result;
        if slot.is_reading_first && slot.is_whole(&piece, result) {
            match self.write_blocks(index, &piece)? {
                Ok(()) => return Ok(()),
                Err(code) => result = code,
            }
        }
        self.vms[piece.vm].block_writes.end(index);
        self.end_piece(time, index, result)?;
        self.start_waiting(piece.vm)
    }

    /// A piece ends with the kernel's result.
    fn end_piece(&mut self, time: Nanos, index: u32, result: i32) -> io::Result<()> {
        let Some(slot) = self.pieces.get_mut(index as usize) else { return Ok(()) };
        let Some(piece) = slot.piece.take() else { return Ok(()) };
        self.free_pieces.push(index);
        if result == -libc::EAGAIN || result == -libc::EINTR {
            let since = *slot.refused_since.get_or_insert(time);
            // A piece that the kernel refuses for ever must not keep the engine busy.
            if time.0.saturating_sub(since.0) < REFUSED_NS {
                return self.submit_piece(time, piece);
            }
        }
        slot.refused_since = None;
        if result == -libc::EPERM && self.config.pass_priority {
            crate::log::write_line(format_args!(
                "{}: the guests' classes are not passed on: that needs CAP_SYS_NICE",
                self.config.name
            ));
            self.config.pass_priority = false;
            return self.submit_piece(time, piece);
        }
        let vm = &mut self.vms[piece.vm];
        let whole = slot.is_whole(&piece, result);
        if let Some(request) = vm.requests.get(piece.tag as u32) {
            if !whole {
                let op = if slot.is_reading_first { Op::Read } else { piece.op };
                request.fail(op, result);
            }
            request.unsupported |= result == -libc::EOPNOTSUPP && !piece.op.moves_data();
            let mem = request.mem.clone().filter(|_| piece.op == Op::Read);
            match mem.map(|mem| (mem, slot.bounced)) {
                Some((mem, true)) if whole => {
                    if let Err(e) = copy_to_guest(slot, request, &mem.mem, &piece) {
                        (request.failed, request.result) = (true, e);
                    }
                }
                // Written by the kernel, before the guest learns of it.
                Some((mem, false)) => mark_read(request, &mem, &piece),
                _ => {}
            }
        }
        if !whole {
            // The request has failed: its remaining pieces are not submitted.
            self.scheduler.cancel_remainder(&piece);
        }
        // A piece unknown to the scheduler would hold its slot for ever, and its guest would wait
        // for ever.
        let done = self.scheduler.complete(time, &piece).map_err(io::Error::other)?;
        done.map_or(Ok(()), |completed| self.complete_request(time, &completed))
    }

    pub(super) fn complete_request(&mut self, time: Nanos, completed: &CompletedRequest) -> io::Result<()> {
        if self.hold(time, completed)? {
            return Ok(());
        }
        let vm = &mut self.vms[completed.vm];
        let tag = completed.request.tag as u32;
        let Some(request) = vm.requests.get(tag) else { return Ok(()) };
        let mut completed = *completed;
        completed.request.arrival = request.arrived.unwrap_or(completed.request.arrival);
        let latency = Nanos(time.0.saturating_sub(completed.request.arrival.0));
        vm.latencies[request.op.direction().index()].record(latency);
        if request.failed && request.unsupported {
            vm.faults.refused.count(Refused::Unsupported);
        } else if request.failed {
            vm.faults.errors += 1;
            vm.faults.last_error = Some(request.result);
        }
        let (queue, generation, head, status) =
            (request.queue, request.generation, request.head, request.status);
        let code = match (request.failed, request.unsupported) {
            (false, _) => blk::OK,
            (true, true) => blk::UNSUPPORTED,
            (true, false) => blk::IO_ERROR,
        };
        let len = if request.op == Op::Read && !request.failed { request.len } else { 0 };
        vm.urgency.note(completed.request.priority.class);
        if let Some((took, missed)) = request.promise.judge(time) {
            let class = usize::from(completed.request.priority.class != Class::RealTime);
            vm.promises[class].record(took, missed);
        }
        if let Some(trace) = &mut self.trace {
            trace.record(TraceEvent::new(time, vm.member, &completed, request, code));
        }
        let is_success = !request.failed;
        vm.requests.release(tag);
        self.end_held(time, completed.vm, completed.request.tag, is_success)?;
        self.finish_chain(completed.vm, queue, generation, |vring| vring.complete(head, status, code, len))
    }

    /// A request leaves its queue; a stopping queue ends with its last one.
    pub(super) fn finish_chain(
        &mut self,
        i: VmId,
        queue: QueueId,
        generation: u32,
        put_used: impl FnOnce(&mut Vring),
    ) -> io::Result<()> {
        let vm = &mut self.vms[i];
        let mut stopped = false;
        let vring = vm.slots.get_mut(queue).and_then(|s| s.vring.as_mut());
        if let Some(vring) = vring.filter(|v| v.generation == generation) {
            put_used(vring);
            vring.outstanding -= 1;
            stopped = vring.stopping.is_some() && vring.is_drained();
        }
        if stopped {
            self.retire_vring(i, queue)?;
        }
        let vm = &mut self.vms[i];
        if std::mem::take(&mut vm.depth_exhausted) {
            for vring in vm.slots.iter_mut().filter_map(|s| s.vring.as_mut()) {
                vring.active = true;
            }
        }
        self.reply_to_disconnect(i);
        Ok(())
    }
}
