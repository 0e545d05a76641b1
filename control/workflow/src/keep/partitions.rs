//! Partitions of VMs whose contracts are kept: said where one is not valid any more.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use rtvirtio_kernel::Root;

use crate::contracts::{InForce, partition_fault};

/// Interval of looks.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Sentences on partitions at the last look.
#[derive(Default)]
pub(super) struct Partitions {
    said: BTreeSet<String>,
    looked: Option<Instant>,
}

impl Partitions {
    /// Sentences about the partitions of these contracts, each once for as long as it is true.
    pub fn poll<'a>(&mut self, root: &Root, all: impl Iterator<Item = &'a InForce>) -> Vec<String> {
        let now = Instant::now();
        if self.looked.is_some_and(|at| now.saturating_duration_since(at) < LOOK_EVERY) {
            return Vec::new();
        }
        self.looked = Some(now);
        self.new_lines(root, all)
    }

    fn new_lines<'a>(&mut self, root: &Root, all: impl Iterator<Item = &'a InForce>) -> Vec<String> {
        let found: BTreeSet<String> = all.filter_map(|of| Some(partition_fault(root, of)?.1)).collect();
        let new = found.difference(&self.said).cloned().collect();
        self.said = found;
        new
    }
}

#[cfg(test)]
mod tests {
    use rtvirtio_cpu::Partition;

    use super::*;
    use crate::contracts::cores_tests::{auto, host, in_force, one, placed, put};

    #[test]
    fn a_partition_that_became_invalid_is_said_once_until_it_is_valid_again() {
        let (_dir, root) = host();
        let file = "/sys/fs/cgroup/machine.slice/plc.scope/cpuset.cpus.partition";
        let partition = Partition { group: "/machine.slice/plc.scope".into(), cpus: BTreeSet::from([4, 5]) };
        let of = in_force(&one("plc", 10, auto()), placed(&[4]));
        let all = [InForce { partition: Some(partition), ..of }];
        let mut partitions = Partitions::default();
        let mut said = |text: &str| {
            put(&root, file, text);
            partitions.new_lines(&root, all.iter()).len()
        };
        assert_eq!(said("root\n"), 0);
        assert_eq!(said("root invalid (CPU list changed)\n"), 1);
        assert_eq!(said("root invalid (CPU list changed)\n"), 0);
        assert_eq!(said("root\n"), 0);
        assert_eq!(said("root invalid (CPU list changed)\n"), 1);
    }
}
