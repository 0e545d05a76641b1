//! CPUs of the host that go offline and come back while contracts with `cores` are kept.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use rtvirtio_apply::{ApplyError, Line, Machine, NoGuests, Session};
use rtvirtio_kernel::text::cpu_list;
use rtvirtio_kernel::{cpuset, task, unless_gone};

use super::Keeper;
use crate::core_faults::{CoreFault, core_faults};
use crate::error::{Context as _, Result};
use crate::managed_vm::ManagedVm;

const ONLINE: &str = "/sys/devices/system/cpu/online";

/// Time after a change in which the kernel may take threads their CPUs: it does so by a work queue.
const SETTLES: Duration = Duration::from_secs(5);
/// Interval of looks in that time.
const AGAIN: Duration = Duration::from_millis(200);

/// CPUs of the host at the last look.
#[derive(Default)]
pub(super) struct HostCpus {
    online: Option<BTreeSet<u32>>,
    /// Last change of the CPUs that are online, and the next look after it.
    changed: Option<(Instant, Instant)>,
    said: BTreeSet<String>,
}

impl HostCpus {
    /// Where CPUs have gone or come since the last look: gives threads the CPUs again that they
    /// lost by that, unless another VM is on the core by now. Before Linux 6.2 each change takes
    /// all threads of a cpuset their CPUs (`cpuset_hotplug_update_tasks()`), later ones only those
    /// that have none left. Returns what is to be said, each sentence once for as long as it is
    /// true.
    pub fn look(&mut self, keeper: &Keeper<'_>, kept: &[ManagedVm]) -> Vec<String> {
        if kept.iter().all(|vm| vm.contract().cores.is_none()) {
            return Vec::new();
        }
        let lines = match self.changes(keeper, kept) {
            Ok(None) => return Vec::new(),
            Ok(Some(lines)) => lines,
            Err(e) => vec![format!("whether all CPUs of VMs with `cores` are there is not known: {e:#}")],
        };
        let lines: BTreeSet<String> = lines.into_iter().collect();
        let new = lines.difference(&self.said).cloned().collect();
        self.said = lines;
        new
    }

    fn changes(&mut self, keeper: &Keeper<'_>, kept: &[ManagedVm]) -> Result<Option<Vec<String>>> {
        let online = cpu_list(keeper.root.read(ONLINE)?.trim()).context("the CPUs that are online")?;
        let now = Instant::now();
        let before = self.online.replace(online.clone());
        if before.as_ref().is_some_and(|before| *before != online) {
            self.changed = Some((now, now));
        }
        self.changed.take_if(|(at, _)| now.saturating_duration_since(*at) > SETTLES);
        let is_due = self.changed.is_some_and(|(_, next)| now >= next);
        if before.is_some() && !is_due {
            return Ok(None);
        }
        let faults = core_faults(&keeper.root, keeper.dirs)?;
        let mut lines: Vec<String> = faults.iter().map(|fault| fault.text.clone()).collect();
        if let Some((_, next)) = &mut self.changed {
            *next = now + AGAIN;
            lines.extend(give_back(keeper, kept, &online, &faults)?);
        }
        Ok(Some(lines))
    }
}

/// Gives threads that have all CPUs of their cpuset, and so none by the contract, theirs again as
/// far as these are online. Other CPUs are another program's choice, which is left to it.
fn give_back(
    keeper: &Keeper<'_>,
    kept: &[ManagedVm],
    online: &BTreeSet<u32>,
    faults: &[CoreFault],
) -> Result<Vec<String>> {
    let (mut paths, mut lines) = (BTreeSet::new(), Vec::new());
    for vm in kept {
        let of = vm.contract();
        let Some(cores) = &of.cores else { continue };
        let of_vm = faults.iter().filter(|fault| fault.is_shared && fault.vm == of.vm);
        let shared: BTreeSet<u32> = of_vm.flat_map(|fault| &fault.cpus).copied().collect();
        for thread in vm.threads() {
            let Some(now) = unless_gone(task::affinity(&keeper.root, thread.pid, thread.tid))? else {
                continue;
            };
            let now = cpu_list(&now).unwrap_or_default();
            let (writes, _) = cores.writes(&of.vm, std::slice::from_ref(&thread));
            for write in writes {
                let wanted = cpu_list(&write.value).unwrap_or_default();
                if now == wanted
                    || wanted.is_disjoint(online)
                    || now != cpuset(&keeper.root, &thread.cgroups)?
                {
                    continue;
                }
                if wanted.is_disjoint(&shared) {
                    paths.insert(write.target.path);
                } else {
                    lines.push(format!("{}: not {} again: another VM is on it", write.knob, write.value));
                }
            }
        }
    }
    if paths.is_empty() {
        return Ok(lines);
    }
    let session = match Session::open(&keeper.dirs.state) {
        Ok(session) => session,
        // Another rtvirtio is at work: again at the next look.
        Err(ApplyError::Locked { .. }) => return Ok(lines),
        Err(e) => return Err(e.into()),
    };
    if session.applied_by()? != Some(keeper.by) {
        return Ok(lines);
    }
    let chosen = |_: &str, path: &str| paths.contains(Path::new(path));
    let done = session.restore(&chosen, &Machine::new(&keeper.root, &NoGuests))?;
    let again = |line: Line| {
        format!("{}: {} again, which the kernel took away with a CPU of the host", line.knob, line.new)
    };
    lines.extend(done.written.into_iter().map(again));
    lines.extend(done.failed.into_iter().map(|(knob, why)| format!("{knob}: not set again: {why}")));
    Ok(lines)
}
