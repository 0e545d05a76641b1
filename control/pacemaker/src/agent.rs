//! The resource agent `ocf:rtvirtio:contract`.
//!
//! The contract of each resource has a journal of its own, so contracts come and go with their VMs
//! independently of each other. `start` applies it and reads it back; `monitor` reads it again and
//! restores changed settings; `stop` puts everything back. Exit codes are those of the OCF Resource
//! Agent API 1.1, section 3.5.

mod applied_spec;
mod asked;
mod parameters;
mod room;
mod standing;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use rtvirtio_apply::{Guests, Machine, OnConflict};
use rtvirtio_kernel::Root;
use rtvirtio_spec::HostSpec;
use rtvirtio_workflow::apply::{
    PlanWith, Resolved, Room, Wanted, check_replacing, open_session, plan_now, put_back_on, resolve,
};
use rtvirtio_workflow::devices::Devices;
use rtvirtio_workflow::guests::{AgentsInTime, WaitLimit};
use rtvirtio_workflow::holders::{self, Holder};
use rtvirtio_workflow::model_choice::ModelName;
use rtvirtio_workflow::named::load_host_with_text;
use rtvirtio_workflow::plan_file::{DevicePlan, HostPlan};
use rtvirtio_workflow::scopes::{Scopes, in_force_beside};
use rtvirtio_workflow::{Dirs, Kind, Progress, contracts, in_force, interrupts, one_line};

use crate::{PacemakerError, marker};
use asked::asked_now;
pub use parameters::Parameters;
use room::{RETRY, give_room_back, locked, lower_room, warn_of_room};
use standing::{ContractState, is_in_part, standing};

/// Time for guests' agents in one action, all together; reading back what was applied has its own.
/// Like all that follow, at most what is left of [`waiting_time`].
const AGENTS: Duration = Duration::from_secs(20);
/// Timeout of the monitor of a VM that Pacemaker reports as started, of a lock that is busy then,
/// and of guests' agents when the contract is read back.
const STARTING: Duration = Duration::from_secs(20);
/// Age of a monitor, which has 30 s, from which on it puts nothing back to replace it: to replace a
/// contract and to go back takes twice the time of `stop` and of applying one.
const IN_TIME: Duration = Duration::from_secs(8);
/// Like `STARTING`, within a monitor.
const REPLACING: Duration = Duration::from_secs(4);

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

/// A spec that is to be applied.
struct Wish {
    host: HostSpec,
    /// Content of its file.
    text: Vec<u8>,
    /// Plan of its disks; `None` where it is to be made.
    plan: Option<HostPlan>,
}

/// A contract that is known to fit, and the lock, so that no other program takes its room.
struct Fitting<'p> {
    wish: Wish,
    scopes: Scopes<'p>,
}

/// Time for all waits of a call together: the rest of its timeout is for what it does meanwhile and
/// after, such as going back. Without a timeout of the cluster, that of the agent's description.
fn waiting_time(action: &str, p: &Parameters) -> Duration {
    let usual = Duration::from_secs(if matches!(action, "monitor" | "status") { 30 } else { 60 });
    p.timeout.unwrap_or(usual) * 2 / 3
}

