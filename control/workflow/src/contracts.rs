//! The spec's CPU contracts and demands as writes on this host.

mod cores;
mod in_turn;
mod partitions;
mod ranks;
mod shared_cpus;
#[cfg(test)]
mod tests;
mod writes;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rtvirtio_apply::JOURNAL_FILE;
use rtvirtio_cpu::{
    Asked, Backend, Choice, Contract, Cores, CpuProfile, Demand, Level, Order, Partition, Probe, Settings,
    Setup, UrgencyRange, choose, choose_pinned, find_all, group_name, probe, room_load, tick,
};
use rtvirtio_kernel::trusted::{DATA_LIMIT, read_config_text};
use rtvirtio_kernel::{ProcessId, Root};
use rtvirtio_spec::{CpuNeed, Priorities, Urgency, Vm};
use rtvirtio_units::Ratio;
use serde::{Deserialize, Serialize};

use crate::dirs::{Dirs, is_there, write_state};
use crate::error::{Context as _, Error, Kind, Result, bail};
use crate::host::{cpu_model, kernel_release};
use crate::progress::Progress;
use crate::started;

#[cfg(test)]
pub(crate) use cores::tests as cores_tests;
pub(crate) use cores::{FAIR_SERVER_STAYS, give_cpus, with_hotplugged_vcpus};
pub use in_turn::{AdmittedInTurn, VmsNow, of_vms_in_turn};
pub(crate) use partitions::{
    fault as partition_fault, of_one as partition_of_one, refuse as refuse_partitions,
};
use ranks::rank;
pub(crate) use writes::{ancestor_capacity, check_cpus, room_for, writes};
pub use writes::{demand_text, explain, writes_of_one};

/// The settings of one VM's contract.
#[derive(Serialize)]
pub struct VmCpu {
    /// Name of the VM in the spec.
    pub vm: String,
    /// Budget of CPU time and its period.
    pub contract: Contract,
    /// Order of its threads.
    pub order: Order,
    /// Priority relative to the other VMs with contracts.
    pub level: Level,
    /// Mechanism, writes and notes of the contract.
    #[serde(flatten)]
    pub settings: Settings,
    /// Demand from which the contract was derived; `None` for a given contract.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub found: Option<DemandChoice>,
    /// The range in which its guest moves its vCPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub urgency: Option<UrgencyRange>,
    /// CPUs of its threads, where the spec has `cores`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cores: Option<Cores>,
    /// CPUs of its cgroup, where the spec has `partition` in `cores`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub partition: Option<Partition>,
}

/// A contract in force, as saved next to the journal; most fields are those of [`VmCpu`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InForce {
    pub vm: String,
    pub contract: Contract,
    pub order: Order,
    #[serde(default)]
    pub level: Level,
    /// Kernel mechanism that enforces it.
    pub backend: Backend,
    /// The cgroup with the budget, where it is the VM's own: [`Settings::group`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<PathBuf>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub urgency: Option<UrgencyRange>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cores: Option<Cores>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub partition: Option<Partition>,
}

impl InForce {
    /// Record of settings that are about to be written.
    #[must_use]
    pub fn from_settings(v: &VmCpu) -> Self {
        Self {
            vm: v.vm.clone(),
            contract: v.contract,
            order: v.order,
            level: v.level,
            backend: v.settings.backend,
            group: v.settings.group.clone(),
            urgency: v.urgency,
            cores: v.cores.clone(),
            partition: v.partition.clone(),
        }
    }

    /// Record of an admitted contract that is to get these CPUs.
    fn planned(one: &Contracted, cores: Option<Cores>) -> Self {
        Self {
            vm: one.vm.clone(),
            contract: one.contract,
            order: one.order,
            level: one.level,
            backend: one.backend,
            group: None,
            urgency: one.urgency,
            cores,
            partition: None,
        }
    }
}

/// Name of the file with the contracts in force; valid only with a journal.
pub const IN_FORCE_FILE: &str = "cpu.json";

/// Saves the contracts that are about to be journaled, for [`crate::keep`].
pub(crate) fn save(all: &[VmCpu], state_dir: &Path) -> Result<()> {
    let all: Vec<InForce> = all.iter().map(InForce::from_settings).collect();
    write_state(state_dir, IN_FORCE_FILE, &serde_json::to_vec_pretty(&all)?)
}

/// The contracts in force.
pub fn in_force(state_dir: &Path) -> Result<Vec<InForce>> {
    let path = state_dir.join(IN_FORCE_FILE);
    let text = read_config_text(&path, DATA_LIMIT)
        .map_err(|e| Error::from_source(Kind::NotInForce, e))
        .with_context(|| {
            format!("no CPU contract is in force ({}): `rtvirtio apply` first", path.display())
        })?;
    serde_json::from_str(&text)
        .map_err(|e| Error::from_source(Kind::File, e))
        .with_context(|| format!("{} is damaged: revert, and apply again", path.display()))
}

