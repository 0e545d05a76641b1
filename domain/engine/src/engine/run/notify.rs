//! Notifications in both directions, and the end of queues.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use rtvirtio_units::Nanos;
use virtio_queue::QueueT;

use super::super::slot::Draining;
use super::super::uring::{About, Answer};
use super::Loop;

impl Loop {
    /// Writes the calls of guests that want to know of completions.
    pub(super) fn notify_guests(&mut self) -> io::Result<()> {
        for (i, vm) in self.vms.iter_mut().enumerate() {
            for (q, slot) in vm.slots.iter_mut().enumerate() {
                let Some(vring) = slot.vring.as_mut() else { continue };
                let told = std::mem::take(&mut vring.tell);
                // Asked only when something was added: asking starts the count anew.
                let wanted = told && vring.queue.needs_notification(&vring.mem.mem).unwrap_or(true);
                vring.must_call |= wanted;
                let Some(call) = vring.call.as_ref().filter(|_| vring.must_call) else { continue };
                vring.must_call = false;
                if vring.calling.is_some() {
                    vring.call_again = true;
                    continue;
                }
                vring.calling = Some(Arc::clone(call));
                let about = About::Call(i as u16, q as u16, vring.generation as u16);
                self.ring.ring(call.as_raw_fd(), about)?;
            }
        }
        Ok(())
    }

    /// A poll of a kick descriptor: the guest kicked, or the poll has ended.
    pub(super) fn on_kick(&mut self, (vm, q, generation): (u16, u16, u16), answer: Answer) -> io::Result<()> {
        let Some(slot) = self.slot(vm.into(), q) else { return Ok(()) };
        if let Some(vring) = slot.serving(generation) {
            vring.kick_armed = answer.more;
            if !answer.more && answer.result < 0 {
                // A descriptor that cannot be waited for.
                vring.broken = true;
                return Ok(());
            }
            vring.active = true;
            if !answer.more {
                vring.kick_armed = true;
                let fd = vring.kick.as_raw_fd();
                return self.ring.watch(fd, answer.about);
            }
        } else if let Some(draining) = slot.draining(generation) {
            if !answer.more {
                draining.kick = None;
                return self.drained(vm.into(), q.into());
            }
        }
        Ok(())
    }

    /// The write to a call descriptor has ended.
    pub(super) fn on_call(&mut self, (vm, q, generation): (u16, u16, u16)) -> io::Result<()> {
        let Some(slot) = self.slot(vm.into(), q) else { return Ok(()) };
        if let Some(vring) = slot.serving(generation) {
            vring.calling = None;
            vring.must_call |= std::mem::take(&mut vring.call_again);
        } else if let Some(draining) = slot.draining(generation) {
            draining.call = draining.last_call.take();
            if let Some(call) = &draining.call {
                let fd = call.as_raw_fd();
                return self.ring.ring(fd, About::Call(vm, q, generation));
            }
            return self.drained(vm.into(), q.into());
        }
        Ok(())
    }

    /// Another call descriptor for a queue that is served.
    pub(super) fn set_call(&mut self, vm: usize, index: u16, call: Option<std::fs::File>) -> io::Result<()> {
        let Some(vring) = self.slot(vm, index).and_then(|slot| slot.vring.as_mut()) else { return Ok(()) };
        vring.call = call.map(Arc::new);
        vring.must_call = true;
        // The write to the old one may be waiting for a reader for ever; the new one must not.
        let waits = vring.calling.is_some();
        let about = About::Call(vm as u16, index, vring.generation as u16);
        if waits { self.ring.cancel(about) } else { Ok(()) }
    }

    /// A queue is not served any more: its place drains.
    pub(super) fn end(&mut self, vm: usize, q: usize) -> io::Result<()> {
        let Some(mut vring) = self.vms[vm].slots[q].vring.take() else { return Ok(()) };
        let generation = vring.generation as u16;
        let stopped = vring.stopping.take().map(|reply| (reply, vring.queue.next_avail()));
        let mut draining = Draining {
            generation: vring.generation,
            kick: vring.kick_armed.then_some(vring.kick),
            call: vring.calling,
            last_call: None,
        };
        // Completions that the guest was not notified of: it is, before QEMU hears that the queue
        // has stopped. By io_uring, because the descriptor may be full.
        if vring.tell || vring.must_call || vring.call_again {
            match (&draining.call, vring.call) {
                (Some(_), call) => draining.last_call = call,
                (None, Some(call)) => {
                    self.ring.ring(call.as_raw_fd(), About::Call(vm as u16, q as u16, generation))?;
                    draining.call = Some(call);
                }
                (None, None) => {}
            }
        }
        if draining.kick.is_some() {
            self.ring.cancel(About::Kick(vm as u16, q as u16, generation))?;
        }
        if !draining.is_done() {
            self.vms[vm].slots[q].draining = Some(draining);
        }
        // Handed over at once: the call to an eventfd that does not block is written when QEMU
        // hears of the stop. Any other may be written later, or not at all, and a guest is notified
        // when its queue is started again (`must_call`).
        self.ring.enter(false, Nanos(0), Nanos(0))?;
        // QEMU's next message may replace the memory: this thread is not the one that unmaps it.
        drop((vring.mem, vring.inflight));
        if let Some((reply, next_avail)) = stopped {
            let _ = reply.send(next_avail);
        }
        Ok(())
    }

    /// Ends what may take for ever: the write of a call that nobody reads.
    pub(super) fn hurry(&mut self, vm: usize, q: usize) -> io::Result<()> {
        let Some(draining) = &mut self.vms[vm].slots[q].draining else { return Ok(()) };
        draining.last_call = None;
        if draining.call.is_none() {
            return Ok(());
        }
        let about = About::Call(vm as u16, q as u16, draining.generation as u16);
        self.ring.cancel(about)
    }

    /// An operation of a place that drains has ended: what waited for the last one goes on.
    fn drained(&mut self, vm: usize, q: usize) -> io::Result<()> {
        let slot = &mut self.vms[vm].slots[q];
        if slot.draining.as_ref().is_some_and(|d| !d.is_done()) {
            return Ok(());
        }
        slot.draining = None;
        if let Some((start, reply)) = slot.pending.take() {
            let done = self.start_now(vm, q as u16, *start)?;
            let _ = reply.send(done);
        }
        self.tell_of_leaving(vm);
        Ok(())
    }

    /// A VM that leaves is gone when nothing of it is at the device or with the kernel.
    pub(super) fn tell_of_leaving(&mut self, i: usize) {
        let vm = &mut self.vms[i];
        if vm.leaving.is_some()
            && self.scheduler.outstanding(i) == 0
            && vm.slots.iter().all(|s| s.draining.is_none())
        {
            if let Some(reply) = vm.leaving.take() {
                let _ = reply.send(());
            }
        }
    }
}
