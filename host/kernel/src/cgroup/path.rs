//! Settings for one device on a cgroup and on those above it.
//!
//! On v2 a limit holds for a whole subtree, so the least one on the path to the root counts. On v1
//! blk-throttle is flat: every group is treated as if it were right below the root, and only a
//! group's own limit counts (`throtl_pd_init()` in `block/blk-throttle.c`). BFQ's weights are
//! hierarchical on both, and so are quotas of CPU time (`tg_set_cfs_bandwidth()` in
//! `kernel/sched/core.c`).

use std::path::{Path, PathBuf};

use crate::cgroup::{Cgroups, Hierarchy, Limit, child_dirs};
use crate::{HostError, Root, text, unless_gone};

/// CPU quota of a cgroup's ordinary threads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuLimit {
    /// Cgroup that has the quota.
    pub cgroup: PathBuf,
    /// Name of the quota's file in the cgroup.
    pub file: &'static str,
    /// CPU time in a period, on all CPUs together, us.
    pub quota_us: u64,
    /// Length of the period, us.
    pub period_us: u64,
}

impl CpuLimit {
    /// Number of CPUs that the quota is worth.
    #[must_use]
    pub fn cpus(&self) -> f64 {
        self.quota_us as f64 / self.period_us.max(1) as f64
    }
}

/// Limits that a cgroup may have.
const LIMITS: [Limit; 4] = [Limit::ReadBps, Limit::WriteBps, Limit::ReadIops, Limit::WriteIops];

/// BFQ's weight of a cgroup that has none set.
const DEFAULT_WEIGHT: u64 = 100;

/// A limit of one cgroup for a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetLimit {
    pub cgroup: PathBuf,
    /// Name of the limit's file in the cgroup.
    pub file: &'static str,
    /// Direction and unit of the value.
    pub limit: Limit,
    /// Maximum per second, in bytes or requests.
    pub value: u64,
}

/// Control of a cgroup, or of the device, that is neither a limit nor a BFQ weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherControl {
    pub cgroup: PathBuf,
    /// Name of the control's file in the cgroup.
    pub file: &'static str,
    /// Value for the device.
    pub value: String,
}

impl Cgroups {
    /// A cgroup and those above it, the outermost first, without the root. Those above the part of
    /// the hierarchy that is mounted here are left out.
    #[must_use]
    pub fn path_of(&self, cgroup: &Path) -> Vec<PathBuf> {
        let absolute = Path::new("/").join(cgroup);
        let seen = |c: &&Path| !Self::is_root(c) && self.dir(c).is_ok_and(|dir| dir != self.mount);
        let mut path: Vec<PathBuf> = absolute.ancestors().filter(seen).map(Path::to_owned).collect();
        path.reverse();
        path
    }

    /// Whether cgroups above the part of the hierarchy that is mounted here, which are not visible,
    /// may set something too.
    #[must_use]
    pub fn hides_parents(&self) -> bool {
        !Self::is_root(&self.mount_root)
    }

    /// Cgroups whose limits for a device act on a cgroup's processes, its own first. On v2 also the
    /// one that is mounted as the root: in a container it has the files of any cgroup.
    #[must_use]
    pub fn limiting(&self, cgroup: &Path) -> Vec<PathBuf> {
        let mut path = self.path_of(cgroup);
        path.reverse();
        match self.hierarchy {
            Hierarchy::V1 => path.truncate(1),
            Hierarchy::V2 => path.push(self.mount_root.clone()),
        }
        path
    }

    /// Limits for a device that act on a cgroup's processes, those of [`Cgroups::limiting`].
    pub fn limits_on_path(&self, root: &Root, cgroup: &Path, dev: &str) -> Result<Vec<SetLimit>, HostError> {
        let mut found = Vec::new();
        for cgroup in self.limiting(cgroup) {
            for limit in LIMITS {
                let file = match self.hierarchy {
                    Hierarchy::V1 => limit.v1_file(),
                    Hierarchy::V2 => "io.max",
                };
                let path = self.limit_file(&cgroup, limit)?;
                let Some(content) = root.read_optional(&path)? else { continue };
                let value = match self.hierarchy {
                    Hierarchy::V1 => text::throttle_value(&content, dev),
                    Hierarchy::V2 => text::io_max_value(&content, dev, limit.key()),
                };
                let value =
                    value.ok_or_else(|| HostError::form(path, &content, "a limit for each device"))?;
                found.extend(value.map(|value| SetLimit { cgroup: cgroup.clone(), file, limit, value }));
            }
        }
        Ok(found)
    }

