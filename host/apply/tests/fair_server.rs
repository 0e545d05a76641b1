//! The fair server of CPUs over a directory that stands in for debugfs: switched off and put back,
//! after a kill at any step too, and not forgotten where debugfs is not mounted.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};

use rtvirtio_apply::points::InterceptedHost;
use rtvirtio_apply::{
    ApplyError, Fate, Form, KnobState, Machine, NoGuests, Observer, OnConflict, Silent, Step, Target, Write,
    dry_run,
};
use rtvirtio_kernel::fair_server;
use rustix::io::Errno;
use support::Sim;
use support::inject::{Fails, Injector};

mod support;

const ON: &str = "50000000";

fn with_servers() -> Sim {
    let sim = Sim { is_plain: true, ..Sim::new() };
    sim.set(4, ON);
    sim.set(5, ON);
    sim
}

impl Sim {
    fn set(&self, cpu: u32, runtime: &str) {
        self.kernel.put(fair_server::runtime_file(cpu), &format!("{runtime}\n"));
    }

    fn now(&self) -> [String; 2] {
        [4, 5].map(|cpu| self.kernel.get(fair_server::runtime_file(cpu)).trim().to_owned())
    }

    fn apply_watched(&self, observer: &mut dyn Observer) -> Result<(), ApplyError> {
        self.session().apply(&writes(), &self.machine(), observer).map(drop)
    }
}

fn writes() -> [Write; 2] {
    let of = |cpu: u32| Target::host(fair_server::runtime_file(cpu), Form::Plain);
    [4, 5].map(|cpu| Write::new(format!("fair server of CPU {cpu}"), of(cpu), "0"))
}

struct KillAt(Step);

impl Observer for KillAt {
    fn step(&mut self, step: Step) {
        assert_ne!(step, self.0, "killed");
    }
}

#[test]
fn fair_servers_are_switched_off_and_put_back() {
    let sim = with_servers();
    let lines = dry_run(&writes(), &sim.machine()).unwrap();
    assert_eq!(lines[0].to_string(), "/sys/kernel/debug/sched/fair_server/cpu4/runtime: 50000000 -> 0");
    assert_eq!(sim.now(), [ON, ON]);
    sim.apply_watched(&mut Silent).unwrap();
    assert_eq!(sim.now(), ["0", "0"]);
    assert_eq!(sim.states(), [KnobState::InForce, KnobState::InForce]);
    assert!(sim.revert(OnConflict::Report).done);
    assert_eq!(sim.now(), [ON, ON]);

    // A user had switched one off before: that stays.
    sim.set(5, "0");
    sim.apply_watched(&mut Silent).unwrap();
    assert!(sim.revert(OnConflict::Report).done);
    assert_eq!(sim.now(), [ON, "0"]);
}

#[test]
fn a_share_that_a_user_has_set_meanwhile_is_a_conflict() {
    let sim = with_servers();
    sim.apply_watched(&mut Silent).unwrap();
    sim.set(5, "10000000");
    assert_eq!(sim.states()[1], KnobState::Changed { found: "10000000".to_owned() });
    let reverted = sim.revert(OnConflict::Report);
    assert!(!reverted.done && reverted.outcomes.iter().any(|o| matches!(o.fate, Fate::Conflict { .. })));
    assert_eq!(sim.now(), [ON, "10000000"]);
    assert!(sim.revert(OnConflict::Force).done);
    assert_eq!(sim.now(), [ON, ON]);
}

#[test]
fn a_killed_apply_is_put_back() {
    let wrote = |index| Step::Wrote { index, of: 2 };
    for (step, now) in [
        (Step::Journaled, [ON, ON]),
        (wrote(1), ["0", ON]),
        (wrote(2), ["0", "0"]),
        (Step::Completed, ["0", "0"]),
    ] {
        let sim = with_servers();
        let killed = catch_unwind(AssertUnwindSafe(|| sim.apply_watched(&mut KillAt(step))));
        assert!(killed.is_err() && sim.now() == now, "{step:?}");
        assert!(sim.revert(OnConflict::Report).done);
        assert_eq!(sim.now(), [ON, ON], "{step:?}");
    }
}

/// The kernel keeps what was written while nothing of debugfs is seen.
#[test]
fn nothing_is_forgotten_where_debugfs_is_not_mounted() {
    let sim = with_servers();
    sim.apply_watched(&mut Silent).unwrap();
    let (debugfs, aside) = (sim.root.at("/sys/kernel/debug"), sim.root.at("/aside"));
    fs::rename(&debugfs, &aside).unwrap();
    fs::create_dir(&debugfs).unwrap();
    assert!(sim.states().iter().all(|state| matches!(state, KnobState::Unknown { .. })));
    let reverted = sim.revert(OnConflict::Report);
    let mounts =
        |fate: &Fate| matches!(fate, Fate::Failed { error } if error.contains("is debugfs mounted?"));
    assert!(!reverted.done && reverted.outcomes.iter().all(|o| mounts(&o.fate)), "{reverted:?}");
    fs::remove_dir(&debugfs).unwrap();
    fs::rename(&aside, &debugfs).unwrap();
    assert!(sim.revert(OnConflict::Report).done);
    assert_eq!(sim.now(), [ON, ON]);
    // Nor is anything written where it is not seen.
    fs::rename(&debugfs, &aside).unwrap();
    let error = sim.apply_watched(&mut Silent).unwrap_err().to_string();
    assert!(error.contains("is debugfs mounted?"), "{error}");
    assert_eq!(sim.status(), None);
}

/// Reservations may have taken meanwhile what the server had.
#[test]
fn a_server_that_the_kernel_refuses_to_put_back_stays_in_the_journal() {
    let sim = with_servers();
    sim.apply_watched(&mut Silent).unwrap();
    let injector = Injector::new(Fails::Write("cpu4/runtime".into()), Errno::BUSY, false);
    let failing = InterceptedHost(&sim.root, injector);
    let machine = Machine::with_host(&sim.root, &failing, &NoGuests);
    let session = sim.session();
    let reverted = session.revert(OnConflict::Report, &machine, &mut Silent).unwrap().unwrap();
    assert!(!reverted.done && sim.now() == ["0", ON], "{reverted:?}");
    drop(session);
    assert!(sim.revert(OnConflict::Report).done);
    assert_eq!(sim.now(), [ON, ON]);
}
