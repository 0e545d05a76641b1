//! Rules of the guide and of the spec for `cores`, as a judge that shares nothing with the placer.

use std::collections::{BTreeMap, BTreeSet};

use rtvirtio_cores::{Cpu, Use};
use serde::{Deserialize, Serialize};

use super::hosts::{Asked, HostCase};

/// A VM with the CPUs of its threads.
#[derive(Clone, Debug)]
pub struct Vm {
    /// Request that it answers.
    pub asked: Asked,
    /// CPU of each vCPU.
    pub vcpus: Vec<u32>,
    /// CPU of each other thread.
    pub service: Vec<u32>,
}

/// A rule that a placement can break.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// Each thread has a CPU, and no more threads have one than were asked for.
    Count,
    /// CPUs are online.
    Online,
    /// CPUs are among those that the VM may have.
    Allowed,
    /// CPUs are on the node that was asked for.
    Node,
    /// Cores of the host have no VM.
    Kept,
    /// CPUs that another program has as a whole have no VM.
    Taken,
    /// The vCPUs of a VM have a CPU each.
    Apart,
    /// An isolated CPU has whole vCPUs only.
    Isolated,
    /// A whole vCPU is alone on its CPU.
    Alone,
    /// The SMT siblings of a whole vCPU have threads of the same VM only.
    Siblings,
    /// The shares on a CPU are at most what the kernel grants.
    Room,
    /// A VM that gets a further vCPU keeps the CPUs that it has.
    Moved,
    /// Nodes and domains are said as they are.
    Said,
    /// VMs that end give back what they had.
    Returned,
}

/// A thread on a CPU.
struct Thread {
    vm: usize,
    share: u32,
    is_whole: bool,
}

/// Rules that VMs break together on a host, one for each time.
pub fn broken(host: &HostCase, vms: &[Vm]) -> Vec<Rule> {
    let mut found = broken_by_threads(host, vms);
    for vm in vms {
        let asked = &vm.asked.request;
        if vm.vcpus.len() != asked.vcpus as usize || vm.service.len() != asked.service as usize {
            found.push(Rule::Count);
        }
    }
    found
}

/// Rules that VMs break of which not all threads have a CPU yet: no further thread mends any.
pub fn broken_by_threads(host: &HostCase, vms: &[Vm]) -> Vec<Rule> {
    let cpus: BTreeMap<u32, &Cpu> = host.cpus.iter().map(|cpu| (cpu.id, cpu)).collect();
    let kept: BTreeSet<u32> = host.kept.iter().filter_map(|id| cpus.get(id)).map(|cpu| cpu.core).collect();
    let mut on: BTreeMap<u32, Vec<Thread>> = BTreeMap::new();
    let mut found = Vec::new();
    for (at, vm) in vms.iter().enumerate() {
        let request = &vm.asked.request;
        let is_whole = request.each == Use::Whole;
        let each = if let Use::Part(share) = request.each { share } else { 1000 };
        let vcpus = vm.vcpus.iter().map(|id| (id, each, is_whole));
        let service = vm.service.iter().map(|id| (id, request.service_share, false));
        for (id, share, is_whole) in vcpus.chain(service) {
            let Some(cpu) = cpus.get(id) else {
                found.push(Rule::Online);
                continue;
            };
            let is_allowed = vm.asked.allowed.as_ref().is_none_or(|all| all.contains(id));
            let rules = [
                (Rule::Allowed, is_allowed),
                (Rule::Node, request.node.is_none_or(|node| node == cpu.node)),
                (Rule::Kept, !kept.contains(&cpu.core)),
                (Rule::Taken, !host.filled.contains(id)),
                (Rule::Isolated, is_whole || !cpu.isolated),
            ];
            found.extend(rules.into_iter().filter(|(_, is_kept)| !is_kept).map(|(rule, _)| rule));
            on.entry(*id).or_default().push(Thread { vm: at, share, is_whole });
        }
        let distinct: BTreeSet<&u32> = vm.vcpus.iter().collect();
        if distinct.len() != vm.vcpus.len() {
            found.push(Rule::Apart);
        }
    }
    found.extend(on.iter().filter_map(|(id, threads)| of_cpu(host, *id, threads)));
    found.extend(of_siblings(host, &cpus, &on));
    found
}

/// Rule that the threads of a CPU break.
fn of_cpu(host: &HostCase, id: u32, threads: &[Thread]) -> Option<Rule> {
    let is_touched = host.touched.contains(&id);
    if threads.iter().any(|thread| thread.is_whole) {
        return (threads.len() > 1 || is_touched).then_some(Rule::Alone);
    }
    // Threads of unknown use count as little as there is.
    let sum: u32 = threads.iter().map(|thread| thread.share).sum();
    (sum + u32::from(is_touched) > host.granted).then_some(Rule::Room)
}

