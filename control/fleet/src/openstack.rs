//! A fleet as OpenStack counts it: inventories of Placement, extra specs of flavours.

use std::collections::BTreeMap;

use rtvirtio_capacity::{Node, Permille, Scalars, WHOLE};
use serde::{Deserialize, Serialize};

use crate::engine_names::openstack_class;
use crate::load::{Fleet, FleetHost};

/// Resource classes, inventories and extra specs for Placement and Nova.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OpenStack {
    /// Resource classes that must exist.
    pub resource_classes: Vec<String>,
    /// By host, the name of its resource provider; then by resource class.
    pub inventories: BTreeMap<String, BTreeMap<String, Inventory>>,
    /// By VM of a spec: extra specs of its flavour.
    pub flavors: BTreeMap<String, BTreeMap<String, u32>>,
}

/// An inventory, in the form of Placement's API.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Inventory {
    /// All that there is, in thousandths.
    pub total: u32,
    /// Taken by contracts in force there of which Placement knows no allocation.
    pub reserved: u32,
    /// Smallest demand, in thousandths: 1.
    pub min_unit: u32,
    /// Largest demand, in thousandths: 1000.
    pub max_unit: u32,
    /// Granularity of demands: 1.
    pub step_size: u32,
    /// Always 1.0: nothing is promised twice.
    pub allocation_ratio: f64,
}

impl OpenStack {
    /// Inventories and flavours of a fleet.
    #[must_use]
    pub fn from_fleet(fleet: &Fleet) -> Self {
        let inventory = |(host, taken): (&FleetHost, &Scalars)| {
            let of = resources(&fleet.classes[host.class], taken);
            (host.name.clone(), of.into_iter().map(|(class, p)| (class, Inventory::with(p))).collect())
        };
        let inventories: BTreeMap<String, BTreeMap<String, Inventory>> =
            fleet.hosts.iter().zip(&fleet.taken()).map(inventory).collect();
        let mut resource_classes: Vec<String> =
            inventories.values().flat_map(|i| i.keys().cloned()).collect();
        resource_classes.sort_unstable();
        resource_classes.dedup();
        let flavors = fleet.requests(|resource| format!("resources:{}", openstack_class(resource)));
        Self { resource_classes, inventories, flavors }
    }
}

/// Shares taken of a host by resource class, with an entry for each resource that it has.
#[must_use]
pub fn resources(node: &Node, of: &Scalars) -> Vec<(String, Permille)> {
    node.by_resource(of).map(|(resource, p)| (openstack_class(resource), p)).collect()
}

impl Inventory {
    /// Inventory of one resource, 1000 in all, of which `reserved` is taken.
    #[must_use]
    pub fn with(reserved: Permille) -> Self {
        Self {
            total: WHOLE.0,
            reserved: reserved.0.min(WHOLE.0),
            min_unit: 1,
            max_unit: WHOLE.0,
            step_size: 1,
            allocation_ratio: 1.0,
        }
    }
}
