//! Contracts that this node could promise.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use rtvirtio_apply::{Machine, NoGuests};
use rtvirtio_capacity::{Contract, Disk, Network, Node, OnDisk, Permille, Resource, tightest};
use rtvirtio_cpu::{choose, group_name, probe, room_load};
use rtvirtio_kernel::Root;
use rtvirtio_spec::{Device, Part, Uplink, Vm, dashed};
use rtvirtio_units::Ratio;
use rtvirtio_workflow::device_windows::DeviceWindows;
use rtvirtio_workflow::plan::load_profile;
use rtvirtio_workflow::scopes::in_force_beside;
use rtvirtio_workflow::{Dirs, one_line, started};
use serde::Serialize;

use crate::{ClusterContract, PacemakerError, marker};

/// Utilization attribute of the share of each CPU.
pub(crate) const CPU: &str = "rtvirtio-cpu";
/// Beginning of the utilization attributes of disks.
const DISK: &str = "rtvirtio-disk-";
/// Beginning of the utilization attributes of networks.
const NET: &str = "rtvirtio-net-";
/// The kernel's network interfaces.
const INTERFACES: &str = "/sys/class/net";

/// Resources of a node, and its answer for each contract.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NodeAnswer {
    /// Utilization attributes that the node has, each with a capacity of 1000.
    pub resources: Vec<String>,
    /// The contracts, in the file's order.
    pub contracts: Vec<ResourceAnswer>,
}

/// Answer of this node for one contract.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ResourceAnswer {
    /// Name of the VM's resource.
    pub resource: String,
    /// Demand on this node by utilization attribute, in thousandths.
    pub takes: BTreeMap<String, u32>,
    /// Whether it is in force here. Then nothing vetoes it: an over-committed node stops no VM.
    pub in_force: bool,
    /// Reason why the node cannot promise it beside the contracts in force; `None` when it can.
    pub refused: Option<String>,
}

/// Directories with the journal of a resource's contract.
pub(crate) fn contract_dirs(dirs: &Dirs, resource: &str) -> Dirs {
    rtvirtio_workflow::holders::resource_dirs(dirs, resource)
}

/// Whether a resource's name is usable as the directory of its journal: `rtvirtiod` has others next
/// to it.
pub(crate) fn has_directory(resource: &str) -> bool {
    let is_name = !resource.is_empty() && !resource.starts_with('.') && !resource.contains('/');
    is_name && !["shared", "plan"].contains(&resource) && !resource.starts_with("vm-")
}

/// Name of a disk's utilization attribute: the last component of the device's path, as the same
/// spec is read on every node.
fn disk_attribute(device: &Device) -> String {
    let path = match device {
        Device::Path(path) | Device::File { path, .. } => path.clone(),
        Device::Twin { profile, .. } => PathBuf::from(profile),
    };
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    attribute(DISK, &name)
}

/// Name of a network's utilization attribute: that of its interface, where it has one to itself.
/// Networks of one name in several specs are one link.
fn network_attribute(network: &rtvirtio_spec::Network) -> String {
    match &network.uplink {
        Uplink::Packet { interface } => attribute(NET, interface),
        Uplink::Tap => attribute(NET, network.name()),
    }
}

fn attribute(kind: &str, name: &str) -> String {
    format!("{kind}{}", dashed(name))
}

/// Demand of a resource's VMs, or why it cannot be judged here.
type Asked = Result<Vec<Contract>, String>;

/// Slowdown against the profile from which on a disk promises nothing. Bursts of requests and the
/// kernel's ticks keep a healthy disk below 4.
const SLOW: f64 = 5.0;

/// Slowdown of disks against their profiles, by path as in the specs.
pub type SlowDisks = BTreeMap<String, f64>;

/// Watches the latency of disks with I/O targets. Load of others on the disk counts too, as the
/// contract would meet it.
#[derive(Debug, Default)]
pub struct DiskWatch(DeviceWindows);

impl DiskWatch {
    /// Disks that became slow since the last call; empty at the first call and for disks with few
    /// requests.
    pub fn sample(&mut self, contracts: &[ClusterContract], dirs: &Dirs) -> SlowDisks {
        let parts = contracts.iter().flat_map(|of| of.spec.parts());
        let promised = parts.filter(|part| has_targets(part));
        let paths = promised.filter_map(|part| match &part.spec.device {
            Device::Path(path) => Some(path.clone()),
            Device::File { .. } | Device::Twin { .. } => None,
        });
        let mut slow = self.0.sample(&paths.collect(), true, &Root::default(), dirs, Instant::now());
        slow.retain(|_, times| *times >= SLOW);
        slow
    }
}

