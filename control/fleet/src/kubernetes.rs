//! A fleet as Kubernetes counts it: extended resources of nodes, requests of pods.

use std::collections::BTreeMap;

use rtvirtio_capacity::{Permille, Resource, Scalars, WHOLE};
use serde::Serialize;

use crate::engine_names::kubernetes_name;
use crate::load::{Fleet, FleetHost};

/// DNS domain of the extended resources.
const DOMAIN: &str = "rtvirtio.io";

/// Patches of nodes and requests of pods.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Kubernetes {
    /// By host, the name of its node: the JSON patch (RFC 6902) of its `status`.
    pub patches: BTreeMap<String, Vec<Operation>>,
    /// By VM of a spec: requests and limits of its pod.
    pub requests: BTreeMap<String, BTreeMap<String, String>>,
}

/// An operation of a JSON patch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Operation {
    /// Always `add`, which also replaces.
    pub op: &'static str,
    /// JSON pointer below `/status/capacity`.
    pub path: String,
    /// A whole number, as text.
    pub value: String,
}

impl Kubernetes {
    /// Patches and requests of a fleet. A node's capacity is what the contracts in force named by
    /// the fleet file leave of it: they belong to no pod, and Kubernetes has no notion of reserved.
    #[must_use]
    pub fn from_fleet(fleet: &Fleet) -> Self {
        let patch = |(host, taken): (&FleetHost, &Scalars)| {
            let operation = |(resource, p): (Resource<'_>, Permille)| Operation {
                op: "add",
                // A slash in a name is ~1 in a JSON pointer (RFC 6901).
                path: format!("/status/capacity/{DOMAIN}~1{}", kubernetes_name(resource)),
                value: WHOLE.0.saturating_sub(p.0).to_string(),
            };
            (host.name.clone(), fleet.classes[host.class].by_resource(taken).map(operation).collect())
        };
        let requests = fleet.requests(|resource| format!("{DOMAIN}/{}", kubernetes_name(resource)));
        let text = |(name, n): (String, u32)| (name, n.to_string());
        Self {
            patches: fleet.hosts.iter().zip(&fleet.taken()).map(patch).collect(),
            requests: requests.into_iter().map(|(vm, of)| (vm, of.into_iter().map(text).collect())).collect(),
        }
    }
}
