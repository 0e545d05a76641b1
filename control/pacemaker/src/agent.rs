//! The resource agent `ocf:rtvirtio:contract`.
//!
//! The contract of each resource has a journal of its own, so contracts come and go with their VMs
//! independently of each other. `start` applies it and reads it back; `monitor` reads it again and
//! restores changed settings; `stop` puts everything back. Exit codes are those of the OCF Resource
//! Agent API 1.1, section 3.5.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use rtvirtio_apply::{KnobState, KnobStatus, Machine, OnConflict, Status};
use rtvirtio_cpu::Contract;
use rtvirtio_kernel::Root;
use rtvirtio_spec::{CpuNeed, HostSpec};
use rtvirtio_workflow::apply::{
    PlanWith, Resolved, Room, Wanted, check_replacing, open_session, plan_now, put_back, resolve,
};
use rtvirtio_workflow::devices::Devices;
use rtvirtio_workflow::guests::GuestAgents;
use rtvirtio_workflow::holders::{self, Holder};
use rtvirtio_workflow::model_choice::ModelName;
use rtvirtio_workflow::named::load_host;
use rtvirtio_workflow::plan_file::{DevicePlan, HostPlan};
use rtvirtio_workflow::scopes::{Scopes, in_force_beside};
use rtvirtio_workflow::{Dirs, Kind, Progress, contracts, interrupts, is_there, one_line, started};

use crate::node::{contract_dirs, has_directory};
use crate::{PacemakerError, marker};

/// Timeout of the monitor of a VM that Pacemaker reports as started, and of a busy lock.
const STARTING: Duration = Duration::from_secs(20);
/// Timeout for the removal of a stopped VM's cgroup.
const ENDING: Duration = Duration::from_secs(3);
const RETRY: Duration = Duration::from_millis(100);

/// Exit codes of an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Ocf {
    /// Action done, or resource running.
    Success = 0,
    /// Failed; another try may help.
    Generic = 1,
    /// Action is not implemented.
    Unimplemented = 3,
    /// A file is not on this node.
    Installed = 5,
    /// A parameter is wrong on every node.
    Configured = 6,
    /// Resource is not running.
    NotRunning = 7,
}

/// Parameters of the agent's resource.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameters {
    /// Path of the spec file.
    pub spec: PathBuf,
    /// Name of the VM's resource.
    pub resource: String,
    /// Whether the disk's settings are applied too.
    pub disk: bool,
    /// State and run directories of the host.
    pub dirs: Dirs,
}

impl Parameters {
    /// Reads the environment that Pacemaker's executor gives an agent: `OCF_RESKEY_*`,
    /// `OCF_RESOURCE_INSTANCE`. `dirs` holds the directories without a parameter.
    ///
    /// A parameter is missing or invalid, in words.
    /// What is missing, in words.
    pub fn of_environment(variable: &dyn Fn(&str) -> Option<String>, dirs: &Dirs) -> Result<Self, String> {
        let given = |name: &str| variable(&format!("OCF_RESKEY_{name}")).filter(|v| !v.is_empty());
        let spec = given("spec").ok_or("the parameter `spec` is missing")?;
        let resource = given("resource").or_else(|| variable("OCF_RESOURCE_INSTANCE"));
        let resource = resource.ok_or("neither `resource` nor OCF_RESOURCE_INSTANCE is given")?;
        if !has_directory(&resource) {
            return Err(format!("resource {resource:?} cannot name a directory: give it another name"));
        }
        let disk = match given("disk").as_deref() {
            None | Some("false" | "no" | "0") => false,
            Some("true" | "yes" | "1") => true,
            Some(other) => return Err(format!("disk is {other:?}: write true or false")),
        };
        let state = given("state_dir").map_or_else(|| dirs.state.clone(), PathBuf::from);
        Ok(Self { spec: spec.into(), resource, disk, dirs: Dirs { state, run: dirs.run.clone() } })
    }

    /// Directories with the contract's own journal.
    fn own(&self) -> Dirs {
        contract_dirs(&self.dirs, &self.resource)
    }
}

/// State of a contract as read back.
enum ContractState {
    /// All settings are as applied.
    Verified,
    /// Nothing is applied, or the VM that it was applied to has ended.
    None,
    /// A setting differs, with the reason.
    Differs(String),
    /// Something cannot be read, as in a guest that boots; nothing else differs.
    Unknown(String),
}

