//! Priorities of a VM's threads relative to each other (RT hypervisor paper, sections 3.1 and 3.3).
//!
//! Threads that serve a vCPU have a higher priority: a guest that spins while it waits for its own
//! I/O, or for a timer tick of the emulated PIT, must not keep these threads from running.

use rtvirtio_kernel::sched::{Attr, Policy};
use rtvirtio_vmm::Role;
use serde::{Deserialize, Serialize};

use crate::{Backend, Contract};

/// An order of a VM's threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// Lowest real-time priorities: services at FIFO 2, vCPUs and workers at 1, and above that by
    /// [`Level`]. New threads inherit, so the whole VM stays inside the budget.
    #[default]
    Contract,
    /// The paper's: services at FIFO 98, vCPUs at 97, and below that by [`Level`]; AIO workers
    /// ordinary, new threads too. Without a budget of the VM's own ([`Backend::Throttle`]) 49
    /// and 48: a vCPU that spins must not keep the kernel's interrupt threads, at 50, from
    /// answering it, as it may on a kernel that threads its interrupts (the paper's live-lock,
    /// section 3.3).
    Rt,
}

/// Rank of a VM among those of its [`Order`] whose budgets are enforced at fixed priorities: all
/// its threads, vCPUs included, are above those of the VMs below it.
///
/// At equal priorities two VMs take turns with every packet, because the service threads of each
/// are above the vCPUs of the other: two guests that served files got a third less done in the same
/// CPU time (docs/explanation/cpu-contracts.md). And a VM of a short period would wait for the
/// whole budget of one with a long period. So they are ranked by period, shortest first
/// (rate-monotonic: Liu and Layland, JACM 20, 1973), and in the order of the spec where periods are
/// equal. That is safe only where a budget ends what a spinning vCPU takes from the VMs below it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Level {
    /// Number of VMs ranked above.
    pub above: u32,
    /// Number of VMs ranked below.
    pub below: u32,
}

impl Level {
    /// Rank of a VM without peers.
    pub const ALONE: Self = Self { above: 0, below: 0 };
    /// Number of levels of [`Order::Contract`] and of [`Order::Rt`]: the kernel's interrupt threads
    /// are between them, at 50 (`MAX_RT_PRIO / 2`, `sched_set_fifo()`). Further VMs, those of the
    /// longest periods, share the last one.
    const LEVELS: u32 = 23;

    /// Levels below this one that are in use.
    fn below(self) -> u32 {
        self.below.min((Self::LEVELS - 1).saturating_sub(self.above))
    }
}

/// Level of each VM, where all are under contracts that are enforced in this way.
#[must_use]
pub fn levels(all: &[(Backend, Order, Contract)]) -> Vec<Level> {
    // A VM without a budget must not be above others; VMs that are ordered by deadline (threads, or
    // groups of `cpu.rt.max`) need no rank.
    let ranked = |b: Backend| b == Backend::RtGroup;
    let before = |i: usize, j: usize| (all[i].2.period_us(), i) < (all[j].2.period_us(), j);
    let level = |(i, one): (usize, &(Backend, Order, Contract))| {
        if !ranked(one.0) {
            return Level::ALONE;
        }
        let peers = (0..all.len()).filter(|&j| j != i && ranked(all[j].0) && all[j].1 == one.1);
        let (above, below): (Vec<usize>, Vec<usize>) = peers.partition(|&j| before(j, i));
        let count = |v: Vec<usize>| u32::try_from(v.len()).unwrap_or(u32::MAX);
        Level { above: count(above), below: count(below) }
    };
    all.iter().enumerate().map(level).collect()
}

/// Places in `all` of the contracts whose threads may go before those of the one at `place`: these
/// take their budgets first. All of [`Order::Rt`] are above all others; VMs that share the last
/// level may go before each other.
#[must_use]
pub fn going_before(all: &[(Backend, Order, Level, Contract)], place: usize) -> Vec<usize> {
    let Some(own) = all.get(place) else { return Vec::new() };
    let last = |level: Level| level.above >= Level::LEVELS - 1;
    let goes_before = |other: &(Backend, Order, Level, Contract)| match (other.1, own.1) {
        (Order::Rt, Order::Contract) => true,
        (Order::Contract, Order::Rt) => false,
        _ => other.2.above < own.2.above || last(other.2) && last(own.2),
    };
    let others = (0..all.len()).filter(|other| *other != place && all[*other].0 == Backend::RtGroup);
    others.filter(|other| goes_before(&all[*other])).collect()
}

/// Scheduling of a thread with this role, under the mechanism of the contract. `None` for threads
/// that only clean up, or that belong to a helper: these are not changed.
#[must_use]
pub fn attr(role: &Role, order: Order, level: Level, backend: Backend) -> Option<Attr> {
    let service = match order {
        Order::Contract => 2 + 2 * level.below(),
        Order::Rt if backend == Backend::Throttle => 49,
        Order::Rt => 98 - 2 * level.above.min(Level::LEVELS - 1),
    };
    let vcpu = service - 1;
    // A main loop that is FIFO 98 starts workers; with the paper's setting they must not inherit
    // that.
    let fifo = |priority| {
        Some(Attr { policy: Policy::Fifo, priority, reset_on_fork: order == Order::Rt, ..Attr::other(0) })
    };
    match role {
        Role::Vcpu(_) => fifo(vcpu),
        Role::IoThread(_) | Role::Emulator | Role::Vhost | Role::KvmPit => fifo(service),
        Role::AioWorker | Role::IoUringWorker => match order {
            Order::Contract => fifo(vcpu),
            // Ordinary, which changes nothing unless something made the worker real-time before.
            Order::Rt => Some(Attr::other(0)),
        },
        // RCU callbacks free memory under a lock that the main loop takes too.
        Role::Rcu if order == Order::Contract => fifo(vcpu),
        Role::Rcu | Role::KvmHugePages | Role::Migration | Role::Display | Role::Other => None,
    }
}
