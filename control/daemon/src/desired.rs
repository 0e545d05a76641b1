//! Desired state: the contracts of `contracts.d`, one spec in each file.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::fmt;
use std::path::{Path, PathBuf};

use rtvirtio_spec::{Criticality, HostSpec, Part, Vm};
use rtvirtio_units::Ratio;
use serde::Serialize;
use sha2::{Digest as _, Sha256};

use crate::contract_scan::{Asked, FileResult, Reader, Stamp};

/// Bytes of a contract's digest that are shown and compared.
const ID_BYTES: usize = 8;

/// Place that a contract is read from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// Path of a spec file.
    File(PathBuf),
    /// Metadata of a libvirt domain.
    Domain {
        /// Libvirt name of the VM.
        name: String,
        /// URI of the libvirt daemon.
        uri: String,
    },
}

impl From<&Path> for Origin {
    fn from(path: &Path) -> Self {
        Self::File(path.to_owned())
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Domain { name, uri } => write!(f, "the metadata of domain {name} ({uri})"),
        }
    }
}

/// The contract of one VM.
#[derive(Clone, Debug, PartialEq)]
pub struct Contract {
    /// The VM, with its tasks and targets.
    pub vm: Vm,
    /// Digest of what is put in force: how the VM is reached, and its CPU contract.
    pub id: String,
    /// File or metadata that it was read from.
    pub origin: Origin,
    /// Metadata with a contract of the same VM, which this one overrides.
    pub overrides: Option<Origin>,
    /// The devices that it uses, each with the tasks on it; this VM alone.
    pub parts: Vec<Part>,
    /// Resources that it takes. The CPU share of a demand is 0 here: it is found on the host.
    pub promise: rtvirtio_capacity::Contract,
}

impl Contract {
    /// Criticality of the VM; contracts are admitted from the highest down.
    #[must_use]
    pub fn criticality(&self) -> Criticality {
        self.vm.criticality
    }

    /// Whether something is to be put in force for it.
    #[must_use]
    pub fn sets_something(&self) -> bool {
        self.vm.cpu.need.is_some()
    }

    #[must_use]
    pub fn of_spec(spec: &HostSpec, origin: impl Into<Origin>) -> Vec<Self> {
        let origin = origin.into();
        let found_later = |_: &Vm| Ok::<_, Infallible>(Ratio(0.0));
        let Ok(promises) = rtvirtio_capacity::Contract::all_of(spec, found_later);
        let with_promise = spec.vms().iter().zip(promises);
        with_promise.map(|(vm, promise)| Self::new(vm, spec, &origin, promise)).collect()
    }

    fn new(vm: &Vm, spec: &HostSpec, origin: &Origin, promise: rtvirtio_capacity::Contract) -> Self {
        let of_vm = |part: &Part| {
            let place = part.spec.vms.iter().position(|other| other.name == vm.name)?;
            let mut part = part.clone();
            part.spec.vms = vec![part.spec.vms.swap_remove(place)];
            part.disks = vec![part.disks.swap_remove(place)];
            Some(part)
        };
        // Serialising plain data cannot fail; were it to, all contracts would look alike and be
        // put in force anew by nothing but their removal.
        let text = serde_json::to_vec(&(&vm.reach, &vm.cpu)).unwrap_or_default();
        Self {
            vm: vm.clone(),
            id: digest(&text),
            origin: origin.clone(),
            overrides: None,
            parts: spec.parts().iter().filter_map(of_vm).collect(),
            promise,
        }
    }
}

/// Input of the plan: the devices of all contracts, with their VMs and tasks.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedHost {
    /// Digest of the devices, how the VMs are reached, their tasks and limits.
    pub id: String,
    /// The devices with their VMs, from all files.
    pub host: HostSpec,
}

