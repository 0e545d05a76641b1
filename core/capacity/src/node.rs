//! A host, and the full admission of a contract on top of those in force.

use rtvirtio_model::Profile;
use rtvirtio_sched::bound::Refusal;
use rtvirtio_units::Ratio;
use serde::Serialize;

use crate::contract::{Contract, OnDisk, Unpromised};
use crate::cpu::fits;
use crate::disk::{DiskCapacity, NoTimeLeft};
use crate::network::{Network, NoPromise, OnNetwork};
use crate::refused::Refused;
use crate::scalar::{Permille, Scalars};
use crate::{DeviceError, DeviceModel, Options, Reserve, Shape};

/// Resources of a host that contracts share.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Disks that the I/O domain serves.
    pub disks: Vec<Disk>,
    /// Networks that the I/O domain serves.
    pub networks: Vec<Network>,
    /// Share of each CPU for contracts, less what other programs have reserved.
    pub cpu: Ratio,
}

/// Resource of a host that contracts share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource<'n> {
    /// A disk, by its name; `None` for the only one.
    Disk(Option<&'n str>),
    /// A network, in the same way.
    Network(Option<&'n str>),
    /// The share of each CPU.
    Cpu,
}

/// A disk of a host under all shapes.
#[derive(Clone, Debug, PartialEq)]
pub struct Disk {
    /// The name by which specs mean it; `None` for the only one, which every spec means.
    pub name: Option<String>,
    /// The device under each shape, in order of preference; never empty.
    shapes: Vec<DiskCapacity>,
    /// Index of the shape that scalars are computed for.
    chosen: usize,
}

impl Disk {
    /// A device as it was measured.
    ///
    /// # Errors
    /// A profile without writes, or without usable numbers.
    pub fn measured(name: Option<String>, profile: &Profile) -> Result<Self, DeviceError> {
        Ok(Self::new(name, &DeviceModel::measured(profile)?, &Options::of_profile(profile)))
    }

    #[must_use]
    pub fn new(name: Option<String>, device: &DeviceModel, options: &Options) -> Self {
        let shapes = Shape::all(device, options);
        Self {
            name,
            shapes: shapes.into_iter().map(|s| DiskCapacity::new(device, options, s)).collect(),
            chosen: 0,
        }
    }

    /// The device's name in its profile, such as that of the kernel; that of the twin where it is
    /// declared.
    #[must_use]
    pub fn device(&self) -> &str {
        self.capacity().device_name()
    }

    /// The device under the shape that scalars are computed for.
    #[must_use]
    pub fn capacity(&self) -> &DiskCapacity {
        &self.shapes[self.chosen]
    }

    /// Takes the shape under which the scalars of these contracts are smallest in sum: of the
    /// shapes that refuse fewest of them alone, the first of the smallest sum. A smaller window or
    /// piece makes room for a short target, and costs throughput. What tasks that make one request
    /// at a time need free counts once for all contracts where that makes the sum smaller, and in
    /// each of theirs otherwise ([`DiskCapacity::part`]).
    pub fn choose(&mut self, contracts: &[&OnDisk]) {
        let cost = |capacity: &DiskCapacity| {
            let (mut refused, mut sum) = (0u32, 0.0);
            for of in contracts {
                match capacity.reserve(&of.vm) {
                    Ok(None) => {}
                    Ok(Some(r)) => match capacity.part(&r) {
                        Some(part) => sum += part,
                        None => refused += 1,
                    },
                    Err(_) => refused += 1,
                }
            }
            (refused, sum)
        };
        let most_spare = |capacity: &DiskCapacity| {
            let reserves = contracts.iter().filter_map(|of| capacity.reserve(&of.vm).ok().flatten());
            let kept = reserves.filter(|r| r.share.0 + r.spare.0 <= capacity.room().speed);
            kept.map(|r| r.spare.0).fold(0.0, f64::max)
        };
        let (mut best, mut best_kept) = ((u32::MAX, f64::INFINITY), 0.0);
        for (i, capacity) in self.shapes.iter_mut().enumerate() {
            for kept in [0.0, most_spare(capacity)] {
                capacity.keep(kept);
                let this = cost(capacity);
                if this.0 < best.0 || (this.0 == best.0 && this.1 < best.1) {
                    (best, best_kept, self.chosen) = (this, kept, i);
                }
            }
        }
        self.shapes[self.chosen].keep(best_kept);
    }
}

/// The answer for a candidate.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Admission {
    /// Reason of the refusal; `None` when the candidate is admitted.
    pub refused: Option<Refused>,
    /// Sum of the contracts in force.
    pub in_force: Scalars,
    /// Scalars of the candidate; above [`WHOLE`](crate::WHOLE) where even an empty host refuses it.
    pub takes: Scalars,
    /// Tasks of the candidate with targets that admission does not cover.
    pub unpromised: Vec<Unpromised>,
}

