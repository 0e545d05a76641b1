//! State of a contract as read back.

use rtvirtio_apply::{KnobState, KnobStatus, Machine, Status};
use rtvirtio_workflow::knob_class::limits_cpu_time;
use rtvirtio_workflow::{interrupts, started};

use super::parameters::Parameters;
use crate::{PacemakerError, marker};

/// State of a contract as read back.
pub(super) enum ContractState {
    /// All settings are as applied.
    Verified,
    /// Nothing is applied, or the VM that it was applied to has ended.
    None,
    /// A setting differs, with the reason.
    Differs(String),
    /// Something cannot be read, as in a guest that boots; nothing else differs.
    Unknown(String),
}

/// Reads the contract back.
///
/// # Errors
/// When it is not known what was applied.
pub(super) fn standing(p: &Parameters, machine: &Machine<'_>) -> Result<ContractState, PacemakerError> {
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

/// Compares the settings with what was applied. Settings of a thread that has ended do not count:
/// threads end all the time. Nor do CPUs of interrupts, which irqbalance moves at any time: a VM
/// keeps its contract all the same.
pub(super) fn compared(status: &Status) -> ContractState {
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

/// Whether all was applied, its budgets are in force, and so is at least one setting that it has
/// changed.
///
/// # Errors
/// When it is not known what was applied.
pub(super) fn is_in_part(p: &Parameters, machine: &Machine<'_>) -> Result<bool, PacemakerError> {
    let status = rtvirtio_apply::status(&p.own().state, machine)?;
    Ok(status.is_some_and(|status| {
        let in_force = |knob: &&KnobStatus| matches!(knob.state, KnobState::InForce);
        let mut budgets = status.knobs.iter().filter(|knob| limits_cpu_time(&knob.path, &knob.new));
        let mut changed = status
            .knobs
            .iter()
            .filter(|knob| !interrupts::is_of(&knob.path) && knob.old.as_deref() != Some(knob.new.as_str()));
        status.is_whole() && budgets.all(|knob| in_force(&knob)) && changed.any(|knob| in_force(&knob))
    }))
}
