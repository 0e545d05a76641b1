//! Notifications in both directions: kicks of guests, and calls to them.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use virtio_queue::QueueT;

use super::EventLoop;
use crate::engine::uring::{Completion, CompletionToken};

impl EventLoop {
    /// Signals the call descriptors of guests that want to be notified of completions.
    pub(super) fn notify_guests(&mut self) -> io::Result<()> {
        for (i, vm) in self.vms.iter_mut().enumerate() {
            for (q, slot) in vm.slots.iter_mut().enumerate() {
                let Some(vring) = slot.vring.as_mut() else { continue };
                let pending = std::mem::take(&mut vring.notify_pending);
                // Asked only when the used ring has new entries: each question resets the event
                // index.
                let wanted = pending && vring.queue.needs_notification(&vring.mem.mem).unwrap_or(true);
                vring.force_notify |= wanted;
                let Some(call) = vring.call.as_ref().filter(|_| vring.force_notify) else { continue };
                vring.force_notify = false;
                if vring.call_write.is_some() {
                    vring.call_again = true;
                    continue;
                }
                vring.call_write = Some(Arc::clone(call));
                let token = CompletionToken::Call(i as u16, q as u16, vring.generation as u16);
                self.ring.signal_eventfd(call.as_raw_fd(), token)?;
            }
        }
        Ok(())
    }

    /// The poll of a kick descriptor completes: the guest kicked, or the poll has ended.
    pub(super) fn on_kick(
        &mut self,
        (vm, q, generation): (u16, u16, u16),
        completion: Completion,
    ) -> io::Result<()> {
        let Some(slot) = self.queue_slot(vm.into(), q) else { return Ok(()) };
        if let Some(vring) = slot.serving(generation) {
            vring.kick_armed = completion.more;
            if !completion.more && completion.result < 0 {
                // The descriptor cannot be polled.
                vring.broken = true;
                return Ok(());
            }
            vring.active = true;
            if !completion.more {
                vring.kick_armed = true;
                let fd = vring.kick.as_raw_fd();
                return self.ring.arm_poll(fd, completion.token);
            }
        } else if let Some(draining) = slot.draining(generation) {
            if !completion.more {
                draining.kick = None;
                return self.finish_draining(vm.into(), q.into());
            }
        }
        Ok(())
    }

    /// The write to a call descriptor completes.
    pub(super) fn on_call(&mut self, (vm, q, generation): (u16, u16, u16)) -> io::Result<()> {
        let Some(slot) = self.queue_slot(vm.into(), q) else { return Ok(()) };
        if let Some(vring) = slot.serving(generation) {
            vring.call_write = None;
            vring.force_notify |= std::mem::take(&mut vring.call_again);
        } else if let Some(draining) = slot.draining(generation) {
            draining.call = draining.final_call.take();
            if let Some(call) = &draining.call {
                let fd = call.as_raw_fd();
                return self.ring.signal_eventfd(fd, CompletionToken::Call(vm, q, generation));
            }
            return self.finish_draining(vm.into(), q.into());
        }
        Ok(())
    }

    /// Replaces the call descriptor of a served queue.
    pub(super) fn set_call(&mut self, vm: usize, index: u16, call: Option<std::fs::File>) -> io::Result<()> {
        let Some(vring) = self.queue_slot(vm, index).and_then(|slot| slot.vring.as_mut()) else {
            return Ok(());
        };
        vring.call = call.map(Arc::new);
        vring.force_notify = true;
        // The write to the old descriptor may wait for ever; the new one must not wait for it.
        let waits = vring.call_write.is_some();
        let token = CompletionToken::Call(vm as u16, index, vring.generation as u16);
        if waits { self.ring.cancel(token) } else { Ok(()) }
    }
}