/// Runs an action. Warnings go to `progress`.
pub fn run(action: &str, parameters: &Parameters, progress: &dyn Progress) -> Ocf {
    let _limit = WaitLimit::lasting(waiting_time(action, parameters));
    // One for the whole action, which has a time limit.
    let guests = AgentsInTime::lasting(AGENTS);
    let done = match action {
        "start" => start(parameters, &guests, progress).map(|()| Ocf::Success),
        "stop" => stop(parameters, None, &guests, progress).map(|()| Ocf::Success),
        "monitor" | "status" => monitor(parameters, &guests, progress),
        "validate-all" => spec(parameters).map(|_| Ocf::Success),
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

/// Loads the spec. A mistake in it is `Configured`; a missing file may be missing on this node
/// only, and a retry does not help.
fn spec(p: &Parameters) -> Result<Wish, PacemakerError> {
    let (host, text) = load_host_with_text(&p.spec).map_err(|e| match e.kind() {
        Kind::File if std::fs::metadata(&p.spec).is_err() => PacemakerError::NoFile(e),
        Kind::File => PacemakerError::Configured(e),
        _ => PacemakerError::Step(e),
    })?;
    Ok(Wish { host, text, plan: None })
}

fn start(p: &Parameters, guests: &dyn Guests, progress: &dyn Progress) -> Result<(), PacemakerError> {
    let root = Root::default();
    if matches!(standing(p, &Machine::new(&root, guests))?, ContractState::Verified) {
        return Ok(());
    }
    // Loaded once, before the loop: waiting does not make a file appear.
    let wish = spec(p)?;
    // Left by an earlier start, or by a VM that has ended.
    stop(p, None, guests, progress)?;
    bring(p, &wish, None, progress)
}

/// Applies a spec, once the VM's monitor answers, and reads it back. `held` is the lock where the
/// caller has it.
fn bring(
    p: &Parameters,
    wish: &Wish,
    held: Option<&Scopes<'_>>,
    progress: &dyn Progress,
) -> Result<(), PacemakerError> {
    let usual = if held.is_some() { REPLACING } else { STARTING };
    let (begin, limit) = (Instant::now(), WaitLimit::left(usual));
    loop {
        match apply(p, wish, held, progress) {
            // Another agent holds the lock for a moment.
            Err(PacemakerError::Step(e))
                if (is_starting(&e) || e.kind() == Kind::InForce) && begin.elapsed() < limit =>
            {
                progress.pause(RETRY)?;
            }
            done => break done?,
        }
    }
    let (root, guests) = (Root::default(), AgentsInTime::lasting(limit));
    // The agent of a guest may answer by now.
    match standing(p, &Machine::new(&root, &guests))? {
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

fn apply(
    p: &Parameters,
    wish: &Wish,
    held: Option<&Scopes<'_>>,
    progress: &dyn Progress,
) -> Result<(), PacemakerError> {
    let (own, host) = (p.own(), &wish.host);
    let holder = Holder::Resource(p.resource.clone());
    let names = host.vms().iter().map(|vm| vm.name.as_str());
    holders::refuse_names(names, &holder, &p.dirs).map_err(|e| refused(p, e))?;
    if !p.disk {
        // Held so that no other agent changes the shared groups meanwhile.
        let taken;
        let scopes = if let Some(scopes) = held {
            scopes
        } else {
            taken = Scopes::lock(&p.dirs)?;
            &taken
        };
        // Budget kept for a VM that has ended would count against this contract.
        warn_of_room(p, lower_room(p, scopes), progress);
        let others = in_force_beside(&p.dirs, &p.resource)?;
        let wanted = Wanted::Cpu { host: host.clone() };
        let room = Room::Shared(scopes, &others, &holder);
        let resolved = resolve(&wanted, &[], room, &own, progress).map_err(|e| refused(p, e))?;
        return put_in_force(&own, wish, &resolved, None, progress);
    }
    let wanted = match &wish.plan {
        Some(plan) => Wanted::All { plan: plan.clone(), devices: Devices::find(host.clone(), &p.dirs)? },
        None => planned(p, host, progress)?,
    };
    let resolved = resolve(&wanted, &[], Room::Own, &own, progress)?;
    // Held so that no other program takes these VMs meanwhile.
    let _taken = if held.is_none() { Some(Scopes::lock(&p.dirs)?) } else { None };
    holders::refuse(&resolved.vms, &holder, &p.dirs).map_err(|e| refused(p, e))?;
    put_in_force(&own, wish, &resolved, wanted.plan(), progress)
}

/// Carries the writes out. A contract whose plan needs no change is marked, so that it counts as
/// applied.
fn put_in_force(
    own: &Dirs,
    wish: &Wish,
    resolved: &Resolved,
    plan: Option<&HostPlan>,
    progress: &dyn Progress,
) -> Result<(), PacemakerError> {
    // Before the journal or the mark, without which it means nothing.
    applied_spec::save(own, &wish.text)?;
    let settings = resolved.apply(plan, own, progress)?;
    if settings == 0 { marker::save(own, &resolved.vms) } else { Ok(()) }
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

/// Puts all settings back, even those changed since: the VM is about to stop, or has stopped.
/// `held` is the lock of a caller that applies a contract next, for which the copies of specs stay.
fn stop(
    p: &Parameters,
    held: Option<&Scopes<'_>>,
    guests: &dyn Guests,
    progress: &dyn Progress,
) -> Result<(), PacemakerError> {
    let own = p.own();
    let Some(session) = open_session(&own)? else { return Ok(()) };
    marker::remove(&own)?;
    let root = Root::default();
    match put_back_on(&Machine::new(&root, guests), &session, OnConflict::Force, &own)? {
        Some(reverted) if !reverted.done => {
            return Err(not_verified(p, &format!("not put back: {}", reverted.summary())));
        }
        _ => {}
    }
    // Without a journal they mean nothing, so the settings are back all the same.
    let forgotten = if held.is_none() { applied_spec::forget(&own) } else { Ok(()) };
    if let Err(e) = forgotten {
        progress.warn(&format!("{}: {}", p.resource, one_line(&e)));
    }
    drop(session);
    // A leftover slows no VM, but counts against new contracts until the next start removes it.
    warn_of_room(p, give_room_back(p, held, progress), progress);
    Ok(())
}

/// Reads the contract back. Changed settings, and another contract in the spec that fits, are
/// applied with a warning; that is success.
fn monitor(p: &Parameters, guests: &dyn Guests, progress: &dyn Progress) -> Result<Ocf, PacemakerError> {
    let (begin, root) = (Instant::now(), Root::default());
    // One for all: an agent that does not answer is waited for once.
    let machine = Machine::new(&root, guests);
    let unread = match standing(p, &machine)? {
        ContractState::Verified => None,
        ContractState::Unknown(what) => Some(what),
        ContractState::None => return Ok(Ocf::NotRunning),
        ContractState::Differs(what) => {
            return set_right(p, &what, machine, begin, guests, progress).map(|()| Ocf::Success);
        }
    };
    // Guests' agents serve one connection at a time.
    drop(machine);
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
        (Some(asked), Some(unread)) => {
            warn(&format!("{in_part}: {unread}; {}: it is applied once all can be read", asked.what));
        }
        (Some(asked), None) if asked.is_refused => warn(&format!(
            "{}; that could not be applied, and what was in force before is in force: change the spec \
             or restart this resource to try again",
            asked.what
        )),
        (Some(asked), None) => match check_fit(p, begin, progress) {
            Ok(next) => replace(p, &asked.what, &next, guests, progress)?,
            Err(e) => warn(&format!("{}; what is in force stays: {}", asked.what, one_line(&e))),
        },
    }
    Ok(Ocf::Success)
}

/// Gives changed settings the contract's values again. Only where that does not do, all of it is
/// put back and applied.
fn set_right(
    p: &Parameters,
    what: &str,
    machine: Machine<'_>,
    begin: Instant,
    guests: &dyn Guests,
    progress: &dyn Progress,
) -> Result<(), PacemakerError> {
    let Err(remains) = set_again(p, &machine) else {
        progress.warn(&format!("{}: {what}; it is applied again", p.resource));
        return Ok(());
    };
    // Guests' agents serve one connection at a time.
    drop(machine);
    let e = match check_fit(p, begin, progress) {
        Ok(next) => return replace(p, what, &next, guests, progress),
        Err(e) => e,
    };
    let (resource, why, root) = (&p.resource, one_line(&e), Root::default());
    if !is_in_part(p, &Machine::new(&root, guests))? {
        progress.warn(&format!("{resource}: {what}; nothing takes its place: {why}"));
        return Err(remains);
    }
    // After a failure Pacemaker would take the rest away, and no start would bring it back.
    let not_again = one_line(&remains);
    progress.warn(&format!("{resource}: {what}; what is in force stays: {why}; {not_again}"));
    Ok(())
}

/// Puts back what is in force and applies what takes its place. Where that fails all the same, what
/// was in force is applied again, once.
fn replace(
    p: &Parameters,
    what: &str,
    next: &Fitting<'_>,
    guests: &dyn Guests,
    progress: &dyn Progress,
) -> Result<(), PacemakerError> {
    let warn = |text: &str| progress.warn(&format!("{}: {text}", p.resource));
    let (own, scopes) = (p.own(), Some(&next.scopes));
    let before = before(p).unwrap_or_else(|e| {
        warn(&format!("what is in force could not be applied again after a failure: {}", one_line(&e)));
        None
    });
    warn(&format!("{what}; it is applied again"));
    stop(p, scopes, guests, progress)?;
    let Err(failed) = bring(p, &next.wish, scopes, progress) else {
        if let Err(e) = applied_spec::accept(&own, &next.wish.text) {
            warn(&one_line(&e));
        }
        return Ok(());
    };
    let Some(before) = before else { return Err(failed) };
    let back = stop(p, scopes, guests, progress).and_then(|()| bring(p, &before, scopes, progress));
    if let Err(e) = back {
        warn(&format!("nor is the contract from before in force as it was: {}", one_line(&e)));
        return Err(failed);
    }
    // Without CPU contracts there is no such file; the settings were read back all the same.
    let of_vms = contracts::in_force(&own.state).unwrap_or_default();
    let of_vms: Vec<String> = of_vms.iter().map(|of| format!(" ({} {})", of.vm, of.contract)).collect();
    let again = format!("the contract from before{} is in force again", of_vms.concat());
    warn(&format!("{what}; that could not be applied, {again}: {}", one_line(&failed)));
    Ok(())
}

/// Contract in force, to apply it again; `None` where its spec was not kept.
fn before(p: &Parameters) -> Result<Option<Wish>, PacemakerError> {
    let own = p.own();
    let Some((host, text)) = applied_spec::applied(&own, &p.spec)? else { return Ok(None) };
    let plan = if p.disk { in_force::plan(&own.state)? } else { None };
    Ok(Some(Wish { host, text, plan }))
}

/// Contract that is to be in force: the spec's, or where that could not be applied in its place,
/// the one in force once more.
fn next(p: &Parameters) -> Result<Wish, PacemakerError> {
    let wish = spec(p)?;
    let is_refused = applied_spec::is_refused(&p.own(), &wish.text)?;
    let before = if is_refused { before(p)? } else { None };
    Ok(before.unwrap_or(wish))
}

/// Checks that the contract that is to be in force can take the place of the one that is, whose own
/// share does not count, and that there is time to go back: nothing is put back for a contract that
/// is not known to fit. `begin` is that of the monitor.
fn check_fit<'p>(
    p: &'p Parameters,
    begin: Instant,
    progress: &dyn Progress,
) -> Result<Fitting<'p>, PacemakerError> {
    let (wish, own, holder) = (next(p)?, p.own(), Holder::Resource(p.resource.clone()));
    let names = wish.host.vms().iter().map(|vm| vm.name.as_str());
    holders::refuse_names(names, &holder, &p.dirs).map_err(|e| refused(p, e))?;
    let scopes = locked(p, REPLACING, progress)?;
    if !p.disk {
        // As `start` does: spare room would count against this contract.
        warn_of_room(p, lower_room(p, &scopes), progress);
    }
    let contracts =
        check_replacing(&wish.host, &own, &holder, &p.dirs, p.disk, progress).map_err(|e| refused(p, e))?;
    if !p.disk && contracts == 0 {
        return Err(not_verified(p, "no VM of the spec has `cpu`"));
    }
    if p.disk && wish.plan.is_none() {
        planned(p, &wish.host, progress)?;
    }
    if begin.elapsed() > IN_TIME {
        return Err(not_verified(p, "it took too long to check what takes its place: restart this resource"));
    }
    // Whatever ends this monitor before it is in force, no later one tries the same again.
    applied_spec::refuse(&own, &wish.text)?;
    Ok(Fitting { wish, scopes })
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

/// Error of a step that does not take the lock of all contracts: what is in force already is
/// another program's.
fn refused(p: &Parameters, e: rtvirtio_workflow::Error) -> PacemakerError {
    match e.kind() {
        Kind::InForce => PacemakerError::HeldElsewhere { resource: p.resource.clone(), why: one_line(&e) },
        _ => PacemakerError::Step(e),
    }
}

fn not_verified(p: &Parameters, what: &str) -> PacemakerError {
    PacemakerError::NotVerified { resource: p.resource.clone(), what: what.to_owned() }
}
