//! What control threads ask of the loop.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::mpsc::SyncSender;

use rtvirtio_iosched::{Config, Direction};
use rtvirtio_units::Nanos;

use super::Loop;
use crate::engine::command::{Command, EngineStatus, VmStatus, VringStart};
use crate::engine::uring::About;
use crate::engine::vring::Vring;

impl Loop {
    pub(super) fn command(&mut self, time: Nanos, command: Command) -> io::Result<()> {
        match command {
            Command::Start { vm, index, start, reply } => {
                let done = self.start(vm, index, *start);
                let _ = reply.send(done);
            }
            Command::Stop { vm, index, reply } => self.stop(vm, index, reply),
            Command::Call { vm, index, call } => {
                if let Some(vring) = self.slot(vm, index).and_then(Option::as_mut) {
                    vring.call = call;
                    vring.must_call = true;
                }
            }
            Command::Disconnect { vm, reply } => self.disconnect(time, vm, reply),
            Command::Reconfigure { config, vms, poll, reply } => {
                let done = self.reconfigure(&config, &vms, poll);
                let _ = reply.send(done);
            }
            Command::Status { reply } => {
                let vms = (0..self.vms.len()).map(|i| self.status(time, i)).collect();
                let window = self.scheduler.window();
                let _ = reply.send(EngineStatus { vms, window, late: self.late.clone() });
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

    fn slot(&mut self, vm: usize, index: u16) -> Option<&mut Option<Vring>> {
        self.vms.get_mut(vm)?.vrings.get_mut(usize::from(index))
    }

    fn start(&mut self, vm: usize, index: u16, start: VringStart) -> Result<(), String> {
        self.generation += 1;
        let generation = self.generation;
        let slot = self.slot(vm, index).ok_or_else(|| format!("there is no queue {index}"))?;
        if slot.is_some() {
            return Err(format!("queue {index} runs already"));
        }
        let vring = Vring::new(start, generation)?;
        let fd = vring.kick.as_raw_fd();
        *slot = Some(vring);
        let about = About::Kick(vm as u16, index, generation as u16);
        self.ring.watch(fd, about).map_err(|e| e.to_string())
    }

    fn stop(&mut self, vm: usize, index: u16, reply: SyncSender<u16>) {
        let Some(slot) = self.slot(vm, index) else { return };
        match slot {
            None => {
                let _ = reply.send(0);
            }
            Some(vring) => {
                vring.stopping = Some(reply);
                if vring.outstanding == 0 {
                    self.end(vm, usize::from(index));
                }
            }
        }
    }

    /// Drops what waits; what is at the device ends without an answer, for the queues are gone.
    fn disconnect(&mut self, time: Nanos, vm: usize, reply: SyncSender<()>) {
        let Some(v) = self.vms.get_mut(vm) else { return };
        let requests = &mut v.requests;
        self.scheduler.drop_waiting(time, vm, |r| requests.release(r.tag as u32));
        for q in 0..v.vrings.len() {
            self.end(vm, q);
        }
        if self.scheduler.outstanding(vm) == 0 {
            let _ = reply.send(());
        } else {
            self.vms[vm].leaving = Some(reply);
        }
    }

    fn reconfigure(&mut self, config: &Config, vms: &[usize], poll: Nanos) -> Result<(), String> {
        // The table of pieces was made for so many.
        let most = config.window.most.max(config.window.start);
        let room = self.running.len() - self.vms.len();
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
            queues: vm.vrings.iter().flatten().count() as u16,
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
