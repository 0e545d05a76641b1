//! Contracts with `cores` whose CPUs are not what they were chosen as: CPUs of the host have gone
//! offline, or have come back, or are no valid partition any more.

use std::collections::{BTreeMap, BTreeSet};

use rtvirtio_cores::{Cpu, Use};
use rtvirtio_kernel::text::cpu_ranges;
use rtvirtio_kernel::{Root, topology};
use serde::Serialize;

use crate::contracts::{InForce, any_in_force, partition_fault};
use crate::dirs::Dirs;
use crate::error::{Context as _, Result};
use crate::holders;

/// CPUs of a VM that do not do what its contract says.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct CoreFault {
    pub vm: String,
    /// CPUs of its vCPUs that are concerned.
    pub cpus: BTreeSet<u32>,
    /// Whether another VM is on a core that the VM is to have whole; else they are offline, or no
    /// valid partition.
    pub is_shared: bool,
    /// Sentence on it.
    pub text: String,
}

/// The faults of all contracts in force that this host knows of.
pub fn core_faults(root: &Root, dirs: &Dirs) -> Result<Vec<CoreFault>> {
    let is_applied = any_in_force(&dirs.state)?;
    let mut all = if is_applied { holders::cpu_in(&dirs.state)? } else { Vec::new() };
    all.extend(holders::cpu_of_others(dirs)?);
    all.retain(|(of, _)| of.cores.is_some() || of.partition.is_some());
    if all.is_empty() {
        return Ok(Vec::new());
    }
    let cpus = topology(root).context("the host's CPUs are not known")?;
    let mut found = faults(&cpus, &all.iter().map(|(of, _)| of).collect::<Vec<_>>());
    found.extend(all.iter().filter_map(|(of, _)| {
        let (cpus, text) = partition_fault(root, of)?;
        Some(CoreFault { vm: of.vm.clone(), cpus, is_shared: false, text })
    }));
    Ok(found)
}

/// The faults of these contracts on a host with these CPUs online.
fn faults(online: &[Cpu], all: &[&InForce]) -> Vec<CoreFault> {
    let core_of: BTreeMap<u32, u32> = online.iter().map(|cpu| (cpu.id, cpu.core)).collect();
    let mut found = Vec::new();
    for of in all {
        let Some(cores) = &of.cores else { continue };
        let (here, gone): (BTreeSet<u32>, BTreeSet<u32>) =
            cores.placement.vcpus.iter().partition(|cpu| core_of.contains_key(cpu));
        let (vm, list) = (&of.vm, cpu_ranges);
        let mut add = |cpus: BTreeSet<u32>, is_shared: bool, text: String| {
            found.push(CoreFault { vm: vm.clone(), cpus, is_shared, text });
        };
        if !gone.is_empty() {
            let text = format!(
                "{vm}: CPU {} of its vCPUs is offline: until it is back the kernel runs them on others",
                list(&gone)
            );
            add(gone, false, text);
        }
        if cores.placement.request.each != Use::Whole {
            continue;
        }
        for other in all.iter().filter(|other| other.vm != of.vm) {
            let Some(placed) = other.cores.as_ref().map(|cores| &cores.placement) else { continue };
            let used = placed.vcpus.iter().chain(&placed.service).filter_map(|cpu| core_of.get(cpu));
            let used: BTreeSet<u32> = used.copied().collect();
            let shared = |cpu: &&u32| core_of.get(cpu).is_some_and(|core| used.contains(core));
            let shared: BTreeSet<u32> = here.iter().filter(shared).copied().collect();
            if !shared.is_empty() {
                let text = format!(
                    "{vm}: the cores of its CPUs {} are not its own, {} is there too: `revert` one of the two, and apply it again",
                    list(&shared),
                    other.vm
                );
                add(shared, true, text);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use rtvirtio_apply::JOURNAL_FILE;

    use super::*;
    use crate::contracts::IN_FORCE_FILE;
    use crate::contracts::cores_tests::{in_force, one, placed, whole};
    use crate::dirs::write_state;

    /// Four cores of two CPUs each, without those that are offline.
    fn online(offline: &[u32]) -> Vec<Cpu> {
        let core = |id: u32| (id / 2 * 2..id / 2 * 2 + 2).find(|cpu| !offline.contains(cpu)).unwrap_or(id);
        let cpu = |id| Cpu {
            id,
            core: core(id),
            llc: 0,
            node: 0,
            capacity: 1024,
            isolated: false,
            tickless: false,
        };
        (0..8).filter(|id| !offline.contains(id)).map(cpu).collect()
    }

    #[test]
    fn contracts_without_a_journal_have_no_faults() {
        let (_dir, dirs) = crate::fixtures::dirs();
        write_state(&dirs.state, IN_FORCE_FILE, b"damaged").unwrap();
        assert_eq!(core_faults(&Root::default(), &dirs).unwrap(), []);
        write_state(&dirs.state, JOURNAL_FILE, b"{}").unwrap();
        core_faults(&Root::default(), &dirs).unwrap_err();
    }

    #[test]
    fn cpus_that_are_gone_and_cores_that_two_vms_have_are_found() {
        let of = |vm: &str, cpus: &[u32]| in_force(&one(vm, 10, whole()), placed(cpus));
        let (a, b) = (of("a", &[2, 4]), of("b", &[6]));
        assert_eq!(faults(&online(&[]), &[&a, &b]), []);
        let found = faults(&online(&[4]), &[&a, &b]);
        assert!(found.len() == 1 && !found[0].is_shared && found[0].text.contains("CPU 4"), "{found:?}");
        // A VM that got the sibling while CPU 4 was offline.
        let c = of("c", &[5]);
        let found = faults(&online(&[]), &[&a, &c]);
        assert_eq!(found.iter().map(|f| f.vm.as_str()).collect::<Vec<_>>(), ["a", "c"], "{found:?}");
        assert!(found.iter().all(|fault| fault.is_shared), "{found:?}");
        assert_eq!(found[0].cpus, BTreeSet::from([4]));
    }
}