impl Admission {
    /// Whether the candidate fits.
    #[must_use]
    pub fn is_admitted(&self) -> bool {
        self.refused.is_none()
    }

    /// Whether the sums alone show that the candidate fits.
    #[must_use]
    pub fn fits_by_sum(&self) -> bool {
        let mut sum = self.in_force.clone();
        sum.add(&self.takes);
        sum.fit()
    }
}

/// Whether a host can promise a candidate on top of the contracts in force.
///
/// The disks' test is the scheduler's admission, under any one of the shapes that the I/O domain
/// can take (one that runs under another shape takes it at its next start). The contracts in force
/// are taken as declared; the answer shows whether they fit by themselves.
#[must_use]
pub fn admit(node: &Node, in_force: &[&Contract], candidate: &Contract) -> Admission {
    let mut all: Vec<&Contract> = in_force.to_vec();
    all.push(candidate);
    let refused = disks_of(node, candidate).err().or_else(|| networks_of(node, candidate).err());
    let refused = refused.or_else(|| {
        let disks = (0..node.disks.len()).find_map(|i| refused_by(node, i, &all));
        let networks = || (0..node.networks.len()).find_map(|i| refused_by_link(node, i, &all));
        disks.or_else(networks).or_else(|| by_cpu(node, &all))
    });
    let mut taken = node.nothing();
    in_force.iter().for_each(|c| taken.add(&node.scalars(c)));
    Admission { refused, in_force: taken, takes: node.scalars(candidate), unpromised: candidate.unpromised() }
}

/// Indices of the host's disks in the order of the contract's parts.
fn disks_of(node: &Node, contract: &Contract) -> Result<Vec<usize>, Refused> {
    let find = |of: &OnDisk| node.disk(of.device.as_deref());
    contract.disks.iter().map(find).collect()
}

/// Indices of the host's networks in the order of the contract's parts.
fn networks_of(node: &Node, contract: &Contract) -> Result<Vec<usize>, Refused> {
    let find = |of: &OnNetwork| node.network(of.network.as_deref());
    contract.networks.iter().map(find).collect()
}

/// Refusal of all contracts together by one link; `None` when it can carry them.
fn refused_by_link(node: &Node, network: usize, all: &[&Contract]) -> Option<Refused> {
    let on = |c: &&Contract| -> Option<(String, OnNetwork)> {
        let of = c.networks.iter().find(|n| node.network(n.network.as_deref()) == Ok(network))?;
        Some((c.vm.clone(), of.clone()))
    };
    let vms: Vec<(String, OnNetwork)> = all.iter().filter_map(on).collect();
    admit_flows(&node.networks[network], &vms, &node.network_name(network)).err()
}

fn admit_flows(link: &Network, vms: &[(String, OnNetwork)], network: &str) -> Result<(), Refused> {
    let mut ports = Vec::new();
    for (vm, of) in vms {
        let (network, vm) = (network.to_owned(), vm.clone());
        ports.push(link.reserves(of).map_err(|why| match why {
            NoPromise::Frame { frame, largest } => Refused::Frame { network, vm, frame, largest },
            NoPromise::HeldBack { target, held } => Refused::HeldBack { network, vm, target, held },
            NoPromise::Burst { burst } => {
                let why = format!("{vm}: {burst} of the link at once, more than the scheduler counts");
                Refused::Other { disk: network, why }
            }
        })?);
    }
    let network = network.to_owned();
    link.admit(&ports).map_err(|refusal| match refusal {
        Refusal::Rate { reserved, available } => Refused::LinkRate { network, asked: reserved, available },
        Refusal::Deadline { vm, deadline, needed, blocking, latency, .. } => {
            let vm = vms.get(vm).map_or_else(String::new, |(name, _)| name.clone());
            Refused::LinkDeadline { network, vm, deadline, needed, blocking, latency }
        }
        other => Refused::Other { disk: network, why: other.to_string() },
    })
}

