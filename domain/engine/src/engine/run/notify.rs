//! Notifications of guests.

use std::io;
use std::sync::Arc;

use rtvirtio_sched::VmId;

use super::EventLoop;
use crate::engine::queue_host::{QueueHost, notify_guest};
use crate::engine::queue_id::QueueId;
use crate::engine::slot::QueueSlot;
use crate::engine::uring::Uring;
use crate::memory::GuestMem;

impl EventLoop {
    /// Signals the call descriptors of guests that want to be notified of completions. A VM's
    /// urgency eventfd is signalled before: it raises the vCPUs of the guest.
    pub(super) fn notify_guests(&mut self) -> io::Result<()> {
        for (i, vm) in self.vms.iter_mut_enumerated() {
            vm.urgency.signal(&mut self.ring)?;
            for (queue, slot) in vm.slots.iter_mut_enumerated() {
                notify_guest(&mut self.ring, i, queue, slot)?;
            }
        }
        Ok(())
    }
}

impl QueueHost for EventLoop {
    fn ring(&mut self) -> &mut Uring {
        &mut self.ring
    }

    fn queue_slot(&mut self, vm: VmId, queue: QueueId) -> Option<&mut QueueSlot> {
        self.vms.get_mut(vm)?.slot(queue)
    }

    fn next_generation(&mut self) -> u32 {
        self.generation = self.generation.wrapping_add(1);
        self.generation
    }

    fn on_drained(&mut self, vm: VmId) {
        self.reply_to_disconnect(vm);
    }

    fn on_started(&mut self, vm: VmId, mem: &Arc<GuestMem>) {
        let Some(vm) = self.vms.get_mut(vm) else { return };
        let name = vm.disk.as_ref().map_or("", |disk| &disk.name);
        vm.buffers.replace(&mut self.ring, mem, name);
    }

    fn on_retired(&mut self, vm: VmId) {
        let Some(vm) = self.vms.get_mut(vm) else { return };
        if vm.slots.iter().all(|slot| slot.vring.is_none()) {
            let name = vm.disk.as_ref().map_or("", |disk| &disk.name);
            vm.buffers.release(&mut self.ring, name);
        }
    }
}
