//! A fleet as OpenStack counts it: inventories of Placement, extra specs of flavours.

use std::collections::BTreeMap;

use rtvirtio_capacity::{Contract, Node, Permille, Scalars, WHOLE};
use serde::{Deserialize, Serialize};

use crate::load::Fleet;

/// Resource class of the share of each CPU.
const CPU: &str = "CUSTOM_RTVIRTIO_CPU";
/// That of a host's only disk; named ones have their names behind it.
const DISK: &str = "CUSTOM_RTVIRTIO_DISK";
/// The same of networks.
const NET: &str = "CUSTOM_RTVIRTIO_NET";

/// What Placement and Nova are to be told.
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
    /// Smallest demand.
    pub min_unit: u32,
    /// Largest demand.
    pub max_unit: u32,
    /// Step of demands.
    pub step_size: u32,
    /// Nothing is promised twice.
    pub allocation_ratio: f64,
}

impl OpenStack {
    /// Of a fleet.
    #[must_use]
    pub fn of(fleet: &Fleet) -> Self {
        let mut reserved: Vec<Scalars> =
            fleet.hosts.iter().map(|h| fleet.classes[h.class].nothing()).collect();
        for c in &fleet.contracts {
            if let Some(host) = c.host {
                let node = &fleet.classes[fleet.hosts[host].class];
                reserved[host].add(&node.scalars(&fleet.kinds[c.kind]));
            }
        }
        let inventories: BTreeMap<String, BTreeMap<String, Inventory>> = fleet
            .hosts
            .iter()
            .zip(&reserved)
            .map(|(h, taken)| {
                let of = resources(&fleet.classes[h.class], taken);
                (h.name.clone(), of.into_iter().map(|(class, p)| (class, Inventory::with(p))).collect())
            })
            .collect();
        let mut resource_classes: Vec<String> =
            inventories.values().flat_map(|i| i.keys().cloned()).collect();
        resource_classes.sort_unstable();
        resource_classes.dedup();
        let waiting = fleet.contracts.iter().filter(|c| c.host.is_none()).map(|c| &fleet.kinds[c.kind]);
        let flavors = waiting.map(|kind| (kind.vm.clone(), flavor(fleet, kind))).collect();
        Self { resource_classes, inventories, flavors }
    }
}

/// The most over the kinds of hosts that could promise it: a flavour has one demand.
fn flavor(fleet: &Fleet, kind: &Contract) -> BTreeMap<String, u32> {
    let mut most: BTreeMap<String, u32> = BTreeMap::new();
    for node in &fleet.classes {
        let takes = node.scalars(kind);
        if !takes.fit() {
            continue;
        }
        for (class, p) in resources(node, &takes).into_iter().filter(|(_, p)| p.0 > 0) {
            let of = most.entry(format!("resources:{class}")).or_default();
            *of = (*of).max(p.0);
        }
    }
    most
}

/// What is taken of a host by resource class; a class of each resource that it has.
#[must_use]
pub fn resources(node: &Node, of: &Scalars) -> Vec<(String, Permille)> {
    let disks = node.disks.iter().map(|d| class(DISK, d.name.as_deref())).zip(&of.disks);
    let networks = node.networks.iter().map(|n| class(NET, n.name.as_deref())).zip(&of.networks);
    let all = disks.chain(networks).map(|(name, p)| (name, *p));
    all.chain([(CPU.to_owned(), of.cpu)]).collect()
}

/// Placement takes capitals, digits and underscores.
fn class(kind: &str, name: Option<&str>) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_uppercase() } else { '_' };
    name.map_or_else(
        || kind.to_owned(),
        |name| format!("{kind}_{}", name.chars().map(plain).collect::<String>()),
    )
}

impl Inventory {
    /// Of one resource, of which so much is reserved.
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
