//! vCPUs that have to share a CPU: of two real-time threads on one CPU the one that works keeps the
//! other from running at all.

use std::collections::{BTreeMap, BTreeSet};

use rtvirtio_cpu::Backend;
use rtvirtio_kernel::text::cpu_list;
use rtvirtio_vmm::{Role, Thread};

/// Note for a VM whose vCPUs cannot have a CPU each within their affinities.
pub(super) fn note(threads: &[Thread], backend: Backend) -> Option<String> {
    // Ordinary threads share a CPU fairly.
    if backend == Backend::CpuMax {
        return None;
    }
    let vcpus = threads.iter().filter(|thread| matches!(thread.role, Role::Vcpu(_)));
    let may_use: Option<Vec<BTreeSet<u32>>> = vcpus.map(|vcpu| cpu_list(&vcpu.affinity)).collect();
    let may_use = may_use?;
    let (n, alone) = (may_use.len(), with_a_cpu_each(&may_use));
    (alone < n).then(|| {
        let all: BTreeSet<u32> = may_use.iter().flatten().copied().collect();
        format!(
            "its {n} vCPUs may use {} CPUs, and {} of them has to share one: while one of two works, the other may not run at all; give them a CPU \
             each (`vcpupin`, `taskset`), or the VM fewer vCPUs",
            all.len(),
            n - alone
        )
    })
}

/// Most vCPUs that can have a CPU each within their affinities: a maximum bipartite matching.
fn with_a_cpu_each(may_use: &[BTreeSet<u32>]) -> usize {
    fn place(
        vcpu: usize,
        may_use: &[BTreeSet<u32>],
        seen: &mut BTreeSet<u32>,
        on: &mut BTreeMap<u32, usize>,
    ) -> bool {
        for cpu in &may_use[vcpu] {
            if seen.insert(*cpu) && on.get(cpu).copied().is_none_or(|other| place(other, may_use, seen, on)) {
                on.insert(*cpu, vcpu);
                return true;
            }
        }
        false
    }
    let mut on = BTreeMap::new();
    (0..may_use.len()).filter(|vcpu| place(*vcpu, may_use, &mut BTreeSet::new(), &mut on)).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vcpus_that_have_to_share_a_cpu_are_counted() {
        let of = |lists: &[&str]| {
            let all: Vec<BTreeSet<u32>> = lists.iter().map(|list| cpu_list(list).unwrap()).collect();
            all.len() - with_a_cpu_each(&all)
        };
        assert_eq!((of(&[]), of(&["0-1", "0-1"]), of(&["0-1", "0"]), of(&["1", "0-1"])), (0, 0, 0, 0));
        assert_eq!((of(&["1", "1"]), of(&["0-1", "0-1", "0-1"]), of(&["0", "0", "0"])), (1, 1, 2));
        // Although there are as many CPUs as vCPUs.
        assert_eq!(of(&["1", "1", "0-2"]), 1);
    }
}
