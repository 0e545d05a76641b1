//! Commands of control threads; start and stop of queues.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::mpsc::SyncSender;

use rtvirtio_sched::{CompletedRequest, Config, Direction};
use rtvirtio_units::Nanos;
use virtio_queue::QueueT;

use super::{EventLoop, max_inflight_pieces, now};
use crate::engine::command::{Command, EngineStatus, ReconfigureError, StartError, VmStatus, VringStart};
use crate::engine::slot::{Draining, QueueSlot};
use crate::engine::uring::CompletionToken;
use crate::engine::vring::Vring;

/// Commands of one round, and their time limit: all guests wait for them.
const COMMAND_BATCH: usize = 16;
const COMMAND_BATCH_NS: u64 = 100_000;

impl EventLoop {
    /// Runs pending commands, up to a bound; the others follow in the next round.
    pub(super) fn run_commands(&mut self, time: Nanos) -> io::Result<()> {
        let begin = now();
        for _ in 0..COMMAND_BATCH {
            if now().0 - begin.0 > COMMAND_BATCH_NS {
                break;
            }
            match self.commands.try_recv() {
                Ok(command) => self.run_command(time, command)?,
                Err(_) => return Ok(()),
            }
        }
        self.commands_pending = true;
        Ok(())
    }

    fn run_command(&mut self, time: Nanos, command: Command) -> io::Result<()> {
        match command {
            Command::Start { vm, index, start, reply } => self.start(vm, index, start, reply)?,
            Command::Stop { vm, index, reply } => self.stop(time, vm, index, reply)?,
            Command::Call { vm, index, call, reply } => {
                self.set_call(vm, index, call)?;
                let _ = reply.send(());
            }
            Command::Disconnect { vm, reply } => self.disconnect(time, vm, reply)?,
            Command::Reconfigure { config, vms, poll, reply } => {
                let done = self.reconfigure(&config, &vms, poll);
                let _ = reply.send(done);
            }
            Command::Status { reply } => {
                let _ = reply.send(EngineStatus {
                    places: self.vms.len(),
                    window: self.scheduler.window(),
                    regulator_lateness: self.regulator_lateness.clone(),
                    deallocations: self.scheduler.deallocation_status(),
                });
            }
            Command::VmStatus { vm, reply } => {
                let _ = reply.send(self.vm_status(time, vm).map(Box::new));
            }
            Command::Member { vm, reply } => {
                let vm = self.vms.get(vm);
                let name = vm.and_then(|vm| Some((vm.member, vm.disk.as_ref()?.name.clone())));
                let _ = reply.send(name);
            }
            Command::Attach { vm, disk, reply } => {
                let _ = reply.send(self.attach(vm, disk));
            }
            Command::Detach { vm, reply } => {
                let _ = reply.send(self.detach(vm));
            }
            Command::StartTrace { writer, reply } => {
                let refused = if self.trace.is_some() { Some(writer) } else { self.trace.replace(writer) };
                let _ = reply.send(refused);
            }
            Command::StopTrace { reply } => {
                let _ = reply.send(self.trace.take());
            }
            Command::Quit => self.quit = true,
        }
        Ok(())
    }

    pub(super) fn queue_slot(&mut self, vm: usize, index: u16) -> Option<&mut QueueSlot> {
        self.vms.get_mut(vm)?.slots.get_mut(usize::from(index))
    }

    /// Starts a queue as soon as the kernel has completed the operations of its predecessor.
    fn start(
        &mut self,
        vm: usize,
        index: u16,
        start: Box<VringStart>,
        reply: SyncSender<Result<(), StartError>>,
    ) -> io::Result<()> {
        let refuse = |why: StartError| {
            let _ = reply.send(Err(why));
            Ok(())
        };
        let Some(slot) = self.queue_slot(vm, index) else {
            return refuse(StartError::NoQueue(index));
        };
        if slot.vring.is_some() || slot.pending.is_some() {
            return refuse(StartError::Running(index));
        }
        if slot.draining.is_some() {
            slot.pending = Some((start, reply));
            return self.cancel_call_write(vm, usize::from(index));
        }
        let done = self.start_vring(vm, index, *start)?;
        let _ = reply.send(done);
        Ok(())
    }

    /// Serves a queue whose slot is free. The inner error refuses the queue; after the outer one,
    /// of io_uring, the engine cannot go on.
    pub(super) fn start_vring(
        &mut self,
        vm: usize,
        index: u16,
        start: VringStart,
    ) -> io::Result<Result<(), StartError>> {
        self.generation = self.generation.wrapping_add(1);
        let mut vring = match Vring::new(start, self.generation) {
            Ok(vring) => vring,
            Err(why) => return Ok(Err(why)),
        };
        // Polled before it is stored: every served queue is polled.
        let token = CompletionToken::Kick(vm as u16, index, vring.generation as u16);
        self.ring.arm_poll(vring.kick.as_raw_fd(), token)?;
        vring.kick_armed = true;
        if let Some(slot) = self.queue_slot(vm, index) {
            slot.vring = Some(vring);
        }
        Ok(Ok(()))
    }

    fn stop(&mut self, time: Nanos, vm: usize, index: u16, reply: SyncSender<u16>) -> io::Result<()> {
        let Some(slot) = self.queue_slot(vm, index) else { return Ok(()) };
        match &mut slot.vring {
            None => {
                let _ = reply.send(0);
                return Ok(());
            }
            Some(vring) => {
                vring.stopping = Some(reply);
                if vring.outstanding == 0 {
                    return self.retire_vring(vm, usize::from(index));
                }
            }
        }
        self.complete_discards(time, vm)
    }

