//! Programs that hold settings in force: `rtvirtio apply`, the service, or the agent of a cluster's
//! resource. Each has its own journals and leaves the settings of the others alone.

use std::fmt;
use std::path::{Path, PathBuf};

use rtvirtio_apply::{JOURNAL_FILE, Machine, Status};
use rtvirtio_kernel::{ProcessId, Root};

use crate::contracts::{self, InForce};
use crate::dirs::{Dirs, is_there};
use crate::error::{Result, bail};
use crate::guests::GuestAgents;
use crate::scope_files;
use crate::started::{self, StartedVm};

/// A program that holds settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Holder {
    /// The command `rtvirtio apply`.
    Apply,
    /// `rtvirtiod`, for the VM that its contract calls so.
    Service(String),
    /// The agent `ocf:rtvirtio:contract`, for this resource.
    Resource(String),
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Apply => write!(f, "`rtvirtio apply`"),
            Self::Service(_) => write!(f, "rtvirtiod"),
            Self::Resource(name) => write!(f, "resource {name} of Pacemaker"),
        }
    }
}

impl Holder {
    /// Command that puts its settings of a VM back, for the user.
    fn remedy(&self) -> String {
        match self {
            Self::Apply => "`rtvirtio revert` first".to_owned(),
            Self::Service(vm) => {
                format!("`rtvirtio contract remove {vm}` first, or stop it and `rtvirtio revert`")
            }
            Self::Resource(name) => {
                format!("stop its contract there first (`crm_resource -r {name} --locate` finds it)")
            }
        }
    }
}

/// Settings that a Pacemaker resource agent has in force.
#[derive(Clone, Debug)]
pub struct OfResource {
    /// Name of the resource.
    pub resource: String,
    /// VMs with their processes at that time.
    pub vms: Vec<StartedVm>,
    /// CPU contracts of these VMs.
    pub cpu: Vec<InForce>,
    /// State of its settings on the machine.
    pub status: Status,
}

impl OfResource {
    /// Whether the VMs that it is for have all ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        !self.vms.is_empty() && self.vms.iter().all(StartedVm::has_ended)
    }

    /// Names of its VMs; of the resource where none is known.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        let vms: Vec<String> = self.vms.iter().map(|vm| vm.vm.clone()).collect();
        if vms.is_empty() { vec![self.resource.clone()] } else { vms }
    }
}

/// Directories with the journal of a resource's contract.
#[must_use]
pub fn resource_dirs(dirs: &Dirs, resource: &str) -> Dirs {
    Dirs { state: scope_files::dir(dirs).join(resource), run: dirs.run.clone() }
}

/// Directories of resources with a journal.
fn journals(dirs: &Dirs) -> Result<Vec<(String, PathBuf)>> {
    let mut all = Vec::new();
    for (name, path) in scope_files::entries(dirs)? {
        if !scope_files::is_own(&name) && is_there(&path.join(JOURNAL_FILE))? {
            all.push((name, path));
        }
    }
    Ok(all)
}

/// Settings that agents have put in force since this host was booted.
pub fn resources(dirs: &Dirs) -> Result<Vec<OfResource>> {
    let root = Root::default();
    let mut all = Vec::new();
    for (resource, path) in journals(dirs)? {
        let status = rtvirtio_apply::status(&path, &Machine::new(&root, &GuestAgents))?;
        let Some(status) = status.filter(|status| !status.rebooted) else { continue };
        let has_cpu = is_there(&path.join(contracts::IN_FORCE_FILE))?;
        let cpu = if has_cpu { contracts::in_force(&path)? } else { Vec::new() };
        all.push(OfResource { resource, vms: started::started(&path)?, cpu, status });
    }
    Ok(all)
}

/// CPU contracts that agents hold for VMs that have not all ended. Journals are not read, so that a
/// damaged one blocks no other VM's contract.
pub(crate) fn cpu_of_resources(dirs: &Dirs) -> Result<Vec<InForce>> {
    let mut all = Vec::new();
    for (_, path) in journals(dirs)? {
        let vms = started::started(&path)?;
        let has_ended = !vms.is_empty() && vms.iter().all(StartedVm::has_ended);
        if !has_ended && is_there(&path.join(contracts::IN_FORCE_FILE))? {
            all.extend(contracts::in_force(&path)?);
        }
    }
    Ok(all)
}

/// CPU contracts in force in the journal of a directory, each with the processes of its VM, of VMs
/// that run.
pub(crate) fn cpu_in(state_dir: &Path) -> Result<Vec<(InForce, Vec<u32>)>> {
    let started = started::started(state_dir)?;
    let of = |of: InForce| match started.iter().find(|start| start.vm == of.vm) {
        Some(start) => running(of, &start.processes),
        None => Some((of, Vec::new())),
    };
    Ok(contracts::in_force(state_dir)?.into_iter().filter_map(of).collect())
}

