//! Journals compared with the host, as the loop takes them.

use std::collections::BTreeSet;
use std::path::Path;

use rtvirtio_apply::{KnobState, KnobStatus, Status};
use rtvirtio_kernel::Root;
use rtvirtio_workflow::{Error, Result, interrupts, scope_files};

use super::found::start_lives;
use crate::observed::{Drift, KnobClass, ScopeState, ScopeView};

type Saved = scope_files::VmInForce;

/// State of a VM's settings: its journal compared with the host, and the file next to the journal;
/// `former` is that file as read before. While one of the two cannot be read, the contract of a VM
/// that runs counts as in force, so that its share is not given to others.
pub(super) fn scope(
    root: &Root,
    status: Result<Option<Status>>,
    saved: Result<Option<Saved>>,
    former: Option<Saved>,
) -> (Option<ScopeView>, Option<Saved>) {
    let unusable = |e: &Error, known: Option<Saved>| {
        let known = known.filter(|known| start_lives(root, &known.processes));
        (Some(without_status(ScopeState::Unusable(format!("{e:#}")), known.as_ref())), known)
    };
    match (status, saved) {
        (Ok(None), _) => (None, None),
        (Err(e), saved) => unusable(&e, saved.ok().flatten().or(former)),
        (Ok(Some(status)), Ok(Some(saved))) => (Some(view(root, &status, &saved)), Some(saved)),
        (Ok(Some(_)), Err(e)) if !scope_files::is_lost(&e) => unusable(&e, former),
        // Without the file next to it a journal can only be put back.
        (Ok(Some(_)), Ok(None) | Err(_)) => (Some(without_status(ScopeState::Cut, None)), None),
    }
}

/// State of settings that are not compared with the host.
fn without_status(state: ScopeState, saved: Option<&Saved>) -> ScopeView {
    ScopeView {
        contract: saved.map(|saved| saved.contract.clone()).unwrap_or_default(),
        start: saved.map(|saved| saved.processes.clone()).unwrap_or_default(),
        start_alive: true,
        state,
        level: saved.and_then(|saved| Some(saved.cpu.as_ref()?.level)),
        cpu: saved.and_then(|saved| Some(saved.cpu.as_ref()?.backend)),
        drift: Vec::new(),
        lost: Vec::new(),
    }
}