impl PlannedHost {
    /// Joins all files, with the VMs that `keep` selects; `None` without any.
    pub(crate) fn join<'s>(
        specs: impl IntoIterator<Item = &'s HostSpec>,
        keep: impl Fn(&str) -> bool,
    ) -> Option<Self> {
        let host = HostSpec::joined(specs, keep)?.without_cpu();
        // Cannot fail, as for a contract.
        let text = serde_json::to_vec(&host).unwrap_or_default();
        Some(Self { id: digest(&text), host })
    }

    /// Spec of the running VMs alone; `None` without any.
    #[must_use]
    pub fn only(&self, running: &BTreeSet<String>) -> Option<HostSpec> {
        HostSpec::joined([&self.host], |vm| running.contains(vm))
    }
}

/// First bytes of the SHA-256, in hexadecimal.
fn digest(content: &[u8]) -> String {
    Sha256::digest(content).iter().take(ID_BYTES).map(|byte| format!("{byte:02x}")).collect()
}

/// A file, or a part of one, that is not used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ContractFault {
    /// File or metadata with the mistake.
    pub origin: Origin,
    /// Mistake, with line and remedy.
    pub why: String,
}

/// All contracts, and the files that are not used.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Desired {
    /// By file name, and in a file in its order; each VM once, and none that several contracts
    /// name.
    pub contracts: Vec<Contract>,
    /// Files that are not used. A file with a mistake concerns only itself: what was in force for
    /// its VMs is put back, as if it were not there, unless [`Desired::holds`] says that it stays.
    pub faults: Vec<ContractFault>,
    /// VMs of files that could be read before and cannot now, and VMs that several contracts name:
    /// what is in force for them stays.
    pub held: Vec<String>,
    /// Contracts may exist of which nothing is known yet: what is in force for any VM stays.
    pub is_incomplete: bool,
    /// A file, the directory or a domain's metadata could not be read since the service began: it
    /// may have the contract of any VM for which something is in force, and that stays too.
    pub has_unread: bool,
    /// Input of the plan; `None` without contracts.
    pub plant: Option<PlannedHost>,
}

impl Desired {
    #[must_use]
    pub fn contract_of(&self, vm: &str) -> Option<&Contract> {
        self.contracts.iter().find(|c| c.vm.name == vm)
    }

    /// Whether what is in force for a VM stays although no contract names it.
    #[must_use]
    pub fn holds(&self, vm: &str) -> bool {
        self.is_incomplete || self.has_unread || self.held.iter().any(|held| held == vm)
    }

    /// Whether contracts are hidden by a mistake, or not known yet.
    #[must_use]
    pub fn hides_contracts(&self) -> bool {
        self.is_incomplete || self.has_unread || !self.held.is_empty()
    }

    /// The contracts in the order in which they are admitted: the most critical first, then those
    /// that are in force already, then as the files have them. So a new contract takes nothing from
    /// an old one that is as critical.
    #[must_use]
    pub fn by_criticality(&self, in_force: impl Fn(&str) -> bool) -> Vec<&Contract> {
        let mut all: Vec<&Contract> = self.contracts.iter().collect();
        all.sort_by_key(|c| (std::cmp::Reverse(c.criticality()), !in_force(&c.vm.name)));
        all
    }
}

/// A directory of contract files, and further spec files.
#[derive(Debug)]
pub struct ContractFiles {
    dir: PathBuf,
    more: Vec<PathBuf>,
    reader: Reader,
    seen: Option<Vec<Stamp>>,
    /// Whether the directory could be read at the last call.
    is_whole: bool,
    /// VMs of each file when it was last valid.
    last_right: BTreeMap<PathBuf, Vec<String>>,
    /// Files, and the directory, unreadable since the first look: what an earlier process has put
    /// in force may be theirs.
    unread: BTreeSet<PathBuf>,
    /// Specs of the valid files.
    specs: Vec<HostSpec>,
}

