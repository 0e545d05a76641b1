//! Demand of contracts by resource name, for cluster managers that count integers.

use std::collections::BTreeMap;

use rtvirtio_capacity::{Contract, Node, Resource, Scalars, WHOLE};

use crate::load::Fleet;

/// Demand that no host meets.
const NEVER: u32 = WHOLE.0 + 1;

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
    /// same. Of a contract that no kind promises it is [`NEVER`] where a kind refuses it: a VM that
    /// asks for nothing would be started anywhere.
    fn most(&self, kind: &Contract, name: impl Fn(Resource<'_>) -> String) -> BTreeMap<String, u32> {
        let mut most: BTreeMap<String, u32> = BTreeMap::new();
        let all: Vec<(&Node, Scalars)> = self.classes.iter().map(|node| (node, node.scalars(kind))).collect();
        let is_promised = all.iter().any(|(_, takes)| takes.fit());
        for (node, takes) in all.iter().filter(|(_, takes)| takes.fit() == is_promised) {
            for (resource, p) in node.by_resource(takes).filter(|(_, p)| p.0 > 0) {
                let of = most.entry(name(resource)).or_default();
                *of = (*of).max(p.0.min(NEVER));
            }
        }
        most
    }
}