fn view(root: &Root, status: &Status, saved: &Saved) -> ScopeView {
    let view = without_status(state_of(status), Some(saved));
    if view.state != ScopeState::Whole {
        return view;
    }
    ScopeView { drift: drift(status), lost: lost(root, status), ..view }
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
    let one = |knob: &KnobStatus| {
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

/// The settings that are not known to be in force, each with the reason: those that cannot be read,
/// and those whose file is gone from a directory that is there, as those of a controller that was
/// taken from a cgroup. What ends with its thread, device or cgroup is left out, and so are
/// interrupts, and guests, into which the service does not look.
pub(super) fn lost(root: &Root, status: &Status) -> Vec<String> {
    // What cannot be looked up counts as there: only a file that is known to be gone was taken.
    let is_there = |path: &Path| root.exists(path).unwrap_or(true);
    let is_taken = |path: &str| {
        // An elevator takes its tunables along when another program changes it, and the property of
        // a unit, which is no file, ends with the unit.
        let is_of_group =
            matches!(KnobClass::of_path(path), KnobClass::Budget | KnobClass::Weight | KnobClass::Limit);
        let is_file = is_of_group && !path.contains(": ");
        is_file && !is_there(Path::new(path)) && Path::new(path).parent().is_some_and(is_there)
    };
    let one = |knob: &KnobStatus| {
        let why = match &knob.state {
            KnobState::Unknown { error } => format!("cannot be read: {error}"),
            KnobState::Gone { why } if is_taken(&knob.path) => format!("is gone: {why}"),
            KnobState::Gone { .. } | KnobState::InForce | KnobState::Original | KnobState::Changed { .. } => {
                return None;
            }
        };
        Some(format!("{} {why}", knob.knob))
    };
    let is_seen = |path: &str| KnobClass::of_path(path) != KnobClass::Guest && !interrupts::is_of(path);
    status.knobs.iter().filter(|knob| is_seen(&knob.path)).filter_map(one).collect()
}

#[cfg(test)]
mod tests {
    use rtvirtio_kernel::ProcessId;

    use super::*;

    fn compared(
        status: Result<Option<Status>>,
        saved: Result<Option<Saved>>,
        former: Option<Saved>,
    ) -> (Option<ScopeView>, Option<Saved>) {
        scope(&Root::default(), status, saved, former)
    }

    fn unreadable() -> Error {
        Error::from(std::io::Error::from(std::io::ErrorKind::PermissionDenied))
    }

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
            compared(Ok(Some(status(false, false))), saved, None).0.unwrap().state
        };
        assert_eq!(state(std::io::ErrorKind::NotFound), ScopeState::Cut);
        assert!(matches!(state(std::io::ErrorKind::PermissionDenied), ScopeState::Unusable(_)));
        let damaged = Error::new(rtvirtio_workflow::Kind::File, "damaged");
        let (view, _) = compared(Ok(Some(status(false, false))), Err(damaged), None);
        assert_eq!(view.unwrap().state, ScopeState::Cut);
        assert!(compared(Ok(None), Ok(None), None).0.is_none());
    }

    #[test]
    fn a_contract_counts_while_its_journal_cannot_be_read() {
        let this = ProcessId::find(std::process::id()).unwrap().unwrap();
        let ended = ProcessId { pid: this.pid, start_time: this.start_time + 1 };
        let saved = |process: &ProcessId| Saved {
            vm: "plc".to_owned(),
            contract: "c1".to_owned(),
            processes: vec![process.clone()],
            cpu: None,
            reason: String::new(),
            since: String::new(),
        };
        let known = |(view, saved): (Option<ScopeView>, Option<Saved>)| {
            let view = view.unwrap();
            assert!(matches!(view.state, ScopeState::Unusable(_)), "{view:?}");
            assert_eq!(view.contract.is_empty(), saved.is_none());
            saved.is_some()
        };
        assert!(known(compared(Err(unreadable()), Ok(Some(saved(&this))), None)));
        assert!(known(compared(Err(unreadable()), Err(unreadable()), Some(saved(&this)))));
        let whole = Ok(Some(status(false, false)));
        assert!(known(compared(whole, Err(unreadable()), Some(saved(&this)))));
        // Nothing of a VM that has ended is taken.
        assert!(!known(compared(Err(unreadable()), Ok(Some(saved(&ended))), None)));
        assert!(!known(compared(Err(unreadable()), Err(unreadable()), None)));
    }

    #[test]
    fn what_cannot_be_read_or_was_taken_is_not_in_force() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let root = Root::new(dir.path());
        std::fs::create_dir_all(root.at("/sys/fs/cgroup/plc")).unwrap();
        std::fs::write(root.at("/sys/fs/cgroup/plc/io.weight"), "").unwrap();
        let unknown = || KnobState::Unknown { error: "EIO".to_owned() };
        let gone = || KnobState::Gone { why: "no file".to_owned() };
        let lost_of = |path: &str, state: KnobState| {
            let (knob, path, new) = ("limit".to_owned(), path.to_owned(), "1".to_owned());
            let knobs = vec![KnobStatus { knob, path, old: None, new, state }];
            lost(&root, &Status { knobs, ..status(false, false) })
        };
        assert_eq!(lost_of("/sys/fs/cgroup/plc/io.max", gone()), ["limit is gone: no file"]);
        for path in ["/sys/fs/cgroup/plc: IOAccounting", "/proc/7/task/8/sched", "/sys/block/sda/queue/x"] {
            assert_eq!(lost_of(path, unknown()), ["limit cannot be read: EIO"], "{path}");
            assert!(lost_of(path, gone()).is_empty(), "{path}");
        }
        // The cgroup has ended, or was made again.
        for path in ["/sys/fs/cgroup/other/io.max", "/sys/fs/cgroup/plc/io.weight"] {
            assert!(lost_of(path, gone()).is_empty(), "{path}");
        }
        for path in ["/proc/irq/7/smp_affinity_list", "plc:/sys/block/vda/queue/scheduler"] {
            assert!(lost_of(path, unknown()).is_empty(), "{path}");
        }
        assert!(lost_of("/sys/fs/cgroup/plc/io.max", KnobState::InForce).is_empty());
    }
}
