//! A CPU budget of the memory load's threads bounds their writes in each period, and with it their
//! share of the memory's bandwidth.
//!
//! cgroup v1 moves single threads. On v2 the rest of their process has to be in the group above
//! ("Threads" in `Documentation/admin-guide/cgroup-v2.rst`). The root is such a group for every
//! process, so this one is there as long as the budget exists. resctrl would hold the bandwidth
//! itself; it is not used, for lack of a machine with it.

use std::path::{Path, PathBuf};

use anyhow::ensure;
use rtvirtio_kernel::{Cgroups, Hierarchy, ProcessId, Root, cgroup, leftovers, text};

/// Share of each CPU in a period.
const SHARE: f64 = 0.25;
const PERIOD_US: u64 = 10_000;
/// Suffix of the group's name, after the process that made it: a group left by `kill -9` is removed
/// by the next run, or by `rtvirtio-lab down`.
const NAME: &str = "memory-load";

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
    /// Moves the threads into a group of their own, without a limit yet. Groups of processes that
    /// have ended are removed first.
    pub(super) fn new(threads: &[u32]) -> anyhow::Result<Self> {
        Self::below(Root::default(), threads)
    }

    fn below(root: Root, threads: &[u32]) -> anyhow::Result<Self> {
        remove_left(&root)?;
        let cgroups = Cgroups::detect_cpu(&root)?;
        let from = cgroups.dir(&cgroups.of_pid(&root, std::process::id())?)?;
        let group = Path::new("/").join(format!("{}{NAME}", ProcessId::prefix("bench")));
        let dir = cgroups.dir(&group)?;
        if cgroups.hierarchy == Hierarchy::V2 {
            let file = cgroups.mount.join("cgroup.subtree_control");
            ensure!(
                text::has_word(&root.read(&file)?, "cpu"),
                "the cpu controller is not enabled below the root cgroup: `echo +cpu > {}` enables it",
                file.display()
            );
        }
        let quota_us = (SHARE * PERIOD_US as f64) as u64 * threads.len() as u64;
        cgroups.create(&root, &group)?;
        // From here on a failure moves the threads back.
        let budget = Self { root, cgroups, group, dir, from, threads: threads.to_vec(), quota_us };
        if budget.cgroups.hierarchy == Hierarchy::V2 {
            budget.write("cgroup.type", "threaded")?;
            budget.cgroups.attach(&budget.root, Path::new("/"), std::process::id())?;
        } else {
            budget.write("cpu.cfs_period_us", &PERIOD_US.to_string())?;
        }
        for thread in threads {
            budget.write(budget.list(), &thread.to_string())?;
        }
        Ok(budget)
    }

    /// Sets or lifts the limit.
    pub(super) fn hold(&self, on: bool) -> anyhow::Result<()> {
        match self.cgroups.hierarchy {
            Hierarchy::V1 => {
                let quota = if on { self.quota_us.to_string() } else { "-1".to_owned() };
                self.write("cpu.cfs_quota_us", &quota)
            }
            Hierarchy::V2 => {
                let most = if on { self.quota_us.to_string() } else { "max".to_owned() };
                self.write("cpu.max", &format!("{most} {PERIOD_US}"))
            }
        }
    }

    /// The file that takes threads.
    fn list(&self) -> &'static str {
        match self.cgroups.hierarchy {
            Hierarchy::V1 => "tasks",
            Hierarchy::V2 => "cgroup.threads",
        }
    }

    fn write(&self, file: &str, text: &str) -> anyhow::Result<()> {
        Ok(self.root.write(self.dir.join(file), text)?)
    }
}

impl Drop for CpuBudget {
    fn drop(&mut self) {
        // On v2 a thread goes to where its process is, and the process then to where it was.
        let back = if self.cgroups.hierarchy == Hierarchy::V2 { &self.cgroups.mount } else { &self.from };
        for thread in &self.threads {
            // Most threads have ended.
            let _ = self.root.write(back.join(self.list()), &thread.to_string());
        }
        if self.cgroups.hierarchy == Hierarchy::V2 {
            let _ = self.root.write(self.from.join("cgroup.procs"), &std::process::id().to_string());
        }
        let _ = self.cgroups.remove(&self.root, &self.group);
    }
}

/// Removes the groups of runs that were killed.
fn remove_left(root: &Root) -> anyhow::Result<()> {
    for group in leftovers::groups(root)? {
        let is_ours = group.dir.to_str().is_some_and(|dir| dir.ends_with(NAME));
        if is_ours && group.is_left(root)? {
            // The group's threads ended with their process.
            cgroup::remove_dir(root, &group.dir)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;
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
        // CPU time of the load's thread, which no other load of the machine makes longer.
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

    #[test]
    fn a_group_of_a_killed_run_is_removed_by_the_next() {
        let test = "a_group_of_a_killed_run_is_removed_by_the_next";
        let root = Root::default();
        let cgroups = match Cgroups::detect_cpu(&root) {
            Ok(cgroups) if has(test, &[Need::Root]) => cgroups,
            Ok(_) => return,
            Err(e) => return skip(test, &e.to_string()),
        };
        // No process started with the machine and has this id: ids end at 4194304.
        let group = Path::new("/rtvirtio-bench-4194305-1-memory-load");
        cgroups.create(&root, group).unwrap();
        // A concurrent test may have removed it first.
        remove_left(&root).unwrap();
        assert!(!root.exists(cgroups.dir(group).unwrap()).unwrap());
    }

    #[test]
    fn on_v2_the_group_is_threaded_and_the_process_goes_back() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let root = Root::new(dir.path());
        let put = |path: &Path, text: &str| {
            let path = root.at(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let (mount, me) = (Path::new("/sys/fs/cgroup"), std::process::id());
        put(Path::new("/proc/self/mountinfo"), "38 31 0:35 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
        put(&Path::new("/proc").join(me.to_string()).join("cgroup"), "0::/user.slice\n");
        let ours = mount.join(format!("{}{NAME}", ProcessId::prefix("bench")));
        for file in ["cgroup.controllers", "cgroup.subtree_control"] {
            put(&mount.join(file), "io pids\n");
        }
        put(&mount.join("cgroup.controllers"), "cpu io\n");
        for list in ["cgroup.procs", "cgroup.threads", "user.slice/cgroup.procs"] {
            put(&mount.join(list), "");
        }
        let refused = CpuBudget::below(root.clone(), &[11, 12]).unwrap_err().to_string();
        assert!(refused.contains("echo +cpu > /sys/fs/cgroup/cgroup.subtree_control"), "{refused}");
        put(&mount.join("cgroup.subtree_control"), "cpu\n");
        for file in ["cgroup.type", "cgroup.threads", "cpu.max"] {
            put(&ours.join(file), "");
        }
        let budget = CpuBudget::below(root.clone(), &[11, 12]).unwrap();
        let read = |path: PathBuf| root.read(path).unwrap();
        assert_eq!(read(ours.join("cgroup.type")), "threaded");
        assert_eq!(read(mount.join("cgroup.procs")), me.to_string(), "the process is where it may be");
        assert_eq!(read(ours.join("cgroup.threads")), "12", "one after the other");
        budget.hold(true).unwrap();
        assert_eq!(read(ours.join("cpu.max")), "5000 10000");
        budget.hold(false).unwrap();
        assert_eq!(read(ours.join("cpu.max")), "max 10000");
        drop(budget);
        assert_eq!(read(mount.join("user.slice/cgroup.procs")), me.to_string());
        assert_eq!(read(mount.join("cgroup.threads")), "12");
    }
}