/// Saves a contract in force that was changed, in place of the VM's one that is saved.
pub(crate) fn replace_in_force(of: &InForce, state_dir: &Path) -> Result<()> {
    let mut all = in_force(state_dir)?;
    all.iter_mut().filter(|saved| saved.vm == of.vm).for_each(|saved| saved.clone_from(of));
    write_state(state_dir, IN_FORCE_FILE, &serde_json::to_vec_pretty(&all)?)
}

/// Admitted contract of a VM, before its writes are known; most fields are those of [`VmCpu`].
#[derive(Clone, Serialize)]
pub struct Contracted {
    pub vm: String,
    pub contract: Contract,
    pub order: Order,
    pub level: Level,
    /// Kernel mechanism that will enforce it.
    pub backend: Backend,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub found: Option<DemandChoice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub urgency: Option<UrgencyRange>,
    /// CPUs that the spec wants for its threads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cores: Option<rtvirtio_spec::Cores>,
    /// Limits of the promise, in sentences.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// The contract for a demand.
#[derive(Clone, Serialize)]
pub struct DemandChoice {
    /// Requests and their deadline, from the spec.
    pub demand: Demand,
    /// The contract, and the point of the curve that decided.
    #[serde(flatten)]
    pub choice: Choice,
}

/// The CPU profile of a VM; `files` holds `VM=FILE` for profiles outside of the state directory.
fn profile_of(vm: &Vm, files: &[String], dirs: &Dirs, progress: &dyn Progress) -> Result<CpuProfile> {
    let named = files.iter().filter_map(|f| f.split_once('=')).find(|(name, _)| *name == vm.name);
    let path = named.map_or_else(|| dirs.cpu_profile(&vm.name), |(_, file)| PathBuf::from(file));
    if !is_there(&path)? {
        bail!(
            NotMeasured,
            "vm {}: its demand needs its throughput over budget, which has not been measured ({} does not exist): run `rtvirtio profile cpu {} --spec SPEC --url \
             http://...`, or write cpu = {{ budget = ..., period = ... }}",
            vm.name,
            path.display(),
            vm.name
        );
    }
    let profile = CpuProfile::load(&path)?;
    let setup = &profile.setup;
    if setup.vm != vm.name && named.is_none() {
        bail!(NotMeasured, "{} is the profile of another VM, {}", path.display(), setup.vm);
    }
    let order = order(vm);
    if setup.order != order {
        bail!(
            NotMeasured,
            "vm {}: its CPU profile was measured with other priorities: measure again with `rtvirtio profile cpu`",
            vm.name
        );
    }
    let kernel = kernel_release();
    of_another_host(&vm.name, setup, (&kernel, cpu_model())).iter().for_each(|line| progress.warn(line));
    Ok(profile)
}

/// Warnings on a profile that was measured on another kernel than this one, or on CPUs of another
/// model, where the same time does other work.
fn of_another_host(vm: &str, setup: &Setup, (kernel, model): (&str, &str)) -> Vec<String> {
    let line = |what: &str, then: &str, now: &str| {
        let differs =
            || format!("vm {vm}: its CPU profile is of {what} {then}, this is {now}: measure again");
        (then != now).then(differs)
    };
    let all = [line("kernel", &setup.kernel, kernel), line("CPU model", &setup.cpu_model, model)];
    all.into_iter().flatten().collect()
}

fn order(vm: &Vm) -> Order {
    match vm.cpu.priorities {
        Some(Priorities::Rt) => Order::Rt,
        None => Order::Contract,
    }
}

/// The range in which a VM's guest moves its vCPUs.
fn range(vm: &Vm) -> Option<UrgencyRange> {
    let range = |u: Urgency| UrgencyRange {
        ceiling: u.ceiling,
        floor: u.floor,
        budget: u.budget,
        reports: u.reports,
        interrupts: u.interrupts,
    };
    vm.cpu.urgency.map(range)
}

/// Contracts that are admitted together.
pub struct Admitted {
    /// The kernel's mechanisms, without what these contracts take.
    pub probe: Probe,
    /// In spec order, without VMs that have none.
    pub contracts: Vec<Contracted>,
}

/// A VM of the spec with `cpu`, resolved: its order, the backend that holds it, its need.
struct VmNeed<'a> {
    vm: &'a str,
    order: Order,
    backend: Backend,
    need: Need,
    urgency: Option<UrgencyRange>,
    cores: Option<rtvirtio_spec::Cores>,
}

