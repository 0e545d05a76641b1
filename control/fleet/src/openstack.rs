//! A fleet as OpenStack counts it: inventories of Placement, extra specs of flavours.

use std::collections::BTreeMap;

use rtvirtio_capacity::{Contract, Node, Permille, Scalars, WHOLE};
use serde::Serialize;

use crate::load::Fleet;

/// Resource class of the share of each CPU.
const CPU: &str = "CUSTOM_RTVIRTIO_CPU";
/// That of a host's only disk; named ones have their names behind it.
const DISK: &str = "CUSTOM_RTVIRTIO_DISK";

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
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Inventory {
    /// All that there is, in thousandths.
    pub total: u32,
    /// Taken by contracts that the fleet file says are in force there: Placement knows no
    /// allocation of them.
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
            fleet.hosts.iter().map(|h| Scalars::none(fleet.classes[h.class].disks.len())).collect();
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
                let of = amounts(&fleet.classes[h.class], taken);
                (h.name.clone(), of.into_iter().map(|(class, p)| (class, inventory(p))).collect())
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
        for (class, p) in amounts(node, &takes).into_iter().filter(|(_, p)| p.0 > 0) {
            let of = most.entry(format!("resources:{class}")).or_default();
            *of = (*of).max(p.0);
        }
    }
    most
}

fn amounts(node: &Node, of: &Scalars) -> Vec<(String, Permille)> {
    let disks = node.disks.iter().zip(&of.disks);
    let disks = disks.map(|(d, p)| (class(d.name.as_deref()), *p));
    disks.chain([(CPU.to_owned(), of.cpu)]).collect()
}

/// Placement takes capitals, digits and underscores.
fn class(disk: Option<&str>) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_uppercase() } else { '_' };
    disk.map_or_else(
        || DISK.to_owned(),
        |name| format!("{DISK}_{}", name.chars().map(plain).collect::<String>()),
    )
}

fn inventory(taken: Permille) -> Inventory {
    Inventory {
        total: WHOLE.0,
        reserved: taken.0.min(WHOLE.0),
        min_unit: 1,
        max_unit: WHOLE.0,
        step_size: 1,
        allocation_ratio: 1.0,
    }
}
