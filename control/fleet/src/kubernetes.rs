//! A fleet as Kubernetes counts it: extended resources of nodes, requests of pods.

use std::collections::BTreeMap;

use rtvirtio_capacity::{Contract, Node, Permille, Scalars, WHOLE};
use serde::Serialize;

use crate::load::Fleet;

/// Domain of the extended resources.
const DOMAIN: &str = "rtvirtio.io";
/// Longest name of a resource behind its domain, in bytes.
const LONGEST_NAME: usize = 63;

/// What nodes and pods are to say.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Kubernetes {
    /// By host, the name of its node: the JSON patch (RFC 6902) of its `status`.
    pub patches: BTreeMap<String, Vec<Operation>>,
    /// By VM of a spec: requests and limits of its pod.
    pub requests: BTreeMap<String, BTreeMap<String, String>>,
}

/// One operation of a JSON patch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Operation {
    /// Always `add`, which also replaces.
    pub op: &'static str,
    /// Below `status.capacity`.
    pub path: String,
    /// A whole number, as text.
    pub value: String,
}

impl Kubernetes {
    /// Of a fleet. A node's capacity is what contracts in force leave of it that the fleet file
    /// names: they are in no pod, and Kubernetes has no word for reserved.
    #[must_use]
    pub fn of(fleet: &Fleet) -> Self {
        let mut taken: Vec<Scalars> = fleet.hosts.iter().map(|h| fleet.classes[h.class].nothing()).collect();
        for c in &fleet.contracts {
            if let Some(host) = c.host {
                let node = &fleet.classes[fleet.hosts[host].class];
                taken[host].add(&node.scalars(&fleet.kinds[c.kind]));
            }
        }
        let patch = |(host, taken): (&crate::FleetHost, &Scalars)| {
            let of = amounts(&fleet.classes[host.class], taken);
            let operation = |(name, p): (String, Permille)| Operation {
                op: "add",
                // A slash in a name is ~1 in a JSON pointer (RFC 6901).
                path: format!("/status/capacity/{DOMAIN}~1{name}"),
                value: WHOLE.0.saturating_sub(p.0).to_string(),
            };
            (host.name.clone(), of.into_iter().map(operation).collect())
        };
        let waiting = fleet.contracts.iter().filter(|c| c.host.is_none()).map(|c| &fleet.kinds[c.kind]);
        Self {
            patches: fleet.hosts.iter().zip(&taken).map(patch).collect(),
            requests: waiting.map(|kind| (kind.vm.clone(), requests(fleet, kind))).collect(),
        }
    }
}

/// The most over the kinds of hosts that could promise it: a pod has one request.
fn requests(fleet: &Fleet, kind: &Contract) -> BTreeMap<String, String> {
    let mut most: BTreeMap<String, u32> = BTreeMap::new();
    for node in &fleet.classes {
        let takes = node.scalars(kind);
        if !takes.fit() {
            continue;
        }
        for (name, p) in amounts(node, &takes).into_iter().filter(|(_, p)| p.0 > 0) {
            let of = most.entry(format!("{DOMAIN}/{name}")).or_default();
            *of = (*of).max(p.0);
        }
    }
    most.into_iter().map(|(name, n)| (name, n.to_string())).collect()
}

fn amounts(node: &Node, of: &Scalars) -> Vec<(String, Permille)> {
    let disks = node.disks.iter().map(|d| name("disk", d.name.as_deref())).zip(&of.disks);
    let networks = node.networks.iter().map(|n| name("net", n.name.as_deref())).zip(&of.networks);
    let all = disks.chain(networks).map(|(name, p)| (name, *p));
    all.chain([("cpu".to_owned(), of.cpu)]).collect()
}

/// A name as Kubernetes takes it: letters, digits, `-`, `_` and `.`, with a letter or digit at its
/// end.
fn name(kind: &str, of: Option<&str>) -> String {
    let Some(of) = of else { return kind.to_owned() };
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' };
    let all: String = format!("{kind}-{of}").chars().map(plain).take(LONGEST_NAME).collect();
    all.trim_end_matches(|c: char| !c.is_ascii_alphanumeric()).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_that_kubernetes_takes() {
        assert_eq!(name("disk", None), "disk");
        assert_eq!(name("disk", Some("fast ssd")), "disk-fast-ssd");
        assert_eq!(name("net", Some("field.")), "net-field");
        assert_eq!(name("net", Some(&"x".repeat(90))).len(), LONGEST_NAME);
    }
}