/// A contract as given, or a demand with the VM's profile.
enum Need {
    Contract(Contract),
    Demand { demand: Demand, profile: Box<CpuProfile> },
}

impl<'a> VmNeed<'a> {
    /// Need of a contract in force.
    fn in_force(of: &'a InForce) -> Self {
        let need = Need::Contract(of.contract);
        // Its CPUs are chosen already; those of a partition are a root domain.
        let cores = of.partition.as_ref().map(partitions::wanted);
        Self { vm: &of.vm, order: of.order, backend: of.backend, need, urgency: of.urgency, cores }
    }

    fn asked(&self) -> Asked<'_> {
        match &self.need {
            Need::Contract(contract) => Asked::Given(*contract),
            Need::Demand { demand, profile } => {
                Asked::Found { profile, demand: *demand, backend: self.backend }
            }
        }
    }
}

/// The VMs of a spec that have `cpu`.
fn needs<'a>(
    vms: &'a [Vm],
    probe: &Probe,
    files: &[String],
    dirs: &Dirs,
    progress: &dyn Progress,
) -> Result<Vec<VmNeed<'a>>> {
    let mut profiles = BTreeMap::new();
    for vm in vms.iter().filter(|vm| matches!(vm.cpu.need, Some(CpuNeed::Demand { .. }))) {
        profiles.insert(vm.name.as_str(), profile_of(vm, files, dirs, progress)?);
    }
    let mut all = Vec::new();
    for vm in vms {
        let Some(need) = vm.cpu.need else { continue };
        let order = order(vm);
        let (cores, real_time) = (vm.cpu.cores.clone(), order == Order::Rt);
        let has_partition = cores.as_ref().is_some_and(|cores| cores.partition);
        if has_partition {
            partitions::check(&Root::default(), &vm.name)?;
        }
        let found = if cores.is_some() && !has_partition {
            choose_pinned(probe, real_time)
        } else {
            choose(probe, None, real_time)
        };
        let Some(found) = found else {
            let why: Vec<String> = probe.missing.iter().map(|(b, why)| format!("{b}: {why}")).collect();
            bail!(
                System,
                "vm {}: no mechanism of this kernel can enforce its contract: {}",
                vm.name,
                why.join("; ")
            );
        };
        let need = match need {
            CpuNeed::Contract { budget, period } => match Contract::new(budget, period) {
                Some(contract) => Need::Contract(contract),
                None => bail!(File, "vm {}: a budget of {budget} in {period} is impossible", vm.name),
            },
            CpuNeed::Demand { requests, deadline } => {
                let profile = profiles.remove(vm.name.as_str()).context("a demand without a profile")?;
                Need::Demand { demand: Demand { requests, deadline }, profile: Box::new(profile) }
            }
        };
        all.push(VmNeed { vm: &vm.name, order, backend: found.backend, need, urgency: range(vm), cores });
    }
    Ok(all)
}

/// The contracts of all VMs: those that the spec gives, and those found for demands. All together
/// are admitted. `None` for a spec without `cpu`.
///
/// # Errors
/// [`Kind::Infeasible`] where the VMs ask for more than there is; others where something is
/// missing.
pub fn of_vms(
    vms: &[Vm],
    files: &[String],
    dirs: &Dirs,
    progress: &dyn Progress,
) -> Result<Option<Admitted>> {
    if vms.iter().all(|vm| vm.cpu.need.is_none()) {
        return Ok(None);
    }
    let is_vm = |name: &str| vms.iter().any(|vm| vm.name == name);
    if let Some(wrong) = files.iter().find(|f| !f.split_once('=').is_some_and(|(name, _)| is_vm(name))) {
        bail!(Argument, "--cpu-profile {wrong}: write VM=FILE with a VM of the spec");
    }
    let mut probe = probe(&Root::default())?;
    let ours = of_journal(&dirs.state)?;
    // All that this journal has is replaced, also what a VM has under another name.
    let kept = ours.contracts.iter().map(|of| of.vm.as_str());
    forget_own(&mut probe, vms.iter().map(|vm| vm.name.as_str()).chain(kept), &ours)?;
    let needs = needs(vms, &probe, files, dirs, progress)?;
    let contracts = contracted(&probe, &needs.iter().collect::<Vec<_>>())?;
    Ok(Some(Admitted { probe, contracts }))
}

/// Whether contracts are in force: without a journal what is saved of them means nothing.
pub(crate) fn any_in_force(state_dir: &Path) -> Result<bool> {
    Ok(is_there(&state_dir.join(JOURNAL_FILE))? && is_there(&state_dir.join(IN_FORCE_FILE))?)
}