impl ContractFiles {
    /// Contracts of every `*.toml` in `dir`, and of `more`.
    #[must_use]
    pub fn new(dir: impl Into<PathBuf>, more: Vec<PathBuf>) -> Self {
        Self {
            dir: dir.into(),
            more,
            reader: Reader::default(),
            seen: None,
            is_whole: true,
            last_right: BTreeMap::new(),
            unread: BTreeSet::new(),
            specs: Vec::new(),
        }
    }

    /// The contracts when a file has changed since the last call; `None` when none has, or when
    /// that is not known. Until the first answer they are incomplete.
    pub fn changed(&mut self) -> Option<Desired> {
        let known = self.seen.clone().filter(|_| self.is_whole);
        let asked = Asked { dir: self.dir.clone(), more: self.more.clone(), known };
        let Some(scan) = self.reader.read(&asked) else {
            let nothing = || Desired { is_incomplete: true, ..Desired::default() };
            return self.seen.is_none().then(nothing);
        };
        self.is_whole = scan.unread.is_empty();
        let files = scan.files?;
        let unread = |why: String| ContractFault { origin: self.dir.as_path().into(), why };
        let faults = scan.unread.into_iter().map(unread).collect();
        let desired = self.load(files, faults);
        self.seen = Some(scan.stamps);
        Some(desired)
    }

    /// Reason why the contracts are as last read, for clients.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        self.reader.problem()
    }

    /// Specs of the files that were valid at the last change.
    #[must_use]
    pub fn specs(&self) -> &[HostSpec] {
        &self.specs
    }

    fn load(&mut self, files: Vec<FileResult>, faults: Vec<ContractFault>) -> Desired {
        let mut desired = Desired { faults, ..Desired::default() };
        // Files that are read for the first time.
        let is_first = self.seen.is_none() || self.unread.contains(&self.dir);
        let mut unread = BTreeSet::new();
        // A directory that cannot be read hides files that are there.
        if !desired.faults.is_empty() {
            desired.held.extend(self.last_right.values().flatten().cloned());
            unread.extend(is_first.then(|| self.dir.clone()));
        }
        let mut right = if desired.faults.is_empty() { BTreeMap::new() } else { self.last_right.clone() };
        let (mut specs, mut named) = (Vec::new(), BTreeMap::<String, Vec<Origin>>::new());
        for (path, spec) in files {
            let fault = |why: String| ContractFault { origin: path.as_path().into(), why };
            let spec = match spec {
                Ok(spec) => spec,
                Err(why) => {
                    if let Some(vms) = self.last_right.get(&path) {
                        desired.held.extend(vms.iter().cloned());
                        right.insert(path.clone(), vms.clone());
                    } else if is_first || self.unread.contains(&path) {
                        unread.insert(path.clone());
                    }
                    desired.faults.push(fault(why));
                    continue;
                }
            };
            if spec.lab_kind().is_some() {
                desired.faults.push(fault(
                    "it has a lab's VMs: name running ones by domain, proxmox, qmp, cgroup or pid".to_owned(),
                ));
                continue;
            }
            right.insert(path.clone(), spec.vms().iter().map(|vm| vm.name.clone()).collect());
            specs.push(spec.clone());
            for contract in Contract::of_spec(&spec, path.as_path()) {
                named.entry(contract.vm.name.clone()).or_default().push(contract.origin.clone());
                desired.contracts.push(contract);
            }
        }
        for (vm, origins) in named.iter().filter(|(_, origins)| origins.len() > 1) {
            let places: Vec<_> = origins.iter().map(|at| (at.clone(), "keep one of them")).collect();
            desired.take_out(vm, &places);
        }
        desired.held.retain(|vm| !desired.contracts.iter().any(|c| c.vm.name == *vm));
        desired.has_unread = !unread.is_empty();
        (self.last_right, self.unread) = (right, unread);
        desired.plant = PlannedHost::join(&specs, |vm| desired.contract_of(vm).is_some());
        self.specs = specs;
        desired
    }
}

#[cfg(test)]
mod tests;
