//! Random hosts, what is taken of them, and what VMs ask of them.

use std::collections::BTreeSet;

use rtvirtio_cores::{BadTopology, Cpu, Host, Request, Use};
use rtvirtio_stats::Random;

/// Capacity of the fastest CPUs, and of the slow ones of a hybrid host.
const CAPACITIES: [u32; 2] = [1024, 512];
/// Shares of vCPUs, in thousandths.
const SHARES: [u32; 5] = [50, 200, 475, 600, 950];
/// Shares of other threads, in thousandths.
const SERVICE_SHARES: [u32; 3] = [20, 100, 300];

/// Size of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// 8 CPUs at most: all placements can be tried.
    Small,
    /// 64 CPUs at most.
    Medium,
    /// 256 CPUs at most.
    Large,
}

impl Size {
    /// Size of the host of this number: a fifth is small, and a fiftieth large.
    pub fn of_host(number: usize) -> Self {
        match (number % 5, number % 50) {
            (1, _) => Self::Small,
            (_, 0) => Self::Large,
            _ => Self::Medium,
        }
    }

    fn cpus(self) -> usize {
        match self {
            Self::Small => 8,
            Self::Medium => 64,
            Self::Large => 256,
        }
    }

    fn vcpus(self) -> u32 {
        match self {
            Self::Small => 4,
            Self::Medium => 12,
            Self::Large => 64,
        }
    }

    fn service(self) -> usize {
        if self == Self::Small { 2 } else { 4 }
    }
}

/// A host before a VM has CPUs of it.
#[derive(Clone, Debug)]
pub struct HostCase {
    /// CPUs that are online.
    pub cpus: Vec<Cpu>,
    /// Thousandths of each CPU that the kernel grants real-time threads.
    pub granted: u32,
    /// CPUs whose cores are the host's own.
    pub kept: BTreeSet<u32>,
    /// CPUs that another program has as a whole.
    pub filled: BTreeSet<u32>,
    /// CPUs on which another program has threads of unknown use.
    pub touched: BTreeSet<u32>,
}

impl HostCase {
    /// The host as the product sees it.
    pub fn host(&self) -> Result<Host, BadTopology> {
        let mut host = Host::new(self.cpus.clone(), self.granted)?;
        self.kept.iter().for_each(|cpu| host.keep(*cpu));
        self.filled.iter().for_each(|cpu| host.fill(*cpu));
        self.touched.iter().for_each(|cpu| host.touch(*cpu));
        Ok(host)
    }

    /// Numbers of all CPUs.
    pub fn ids(&self) -> BTreeSet<u32> {
        self.cpus.iter().map(|cpu| cpu.id).collect()
    }
}

/// Request of a VM, with the CPUs among which it may have some.
#[derive(Clone, Debug)]
pub struct Asked {
    /// Threads and their CPU time.
    pub request: Request,
    /// CPUs among which it may have some; `None` for all.
    pub allowed: Option<BTreeSet<u32>>,
}

/// Chance of one in `n`.
fn one_in(n: usize, random: &mut Random) -> bool {
    random.below(n) == 0
}

fn one_of<T: Copy>(of: &[T], random: &mut Random) -> T {
    of[random.below(of.len())]
}

/// CPUs by nodes, last-level caches of each node, cores of each cache, and CPUs of each core. On a
/// hybrid host the later half of each cache's cores is slow, and has a CPU each.
pub fn regular([nodes, llcs, cores, threads]: [usize; 4], is_hybrid: bool) -> Vec<Cpu> {
    let mut cpus: Vec<Cpu> = Vec::new();
    for node in 0..nodes {
        for _ in 0..llcs {
            let llc = cpus.len() as u32;
            for at in 0..cores {
                let is_slow = is_hybrid && cores > 1 && 2 * at >= cores;
                let core = cpus.len() as u32;
                let count = if is_slow { 1 } else { threads as u32 };
                let cpu = |id: u32| Cpu {
                    id,
                    core,
                    llc,
                    node: node as u32,
                    capacity: CAPACITIES[usize::from(is_slow)],
                    isolated: false,
                    tickless: false,
                };
                cpus.extend((core..core + count).map(cpu));
            }
        }
    }
    cpus
}