/// The contracts in force of one journal, with the processes of their VMs.
fn of_journal(state_dir: &Path) -> Result<ActiveContracts> {
    if !any_in_force(state_dir)? {
        return Ok(ActiveContracts::default());
    }
    let contracts = in_force(state_dir)?;
    let vms: Vec<&str> = contracts.iter().map(|of| of.vm.as_str()).collect();
    let processes = started::processes(state_dir, &vms)?;
    Ok(ActiveContracts { contracts, processes })
}

/// The contracts of these VMs, all together admitted.
fn contracted(probe: &Probe, needs: &[&VmNeed<'_>]) -> Result<Vec<Contracted>> {
    let mut contracts = fitting(probe, needs)?;
    rank(&mut contracts);
    Ok(contracts)
}

/// Like [`contracted`], before levels and notes.
fn fitting(probe: &Probe, needs: &[&VmNeed<'_>]) -> Result<Vec<Contracted>> {
    let partitions = partitions::cpus(needs.iter().filter_map(|n| n.cores.as_ref()));
    // The loads of other programs on a backend reduce what all of our demands share.
    let taken = needs.iter().filter_map(|n| {
        let own = n.cores.as_ref().and_then(rtvirtio_spec::Cores::partition);
        let found = choose(probe, Some(n.backend), false)?;
        Some(found.grant.in_root_domain(own, &partitions).taken_share())
    });
    let taken = taken.fold(0.0, f64::max);
    let asked: Vec<Asked<'_>> = needs.iter().map(|n| n.asked()).collect();
    let choices = find_all(&asked, taken, tick())?;
    let mut contracts: Vec<Contracted> = Vec::new();
    for (of_vm, choice) in needs.iter().zip(choices) {
        let (contract, found) = match (&of_vm.need, choice) {
            (Need::Contract(contract), _) => (*contract, None),
            (Need::Demand { demand, .. }, Some(choice)) => {
                (choice.contract, Some(DemandChoice { demand: *demand, choice }))
            }
            (Need::Demand { .. }, None) => continue,
        };
        contracts.push(Contracted {
            vm: of_vm.vm.to_owned(),
            contract,
            order: of_vm.order,
            level: Level::ALONE,
            backend: of_vm.backend,
            found,
            urgency: of_vm.urgency,
            cores: of_vm.cores.clone(),
            notes: Vec::new(),
        });
    }
    partitions::admit_all(probe, &contracts, &partitions)?;
    Ok(contracts)
}

/// Share of each CPU that the kernel grants contracts, those of these VMs included.
pub fn free_share(vms: &[&str], ours: &ActiveContracts) -> Result<Ratio> {
    let mut probe = probe(&Root::default())?;
    forget_own(&mut probe, vms.iter().copied(), ours)?;
    Ok(Ratio(choose(&probe, None, false).map_or(0.0, |found| found.grant.free())))
}

/// Contracts in force, which the admitted ones replace.
#[derive(Clone, Debug, Default)]
pub struct ActiveContracts {
    /// Contracts as saved next to their journals.
    pub contracts: Vec<InForce>,
    /// Processes of these VMs, whose threads' reservations are not counted as load of others.
    pub processes: Vec<ProcessId>,
}

impl FromIterator<(InForce, Vec<ProcessId>)> for ActiveContracts {
    /// From each contract with the processes of its VM.
    fn from_iter<I: IntoIterator<Item = (InForce, Vec<ProcessId>)>>(all: I) -> Self {
        let (contracts, processes): (_, Vec<_>) = all.into_iter().unzip();
        Self { contracts, processes: processes.concat() }
    }
}

/// Removes the contracts of these VMs from the loads of others: `apply` replaces them.
fn forget_own<'n>(
    probe: &mut Probe,
    vms: impl Iterator<Item = &'n str>,
    ours: &ActiveContracts,
) -> Result<()> {
    let vms: Vec<&str> = vms.collect();
    let own: Vec<String> = vms.iter().map(|vm| format!("cgroup {}", group_name(vm))).collect();
    let mut room = Vec::new();
    for of in &ours.contracts {
        let is_ours = vms.contains(&of.vm.as_str()) && of.backend == Backend::RtGroup;
        if let Some(group) = of.group.as_ref().filter(|_| is_ours) {
            room.extend(room_load(&Root::default(), probe, group, &of.contract)?);
        }
    }
    for found in probe.found.iter_mut().filter(|f| f.backend == Backend::RtGroup) {
        for load in &mut found.grant.taken {
            let ours: f64 = room.iter().filter(|r| r.name == load.name).map(|r| r.share.0).sum();
            load.share.0 = (load.share.0 - ours).max(0.0);
        }
    }
    for found in &mut probe.found {
        found.grant.taken.retain(|load| !own.contains(&load.name));
        found.grant.leave_out(&ours.processes);
    }
    Ok(())
}
