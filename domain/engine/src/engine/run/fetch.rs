//! Fetches requests from the available rings and queues them in the scheduler.
//!
//! One thread serves all VMs, so work for one VM delays all others. Requests for the scheduler are
//! bounded by their number (a VM's depth) and by the device. Work without device time is bounded
//! here: requests that complete at once (get id, malformed, beyond the disk) and polls of empty
//! queues. A VM that exceeds a small number of these in one round is *deferred*: deferred VMs are
//! fetched from in turn, in rounds without other work and otherwise at intervals, and share one
//! time budget.

use std::sync::Arc;

use rtvirtio_sched::{Idx, Op, Request, VmId};
use rtvirtio_units::Nanos;
use virtio_queue::QueueT;

use super::{EventLoop, now};
use crate::blk::{self, Malformed, Parsed, Refused};
use crate::engine::data::write_serial;
use crate::engine::queue_id::QueueId;
use crate::engine::trace::TraceEvent;
use crate::engine::vm::Vm;
use crate::engine::vring::Vring;

/// Chains fetched from a VM's queues in one turn.
const FETCH_BATCH: u32 = 32;
/// Time limit of a turn: chains may be long, and their memory cold.
const FETCH_BATCH_NS: u64 = 50_000;
/// Requests completed at once, and polls of empty queues, in one round before a VM is deferred.
const IMMEDIATE_BATCH: u32 = 4;
/// Time budget that all deferred VMs share.
const DEFERRED_NS: u64 = 20_000;
/// Longest interval between two turns of deferred VMs.
const DEFERRED_EVERY_NS: u64 = 500_000;

/// The counter of chains that are no valid requests, in the trace.
const MALFORMED: &str = "malformed";

/// Counts of one turn of a VM.
#[derive(Clone, Copy, Debug, Default)]
struct Fetched {
    chains: u32,
    immediate: u32,
}

impl EventLoop {
    /// Polls the available rings, for guests that add requests without a kick.
    pub(super) fn poll_avail_rings(&mut self) {
        for vring in self.vms.iter_mut().flat_map(|vm| vm.slots.iter_mut()).filter_map(|s| s.vring.as_mut()) {
            vring.poll();
        }
    }

    /// Fetches requests. Returns whether there was one.
    pub(super) fn fetch(&mut self) -> bool {
        let mut any = false;
        for vm in self.vms.indices() {
            if !self.vms[vm].deferred && self.vms[vm].needs_fetch() {
                any |= self.fetch_from_vm(vm, IMMEDIATE_BATCH, FETCH_BATCH_NS).chains > 0;
            }
        }
        let progress = std::mem::take(&mut self.had_completions) || any;
        if self.vms.iter().any(|vm| vm.deferred) {
            let begin = now();
            if !progress || begin.0 - self.last_deferred.0 >= DEFERRED_EVERY_NS {
                any |= self.fetch_deferred(begin);
                self.last_deferred = now();
            }
        }
        any
    }

    /// Fetches from deferred VMs, starting where the last turn ended.
    fn fetch_deferred(&mut self, begin: Nanos) -> bool {
        let mut any = false;
        let (n, first) = (self.vms.len(), self.next_deferred);
        for i in 0..n {
            let vm = VmId::from_usize((first.index() + i) % n);
            if !self.vms[vm].deferred {
                continue;
            }
            let used = now().0 - begin.0;
            if used >= DEFERRED_NS {
                self.next_deferred = vm;
                return any;
            }
            let mut again = false;
            if self.vms[vm].needs_fetch() {
                let fetched = self.fetch_from_vm(vm, FETCH_BATCH, DEFERRED_NS - used);
                any |= fetched.chains > 0;
                again = fetched.immediate > 0;
            }
            // A turn without immediate work ends the throttling.
            self.vms[vm].deferred = again;
            self.next_deferred = VmId::from_usize((vm.index() + 1) % n);
        }
        any
    }

    /// Fetches a batch from a VM's queues; each round starts with another queue.
    fn fetch_from_vm(&mut self, vm: VmId, immediate: u32, ns: u64) -> Fetched {
        let begin = now();
        let mut fetched = Fetched::default();
        let queues = self.vms[vm].slots.len();
        for i in 0..queues {
            let queue = QueueId(((self.vms[vm].next_queue + i) % queues) as u16);
            if !self.vms[vm].slots[queue].vring.as_ref().is_some_and(Vring::needs_fetch) {
                continue;
            }
            let before = fetched;
            self.fetch_from_queue((vm, queue), &mut fetched, immediate, Nanos(begin.0 + ns));
            if self.vms[vm].depth_exhausted {
                // The table is full for all of its queues.
                break;
            }
            fetched.immediate += u32::from(fetched.chains == before.chains);
            if fetched.immediate >= immediate || fetched.chains >= FETCH_BATCH || now().0 - begin.0 >= ns {
                break;
            }
        }
        let vm = &mut self.vms[vm];
        vm.next_queue = (vm.next_queue + 1) % queues.max(1);
        vm.deferred |= fetched.immediate >= immediate;
        fetched
    }

