//! The event loop of a network: fetch, order, send; read, order, deliver.

mod announce;
mod budget;
mod control;
mod membership;
mod receive;
mod send;

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use rtvirtio_domain_config::{CATCH_UP, LINK_WINDOW, Network, Poll, UplinkKind};
use rtvirtio_domain_resources::uplink::Uplink;
use rtvirtio_sched::{CpuBudget, Idx, IndexVec, Scheduler, VirtualLink, VmId};
use rtvirtio_stats::LatencyRecorder;
use rtvirtio_units::Nanos;

use self::budget::Spending;
use super::command::NetCommand;
use super::port::{Port, RX, TX};
use super::trace::FrameEvent;
use crate::engine::poll::AdaptivePoll;
use crate::engine::queue_host::{QueueHost, notify_guest};
use crate::engine::queue_id::QueueId;
use crate::engine::slot::QueueSlot;
use crate::engine::thread::Serve;
use crate::engine::uring::{Completion, CompletionToken, Uring};
use crate::engine::{EngineError, TraceWriter, now, prepare_thread};

/// The state of a network's thread.
pub struct NetLoop {
    name: String,
    /// Whether frames between ports stay inside: the interface does not send them back.
    switches: bool,
    /// Whether the link has a rate; without one, frames leave at once.
    ordered: bool,
    /// Longest frame where frames are ordered or capped, in bytes.
    largest_frame: usize,
    ring: Uring,
    /// Ports by place; vacant ones included.
    ports: IndexVec<VmId, Port>,
    /// Ports so far; the next `Port::member`.
    members: u32,
    /// Scheduler toward the link.
    tx: Scheduler,
    link: VirtualLink,
    /// Scheduler toward the VMs.
    rx: Scheduler,
    commands: Receiver<NetCommand>,
    doorbell: Arc<OwnedFd>,
    generation: u32,
    /// Whether more is pending than one round does.
    pending: bool,
    /// Index of the port that is served first in the next round.
    first: VmId,
    /// The next moment at which a regulator admits a frame to the link.
    regulator_wakeup: Option<Nanos>,
    regulator_lateness: LatencyRecorder,
    poll: AdaptivePoll,
    /// Account of the thread's CPU time, where it has a budget.
    spending: Option<Spending>,
    /// Writer of the running trace.
    trace: Option<Box<TraceWriter<FrameEvent>>>,
    quit: bool,
}

impl NetLoop {
    pub fn new(
        network: &Network,
        uplinks: Vec<Uplink>,
        commands: Receiver<NetCommand>,
        doorbell: Arc<OwnedFd>,
        poll: Poll,
    ) -> Result<Self, EngineError> {
        let failed = |what| move |source| EngineError::Io { what, source };
        prepare_thread(&network.cpus, network.fifo)
            .map_err(failed("cannot set the network's CPUs and priority"))?;
        let ports = network.ports.len() as u32;
        // A kick, a call and cancels of each queue, and the uplink's poll.
        let mut ring = Uring::new(8 + ports * 16, 0).map_err(failed("io_uring"))?;
        ring.arm_poll(doorbell.as_raw_fd(), CompletionToken::Doorbell).map_err(failed("io_uring"))?;
        let pairs = network.ports.iter().zip(uplinks).zip(0..);
        let members = pairs.map(|((config, uplink), member)| {
            let mut port = Port::new(network, config, uplink);
            port.member = member;
            port
        });
        let members: IndexVec<VmId, Port> = members.collect();
        let weights = members.iter().map(|port| port.settings.cpu_weight);
        let spending = network.cpu_limit().map(|limit| Spending::new(CpuBudget::new(limit, weights)));
        Ok(Self {
            name: network.name.clone(),
            switches: network.uplink == UplinkKind::Packet,
            ordered: network.link.is_some(),
            largest_frame: network.largest_frame() as usize,
            ring,
            ports: members,
            members: ports,
            tx: Scheduler::new(&network.tx_sched())?,
            link: VirtualLink::new(LINK_WINDOW, CATCH_UP),
            rx: Scheduler::new(&network.rx_sched())?,
            commands,
            doorbell,
            generation: 0,
            pending: false,
            first: VmId(0),
            regulator_wakeup: None,
            regulator_lateness: LatencyRecorder::default(),
            poll: AdaptivePoll::new(poll),
            spending,
            trace: None,
            quit: false,
        })
    }

    /// Runs one round; sleeps only without work.
    fn run_once(&mut self) -> io::Result<()> {
        let time = now();
        self.pending = false;
        self.release_ports(time)?;
        let mut busy = self.fetch_all(time);
        let tx_wake = self.dispatch_to_link();
        busy |= self.read_uplinks(now());
        let rx_wake = self.dispatch_to_vms();
        let notify_wake = self.notify_guests(now())?;
        self.end_round(now())?;
        // Room that appeared after the turn of a queue is not notified.
        busy |= self.pending || self.ports.iter_mut().any(|port| port.needs_fetch() || port.can_receive());
        self.first = self.after(self.first, 1);
        let time = now();
        let sleeps = self.poll.sleeps(time, busy);
        self.arm_uplinks()?;
        let wake = tx_wake.min(rx_wake).min(notify_wake).min(self.next_resume()).min(self.next_release());
        self.ring.enter(sleeps, time, wake)?;
        let time = now();
        if sleeps {
            self.poll.woke(time);
        }
        self.begin_laps(time);
        let mut any = false;
        while let Some(completion) = self.ring.next_completion() {
            any = true;
            self.handle_cqe(completion)?;
        }
        if !sleeps && !any && !busy {
            self.poll_rings();
        }
        Ok(())
    }

