//! Budgets of cgroups and CPUs that new contracts share with those in force of other journals.

use rtvirtio_apply::Write;
use rtvirtio_cpu::Probe;

use super::Room;
use crate::contracts::{self, Admitted, InForce, VmCpu};
use crate::dirs::Dirs;
use crate::error::Result;
use crate::holders;
use crate::started::StartedVm;

impl Room<'_> {
    /// Raises the budgets, or returns the writes for that.
    pub(super) fn writes(self, probe: &Probe, held: &[VmCpu], vms: &[StartedVm]) -> Result<Vec<Write>> {
        match self {
            Self::Own | Self::OwnAndHost => contracts::ancestor_capacity(probe, held),
            Self::Shared(scopes, others, holder) => {
                holders::refuse(vms, holder, scopes.dirs())?;
                let all: Vec<InForce> =
                    others.iter().cloned().chain(held.iter().map(InForce::from_settings)).collect();
                scopes.make_room(probe, &all)?;
                Ok(Vec::new())
            }
        }
    }

    /// Contracts of other journals, each with the processes of its VM, of VMs that run. None are
    /// read where no contract wants CPUs: a damaged one is no matter of these.
    pub(super) fn cpus_taken(self, wanted: &Admitted, dirs: &Dirs) -> Result<Vec<(InForce, Vec<u32>)>> {
        match self {
            _ if wanted.contracts.iter().all(|one| one.cores.is_none()) => Ok(Vec::new()),
            Self::Own | Self::OwnAndHost => holders::cpu_of_others(dirs),
            Self::Shared(scopes, ..) => {
                let mut all = holders::cpu_of_others(scopes.dirs())?;
                let state = &scopes.dirs().state;
                if contracts::any_in_force(state)? {
                    all.extend(holders::cpu_in(state)?);
                }
                Ok(all)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rtvirtio_apply::JOURNAL_FILE;

    use super::*;
    use crate::contracts::IN_FORCE_FILE;
    use crate::contracts::cores_tests::{in_force, one, placed, probe, whole};
    use crate::dirs::write_state;
    use crate::fixtures::put_in_force;
    use crate::holders::Holder;
    use crate::scope_files;
    use crate::scopes::Scopes;

    /// A core that a VM of the service has whole has idle siblings, which no pinned thread shows.
    #[test]
    fn cpus_of_the_services_contracts_are_taken_for_apply_too() {
        let (_dir, dirs) = crate::fixtures::dirs();
        let mut wanted = Admitted { probe: probe(), contracts: vec![one("a", 10, whole())] };
        assert_eq!(Room::OwnAndHost.cpus_taken(&wanted, &dirs).unwrap(), []);
        let cpu = in_force(&one("plc", 10, whole()), placed(&[2, 4]));
        let scope = put_in_force(&dirs, &[], &cpu);
        assert_eq!(Room::OwnAndHost.cpus_taken(&wanted, &dirs).unwrap(), [(cpu.clone(), Vec::new())]);
        // An agent's contract is next to that of `rtvirtio apply` too.
        let of_apply = in_force(&one("hist", 10, whole()), placed(&[6]));
        write_state(&dirs.state, JOURNAL_FILE, b"{}").unwrap();
        write_state(&dirs.state, IN_FORCE_FILE, &serde_json::to_vec(&[&of_apply]).unwrap()).unwrap();
        let (scopes, holder) = (Scopes::lock(&dirs).unwrap(), Holder::Apply);
        let shared = Room::Shared(&scopes, &[], &holder).cpus_taken(&wanted, &dirs).unwrap();
        assert_eq!(shared, [(cpu, Vec::new()), (of_apply, Vec::new())]);
        write_state(&scope, scope_files::IN_FORCE_FILE, b"{").unwrap();
        assert!(Room::OwnAndHost.cpus_taken(&wanted, &dirs).is_err(), "damaged is not the same as none");
        wanted.contracts[0].cores = None;
        assert_eq!(Room::OwnAndHost.cpus_taken(&wanted, &dirs).unwrap(), []);
    }
}