    fn fetch_from_queue(
        &mut self,
        (vm, queue): (VmId, QueueId),
        fetched: &mut Fetched,
        immediate: u32,
        until: Nanos,
    ) {
        let time = now();
        let Self { vms, scheduler, trace, .. } = self;
        let Vm { disk, slots, requests, faults, member, depth_exhausted, .. } = &mut vms[vm];
        let (Some(disk), Some(vring)) = (disk, slots[queue].vring.as_mut()) else { return };
        let mem = Arc::clone(&vring.mem);
        if vring.queue.disable_notification(&mem.mem).is_err() {
            vring.broken = true;
        }
        let rule = scheduler.rule(vm);
        let mut trace_refused = |reason, status| {
            if let Some(trace) = trace {
                let of = TraceEvent { vm, member: *member, queue: queue.0, ..TraceEvent::EMPTY };
                trace.record(TraceEvent { refused: Some(reason), status, arrival: time, ..of });
            }
        };
        while fetched.chains < FETCH_BATCH
            && fetched.immediate < immediate
            && vring.needs_fetch()
            && now() < until
        {
            let Some((slot, request)) = requests.first_free() else {
                // The table is full: fetching resumes at a completion.
                vring.active = false;
                *depth_exhausted = true;
                break;
            };
            let limits = &disk.backing.limits;
            let Some((head, parsed)) = vring.pop_request(&mem, limits, &mut request.segments) else { break };
            if mem.is_lost() {
                // What was read may be zeroes in place of a request.
                vring.broken = true;
                break;
            }
            fetched.chains += 1;
            fetched.immediate += 1;
            match parsed {
                // Without flushes the guest cannot make these stable.
                Ok(Parsed::Io { op: Op::Discard | Op::WriteZeroes, status, .. }) if vring.write_through => {
                    faults.refused.count(Refused::Unsupported);
                    trace_refused(Refused::Unsupported.name(), blk::UNSUPPORTED);
                    vring.complete(head, status, blk::UNSUPPORTED, 0);
                }
                Ok(Parsed::Io { op, offset, len, priority, unmap, status }) => {
                    (request.queue, request.generation, request.head) = (queue, vring.generation, head);
                    (request.op, request.len, request.unmap, request.status) = (op, len, unmap, status);
                    request.reset();
                    request.offset = disk.backing.start + offset;
                    request.write_through = vring.write_through;
                    request.mem = Some(Arc::clone(&mem));
                    let priority = rule.decode(priority);
                    let queued = Request { tag: slot.into(), op, len, priority, arrival: time };
                    if scheduler.submit(vm, queued).is_ok() {
                        requests.mark_used();
                        vring.outstanding += 1;
                        fetched.immediate -= 1;
                    } else {
                        // The tables have the same size, so this is a defect; the guest must not
                        // wait for ever.
                        faults.errors += 1;
                        faults.last_error = Some(-libc::EIO);
                        vring.complete(head, status, blk::IO_ERROR, 0);
                    }
                }
                Ok(Parsed::Id { status }) => {
                    let written = write_serial(&mem.mem, &request.segments, &disk.serial);
                    vring.complete(head, status, blk::OK, written);
                }
                Ok(Parsed::Empty { status }) => vring.complete(head, status, blk::OK, 0),
                Ok(Parsed::Refused { status, why }) => {
                    faults.refused.count(why);
                    trace_refused(why.name(), why.code());
                    vring.complete(head, status, why.code(), 0);
                }
                Err(why) => {
                    faults.malformed += 1;
                    if why == Malformed::Memory {
                        faults.refused.count(Refused::OutsideMemory);
                        trace_refused(Refused::OutsideMemory.name(), blk::IO_ERROR);
                    } else {
                        trace_refused(MALFORMED, blk::IO_ERROR);
                    }
                    vring.add_used(head, 0);
                }
            }
        }
        vring.log_loss(&disk.name);
        faults.broken_queues += u64::from(vring.broken);
    }
}
