//! The CPUs that are online, with cores, last-level caches, NUMA nodes and capacities
//! (`Documentation/ABI/stable/sysfs-devices-system-cpu`,
//! `Documentation/admin-guide/cputopology.rst`).

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use rtvirtio_cores::Cpu;

use crate::{HostError, Root, text};

const CPUS: &str = "/sys/devices/system/cpu";
const NODES: &str = "/sys/devices/system/node";
/// CPUs of Intel's small cores, where the host has two kinds.
const SMALL: &str = "/sys/devices/cpu_atom/cpus";
/// Capacity of the fastest CPUs.
const FULL: u32 = 1024;
/// Capacities are rounded to this: cores of one kind that differ by their highest clock alone are
/// alike.
const STEP: u32 = 128;

/// The CPUs that are online, by number.
///
/// A host without NUMA has one node, 0. CPUs of which the kernel describes no cache, as on some
/// boards, count as having one cache for each node. Without `cpu_capacity` all CPUs are alike,
/// except that Intel's small cores count as half: which are slower is known then, not by how much.
pub fn topology(root: &Root) -> Result<Vec<Cpu>, HostError> {
    let online = list(root, format!("{CPUS}/online"))?;
    let (isolated, tickless) = (isolated(root)?, tickless(root)?);
    let small = cpus_in(root, Path::new(SMALL))?.unwrap_or_default();
    let nodes = nodes(root)?;
    let mut cpus = Vec::new();
    for &id in &online {
        let dir = PathBuf::from(format!("{CPUS}/cpu{id}"));
        let no_node = || {
            let expected = "a list of nodes with all CPUs that are online";
            HostError::form(NODES, &format!("CPU {id} in no node's cpulist"), expected)
        };
        let node = match &nodes {
            None => 0,
            Some(nodes) => *nodes.get(&id).ok_or_else(no_node)?,
        };
        let lowest_of_node = || {
            let same = |cpu: &&u32| nodes.as_ref().is_none_or(|nodes| nodes.get(cpu) == Some(&node));
            online.iter().find(same).copied().unwrap_or(id)
        };
        let lowest = |group: &BTreeSet<u32>| group.intersection(&online).next().copied().unwrap_or(id);
        cpus.push(Cpu {
            id,
            core: lowest(&siblings(root, &dir)?),
            llc: last_cache(root, &dir)?.map_or_else(lowest_of_node, |group| lowest(&group)),
            node,
            capacity: capacity(root, &dir, small.contains(&id))?,
            isolated: isolated.contains(&id),
            tickless: tickless.contains(&id),
        });
    }
    Ok(cpus)
}

/// CPUs that the scheduler leaves alone, by `isolcpus=` or by isolated partitions where the kernel
/// lists these there.
pub(crate) fn isolated(root: &Root) -> Result<BTreeSet<u32>, HostError> {
    Ok(cpus_in(root, Path::new(&format!("{CPUS}/isolated")))?.unwrap_or_default())
}

/// CPUs that run without a tick (`nohz_full=`).
pub(crate) fn tickless(root: &Root) -> Result<BTreeSet<u32>, HostError> {
    let text = root.read_optional(format!("{CPUS}/nohz_full"))?;
    // A text that is no list, such as `(null)`, is the kernel's word for none.
    Ok(text.and_then(|text| text::cpu_list(&text)).unwrap_or_default())
}

/// CPUs that a file lists; `None` without the file.
pub(crate) fn cpus_in(root: &Root, path: &Path) -> Result<Option<BTreeSet<u32>>, HostError> {
    let Some(text) = root.read_optional(path)? else { return Ok(None) };
    text::cpu_list(&text).ok_or_else(|| HostError::form(path, &text, "a list of CPUs")).map(Some)
}

fn list(root: &Root, path: impl Into<PathBuf>) -> Result<BTreeSet<u32>, HostError> {
    let path = path.into();
    let text = root.read(&path)?;
    text::cpu_list(&text).ok_or(HostError::Form { path, text, expected: "a list of CPUs" })
}

/// Node of each CPU; `None` on a kernel without NUMA.
fn nodes(root: &Root) -> Result<Option<BTreeMap<u32, u32>>, HostError> {
    if !root.exists(NODES)? {
        return Ok(None);
    }
    let mut node_of = BTreeMap::new();
    for name in root.list(NODES)? {
        let Some(node) = name.strip_prefix("node").and_then(|number| number.parse().ok()) else { continue };
        let cpus = list(root, format!("{NODES}/{name}/cpulist"))?;
        node_of.extend(cpus.into_iter().map(|cpu| (cpu, node)));
    }
    Ok(Some(node_of))
}

/// CPUs of a CPU's core; the file has its second name since Linux 5.2.
fn siblings(root: &Root, dir: &Path) -> Result<BTreeSet<u32>, HostError> {
    match cpus_in(root, &dir.join("topology/core_cpus_list"))? {
        Some(cpus) => Ok(cpus),
        None => list(root, dir.join("topology/thread_siblings_list")),
    }
}

/// CPUs that share a CPU's cache of the highest level.
fn last_cache(root: &Root, dir: &Path) -> Result<Option<BTreeSet<u32>>, HostError> {
    let dir = dir.join("cache");
    let names = if root.exists(&dir)? { root.list(&dir)? } else { Vec::new() };
    let mut last: Option<(u32, PathBuf)> = None;
    for name in names.iter().filter(|name| name.starts_with("index")) {
        let cache = dir.join(name);
        if let Some(level) = root.optional_number::<u32>(cache.join("level"))? {
            last = last.filter(|(highest, _)| *highest >= level).or(Some((level, cache)));
        }
    }
    last.map(|(_, cache)| list(root, cache.join("shared_cpu_list"))).transpose()
}

fn capacity(root: &Root, dir: &Path, small: bool) -> Result<u32, HostError> {
    let told = root.optional_number::<u32>(dir.join("cpu_capacity"))?;
    let capacity = told.unwrap_or(if small { FULL / 2 } else { FULL });
    Ok((capacity.min(FULL) + STEP / 2) / STEP * STEP)
}

#[cfg(test)]
mod tests;