/// CPU contracts of the service and of agents of a cluster's resources, each with the processes of
/// its VM, of VMs that run.
pub(crate) fn cpu_of_others(dirs: &Dirs) -> Result<Vec<(InForce, Vec<u32>)>> {
    let mut all = Vec::new();
    for vm in scope_files::vms(dirs)? {
        let Some(of) = scope_files::in_force(dirs, &vm)? else { continue };
        all.extend(of.cpu.and_then(|cpu| running(cpu, &of.processes)));
    }
    for (_, path) in journals(dirs)? {
        if is_there(&path.join(contracts::IN_FORCE_FILE))? {
            all.extend(cpu_in(&path)?);
        }
    }
    Ok(all)
}

/// A contract with the processes of its VM that live; `None` where all have ended.
fn running(of: InForce, processes: &[ProcessId]) -> Option<(InForce, Vec<u32>)> {
    let alive: Vec<u32> = processes.iter().filter(|p| p.is_alive()).map(|p| p.pid).collect();
    (processes.is_empty() || !alive.is_empty()).then_some((of, alive))
}

/// Fails where another program than this one holds settings of one of these VMs, found by name or
/// process: each would put back what the other has set.
///
/// # Errors
/// [`Kind::InForce`](crate::Kind::InForce) with the holder and the remedy; when what is in force
/// is not known.
pub fn refuse(vms: &[StartedVm], own: &Holder, dirs: &Dirs) -> Result<()> {
    let mut held = held_elsewhere(dirs)?;
    held.splice(..0, held_by_service(dirs)?);
    refuse_held(vms, own, &held)
}

/// Like [`refuse`], for the service itself, whose settings in force are known: `beside`.
pub(crate) fn refuse_known(vm: &StartedVm, own: &Holder, beside: &[StartedVm], dirs: &Dirs) -> Result<()> {
    let of_service = beside.iter().map(|of| (Holder::Service(of.vm.clone()), of.clone()));
    let held: Vec<_> = of_service.chain(held_elsewhere(dirs)?).collect();
    refuse_held(std::slice::from_ref(vm), own, &held)
}

fn held_by_service(dirs: &Dirs) -> Result<Vec<(Holder, StartedVm)>> {
    let unseen = |name: &str| StartedVm { vm: name.to_owned(), processes: Vec::new() };
    let mut held: Vec<(Holder, StartedVm)> = Vec::new();
    for name in scope_files::vms(dirs)? {
        let of = match scope_files::in_force(dirs, &name) {
            // With a damaged file the VM's settings are in force all the same.
            Err(e) if scope_files::is_lost(&e) => None,
            of => of?,
        };
        let of = of.map_or_else(|| unseen(&name), |of| StartedVm { vm: of.vm, processes: of.processes });
        held.push((Holder::Service(name), of));
    }
    Ok(held)
}

/// Settings of the programs other than the service, with their VMs.
fn held_elsewhere(dirs: &Dirs) -> Result<Vec<(Holder, StartedVm)>> {
    let mut held: Vec<(Holder, StartedVm)> = Vec::new();
    held.extend(started::started(&dirs.state)?.into_iter().map(|vm| (Holder::Apply, vm)));
    for (resource, path) in journals(dirs)? {
        let of = started::started(&path)?.into_iter().map(|vm| (Holder::Resource(resource.clone()), vm));
        // Nothing is in force for a start that has ended: its agent takes the rest away.
        held.extend(of.filter(|(_, vm)| !vm.has_ended()));
    }
    Ok(held)
}

fn refuse_held(vms: &[StartedVm], own: &Holder, held: &[(Holder, StartedVm)]) -> Result<()> {
    for vm in vms {
        // Whether a process lives is asked of those in question alone.
        let is_shared = |process: &ProcessId| vm.processes.contains(process) && process.is_alive();
        let is_same = |of: &StartedVm| of.vm == vm.vm || of.processes.iter().any(is_shared);
        if let Some((holder, of)) = held.iter().find(|(holder, of)| holder != own && is_same(of)) {
            let name = &vm.vm;
            let also =
                if of.vm == *name { String::new() } else { format!(" (there it is called {})", of.vm) };
            bail!(InForce, "settings of {name} are in force already by {holder}{also}: {}", holder.remedy());
        }
    }
    Ok(())
}