    fn handle_cqe(&mut self, completion: Completion) -> io::Result<()> {
        match completion.token {
            CompletionToken::Ignored | CompletionToken::Piece(_) => Ok(()),
            CompletionToken::Kick(token) => {
                if let Some(port) = self.ports.get_mut(token.vm()) {
                    port.hold.kicks += u32::from(completion.result >= 0);
                }
                self.on_kick(token, completion)
            }
            CompletionToken::Call(token) => self.on_call(token),
            CompletionToken::Uplink(port) => {
                if let Some(port) = self.ports.get_mut(port) {
                    (port.poll_armed, port.readable) = (false, true);
                }
                Ok(())
            }
            CompletionToken::Doorbell => {
                let mut count = [0u8; 8];
                let _ = rustix::io::read(&self.doorbell, &mut count);
                self.run_commands()?;
                if completion.more {
                    Ok(())
                } else {
                    self.ring.arm_poll(self.doorbell.as_raw_fd(), CompletionToken::Doorbell)
                }
            }
        }
    }

    /// The port that is `n` places after this one, in turn.
    fn after(&self, port: VmId, n: usize) -> VmId {
        VmId::from_usize((port.index() + n) % self.ports.len().max(1))
    }

    /// Writes an event into the running trace.
    fn record(&mut self, event: FrameEvent) {
        if let Some(trace) = &mut self.trace {
            let member = self.ports.get(event.port).map_or(0, |port| port.member);
            trace.record(FrameEvent { member, ..event });
        }
    }

    /// Polls the available rings, for guests that add frames without a kick.
    fn poll_rings(&mut self) {
        for port in &mut self.ports {
            if let Some(vring) = port.slots[usize::from(TX)].vring.as_mut() {
                vring.poll();
            }
        }
    }

    /// Arms the polls of uplinks that were empty.
    fn arm_uplinks(&mut self) -> io::Result<()> {
        for (i, port) in self.ports.iter_mut_enumerated() {
            let receives = port.slots[usize::from(RX)].vring.is_some();
            let waits = port.retry_at.is_some() || port.hold.until.is_some();
            if receives && !port.readable && !port.poll_armed && !waits {
                let Some(uplink) = &port.uplink else { continue };
                port.poll_armed = true;
                let fd = uplink.as_fd().as_raw_fd();
                self.ring.arm_poll_once(fd, CompletionToken::Uplink(i))?;
            }
        }
        Ok(())
    }

    /// Signals the call descriptors of guests; before them, the urgency eventfds of guests with
    /// urgent frames. Returns the moment of the next notification that is delayed.
    fn notify_guests(&mut self, now: Nanos) -> io::Result<Nanos> {
        let mut next = Nanos(u64::MAX);
        for (i, port) in self.ports.iter_mut_enumerated() {
            port.urgency.signal(&mut self.ring)?;
            notify_guest(&mut self.ring, i, TX, &mut port.slots[usize::from(TX)])?;
            let slot = &mut port.slots[usize::from(RX)];
            let Some(vring) = slot.vring.as_ref().filter(|vring| vring.may_notify()) else { continue };
            let interval = port.settings.notify_interval;
            // A VM without buffers loses frames until it knows.
            let until = port.moderation.holds_until(now, interval).filter(|_| vring.active);
            if let Some(until) = until {
                next = next.min(until);
                continue;
            }
            let notified = notify_guest(&mut self.ring, i, RX, slot)?;
            port.moderation.on_due(now, interval, notified);
        }
        Ok(next)
    }
}

impl Serve for NetLoop {
    fn is_restricted(&self) -> bool {
        self.ring.restricted
    }

    /// Runs until [`NetCommand::Quit`]. A failure of io_uring ends the process.
    fn run(&mut self) {
        while !self.quit {
            if let Err(e) = self.run_once() {
                crate::log::write_line(format_args!("{}: io_uring failed, the process ends: {e}", self.name));
                std::process::abort();
            }
        }
    }
}

impl QueueHost for NetLoop {
    fn ring(&mut self) -> &mut Uring {
        &mut self.ring
    }

    fn queue_slot(&mut self, vm: VmId, queue: QueueId) -> Option<&mut QueueSlot> {
        self.ports.get_mut(vm)?.slots.get_mut(usize::from(queue))
    }

    fn next_generation(&mut self) -> u32 {
        self.generation = self.generation.wrapping_add(1);
        self.generation
    }

    fn on_drained(&mut self, vm: VmId) {
        self.reply_to_disconnect(vm);
    }
}
