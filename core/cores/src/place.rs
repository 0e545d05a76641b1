//! Requests, placements, and what placements take of a host.

mod search;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::topology::{BadTopology, Cpu, checked};
use search::{Choice, Search};

/// CPU time that a thread gets of its CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Use {
    /// A CPU of its own.
    Whole,
    /// So many thousandths of a CPU, at least one.
    Part(u32),
}

impl fmt::Display for Use {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole => f.write_str("a CPU of its own"),
            Self::Part(share) => {
                write!(f, "{}.{} % of a CPU", share / 10, share % 10)
            }
        }
    }
}

/// Threads of one VM that need a CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Number of vCPUs.
    pub vcpus: u32,
    /// CPU time of each vCPU.
    pub each: Use,
    /// Number of threads that work for the vCPUs: QEMU's main loop, I/O threads, vhost.
    pub service: u32,
    /// Thousandths of a CPU for each of these, at least one.
    pub service_share: u32,
    pub node: Option<u32>,
}

/// CPUs for the threads of one VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// Request that it answers.
    pub request: Request,
    /// CPU of each vCPU, in the guest's order.
    pub vcpus: Vec<u32>,
    /// CPU of each other thread.
    pub service: Vec<u32>,
    /// Number of NUMA nodes that have a thread.
    pub nodes: usize,
    /// Number of domains (node, last-level cache, capacity) that were needed.
    pub domains: usize,
    /// Most by which `nodes` and `domains` may exceed the fewest possible; 0 where all sets were
    /// tried or a bound is met.
    pub beyond: usize,
}

/// Reason why a VM gets no CPUs, with what would fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The request itself is no request.
    #[error("a VM has at least one vCPU, and a share is 1 to 1000 thousandths of a CPU")]
    Request,
    /// No CPU of that node is online.
    #[error("no CPU of node {0} is online")]
    Node(u32),
    /// Not enough free CPU time.
    #[error("{} vCPUs with {} each and {} other threads do not fit; {}", asked.vcpus, asked.each, asked.service, would(*vcpus, *share))]
    Room {
        /// Request that does not fit.
        asked: Request,
        /// Most vCPUs that would fit with the same use and the same other threads; 0 for none.
        vcpus: u32,
        /// Largest part of a CPU, in thousandths, with which all vCPUs would fit; 0 for none.
        share: u32,
    },
}

fn would(vcpus: u32, share: u32) -> String {
    let fewer = (vcpus > 0).then(|| format!("{vcpus} vCPUs"));
    let less = (share > 0).then(|| format!("all vCPUs with {} each", Use::Part(share)));
    match (fewer, less) {
        (None, None) => "nothing would fit until another VM ends".to_owned(),
        (Some(one), None) | (None, Some(one)) => format!("{one} would fit"),
        (Some(fewer), Some(less)) => format!("{fewer} would fit, or {less}"),
    }
}

/// CPUs of a host and what is taken of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    cpus: Vec<Cpu>,
    /// Thousandths that are taken, by position in `cpus`.
    taken: Vec<u32>,
    /// Cores that have a whole vCPU, or are kept for the host.
    closed: BTreeSet<u32>,
    /// CPUs that take no thread, by position in `cpus`.
    withheld: BTreeSet<usize>,
    /// Cores that the VM to be placed has already: its whole vCPUs are placed there first.
    own: BTreeSet<u32>,
    granted: u32,
    place_of: BTreeMap<u32, usize>,
}

impl Host {
    /// Host of which nothing is taken. `granted` is what the kernel grants real-time threads of
    /// each CPU, in thousandths: 950 by default.
    pub fn new(cpus: Vec<Cpu>, granted: u32) -> Result<Self, BadTopology> {
        let cpus = checked(cpus)?;
        let place_of = cpus.iter().enumerate().map(|(i, cpu)| (cpu.id, i)).collect();
        let taken = vec![0; cpus.len()];
        let (closed, withheld, own) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        Ok(Self { taken, cpus, closed, withheld, own, granted: granted.min(1000), place_of })
    }

    /// The CPUs, by core and number.
    #[must_use]
    pub fn cpus(&self) -> &[Cpu] {
        &self.cpus
    }

    /// Keeps a CPU, with the other CPUs of its core, from all VMs. No VM is placed on a CPU that is
    /// not online in any case.
    pub fn keep(&mut self, cpu: u32) {
        if let Some(&at) = self.place_of.get(&cpu) {
            self.closed.insert(self.cpus[at].core);
        }
    }

    /// Counts a CPU as taken by a thread that is in no placement.
    pub fn fill(&mut self, cpu: u32) {
        if let Some(&at) = self.place_of.get(&cpu) {
            self.taken[at] = self.granted;
        }
    }

    /// Counts a CPU as used by a thread that is in no placement: no whole vCPU is placed on its
    /// core.
    pub fn touch(&mut self, cpu: u32) {
        if let Some(&at) = self.place_of.get(&cpu) {
            self.taken[at] = self.taken[at].max(1);
        }
    }

    /// Places no VM on other CPUs than these. What is taken of the others still counts for their
    /// cores.
    pub fn only(&mut self, cpus: &BTreeSet<u32>) {
        let others = self.cpus.iter().enumerate().filter(|(_, cpu)| !cpus.contains(&cpu.id));
        self.withheld = others.map(|(at, _)| at).collect();
    }

