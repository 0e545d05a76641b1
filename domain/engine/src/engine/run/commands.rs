//! What control threads ask of the loop.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::mpsc::SyncSender;

use rtvirtio_sched::{Config, Direction, Finished};
use rtvirtio_units::Nanos;

use super::{COMMANDS, COMMANDS_NS, Loop, now, places};
use crate::engine::command::{Command, EngineStatus, VmStatus, VringStart};
use crate::engine::slot::QueueSlot;
use crate::engine::uring::About;
use crate::engine::vring::Vring;

impl Loop {
    /// Carries out commands that wait, up to a bound; the others have their turn in the next round.
    pub(super) fn carry_out_commands(&mut self, time: Nanos) -> io::Result<()> {
        let begin = now();
        for _ in 0..COMMANDS {
            if now().0 - begin.0 > COMMANDS_NS {
                break;
            }
            match self.commands.try_recv() {
                Ok(command) => self.command(time, command)?,
                Err(_) => return Ok(()),
            }
        }
        self.commands_wait = true;
        Ok(())
    }

    fn command(&mut self, time: Nanos, command: Command) -> io::Result<()> {
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
                let vms = (0..self.vms.len()).map(|i| self.status(time, i)).collect();
                let window = self.scheduler.window();
                let deallocations = self.scheduler.deallocation_status();
                let _ = reply.send(EngineStatus { vms, window, late: self.late.clone(), deallocations });
            }
            Command::Trace { tracer, reply } => {
                let refused = if self.trace.is_some() { Some(tracer) } else { self.trace.replace(tracer) };
                let _ = reply.send(refused);
            }
            Command::Untrace { reply } => {
                let _ = reply.send(self.trace.take());
            }
            Command::Quit => self.quit = true,
        }
        Ok(())
    }

    pub(super) fn slot(&mut self, vm: usize, index: u16) -> Option<&mut QueueSlot> {
        self.vms.get_mut(vm)?.slots.get_mut(usize::from(index))
    }

    /// Starts a queue as soon as the kernel holds nothing of the one before.
    fn start(
        &mut self,
        vm: usize,
        index: u16,
        start: Box<VringStart>,
        reply: SyncSender<Result<(), String>>,
    ) -> io::Result<()> {
        let refuse = |why: String| {
            let _ = reply.send(Err(why));
            Ok(())
        };
        let Some(slot) = self.slot(vm, index) else { return refuse(format!("there is no queue {index}")) };
        if slot.vring.is_some() || slot.pending.is_some() {
            return refuse(format!("queue {index} runs already"));
        }
        if slot.draining.is_some() {
            slot.pending = Some((start, reply));
            return self.hurry(vm, usize::from(index));
        }
        let done = self.start_now(vm, index, *start)?;
        let _ = reply.send(done);
        Ok(())
    }

    /// Serves a queue whose place is free. What the queue itself is refused for is the inner error; after the outer one, of
    /// io_uring, nothing can be served any more.
    pub(super) fn start_now(
        &mut self,
        vm: usize,
        index: u16,
        start: VringStart,
    ) -> io::Result<Result<(), String>> {
        self.generation = self.generation.wrapping_add(1);
        let mut vring = match Vring::new(start, self.generation) {
            Ok(vring) => vring,
            Err(why) => return Ok(Err(why)),
        };
        // Watched before it is stored: a queue that is served is one that is watched.
        let about = About::Kick(vm as u16, index, vring.generation as u16);
        self.ring.watch(vring.kick.as_raw_fd(), about)?;
        vring.kick_armed = true;
        if let Some(slot) = self.slot(vm, index) {
            slot.vring = Some(vring);
        }
        Ok(Ok(()))
    }

    fn stop(&mut self, time: Nanos, vm: usize, index: u16, reply: SyncSender<u16>) -> io::Result<()> {
        let Some(slot) = self.slot(vm, index) else { return Ok(()) };
        match &mut slot.vring {
            None => {
                let _ = reply.send(0);
                return Ok(());
            }
            Some(vring) => {
                vring.stopping = Some(reply);
                if vring.outstanding == 0 {
                    return self.end(vm, usize::from(index));
                }
            }
        }
        self.finish_discards(time, vm)
    }

    /// Discards of a VM that stops are only hints, and at their pace may take hours: those that wait are done.
    fn finish_discards(&mut self, time: Nanos, vm: usize) -> io::Result<()> {
        let mut done = Vec::new();
        self.scheduler.drop_discards(time, vm, |request| done.push(request));
        for request in done {
            self.finished(time, &Finished { vm, request })?;
        }
        Ok(())
    }

    /// Drops what waits; what is at the device ends without an answer, because the queues are gone.
    fn disconnect(&mut self, time: Nanos, vm: usize, reply: SyncSender<()>) -> io::Result<()> {
        let Some(v) = self.vms.get_mut(vm) else { return Ok(()) };
        let requests = &mut v.requests;
        self.scheduler.drop_waiting(time, vm, |r| requests.release(r.tag as u32));
        for q in 0..v.slots.len() {
            self.end(vm, q)?;
            self.vms[vm].slots[q].pending = None;
            self.hurry(vm, q)?;
        }
        self.vms[vm].throttled = false;
        self.vms[vm].leaving = Some(reply);
        self.tell_of_leaving(vm);
        Ok(())
    }

    fn reconfigure(&mut self, config: &Config, vms: &[usize], poll: Nanos) -> Result<(), String> {
        // The table of pieces was made for so many.
        let most = config.window.most.max(config.window.start);
        let room = self.running.len() - places(0, self.vms.len()) as usize;
        if most as usize > room {
            return Err(format!("a window of {most} needs a restart: there is room for {room}"));
        }
        self.scheduler.reconfigure(config, vms).map_err(|e| e.to_string())?;
        (self.config.poll, self.held_until) = (poll, None);
        Ok(())
    }

    fn status(&self, time: Nanos, i: usize) -> VmStatus {
        let vm = &self.vms[i];
        VmStatus {
            name: vm.disk.name.clone(),
            queues: vm.slots.iter().filter(|s| s.vring.is_some()).count() as u16,
            outstanding: self.scheduler.outstanding(i),
            counters: self.scheduler.counters(i),
            contracts: Direction::ALL.map(|d| self.scheduler.contract(i, d, time)),
            latencies: vm.latencies.clone(),
            malformed: vm.malformed,
            errors: vm.errors,
            broken: vm.broken,
        }
    }
}
