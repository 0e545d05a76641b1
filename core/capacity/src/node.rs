//! A host, and the full admission of a contract beside those in force.

use rtvirtio_model::Profile;
use rtvirtio_sched::bound::{Refusal, discard_clause};
use rtvirtio_units::{Nanos, Ratio};
use serde::Serialize;

use crate::contract::{Contract, OnDisk, Unpromised};
use crate::cpu::fits;
use crate::disk::{DiskCapacity, NoTimeLeft};
use crate::scalar::{Permille, Scalars};
use crate::{DeviceError, DeviceModel, Options, Reserve, Shape};

/// What a host can promise.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Its disks.
    pub disks: Vec<Disk>,
    /// Share of each CPU for contracts, what others have taken of it left out.
    pub cpu: Ratio,
}

/// One disk of a host.
#[derive(Clone, Debug, PartialEq)]
pub struct Disk {
    /// The name by which specs mean it; `None` for the only one, which every spec means.
    pub name: Option<String>,
    /// It under each shape, in order of preference; never empty.
    shapes: Vec<DiskCapacity>,
    /// The shape that scalars are of.
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

    /// A device of this model.
    #[must_use]
    pub fn new(name: Option<String>, device: &DeviceModel, options: &Options) -> Self {
        let shapes = Shape::all(device, options);
        Self {
            name,
            shapes: shapes.into_iter().map(|s| DiskCapacity::new(device, options, s)).collect(),
            chosen: 0,
        }
    }

    /// The device under the shape that scalars are of.
    #[must_use]
    pub fn capacity(&self) -> &DiskCapacity {
        &self.shapes[self.chosen]
    }

    /// Takes the shape under which the scalars of these contracts are smallest in sum: of the
    /// shapes that refuse fewest of them alone, the first of the smallest sum. A smaller window or
    /// piece makes room for a short target, and costs throughput.
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
        let mut best = (u32::MAX, f64::INFINITY);
        for (i, capacity) in self.shapes.iter().enumerate() {
            let this = cost(capacity);
            if this.0 < best.0 || (this.0 == best.0 && this.1 < best.1) {
                (best, self.chosen) = (this, i);
            }
        }
    }
}

/// The answer for a candidate.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Admission {
    /// Why it is refused; `None` when it is admitted.
    pub refused: Option<Refused>,
    /// What the contracts in force take.
    pub in_force: Scalars,
    /// What the candidate would take. More than a whole where not even an empty host promises it.
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

    /// Whether the sums alone show that it fits.
    #[must_use]
    pub fn fits_by_sum(&self) -> bool {
        let mut sum = self.in_force.clone();
        sum.add(&self.takes);
        sum.fit()
    }
}

/// Why a candidate is refused.
#[derive(Clone, Debug, PartialEq, Serialize, thiserror::Error)]
#[serde(rename_all = "snake_case", tag = "reason")]
#[non_exhaustive]
pub enum Refused {
    /// The host has no such disk.
    #[error("the host has no disk {device}: it has {known}")]
    NoDisk {
        /// As the spec names it.
        device: String,
        /// Names of the host's disks.
        known: String,
    },
    /// The guest's own part takes the whole target.
    #[error("the guest's own part takes {guest} of the target of {target} already")]
    NoTimeLeft {
        /// The target.
        target: Nanos,
        /// The guest's part.
        guest: Nanos,
    },
    /// More device time is asked for than there is.
    #[error("{disk}: contracts would take {asked:.1} % of its time, and it can give {available:.1} %")]
    DeviceTime {
        /// The disk.
        disk: String,
        /// Sum of the rates, in percent of one server.
        asked: f64,
        /// What it can serve, in percent of one server.
        available: f64,
    },
    /// A worst case that is too long.
    #[error(
        "{disk}: {vm} cannot be promised {deadline}: {needed} may pass in the worst case, {blocking} of it behind pieces that the device holds already and {latency} for \
         its own stalls{}",
        discard_clause(*.discard)
    )]
    Deadline {
        /// The disk.
        disk: String,
        /// The VM whose promise would break: the candidate, or one in force.
        vm: String,
        /// What is to be promised for the device's part.
        deadline: Nanos,
        /// The shortest that could be.
        needed: Nanos,
        /// Behind pieces at the device, a part of it.
        blocking: Nanos,
        /// The device's own stalls, a part of it.
        latency: Nanos,
        /// Behind a piece of a discard, a part of it.
        discard: Nanos,
    },
    /// Another reason of the scheduler's admission.
    #[error("{disk}: {why}")]
    Other {
        /// The disk.
        disk: String,
        /// Its words.
        why: String,
    },
    /// More of each CPU than there is.
    #[error("contracts would take {:.1} % of each CPU, and {:.1} % are there for them", 100.0 * .asked, 100.0 * .available)]
    Cpu {
        /// Sum of the shares, the candidate's included.
        asked: f64,
        /// Share that contracts may have.
        available: f64,
    },
}

