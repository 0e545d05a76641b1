//! Room for contracts in the groups above those of VMs, and the lock of all contracts.

use std::time::{Duration, Instant};

use rtvirtio_kernel::Root;
use rtvirtio_workflow::guests::WaitLimit;
use rtvirtio_workflow::scopes::{Scopes, in_force_beside};
use rtvirtio_workflow::{Kind, Progress, one_line};

use super::parameters::Parameters;
use crate::PacemakerError;

/// Pause before another try.
pub(super) const RETRY: Duration = Duration::from_millis(100);
/// Timeout of a lock that is busy while a contract is put back.
const STOPPING: Duration = Duration::from_secs(10);
/// Timeout for the removal of a stopped VM's cgroup.
const ENDING: Duration = Duration::from_secs(3);

/// Warns of groups above those of VMs that were not lowered.
pub(super) fn warn_of_room(p: &Parameters, lowered: Result<(), PacemakerError>, progress: &dyn Progress) {
    if let Err(e) = lowered {
        let (resource, why) = (&p.resource, one_line(&e));
        progress.warn(&format!("{resource}: the groups above those of VMs keep more than they need: {why}"));
    }
}

/// Takes the lock of the state directory, which another agent may hold for a moment.
pub(super) fn locked<'p>(
    p: &'p Parameters,
    limit: Duration,
    progress: &dyn Progress,
) -> Result<Scopes<'p>, PacemakerError> {
    let (begin, limit) = (Instant::now(), WaitLimit::left(limit));
    loop {
        match Scopes::lock(&p.dirs) {
            Err(e) if e.kind() == Kind::InForce && begin.elapsed() < limit => progress.pause(RETRY)?,
            taken => return Ok(taken?),
        }
    }
}

/// Returns this contract's part of the budget of the groups above those of VMs.
pub(super) fn give_room_back(
    p: &Parameters,
    held: Option<&Scopes<'_>>,
    progress: &dyn Progress,
) -> Result<(), PacemakerError> {
    let taken;
    let scopes = if let Some(scopes) = held {
        scopes
    } else {
        taken = locked(p, STOPPING, progress)?;
        &taken
    };
    let (begin, limit) = (Instant::now(), WaitLimit::left(ENDING));
    loop {
        match lower_room(p, scopes) {
            // The group of a VM that has just ended keeps its budget until its manager removes it.
            Err(_) if begin.elapsed() < limit => progress.pause(RETRY)?,
            made => return made,
        }
    }
}

/// Lowers the groups above those of VMs to what the contracts in force need.
pub(super) fn lower_room(p: &Parameters, scopes: &Scopes<'_>) -> Result<(), PacemakerError> {
    let probe = rtvirtio_cpu::probe(&Root::default()).map_err(PacemakerError::Host)?;
    Ok(scopes.make_room(&probe, &in_force_beside(&p.dirs, &p.resource)?)?)
}
