//! What is asked for one VM, and the writes that come of it.

use std::path::PathBuf;
use std::time::Duration;

use rtvirtio_apply::{Target, Write};
use rtvirtio_kernel::sched::Attr;
use rtvirtio_planner::Strength;
use rtvirtio_vmm::{Role, Thread};
use serde::Serialize;

use crate::{Backend, Contract, Level, Order};

/// What is asked for one VM.
#[derive(Clone, Debug)]
pub struct Ask<'a> {
    /// Its name; becomes part of a cgroup's.
    pub vm: &'a str,
    /// Its threads, as found a moment ago.
    pub threads: &'a [Thread],
    /// What they get together.
    pub contract: Contract,
    /// Their order.
    pub order: Order,
    /// Where the VM stands among others: [`crate::levels`].
    pub level: Level,
    /// CPU time that each has used since the last split, for a split by use; since its start where
    /// a thread is not named.
    pub used: &'a [(u32, Duration)],
}

/// What is to be written, and what it is worth.
#[derive(Clone, Debug, Serialize)]
pub struct Settings {
    /// The mechanism.
    pub backend: Backend,
    /// How firmly it holds.
    pub strength: Strength,
    /// The writes in their order.
    #[serde(skip)]
    pub writes: Vec<Write>,
    /// The VM's cgroup where its manager, such as libvirt, keeps the threads in groups below it:
    /// this one has the budget then, and [`crate::room`] makes room for it above.
    #[serde(skip)]
    pub group: Option<PathBuf>,
    /// Threads that stay outside of the contract, each with the reason.
    pub outside: Vec<(u32, String)>,
    /// What the user should know.
    pub notes: Vec<String>,
}

/// The thread whose cgroup and policy stand for the whole VM; `None` without threads.
pub(crate) fn main_of(threads: &[Thread]) -> Option<&Thread> {
    let first = threads.iter().find(|t| t.role == Role::Emulator);
    first.or_else(|| threads.iter().find(|t| !t.kernel)).or(threads.first())
}

/// A thread's scheduling as a write.
pub(crate) fn scheduling(ask: &Ask<'_>, t: &Thread, attr: Attr) -> Write {
    // That of a real-time thread the kernel neither sets nor reports; it has it again when it is
    // ordinary again.
    let nice = if attr.policy.is_real_time() { 0 } else { t.nice };
    let attr = Attr { nice, ..attr };
    let knob = format!("policy of {} ({})", t.role, ask.vm);
    let write = Write::new(knob, Target::scheduling(t.pid, t.tid, t.start), attr.to_string());
    // Cut off while a reservation is put back.
    Write { also_ours: attr.released().iter().map(Attr::to_string).collect(), ..write }
}
