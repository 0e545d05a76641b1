//! Accounting of the thread's CPU time, and holds of ports.
//!
//! The time of a round by the wall clock is divided among the ports that had work in it, and the
//! CPU time of the round is charged to them in that proportion: a wake-up is paid by the port that
//! causes it, and the thread asks the kernel for its CPU time once in a round.

use std::io;

use rtvirtio_sched::{CpuBudget, CpuCounters, VmId};
use rtvirtio_units::Nanos;

use super::NetLoop;
use crate::engine::now;
use crate::engine::queue_id::{QueueId, QueueToken};
use crate::engine::uring::CompletionToken;
use crate::net::port::QUEUES;

/// Account of the thread's time.
#[derive(Debug)]
pub(super) struct Spending {
    budget: CpuBudget,
    /// CPU time of the thread that is charged so far.
    charged: Nanos,
    /// Wall-clock time up to which this round is attributed.
    lap: Nanos,
    /// Time of this round that belongs to no port.
    own: Nanos,
}

impl Spending {
    pub(super) fn new(budget: CpuBudget) -> Self {
        Self { budget, charged: cpu_time(), lap: Nanos(0), own: Nanos(0) }
    }

    pub(super) fn budget(&mut self) -> &mut CpuBudget {
        &mut self.budget
    }

    pub(super) fn counters(&self, port: VmId) -> CpuCounters {
        self.budget.counters(port)
    }
}

/// CPU time of the calling thread.
fn cpu_time() -> Nanos {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Nanos(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

impl NetLoop {
    /// Starts to attribute time after a sleep.
    pub(super) fn begin_laps(&mut self, time: Nanos) {
        if let Some(spending) = &mut self.spending {
            spending.lap = time;
        }
    }

    /// Releases ports whose hold has ended.
    pub(super) fn release_ports(&mut self, time: Nanos) -> io::Result<()> {
        for i in self.ports.indices() {
            if self.ports[i].hold.until.is_some_and(|until| until <= time) {
                self.release(i, time)?;
            }
        }
        Ok(())
    }

    /// Attributes the time since the last call to this port; to no port when `None`.
    pub(super) fn lap(&mut self, port: Option<VmId>) {
        let Some(spending) = &mut self.spending else { return };
        let time = now();
        let took = time.0.saturating_sub(spending.lap.0);
        spending.lap = time;
        match port.and_then(|port| self.ports.get_mut(port)) {
            Some(port) => port.hold.work.0 += took,
            None => spending.own.0 += took,
        }
    }

    /// Charges the round, and holds the ports that have used up their part, or that had too much
    /// fruitless work.
    pub(super) fn end_round(&mut self, time: Nanos) -> io::Result<()> {
        let total: u64 = self.ports.iter().map(|port| port.hold.work.0).sum();
        let mut used = 0;
        if let Some(spending) = &mut self.spending {
            if total + spending.own.0 > 0 {
                let cpu = cpu_time();
                used = cpu.0.saturating_sub(spending.charged.0);
                spending.charged = cpu;
                // The thread's own part is charged to no port.
                used = part(used, total, total + std::mem::take(&mut spending.own).0);
            }
        }
        for i in self.ports.indices() {
            let (mut until, work) = self.ports[i].hold.end_round(time);
            if let Some(spending) = self.spending.as_mut().filter(|_| work.0 > 0) {
                spending.budget.charge(time, i, Nanos(part(used, work.0, total)));
                if !spending.budget.admits(time, i) {
                    until = until.max(Some(spending.budget.next_period(time)));
                }
            }
            if let Some(until) = until.filter(|_| self.ports[i].hold.until.is_none()) {
                self.hold(i, until)?;
            }
        }
        Ok(())
    }

    /// Time of the next release of a port.
    pub(super) fn next_release(&self) -> Nanos {
        self.ports.iter().filter_map(|port| port.hold.until).min().unwrap_or(Nanos(u64::MAX))
    }

    /// Holds a port until a moment. Its kicks wake the thread no longer.
    fn hold(&mut self, i: VmId, until: Nanos) -> io::Result<()> {
        let port = &mut self.ports[i];
        port.hold.until = Some(until);
        for queue in QueueId::first(QUEUES) {
            let Some(vring) = port.slots[usize::from(queue)].vring.as_mut() else { continue };
            vring.paused = true;
            if vring.kick_armed {
                let token = CompletionToken::Kick(QueueToken::new(i, queue, vring.generation));
                self.ring.cancel(token)?;
            }
        }
        Ok(())
    }

    /// Releases a port, if its budget allows that.
    fn release(&mut self, i: VmId, time: Nanos) -> io::Result<()> {
        let port = &mut self.ports[i];
        if let Some(spending) = &mut self.spending {
            if !spending.budget.admits(time, i) {
                port.hold.until = Some(spending.budget.next_period(time));
                return Ok(());
            }
        }
        port.hold.until = None;
        for queue in QueueId::first(QUEUES) {
            let Some(vring) = port.slots[usize::from(queue)].vring.as_mut().filter(|vring| vring.paused)
            else {
                continue;
            };
            (vring.paused, vring.active) = (false, true);
            // A poll that is being cancelled is armed again when its end is seen.
            if !vring.kick_armed && !vring.broken {
                vring.kick_armed = true;
                let token = CompletionToken::Kick(QueueToken::new(i, queue, vring.generation));
                self.ring.arm_kick(vring.kick.fd(), token)?;
            }
        }
        Ok(())
    }
}

/// `of * share / all`, rounded down.
fn part(of: u64, share: u64, all: u64) -> u64 {
    (u128::from(of) * u128::from(share) / u128::from(all.max(1))) as u64
}
