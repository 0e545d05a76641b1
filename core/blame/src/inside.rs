//! Causes inside the VM: its memory, and the guest itself.

use rtvirtio_units::Nanos;

use crate::{Cause, CauseKind, Facts, NAMED, Stops};

/// Largest part of the late requests that may have another cause where the guest or its memory is
/// named.
pub const LITTLE: f64 = 0.15;
/// Largest part of the late requests' time below the guest where the guest is named.
pub const INSIDE: f64 = 0.25;
/// Part of a task's requests that its VMM must have counted where the guest is named.
const COUNTED: f64 = 0.9;
/// Longest period of a CPU quota, in seconds (`max_cfs_quota_period` in `kernel/sched/fair.c`): no
/// stop by it is counted for longer. The sum of the stops' lengths is known as a lower bound only.
const QUOTA_PERIOD: f64 = 1.0;

/// Requests of the VM in the task's directions, as its VMM counts them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct VmUse {
    /// Requests completed.
    pub requests: f64,
    /// Time that these spent below the guest, in seconds.
    pub waited: f64,
    /// Requests of other tasks are counted with the task's.
    pub is_mixed: bool,
}

/// Major page faults in the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Faults {
    /// Of the VM's processes.
    pub own: u64,
    /// Of all of the host, those included that the kernel has for a VM.
    pub host: u64,
    /// Some may have been of memory that the host keeps compressed: these need no disk.
    pub may_be_compressed: bool,
}

fn paging(faults: u64, waits: &str) -> Cause {
    Cause {
        kind: CauseKind::Paging,
        share: None,
        evidence: format!("its memory had to be read back from a disk {faults} times{waits}"),
        remedy: "keep its memory resident: lock it (`<memoryBacking><locked/>`), give the host more, or raise its memory limit".to_owned(),
    }
}

impl Facts {
    /// Largest share of a CPU's time that the hypervisor below the host may have taken: the mean of
    /// all CPUs may have been that of the VM's alone.
    pub(crate) fn stolen_of_one(&self) -> Option<f64> {
        Some((self.stolen? * f64::from(self.cpus?)).min(1.0))
    }

    /// Longest time for which the VM's own quota may have stopped it, in seconds.
    fn stopped_by_quota(&self) -> Option<f64> {
        let Stops { count, total } = self.quota?;
        Some((count as f64 * QUOTA_PERIOD).max(total.0 as f64 / 1e9).min(self.seconds))
    }

    /// Whether waits for CPUs or memory, quotas, and stops of host and disk delayed few of the late
    /// requests; not where one of them is not known, but for waits for memory.
    fn is_hardly_stopped(&self) -> bool {
        let stopped = || {
            let cpus = (self.ready? + self.stolen_of_one()?) * self.seconds;
            let seconds = |stops: Stops| stops.total.0 as f64 / 1e9;
            self.disk?;
            let disk = self.standstills().map_or(0.0, seconds);
            let memory = self.memory.map_or(0.0, seconds);
            Some(cpus + self.stopped_by_quota()? + seconds(self.host?) + disk + memory)
        };
        stopped().is_some_and(|time| self.rate * time <= LITTLE * self.late as f64)
    }

    /// Whether the VMM had the requests for a small part of the time in which they were late; not
    /// where it counts others with them: how many are the task's is not known then.
    fn is_above_vmm(&self) -> bool {
        let lost = self.late as f64 * self.target.0 as f64 / 1e9;
        // Requests due at once while the task was late: a stop of an earlier one delays them all.
        let taken = self.depth.filter(|_| self.rate > 0.0);
        let taken = taken.map_or(lost, |depth| f64::from(depth) * self.late as f64 / self.rate);
        self.below.is_some_and(|below| {
            !below.is_mixed
                && below.requests >= COUNTED * self.n as f64
                && below.waited <= INSIDE * lost.min(taken)
        })
    }

    /// The VM's memory, where waits for it delayed enough of the late requests. Of a stall of the
    /// host in such a wait the kernel counts the time too.
    pub(crate) fn waits_for_memory(&self) -> Option<Cause> {
        let faults = self.faults.filter(|faults| faults.own > 0 && !faults.may_be_compressed)?;
        let waits = self.memory?;
        let stalled = self.host.map_or(0, |host| host.total.0);
        let total = Nanos(waits.total.0.saturating_sub(stalled));
        let share = self.delayed_by(Some(Stops { total, ..waits }), 1)?;
        let part = total.0 as f64 / 1e9 / self.seconds.max(f64::MIN_POSITIVE);
        let waits = format!(", for which it waited {:.0} % of the time", 100.0 * part.min(1.0));
        Some(Cause { share: Some(share), ..paging(faults.own, &waits) })
    }

    /// The VM's memory or the guest itself, where nothing below them explains the late requests.
    pub(crate) fn inside(&self) -> Option<Cause> {
        let faults = self.faults.filter(|_| self.late > 0 && self.is_hardly_stopped())?;
        if faults.own as f64 >= NAMED * self.late as f64 {
            // Where the time is known it shows how many were delayed, and faults may take little.
            let is_only_counted = self.memory.is_none() && !faults.may_be_compressed;
            return is_only_counted.then(|| paging(faults.own, ""));
        }
        let is_resident = faults.host as f64 <= LITTLE * self.late as f64;
        let below = self.below.filter(|_| is_resident && self.is_above_vmm())?;
        let each = Nanos::from_secs_f64(below.waited / below.requests.max(1.0));
        Some(Cause {
            kind: CauseKind::Guest,
            share: None,
            evidence: format!(
                "its VMM answered a request in {each} on average, and its threads hardly waited for CPUs: the rest passed in the guest"
            ),
            remedy: "look in the guest: its elevator and I/O limits, busy CPUs, other programs".to_owned(),
        })
    }
}
