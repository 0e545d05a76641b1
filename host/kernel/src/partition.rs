//! Partitions of cgroup v2's cpuset: CPUs of one group that are a root domain of their own
//! (`Documentation/admin-guide/cgroup-v2.rst`, `cpuset.cpus.partition`).
//!
//! From Linux 6.7 on a group needs no partition around it for that (a *remote* partition): its CPUs
//! are in `cpuset.cpus.exclusive` of the group and of each group above it, and no sibling of these
//! has one of them. `cpuset.cpus` is not written: a partition takes its exclusive CPUs, and the
//! kernel refuses to empty that file again while threads are in the group (`validate_change()`).

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::cgroup::{Cgroups, child_dirs};
use crate::fair_server::version;
use crate::mounts::mounts;
use crate::text::{self, cpu_ranges};
use crate::topology::{cpus_in, isolated};
use crate::{HostError, Root, unless_gone};

const ONLINE: &str = "/sys/devices/system/cpu/online";
const CONTROLLERS: &str = "cgroup.subtree_control";
/// File that every group has.
const PROCESSES: &str = "cgroup.procs";
const EXCLUSIVE: &str = "cpuset.cpus.exclusive";
const KIND: &str = "cpuset.cpus.partition";
const EFFECTIVE: &str = "cpuset.cpus.effective";
/// First version of the kernel with `cpuset.cpus.exclusive`, unless it was ported back.
const FIRST: (u32, u32) = (6, 7);

/// Partition that cannot be made here.
#[derive(Debug, thiserror::Error)]
pub enum PartitionError {
    /// The kernel would refuse it, or show it as invalid.
    #[error("{why}; {remedy}")]
    Cannot {
        /// Reason, with the group or the CPUs.
        why: String,
        remedy: String,
    },
    /// The host could not be read.
    #[error(transparent)]
    Host(#[from] HostError),
}

fn cannot<T>(why: String, remedy: &str) -> Result<T, PartitionError> {
    Err(PartitionError::Cannot { why, remedy: remedy.to_owned() })
}

/// Setting of a group on the way to a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartitionFile {
    /// `cgroup.subtree_control`: the cpuset controller for the groups below.
    Controllers,
    /// `cpuset.cpus.exclusive`.
    Exclusive,
    /// `cpuset.cpus.partition`.
    Kind,
}

/// Write of one file on the way to a partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartitionStep {
    /// Path of the group below the hierarchy's root.
    pub group: PathBuf,
    /// Setting that the file holds.
    pub what: PartitionFile,
    pub file: PathBuf,
    pub value: String,
    /// Position of the earlier step that brings the file into being.
    pub created_by: Option<usize>,
}

/// Checks that this kernel makes partitions in groups that are in none, without a group: decided by
/// the groups below the root, else by the version.
///
/// # Errors
/// [`PartitionError::Cannot`] where it does not, with the remedy.
pub fn partition_support(root: &Root) -> Result<(), PartitionError> {
    let cpusets = Cpusets::find(root)?;
    let below: Vec<PathBuf> = child_dirs(root, &cpusets.mount)?
        .iter()
        .filter_map(|dir| Some(Path::new("/").join(dir.file_name()?)))
        .collect();
    cpusets.check_kernel(below.iter().map(PathBuf::as_path))
}

/// Writes that make each of these groups a partition of its CPUs, in the order that the kernel
/// needs: the controller from the root down, exclusive CPUs from the outermost group down, then the
/// partitions. Nothing is written.
///
/// # Errors
/// [`PartitionError::Cannot`] where the kernel would refuse one, with the remedy.
pub fn partition_steps(
    root: &Root,
    wanted: &[(&Path, &BTreeSet<u32>)],
) -> Result<Vec<PartitionStep>, PartitionError> {
    if wanted.is_empty() {
        return Ok(Vec::new());
    }
    let cpusets = Cpusets::find(root)?;
    for (place, (group, cpus)) in wanted.iter().enumerate() {
        cpusets.check(group, cpus)?;
        wanted[..place].iter().try_for_each(|other| apart(*other, (*group, *cpus)))?;
    }
    let exclusive = exclusive(wanted);
    let (mut steps, enabled) = cpusets.controllers(exclusive.keys().copied())?;
    let created_by = |group: &Path| group.parent().and_then(|above| enabled.get(above).copied());
    for (node, cpus) in &exclusive {
        let file = cpusets.file(node, EXCLUSIVE);
        let now = cpus_in(root, &file)?.unwrap_or_default();
        let is_partition = wanted.iter().any(|(group, _)| group == node);
        let value = if is_partition { cpus.clone() } else { now.union(cpus).copied().collect() };
        if value != now {
            steps.push(exclusive_step(node, file, &value, created_by(node)));
        }
    }
    for (group, _) in wanted {
        steps.push(PartitionStep {
            group: group.to_path_buf(),
            what: PartitionFile::Kind,
            file: cpusets.file(group, KIND),
            value: "root".to_owned(),
            created_by: created_by(group),
        });
    }
    Ok(steps)
}

