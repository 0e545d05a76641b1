//! Request for one VM, and the writes that implement it.

use std::path::PathBuf;
use std::time::Duration;

use rtvirtio_apply::{Target, Write};
use rtvirtio_kernel::sched::Attr;
use rtvirtio_planner::Enforcement;
use rtvirtio_vmm::{Role, Thread};
use serde::Serialize;

use crate::{Backend, Contract, Level, Order};

/// Contract requested for one VM, with its threads.
#[derive(Clone, Debug)]
pub struct Ask<'a> {
    /// Name of the VM; becomes part of a cgroup's name.
    pub vm: &'a str,
    /// Threads of the VM, as read a moment ago.
    pub threads: &'a [Thread],
    /// Budget and period of all threads together.
    pub contract: Contract,
    /// Order of the threads' priorities.
    pub order: Order,
    /// Rank of the VM among others: [`crate::levels`].
    pub level: Level,
    /// CPU time of each thread since the last split, for a split by use. A thread that is not named
    /// counts with all its CPU time at the first split, with none at later ones.
    pub used: &'a [(u32, Duration)],
}

/// Writes of a contract, and the strength of its mechanism.
#[derive(Clone, Debug, Serialize)]
pub struct Settings {
    /// Mechanism that enforces the contract.
    pub backend: Backend,
    /// Guarantee, cap or hint.
    pub strength: Enforcement,
    /// The writes in their order.
    #[serde(skip)]
    pub writes: Vec<Write>,
    /// Cgroup of the VM where its manager, such as libvirt, keeps the threads in groups below it:
    /// this one has the budget then, and [`crate::room`] makes room for it above.
    #[serde(skip)]
    pub group: Option<PathBuf>,
    /// Threads that stay outside of the contract, each with the reason.
    pub outside: Vec<(u32, String)>,
    /// Remarks for the user.
    pub notes: Vec<String>,
}

/// Thread whose cgroup and policy stand for the whole VM; `None` without threads.
pub(crate) fn main_of(threads: &[Thread]) -> Option<&Thread> {
    let first = threads.iter().find(|t| t.role == Role::Emulator);
    first.or_else(|| threads.iter().find(|t| !t.kernel)).or(threads.first())
}

pub(crate) fn scheduling(ask: &Ask<'_>, t: &Thread, attr: Attr) -> Write {
    // The kernel neither sets nor reports a real-time thread's nice value; it applies again once
    // the thread is ordinary.
    let nice = if attr.policy.is_real_time() { 0 } else { t.nice };
    let attr = Attr { nice, ..attr };
    let knob = format!("policy of {} ({})", t.role, ask.vm);
    let write = Write::new(knob, Target::scheduling(t.pid, t.tid, t.start), attr.to_string());
    // Killed while a reservation is put back.
    Write { also_ours: attr.released().iter().map(Attr::to_string).collect(), ..write }
}
