//! A CPU budget of the memory load's threads: how much they write in each period is bounded, and
//! with it what they take of the memory's bandwidth.
//!
//! cgroup v1 moves single threads. On v2 those of one process stay in one part of the tree, so that
//! the load had to be a process of its own: not measured there. resctrl would hold the bandwidth
//! itself; no machine with it was at hand.

use std::path::PathBuf;

use anyhow::ensure;
use rtvirtio_kernel::{Cgroups, Hierarchy, Root};

/// Of each CPU, in a period of it.
const SHARE: f64 = 0.25;
const PERIOD_US: u64 = 10_000;

/// A cgroup with the threads. Dropping it moves them back and removes it.
#[derive(Debug)]
pub(super) struct CpuBudget {
    root: Root,
    cgroups: Cgroups,
    group: PathBuf,
    dir: PathBuf,
    /// The group that the threads come from.
    from: PathBuf,
    threads: Vec<u32>,
    quota_us: u64,
}

impl CpuBudget {
    /// Moves the threads into a group of their own, without a limit yet.
    pub(super) fn new(threads: &[u32]) -> anyhow::Result<Self> {
        let root = Root::default();
        let cgroups = Cgroups::detect_cpu(&root)?;
        ensure!(
            cgroups.hierarchy == Hierarchy::V1,
            "a CPU budget of the memory load needs the cpu controller on cgroup v1: v2 does not move single threads"
        );
        let own = cgroups.of_pid(&root, std::process::id())?;
        let group = own.join(format!("rtvirtio-memory-load-{}", std::process::id()));
        let (from, dir) = (cgroups.dir(&own)?, cgroups.dir(&group)?);
        cgroups.create(&root, &group)?;
        let quota_us = (SHARE * PERIOD_US as f64) as u64 * threads.len() as u64;
        let budget = Self { root, cgroups, group, dir, from, threads: threads.to_vec(), quota_us };
        budget.write("cpu.cfs_period_us", &PERIOD_US.to_string())?;
        for thread in threads {
            budget.write("tasks", &thread.to_string())?;
        }
        Ok(budget)
    }

    /// Sets or lifts the limit.
    pub(super) fn hold(&self, on: bool) -> anyhow::Result<()> {
        self.write("cpu.cfs_quota_us", &if on { self.quota_us.to_string() } else { "-1".to_owned() })
    }

    fn write(&self, file: &str, text: &str) -> anyhow::Result<()> {
        Ok(self.root.write(self.dir.join(file), text)?)
    }
}

impl Drop for CpuBudget {
    fn drop(&mut self) {
        for thread in &self.threads {
            // Most have ended.
            let _ = self.root.write(self.from.join("tasks"), &thread.to_string());
        }
        let _ = self.cgroups.remove(&self.root, &self.group);
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use rtvirtio_testkit::{Need, has, skip};

    use super::super::memory_load::MemoryLoad;
    use super::*;

    #[test]
    fn a_held_load_has_its_budget_and_leaves_no_group() {
        let test = "a_held_load_has_its_budget_and_leaves_no_group";
        if !has(test, &[Need::Root]) {
            return;
        }
        let load = match MemoryLoad::new(&[0]) {
            Ok(load) => load,
            Err(e) => return skip(test, &e.to_string()),
        };
        let budget = match CpuBudget::new(&load.threads()) {
            Ok(budget) => budget,
            Err(e) => return skip(test, &e.to_string()),
        };
        let dir = budget.dir.clone();
        budget.hold(true).unwrap();
        load.set(true);
        // CPU time of its thread, which no other load of the machine makes longer.
        let used = || {
            rtvirtio_kernel::task::cpu_time(&Root::default(), std::process::id(), load.threads()[0]).unwrap()
        };
        let (before, begin) = (used(), Instant::now());
        std::thread::sleep(Duration::from_millis(400));
        load.set(false);
        let (used, passed) = (used() - before, begin.elapsed());
        let most = passed.as_secs_f64() * SHARE + 2.0 * PERIOD_US as f64 / 1e6;
        assert!(used.as_secs_f64() <= most, "{used:?} of {passed:?}");
        drop(load);
        drop(budget);
        assert!(!dir.exists());
    }
}