    /// CPUs for a VM, on what is not taken.
    ///
    /// # Errors
    /// When it does not fit, with what would.
    pub fn place(&self, request: &Request) -> Result<Placement, Refused> {
        let parts = |share: u32| (1..=1000).contains(&share);
        let each = matches!(request.each, Use::Part(share) if !parts(share));
        if request.vcpus == 0 || each || (request.service > 0 && !parts(request.service_share)) {
            return Err(Refused::Request);
        }
        if let Some(node) = request.node.filter(|node| self.cpus.iter().all(|cpu| cpu.node != *node)) {
            return Err(Refused::Node(node));
        }
        let search = Search::new(self, request);
        let Some(found) = search.best() else { return Err(self.refusal(request)) };
        Ok(self.placement(request, &found))
    }

    /// The placement `had`, which is taken, with so many more vCPUs: each gets a CPU in the domains
    /// that the VM has, else on its nodes, else anywhere. What it has stays as it is.
    ///
    /// # Errors
    /// When they do not fit, with what would.
    pub fn place_more(&self, had: &Placement, vcpus: u32) -> Result<Placement, Refused> {
        let request = Request { vcpus, service: 0, service_share: 0, ..had.request };
        let (nodes, domains) = self.spread(had);
        let mut host = self.clone();
        let whole = had.request.each == Use::Whole;
        if whole {
            // On cores that only this VM uses there is room for a CPU that it does not use.
            host.release(had);
            let all = had.vcpus.iter().chain(&had.service);
            host.own = all.filter_map(|cpu| Some(self.cpu(*cpu)?.core)).collect();
        }
        let uses = |cpu: &u32| had.vcpus.contains(cpu) || whole && had.service.contains(cpu);
        let near: [&dyn Fn(&Cpu) -> bool; 3] =
            [&|cpu| domains.contains(&cpu.domain()), &|cpu| nodes.contains(&cpu.node), &|_| true];
        let mut refused = Refused::Request;
        for is_near in near {
            let out = |cpu: &Cpu| uses(&cpu.id) || !is_near(cpu);
            let out = self.cpus.iter().enumerate().filter(|(_, cpu)| out(cpu)).map(|(at, _)| at);
            host.withheld = self.withheld.iter().copied().chain(out).collect();
            match host.place(&request) {
                Ok(more) => return Ok(self.joined(had, &more)),
                Err(e) => refused = e,
            }
        }
        Err(refused)
    }

    fn joined(&self, had: &Placement, more: &Placement) -> Placement {
        let mut all = had.clone();
        all.request.vcpus = had.request.vcpus.saturating_add(more.request.vcpus);
        all.vcpus.extend(&more.vcpus);
        let (nodes, domains) = self.spread(&all);
        (all.nodes, all.domains) = (nodes.len(), domains.len());
        all
    }

    fn cpu(&self, id: u32) -> Option<&Cpu> {
        self.place_of.get(&id).map(|at| &self.cpus[*at])
    }

    /// Nodes and domains that have a thread of a placement.
    fn spread(&self, of: &Placement) -> (BTreeSet<u32>, BTreeSet<(u32, u32, u32)>) {
        let used = || of.vcpus.iter().chain(&of.service).filter_map(|cpu| self.cpu(*cpu));
        (used().map(|cpu| cpu.node).collect(), used().map(Cpu::domain).collect())
    }

    fn placement(&self, request: &Request, found: &Choice) -> Placement {
        let ids = |all: &[usize]| all.iter().map(|at| self.cpus[*at].id).collect::<Vec<_>>();
        let (vcpus, service) = (ids(&found.vcpus), ids(&found.service));
        let mut placement =
            Placement { request: *request, vcpus, service, nodes: 0, domains: 0, beyond: found.beyond };
        let (nodes, domains) = self.spread(&placement);
        (placement.nodes, placement.domains) = (nodes.len(), domains.len());
        placement
    }

    fn refusal(&self, asked: &Request) -> Refused {
        let fits = |request: &Request| Search::new(self, request).fits();
        // Whatever fits still fits with fewer vCPUs, or with a smaller part.
        let most = |limit: u32, of: &dyn Fn(u32) -> Request| {
            let (mut fit, mut not) = (0, limit);
            while not - fit > 1 {
                let middle = fit + (not - fit) / 2;
                if fits(&of(middle)) { fit = middle } else { not = middle }
            }
            fit
        };
        let vcpus = most(asked.vcpus, &|vcpus| Request { vcpus, ..*asked });
        let below = if let Use::Part(share) = asked.each { share } else { self.granted + 1 };
        let share = most(below, &|share| Request { each: Use::Part(share), ..*asked });
        Refused::Room { asked: *asked, vcpus, share }
    }

    /// Takes what a placement has; it must be of this host as it is now.
    pub fn take(&mut self, placement: &Placement) {
        self.change(placement, u32::saturating_add);
        self.close(placement, true);
    }

    /// Gives back what a placement that was taken has.
    pub fn release(&mut self, placement: &Placement) {
        self.change(placement, u32::saturating_sub);
        self.close(placement, false);
    }

    fn change(&mut self, placement: &Placement, by: fn(u32, u32) -> u32) {
        let request = placement.request;
        let each = if let Use::Part(share) = request.each { share } else { 0 };
        let vcpus = placement.vcpus.iter().map(|cpu| (cpu, each));
        let service = placement.service.iter().map(|cpu| (cpu, request.service_share));
        for (cpu, share) in vcpus.chain(service) {
            if let Some(&at) = self.place_of.get(cpu) {
                self.taken[at] = by(self.taken[at], share);
            }
        }
    }

    fn close(&mut self, placement: &Placement, closed: bool) {
        let whole = placement.request.each == Use::Whole;
        for at in placement.vcpus.iter().filter_map(|cpu| self.place_of.get(cpu)).filter(|_| whole) {
            let core = self.cpus[*at].core;
            if closed {
                self.closed.insert(core)
            } else {
                self.closed.remove(&core)
            };
        }
    }
}