fn by_cpu(node: &Node, all: &[&Contract]) -> Option<Refused> {
    let asked: f64 = all.iter().filter_map(|c| c.cpu).map(|r| r.0).sum();
    (!fits(asked, node.cpu.0)).then_some(Refused::Cpu { asked, available: node.cpu.0 })
}

/// Refusal of all contracts by one disk under the shape nearest to admitting them; else `None`.
fn refused_by(node: &Node, disk: usize, all: &[&Contract]) -> Option<Refused> {
    let on = |c: &&Contract| -> Option<OnDisk> {
        c.disks.iter().find(|d| node.disk(d.device.as_deref()) == Ok(disk)).cloned()
    };
    let vms: Vec<OnDisk> = all.iter().filter_map(on).collect();
    if vms.is_empty() {
        return None;
    }
    let name = node.name_of(disk);
    let mut nearest: Option<(f64, Refused)> = None;
    for capacity in &node.disks[disk].shapes {
        let (distance, refused) = match admit_all(capacity, &vms, &name) {
            Ok(()) => return None,
            Err(refused) => (refused.distance(), refused),
        };
        if nearest.as_ref().is_none_or(|(d, _)| distance < *d) {
            nearest = Some((distance, refused));
        }
    }
    nearest.map(|(_, refused)| refused)
}

fn admit_all(capacity: &DiskCapacity, vms: &[OnDisk], disk: &str) -> Result<(), Refused> {
    let mut names = Vec::new();
    let mut reserves: Vec<Reserve> = Vec::new();
    for of in vms {
        let no_time = |NoTimeLeft { target, guest }| Refused::NoTimeLeft { target, guest };
        if let Some(r) = capacity.reserve(&of.vm).map_err(no_time)? {
            names.push(of.vm.name.as_str());
            reserves.push(r);
        }
    }
    let disk = disk.to_owned();
    capacity.admit(&reserves).map_err(|refusal| match refusal {
        Refusal::Rate { reserved, available } => Refused::DeviceTime { disk, asked: reserved, available },
        Refusal::Deadline { vm, deadline, needed, blocking, latency, discard } => {
            let vm = names.get(vm).map_or_else(String::new, |n| (*n).to_owned());
            Refused::Deadline { disk, vm, deadline, needed, blocking, latency, discard }
        }
        Refusal::OneAtATime { vm, needed, available } => {
            let vm = names.get(vm).map_or_else(String::new, |n| (*n).to_owned());
            Refused::OneAtATime { disk, vm, asked: needed, available }
        }
        other => Refused::Other { disk, why: other.to_string() },
    })
}

impl Node {
    /// Scalars of no contract, sized for this host.
    #[must_use]
    pub fn nothing(&self) -> Scalars {
        Scalars::none(self.disks.len(), self.networks.len())
    }

