//! Requests from guests' queues to the scheduler.
//!
//! One thread serves all VMs, so what one VM makes it do is time of all others. Requests for the
//! scheduler are bounded by their number (a VM's depth) and by the device. What costs no device
//! time is bounded here: requests that are completed at once (get id, malformed, beyond the disk)
//! and looks at queues in which there is nothing. A VM that needs more than a few of these in one
//! round is *throttled*: throttled VMs have their turns, one after the other, in rounds in which
//! there is nothing else to do and otherwise now and then, and share one budget of time.

use std::sync::Arc;

use rtvirtio_sched::{Op, Request};
use rtvirtio_units::Nanos;
use virtio_queue::{QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress};

use super::super::data::write_id;
use super::super::vring::Vring;
use super::{Loop, Vm, now};
use crate::blk::{self, Parsed};

/// Chains taken from a VM's queues before the next VM has its turn.
const BATCH: u32 = 32;
/// And no longer than this, whatever they are: chains may be long, and their memory cold.
const BATCH_NS: u64 = 50_000;
/// Requests completed at once, and looks in vain, that a VM has in a round before it is throttled.
const IMMEDIATE_BATCH: u32 = 4;
/// Time at once that all throttled VMs share.
const THROTTLED_NS: u64 = 20_000;
/// They wait no longer than this.
const THROTTLED_EVERY_NS: u64 = 500_000;

/// What a VM took of one round.
#[derive(Clone, Copy, Debug, Default)]
struct Taken {
    chains: u32,
    immediate: u32,
}

impl Loop {
    /// Finds out whether guests put something into their queues without being asked to kick.
    pub(super) fn poll_avail_rings(&mut self) {
        for vring in self.vms.iter_mut().flat_map(|vm| vm.slots.iter_mut()).filter_map(|s| s.vring.as_mut()) {
            let there = vring.queue.avail_idx(&vring.mem.mem, std::sync::atomic::Ordering::Acquire);
            if there.is_ok_and(|i| i.0 != vring.queue.next_avail()) {
                vring.active = true;
            }
        }
    }

    /// Takes requests from the queues. Returns whether there was one.
    pub(super) fn fetch(&mut self) -> bool {
        let mut any = false;
        for vm in 0..self.vms.len() {
            if !self.vms[vm].throttled && self.vms[vm].wants() {
                any |= self.fetch_from_vm(vm, IMMEDIATE_BATCH, BATCH_NS).chains > 0;
            }
        }
        let progress = std::mem::take(&mut self.pieces_back) || any;
        if self.vms.iter().any(|vm| vm.throttled) {
            let begin = now();
            if !progress || begin.0 - self.last_throttled.0 >= THROTTLED_EVERY_NS {
                any |= self.fetch_throttled(begin);
                self.last_throttled = now();
            }
        }
        any
    }

    /// The throttled VMs go on where the last turn ended.
    fn fetch_throttled(&mut self, begin: Nanos) -> bool {
        let mut any = false;
        let (n, first) = (self.vms.len(), self.next_throttled);
        for i in 0..n {
            let vm = (first + i) % n;
            if !self.vms[vm].throttled {
                continue;
            }
            let used = now().0 - begin.0;
            if used >= THROTTLED_NS {
                self.next_throttled = vm;
                return any;
            }
            let mut again = false;
            if self.vms[vm].wants() {
                let taken = self.fetch_from_vm(vm, BATCH, THROTTLED_NS - used);
                any |= taken.chains > 0;
                again = taken.immediate > 0;
            }
            // A turn in which it asks for nothing, or only for the device, ends it.
            self.vms[vm].throttled = again;
            self.next_throttled = (vm + 1) % n;
        }
        any
    }

    /// Takes a batch from a VM's queues, the next queue first in the next round.
    fn fetch_from_vm(&mut self, vm: usize, immediate: u32, ns: u64) -> Taken {
        let begin = now();
        let mut taken = Taken::default();
        let queues = self.vms[vm].slots.len();
        for i in 0..queues {
            let q = (self.vms[vm].next_queue + i) % queues;
            if !self.vms[vm].slots[q].vring.as_ref().is_some_and(Vring::wants) {
                continue;
            }
            let before = taken;
            self.fetch_from_queue((vm, q), &mut taken, immediate, Nanos(begin.0 + ns));
            if self.vms[vm].starved {
                // There is no room for a request of any of its queues.
                break;
            }
            taken.immediate += u32::from(taken.chains == before.chains);
            if taken.immediate >= immediate || taken.chains >= BATCH || now().0 - begin.0 >= ns {
                break;
            }
        }
        let vm = &mut self.vms[vm];
        vm.next_queue = (vm.next_queue + 1) % queues.max(1);
        vm.throttled |= taken.immediate >= immediate;
        taken
    }

