//! Commands of control threads; start and stop of queues.

use std::io;
use std::sync::mpsc::SyncSender;

use rtvirtio_domain_config::Poll;
use rtvirtio_sched::{CompletedRequest, Config, Direction, VmId};
use rtvirtio_stats::LatencyRecorder;
use rtvirtio_units::Nanos;

use super::{EventLoop, max_inflight_pieces, now};
use crate::engine::command::{
    AnnounceError, Command, EngineStatus, QueueCommand, ReconfigureError, VmStatus,
};
use crate::engine::poll::AdaptivePoll;
use crate::engine::queue_host::QueueHost;
use crate::engine::queue_id::QueueId;
use crate::engine::vring::Vring;

/// Limits of the commands in one round, number and time: all guests wait for them.
const COMMAND_BATCH: usize = 16;
const COMMAND_BATCH_NS: u64 = 100_000;

impl EventLoop {
    /// Runs pending commands, up to these limits; the others follow in the next round.
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
            Command::Queue(command) => self.run_queue_command(time, command)?,
            Command::Reconfigure { config, vms, poll, reply } => {
                let done = self.reconfigure(&config, &vms, poll);
                let _ = reply.send(done);
            }
            Command::Status { reply } => {
                let _ = reply.send(EngineStatus {
                    places: self.vms.len(),
                    window: self.scheduler.window(),
                    regulator_lateness: self.regulator_lateness.reader(),
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
            Command::Grow { vm, size, reply } => {
                if let Some(disk) = self.vms.get_mut(vm).and_then(|vm| vm.disk.as_mut()) {
                    disk.backing.limits.size = disk.backing.limits.size.max(size);
                }
                let _ = reply.send(());
            }
            Command::SignalUrgent { vm, eventfd, reply } => {
                let _ = reply.send(match self.vms.get_mut(vm) {
                    Some(vm) => vm.urgency.replace(eventfd),
                    None => eventfd,
                });
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

    fn run_queue_command(&mut self, time: Nanos, command: QueueCommand) -> io::Result<()> {
        match command {
            QueueCommand::Start { vm, queue, start, reply } => self.start(vm, queue, start, reply),
            QueueCommand::Stop { vm, queue, for_good, reply } => {
                self.stop(time, (vm, queue), for_good, reply)
            }
            QueueCommand::Call { vm, queue, call, reply } => {
                self.set_call(vm, queue, call)?;
                let _ = reply.send(());
                Ok(())
            }
            QueueCommand::Announce { reply, .. } => {
                let _ = reply.send(Err(AnnounceError::NoPort));
                Ok(())
            }
            QueueCommand::Barrier { reply, .. } => {
                let _ = reply.send(());
                Ok(())
            }
            QueueCommand::Disconnect { vm, reply } => self.disconnect(time, vm, reply),
        }
    }

    fn stop(
        &mut self,
        time: Nanos,
        (vm, queue): (VmId, QueueId),
        for_good: bool,
        reply: SyncSender<u16>,
    ) -> io::Result<()> {
        let Some(slot) = self.queue_slot(vm, queue) else { return Ok(()) };
        match &mut slot.vring {
            None => {
                let _ = reply.send(0);
                return Ok(());
            }
            Some(vring) => {
                (vring.stopping, vring.stops_for_good) = (Some(reply), for_good);
                if vring.is_drained() {
                    return self.retire_vring(vm, queue);
                }
            }
        }
        self.has_stopping = true;
        self.release_held(time, vm, queue)?;
        self.complete_discards(time, vm)
    }

    /// Ends queues that stop and whose last requests were answered without the device.
    pub(super) fn retire_drained(&mut self) -> io::Result<()> {
        if !std::mem::take(&mut self.has_stopping) {
            return Ok(());
        }
        for vm in self.vms.indices() {
            for queue in self.vms[vm].slots.indices() {
                let vring = self.vms[vm].slots[queue].vring.as_ref();
                match vring.filter(|vring| vring.stopping.is_some()).map(Vring::is_drained) {
                    Some(true) => self.retire_vring(vm, queue)?,
                    Some(false) => self.has_stopping = true,
                    None => {}
                }
            }
        }
        Ok(())
    }

    /// Discards are hints, and paced ones may take hours: those in the backlog of a stopping VM
    /// complete at once.
    fn complete_discards(&mut self, time: Nanos, vm: VmId) -> io::Result<()> {
        let mut done = Vec::new();
        self.scheduler.cancel_discards(time, vm, |request| done.push(request));
        for request in done {
            self.complete_request(time, &CompletedRequest { vm, request })?;
        }
        Ok(())
    }

    /// Cancels the backlog. Pieces in flight end without a completion, because the queues are gone.
    fn disconnect(&mut self, time: Nanos, vm: VmId, reply: Option<SyncSender<()>>) -> io::Result<()> {
        let Some(v) = self.vms.get_mut(vm) else { return Ok(()) };
        let requests = &mut v.requests;
        self.scheduler.cancel_backlog(time, vm, |r| requests.release(r.tag as u32));
        v.room.take(|_| true).iter().for_each(|r| requests.release(r.tag as u32));
        v.room.forget();
        for queue in v.slots.indices() {
            self.retire_vring(vm, queue)?;
            self.vms[vm].slots[queue].pending = None;
            self.cancel_call_write(vm, queue)?;
        }
        self.vms[vm].deferred = false;
        if reply.is_some() {
            self.vms[vm].disconnect_reply = reply;
        }
        self.reply_to_disconnect(vm);
        Ok(())
    }

    fn reconfigure(&mut self, config: &Config, vms: &[VmId], poll: Poll) -> Result<(), ReconfigureError> {
        // The table of pieces has a fixed size.
        let most = config.window.most.max(config.window.start);
        let room = self.pieces.len() - max_inflight_pieces(0, self.vms.len()) as usize;
        if most as usize > room {
            return Err(ReconfigureError::Window { most, room });
        }
        self.scheduler.reconfigure(config, vms)?;
        (self.poll, self.regulator_wakeup) = (AdaptivePoll::new(poll), None);
        Ok(())
    }

    fn vm_status(&self, time: Nanos, i: VmId) -> Option<VmStatus> {
        let vm = self.vms.get(i)?;
        Some(VmStatus {
            name: vm.disk.as_ref()?.name.clone(),
            queues: vm.slots.iter().filter(|s| s.vring.is_some()).count() as u16,
            outstanding: self.scheduler.outstanding(i),
            counters: self.scheduler.counters(i),
            contracts: Direction::ALL.map(|d| self.scheduler.contract(i, d, time)),
            latencies: vm.latencies.each_ref().map(LatencyRecorder::reader),
            promises: vm.promises,
            urgent_signals: vm.urgency.signals(),
            waits: self.scheduler.waits(i, time),
            faults: vm.faults,
            waiting_for_room: vm.room.len() as u64,
            waited_for_room: vm.room.total(),
        })
    }

    /// Replies to a disconnect when nothing of the VM is in flight.
    pub(super) fn reply_to_disconnect(&mut self, i: VmId) {
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