/// Writes that give the groups above these, each with the CPUs of its partition, what all of them
/// need together: the controller from the root down, then exclusive CPUs, more of them from the
/// outermost group down, fewer from the innermost up. `before` has the exclusive CPUs of files from
/// before the first of such writes; a group in it that none of these needs gets them back. Nothing
/// is written.
///
/// # Errors
/// [`PartitionError::Cannot`] where two of the groups cannot both be partitions, or cgroup v2 has
/// no cpuset; when a file cannot be read.
pub fn ancestor_steps(
    root: &Root,
    wanted: &[(&Path, &BTreeSet<u32>)],
    before: &BTreeMap<PathBuf, BTreeSet<u32>>,
) -> Result<Vec<PartitionStep>, PartitionError> {
    let cpusets = Cpusets::find(root)?;
    // A group that has ended needs nothing.
    let mut there = Vec::new();
    for one in wanted {
        if root.exists(cpusets.file(one.0, PROCESSES))? {
            there.push(*one);
        }
    }
    let wanted = there.as_slice();
    for (place, one) in wanted.iter().enumerate() {
        wanted[..place].iter().try_for_each(|other| apart(*other, *one))?;
    }
    let known: Vec<PathBuf> = before.keys().filter_map(|file| cpusets.group_of(file)).collect();
    let mut needed = exclusive(wanted);
    let (mut steps, enabled) = cpusets.controllers(needed.keys().copied())?;
    needed.retain(|node, _| !wanted.iter().any(|(group, _)| group == node));
    for node in &known {
        needed.entry(node.as_path()).or_default();
    }
    let mut fewer = Vec::new();
    for (node, cpus) in &needed {
        let file = cpusets.file(node, EXCLUSIVE);
        let now = cpus_in(root, &file)?;
        // The group has ended.
        if now.is_none() && cpus.is_empty() {
            continue;
        }
        let now = now.unwrap_or_default();
        let own = before.get(&file).unwrap_or(&now);
        let value: BTreeSet<u32> = own.union(cpus).copied().collect();
        if value != now {
            let created_by = node.parent().and_then(|above| enabled.get(above).copied());
            let step = exclusive_step(node, file, &value, created_by);
            if value.is_subset(&now) { fewer.push(step) } else { steps.push(step) }
        }
    }
    steps.extend(fewer.into_iter().rev());
    Ok(steps)
}

/// CPUs that each group on the way to these partitions needs, the partitions included. A path sorts
/// before those below it.
fn exclusive<'g>(wanted: &[(&'g Path, &BTreeSet<u32>)]) -> BTreeMap<&'g Path, BTreeSet<u32>> {
    let mut exclusive: BTreeMap<&Path, BTreeSet<u32>> = BTreeMap::new();
    for &(group, cpus) in wanted {
        for node in below_root(group) {
            exclusive.entry(node).or_default().extend(cpus.iter().copied());
        }
    }
    exclusive
}

fn exclusive_step(
    group: &Path,
    file: PathBuf,
    cpus: &BTreeSet<u32>,
    created_by: Option<usize>,
) -> PartitionStep {
    let (group, value) = (group.to_owned(), cpu_ranges(cpus));
    PartitionStep { group, what: PartitionFile::Exclusive, file, value, created_by }
}

/// Reason why a group is no valid partition now, as its file shows it; `None` for one that is.
pub fn partition_fault(root: &Root, group: &Path) -> Result<Option<String>, HostError> {
    let Some(mount) = mount(root)? else { return Ok(Some("cgroup v2 is not mounted".to_owned())) };
    Ok(match root.read_optional(file(&mount, group, KIND))? {
        Some(kind) if kind == "root" => None,
        Some(kind) => Some(format!("{KIND} shows `{kind}`")),
        None => Some(format!("{} has no {KIND} any more", group.display())),
    })
}