fn shape(size: Size, random: &mut Random) -> [usize; 4] {
    let llcs = if size == Size::Large { 8 } else { 3 };
    loop {
        let shape = [1 + random.below(4), 1 + random.below(llcs), 1 + random.below(8), 1 + random.below(2)];
        if shape.iter().product::<usize>() <= size.cpus() {
            return shape;
        }
    }
}

/// A random host: some CPUs are isolated, some are offline, some are taken.
pub fn host(size: Size, random: &mut Random) -> HostCase {
    let shape = shape(size, random);
    let is_hybrid = one_in(4, random);
    let mut cpus = regular(shape, is_hybrid);
    match random.below(4) {
        0 => {
            let cores: BTreeSet<u32> = cpus.iter().map(|cpu| cpu.core).collect();
            let isolated: BTreeSet<u32> = cores.into_iter().filter(|_| one_in(3, random)).collect();
            cpus.iter_mut().for_each(|cpu| cpu.isolated = isolated.contains(&cpu.core));
        }
        1 => cpus.iter_mut().for_each(|cpu| cpu.isolated = one_in(4, random)),
        _ => {}
    }
    if one_in(2, random) {
        cpus.retain(|cpu| cpu.id == 0 || !one_in(8, random));
    }
    let mut some = |of: usize, each: usize| -> BTreeSet<u32> {
        if !one_in(of, random) {
            return BTreeSet::new();
        }
        cpus.iter().map(|cpu| cpu.id).filter(|_| one_in(each, random)).collect()
    };
    let (kept, filled) = (some(3, 12), some(3, 10));
    let mut touched = some(3, 10);
    touched.retain(|cpu| !filled.contains(cpu));
    let granted = one_of(&[950, 1000], random);
    HostCase { cpus, granted, kept, filled, touched }
}

/// A random request of a host of this size.
pub fn asked(size: Size, of: &HostCase, random: &mut Random) -> Asked {
    let each = if one_in(2, random) { Use::Whole } else { Use::Part(one_of(&SHARES, random)) };
    let node = if one_in(6, random) { Some(random.below(3) as u32) } else { None };
    let allowed = if one_in(6, random) {
        Some(of.ids().into_iter().filter(|_| !one_in(3, random)).collect())
    } else {
        None
    };
    let request = Request {
        vcpus: 1 + random.below(size.vcpus() as usize) as u32,
        each,
        service: random.below(size.service() + 1) as u32,
        service_share: one_of(&SERVICE_SHARES, random),
        node,
    };
    Asked { request, allowed }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_have_what_makes_placing_hard() {
        let mut random = Random::new(3);
        let all: Vec<(Size, HostCase)> =
            (0..500).map(|i| (Size::of_host(i), host(Size::of_host(i), &mut random))).collect();
        for (size, case) in &all {
            assert!((1..=size.cpus()).contains(&case.cpus.len()));
            assert!(case.host().is_ok(), "{case:?}");
        }
        let has = |of: &dyn Fn(&HostCase) -> bool| all.iter().filter(|(_, case)| of(case)).count() >= 20;
        assert!(has(&|case| case.cpus.iter().any(|cpu| cpu.node > 0)));
        assert!(has(&|case| case.cpus.iter().any(|cpu| cpu.isolated)));
        assert!(has(&|case| case.cpus.iter().any(|cpu| cpu.capacity < 1024)));
        assert!(has(&|case| case.cpus.iter().any(|cpu| cpu.id != cpu.core)));
        assert!(has(&|case| case.cpus.last().is_some_and(|cpu| cpu.id as usize >= case.cpus.len())));
        assert!(has(&|case| !case.kept.is_empty()) && has(&|case| !case.filled.is_empty()));
        assert!(has(&|case| !case.touched.is_empty()));
        assert_eq!(all.iter().filter(|(size, _)| *size == Size::Small).count(), 100);
        assert_eq!(all.iter().filter(|(size, _)| *size == Size::Large).count(), 10);
    }

    #[test]
    fn slow_cores_of_a_hybrid_host_have_one_cpu() {
        let cpus = regular([1, 2, 4, 2], true);
        assert_eq!(cpus.len(), 2 * (2 * 2 + 2));
        for cpu in &cpus {
            let siblings = cpus.iter().filter(|other| other.core == cpu.core).count();
            assert_eq!(siblings, if cpu.capacity == 1024 { 2 } else { 1 });
        }
        assert_eq!(regular([2, 8, 8, 2], false).len(), 256);
    }
}
