//! Search of all placements of a VM, for small hosts.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use rtvirtio_cores::Cpu;

use super::hosts::{Asked, HostCase};
use super::rules::{Vm, broken_by_threads};

/// Order of placements, the best one first: fewest nodes, then fewest domains, then the fastest
/// vCPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Order {
    /// NUMA nodes that have a thread.
    pub nodes: usize,
    /// Domains (node, last-level cache, capacity) that have a thread.
    pub domains: usize,
    /// Sum of the capacities of the vCPUs' CPUs.
    pub speed: Reverse<u64>,
}

/// Place of a VM's placement in that order.
pub fn order(host: &HostCase, vm: &Vm) -> Order {
    let find = |id: &u32| host.cpus.iter().find(|cpu| cpu.id == *id);
    let all: Vec<&Cpu> = vm.vcpus.iter().chain(&vm.service).filter_map(find).collect();
    let nodes: BTreeSet<u32> = all.iter().map(|cpu| cpu.node).collect();
    let domain = |cpu: &&Cpu| (cpu.node, cpu.llc, cpu.capacity);
    let domains: BTreeSet<(u32, u32, u32)> = all.iter().map(domain).collect();
    let speed = vm.vcpus.iter().filter_map(find).map(|cpu| u64::from(cpu.capacity)).sum();
    Order { nodes: nodes.len(), domains: domains.len(), speed: Reverse(speed) }
}

/// The best placement next to these VMs; `None` where there is none.
pub fn best(host: &HostCase, others: &[Vm], asked: &Asked) -> Option<Order> {
    let mut all = others.to_vec();
    all.push(Vm { asked: asked.clone(), vcpus: Vec::new(), service: Vec::new() });
    let mut found = None;
    extend(host, &mut all, &mut found);
    found
}

/// Tries each CPU for the next thread of the last VM.
fn extend(host: &HostCase, all: &mut [Vm], best: &mut Option<Order>) {
    if !broken_by_threads(host, all).is_empty() {
        return;
    }
    let Some(now) = all.last() else { return };
    let is_vcpu = now.vcpus.len() < now.asked.request.vcpus as usize;
    if !is_vcpu && now.service.len() >= now.asked.request.service as usize {
        let this = order(host, now);
        *best = Some(best.map_or(this, |best| best.min(this)));
        return;
    }
    // Threads of a kind are alike: one order of them is enough.
    let least = if is_vcpu { now.vcpus.last() } else { now.service.last() }.copied();
    let next = |id: &u32| least.is_none_or(|least| *id > least || (!is_vcpu && *id == least));
    for id in host.ids().into_iter().filter(next) {
        let Some(now) = all.last_mut() else { return };
        if is_vcpu { &mut now.vcpus } else { &mut now.service }.push(id);
        extend(host, all, best);
        let Some(now) = all.last_mut() else { return };
        if is_vcpu { &mut now.vcpus } else { &mut now.service }.pop();
    }
}

#[cfg(test)]
mod tests {
    use rtvirtio_cores::{Request, Use};

    use super::super::hosts::regular;
    use super::*;

    #[test]
    fn the_best_of_all_is_found_and_none_where_there_is_none() {
        let none = BTreeSet::new();
        let cpus = regular([2, 1, 2, 2], true);
        let mut host =
            HostCase { cpus, granted: 950, kept: none.clone(), filled: none.clone(), touched: none };
        let request = Request { vcpus: 2, each: Use::Whole, service: 1, service_share: 100, node: None };
        let asked = Asked { request, allowed: None };
        // CPUs 0 and 1 are a core of node 0, CPU 2 is a slow one; 3 to 5 likewise.
        let order = |nodes, domains, speed| Order { nodes, domains, speed: Reverse(speed) };
        assert_eq!(best(&host, &[], &asked), Some(order(1, 2, 2048)));
        host.filled = [1].into();
        assert_eq!(best(&host, &[], &asked), Some(order(1, 2, 2048)), "on the other node");
        host.filled = [1, 4].into();
        // No whole vCPU is next to what others have: two slow CPUs are left, and CPU 0 or 3.
        assert_eq!(best(&host, &[], &asked), Some(order(2, 3, 1024)));
        host.filled = [1, 4, 5].into();
        assert_eq!(best(&host, &[], &asked), None);
        host.filled = [1, 5].into();
        let alone = Asked { request: Request { service: 0, ..request }, allowed: None };
        assert_eq!(best(&host, &[], &alone), Some(order(1, 1, 2048)));
        let listed = Asked { allowed: Some([2, 3].into()), ..alone };
        assert_eq!(best(&host, &[], &listed), Some(order(2, 2, 1536)));
    }

    #[test]
    fn fewer_nodes_come_before_fewer_domains_and_these_before_speed() {
        let order = |nodes, domains, speed| Order { nodes, domains, speed: Reverse(speed) };
        assert!(order(1, 3, 1) < order(2, 2, 9) && order(1, 1, 1) < order(1, 2, 9));
        assert!(order(1, 1, 9) < order(1, 1, 1));
    }
}
