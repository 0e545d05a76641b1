//! Rules for Pacemaker, made from contracts.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use rtvirtio_capacity::WHOLE;
use serde::Serialize;

use crate::publish::{Published, veto};
use crate::{ClusterContract, Crm, PacemakerError};

/// Preference of a VM for the node that it runs on, so that other VMs stay when room is made for
/// one.
const STICKINESS: u32 = 1000;
/// Interval of the agent's `monitor` operation.
const MONITOR: &str = "10s";

/// Utilization of a contract on any node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Demand {
    /// Id of the VM's resource.
    pub resource: String,
    /// Largest take over the nodes that could promise it, by utilization attribute.
    pub takes: BTreeMap<String, u32>,
}

/// Demand of each contract, the same for all nodes: Pacemaker has one utilization per resource, and
/// capacities by node. Every node has a capacity of 1000, so the largest demand over the nodes is
/// safe on each. A node that refuses the contract even alone does not count: its veto stands.
#[must_use]
pub fn demands(contracts: &[ClusterContract], published: &[Published]) -> Vec<Demand> {
    contracts
        .iter()
        .map(|of| {
            let mut takes: BTreeMap<String, u32> = BTreeMap::new();
            let here = published.iter().filter(|p| p.resource == of.resource);
            for (name, n) in here.flat_map(|p| &p.takes).filter(|(_, n)| **n <= WHOLE.0) {
                let most = takes.entry(name.clone()).or_default();
                *most = (*most).max(*n);
            }
            Demand { resource: of.resource.clone(), takes }
        })
        .collect()
}

/// XML of the contract's own resource, run by the agent: it starts after the VM, on the same node.
/// Its failure stops no VM. A failed stop is by default answered with fencing, which kills every VM
/// of the node, or without fencing with a block, after which this VM neither moves nor recovers. So
/// it is ignored: the failure is shown and counted, the contract counts as stopped, and its journal
/// stays for the next start on that node.
#[must_use]
pub fn primitive_xml(of: &ClusterContract) -> String {
    let (id, spec) = (contract_id(&of.resource), xml(&of.spec_file));
    format!(
        "<primitive id=\"{id}\" class=\"ocf\" provider=\"rtvirtio\" type=\"contract\">\
         <instance_attributes id=\"{id}-params\">\
         <nvpair id=\"{id}-params-spec\" name=\"spec\" value=\"{spec}\"/>\
         <nvpair id=\"{id}-params-resource\" name=\"resource\" value=\"{}\"/>\
         </instance_attributes>\
         <operations>\
         <op id=\"{id}-start\" name=\"start\" interval=\"0\" timeout=\"60s\"/>\
         <op id=\"{id}-stop\" name=\"stop\" interval=\"0\" timeout=\"60s\" on-fail=\"ignore\"/>\
         <op id=\"{id}-monitor\" name=\"monitor\" interval=\"{MONITOR}\" timeout=\"30s\"/>\
         </operations></primitive>",
        of.resource
    )
}

/// Veto, order and colocation of each contract, as the `constraints` section of a CIB.
#[must_use]
pub fn constraints_xml(contracts: &[ClusterContract]) -> String {
    let mut out = String::from("<constraints>");
    for of in contracts {
        let (vm, id, veto) = (&of.resource, contract_id(&of.resource), veto(&of.resource));
        // Writing to a String cannot fail.
        let _ = write!(
            out,
            "<rsc_location id=\"{veto}\" rsc=\"{vm}\">\
             <rule id=\"{veto}-rule\" score=\"-INFINITY\">\
             <expression id=\"{veto}-is\" attribute=\"{veto}\" operation=\"eq\" value=\"1\"/>\
             </rule></rsc_location>\
             <rsc_colocation id=\"{id}-with\" rsc=\"{id}\" with-rsc=\"{vm}\" score=\"INFINITY\"/>\
             <rsc_order id=\"{id}-after\" first=\"{vm}\" then=\"{id}\" kind=\"Mandatory\"/>"
        );
    }
    out + "</constraints>"
}

/// Utilization that `ocf:heartbeat:VirtualDomain` adds to its resource by itself, unless the
/// parameter `autoset_utilization_*` is false.
const AUTOSET: [&str; 3] = ["cpu", "host_memory", "hv_memory"];

