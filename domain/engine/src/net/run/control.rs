//! Commands of control threads.

use std::io;
use std::sync::mpsc::SyncSender;

use rtvirtio_sched::{Config, ConfigError, VmId};

use super::NetLoop;
use crate::engine::queue_host::QueueHost;
use crate::engine::queue_id::QueueId;
use crate::engine::{QueueCommand, now};
use crate::net::command::{Flow, NetCommand, NetStatus, PortStatus};
use crate::net::port::{FlowMeter, QUEUES, RX};
use crate::net::settings::PortSettings;

/// Largest number of commands in one round: all guests wait for them.
const COMMAND_BATCH: usize = 16;

impl NetLoop {
    pub(super) fn run_commands(&mut self) -> io::Result<()> {
        for _ in 0..COMMAND_BATCH {
            match self.commands.try_recv() {
                Ok(command) => {
                    let port = command.port();
                    self.lap(None);
                    self.run_command(command)?;
                    self.lap(port);
                }
                Err(_) => return Ok(()),
            }
        }
        // The rest follows in the next round: the doorbell is signalled again.
        let _ = rustix::io::write(&self.doorbell, &1u64.to_ne_bytes());
        Ok(())
    }

    fn run_command(&mut self, command: NetCommand) -> io::Result<()> {
        match command {
            NetCommand::Queue(command) => return self.run_queue_command(command),
            NetCommand::Reconfigure { tx, rx, ports, settings, reply } => {
                let _ = reply.send(self.reconfigure(&tx, &rx, &ports, &settings));
            }
            NetCommand::Status { reply } => {
                let regulator_lateness = self.regulator_lateness.reader();
                let _ = reply.send(NetStatus { ports: self.ports.len(), regulator_lateness });
            }
            NetCommand::PortStatus { port, reply } => {
                let _ = reply.send(self.port_status(port).map(Box::new));
            }
            NetCommand::Member { port, reply } => {
                let port = self.ports.get(port).filter(|port| port.uplink.is_some());
                let _ = reply.send(port.map(|port| (port.member, port.name.clone())));
            }
            NetCommand::SignalUrgent { port, eventfd, reply } => {
                let _ = reply.send(match self.ports.get_mut(port) {
                    Some(port) => port.urgency.replace(eventfd),
                    None => eventfd,
                });
            }
            NetCommand::StartTrace { writer, reply } => {
                let refused = if self.trace.is_some() { Some(writer) } else { self.trace.replace(writer) };
                let _ = reply.send(refused);
            }
            NetCommand::StopTrace { reply } => {
                let _ = reply.send(self.trace.take());
            }
            NetCommand::Attach { port, prepared, reply } => {
                let _ = reply.send(self.attach(port, *prepared));
            }
            NetCommand::Drain { port, reply } => {
                let _ = reply.send(self.drain(port)?);
            }
            NetCommand::Detach { port, vacant, reply } => {
                let _ = reply.send(self.detach(port, vacant));
            }
            NetCommand::Quit => self.quit = true,
        }
        Ok(())
    }

    fn run_queue_command(&mut self, command: QueueCommand) -> io::Result<()> {
        match command {
            QueueCommand::Start { vm, queue, start, reply } => {
                if let Some(port) = self.ports.get(vm).filter(|_| queue == RX) {
                    port.set_offloads(start.features);
                }
                self.start(vm, queue, start, reply)
            }
            QueueCommand::Stop { vm, queue, for_good: _, reply } => self.stop(vm, queue, reply),
            QueueCommand::Call { vm, queue, call, reply } => {
                self.set_call(vm, queue, call)?;
                let _ = reply.send(());
                Ok(())
            }
            QueueCommand::Announce { vm, mac, reply } => {
                let _ = reply.send(self.announce(vm, mac, now()));
                Ok(())
            }
            QueueCommand::Barrier { reply, .. } => {
                let _ = reply.send(());
                Ok(())
            }
            QueueCommand::Disconnect { vm, reply } => self.disconnect(vm, reply),
        }
    }

    /// Stops a queue. Its frames were completed when they were fetched, so nothing is in flight.
    fn stop(&mut self, vm: VmId, queue: QueueId, reply: SyncSender<u16>) -> io::Result<()> {
        match self.queue_slot(vm, queue).and_then(|slot| slot.vring.as_mut()) {
            Some(vring) => {
                vring.stopping = Some(reply);
                self.retire_vring(vm, queue)
            }
            None => {
                let _ = reply.send(0);
                Ok(())
            }
        }
    }

    fn disconnect(&mut self, vm: VmId, reply: Option<SyncSender<()>>) -> io::Result<()> {
        if vm >= self.ports.next_idx() {
            return Ok(());
        }
        for queue in QueueId::first(QUEUES) {
            self.retire_vring(vm, queue)?;
            self.ports[vm].slots[usize::from(queue)].pending = None;
            self.cancel_call_write(vm, queue)?;
        }
        if reply.is_some() {
            self.ports[vm].disconnect_reply = reply;
        }
        self.reply_to_disconnect(vm);
        Ok(())
    }

    /// Replies to a disconnect when nothing of the port is in flight in the kernel.
    pub(super) fn reply_to_disconnect(&mut self, vm: VmId) {
        let Some(port) = self.ports.get_mut(vm) else { return };
        if port.slots.iter().all(|slot| slot.draining.is_none()) {
            if let Some(reply) = port.disconnect_reply.take() {
                let _ = reply.send(());
            }
        }
    }

    fn reconfigure(
        &mut self,
        tx: &Config,
        rx: &Config,
        ports: &[VmId],
        settings: &[PortSettings],
    ) -> Result<(), ConfigError> {
        rx.check()?;
        self.tx.reconfigure(tx, ports)?;
        self.rx.reconfigure(rx, ports)?;
        for ((i, port), settings) in self.ports.iter_mut_enumerated().zip(settings) {
            port.settings = *settings;
            if let Some(spending) = &mut self.spending {
                spending.budget().set_weight(i, settings.cpu_weight);
            }
            if let Some(features) = port.slots[usize::from(RX)].vring.as_ref().map(|vring| vring.features) {
                port.set_offloads(features);
            }
        }
        Ok(())
    }

    fn port_status(&self, i: VmId) -> Option<PortStatus> {
        let port = self.ports.get(i).filter(|port| port.uplink.is_some())?;
        let time = now();
        let flow = |meter: &FlowMeter| Flow {
            frames: meter.frames,
            bytes: meter.bytes,
            latencies: meter.latencies.reader(),
            contract: meter.meter.contract(time),
        };
        Some(PortStatus {
            name: port.name.clone(),
            queues: port.slots.iter().filter(|s| s.vring.is_some()).count() as u16,
            tx: flow(&port.sent),
            rx: flow(&port.received),
            tx_counters: self.tx.counters(i),
            rx_counters: self.rx.counters(i),
            promises: port.promises,
            drops: port.drops,
            backoffs: port.hold.backoff.delays(),
            urgent_signals: port.urgency.signals(),
            cpu: self.spending.as_ref().map(|spending| spending.counters(i)),
            broken_queues: port.broken_queues,
        })
    }
}