/// Answer of this node for each contract, beside those in force on it. Reads profiles and the
/// kernel's grants; changes nothing. A slow disk promises nothing.
///
/// # Errors
/// When the kernel's grants or a journal cannot be read. A contract that cannot be judged, as
/// without a profile of the disk, is refused with the reason.
pub fn survey(
    contracts: &[ClusterContract],
    dirs: &Dirs,
    slow: &SlowDisks,
) -> Result<NodeAnswer, PacemakerError> {
    let in_force: Vec<bool> =
        contracts.iter().map(|c| is_in_force(dirs, &c.resource)).collect::<Result<_, _>>()?;
    let mut node = Node { disks: Vec::new(), networks: Vec::new(), cpu: cpu(contracts, &in_force, dirs)? };
    let asked: Vec<Asked> = contracts.iter().map(|c| asked(c, &mut node, dirs)).collect();
    for i in 0..node.disks.len() {
        let name = node.disks[i].name.clone();
        let all = asked.iter().flatten().flatten().flat_map(|c| &c.disks);
        let on: Vec<&OnDisk> = all.filter(|d| d.device == name).collect();
        node.disks[i].choose(&on);
    }
    let answer = |i: usize| {
        let others = (0..contracts.len()).filter(|o| *o != i && in_force[*o]);
        // The demand of a contract that cannot be judged is unknown, not zero.
        let unknown = others.clone().find_map(|o| {
            let why = asked[o].as_ref().err()?;
            Some(format!("what {}, in force here, takes is not known: {why}", contracts[o].resource))
        });
        let others: Vec<&Contract> = others.filter_map(|o| asked[o].as_ref().ok()).flatten().collect();
        let (takes, refused) = match &asked[i] {
            Ok(asked) => {
                let slow = on_slow_disk(&contracts[i], slow);
                (takes(&node, asked), slow.or(unknown).or_else(|| refused(&node, &others, asked)))
            }
            Err(why) => (BTreeMap::new(), Some(why.clone())),
        };
        ResourceAnswer { resource: contracts[i].resource.clone(), takes, in_force: in_force[i], refused }
    };
    let disks = node.disks.iter().filter_map(|d| d.name.clone());
    let networks = node.networks.iter().filter_map(|n| n.name.clone());
    let resources = disks.chain(networks).chain([CPU.to_owned()]).collect();
    Ok(NodeAnswer { resources, contracts: (0..contracts.len()).map(answer).collect() })
}

/// Whether a VM of the part has I/O targets on its disk.
fn has_targets(part: &Part) -> bool {
    part.spec.vms.iter().any(|vm| tightest(vm).is_some())
}

fn on_slow_disk(of: &ClusterContract, slow: &SlowDisks) -> Option<String> {
    of.spec.parts().iter().filter(|part| has_targets(part)).find_map(|part| {
        let Device::Path(path) = &part.spec.device else { return None };
        let times = slow.get(&path.display().to_string())?;
        Some(format!(
            "{} takes {times:.0} times as long as when it was measured: find the cause, or measure it again",
            path.display()
        ))
    })
}

/// Reason of the first of a resource's VMs that is refused beside the others; `None` if all fit.
fn refused(node: &Node, others: &[&Contract], asked: &[Contract]) -> Option<String> {
    let mut beside = others.to_vec();
    for contract in asked {
        if let Some(why) = rtvirtio_capacity::admit(node, &beside, contract).refused {
            return Some(format!("{}: {why}", contract.vm));
        }
        beside.push(contract);
    }
    None
}

fn takes(node: &Node, asked: &[Contract]) -> BTreeMap<String, u32> {
    let mut all: BTreeMap<String, Permille> = BTreeMap::new();
    for contract in asked {
        let of = node.scalars(contract);
        for (resource, p) in node.by_resource(&of) {
            let name = match resource {
                Resource::Disk(name) | Resource::Network(name) => name.unwrap_or_default(),
                Resource::Cpu => CPU,
            };
            let sum = all.entry(name.to_owned()).or_default();
            *sum = *sum + p;
        }
    }
    all.into_iter().filter(|(_, p)| p.0 > 0).map(|(name, p)| (name, p.0)).collect()
}

