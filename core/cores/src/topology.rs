//! CPUs of a host that are online, with the groups that they form.

use std::collections::BTreeSet;

/// Most CPUs of a host: `CONFIG_NR_CPUS` is at most 8192.
pub const MAX_CPUS: usize = 8192;

/// A CPU that is online.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cpu {
    pub id: u32,
    /// Core, by its lowest CPU: SMT siblings have the same.
    pub core: u32,
    /// Last-level cache, by its lowest CPU.
    pub llc: u32,
    /// NUMA node.
    pub node: u32,
    /// Computing capacity relative to the host's fastest CPUs, which have 1024 (`cpu_capacity`).
    pub capacity: u32,
    /// Whether the scheduler leaves it alone (`isolcpus=`, isolated partitions).
    pub isolated: bool,
    /// Whether it runs without a tick (`nohz_full=`).
    pub tickless: bool,
}

impl Cpu {
    /// CPUs of one node with one last-level cache and one capacity are alike to a VM.
    #[must_use]
    pub fn domain(&self) -> (u32, u32, u32) {
        (self.node, self.llc, self.capacity)
    }
}

/// CPUs that are no topology.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadTopology {
    /// No CPU, or more than [`MAX_CPUS`].
    #[error("{0} CPUs are online; 1 to {MAX_CPUS} can be placed on")]
    Count(usize),
    /// A CPU twice.
    #[error("CPU {0} is listed twice")]
    Twice(u32),
    /// SMT siblings on different nodes or caches.
    #[error("CPU {0} shares a core with a CPU of another node or last-level cache")]
    SplitCore(u32),
}

/// Checks that no CPU is there twice and that cores are within one node and cache.
pub(crate) fn checked(mut cpus: Vec<Cpu>) -> Result<Vec<Cpu>, BadTopology> {
    if cpus.is_empty() || cpus.len() > MAX_CPUS {
        return Err(BadTopology::Count(cpus.len()));
    }
    let mut seen = BTreeSet::new();
    cpus.sort_by_key(|cpu| (cpu.core, cpu.id));
    for (i, cpu) in cpus.iter().enumerate() {
        if !seen.insert(cpu.id) {
            return Err(BadTopology::Twice(cpu.id));
        }
        let before = i.checked_sub(1).map(|i| &cpus[i]);
        if before.is_some_and(|b| b.core == cpu.core && (b.node, b.llc) != (cpu.node, cpu.llc)) {
            return Err(BadTopology::SplitCore(cpu.id));
        }
    }
    Ok(cpus)
}