    /// Discards are hints, and paced ones may take hours: those in the backlog of a stopping VM
    /// complete at once.
    fn complete_discards(&mut self, time: Nanos, vm: usize) -> io::Result<()> {
        let mut done = Vec::new();
        self.scheduler.cancel_discards(time, vm, |request| done.push(request));
        for request in done {
            self.complete_request(time, &CompletedRequest { vm, request })?;
        }
        Ok(())
    }

    /// Cancels the backlog. Pieces in flight end without a completion, because the queues are gone.
    fn disconnect(&mut self, time: Nanos, vm: usize, reply: SyncSender<()>) -> io::Result<()> {
        let Some(v) = self.vms.get_mut(vm) else { return Ok(()) };
        let requests = &mut v.requests;
        self.scheduler.cancel_backlog(time, vm, |r| requests.release(r.tag as u32));
        for q in 0..v.slots.len() {
            self.retire_vring(vm, q)?;
            self.vms[vm].slots[q].pending = None;
            self.cancel_call_write(vm, q)?;
        }
        self.vms[vm].deferred = false;
        self.vms[vm].disconnect_reply = Some(reply);
        self.reply_to_disconnect(vm);
        Ok(())
    }

    fn reconfigure(&mut self, config: &Config, vms: &[usize], poll: Nanos) -> Result<(), ReconfigureError> {
        // The table of pieces has a fixed size.
        let most = config.window.most.max(config.window.start);
        let room = self.pieces.len() - max_inflight_pieces(0, self.vms.len()) as usize;
        if most as usize > room {
            return Err(ReconfigureError::Window { most, room });
        }
        self.scheduler.reconfigure(config, vms)?;
        (self.config.poll, self.regulator_wakeup) = (poll, None);
        Ok(())
    }

    fn vm_status(&self, time: Nanos, i: usize) -> Option<VmStatus> {
        let vm = self.vms.get(i)?;
        Some(VmStatus {
            name: vm.disk.as_ref()?.name.clone(),
            queues: vm.slots.iter().filter(|s| s.vring.is_some()).count() as u16,
            outstanding: self.scheduler.outstanding(i),
            counters: self.scheduler.counters(i),
            contracts: Direction::ALL.map(|d| self.scheduler.contract(i, d, time)),
            latencies: vm.latencies.clone(),
            promises: vm.promises,
            malformed: vm.malformed,
            errors: vm.errors,
            broken_queues: vm.broken_queues,
        })
    }

    /// Stops serving a queue: its slot drains.
    pub(super) fn retire_vring(&mut self, vm: usize, q: usize) -> io::Result<()> {
        let Some(mut vring) = self.vms[vm].slots[q].vring.take() else { return Ok(()) };
        let generation = vring.generation as u16;
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
                    self.ring.signal_eventfd(
                        call.as_raw_fd(),
                        CompletionToken::Call(vm as u16, q as u16, generation),
                    )?;
                    draining.call = Some(call);
                }
                (None, None) => {}
            }
        }
        if draining.kick.is_some() {
            self.ring.cancel(CompletionToken::Kick(vm as u16, q as u16, generation))?;
        }
        if !draining.is_done() {
            self.vms[vm].slots[q].draining = Some(draining);
        }
        // Submitted at once: the write to a non-blocking eventfd is done when QEMU learns of the
        // stop. Any other write may be late or never done, and the guest is notified at the next
        // start (`force_notify`).
        self.ring.enter(false, Nanos(0), Nanos(0))?;
        // QEMU's next message may replace the memory: the control thread unmaps it, not this one.
        drop((vring.mem, vring.inflight));
        if let Some((reply, next_avail)) = stopped {
            let _ = reply.send(next_avail);
        }
        Ok(())
    }

    /// Cancels a call write, which may wait for ever on a full eventfd.
    pub(super) fn cancel_call_write(&mut self, vm: usize, q: usize) -> io::Result<()> {
        let Some(draining) = &mut self.vms[vm].slots[q].draining else { return Ok(()) };
        draining.final_call = None;
        if draining.call.is_none() {
            return Ok(());
        }
        let token = CompletionToken::Call(vm as u16, q as u16, draining.generation as u16);
        self.ring.cancel(token)
    }

    /// An operation of a draining slot has completed; the last one lets a pending start go on.
    pub(super) fn finish_draining(&mut self, vm: usize, q: usize) -> io::Result<()> {
        let slot = &mut self.vms[vm].slots[q];
        if slot.draining.as_ref().is_some_and(|d| !d.is_done()) {
            return Ok(());
        }
        slot.draining = None;
        if let Some((start, reply)) = slot.pending.take() {
            let done = self.start_vring(vm, q as u16, *start)?;
            let _ = reply.send(done);
        }
        self.reply_to_disconnect(vm);
        Ok(())
    }

    /// Replies to a disconnect when nothing of the VM is in flight.
    pub(super) fn reply_to_disconnect(&mut self, i: usize) {
        let vm = &mut self.vms[i];
        if vm.disconnect_reply.is_some()
            && self.scheduler.outstanding(i) == 0
            && vm.slots.iter().all(|s| s.draining.is_none())
        {
            if let Some(reply) = vm.disconnect_reply.take() {
                let _ = reply.send(());
            }
        }
    }
}