/// Groups that were to be partitions and are none now, each with what its file shows.
pub(crate) fn invalid_partitions(root: &Root) -> Result<Vec<(PathBuf, String)>, HostError> {
    let Some(mount) = mount(root)? else { return Ok(Vec::new()) };
    let (mut dirs, mut found) = (vec![mount.clone()], Vec::new());
    while let Some(dir) = dirs.pop() {
        for group in unless_gone(child_dirs(root, &dir))?.unwrap_or_default() {
            // Without the controller in a group, none below it has it.
            let Some(kind) = root.read_optional(group.join(KIND))? else { continue };
            if text::has_word(&kind, "invalid") {
                found.push((Path::new("/").join(group.strip_prefix(&mount).unwrap_or(&group)), kind));
            }
            dirs.push(group);
        }
    }
    Ok(found)
}

/// Mount point of cgroup v2's root.
fn mount(root: &Root) -> Result<Option<PathBuf>, HostError> {
    let whole = mounts(root)?.into_iter().find(|m| m.fs == "cgroup2" && m.root == Path::new("/"));
    Ok(whole.map(|mount| mount.point))
}

fn file(mount: &Path, group: &Path, name: &str) -> PathBuf {
    mount.join(group.strip_prefix("/").unwrap_or(group)).join(name)
}

/// The group and those above it, without the root.
fn below_root(group: &Path) -> impl Iterator<Item = &Path> {
    group.ancestors().filter(|node| !Cgroups::is_root(node))
}

/// Refuses two partitions that share a CPU, or of which one is in the other.
fn apart(one: (&Path, &BTreeSet<u32>), other: (&Path, &BTreeSet<u32>)) -> Result<(), PartitionError> {
    let shared: BTreeSet<u32> = one.1.intersection(other.1).copied().collect();
    if !shared.is_empty() {
        let why = format!("CPU {} would be in two partitions", cpu_ranges(&shared));
        return cannot(why, "list other CPUs for one of them");
    }
    if one.0.starts_with(other.0) || other.0.starts_with(one.0) {
        let why = format!("two VMs are in {}, or in a group below it", other.0.display());
        return cannot(why, "start each VM in a cgroup of its own, e.g. with `systemd-run --scope`");
    }
    Ok(())
}

/// The hierarchy with the cpuset controller of v2.
struct Cpusets<'r> {
    root: &'r Root,
    mount: PathBuf,
}

impl<'r> Cpusets<'r> {
    fn find(root: &'r Root) -> Result<Self, PartitionError> {
        let Some(mount) = mount(root)? else {
            let why = "a partition is one of cgroup v2, whose root is not mounted here".to_owned();
            return cannot(why, "mount it: mount -t cgroup2 none /sys/fs/cgroup");
        };
        let controllers = root.read(mount.join("cgroup.controllers"))?;
        if !text::has_word(&controllers, "cpuset") {
            let why = format!("cgroup v2 at {} has no cpuset controller", mount.display());
            return cannot(why, "boot with `cgroup_no_v1=cpuset`, on a kernel with CONFIG_CPUSETS");
        }
        Ok(Self { root, mount })
    }

    fn file(&self, group: &Path, name: &str) -> PathBuf {
        file(&self.mount, group, name)
    }

    /// Group of a file of this hierarchy.
    fn group_of(&self, file: &Path) -> Option<PathBuf> {
        Some(Path::new("/").join(file.parent()?.strip_prefix(&self.mount).ok()?))
    }