    /// Quotas of CPU time that act on a cgroup's ordinary threads, in the hierarchy of the CPU
    /// controller: its own first, then those above it.
    pub fn cpu_limits_on_path(&self, root: &Root, cgroup: &Path) -> Result<Vec<CpuLimit>, HostError> {
        let mut path = self.path_of(cgroup);
        path.reverse();
        path.push(self.mount_root.clone());
        let mut found = Vec::new();
        for cgroup in path {
            let dir = self.dir(&cgroup)?;
            let file = match self.hierarchy {
                Hierarchy::V1 => "cpu.cfs_quota_us",
                Hierarchy::V2 => "cpu.max",
            };
            let Some(mut content) = root.read_optional(dir.join(file))? else { continue };
            if self.hierarchy == Hierarchy::V1 {
                if content.trim() == "-1" {
                    continue;
                }
                let period = root.read_optional(dir.join("cpu.cfs_period_us"))?.unwrap_or_default();
                content = format!("{} {}", content.trim(), period.trim());
            }
            let value = text::cpu_quota(&content)
                .ok_or_else(|| HostError::form(dir.join(file), &content, "a quota and a period"))?;
            found.extend(value.map(|(quota_us, period_us)| CpuLimit { cgroup, file, quota_us, period_us }));
        }
        Ok(found)
    }

    /// BFQ's weight of a cgroup for a device; the default where the file is not there: BFQ is not
    /// loaded, or on v2 `io` is not enabled yet.
    pub fn weight_of(&self, root: &Root, cgroup: &Path, dev: &str) -> Result<u32, HostError> {
        let file = self.weight_file(root, cgroup)?;
        let Some(content) = root.read_optional(&file.path)? else { return Ok(DEFAULT_WEIGHT as u32) };
        let weights =
            text::weights(&content).ok_or_else(|| HostError::form(file.path, &content, "weights"))?;
        let weight = weights.devices.get(dev).copied().or(weights.default).unwrap_or(DEFAULT_WEIGHT);
        Ok(u32::try_from(weight).unwrap_or(DEFAULT_WEIGHT as u32))
    }

    /// Controls that the models do not cover: `io.latency` of a cgroup, of those above it and of
    /// all their siblings (it throttles siblings), `io.cost.qos` where it is enabled, with the
    /// `io.weight` of the path; on v1 `blkio.weight` of CFQ.
    pub fn other_controls(
        &self,
        root: &Root,
        cgroup: &Path,
        dev: &str,
    ) -> Result<Vec<OtherControl>, HostError> {
        let path = self.path_of(cgroup);
        let mut found = Vec::new();
        if self.hierarchy == Hierarchy::V1 {
            for cgroup in path {
                let value = root.read_optional(self.dir(&cgroup)?.join("blkio.weight"))?;
                found.extend(value.map(|value| OtherControl {
                    cgroup,
                    file: "blkio.weight",
                    value: value.trim().to_owned(),
                }));
            }
            return Ok(found);
        }
        if let Some(qos) = self.of_device(root, Path::new("/"), "io.cost.qos", dev)? {
            if qos.value.split_whitespace().any(|word| word == "enable=1") {
                found.push(qos);
                for cgroup in &path {
                    let content =
                        root.read_optional(self.dir(cgroup)?.join("io.weight"))?.unwrap_or_default();
                    let weights = text::weights(&content).unwrap_or_default();
                    let weight = weights.devices.get(dev).copied().or(weights.default);
                    found.extend(weight.map(|w| OtherControl {
                        cgroup: cgroup.clone(),
                        file: "io.weight",
                        value: w.to_string(),
                    }));
                }
            }
        }
        for cgroup in &path {
            let parent = cgroup.parent().unwrap_or(cgroup);
            for dir in unless_gone(child_dirs(root, &self.dir(parent)?))?.unwrap_or_default() {
                let sibling = dir.file_name().map_or_else(|| cgroup.clone(), |name| parent.join(name));
                found.extend(self.of_device(root, &sibling, "io.latency", dev)?);
            }
        }
        Ok(found)
    }

    /// Control with a device's line of a file.
    fn of_device(
        &self,
        root: &Root,
        cgroup: &Path,
        file: &'static str,
        dev: &str,
    ) -> Result<Option<OtherControl>, HostError> {
        let content = match root.read_optional(self.dir(cgroup)?.join(file)) {
            Err(e) if e.is_gone() => None,
            read => read?,
        };
        let line = content.as_deref().and_then(|content| text::device_line(content, dev));
        let value = line.map(|line| line.trim().to_owned()).filter(|line| !line.is_empty());
        Ok(value.map(|value| OtherControl { cgroup: cgroup.to_owned(), file, value }))
    }
}

#[cfg(test)]
mod tests;
