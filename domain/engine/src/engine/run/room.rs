//! Requests that wait for room: held, tried again, given back.

use std::io;

use rtvirtio_sched::{CompletedRequest, Request, VmId};
use rtvirtio_units::Nanos;

use super::{EventLoop, now};
use crate::engine::queue_id::QueueId;
use crate::engine::vring::Vring;
use crate::log::write_line;

impl EventLoop {
    /// Keeps a request that found no room on the file system. `false` where it is to be completed.
    pub(super) fn hold(&mut self, time: Nanos, completed: &CompletedRequest) -> io::Result<bool> {
        let CompletedRequest { vm: i, request: scheduled } = *completed;
        let vm = &mut self.vms[i];
        let Some(disk) = vm.disk.as_ref().filter(|disk| disk.waits_for_room) else { return Ok(false) };
        let Some(request) = vm.requests.get(scheduled.tag as u32) else { return Ok(false) };
        if !request.failed || !request.lacks_room {
            return Ok(false);
        }
        let vring = vm.slots.get(request.queue).and_then(|s| s.vring.as_ref());
        let Some(vring) = vring.filter(|v| v.generation == request.generation) else { return Ok(false) };
        if vring.stopping.is_some() {
            return self.leave_inflight(i, scheduled.tag);
        }
        if vm.slots.iter().filter_map(|s| s.vring.as_ref()).any(Vring::ends_recovery) {
            return Ok(false);
        }
        let has_waited = request.arrived.is_some();
        request.retry(scheduled.arrival);
        if vm.room.add(time, scheduled, has_waited) {
            write_line(format_args!(
                "{}: no room for its writes on the host's file system; they wait until there is some",
                disk.name
            ));
        }
        self.has_held = true;
        Ok(true)
    }

    /// Tries waiting requests whose time has come. Returns the moment of the next attempt.
    pub(super) fn try_held(&mut self) -> io::Result<Nanos> {
        let mut next = Nanos(u64::MAX);
        if !std::mem::take(&mut self.has_held) {
            return Ok(next);
        }
        let time = now();
        for i in self.vms.indices() {
            if let Some(request) = self.vms[i].room.next(time) {
                self.submit_again(time, i, request)?;
            }
            self.has_held |= self.vms[i].room.len() > 0;
            next = next.min(self.vms[i].room.retry_at().unwrap_or(Nanos(u64::MAX)));
        }
        Ok(next)
    }

    fn submit_again(&mut self, time: Nanos, vm: VmId, request: Request) -> io::Result<()> {
        // A deadline counts from now: the time without room is not the scheduler's.
        let request = Request { arrival: time, ..request };
        self.scheduler.submit(vm, request).map_err(io::Error::other)
    }

    /// A request ends. Where it was one that had waited and found room, the others are tried.
    pub(super) fn end_held(&mut self, time: Nanos, vm: VmId, tag: u64, is_success: bool) -> io::Result<()> {
        let Some(waited) = self.vms[vm].room.end(time, tag, is_success) else { return Ok(()) };
        if let (Some(disk), true) = (&self.vms[vm].disk, self.vms[vm].room.is_logged()) {
            write_line(format_args!("{}: there is room again for its writes, after {waited}", disk.name));
        }
        for request in self.vms[vm].room.take(|_| true) {
            self.submit_again(time, vm, request)?;
        }
        Ok(())
    }

    /// Ends the waiting requests of a queue that stops. All of its VM's where they may take the
    /// places of those that the queue serves before: a stop does not wait for room.
    pub(super) fn release_held(&mut self, time: Nanos, i: VmId, queue: QueueId) -> io::Result<()> {
        let vm = &mut self.vms[i];
        let vring = vm.slots.get(queue).and_then(|s| s.vring.as_ref());
        let of_all = vring.is_some_and(Vring::ends_recovery);
        let requests = &mut vm.requests;
        let is_of = |r: &Request| {
            let request = requests.get(r.tag as u32);
            of_all || request.is_none_or(|request| request.queue == queue)
        };
        for request in vm.room.take(is_of) {
            if !self.leave_inflight(i, request.tag)? {
                // No later start of the queue would complete it.
                if let Some(request) = self.vms[i].requests.get(request.tag as u32) {
                    (request.failed, request.result) = (true, -libc::ENOSPC);
                }
                self.complete_request(time, &CompletedRequest { vm: i, request })?;
            }
        }
        Ok(())
    }

    /// Ends a request without an answer, where its queue stops and has memory of requests in
    /// flight: the next start of the queue takes it from there. `false` where there is no such
    /// memory, and in a live migration, which does not take that memory along.
    fn leave_inflight(&mut self, i: VmId, tag: u64) -> io::Result<bool> {
        let vm = &mut self.vms[i];
        let Some(request) = vm.requests.get(tag as u32) else { return Ok(false) };
        let (queue, generation) = (request.queue, request.generation);
        let vring = vm.slots.get(queue).and_then(|s| s.vring.as_ref());
        let vring = vring.filter(|v| v.generation == generation && v.stopping.is_some());
        if !vring.is_some_and(|v| v.inflight.is_some() && !v.moves()) {
            return Ok(false);
        }
        vm.requests.release(tag as u32);
        vm.room.end(Nanos(0), tag, false);
        self.finish_chain(i, queue, generation, |_| {})?;
        Ok(true)
    }
}