    /// Writes that give these groups the controller, and the place of that of each group above them
    /// which lacks it.
    fn controllers<'g>(
        &self,
        nodes: impl Iterator<Item = &'g Path>,
    ) -> Result<(Vec<PartitionStep>, BTreeMap<&'g Path, usize>), HostError> {
        let parents: BTreeSet<&Path> = nodes.filter_map(Path::parent).collect();
        let (mut steps, mut enabled) = (Vec::new(), BTreeMap::new());
        for above in parents {
            let file = self.file(above, CONTROLLERS);
            if !text::has_word(&self.root.read(&file)?, "cpuset") {
                enabled.insert(above, steps.len());
                let (group, value) = (above.to_owned(), "+cpuset".to_owned());
                let what = PartitionFile::Controllers;
                steps.push(PartitionStep { group, what, file, value, created_by: None });
            }
        }
        Ok((steps, enabled))
    }

    fn check(&self, group: &Path, cpus: &BTreeSet<u32>) -> Result<(), PartitionError> {
        if Cgroups::is_root(group) {
            let why = "it runs in the root cgroup, which cannot be given CPUs".to_owned();
            return cannot(why, "start the VM in a cgroup of its own, e.g. with `systemd-run --scope`");
        }
        self.check_kernel(below_root(group))?;
        let kind = self.root.read_optional(self.file(group, KIND))?;
        if let Some(kind) = kind.filter(|kind| kind != "member") {
            let why = format!("{} is a partition already: {KIND} shows `{kind}`", group.display());
            return cannot(
                why,
                "where rtvirtio has made it, `rtvirtio revert` first; else leave `cores` out, or write `member` there",
            );
        }
        self.check_cpus(group, cpus)?;
        self.check_siblings(group, cpus)
    }

    /// Whether the kernel makes partitions in groups that are in none: decided by a group that has
    /// the controller, else by the version.
    fn check_kernel<'g>(&self, groups: impl Iterator<Item = &'g Path>) -> Result<(), PartitionError> {
        for node in groups {
            if self.root.exists(self.file(node, EXCLUSIVE))? {
                return Ok(());
            }
            if self.root.exists(self.file(node, KIND))? {
                return self.too_old();
            }
        }
        if version(self.root)? >= FIRST { Ok(()) } else { self.too_old() }
    }

    fn too_old(&self) -> Result<(), PartitionError> {
        let (major, minor) = version(self.root)?;
        cannot(
            format!("`{EXCLUSIVE}` of cgroup v2 comes with Linux 6.7, and this is {major}.{minor}"),
            "make the partition by hand in the topmost group above the VM (the CPUs to cpuset.cpus, then `root` to \
             cpuset.cpus.partition), and leave `cores` out",
        )
    }

    fn check_cpus(&self, group: &Path, cpus: &BTreeSet<u32>) -> Result<(), PartitionError> {
        let online = cpus_in(self.root, Path::new(ONLINE))?.unwrap_or_default();
        let offline: BTreeSet<u32> = cpus.difference(&online).copied().collect();
        if !offline.is_empty() {
            let why = format!("CPU {} is not online", cpu_ranges(&offline));
            return cannot(why, &format!("list CPUs of {}", cpu_ranges(&online)));
        }
        let apart: BTreeSet<u32> = cpus.intersection(&isolated(self.root)?).copied().collect();
        if !apart.is_empty() {
            let why = format!("CPU {} is isolated already", cpu_ranges(&apart));
            return cannot(why, "all isolated CPUs are one root domain together: list others");
        }
        let around = self.around(group)?;
        let free = cpus_in(self.root, &self.file(around, EFFECTIVE))?.unwrap_or(online);
        let taken: BTreeSet<u32> = cpus.difference(&free).copied().collect();
        if !taken.is_empty() {
            let why = format!(
                "CPU {} is in another partition: {} has {}",
                cpu_ranges(&taken),
                around.display(),
                cpu_ranges(&free)
            );
            return cannot(why, "list other CPUs, or put that partition back first");
        }
        if Cgroups::is_root(around) && free.is_subset(cpus) {
            let why =
                format!("no CPU would be left for all other programs, which have {}", cpu_ranges(&free));
            return cannot(why, "leave at least one CPU out");
        }
        Ok(())
    }

    /// The nearest valid partition around a group; the root, which has no file for that, is one.
    fn around<'g>(&self, group: &'g Path) -> Result<&'g Path, HostError> {
        for above in below_root(group).skip(1) {
            let kind = self.root.read_optional(self.file(above, KIND))?;
            if matches!(kind.as_deref(), Some("root" | "isolated")) {
                return Ok(above);
            }
        }
        Ok(group.ancestors().last().unwrap_or(group))
    }

    /// Refuses CPUs that a sibling of the group, or of one above it, has as exclusive ones.
    fn check_siblings(&self, group: &Path, cpus: &BTreeSet<u32>) -> Result<(), PartitionError> {
        for node in below_root(group) {
            let own = self.mount.join(node.strip_prefix("/").unwrap_or(node));
            let Some(above) = own.parent() else { continue };
            for sibling in child_dirs(self.root, above)?.into_iter().filter(|dir| *dir != own) {
                let of = cpus_in(self.root, &sibling.join(EXCLUSIVE))?.unwrap_or_default();
                let shared: BTreeSet<u32> = of.intersection(cpus).copied().collect();
                if !shared.is_empty() {
                    let why = format!("CPU {} is exclusive to {}", cpu_ranges(&shared), sibling.display());
                    return cannot(why, "list other CPUs, or put that partition back first");
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