/// Runs an action. Warnings go to `progress`.
pub fn run(action: &str, parameters: &Parameters, progress: &dyn Progress) -> Ocf {
    let done = match action {
        "start" => start(parameters, progress).map(|()| Ocf::Success),
        "stop" => stop(parameters, progress).map(|()| Ocf::Success),
        "monitor" | "status" => monitor(parameters, progress),
        "validate-all" => validate(parameters),
        _ => return Ocf::Unimplemented,
    };
    done.unwrap_or_else(|e| {
        progress.warn(&one_line(&e));
        match e {
            PacemakerError::Configured(_) => Ocf::Configured,
            PacemakerError::NoFile(_) => Ocf::Installed,
            _ => Ocf::Generic,
        }
    })
}

fn validate(p: &Parameters) -> Result<Ocf, PacemakerError> {
    spec(p).map(|_| Ocf::Success)
}

/// Loads the spec. A mistake in it is `Configured`; a missing file may be missing on this node
/// only, and a retry does not help.
fn spec(p: &Parameters) -> Result<HostSpec, PacemakerError> {
    load_host(&p.spec).map_err(|e| match e.kind() {
        Kind::File if std::fs::metadata(&p.spec).is_err() => PacemakerError::NoFile(e),
        Kind::File => PacemakerError::Configured(e),
        _ => PacemakerError::Step(e),
    })
}

/// Applies the contract, once the VM's monitor answers, and reads it back.
fn start(p: &Parameters, progress: &dyn Progress) -> Result<(), PacemakerError> {
    let root = Root::default();
    if matches!(standing(p, &Machine::new(&root, &GuestAgents))?, ContractState::Verified) {
        return Ok(());
    }
    // Loaded once, before the loop: waiting does not make a file appear.
    let host = spec(p)?;
    // Left by an earlier start, or by a VM that has ended.
    stop(p, progress)?;
    let begin = Instant::now();
    loop {
        match apply(p, &host, progress) {
            Err(PacemakerError::Step(e)) if is_starting(&e) && begin.elapsed() < STARTING => {
                progress.pause(RETRY)?;
            }
            // Another agent holds the lock for a moment.
            Err(PacemakerError::Step(e)) if e.kind() == Kind::InForce && begin.elapsed() < STARTING => {
                progress.pause(RETRY)?;
            }
            done => break done?,
        }
    }
    // The agent of a guest may answer by now.
    match standing(p, &Machine::new(&root, &GuestAgents))? {
        ContractState::Verified => Ok(()),
        ContractState::None => Err(not_verified(p, "nothing was applied")),
        ContractState::Differs(what) | ContractState::Unknown(what) => Err(not_verified(p, &what)),
    }
}

/// Whether a start may succeed on retry: the monitor or threads of the VM may not be there yet.
fn is_starting(e: &rtvirtio_workflow::Error) -> bool {
    !matches!(
        e.kind(),
        Kind::Infeasible | Kind::NotMeasured | Kind::Argument | Kind::Cancelled | Kind::InForce
    )
}

fn apply(p: &Parameters, host: &HostSpec, progress: &dyn Progress) -> Result<(), PacemakerError> {
    let own = p.own();
    let holder = Holder::Resource(p.resource.clone());
    let names = || host.vms().iter().map(|vm| vm.name.as_str());
    holders::refuse_names(names(), &holder, &p.dirs).map_err(|e| elsewhere(p, &e))?;
    if !p.disk {
        // Held so that no other agent changes the shared groups meanwhile.
        let scopes = Scopes::lock(&p.dirs)?;
        let others = in_force_beside(&p.dirs, &p.resource)?;
        // Budget kept for a VM that has ended would count against this contract.
        let probe = rtvirtio_cpu::probe(&Root::default()).map_err(PacemakerError::Host)?;
        if let Err(e) = scopes.make_room(&probe, &others) {
            progress.warn(&spare_room(p, &e));
        }
        let wanted = Wanted::Cpu { host: host.clone() };
        let room = Room::Shared(&scopes, &others, &holder);
        let resolved = resolve(&wanted, &[], room, &own, progress).map_err(|e| match e.kind() {
            Kind::InForce => elsewhere(p, &e),
            _ => PacemakerError::Step(e),
        })?;
        let settings = resolved.apply(None, &own, progress)?;
        return applied(&own, &resolved, settings);
    }
    let wanted = planned(p, host, progress)?;
    let resolved = resolve(&wanted, &[], Room::Own, &own, progress)?;
    // Held so that no other program takes these VMs meanwhile.
    let _scopes = Scopes::lock(&p.dirs)?;
    holders::refuse(&resolved.vms, &holder, &p.dirs).map_err(|e| elsewhere(p, &e))?;
    let settings = resolved.apply(wanted.plan(), &own, progress)?;
    applied(&own, &resolved, settings)
}

