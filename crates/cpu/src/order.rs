//! Which thread goes before which (RT hypervisor paper, sections 3.1 and 3.3).
//!
//! Whatever serves a vCPU stands above it: a guest that spins while it waits for its own I/O, or for a timer tick of the emulated PIT,
//! must not keep that from happening.

use rtvirtio_host::sched::{Attr, Policy};
use rtvirtio_vmm::Role;
use serde::{Deserialize, Serialize};

/// An order of a VM's threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// Just real-time: services at FIFO 2, vCPUs and workers at 1. New threads inherit, so the whole VM stays inside the budget.
    #[default]
    Contract,
    /// The paper's: services at FIFO 98, vCPUs at 97, AIO workers ordinary, new threads too.
    Rt,
}

/// Scheduling of a thread with this role. None is touched that only cleans up, or belongs to a helper.
#[must_use]
pub fn attr(role: &Role, order: Order) -> Option<Attr> {
    let (service, vcpu) = match order {
        Order::Contract => (2, 1),
        Order::Rt => (98, 97),
    };
    // A main loop that is FIFO 98 starts workers; with the paper's setting they must not inherit that.
    let fifo = |priority| {
        Some(Attr { policy: Policy::Fifo, priority, reset_on_fork: order == Order::Rt, ..Attr::other(0) })
    };
    match role {
        Role::Vcpu(_) => fifo(vcpu),
        Role::IoThread(_) | Role::Emulator | Role::Vhost | Role::KvmPit => fifo(service),
        Role::AioWorker | Role::IoUringWorker => match order {
            Order::Contract => fifo(vcpu),
            // Left as they are unless something made them real-time before.
            Order::Rt => Some(Attr::other(0)),
        },
        // RCU callbacks free memory under a lock that the main loop takes too.
        Role::Rcu if order == Order::Contract => fifo(vcpu),
        Role::Rcu | Role::KvmHugePages | Role::Migration | Role::Display | Role::Other => None,
    }
}
