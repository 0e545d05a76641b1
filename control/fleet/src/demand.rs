//! Demand of contracts by resource name, for cluster managers that count integers.

use std::collections::BTreeMap;

use rtvirtio_capacity::{Contract, Resource, Scalars};

use crate::load::Fleet;

impl Fleet {
    /// Sum of the shares of contracts in force, per host.
    pub(crate) fn taken(&self) -> Vec<Scalars> {
        let mut taken: Vec<Scalars> = self.hosts.iter().map(|h| self.classes[h.class].nothing()).collect();
        for c in &self.contracts {
            if let Some(host) = c.host {
                let node = &self.classes[self.hosts[host].class];
                taken[host].add(&node.scalars(&self.kinds[c.kind]));
            }
        }
        taken
    }

    /// Demand of the contracts that are in force nowhere: by VM, then by resource name, in
    /// thousandths.
    pub(crate) fn requests(
        &self,
        name: impl Fn(Resource<'_>) -> String,
    ) -> BTreeMap<String, BTreeMap<String, u32>> {
        let waiting = self.contracts.iter().filter(|c| c.host.is_none()).map(|c| &self.kinds[c.kind]);
        waiting.map(|kind| (kind.vm.clone(), self.most(kind, &name))).collect()
    }

    /// Largest demand over the kinds of hosts that could promise it: a VM asks all hosts for the
    /// same.
    fn most(&self, kind: &Contract, name: impl Fn(Resource<'_>) -> String) -> BTreeMap<String, u32> {
        let mut most: BTreeMap<String, u32> = BTreeMap::new();
        for node in &self.classes {
            let takes = node.scalars(kind);
            if !takes.fit() {
                continue;
            }
            for (resource, p) in node.by_resource(&takes).filter(|(_, p)| p.0 > 0) {
                let of = most.entry(name(resource)).or_default();
                *of = (*of).max(p.0);
            }
        }
        most
    }
}