/// The settings of the disks, planned now.
fn planned(p: &Parameters, host: &HostSpec, progress: &dyn Progress) -> Result<Wanted, PacemakerError> {
    // Profiles and models are the host's, the journal is the contract's.
    let devices = Devices::find(host.clone(), &p.dirs)?;
    let with = PlanWith { profile: None, model: ModelName::Auto, enough: None };
    let mut plans = Vec::new();
    for (part, site) in devices.host.parts().iter().zip(&devices.sites) {
        let (plan, _) = plan_now(site, &with, &p.dirs, progress)?;
        plans.push(DevicePlan {
            device: part.name.clone(),
            plan,
            profile: None,
            notes: site.stack.notes_on_settings(),
        });
    }
    let plan = HostPlan::new(plans);
    if !plan.is_feasible() {
        let what = format!("not applied: {}", plan.reasons().join(". "));
        return Err(not_verified(p, &what));
    }
    Ok(Wanted::All { plan, devices })
}

/// Marks a contract whose plan needed no change, so that it counts as applied.
fn applied(own: &Dirs, resolved: &Resolved, settings: usize) -> Result<(), PacemakerError> {
    if settings == 0 { marker::save(own, &resolved.vms) } else { Ok(()) }
}

/// Puts all settings back, even those changed since: the VM is about to stop, or has stopped.
fn stop(p: &Parameters, progress: &dyn Progress) -> Result<(), PacemakerError> {
    let own = p.own();
    let Some(session) = open_session(&own)? else { return Ok(()) };
    marker::remove(&own)?;
    match put_back(&session, OnConflict::Force, &own)? {
        Some(reverted) if !reverted.done => {
            return Err(not_verified(p, &format!("not put back: {}", reverted.summary())));
        }
        _ => {}
    }
    drop(session);
    // A leftover slows no VM, but counts against new contracts until the next start removes it.
    if let Err(e) = give_room_back(p, progress) {
        progress.warn(&spare_room(p, &e));
    }
    Ok(())
}

