//! Contracts admitted and refused by sums of integers, on single hosts.

use rtvirtio_capacity::{Contract, admit};
use rtvirtio_stats::Random;
use serde::{Deserialize, Serialize};

use super::instance::Instance;

/// Contracts that arrive at a host.
const CANDIDATES: usize = 60;

/// Random hosts, each filled from one random sequence in three ways.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sums {
    /// Hosts that were filled.
    pub hosts: usize,
    /// Contracts whose sum is within the limits and that the full admission refuses.
    pub admitted_wrongly: usize,
    /// Contracts admitted by sums.
    pub by_sums: usize,
    /// Contracts admitted by the exact admission under the shape that the sums are of.
    pub by_ledger: usize,
    /// Contracts admitted by the full admission under any shape.
    pub by_admission: usize,
}

/// Fills `hosts` random hosts, each in three ways.
///
/// # Errors
/// When a built-in profile cannot be read.
pub fn sums(hosts: usize, seed: u64) -> anyhow::Result<Sums> {
    let instance = Instance::new(hosts, seed)?;
    let mut random = Random::new(seed);
    let mut result = Sums { hosts, ..Sums::default() };
    for &class in &instance.hosts {
        let node = &instance.classes[class];
        let sequence: Vec<&Contract> =
            (0..CANDIDATES).map(|_| &instance.kinds[random.below(instance.kinds.len())]).collect();
        let (mut in_force, mut sum): (Vec<&Contract>, _) = (Vec::new(), node.nothing());
        let mut admitted: Vec<&Contract> = Vec::new();
        let (kinds, one) = (sequence.iter().map(|c| (*c).clone()).collect::<Vec<_>>(), [0]);
        let mut cluster = rtvirtio_fleet::Cluster::new(vec![node.clone()], &one, &kinds);
        for (i, candidate) in sequence.iter().copied().enumerate() {
            let mut with = sum.clone();
            with.add(&node.scalars(candidate));
            if with.fit() {
                result.admitted_wrongly += usize::from(!admit(node, &in_force, candidate).is_admitted());
                in_force.push(candidate);
                sum = with;
            }
            if cluster.admits(0, i) {
                cluster.put(0, i);
                result.by_ledger += 1;
            }
            if admit(node, &admitted, candidate).is_admitted() {
                admitted.push(candidate);
            }
        }
        result.by_sums += in_force.len();
        result.by_admission += admitted.len();
    }
    Ok(result)
}