/// Whether a host can promise a candidate beside the contracts in force.
///
/// The disks' test is the scheduler's admission, under any one of the shapes that the I/O domain
/// can take (a domain that runs under another one takes it at its next start). The contracts in
/// force are taken as they are said to be; whether they fit by themselves shows in the answer too.
#[must_use]
pub fn admit(node: &Node, in_force: &[&Contract], candidate: &Contract) -> Admission {
    let mut all: Vec<&Contract> = in_force.to_vec();
    all.push(candidate);
    let refused = disks_of(node, candidate).err().or_else(|| {
        let disks = (0..node.disks.len()).find_map(|i| refused_by(node, i, &all));
        disks.or_else(|| by_cpu(node, &all))
    });
    let mut taken = Scalars::none(node.disks.len());
    in_force.iter().for_each(|c| taken.add(&node.scalars(c)));
    Admission { refused, in_force: taken, takes: node.scalars(candidate), unpromised: candidate.unpromised() }
}

/// The host's disks that a contract means, in the order of its parts.
fn disks_of(node: &Node, contract: &Contract) -> Result<Vec<usize>, Refused> {
    let find = |of: &OnDisk| node.disk(of.device.as_deref());
    contract.disks.iter().map(find).collect()
}

fn by_cpu(node: &Node, all: &[&Contract]) -> Option<Refused> {
    let asked: f64 = all.iter().filter_map(|c| c.cpu).map(|r| r.0).sum();
    (!fits(asked, node.cpu.0)).then_some(Refused::Cpu { asked, available: node.cpu.0 })
}

/// Why a disk cannot carry all contracts under any shape: the reason that is nearest to none.
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
        other => Refused::Other { disk, why: other.to_string() },
    })
}

impl Refused {
    /// How far from being admitted: 1 is at the edge.
    fn distance(&self) -> f64 {
        match self {
            Self::DeviceTime { asked, available, .. } => asked / available.max(1e-9),
            Self::Deadline { deadline, needed, .. } => needed.0 as f64 / deadline.0.max(1) as f64,
            Self::Cpu { asked, available } => asked / available.max(1e-9),
            _ => f64::INFINITY,
        }
    }
}

impl Node {
    /// The position of the disk that a spec means: by its name, and the only one by any.
    ///
    /// # Errors
    /// [`Refused::NoDisk`].
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

    /// A disk's name for people.
    #[must_use]
    pub fn name_of(&self, disk: usize) -> String {
        self.disks.get(disk).and_then(|d| d.name.clone()).unwrap_or_else(|| "disk".to_owned())
    }

    /// What a contract needs on each disk under its chosen shape; `None` where the host refuses it
    /// even alone.
    #[must_use]
    pub fn needs(&self, contract: &Contract) -> Option<Vec<Option<Reserve>>> {
        let mut all = vec![None; self.disks.len()];
        for (of, disk) in contract.disks.iter().zip(disks_of(self, contract).ok()?) {
            all[disk] = self.disks[disk].capacity().reserve(&of.vm).ok()?;
        }
        Some(all)
    }

    /// What a contract takes, as integers. More than a whole where the host refuses it even alone.
    #[must_use]
    pub fn scalars(&self, contract: &Contract) -> Scalars {
        let mut taken = Scalars::none(self.disks.len());
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
        // A host that gives nothing admits a share of nothing only. Admission forgives more than a
        // thousand contracts could gain here, and all of a host's share is a whole.
        let cpu = |share: f64| Permille::taken(share / self.cpu.0.max(1e-9) - 1e-10);
        taken.cpu = contract.cpu.map_or(Permille(0), |c| cpu(c.0));
        taken
    }
}
