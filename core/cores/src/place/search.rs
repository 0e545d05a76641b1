//! The choice of nodes, domains and CPUs for one VM.
//!
//! Within given CPUs the question whether a VM fits has an exact answer by a greedy choice: threads
//! of one kind are alike, so a CPU counts only by how many service threads it holds with and
//! without a vCPU, and the vCPUs go where the fewest of these places are lost.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::{Host, Request, Use};

/// Most sets of nodes or domains that are tried for one VM.
const TRIES: usize = 4096;

/// Positions of CPUs in the host's list.
#[derive(Clone, Debug)]
pub(super) struct Choice {
    pub(super) vcpus: Vec<usize>,
    pub(super) service: Vec<usize>,
    pub(super) beyond: usize,
}

/// Threads of the request that a CPU can hold.
#[derive(Clone, Copy)]
struct Places {
    at: usize,
    /// Service threads that fit without a vCPU on the same CPU.
    service: u32,
    /// Service threads that fit next to a vCPU; `None` where no vCPU may be.
    beside: Option<u32>,
    /// Thousandths that are free.
    room: u32,
    isolated: bool,
}

pub(super) struct Search<'a> {
    host: &'a Host,
    request: &'a Request,
    /// By node, then by domain.
    nodes: Vec<Vec<Vec<Places>>>,
}

impl<'a> Search<'a> {
    pub(super) fn new(host: &'a Host, request: &'a Request) -> Self {
        let mut used: BTreeMap<u32, bool> = BTreeMap::new();
        for (cpu, taken) in host.cpus.iter().zip(&host.taken) {
            *used.entry(cpu.core).or_default() |= *taken > 0;
        }
        let mut nodes: BTreeMap<u32, BTreeMap<_, Vec<Places>>> = BTreeMap::new();
        for (at, cpu) in host.cpus.iter().enumerate() {
            let closed = host.closed.contains(&cpu.core) || host.withheld.contains(&at);
            if closed || request.node.is_some_and(|node| node != cpu.node) {
                continue;
            }
            let room = host.granted.saturating_sub(host.taken[at]);
            // Without service threads their share may be 0.
            let service_in = |room: u32| if cpu.isolated { 0 } else { room / request.service_share.max(1) };
            let beside = match request.each {
                Use::Whole => (!used[&cpu.core]).then_some(0),
                Use::Part(share) => room.checked_sub(share).filter(|_| !cpu.isolated).map(service_in),
            };
            let places = Places { at, service: service_in(room), beside, room, isolated: cpu.isolated };
            nodes.entry(cpu.node).or_default().entry(cpu.domain()).or_default().push(places);
        }
        let nodes = nodes.into_values().map(|domains| domains.into_values().collect()).collect();
        Self { host, request, nodes }
    }

    /// Whether the VM fits at all.
    pub(super) fn fits(&self) -> bool {
        self.choose(self.nodes.iter().flatten().flatten()).is_some()
    }

    /// The choice with the fewest nodes, then the fewest domains, then the fastest CPUs, then the
    /// least room left in its domains.
    pub(super) fn best(&self) -> Option<Choice> {
        let nodes: Vec<Vec<Places>> = self.nodes.iter().map(|domains| domains.concat()).collect();
        let mut tries = TRIES;
        let (sets, least) = self.smallest(&nodes, &mut tries);
        let mut best: Option<(_, Choice)> = None;
        for set in sets {
            let domains: Vec<Vec<Places>> =
                set.iter().flat_map(|node| self.nodes[*node].iter().cloned()).collect();
            let mut tries = TRIES;
            let (inner, fewest) = self.smallest(&domains, &mut tries);
            for chosen in inner {
                let cpus = || chosen.iter().flat_map(|domain| &domains[*domain]);
                let Some(mut choice) = self.choose(cpus()) else { continue };
                choice.beyond = (set.len() - least).max(chosen.len() - fewest);
                let speed: u64 = choice.vcpus.iter().map(|at| u64::from(self.host.cpus[*at].capacity)).sum();
                let left: u64 = cpus().map(|places| u64::from(places.room)).sum();
                let cost = (chosen.len(), Reverse(speed), left);
                if best.as_ref().is_none_or(|(least, _)| cost < *least) {
                    best = Some((cost, choice));
                }
            }
        }
        best.map(|(_, choice)| choice)
    }

