//! Readings of a site's counters around a run, and the watch of its VMs' memory meanwhile.

use std::collections::BTreeMap;
use std::path::Path;

use rtvirtio_blame::Stops;
use rtvirtio_kernel::{Cgroups, Hierarchy, ProcessId};
use rtvirtio_measure::TaskResult;
use rtvirtio_measure::late::StallTotal;
use rtvirtio_measure::memory_waits::{MemoryWatch, Scope};
use rtvirtio_measure::workload::{Moment, VmLoad};

use super::{Counters, Watched, Window, explain, own_group};
use crate::progress::Progress;
use crate::site::Site;
use crate::vm_counters::OwnFaults;

/// Counters of a site around a run and around its measured part, in which its requests are judged:
/// programs that start and end use CPUs as well.
pub(crate) struct Readings<'a> {
    site: &'a Site,
    first: Counters,
    start: Option<Counters>,
    begin: Option<Counters>,
    end: Option<Counters>,
    /// By VM: watch of its memory in the measured part.
    memory: BTreeMap<String, MemoryWatch>,
}

impl<'a> Readings<'a> {
    /// Reads the values before a run.
    pub fn begin(site: &'a Site, progress: &dyn Progress) -> Self {
        let first = Counters::before(site, progress);
        Self { site, first, start: None, begin: None, end: None, memory: BTreeMap::new() }
    }

    /// Reads the values at a moment of the run.
    pub fn take(&mut self, moment: Moment, progress: &dyn Progress) {
        match moment {
            Moment::Start => self.start = Some(Counters::of_kernel(self.site, progress)),
            Moment::Begin => {
                let now = Counters::after(self.site, &self.first, progress);
                self.memory = watches(self.site, &now);
                self.begin = Some(now);
            }
            Moment::End => {
                // Ended first: monitors may take their time.
                let memory = std::mem::take(&mut self.memory).into_iter().filter_map(|(vm, watch)| {
                    let StallTotal { total, count } = watch.finish()?;
                    Some((vm, Stops { count, total }))
                });
                let memory = memory.collect();
                self.end = Some(Counters { memory, ..Counters::after(self.site, &self.first, progress) });
            }
        }
    }

    /// Names the causes of each missed target, at the end of the run.
    pub fn explain(
        self,
        loads: &[VmLoad],
        watched: &Watched<'_>,
        results: &mut [TaskResult],
        progress: &dyn Progress,
    ) {
        let Self { site, first, start, begin, end, .. } = self;
        let end = end.unwrap_or_else(|| Counters::after(site, &first, progress));
        let window = Window::new(&first, start.as_ref(), begin.as_ref(), &end);
        explain(site, loads, &window, watched, results);
    }
}

/// Watches the memory of each VM whose processes last.
fn watches(site: &Site, now: &Counters) -> BTreeMap<String, MemoryWatch> {
    let processes = |all: &OwnFaults| -> Vec<ProcessId> {
        all.keys().map(|(pid, start)| ProcessId { pid: *pid, start_time: *start }).collect()
    };
    let dir = |group: &Path| site.cgroups().dir(&Cgroups::unit_of(group)).ok();
    let is_v2 = site.cgroups().hierarchy == Hierarchy::V2;
    let watch = |name: &String| {
        let processes = now.vms.get(name)?.faults.as_ref().map(processes).filter(|all| !all.is_empty())?;
        let own = own_group(site, name).filter(|_| is_v2).and_then(dir);
        let scopes = own.map(|dir| Scope::of_cgroup(&dir)).into_iter().chain([Scope::host()]);
        Some((name.clone(), MemoryWatch::start(site.root(), &processes, scopes)?))
    };
    now.vms.keys().filter_map(watch).collect()
}
