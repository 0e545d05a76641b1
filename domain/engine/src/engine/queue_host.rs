//! Start, kicks, calls and stop of a queue, for disks and network ports.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use rtvirtio_sched::VmId;
use rtvirtio_units::Nanos;
use virtio_queue::QueueT;

use super::queue_id::{QueueId, QueueToken};
use super::slot::{Draining, QueueSlot};
use super::uring::{Completion, CompletionToken, Uring};
use super::vring::{StartError, Vring, VringStart};
use crate::memory::GuestMem;

/// An event loop that serves queues of VMs.
pub trait QueueHost {
    /// Submission ring of the loop.
    fn ring(&mut self) -> &mut Uring;

    fn queue_slot(&mut self, vm: VmId, queue: QueueId) -> Option<&mut QueueSlot>;

    /// A number that no recent queue of the loop had.
    fn next_generation(&mut self) -> u32;

    /// Called when nothing of one of the VM's queues is in flight in the kernel any more.
    fn on_drained(&mut self, vm: VmId);

    /// Called when one of the VM's queues is served, with its memory.
    fn on_started(&mut self, _vm: VmId, _mem: &Arc<GuestMem>) {}

    /// Called when one of the VM's queues is not served any more, before the control thread learns
    /// of it.
    fn on_retired(&mut self, _vm: VmId) {}

    /// Starts a queue as soon as the kernel has completed the operations of its predecessor.
    fn start(
        &mut self,
        vm: VmId,
        queue: QueueId,
        start: Box<VringStart>,
        reply: SyncSender<Result<u16, StartError>>,
    ) -> io::Result<()> {
        let refuse = |why: StartError| {
            let _ = reply.send(Err(why));
            Ok(())
        };
        let Some(slot) = self.queue_slot(vm, queue) else {
            return refuse(StartError::NoQueue(queue));
        };
        if slot.vring.is_some() || slot.pending.is_some() {
            return refuse(StartError::Running(queue));
        }
        if slot.draining.is_some() {
            slot.pending = Some((start, reply));
            return self.cancel_call_write(vm, queue);
        }
        let done = self.start_vring(vm, queue, *start)?;
        let _ = reply.send(done);
        Ok(())
    }

    /// Serves a queue whose slot is free. The inner error refuses the queue; after the outer one,
    /// of io_uring, the engine cannot go on.
    fn start_vring(
        &mut self,
        vm: VmId,
        queue: QueueId,
        start: VringStart,
    ) -> io::Result<Result<u16, StartError>> {
        let mut vring = match Vring::new(start, self.next_generation()) {
            Ok(vring) => vring,
            Err(why) => return Ok(Err(why)),
        };
        // Polled before it is stored: every served queue is polled.
        let token = CompletionToken::Kick(QueueToken::new(vm, queue, vring.generation));
        self.ring().arm_kick(vring.kick.fd(), token)?;
        vring.kick_armed = true;
        let lost = vring.lost;
        let mem = Arc::clone(&vring.mem);
        self.on_started(vm, &mem);
        drop(mem);
        if let Some(slot) = self.queue_slot(vm, queue) {
            slot.vring = Some(vring);
        }
        Ok(Ok(lost))
    }

    /// Stops serving a queue: its slot drains.
    fn retire_vring(&mut self, vm: VmId, queue: QueueId) -> io::Result<()> {
        let slot = self.queue_slot(vm, queue);
        let Some(mut vring) = slot.and_then(|slot| slot.vring.take()) else { return Ok(()) };
        let token = QueueToken::new(vm, queue, vring.generation);
        let stopped = vring.stopping.take().map(|reply| (reply, vring.queue.next_avail()));
        let mut draining = Draining {
            generation: vring.generation,
            kick: vring.kick_armed.then_some(vring.kick),
            call: vring.call_write,
            final_call: None,
        };
        // Completions without a notification: the guest gets one before QEMU learns that the queue
        // has stopped. By io_uring, because the descriptor may be full.
        if vring.notify_pending || vring.force_notify || vring.call_again {
            match (&draining.call, vring.call) {
                (Some(_), call) => draining.final_call = call,
                (None, Some(call)) => {
                    self.ring().signal_eventfd(call.as_raw_fd(), CompletionToken::Call(token))?;
                    draining.call = Some(call);
                }
                (None, None) => {}
            }
        }
        if draining.kick.is_some() {
            self.ring().cancel(CompletionToken::Kick(token))?;
        }
        if let Some(slot) = self.queue_slot(vm, queue).filter(|_| !draining.is_done()) {
            slot.draining = Some(draining);
        }
        // Submitted at once: the write to a non-blocking eventfd is done when QEMU learns of the
        // stop. Any other write may be late or never done, and the guest is notified at the next
        // start (`force_notify`).
        self.ring().enter(false, Nanos(0), Nanos(0))?;
        self.on_retired(vm);
        // QEMU's next message may replace the memory: the control thread unmaps it, not this one.
        drop((vring.mem, vring.inflight));
        if let Some((reply, next_avail)) = stopped {
            let _ = reply.send(next_avail);
        }
        Ok(())
    }