    /// Smallest sets of groups in which the VM fits, and a bound below their size. When `tries` are
    /// used up before one is found, the largest groups, as many as are needed.
    fn smallest(&self, groups: &[Vec<Places>], tries: &mut usize) -> (Vec<Vec<usize>>, usize) {
        if self.choose(groups.iter().flatten()).is_none() {
            return (Vec::new(), 0);
        }
        let fits = |set: &[usize]| self.choose(set.iter().flat_map(|group| &groups[*group])).is_some();
        let least = self.at_least(groups);
        let mut fewest = least;
        for size in least..=groups.len() {
            let (mut found, mut set) = (Vec::new(), (0..size).collect::<Vec<_>>());
            loop {
                if *tries == 0 {
                    break;
                }
                *tries -= 1;
                if fits(&set) {
                    found.push(set.clone());
                }
                if !next_set(&mut set, groups.len()) {
                    break;
                }
            }
            if !found.is_empty() {
                return (found, fewest);
            }
            if *tries == 0 {
                break;
            }
            fewest = size + 1;
        }
        let vcpus = |group: &usize| groups[*group].iter().filter(|cpu| cpu.beside.is_some()).count();
        let mut by_size: Vec<usize> = (0..groups.len()).collect();
        by_size.sort_by_key(|group| Reverse(vcpus(group)));
        let enough = (fewest..=groups.len()).find(|n| fits(&by_size[..*n])).unwrap_or(groups.len());
        (vec![by_size[..enough].to_vec()], fewest)
    }

    /// Groups that are needed at least: as if the largest for vCPUs were the largest for service
    /// threads too.
    fn at_least(&self, groups: &[Vec<Places>]) -> usize {
        let needed = |need: u32, of: &dyn Fn(&Places) -> u32| {
            let mut sizes: Vec<u64> =
                groups.iter().map(|group| group.iter().map(|cpu| u64::from(of(cpu))).sum()).collect();
            sizes.sort_unstable_by_key(|size| Reverse(*size));
            let mut sum = 0;
            let reached = |size: &u64| {
                sum += size;
                sum >= u64::from(need)
            };
            sizes.iter().position(reached).map_or(groups.len(), |at| at + 1)
        };
        let vcpus = needed(self.request.vcpus, &|cpu| u32::from(cpu.beside.is_some()));
        let service =
            if self.request.service == 0 { 1 } else { needed(self.request.service, &|cpu| cpu.service) };
        vcpus.max(service)
    }

    /// CPUs for all threads among these; `None` when they do not fit.
    fn choose<'p>(&self, cpus: impl Iterator<Item = &'p Places>) -> Option<Choice> {
        let mut cpus: Vec<&Places> = cpus.collect();
        let vcpus = self.request.vcpus as usize;
        // Whole vCPUs fill up cores, which come in order; parts go where the least is free.
        let whole = self.request.each == Use::Whole;
        let order = |cpu: &&Places| {
            let Some(beside) = cpu.beside else { return (u32::MAX, Reverse((false, 0)), false, 0, cpu.at) };
            let of = &self.host.cpus[cpu.at];
            let (fast, other) = (Reverse((cpu.isolated, of.capacity)), !self.host.own.contains(&of.core));
            (cpu.service - beside, fast, other, if whole { 0 } else { cpu.room }, cpu.at)
        };
        cpus.sort_unstable_by_key(order);
        let on = cpus.get(..vcpus).filter(|all| all.iter().all(|cpu| cpu.beside.is_some()))?;
        let beside = on.iter().map(|cpu| (cpu.at, cpu.beside.unwrap_or(0)));
        let alone = cpus[vcpus..].iter().map(|cpu| (cpu.at, cpu.service));
        let cores: Vec<u32> = on.iter().map(|cpu| self.host.cpus[cpu.at].core).filter(|_| whole).collect();
        let mut holds: Vec<(usize, u32)> = beside.chain(alone).collect();
        // Siblings of whole vCPUs are the VM's already; then where most service threads fit.
        holds.sort_by_key(|(at, n)| (!cores.contains(&self.host.cpus[*at].core), Reverse(*n)));
        let need = self.request.service as usize;
        let mut service: Vec<usize> = Vec::new();
        for (at, n) in holds {
            service.extend(std::iter::repeat_n(at, (n as usize).min(need - service.len())));
        }
        let mut vcpus: Vec<usize> = on.iter().map(|cpu| cpu.at).collect();
        vcpus.sort_unstable();
        (service.len() == need).then_some(Choice { vcpus, service, beyond: 0 })
    }
}

/// The next set of the same size in lexicographic order; `false` after the last.
fn next_set(set: &mut [usize], of: usize) -> bool {
    let size = set.len();
    let Some(at) = (0..size).rev().find(|at| set[*at] < of - size + at) else { return false };
    set[at] += 1;
    for after in at + 1..size {
        set[after] = set[after - 1] + 1;
    }
    true
}