/// Rules that threads next to whole vCPUs break.
fn of_siblings(host: &HostCase, cpus: &BTreeMap<u32, &Cpu>, on: &BTreeMap<u32, Vec<Thread>>) -> Vec<Rule> {
    let mut found = Vec::new();
    for (id, threads) in on {
        let Some(whole) = threads.iter().find(|thread| thread.is_whole) else { continue };
        let core = cpus.get(id).map(|cpu| cpu.core);
        for sibling in host.cpus.iter().filter(|cpu| Some(cpu.core) == core && cpu.id != *id) {
            let of_others = on.get(&sibling.id).is_some_and(|all| all.iter().any(|one| one.vm != whole.vm));
            let of_programs = host.touched.contains(&sibling.id) || host.filled.contains(&sibling.id);
            if of_others || of_programs {
                found.push(Rule::Siblings);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use rtvirtio_cores::Request;

    use super::super::hosts::regular;
    use super::*;

    fn case() -> HostCase {
        // CPUs 0 to 7, two for each core; 0 to 3 are on node 0.
        let mut cpus = regular([2, 1, 2, 2], false);
        cpus[7].isolated = true;
        let none = BTreeSet::new();
        HostCase { cpus, granted: 950, kept: none.clone(), filled: none.clone(), touched: none }
    }

    fn vm(each: Use, vcpus: &[u32], service: &[u32]) -> Vm {
        let request = Request {
            vcpus: vcpus.len() as u32,
            each,
            service: service.len() as u32,
            service_share: 100,
            node: None,
        };
        let asked = Asked { request, allowed: None };
        Vm { asked, vcpus: vcpus.to_vec(), service: service.to_vec() }
    }

    #[test]
    fn what_keeps_all_rules_breaks_none() {
        let all = [
            vm(Use::Whole, &[0, 7], &[1]),
            vm(Use::Part(400), &[2, 3], &[2, 2]),
            vm(Use::Part(350), &[2], &[]),
        ];
        assert!(broken(&case(), &all).is_empty());
    }

    #[test]
    fn each_rule_is_seen_where_it_is_broken() {
        let (host, part) = (case(), Use::Part(500));
        let one = |vm: Vm| broken(&host, &[vm]);
        let mut few = vm(part, &[0], &[]);
        few.asked.request.vcpus = 2;
        assert_eq!(one(few), [Rule::Count]);
        let mut more = vm(part, &[0], &[1]);
        more.asked.request.service = 0;
        assert_eq!(one(more), [Rule::Count]);
        assert_eq!(one(vm(part, &[8], &[])), [Rule::Online]);
        let mut listed = vm(part, &[0, 1], &[]);
        listed.asked.allowed = Some([1, 2].into());
        assert_eq!(one(listed), [Rule::Allowed]);
        let mut other = vm(part, &[0], &[4]);
        other.asked.request.node = Some(0);
        assert_eq!(one(other), [Rule::Node]);
        assert_eq!(one(vm(Use::Part(400), &[0, 0], &[])), [Rule::Apart]);
        assert_eq!(one(vm(part, &[7], &[])), [Rule::Isolated]);
        assert_eq!(one(vm(Use::Whole, &[6], &[7])), [Rule::Isolated]);
        assert_eq!(one(vm(Use::Whole, &[0], &[0])), [Rule::Alone]);
        assert_eq!(one(vm(Use::Part(900), &[0], &[0])), [Rule::Room]);
        let together = |a: Vm, b: Vm| broken(&host, &[a, b]);
        assert_eq!(together(vm(Use::Whole, &[0], &[]), vm(part, &[1], &[])), [Rule::Siblings]);
        assert_eq!(together(vm(Use::Whole, &[0], &[]), vm(Use::Whole, &[0], &[])), [Rule::Alone]);
        assert_eq!(together(vm(part, &[0], &[]), vm(part, &[0], &[])), [Rule::Room]);
    }

    #[test]
    fn what_others_have_is_a_rule_too() {
        let mut host = case();
        (host.kept, host.filled, host.touched) = ([0].into(), [2].into(), [4].into());
        let one = |vm: Vm| broken(&host, &[vm]);
        assert_eq!(one(vm(Use::Part(100), &[1], &[])), [Rule::Kept], "the core of a CPU that is kept");
        assert_eq!(one(vm(Use::Part(100), &[2], &[])), [Rule::Taken]);
        assert_eq!(one(vm(Use::Whole, &[3], &[])), [Rule::Siblings]);
        assert_eq!(one(vm(Use::Whole, &[4], &[])), [Rule::Alone]);
        assert_eq!(one(vm(Use::Whole, &[5], &[])), [Rule::Siblings]);
        assert!(one(vm(Use::Part(949), &[4], &[])).is_empty());
        assert_eq!(one(vm(Use::Part(950), &[4], &[])), [Rule::Room]);
    }
}
