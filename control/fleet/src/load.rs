//! A fleet read from its files.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;

use rtvirtio_capacity::{Contract, Node, OnDisk, Resource};
use rtvirtio_kernel::trusted::{CONFIG_LIMIT, read_config_text, read_named_text};
use rtvirtio_spec::{Criticality, HostHandle, HostSpec, Reach, Vm};

use crate::engine_names::{kubernetes_name, openstack_class};
use crate::file::{ContractsEntry, FleetError, FleetFile, HostEntry, Share};

/// Limit of hosts, and of contracts: more take minutes and gigabytes.
const MAX_ENTRIES: u64 = 500_000;

/// Hosts and contracts, as read by [`load`].
#[derive(Clone, Debug)]
pub struct Fleet {
    /// Kinds of hosts, with a class for each `[[host]]` entry.
    pub classes: Vec<Node>,
    /// Name of the entry behind each class.
    pub class_names: Vec<String>,
    /// Hosts, in the file's order.
    pub hosts: Vec<FleetHost>,
    /// Kinds of contracts: all of a kind ask for the same.
    pub kinds: Vec<Contract>,
    /// Contracts in force, then those without a host.
    pub contracts: Vec<FleetContract>,
    /// Assumptions behind the numbers: doubts of profiles, disks that were declared and not
    /// measured.
    pub doubts: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FleetHost {
    /// Unique name in the fleet.
    pub name: String,
    /// Index into `Fleet::classes`.
    pub class: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FleetContract {
    /// Unique name: `HOST/VM` of one in force, else `VM` or `VM-N`.
    pub name: String,
    /// Index into `Fleet::kinds`.
    pub kind: usize,
    /// The higher, the earlier it is placed.
    pub priority: i32,
    /// Index of the host where it is in force; `None` for one to be placed.
    pub host: Option<usize>,
    /// VMID in Proxmox VE, where its spec has one; `None` for copies made by `count`.
    pub proxmox: Option<u32>,
}

/// Keys of a VM's spec that are no part of its contract.
struct Meta {
    criticality: Criticality,
    proxmox: Option<u32>,
}

/// Reads a fleet file and what it names: regular files, or links to some.
///
/// # Errors
/// The first that cannot be read.
pub fn load(path: &Path) -> Result<Fleet, FleetError> {
    parse(path, &read_config_text(path, CONFIG_LIMIT).map_err(unread(path))?)
}

/// Like [`load`], for a file named on the command line, which may be a pipe such as `/dev/stdin`.
///
/// # Errors
/// As of [`load`].
pub fn load_named(path: &Path) -> Result<Fleet, FleetError> {
    parse(path, &read_named_text(path, CONFIG_LIMIT).map_err(unread(path))?)
}

fn parse(path: &Path, text: &str) -> Result<Fleet, FleetError> {
    let form = |message: String| FleetError::Form { path: path.to_owned(), message };
    let file: FleetFile = toml::from_str(text).map_err(|e| form(e.to_string().trim_end().to_owned()))?;
    let dir = path.parent().unwrap_or(Path::new(""));
    let mut fleet = Fleet {
        classes: Vec::new(),
        class_names: Vec::new(),
        hosts: Vec::new(),
        kinds: Vec::new(),
        contracts: Vec::new(),
        doubts: Vec::new(),
    };
    if file.host.is_empty() {
        return Err(form("it has no [[host]]".to_owned()));
    }
    let count = |count: Option<u32>| u64::from(count.unwrap_or(1));
    if file.host.iter().map(|h| count(h.count)).sum::<u64>() > MAX_ENTRIES {
        return Err(form(format!("it has more than {MAX_ENTRIES} hosts")));
    }
    let mut names = BTreeSet::new();
    for entry in &file.host {
        let first = fleet.hosts.len();
        fleet.add_hosts(entry, dir, &form)?;
        for host in &fleet.hosts[first..] {
            if !names.insert(host.name.clone()) {
                return Err(form(format!("there are two hosts {}: give each a name of its own", host.name)));
            }
        }
    }
    for entry in &file.contracts {
        fleet.add_contracts(entry, dir, &form)?;
    }
    fleet.refuse_two_of_one_name(&form)?;
    fleet.refuse_resources_of_one_name(&form)?;
    fleet.choose_shapes();
    Ok(fleet)
}

type Form<'f> = dyn Fn(String) -> FleetError + 'f;

impl Fleet {
    fn add_hosts(&mut self, entry: &HostEntry, dir: &Path, form: &Form<'_>) -> Result<(), FleetError> {
        let name = &entry.name;
        let spec = entry.spec.as_ref().map(|spec| rtvirtio_files::load_spec(dir.join(spec))).transpose()?;
        let node = entry.node(spec.as_ref(), dir, &mut self.doubts)?;
        let class = self.classes.len();
        self.classes.push(node);
        self.class_names.push(name.clone());
        match entry.count {
            None => self.hosts.push(FleetHost { name: name.clone(), class }),
            Some(n) => {
                if entry.spec.is_some() {
                    return Err(form(format!(
                        "host {name}: `spec` names the VMs of one host, and `count` makes {n} of it: give each a [[host]]"
                    )));
                }
                let named = |i| FleetHost { name: format!("{name}-{i}"), class };
                self.hosts.extend((1..=n).map(named));
            }
        }
        let (Some(path), Some(spec)) = (&entry.spec, &spec) else { return Ok(()) };
        let host = self.hosts.len() - 1;
        for (contract, meta) in contracts(spec, &dir.join(path), &entry.budgets)? {
            let full = format!("{name}/{}", contract.vm);
            self.add(full, contract, &meta, entry.priority, Some(host));
        }
        Ok(())
    }

    fn add_contracts(
        &mut self,
        entry: &ContractsEntry,
        dir: &Path,
        form: &Form<'_>,
    ) -> Result<(), FleetError> {
        let path = dir.join(&entry.spec);
        let all = contracts(&rtvirtio_files::load_spec(&path)?, &path, &entry.budgets)?;
        let new = all.len() as u64 * u64::from(entry.count.unwrap_or(1));
        if self.contracts.len() as u64 + new > MAX_ENTRIES {
            return Err(form(format!("it has more than {MAX_ENTRIES} contracts")));
        }
        for (contract, meta) in all {
            let vm = contract.vm.clone();
            match entry.count {
                None => self.add(vm, contract, &meta, entry.priority, None),
                Some(n) => {
                    let kind = self.add_kind(contract);
                    let priority = entry.priority.unwrap_or(meta.criticality.priority());
                    let named = |i| FleetContract {
                        name: format!("{vm}-{i}"),
                        kind,
                        priority,
                        host: None,
                        proxmox: None,
                    };
                    self.contracts.extend((1..=n).map(named));
                }
            }
        }
        Ok(())
    }

    /// Requests are published by VM name: of two equal names only one would be published.
    fn refuse_two_of_one_name(&self, form: &Form<'_>) -> Result<(), FleetError> {
        let twice = |name: &str| {
            form(format!(
                "there are two contracts of a VM {name}: give each VM a name of its own in its spec, or `count` where they are alike"
            ))
        };
        // Copies made by `count` share one kind, and have distinct names.
        let mut kinds = BTreeSet::new();
        let waiting: BTreeSet<usize> =
            self.contracts.iter().filter(|c| c.host.is_none()).map(|c| c.kind).collect();
        for kind in waiting {
            if !kinds.insert(self.kinds[kind].vm.as_str()) {
                return Err(twice(&self.kinds[kind].vm));
            }
        }
        let mut names = BTreeSet::new();
        match self.contracts.iter().find(|c| !names.insert(c.name.as_str())) {
            Some(second) => Err(twice(&second.name)),
            None => Ok(()),
        }
    }

    /// Cluster engines know resources by plainer names: of two with one name only one would count.
    fn refuse_resources_of_one_name(&self, form: &Form<'_>) -> Result<(), FleetError> {
        for engine in ["OpenStack", "Kubernetes"] {
            let mut known: BTreeMap<String, Resource<'_>> = BTreeMap::new();
            for resource in self.classes.iter().flat_map(devices) {
                let is_openstack = engine == "OpenStack";
                let plain = if is_openstack { openstack_class(resource) } else { kubernetes_name(resource) };
                let first = *known.entry(plain.clone()).or_insert(resource);
                if first != resource {
                    let [first, second] = [first, resource].map(|r| match r {
                        Resource::Disk(Some(name)) | Resource::Network(Some(name)) => name,
                        _ => "",
                    });
                    return Err(form(format!(
                        "{first:?} and {second:?} are both {plain} in {engine}: rename one of them"
                    )));
                }
            }
        }
        Ok(())
    }

    fn add_kind(&mut self, contract: Contract) -> usize {
        self.kinds.push(contract);
        self.kinds.len() - 1
    }

    /// Adds a contract; without `priority` its VM's criticality gives the priority.
    fn add(
        &mut self,
        name: String,
        contract: Contract,
        meta: &Meta,
        priority: Option<i32>,
        host: Option<usize>,
    ) {
        let kind = self.add_kind(contract);
        let priority = priority.unwrap_or(meta.criticality.priority());
        self.contracts.push(FleetContract { name, kind, priority, host, proxmox: meta.proxmox });
    }

    /// Chooses for each disk of each class the shape under which these contracts take least.
    fn choose_shapes(&mut self) {
        for node in &mut self.classes {
            let only = node.disks.len() == 1;
            for i in 0..node.disks.len() {
                let name = node.disks[i].name.clone();
                let here = |d: &&OnDisk| d.device == name || (only && d.device.is_none());
                let on: Vec<&OnDisk> = self.kinds.iter().flat_map(|k| &k.disks).filter(here).collect();
                node.disks[i].choose(&on);
            }
        }
    }
}

/// Disks and networks of a kind of host.
fn devices(node: &Node) -> impl Iterator<Item = Resource<'_>> {
    let disks = node.disks.iter().map(|d| Resource::Disk(d.name.as_deref()));
    disks.chain(node.networks.iter().map(|n| Resource::Network(n.name.as_deref())))
}

fn unread(path: &Path) -> impl FnOnce(io::Error) -> FleetError + '_ {
    |source| FleetError::Read { path: path.to_owned(), source }
}

/// The contract of each VM of a spec, with what else the spec says of it.
fn contracts(
    host: &HostSpec,
    spec: &Path,
    budgets: &BTreeMap<String, Share>,
) -> Result<Vec<(Contract, Meta)>, FleetError> {
    let all = Contract::all_of(host, |vm| {
        let said = budgets.get(&vm.name).map(|share| share.0);
        said.ok_or_else(|| FleetError::Budget { spec: spec.to_owned(), vm: vm.name.clone() })
    })?;
    let meta = |contract: Contract| {
        let vm = host.vms().iter().find(|vm| vm.name == contract.vm);
        let criticality = vm.map(|vm| vm.criticality).unwrap_or_default();
        (contract, Meta { criticality, proxmox: vm.and_then(proxmox_number) })
    };
    Ok(all.into_iter().map(meta).collect())
}

fn proxmox_number(vm: &Vm) -> Option<u32> {
    match &vm.reach {
        Reach::Existing { host: HostHandle::Proxmox(id), .. } => Some(*id),
        _ => None,
    }
}
