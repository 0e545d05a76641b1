//! Journals compared with the host, as the loop takes them.

use std::collections::BTreeSet;

use rtvirtio_apply::{KnobState, Status};
use rtvirtio_workflow::{Result, interrupts, scope_files};

use crate::observed::{Drift, KnobClass, ScopeState, ScopeView};

/// State of a VM's settings: its journal compared with the host, and the file next to the journal.
pub(super) fn scope(
    status: Result<Option<Status>>,
    saved: Result<Option<scope_files::VmInForce>>,
) -> (Option<ScopeView>, Option<scope_files::VmInForce>) {
    let without = |state: ScopeState| {
        let (contract, start, drift) = (String::new(), Vec::new(), Vec::new());
        (Some(ScopeView { contract, start, start_alive: true, state, level: None, drift }), None)
    };
    match (status, saved) {
        (Ok(None), _) => (None, None),
        (Err(e), _) => without(ScopeState::Unusable(format!("{e:#}"))),
        (Ok(Some(status)), Ok(Some(saved))) => (Some(view(&status, &saved)), Some(saved)),
        (Ok(Some(_)), Err(e)) if !scope_files::is_lost(&e) => without(ScopeState::Unusable(format!("{e:#}"))),
        // Without the file next to it a journal can only be put back.
        (Ok(Some(_)), Ok(None) | Err(_)) => without(ScopeState::Cut),
    }
}

fn view(status: &Status, saved: &scope_files::VmInForce) -> ScopeView {
    let state = state_of(status);
    ScopeView {
        contract: saved.contract.clone(),
        start: saved.processes.clone(),
        start_alive: true,
        drift: if state == ScopeState::Whole { drift(status) } else { Vec::new() },
        state,
        level: saved.cpu.as_ref().map(|cpu| cpu.level),
    }
}

pub(super) fn state_of(status: &Status) -> ScopeState {
    if status.rebooted {
        ScopeState::Rebooted
    } else if status.is_whole() {
        ScopeState::Whole
    } else {
        ScopeState::Cut
    }
}

/// The threads that a journal has settings of.
pub(super) fn threads(status: &Status) -> BTreeSet<u32> {
    let of = |path: &str| path.strip_prefix("/proc/")?.split('/').nth(2)?.parse().ok();
    status.knobs.iter().filter_map(|knob| of(&knob.path)).collect()
}

/// The settings in force that have another value now. CPUs of interrupts are left out: irqbalance
/// moves them at any time, and the service moves none.
pub(super) fn drift(status: &Status) -> Vec<Drift> {
    let one = |knob: &rtvirtio_apply::KnobStatus| {
        let found = match &knob.state {
            KnobState::Changed { found } => found.clone(),
            KnobState::Original => knob.old.clone().unwrap_or_else(|| "nothing".to_owned()),
            KnobState::InForce | KnobState::Gone { .. } | KnobState::Unknown { .. } => return None,
        };
        let (name, path, wanted) = (knob.knob.clone(), knob.path.clone(), knob.new.clone());
        Some(Drift { class: KnobClass::of_path(&path), knob: name, path, wanted, found })
    };
    status.knobs.iter().filter(|knob| !interrupts::is_of(&knob.path)).filter_map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    use rtvirtio_workflow::Error;

    fn status(leftover: bool, rebooted: bool) -> Status {
        let (version, knobs) = (String::new(), Vec::new());
        Status { pid: 7, version, complete: true, reverting: false, leftover, rebooted, knobs }
    }

    #[test]
    fn what_was_put_back_in_part_is_not_in_force() {
        assert_eq!(state_of(&status(false, false)), ScopeState::Whole);
        assert_eq!(state_of(&status(true, false)), ScopeState::Cut);
        assert_eq!(state_of(&status(true, true)), ScopeState::Rebooted);
    }

    #[test]
    fn a_file_that_cannot_be_read_now_puts_nothing_back() {
        let state = |error: std::io::ErrorKind| {
            let saved = Err(Error::from(std::io::Error::from(error)));
            scope(Ok(Some(status(false, false))), saved).0.unwrap().state
        };
        assert_eq!(state(std::io::ErrorKind::NotFound), ScopeState::Cut);
        assert!(matches!(state(std::io::ErrorKind::PermissionDenied), ScopeState::Unusable(_)));
        let damaged = Error::new(rtvirtio_workflow::Kind::File, "damaged");
        assert_eq!(scope(Ok(Some(status(false, false))), Err(damaged)).0.unwrap().state, ScopeState::Cut);
        assert!(scope(Ok(None), Ok(None)).0.is_none());
    }
}
