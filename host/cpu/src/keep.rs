//! New threads of a VM under contract: each gets its role's settings. Under SCHED_DEADLINE the
//! budget is split again.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use rtvirtio_apply::Write;
use rtvirtio_kernel::Hierarchy;
use rtvirtio_vmm::Thread;

use crate::deadline::{divide, held, reservation};
use crate::managed::moved;
use crate::settings::{group_name, priorities};
use crate::{Ask, Backend, Probe, Settings, Share, attr};

/// Relative change of a thread's runtime up to which a new split is not written: each change is
/// journaled, and admitted anew by the kernel.
const LEAST_CHANGE: f64 = 0.05;

impl Settings {
    pub(crate) fn none(backend: Backend) -> Self {
        Self {
            backend,
            strength: backend.strength(),
            writes: Vec::new(),
            group: None,
            outside: Vec::new(),
            notes: Vec::new(),
        }
    }
}

/// Writes that take new threads of a VM into its contract in force: `ask.threads` are the new ones.
/// Under SCHED_DEADLINE a budget has to come from the other threads, so [`resplit`] does it.
/// `managed` is the [`Settings::group`] that the contract was applied with.
#[must_use]
pub fn take_in(probe: &Probe, backend: Backend, managed: Option<&Path>, ask: &Ask<'_>) -> Settings {
    let mut out = Settings { group: managed.map(Path::to_owned), ..Settings::none(backend) };
    let group = managed.map_or_else(|| Path::new("/").join(group_name(ask.vm)), Path::to_owned);
    let v1 = probe.cgroups.as_ref().filter(|c| c.hierarchy == Hierarchy::V1);
    // A quota limits the cgroups below it too.
    let moves = backend == Backend::RtGroup || (backend == Backend::CpuMax && managed.is_none());
    if let (true, Some(cgroups)) = (moves, v1) {
        // Also for threads that were started in the group: their later cgroup must be in the
        // journal. Threads whose role has no policy keep what they inherited; removing the group
        // restores both.
        let left = |t: &&Thread| {
            attr(&t.role, ask.order, ask.level, backend).is_none()
                && cgroups.of_thread(&t.cgroups) == Some(group.as_path())
        };
        out.writes.extend(ask.threads.iter().filter(|t| !left(t)).map(|t| moved(cgroups, ask, t, &group)));
    }
    if matches!(backend, Backend::RtGroup | Backend::Hcbs | Backend::Throttle) {
        priorities(ask, &mut out);
    }
    out
}

/// Splits the budget again over all of a VM's threads by their use since the last split, a part of
/// the way from the split in force ([`crate::split`]). `ask.threads` are all threads, `ask.used`
/// has the CPU time of each since the last split. Threads that give are written before threads that
/// get, so that their sum never exceeds what the kernel admits. `domain` has the VM's CPUs
/// ([`crate::domain_of`]).
#[must_use]
pub fn resplit(probe: &Probe, domain: &BTreeSet<u32>, ask: &Ask<'_>) -> Settings {
    let mut out = Settings::none(Backend::Deadline);
    let held = held(ask, domain, &mut out);
    let used: Vec<(u32, Duration)> = held
        .iter()
        .map(|t| (t.tid, ask.used.iter().find(|u| u.0 == t.tid).map_or(Duration::ZERO, |u| u.1)))
        .collect();
    let before: Vec<Share> =
        held.iter().filter_map(|t| Some(Share { tid: t.tid, runtime: t.reservation?.runtime })).collect();
    let Some(shares) = divide(probe, ask, domain, &used, Some(&before)) else {
        out.notes.push(format!("a budget of {} is too little for {} threads", ask.contract, held.len()));
        return out;
    };
    let old = |tid: u32| before.iter().find(|s| s.tid == tid).map(|s| s.runtime);
    let grows = |s: &Share| old(s.tid).is_none_or(|old| s.runtime > old);
    let moves =
        |s: &Share| old(s.tid).is_none_or(|old| s.runtime.abs_diff(old) as f64 > LEAST_CHANGE * old as f64);
    // All or none: whatever one thread gets, others must give, even if little each.
    if !shares.iter().any(moves) {
        return out;
    }
    let mut wanted: Vec<_> =
        held.iter().zip(&shares).filter(|(_, s)| old(s.tid) != Some(s.runtime)).collect();
    wanted.sort_by_key(|(_, s)| grows(s));
    let write = |(t, s): (&&Thread, &Share)| {
        let write = reservation(ask, t, s);
        Write { takes: grows(s), ..write }
    };
    out.writes = wanted.into_iter().map(write).collect();
    out
}