/// Demand of a resource's VMs; adds the disks and networks they need to the node.
fn asked(of: &ClusterContract, node: &mut Node, dirs: &Dirs) -> Asked {
    let budget = |vm: &Vm| -> Result<Ratio, String> {
        Err(format!(
            "{}: it declares requests and a deadline, whose budget differs from node to node: write cpu = {{ budget = ..., period = ... }}",
            vm.name
        ))
    };
    let mut all = Contract::all_of(&of.spec, budget)?;
    for part in of.spec.parts() {
        let name = disk_attribute(&part.spec.device);
        if has_targets(part) && !node.disks.iter().any(|d| d.name.as_deref() == Some(&name)) {
            node.disks.push(disk(&name, part, dirs)?);
        }
        let here = all.iter_mut().flat_map(|c| &mut c.disks).filter(|d| d.device == part.name);
        here.for_each(|d| d.device = Some(name.clone()));
    }
    for network in of.spec.networks() {
        let name = network_attribute(network);
        let parts = all.iter_mut().flat_map(|c| &mut c.networks);
        let here: Vec<_> = parts.filter(|n| n.network == network.name).collect();
        if here.is_empty() {
            continue;
        }
        add_network(node, network, &name)?;
        here.into_iter().for_each(|n| n.network = Some(name.clone()));
    }
    // VMs without targets need no disk.
    all.iter_mut().for_each(|c| c.disks.retain(|d| tightest(&d.vm).is_some()));
    Ok(all)
}

/// Adds a network to the node unless it is there.
fn add_network(node: &mut Node, network: &rtvirtio_spec::Network, name: &str) -> Result<(), String> {
    if let Uplink::Packet { interface } = &network.uplink {
        let there = Path::new(INTERFACES).join(interface);
        if !there.exists() {
            return Err(format!("network {}: this node has no interface {interface}", network.name()));
        }
    }
    let new = Network::new(Some(name.to_owned()), network.link, network.mtu, None);
    match node.networks.iter().find(|n| n.name.as_deref() == Some(name)) {
        None => node.networks.push(new),
        Some(known) if *known == new => {}
        Some(_) => {
            return Err(format!(
                "network {}: another spec of the cluster file declares it with another `link` or `mtu`: give all the same",
                network.name()
            ));
        }
    }
    Ok(())
}

fn disk(name: &str, part: &Part, dirs: &Dirs) -> Result<Disk, String> {
    let profile = load_profile(&part.spec, None, dirs).map_err(|e| one_line(&e))?;
    Disk::measured(Some(name.to_owned()), &profile).map_err(|e| one_line(&e))
}

/// Share of each CPU that the kernel grants contracts, less what others have taken. Contracts in
/// force here count by their budgets, not by those of their groups or the groups above.
fn cpu(contracts: &[ClusterContract], in_force: &[bool], dirs: &Dirs) -> Result<Ratio, PacemakerError> {
    let root = Root::default();
    let probe = probe(&root)?;
    let Some(found) = choose(&probe, None, false) else { return Ok(Ratio(0.0)) };
    let mut grant = found.grant.clone();
    let vms: Vec<&str> = contracts.iter().flat_map(|c| c.spec.vms()).map(|vm| vm.name.as_str()).collect();
    grant.taken.retain(|load| !vms.iter().any(|vm| load.name == format!("cgroup {}", group_name(vm))));
    for of in in_force_beside(dirs, "")?.iter().filter(|of| vms.contains(&of.vm.as_str())) {
        let Some(group) = of.group.as_ref().filter(|_| of.backend == found.backend) else { continue };
        let Some(room) =
            room_load(&root, &probe, group, &of.contract).map_err(rtvirtio_workflow::Error::from)?
        else {
            continue;
        };
        for load in grant.taken.iter_mut().filter(|load| load.name == room.name) {
            load.share.0 = (load.share.0 - room.share.0).max(0.0);
        }
    }
    for (contract, _) in contracts.iter().zip(in_force).filter(|(_, in_force)| **in_force) {
        let vms = contract.spec.vms().iter().filter(|vm| vm.cpu.need.is_some());
        let vms: Vec<&str> = vms.map(|vm| vm.name.as_str()).collect();
        grant.leave_out(&started::processes(&contract_dirs(dirs, &contract.resource).state, &vms)?);
    }
    Ok(Ratio(grant.free()))
}

/// Whether the agent has applied this contract here, for a VM that has not ended since.
fn is_in_force(dirs: &Dirs, resource: &str) -> Result<bool, PacemakerError> {
    let own = contract_dirs(dirs, resource);
    let root = Root::default();
    // Whether there is a journal of this boot needs no answer of a guest.
    match rtvirtio_apply::status(&own.state, &Machine::new(&root, &NoGuests))? {
        Some(status) => Ok(!status.rebooted && started::ended(&own.state)?.is_empty()),
        None => marker::is_in_force(&own),
    }
}
