//! Positions of VMs among I/O cgroups, and the weights and limits there that no plan sets.
//!
//! BFQ schedules a tree of cgroups: among the busy children of one parent each gets service in
//! proportion to its weight, at every level (`block/bfq-wf2q.c`, `block/bfq-cgroup.c`). So weights
//! compare siblings only, and a VM's share of the device is the product of its path's shares.

use std::borrow::Cow;
use std::collections::BTreeMap;

use rtvirtio_model::Config;
use rtvirtio_units::Iops;

/// Largest BFQ weight, `BFQ_MAX_WEIGHT` of Linux.
const TOP_WEIGHT: f64 = 1000.0;

/// A cgroup on a VM's path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CgroupNode {
    /// Path below the hierarchy's root.
    pub path: String,
    /// BFQ weight for the device, 1 to 1000.
    pub weight: u32,
}

/// Position of a VM among the I/O cgroups.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Placement {
    /// Whether the VM has a cgroup of its own, below the root: only there a weight or limit of one
    /// VM can act.
    pub own_cgroup: bool,
    /// Whether the VM's tasks write, and their writes reach the device outside of its cgroup, as
    /// write-back of the host's page cache does on cgroup v1: then no weight or limit acts either.
    pub writes_escape: bool,
    /// Cgroups on the VM's path, the outermost first, its own last; empty in the root. The weight
    /// of its own is the configuration's.
    pub path: Vec<CgroupNode>,
    /// Most requests per second that limits outside of the plan let through: those of cgroups above
    /// the VM's own, of its VMM.
    pub ceiling: Option<Iops>,
    /// The limit behind the ceiling, and how to raise it, for the user; empty without one.
    pub ceiling_by: String,
}

impl Placement {
    /// Whether weights and limits of the VM's cgroup act on all its I/O.
    fn is_held(&self) -> bool {
        self.own_cgroup && !self.writes_escape
    }

    /// Path of the cgroup above the VM's own; `None` in the root.
    fn parent(&self) -> Option<&str> {
        let above = self.path.len().checked_sub(2).and_then(|i| self.path.get(i));
        Some(above.map_or("/", |node| node.path.as_str())).filter(|_| !self.path.is_empty())
    }
}

/// Positions of all VMs of a spec, in its order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Placements {
    /// Empty where they are unknown: the VMs then count as siblings, each in a cgroup of its own,
    /// without limits above.
    all: Vec<Placement>,
    /// Whether all are siblings with cgroups of their own, so that their weights compare directly.
    flat: bool,
    /// Whether io.cost divides the device.
    io_cost: bool,
}

impl Placements {
    /// Placements of all VMs, in the spec's order.
    #[must_use]
    pub fn new(all: Vec<Placement>) -> Self {
        let flat = all.iter().all(|p| p.is_held() && p.parent() == all[0].parent());
        Self { all, flat, io_cost: false }
    }

    /// Placements on a device that io.cost divides or not: no model covers that.
    #[must_use]
    pub fn under_io_cost(self, is_on: bool) -> Self {
        Self { io_cost: is_on, ..self }
    }

    /// Whether io.cost divides the device, so that nothing can be predicted for it.
    #[must_use]
    pub fn is_under_io_cost(&self) -> bool {
        self.io_cost
    }

    /// All VMs in one cgroup: neither weights nor limits act.
    #[must_use]
    pub fn shared(vms: usize) -> Self {
        Self::new(vec![Placement::default(); vms])
    }

    /// Whether limits act on a VM alone.
    #[must_use]
    pub fn limits_act(&self, vm: usize) -> bool {
        self.all.get(vm).is_none_or(Placement::is_held)
    }

    /// Whether a VM's writes escape its cgroup.
    #[must_use]
    pub fn writes_escape(&self, vm: usize) -> bool {
        self.all.get(vm).is_some_and(|p| p.writes_escape)
    }

    /// Whether a VM's weight compares with that of another VM.
    #[must_use]
    pub fn weights_compare(&self, vm: usize) -> bool {
        let Some(this) = self.all.get(vm) else { return true };
        let sibling = |(i, p): (usize, &Placement)| i != vm && p.is_held() && p.parent() == this.parent();
        this.is_held() && self.all.iter().enumerate().any(sibling)
    }

    #[must_use]
    pub fn any_weights_compare(&self) -> bool {
        self.all.is_empty() || (0..self.all.len()).any(|vm| self.weights_compare(vm))
    }

    /// Most requests per second of a VM under limits outside of the plan.
    #[must_use]
    pub fn ceiling(&self, vm: usize) -> Option<Iops> {
        self.all.get(vm).and_then(|p| p.ceiling)
    }

    /// The limit behind [`Placements::ceiling`], and how to raise it; empty without one.
    #[must_use]
    pub fn ceiling_by(&self, vm: usize) -> &str {
        self.all.get(vm).map_or("", |p| p.ceiling_by.as_str())
    }

    /// The configuration's effect: each cap no higher than the ceiling, and weights that would give
    /// siblings the share that each VM has while all are busy.
    #[must_use]
    pub fn in_effect<'c>(&self, config: &'c Config) -> Cow<'c, Config> {
        let limited = self.all.iter().any(|p| p.ceiling.is_some());
        if self.all.is_empty() || (self.flat && !limited) {
            return Cow::Borrowed(config);
        }
        let mut config = config.clone();
        for (vm, placement) in config.vms.iter_mut().zip(&self.all) {
            let least = |a: Iops, b: Iops| if a.0 < b.0 { a } else { b };
            vm.cap = match (vm.cap, placement.ceiling) {
                (Some(cap), Some(ceiling)) => Some(least(cap, ceiling)),
                (cap, ceiling) => cap.or(ceiling),
            };
        }
        if !self.flat {
            let shares = self.shares(&config);
            let most = shares.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
            for (vm, share) in config.vms.iter_mut().zip(shares) {
                vm.weight = (TOP_WEIGHT * share / most).round().clamp(1.0, TOP_WEIGHT) as u32;
            }
        }
        Cow::Owned(config)
    }

    /// Share of the device of each VM while all are busy, and no other cgroup is.
    fn shares(&self, config: &Config) -> Vec<f64> {
        // Paths with the configuration's weight at their ends. A VM in the root competes with the
        // outermost cgroups by a queue of its own.
        let own: Vec<Vec<CgroupNode>> = self
            .all
            .iter()
            .zip(&config.vms)
            .enumerate()
            .map(|(i, (placement, vm))| {
                let mut path = placement.path.clone();
                match path.last_mut() {
                    Some(last) => last.weight = vm.weight,
                    None => path.push(CgroupNode { path: format!("vm {i}"), weight: vm.weight }),
                }
                path
            })
            .collect();
        let mut siblings: BTreeMap<&str, BTreeMap<&str, f64>> = BTreeMap::new();
        let mut members: BTreeMap<&str, f64> = BTreeMap::new();
        for path in &own {
            let mut parent = "/";
            for node in path {
                siblings.entry(parent).or_default().insert(&node.path, f64::from(node.weight));
                parent = &node.path;
            }
            *members.entry(parent).or_default() += 1.0;
        }
        let share = |path: &Vec<CgroupNode>| {
            let mut parent = "/";
            let mut share = 1.0;
            for node in path {
                let all = &siblings[parent];
                share *= all[node.path.as_str()] / all.values().sum::<f64>().max(f64::MIN_POSITIVE);
                parent = &node.path;
            }
            // VMs in one cgroup have queues of one weight.
            share / members[parent]
        };
        own.iter().map(share).collect()
    }
}

#[cfg(test)]
mod tests;