/// Like [`refuse`], for VMs whose processes are not known yet.
pub fn refuse_names<'n>(names: impl Iterator<Item = &'n str>, own: &Holder, dirs: &Dirs) -> Result<()> {
    let vms: Vec<StartedVm> =
        names.map(|name| StartedVm { vm: name.to_owned(), processes: Vec::new() }).collect();
    refuse(&vms, own, dirs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contracts::cores_tests::{auto, in_force, one, placed};
    use crate::dirs::write_state;
    use crate::error::Kind;
    use crate::fixtures::{alive_and_ended, put_in_force, start};

    #[test]
    fn what_one_program_holds_the_others_leave_alone() {
        let (_dir, dirs) = crate::fixtures::dirs();
        let (this, next) = alive_and_ended();
        let (service, agent) = (Holder::Service("plc".into()), Holder::Resource("rtvm".into()));
        let all = [Holder::Apply, service.clone(), agent];
        for own in &all {
            refuse(&[start("plc", &[&this])], own, &dirs).unwrap();
        }
        let places =
            [dirs.state.clone(), scope_files::dir(&dirs).join("vm-plc"), resource_dirs(&dirs, "rtvm").state];
        for (place, holder) in places.iter().zip(&all) {
            write_state(place, JOURNAL_FILE, b"{}").unwrap();
            started::save(&[start("plc", &[&this])], place).unwrap();
            for own in &all {
                let refused = refuse(&[start("plc", &[])], own, &dirs);
                if own == holder {
                    refused.unwrap();
                    continue;
                }
                let e = refused.unwrap_err();
                assert!(e.kind() == Kind::InForce && e.to_string().contains(&holder.to_string()), "{e}");
            }
            // The same process under another name is the same VM.
            let renamed = refuse(&[start("controller", &[&this])], &Holder::Resource("other".into()), &dirs);
            let is_known = *holder != service;
            assert_eq!(renamed.is_err(), is_known, "without contract.json the process is not known");
            refuse(&[start("controller", &[&next])], &Holder::Resource("other".into()), &dirs).unwrap();
            std::fs::remove_file(place.join(JOURNAL_FILE)).unwrap();
        }
    }

    #[test]
    fn processes_that_cannot_be_read_are_not_taken_for_those_of_another_vm() {
        let (_dir, dirs) = crate::fixtures::dirs();
        let scope = scope_files::vm_dir(&dirs, "plc");
        write_state(&scope, JOURNAL_FILE, b"{}").unwrap();
        let other = [start("controller", &[])];
        refuse(&other, &Holder::Apply, &dirs).unwrap();
        write_state(&scope, scope_files::IN_FORCE_FILE, b"{").unwrap();
        refuse(&other, &Holder::Apply, &dirs).unwrap();
        // A directory in the place of the file cannot be read.
        std::fs::remove_file(scope.join(scope_files::IN_FORCE_FILE)).unwrap();
        std::fs::create_dir(scope.join(scope_files::IN_FORCE_FILE)).unwrap();
        let e = refuse(&other, &Holder::Apply, &dirs).unwrap_err();
        assert!(e.kind() != Kind::InForce && format!("{e:#}").contains("contract.json"), "{e:#}");
    }

    #[test]
    fn contracts_of_all_programs_are_found_with_the_processes_that_live() {
        let (_dir, dirs) = crate::fixtures::dirs();
        assert_eq!(cpu_of_others(&dirs).unwrap().len(), 0);
        let (this, ended) = alive_and_ended();
        let cpu = |vm: &str| in_force(&one(vm, 4, auto()), placed(&[]));
        let agents = resource_dirs(&dirs, "rtvm").state;
        write_state(&agents, JOURNAL_FILE, b"{}").unwrap();
        started::save(&[start("a", &[&this]), start("b", &[&ended])], &agents).unwrap();
        let of_agent = serde_json::to_vec(&[cpu("a"), cpu("b")]).unwrap();
        write_state(&agents, contracts::IN_FORCE_FILE, &of_agent).unwrap();
        let scope = put_in_force(&dirs, &[&this, &ended], &cpu("plc"));
        put_in_force(&dirs, &[&ended], &cpu("old"));
        let found = cpu_of_others(&dirs).unwrap();
        let found: Vec<(&str, &[u32])> = found.iter().map(|(of, pids)| (of.vm.as_str(), &pids[..])).collect();
        assert_eq!(found, [("plc", &[this.pid][..]), ("a", &[this.pid][..])]);
        // A record that cannot be read is not the same as none.
        std::fs::remove_file(scope.join(scope_files::IN_FORCE_FILE)).unwrap();
        assert!(cpu_of_others(&dirs).is_err());
    }
}
