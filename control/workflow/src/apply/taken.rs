//! Contracts in force of other journals, whose CPUs new contracts are not given.

use super::Room;
use crate::contracts::{Admitted, InForce};
use crate::dirs::Dirs;
use crate::error::Result;
use crate::holders;

impl Room<'_> {
    /// Contracts of other journals, each with the processes of its VM where these are known. None
    /// are read where no contract wants CPUs: a damaged one is no matter of these.
    pub(super) fn cpus_taken(self, wanted: &Admitted, dirs: &Dirs) -> Result<Vec<(InForce, Vec<u32>)>> {
        match self {
            _ if wanted.contracts.iter().all(|one| one.cores.is_none()) => Ok(Vec::new()),
            Self::Own | Self::OwnAndHost => holders::cpu_of_others(dirs),
            Self::Shared(_, others, _) => Ok(others.iter().map(|of| (of.clone(), Vec::new())).collect()),
        }
    }
}

#[cfg(test)]
mod tests {
    use rtvirtio_apply::JOURNAL_FILE;

    use super::*;
    use crate::contracts::cores_tests::{in_force, one, placed, probe, whole};
    use crate::dirs::write_state;
    use crate::holders::Holder;
    use crate::scope_files::{IN_FORCE_FILE, VmInForce, vm_dir};
    use crate::scopes::Scopes;

    /// A core that a VM of the service has whole has idle siblings, which no pinned thread shows.
    #[test]
    fn cpus_of_the_services_contracts_are_taken_for_apply_too() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let dirs = Dirs { state: dir.path().join("state"), run: dir.path().join("run") };
        let mut wanted = Admitted { probe: probe(), contracts: vec![one("a", 10, whole())] };
        assert_eq!(Room::OwnAndHost.cpus_taken(&wanted, &dirs).unwrap(), []);
        let cpu = in_force(&one("plc", 10, whole()), placed(&[2, 4]));
        let saved = VmInForce {
            vm: "plc".to_owned(),
            contract: String::new(),
            processes: Vec::new(),
            cpu: Some(cpu.clone()),
            reason: String::new(),
            since: String::new(),
        };
        let scope = vm_dir(&dirs, "plc");
        write_state(&scope, JOURNAL_FILE, b"{}").unwrap();
        write_state(&scope, IN_FORCE_FILE, &serde_json::to_vec(&saved).unwrap()).unwrap();
        assert_eq!(Room::OwnAndHost.cpus_taken(&wanted, &dirs).unwrap(), [(cpu.clone(), Vec::new())]);
        let (scopes, others, holder) = (Scopes::lock(&dirs).unwrap(), [cpu], Holder::Apply);
        let shared = Room::Shared(&scopes, &others, &holder);
        assert_eq!(shared.cpus_taken(&wanted, &dirs).unwrap(), [(others[0].clone(), Vec::new())]);
        write_state(&scope, IN_FORCE_FILE, b"{").unwrap();
        assert!(Room::OwnAndHost.cpus_taken(&wanted, &dirs).is_err(), "damaged is not the same as none");
        wanted.contracts[0].cores = None;
        assert_eq!(Room::OwnAndHost.cpus_taken(&wanted, &dirs).unwrap(), []);
    }
}
