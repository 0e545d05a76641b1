//! Target inventories: a pure function of contracts in force and of Placement's allocations.

use std::collections::{BTreeMap, BTreeSet};

use rtvirtio_fleet::Inventory;

/// Resources of a host, and the contracts in force on it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Resource classes of the host.
    pub classes: BTreeSet<String>,
    /// Contracts in force on the host.
    pub contracts: Vec<Taken>,
}

/// Demand of one contract in force.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    pub vm: String,
    /// UUID of the VM, which is the consumer's in Placement where Nova has started it.
    pub uuid: Option<String>,
    /// Thousandths by resource class.
    pub takes: BTreeMap<String, u32>,
}

/// Allocations of a provider: by consumer UUID in lower case, then by resource class.
pub type Allocations = BTreeMap<String, BTreeMap<String, u32>>;

/// Target inventories, with notes for the operator.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Inventory of each resource class.
    pub inventories: BTreeMap<String, Inventory>,
    /// Resources that are over-committed, in words.
    pub notes: Vec<String>,
}

/// Target inventories of a host. A contract's demand is reserved only beyond what Placement has
/// allocated to its VM, so that nothing counts twice.
#[must_use]
pub fn plan(wanted: &Wanted, allocations: &Allocations) -> Plan {
    let mut plan = Plan { inventories: BTreeMap::new(), notes: Vec::new() };
    for class in &wanted.classes {
        let of = |of: &BTreeMap<String, u32>| of.get(class).copied().unwrap_or(0);
        let unknown = |c: &Taken| {
            let uuid = c.uuid.as_ref().map(|u| u.to_ascii_lowercase());
            let allocated = uuid.and_then(|u| allocations.get(&u)).map_or(0, of);
            of(&c.takes).saturating_sub(allocated)
        };
        let reserved: u32 = wanted.contracts.iter().map(unknown).fold(0, u32::saturating_add);
        let allocated: u32 = allocations.values().map(of).fold(0, u32::saturating_add);
        let inventory = Inventory::with(rtvirtio_fleet::Permille(reserved));
        let total = inventory.total;
        if allocated.saturating_add(reserved) > total {
            plan.notes.push(format!(
                "{class}: {allocated} of {total} are allocated and contracts in force take {reserved} more: this host is over-committed until a VM leaves it"
            ));
        }
        plan.inventories.insert(class.clone(), inventory);
    }
    plan
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLASS: &str = "CUSTOM_RTVIRTIO_CPU";

    fn taken(vm: &str, uuid: Option<&str>, n: u32) -> Taken {
        Taken {
            vm: vm.to_owned(),
            uuid: uuid.map(str::to_owned),
            takes: BTreeMap::from([(CLASS.to_owned(), n)]),
        }
    }

    fn wanted(contracts: Vec<Taken>) -> Wanted {
        Wanted { classes: BTreeSet::from([CLASS.to_owned()]), contracts }
    }

    fn allocated(all: &[(&str, u32)]) -> Allocations {
        let one = |(uuid, n): &(&str, u32)| ((*uuid).to_owned(), BTreeMap::from([(CLASS.to_owned(), *n)]));
        all.iter().map(one).collect()
    }

    #[test]
    fn what_placement_has_allocated_is_not_reserved_again() {
        let of =
            wanted(vec![taken("a", Some("AB-1"), 300), taken("b", Some("c"), 200), taken("d", None, 50)]);
        let plan = super::plan(&of, &allocated(&[("ab-1", 250), ("other", 400)]));
        // 50 of `a` that its flavour does not have, and all of `b` and `d`.
        assert_eq!((plan.inventories[CLASS].reserved, plan.notes.len()), (300, 0), "{plan:?}");
        let more = super::plan(&of, &allocated(&[("ab-1", 350), ("other", 500)]));
        assert_eq!(more.inventories[CLASS].reserved, 250);
        assert!(more.notes[0].contains("850 of 1000") && more.notes[0].contains("250 more"), "{more:?}");
        // Without contracts nothing is reserved, and never more than the total.
        assert_eq!(super::plan(&wanted(Vec::new()), &Allocations::new()).inventories[CLASS].reserved, 0);
        let huge = super::plan(&wanted(vec![taken("a", None, 2_000)]), &Allocations::new());
        assert_eq!((huge.inventories[CLASS].reserved, huge.notes.len()), (1_000, 1));
    }
}