fn spare_room(p: &Parameters, e: &(dyn std::error::Error + 'static)) -> String {
    let why = one_line(e);
    format!("{}: the groups above those of VMs keep more than they need: {why}", p.resource)
}

/// Returns this contract's part of the budget of the groups above those of VMs.
fn give_room_back(p: &Parameters, progress: &dyn Progress) -> Result<(), PacemakerError> {
    let begin = Instant::now();
    let scopes = loop {
        match Scopes::lock(&p.dirs) {
            Err(e) if e.kind() == Kind::InForce && begin.elapsed() < STARTING => progress.pause(RETRY)?,
            locked => break locked?,
        }
    };
    let begin = Instant::now();
    loop {
        let probe = rtvirtio_cpu::probe(&Root::default()).map_err(PacemakerError::Host)?;
        match scopes.make_room(&probe, &in_force_beside(&p.dirs, &p.resource)?) {
            // The group of a VM that has just ended keeps its budget until its manager removes it.
            Err(_) if begin.elapsed() < ENDING => progress.pause(RETRY)?,
            made => return Ok(made?),
        }
    }
}

/// Reads the contract back. Changed settings, and another contract in the spec that fits, are
/// applied with a warning; that is success.
fn monitor(p: &Parameters, progress: &dyn Progress) -> Result<Ocf, PacemakerError> {
    let root = Root::default();
    // One for all: an agent that does not answer is waited for once.
    let machine = Machine::new(&root, &GuestAgents);
    let unread = match standing(p, &machine)? {
        ContractState::Verified => None,
        ContractState::Unknown(what) => Some(what),
        ContractState::None => return Ok(Ocf::NotRunning),
        ContractState::Differs(what) => {
            set_right(p, &what, &machine, progress)?;
            return Ok(Ocf::Success);
        }
    };
    let warn = |text: &str| progress.warn(&format!("{}: {text}", p.resource));
    let asked = asked_now(p).unwrap_or_else(|e| {
        // The applied contract stays in force whatever the file has become.
        warn(&format!("in force as applied: {}", one_line(&e)));
        None
    });
    let in_part = "in force as applied, but not all of it can be read";
    match (asked, unread) {
        (None, None) => {}
        (None, Some(unread)) => warn(&format!("{in_part}: {unread}")),
        // Applying again would take the contract away from a VM that has it.
        (Some(what), Some(unread)) => {
            warn(&format!("{in_part}: {unread}; {what}: it is applied once all can be read"));
        }
        (Some(what), None) => match check_fit(p, progress) {
            Ok(()) => replace(p, &what, progress)?,
            Err(e) => warn(&format!("{what}; what is in force stays: {}", one_line(&e))),
        },
    }
    Ok(Ocf::Success)
}

/// Gives changed settings the contract's values again. Only where that does not do, all of it is
/// put back and applied.
fn set_right(
    p: &Parameters,
    what: &str,
    machine: &Machine<'_>,
    progress: &dyn Progress,
) -> Result<(), PacemakerError> {
    let Err(remains) = set_again(p, machine) else {
        progress.warn(&format!("{}: {what}; it is applied again", p.resource));
        return Ok(());
    };
    let Err(e) = check_fit(p, progress) else { return replace(p, what, progress) };
    let (resource, why) = (&p.resource, one_line(&e));
    if !is_in_part(p, machine)? {
        progress.warn(&format!("{resource}: {what}; nothing takes its place: {why}"));
        return Err(remains);
    }
    // After a failure Pacemaker would take the rest away, and no start would bring it back.
    let not_again = one_line(&remains);
    progress.warn(&format!("{resource}: {what}; what is in force stays: {why}; {not_again}"));
    Ok(())
}

/// Whether all was applied, its budgets are in force, and so is at least one setting that it has
/// changed.
fn is_in_part(p: &Parameters, machine: &Machine<'_>) -> Result<bool, PacemakerError> {
    let status = rtvirtio_apply::status(&p.own().state, machine)?;
    Ok(status.is_some_and(|status| {
        let in_force = |knob: &&KnobStatus| matches!(knob.state, KnobState::InForce);
        let mut budgets = status.knobs.iter().filter(|knob| is_budget(knob));
        let mut changed = status
            .knobs
            .iter()
            .filter(|knob| !interrupts::is_of(&knob.path) && knob.old.as_deref() != Some(knob.new.as_str()));
        status.is_whole() && budgets.all(|knob| in_force(&knob)) && changed.any(|knob| in_force(&knob))
    }))
}

/// Whether a setting limits CPU time: a VM with a lower budget does not have its contract.
fn is_budget(knob: &KnobStatus) -> bool {
    const FILES: [&str; 4] = ["cpu.rt_runtime_us", "cpu.rt.max", "cpu.max", "cpu.cfs_quota_us"];
    let file = knob.path.rsplit('/').next().unwrap_or_default();
    FILES.contains(&file) || knob.new.starts_with("deadline ")
}

/// Puts back what is in force and applies the spec's contract, which is known to fit.
fn replace(p: &Parameters, what: &str, progress: &dyn Progress) -> Result<(), PacemakerError> {
    progress.warn(&format!("{}: {what}; it is applied again", p.resource));
    stop(p, progress)?;
    start(p, progress)
}

/// Checks that the spec's contract can take the place of the one in force, whose own share does not
/// count: nothing is put back for a contract that is not known to fit.
fn check_fit(p: &Parameters, progress: &dyn Progress) -> Result<(), PacemakerError> {
    let (host, own, holder) = (spec(p)?, p.own(), Holder::Resource(p.resource.clone()));
    let names = host.vms().iter().map(|vm| vm.name.as_str());
    holders::refuse_names(names, &holder, &p.dirs).map_err(|e| elsewhere(p, &e))?;
    if !p.disk {
        // As `start` does: spare room would count against this contract.
        if let Err(e) = lower_room(p) {
            progress.warn(&spare_room(p, &e));
        }
    }
    let fits = check_replacing(&host, &own, &holder, &p.dirs, p.disk, progress);
    let contracts = fits.map_err(|e| match e.kind() {
        Kind::InForce => elsewhere(p, &e),
        _ => PacemakerError::Step(e),
    })?;
    if p.disk {
        planned(p, &host, progress)?;
    } else if contracts == 0 {
        return Err(not_verified(p, "no VM of the spec has `cpu`"));
    }
    Ok(())
}

/// Lowers the groups above those of VMs to what the contracts in force need, this one included.
fn lower_room(p: &Parameters) -> Result<(), PacemakerError> {
    let scopes = Scopes::lock(&p.dirs)?;
    let probe = rtvirtio_cpu::probe(&Root::default()).map_err(PacemakerError::Host)?;
    Ok(scopes.make_room(&probe, &in_force_beside(&p.dirs, &p.resource)?)?)
}

/// Gives settings in force that another program has changed the contract's values again.
fn set_again(p: &Parameters, machine: &Machine<'_>) -> Result<(), PacemakerError> {
    if let Some(session) = open_session(&p.own())? {
        let again = session.restore(&|_: &str, path: &str| !interrupts::is_of(path), machine)?;
        if let Some((knob, why)) = again.failed.first() {
            return Err(not_verified(p, &format!("{knob} is not set again: {why}")));
        }
    }
    match standing(p, machine)? {
        ContractState::Verified | ContractState::Unknown(_) => Ok(()),
        ContractState::None => Err(not_verified(p, "nothing is in force")),
        ContractState::Differs(what) => Err(not_verified(p, &what)),
    }
}

fn standing(p: &Parameters, machine: &Machine<'_>) -> Result<ContractState, PacemakerError> {
    let own = p.own();
    let Some(status) = rtvirtio_apply::status(&own.state, machine)? else {
        return Ok(match marker::is_in_force(&own)? {
            true => ContractState::Verified,
            false => ContractState::None,
        });
    };
    if status.rebooted || !started::ended(&own.state)?.is_empty() {
        return Ok(ContractState::None);
    }
    Ok(compared(&status))
}

/// Difference between the spec's CPU contracts and the applied ones; `None` when equal.
fn asked_now(p: &Parameters) -> Result<Option<String>, PacemakerError> {
    let own = p.own();
    if !is_there(&own.state.join(contracts::IN_FORCE_FILE))? {
        return Ok(None);
    }
    let applied = contracts::in_force(&own.state)?;
    for vm in load_host(&p.spec)?.vms() {
        let Some(CpuNeed::Contract { budget, period }) = vm.cpu.need else { continue };
        let now = Contract::new(budget, period);
        let then = applied.iter().find(|a| a.vm == vm.name).map(|a| a.contract);
        if now != then {
            let words = |c: Option<Contract>| c.map_or_else(|| "nothing".to_owned(), |c| c.to_string());
            return Ok(Some(format!(
                "{}: the spec asks for {} now, {} was applied",
                vm.name,
                words(now),
                words(then)
            )));
        }
    }
    Ok(None)
}

/// Compares the settings with what was applied. Settings of a thread that has ended do not count:
/// threads end all the time. Nor do CPUs of interrupts, which irqbalance moves at any time: a VM
/// keeps its contract all the same.
fn compared(status: &Status) -> ContractState {
    if !status.is_whole() {
        return ContractState::Differs("its settings are half applied, or half put back".to_owned());
    }
    let (mut in_force, mut gone, mut unknown) = (0, 0, None);
    for knob in status.knobs.iter().filter(|knob| !interrupts::is_of(&knob.path)) {
        match &knob.state {
            KnobState::InForce => in_force += 1,
            KnobState::Gone { .. } => gone += 1,
            KnobState::Original => {
                return ContractState::Differs(format!("{} is as before the contract", knob.knob));
            }
            KnobState::Changed { found } => {
                return ContractState::Differs(format!("{} was changed to {found}", knob.knob));
            }
            KnobState::Unknown { error } => {
                unknown.get_or_insert_with(|| format!("{}: {error}", knob.knob));
            }
        }
    }
    match unknown {
        Some(what) if in_force > 0 || gone == 0 => ContractState::Unknown(what),
        None if in_force > 0 => ContractState::Verified,
        _ => ContractState::Differs("nothing of it is left".to_owned()),
    }
}

/// The VM is held by another program; an agent that holds a lock for a moment is not one.
fn elsewhere(p: &Parameters, e: &rtvirtio_workflow::Error) -> PacemakerError {
    PacemakerError::HeldElsewhere { resource: p.resource.clone(), why: one_line(e) }
}

fn not_verified(p: &Parameters, what: &str) -> PacemakerError {
    PacemakerError::NotVerified { resource: p.resource.clone(), what: what.to_owned() }
}

#[cfg(test)]
mod tests;
