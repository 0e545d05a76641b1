//! Kinds of settings, as the paths in a journal show them.

use serde::{Deserialize, Serialize};

/// Kinds of settings, such as for a policy about drift.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KnobClass {
    /// Budget of a VM's CPU contract, and the group that holds it.
    Budget,
    /// Policy and group of a thread.
    Thread,
    /// Weight of a VM on a disk.
    Weight,
    /// Limit of a VM on a disk.
    Limit,
    /// Elevator of a disk, and its tunables.
    Elevator,
    /// A setting inside a guest.
    Guest,
}

impl KnobClass {
    /// The kind of the setting in this file, as a journal names it.
    #[must_use]
    pub fn of_path(path: &str) -> Self {
        let file = path.rsplit('/').next().unwrap_or_default();
        if !path.starts_with('/') {
            Self::Guest
        } else if path.starts_with("/proc/") {
            Self::Thread
        } else if path.starts_with("/sys/block/") || path.starts_with("/sys/devices/") {
            Self::Elevator
        } else if file.to_lowercase().contains("weight") {
            Self::Weight
        } else if file.starts_with("blkio.throttle.") || file == "io.max" || file.ends_with(": IOAccounting")
        {
            Self::Limit
        } else {
            Self::Budget
        }
    }
}

/// Whether a setting limits CPU time, or is the partition in which that is counted: a VM that has
/// another value does not have its contract. Path
/// and value are those of a journal.
#[must_use]
pub fn limits_cpu_time(path: &str, value: &str) -> bool {
    const FILES: [&str; 5] =
        ["cpu.rt_runtime_us", "cpu.rt.max", "cpu.max", "cpu.cfs_quota_us", "cpuset.cpus.partition"];
    match KnobClass::of_path(path) {
        KnobClass::Budget => FILES.contains(&path.rsplit('/').next().unwrap_or_default()),
        KnobClass::Thread => value.starts_with("deadline "),
        KnobClass::Weight | KnobClass::Limit | KnobClass::Elevator | KnobClass::Guest => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_shows_its_kind() {
        for (path, class) in [
            ("/sys/fs/cgroup/cpu/rtvirtio-plc/cpu.rt_runtime_us", KnobClass::Budget),
            ("/sys/fs/cgroup/cpu/rtvirtio-plc", KnobClass::Budget),
            ("/proc/7/task/8/sched", KnobClass::Thread),
            ("/sys/fs/cgroup/blkio/vms/a/blkio.bfq.weight_device", KnobClass::Weight),
            ("/sys/fs/cgroup/blkio/vms/a/blkio.throttle.read_iops_device", KnobClass::Limit),
            ("/sys/fs/cgroup/machine.slice/a/io.max", KnobClass::Limit),
            ("/sys/fs/cgroup/machine.slice/a.scope: IOAccounting", KnobClass::Limit),
            ("/sys/fs/cgroup/machine.slice/a.scope: IODeviceWeight", KnobClass::Weight),
            ("/sys/fs/cgroup/machine.slice/a.scope: CPUQuota", KnobClass::Budget),
            ("/sys/block/sda/queue/scheduler", KnobClass::Elevator),
            ("plc:/sys/block/vda/queue/scheduler", KnobClass::Guest),
        ] {
            assert_eq!(KnobClass::of_path(path), class, "{path}");
        }
    }

    #[test]
    fn budgets_and_reservations_limit_cpu_time() {
        let group = "/sys/fs/cgroup/cpu/rtvirtio-plc";
        for (path, value, limits) in [
            (format!("{group}/cpu.rt_runtime_us"), "1000", true),
            (format!("{group}/cpu.cfs_quota_us"), "1000", true),
            (format!("{group}/cpu.rt_period_us"), "100000", false),
            (group.to_owned(), "present", false),
            ("/sys/fs/cgroup/machine.slice/a.scope/cpu.max".to_owned(), "1000 100000", true),
            ("/sys/fs/cgroup/machine.slice/a.scope/cpuset.cpus.partition".to_owned(), "root", true),
            ("/sys/fs/cgroup/machine.slice/a.scope/cpuset.cpus.exclusive".to_owned(), "2-3", false),
            ("/proc/7/task/8/sched".to_owned(), "deadline 1000000/100000000/100000000", true),
            ("/proc/7/task/8/sched".to_owned(), "fifo 97", false),
            ("plc:/sys/fs/cgroup/cpu.max".to_owned(), "1000 100000", false),
        ] {
            assert_eq!(limits_cpu_time(&path, value), limits, "{path}");
        }
    }
}
