//! Journals held against the host, as the loop takes them.

use rtvirtio_apply::{KnobState, Status};
use rtvirtio_workflow::scopes;

use crate::observed::{Drift, KnobClass, ScopeState, ScopeView};

pub(super) fn view(status: &Status, saved: &scopes::VmInForce) -> ScopeView {
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
    match (status.complete, status.reverting, status.rebooted) {
        (_, _, true) => ScopeState::Rebooted,
        (true, false, _) => ScopeState::Whole,
        _ => ScopeState::Cut,
    }
}

/// The settings in force that have another value.
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
    status.knobs.iter().filter_map(one).collect()
}
