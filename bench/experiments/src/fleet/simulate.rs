//! Simulation of contracts that arrive one after the other at many hosts.

use std::time::Instant;

use anyhow::Context as _;
use rtvirtio_capacity::{Contract, Reserve, fits};
use rtvirtio_fleet::{Cluster, Search};
use serde::{Deserialize, Serialize};

use super::instance::Instance;
use super::peers;

/// Hosts of each class that the exact admission tries where no sum fits.
const TRIES: usize = 32;

/// Placements of every rule in one fleet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Filled {
    /// Hosts of the fleet.
    pub hosts: usize,
    /// Contracts that arrive, ten for each host.
    pub vms: usize,
    /// Time for all decisions of one core, s.
    pub seconds: f64,
    /// Contracts placed: by sums, and by the exact admission where no sum fits.
    pub placed: usize,
    /// Contracts placed by sums alone, in the same order.
    pub placed_by_sums: usize,
    /// Contracts placed by first fit on the same integers, in the same order.
    pub first_fit: usize,
    /// Contracts placed by first fit, the largest first: all arrivals are known in advance.
    pub first_fit_decreasing: usize,
    /// Contracts placed by Pacemaker's rule on the demands of its CIB.
    pub pacemaker: usize,
    /// Contracts placed by our rule, the largest first.
    pub placed_decreasing: usize,
    /// Hosts whose contracts the full admission refuses, by any resource; 0 unless there is a
    /// defect.
    pub beyond_capacity: usize,
}

/// Fills a fleet of `hosts` hosts by every rule.
///
/// # Errors
/// When a built-in profile cannot be read.
pub fn fill(hosts: usize, seed: u64) -> anyhow::Result<Filled> {
    let instance = Instance::new(hosts, seed)?;
    let arrival: Vec<u16> = instance.vms.iter().map(|vm| vm.0).collect();
    let exact = Search::Exact { tries: TRIES };
    let begin = Instant::now();
    let at = place(&instance, &arrival, exact);
    let seconds = begin.elapsed().as_secs_f64();
    let beyond_capacity = beyond(&instance, &arrival, &at);
    let count = |at: &[Option<u32>]| at.iter().flatten().count();
    let decreasing = peers::decreasing(&instance);
    Ok(Filled {
        hosts,
        vms: arrival.len(),
        seconds,
        placed: count(&at),
        placed_by_sums: count(&place(&instance, &arrival, Search::Sums)),
        first_fit: peers::first_fit(&instance, &arrival),
        first_fit_decreasing: peers::first_fit(&instance, &decreasing),
        pacemaker: peers::pacemaker(&instance),
        placed_decreasing: count(&place(&instance, &decreasing, exact)),
        beyond_capacity,
    })
}

fn place(instance: &Instance, order: &[u16], search: Search) -> Vec<Option<u32>> {
    let mut cluster = Cluster::new(instance.classes.clone(), &instance.hosts, &instance.kinds);
    // The number of hosts fits into u32.
    order.iter().map(|kind| cluster.place(usize::from(*kind), search).map(|h| h as u32)).collect()
}

/// Hosts on which the schedulers' own admission of disk or link, or the CPU's, refuses the placed
/// contracts: computed anew from the contracts.
fn beyond(instance: &Instance, order: &[u16], at: &[Option<u32>]) -> usize {
    let mut on: Vec<Vec<u16>> = vec![Vec::new(); instance.hosts.len()];
    for (kind, host) in order.iter().zip(at) {
        if let Some(host) = host {
            on[*host as usize].push(*kind);
        }
    }
    let is_beyond = |(host, kinds): (usize, &Vec<u16>)| {
        let node = &instance.classes[instance.hosts[host]];
        let contracts: Vec<&Contract> = kinds.iter().map(|k| &instance.kinds[usize::from(*k)]).collect();
        let reserves: Option<Vec<Reserve>> = contracts
            .iter()
            .map(|c| Some(node.needs(c)?.into_iter().flatten().collect::<Vec<_>>()))
            .collect::<Option<Vec<_>>>()
            .map(|all| all.concat());
        let cpu: f64 = contracts.iter().filter_map(|c| c.cpu).map(|r| r.0).sum();
        let disk = reserves.is_some_and(|r| node.disks[0].capacity().admit(&r).is_ok());
        let link = &node.networks[0];
        let flows = contracts.iter().flat_map(|c| &c.networks).map(|of| link.reserves(of));
        let link = flows.collect::<Result<Vec<_>, _>>().is_ok_and(|all| link.admit(&all).is_ok());
        !disk || !link || !fits(cpu, node.cpu.0)
    };
    on.iter().enumerate().filter(|of| is_beyond(*of)).count()
}

/// Peak memory of this process, GiB.
///
/// # Errors
/// When the kernel does not say.
pub fn peak_memory_gib() -> anyhow::Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status").context("/proc/self/status")?;
    let kib = status.lines().find_map(|l| l.strip_prefix("VmHWM:")?.trim().strip_suffix("kB"));
    let kib: f64 = kib.context("no VmHWM in /proc/self/status")?.trim().parse()?;
    Ok(kib / f64::from(1 << 20))
}
