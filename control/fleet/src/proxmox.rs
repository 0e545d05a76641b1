//! A fleet as the HA manager of Proxmox VE takes it: the nodes of each VM, by priority.
//!
//! The HA manager starts a resource on the online node of the highest priority, and on a node that
//! is not named only where none of the named ones is online. So with the host of a contract first
//! and its takeover host second, the loss of any single node leads to the placement found by
//! admission.

use std::collections::BTreeMap;

use serde::{Serialize, Serializer};

use crate::assess::{MATRIX_HOSTS, Placed, placed, takeovers};
use crate::load::{Fleet, FleetContract};

/// Priority of the contract's own host.
const HOME: u32 = 3;
/// Priority of the host that takes the contract over when its own is lost.
const TAKEOVER: u32 = 2;
/// Priority of other hosts with room for it.
const ROOM: u32 = 1;

/// Versions of Proxmox VE with different commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxmoxVersion {
    /// 8, with HA groups.
    V8,
    /// 9, with node affinity rules.
    V9,
}

impl Serialize for ProxmoxVersion {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u32(match self {
            Self::V8 => 8,
            Self::V9 => 9,
        })
    }
}

/// Rules and commands for the HA manager.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Proxmox {
    /// Version that the commands are for.
    pub version: ProxmoxVersion,
    /// The rules, in the order of the fleet file's contracts.
    pub rules: Vec<HaRule>,
    /// Contracts without a rule.
    pub without: Vec<Without>,
}

/// Node priorities of one VM.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HaRule {
    pub contract: String,
    /// Name of the rule, or the group.
    pub name: String,
    /// HA resource, as `vm:VMID`.
    pub resource: String,
    /// Nodes, by falling priority.
    pub nodes: Vec<HaNode>,
    /// `ha-manager` commands that set the rule.
    pub commands: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HaNode {
    /// Name of the node and host.
    pub node: String,
    /// 3 where the contract is or would be placed, 2 where it goes when that node is lost, 1 where
    /// there is room for it too.
    pub priority: u32,
}

/// A contract without a rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Without {
    pub contract: String,
    /// Reason for the missing rule.
    pub why: NoRule,
}

/// Reasons why a contract has no rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NoRule {
    /// The spec has no `proxmox = NUMBER`, or the contract is one of several copies.
    NoNumber,
    /// No host admits it.
    NoHost,
}

/// Errors of a fleet that cannot be one of Proxmox VE.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProxmoxError {
    /// The host's name is not valid for a node.
    #[error("host {host} is no name of a node of Proxmox VE: letters, digits and hyphens in between")]
    Node {
        /// Host's name in the fleet file.
        host: String,
    },
    /// Two contracts name the same VM.
    #[error("VM {id} of Proxmox VE has two contracts, {first} and {second}")]
    Twice {
        /// VMID in Proxmox VE.
        id: u32,
        /// Name of the earlier contract.
        first: String,
        /// Name of the later contract.
        second: String,
    },
}

impl Proxmox {
    /// Rules of a fleet whose hosts have the names of the nodes. `cancelled` ends it early.
    pub fn from_fleet(
        fleet: &Fleet,
        version: ProxmoxVersion,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Self, ProxmoxError> {
        if let Some(host) = fleet.hosts.iter().find(|h| !is_node_name(&h.name)) {
            return Err(ProxmoxError::Node { host: host.name.clone() });
        }
        let mut placed = placed(fleet);
        let takeovers = takeovers(fleet, &mut placed, cancelled);
        let mut of = Self { version, rules: Vec::new(), without: Vec::new() };
        let mut seen: BTreeMap<u32, &str> = BTreeMap::new();
        for (i, contract) in fleet.contracts.iter().enumerate() {
            if cancelled() {
                break;
            }
            let name = &contract.name;
            let mut no_rule = |why| of.without.push(Without { contract: name.clone(), why });
            let Some(id) = contract.proxmox else {
                no_rule(NoRule::NoNumber);
                continue;
            };
            if let Some(first) = seen.insert(id, name) {
                let (first, second) = (first.to_owned(), name.clone());
                return Err(ProxmoxError::Twice { id, first, second });
            }
            let Some(home) = placed.at[i] else {
                no_rule(NoRule::NoHost);
                continue;
            };
            let nodes = nodes(fleet, &placed, contract, home, takeovers[i]);
            of.rules.push(rule(contract, id, nodes, version));
        }
        Ok(of)
    }
}

fn nodes(
    fleet: &Fleet,
    placed: &Placed,
    contract: &FleetContract,
    home: usize,
    takeover: Option<usize>,
) -> Vec<HaNode> {
    let node = |host: usize, priority| HaNode { node: fleet.hosts[host].name.clone(), priority };
    let mut nodes = vec![node(home, HOME)];
    nodes.extend(takeover.map(|host| node(host, TAKEOVER)));
    // Each contract is tested against all hosts.
    if fleet.hosts.len() <= MATRIX_HOSTS {
        let others = (0..fleet.hosts.len()).filter(|h| *h != home && Some(*h) != takeover);
        let roomy = others.filter(|h| placed.cluster.admits(*h, contract.kind));
        nodes.extend(roomy.map(|host| node(host, ROOM)));
    }
    nodes
}

fn rule(contract: &FleetContract, id: u32, nodes: Vec<HaNode>, version: ProxmoxVersion) -> HaRule {
    let (name, resource) = (format!("rtvirtio-{id}"), format!("vm:{id}"));
    let list: Vec<String> = nodes.iter().map(|n| format!("{}:{}", n.node, n.priority)).collect();
    let list = list.join(",");
    let commands = match version {
        ProxmoxVersion::V8 => vec![
            format!("ha-manager groupadd {name} --nodes {list}"),
            format!("ha-manager set {resource} --group {name}"),
        ],
        ProxmoxVersion::V9 => {
            vec![format!("ha-manager rules add node-affinity {name} --resources {resource} --nodes {list}")]
        }
    };
    HaRule { contract: contract.name.clone(), name, resource, nodes, commands }
}

/// Same check as `pve_verify_ha_node` of pve-ha-manager's `PVE::HA::Tools`.
fn is_node_name(name: &str) -> bool {
    let is_hyphen_inside = !name.starts_with('-') && !name.ends_with('-');
    !name.is_empty() && is_hyphen_inside && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_nodes_are_those_that_the_ha_manager_takes() {
        for name in ["a", "pve1", "pve-1", "1a"] {
            assert!(is_node_name(name), "{name}");
        }
        for name in ["", "-a", "a-", "pve.1", "a:1", "a,b", "a b", "\u{e4}"] {
            assert!(!is_node_name(name), "{name}");
        }
    }
}