/// Resources of a CIB that could run on no node once utilization counts, in words: they take an
/// attribute for which no node has a capacity, and Pacemaker takes that for 0.
///
/// # Errors
/// The text is not a valid CIB.
pub fn without_capacity(cib: &str) -> Result<Vec<String>, String> {
    let cib = roxmltree::Document::parse(cib).map_err(|e| e.to_string())?;
    let values = |of: roxmltree::Node<'_, '_>, set: &str| -> BTreeMap<String, String> {
        let sets = of.children().filter(|n| n.has_tag_name(set)).collect::<Vec<_>>();
        let pairs = sets.into_iter().flat_map(|set| set.children().filter(|n| n.has_tag_name("nvpair")));
        pairs
            .filter_map(|n| Some((n.attribute("name")?.to_owned(), n.attribute("value")?.to_owned())))
            .collect()
    };
    let all = |tag: &'static str| cib.descendants().filter(move |n| n.has_tag_name(tag));
    let nodes: Vec<BTreeMap<String, String>> = all("node").map(|n| values(n, "utilization")).collect();
    let mut found = Vec::new();
    for resource in all("primitive") {
        let id = resource.attribute("id").unwrap_or_default();
        let mut takes: Vec<String> = values(resource, "utilization").into_keys().collect();
        // Attributes of this project are published by each node that has them.
        takes.retain(|name| !name.starts_with("rtvirtio-"));
        let of_heartbeat = resource.attribute("provider") == Some("heartbeat")
            && resource.attribute("type") == Some("VirtualDomain");
        if of_heartbeat {
            let parameters = values(resource, "instance_attributes");
            let off = |name: &str| {
                let value = parameters.get(&format!("autoset_utilization_{name}")).map(|v| v.to_lowercase());
                value.is_some_and(|v| ["false", "no", "off", "n", "0"].contains(&v.as_str()))
            };
            takes.extend(AUTOSET.iter().filter(|name| !off(name)).map(|name| (*name).to_owned()));
        }
        takes.sort();
        takes.dedup();
        for name in takes {
            if !nodes.iter().any(|has| has.contains_key(&name)) {
                found.push(format!("{id} takes {name}"));
            }
        }
    }
    Ok(found)
}

/// Writes cluster properties, the agent's resources, constraints, demands and priorities into the
/// CIB. Entries of the same id are replaced, all others left.
///
/// # Errors
/// Those of Pacemaker's tools, as for a VM that is no resource yet.
pub fn write_constraints(
    crm: Crm<'_>,
    contracts: &[ClusterContract],
    demands: &[Demand],
) -> Result<(), PacemakerError> {
    // From then on utilization counts, even that of unrelated resources.
    let text = crm.run("cibadmin", &["--query"])?;
    let bad =
        |reason: String| PacemakerError::Output { command: "cibadmin --query".to_owned(), text: reason };
    let stranded = without_capacity(&text).map_err(bad)?;
    if !stranded.is_empty() {
        return Err(PacemakerError::NoCapacity { what: stranded.join("; ") });
    }
    // Without `placement-strategy` utilization is ignored. A contract that fails to start on a node
    // is tried again there: its VM runs.
    for (name, value) in [("placement-strategy", "balanced"), ("start-failure-is-fatal", "false")] {
        crm.run("crm_attribute", &["--type", "crm_config", "--name", name, "--update", value])?;
    }
    for (of, demand) in contracts.iter().zip(demands) {
        let vm = of.resource.as_str();
        let (priority, stickiness) = (of.priority.to_string(), STICKINESS.to_string());
        for (name, value) in [("priority", &priority), ("resource-stickiness", &stickiness)] {
            crm.run("crm_resource", &["--resource", vm, "--meta", "--set-parameter", name, "-v", value])?;
        }
        for (name, n) in &demand.takes {
            let n = n.to_string();
            let args = ["--resource", vm, "--utilization", "--set-parameter", name, "-v", &n];
            crm.run("crm_resource", &args)?;
        }
    }
    let modify = |section: &str, xml: &str| {
        crm.run("cibadmin", &["--modify", "--allow-create", "-o", section, "--xml-text", xml]).map(|_| ())
    };
    for of in contracts {
        modify("resources", &primitive_xml(of))?;
    }
    modify("constraints", &constraints_xml(contracts))
}

fn contract_id(resource: &str) -> String {
    format!("{resource}-contract")
}

/// Escapes a path for an XML attribute.
fn xml(path: &Path) -> String {
    let text = path.display().to_string();
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