    /// Cancels a call write, which may wait for ever on a full eventfd.
    fn cancel_call_write(&mut self, vm: VmId, queue: QueueId) -> io::Result<()> {
        let slot = self.queue_slot(vm, queue);
        let Some(draining) = slot.and_then(|slot| slot.draining.as_mut()) else { return Ok(()) };
        draining.final_call = None;
        if draining.call.is_none() {
            return Ok(());
        }
        let token = CompletionToken::Call(QueueToken::new(vm, queue, draining.generation));
        self.ring().cancel(token)
    }

    /// An operation of a draining slot has completed; the last one lets a pending start go on.
    fn finish_draining(&mut self, vm: VmId, queue: QueueId) -> io::Result<()> {
        let Some(slot) = self.queue_slot(vm, queue) else { return Ok(()) };
        if slot.draining.as_ref().is_some_and(|d| !d.is_done()) {
            return Ok(());
        }
        slot.draining = None;
        if let Some((start, reply)) = slot.pending.take() {
            let done = self.start_vring(vm, queue, *start)?;
            let _ = reply.send(done);
        }
        self.on_drained(vm);
        Ok(())
    }

    /// The poll of a kick descriptor completes: the guest kicked, or the poll has ended.
    fn on_kick(&mut self, token: QueueToken, completion: Completion) -> io::Result<()> {
        let Some(slot) = self.queue_slot(token.vm(), token.queue()) else { return Ok(()) };
        if let Some(vring) = slot.serving(token) {
            vring.kick_armed = completion.more;
            if !completion.more && completion.result < 0 && completion.result != -libc::ECANCELED {
                // The descriptor cannot be polled.
                vring.broken = true;
                return Ok(());
            }
            vring.active = true;
            if vring.kick.fd().is_stream && completion.result == 0 {
                // The other end is closed: nothing is announced any more.
                return Ok(());
            }
            if !completion.more && !vring.paused {
                vring.kick_armed = true;
                let kick = vring.kick.fd();
                return self.ring().arm_kick(kick, completion.token);
            }
        } else if let Some(draining) = slot.draining(token) {
            if !completion.more {
                draining.kick = None;
                return self.finish_draining(token.vm(), token.queue());
            }
        }
        Ok(())
    }

    /// The write to a call descriptor completes.
    fn on_call(&mut self, token: QueueToken) -> io::Result<()> {
        let Some(slot) = self.queue_slot(token.vm(), token.queue()) else { return Ok(()) };
        if let Some(vring) = slot.serving(token) {
            vring.call_write = None;
            vring.force_notify |= std::mem::take(&mut vring.call_again);
        } else if let Some(draining) = slot.draining(token) {
            draining.call = draining.final_call.take();
            if let Some(call) = &draining.call {
                let fd = call.as_raw_fd();
                return self.ring().signal_eventfd(fd, CompletionToken::Call(token));
            }
            return self.finish_draining(token.vm(), token.queue());
        }
        Ok(())
    }

    /// Replaces the call descriptor of a served queue.
    fn set_call(&mut self, vm: VmId, queue: QueueId, call: Option<std::fs::File>) -> io::Result<()> {
        let Some(vring) = self.queue_slot(vm, queue).and_then(|slot| slot.vring.as_mut()) else {
            return Ok(());
        };
        vring.call = call.map(Arc::new);
        vring.force_notify = true;
        // The write to the old descriptor may wait for ever; the new one must not wait for it.
        let waits = vring.call_write.is_some();
        let token = CompletionToken::Call(QueueToken::new(vm, queue, vring.generation));
        if waits { self.ring().cancel(token) } else { Ok(()) }
    }
}

/// Signals the call descriptor of a queue, if its guest wants to be notified of completions.
pub fn notify_guest(ring: &mut Uring, vm: VmId, queue: QueueId, slot: &mut QueueSlot) -> io::Result<bool> {
    let Some(vring) = slot.vring.as_mut() else { return Ok(false) };
    let pending = std::mem::take(&mut vring.notify_pending);
    // Checked only when the used ring has new entries: each check resets the event index.
    let wanted = pending && vring.wants_call();
    vring.force_notify |= wanted;
    let Some(call) = vring.call.as_ref().filter(|_| vring.force_notify) else { return Ok(false) };
    vring.force_notify = false;
    if vring.call_write.is_some() {
        vring.call_again = true;
        return Ok(true);
    }
    vring.call_write = Some(Arc::clone(call));
    let token = CompletionToken::Call(QueueToken::new(vm, queue, vring.generation));
    ring.signal_eventfd(call.as_raw_fd(), token)?;
    Ok(true)
}