    /// Scalars by resource: the disks, the networks, then the CPU.
    pub fn by_resource<'n>(
        &'n self,
        taken: &'n Scalars,
    ) -> impl Iterator<Item = (Resource<'n>, Permille)> + use<'n> {
        let disks = self.disks.iter().map(|d| Resource::Disk(d.name.as_deref())).zip(&taken.disks);
        let networks =
            self.networks.iter().map(|n| Resource::Network(n.name.as_deref())).zip(&taken.networks);
        disks.chain(networks).chain([(Resource::Cpu, &taken.cpu)]).map(|(resource, p)| (resource, *p))
    }

    /// The position of the disk that a spec means: by its name, and the only one by any.
    pub fn disk(&self, device: Option<&str>) -> Result<usize, Refused> {
        if let ([_], None) = (self.disks.as_slice(), device) {
            return Ok(0);
        }
        let found = self.disks.iter().position(|d| d.name.as_deref() == device);
        found.ok_or_else(|| {
            let known: Vec<String> = (0..self.disks.len()).map(|i| self.name_of(i)).collect();
            let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            Refused::NoDisk { device: device.unwrap_or("without a name").to_owned(), known }
        })
    }

    /// Name of a disk in messages.
    #[must_use]
    pub fn name_of(&self, disk: usize) -> String {
        self.disks.get(disk).and_then(|d| d.name.clone()).unwrap_or_else(|| "disk".to_owned())
    }

    /// The position of the network that a spec means, as [`Node::disk`].
    pub fn network(&self, name: Option<&str>) -> Result<usize, Refused> {
        if let ([_], None) = (self.networks.as_slice(), name) {
            return Ok(0);
        }
        let found = self.networks.iter().position(|n| n.name.as_deref() == name);
        found.ok_or_else(|| {
            let known: Vec<String> = (0..self.networks.len()).map(|i| self.network_name(i)).collect();
            let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            Refused::NoNetwork { network: name.unwrap_or("without a name").to_owned(), known }
        })
    }

    /// Name of a network in messages.
    #[must_use]
    pub fn network_name(&self, network: usize) -> String {
        self.networks.get(network).and_then(|n| n.name.clone()).unwrap_or_else(|| "network".to_owned())
    }

    /// Reservations of a contract on each network; `None` where the host refuses it even alone.
    #[must_use]
    pub fn link_needs(&self, contract: &Contract) -> Option<Vec<Vec<Reserve>>> {
        let mut all = vec![Vec::new(); self.networks.len()];
        for (of, network) in contract.networks.iter().zip(networks_of(self, contract).ok()?) {
            all[network] = self.networks[network].reserves(of).ok()?.into_iter().flatten().collect();
        }
        Some(all)
    }

    /// Reservations of a contract on each disk under its chosen shape; `None` where the host
    /// refuses it even alone.
    #[must_use]
    pub fn needs(&self, contract: &Contract) -> Option<Vec<Option<Reserve>>> {
        let mut all = vec![None; self.disks.len()];
        for (of, disk) in contract.disks.iter().zip(disks_of(self, contract).ok()?) {
            all[disk] = self.disks[disk].capacity().reserve(&of.vm).ok()?;
        }
        Some(all)
    }

    /// Scalars of a contract; above [`WHOLE`](crate::WHOLE) where the host refuses it even alone.
    #[must_use]
    pub fn scalars(&self, contract: &Contract) -> Scalars {
        let mut taken = self.nothing();
        let never = Permille::taken(f64::INFINITY);
        match self.needs(contract) {
            None => taken.disks.iter_mut().for_each(|d| *d = never),
            Some(needs) => {
                for ((taken, need), disk) in taken.disks.iter_mut().zip(needs).zip(&self.disks) {
                    let part = |r: Reserve| disk.capacity().part(&r).unwrap_or(f64::INFINITY);
                    *taken = need.map_or(Permille(0), |r| Permille::taken(part(r)));
                }
            }
        }
        match self.link_needs(contract) {
            None => taken.networks.iter_mut().for_each(|n| *n = never),
            Some(needs) => {
                for ((taken, need), network) in taken.networks.iter_mut().zip(needs).zip(&self.networks) {
                    *taken = Permille::taken(network.part(&need).unwrap_or(f64::INFINITY));
                }
            }
        }
        // A contract on a disk or network that is not there fits nowhere.
        if networks_of(self, contract).is_err() || disks_of(self, contract).is_err() {
            taken.cpu = never;
            return taken;
        }
        // A host without a CPU share for contracts admits only 0. Admission's tolerance exceeds
        // what a thousand contracts gain by 1e-10 each, and all of a host's share is a whole.
        let cpu = |share: f64| Permille::taken(share / self.cpu.0.max(1e-9) - 1e-10);
        taken.cpu = contract.cpu.map_or(Permille(0), |c| cpu(c.0));
        taken
    }
}