    fn fetch_from_queue(&mut self, (vm, q): (usize, usize), taken: &mut Taken, immediate: u32, until: Nanos) {
        let time = now();
        let Self { vms, scheduler, .. } = self;
        let Vm { disk, slots, requests, malformed, broken, starved, .. } = &mut vms[vm];
        let Some(vring) = slots[q].vring.as_mut() else { return };
        let mem = Arc::clone(&vring.mem);
        if vring.queue.disable_notification(&mem.mem).is_err() {
            vring.broken = true;
        }
        let rule = scheduler.rule(vm);
        let mut nothing = 0;
        while taken.chains < BATCH && taken.immediate < immediate && !vring.broken && now() < until {
            let Some((slot, room)) = requests.free() else {
                // As many as it may have: goes on when one is answered.
                vring.active = false;
                *starved = true;
                break;
            };
            let (head, parsed) = if let Some(head) = vring.again.pop() {
                let chain =
                    blk::chain_at(&mem.mem, GuestAddress(vring.queue.desc_table()), vring.queue.size(), head);
                (head, blk::parse(&mem.mem, chain, &disk.backing.limits, &mut room.segments))
            } else {
                let chain = match vring.queue.iter(&mem.mem) {
                    Ok(mut chains) => chains.next(),
                    Err(_) => {
                        vring.broken = true;
                        break;
                    }
                };
                let Some(chain) = chain else {
                    match vring.queue.enable_notification(&mem.mem) {
                        Ok(true) => {
                            // Something is there now; when it still cannot be read, it never can.
                            nothing += 1;
                            vring.broken |=
                                nothing > 1 || vring.queue.disable_notification(&mem.mem).is_err();
                            continue;
                        }
                        Ok(false) => vring.active = false,
                        Err(_) => vring.broken = true,
                    }
                    break;
                };
                nothing = 0;
                let head = chain.head_index();
                if let Some(inflight) = &mut vring.inflight {
                    inflight.taken(head);
                }
                (head, blk::parse(&mem.mem, chain, &disk.backing.limits, &mut room.segments))
            };
            taken.chains += 1;
            taken.immediate += 1;
            match parsed {
                // Without flushes there is no way to say when these are on stable storage.
                Ok(Parsed::Io { op: Op::Discard | Op::WriteZeroes, status, .. }) if vring.write_through => {
                    finish(vring, head, status, blk::UNSUPPORTED, 0);
                }
                Ok(Parsed::Io { op, offset, len, priority, unmap, status }) => {
                    (room.vring, room.generation, room.head) = (q as u16, vring.generation, head);
                    (room.op, room.len, room.unmap, room.status) = (op, len, unmap, status);
                    (room.offset, room.failed, room.unsupported) =
                        (disk.backing.start + offset, false, false);
                    (room.write_through, room.given) = (vring.write_through, Nanos(0));
                    room.mem = Some(Arc::clone(&mem));
                    let priority = rule.of(priority);
                    let request = Request { tag: slot.into(), op, len, priority, arrival: time };
                    if scheduler.submit(vm, request).is_ok() {
                        requests.take();
                        vring.outstanding += 1;
                        taken.immediate -= 1;
                    } else {
                        // The tables have the same size, so this is a defect; the guest must not
                        // wait for ever.
                        finish(vring, head, status, blk::IO_ERROR, 0);
                    }
                }
                Ok(Parsed::Id { status }) => {
                    let written = write_id(&mem.mem, &room.segments, &disk.serial);
                    finish(vring, head, status, blk::OK, written);
                }
                Ok(Parsed::Answer { status, code }) => finish(vring, head, status, code, 0),
                Err(_) => {
                    *malformed += 1;
                    vring.answer(head, 0);
                }
            }
        }
        *broken += u64::from(vring.broken);
    }
}

/// Status byte and used ring.
pub(super) fn finish(vring: &mut Vring, head: u16, status: GuestAddress, code: u8, len: u64) {
    let mem = Arc::clone(&vring.mem);
    if mem.mem.write_obj(code, status).is_err() {
        vring.answer(head, 0);
        return;
    }
    vring.answer(head, u32::try_from(len + 1).unwrap_or(u32::MAX));
}
