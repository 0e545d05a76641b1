//! SCHED_DEADLINE for each thread of a VM: which threads get a part of the budget, and how much.

use std::collections::BTreeSet;
use std::time::Duration;

use rtvirtio_apply::Write;
use rtvirtio_kernel::sched::Attr;
use rtvirtio_kernel::{HostError, Root, root_domain, text};
use rtvirtio_vmm::{Role, Thread};

use crate::ask::{main_of, scheduling};
use crate::{Ask, Backend, CpuError, Level, Order, Probe, Settings, Share, attr, choose, split};

/// Reservations of the VM's threads, in the root domain that they have, or that will have the CPUs
/// of `domain`.
pub(crate) fn deadline(
    (root, domain): (&Root, Option<&BTreeSet<u32>>),
    probe: &Probe,
    ask: &Ask<'_>,
    out: &mut Settings,
) -> Result<(), CpuError> {
    let cannot = |why: String, remedy: &str| CpuError::CannotHold {
        vm: ask.vm.to_owned(),
        backend: Backend::Deadline,
        why,
        remedy: remedy.to_owned(),
    };
    let domain = match domain {
        Some(domain) => domain.clone(),
        None => domain_of(root, ask.threads)?,
    };
    let held = held(ask, &domain, out);
    for t in &held {
        if !may_run_on(t, &domain) {
            return Err(cannot(
                format!(
                    "thread {} ({}) may run on CPUs {} only, and a deadline thread must be allowed on all of its root domain",
                    t.tid, t.role, t.affinity
                ),
                "remove the pinning, or give the VM a partition (`partition = true` in `cores`; before Linux 6.7 by hand, in its group or one \
                 above it: write the CPUs to cpuset.cpus, then `root` to cpuset.cpus.partition)",
            ));
        }
    }
    let used: Vec<(u32, Duration)> = held
        .iter()
        .map(|t| (t.tid, ask.used.iter().find(|u| u.0 == t.tid).map_or(t.cpu_time, |u| u.1)))
        .collect();
    let Some(shares) = divide(probe, ask, &domain, &used, None) else {
        let why = format!("a budget of {} is too little for {} threads", ask.contract, held.len());
        return Err(cannot(why, "give at least 50 us for each thread"));
    };
    for (t, share) in held.into_iter().zip(shares) {
        out.writes.push(reservation(ask, t, &share));
    }
    out.notes.push(
        "the budget is split over the threads by what each has used: a thread whose load changes waits for the next split".to_owned(),
    );
    Ok(())
}

/// CPUs of a VM's deadline threads: those of its root domain. Empty for no threads.
pub fn domain_of(root: &Root, threads: &[Thread]) -> Result<BTreeSet<u32>, HostError> {
    match main_of(threads) {
        Some(main) => root_domain(root, &main.cgroups, &main.affinity),
        None => Ok(BTreeSet::new()),
    }
}

fn may_run_on(t: &Thread, domain: &BTreeSet<u32>) -> bool {
    text::cpu_list(&t.affinity).is_some_and(|mask| domain.is_subset(&mask))
}

/// The VM's budget on the CPUs of `domain`, split over its threads.
pub(crate) fn divide(
    probe: &Probe,
    ask: &Ask<'_>,
    domain: &BTreeSet<u32>,
    used: &[(u32, Duration)],
    before: Option<&[Share]>,
) -> Option<Vec<Share>> {
    let cpus = u32::try_from(domain.len()).unwrap_or(1).max(1);
    let (budget, period) = (ask.contract.budget_us() * 1000, ask.contract.period_us() * 1000);
    split(budget, cpus, most_of_one(probe, budget, period), used, before)
}

/// Write of a thread's part as a reservation.
pub(crate) fn reservation(ask: &Ask<'_>, t: &Thread, share: &Share) -> Write {
    scheduling(ask, t, Attr::deadline(share.runtime, ask.contract.period_us() * 1000))
}

/// Largest share of a CPU that a deadline thread may have, unless the kernel reserves more for
/// others: the kernel's own default (`sched_rt_runtime_us`).
const KEEP: f64 = 0.95;

/// Largest runtime of one thread in each period: it runs on one CPU at a time, so no more than the
/// VM's budget there. The kernel admits the sum over all CPUs, so one thread could get a whole CPU
/// and never be preempted there: RT throttling does not limit deadline threads. The share kept for
/// others on each CPU is therefore kept here too.
fn most_of_one(probe: &Probe, budget: u64, period: u64) -> u64 {
    let found = choose(probe, Some(Backend::Deadline), false);
    let grant = found.map_or(KEEP, |f| (f.grant.limit.0 - f.grant.fair_server.0).clamp(0.0, KEEP));
    budget.min((period as f64 * grant) as u64)
}

/// Reason why SCHED_DEADLINE gives a thread no part of the budget, which the VM has on the CPUs of
/// `domain`; `None` if it does: for threads that have a priority under the order, except QEMU's RCU
/// thread, and workers, which come and go.
fn no_part(t: &Thread, order: Order, domain: &BTreeSet<u32>) -> Option<String> {
    match &t.role {
        // A worker lives for seconds, and a reservation cannot be passed on to the next one.
        Role::AioWorker | Role::IoUringWorker => Some("workers come and go".to_owned()),
        // A kernel thread stays in the kernel's cgroup, and so outside of a partition that the VM
        // is in.
        _ if t.kernel && text::cpu_list(&t.affinity).is_some_and(|mask| mask.is_disjoint(domain)) => {
            Some(format!("a thread of the kernel that may run on CPUs {} only, not the VM's", t.affinity))
        }
        Role::Rcu => Some(left_ordinary(&t.role)),
        role => attr(role, order, Level::ALONE, Backend::Deadline).is_none().then(|| left_ordinary(role)),
    }
}

fn left_ordinary(role: &Role) -> String {
    format!("a thread of role `{role}` is left ordinary")
}

/// Whether SCHED_DEADLINE gives a thread a part of the budget, which the VM has on the CPUs of
/// `domain` ([`domain_of`]).
#[must_use]
pub fn has_part(t: &Thread, order: Order, domain: &BTreeSet<u32>) -> bool {
    no_part(t, order, domain).is_none()
}

/// Threads that get a part of the budget.
pub(crate) fn held<'t>(ask: &Ask<'t>, domain: &BTreeSet<u32>, out: &mut Settings) -> Vec<&'t Thread> {
    let mut held: Vec<&Thread> = Vec::new();
    for t in ask.threads {
        match no_part(t, ask.order, domain) {
            Some(why) => out.outside.push((t.tid, why)),
            None => held.push(t),
        }
    }
    held
}
