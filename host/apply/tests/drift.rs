//! Settings in force that another program changes, over a simulated kernel: the journal's value is
//! written again, or the other program's is kept; and settings of files that get another value.

mod support;

use std::cell::Cell;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use rtvirtio_apply::points::{CountedSteps, Intercept, InterceptedHost, Points};
use rtvirtio_apply::{
    ApplyError, Form, HostFiles, KnobState, Machine, NoGuests, OnConflict, Silent, Target, Write, status,
};
use rustix::io::Errno;
use support::Sim;
use support::inject::{Fails, Injector};
use support::tasks::{self, CPU};

fn group() -> PathBuf {
    Path::new(CPU).join("rtvirtio-vm")
}

fn budget_file() -> PathBuf {
    group().join("cpu.rt_runtime_us")
}

fn budget(value: &str) -> Write {
    Write::new("budget", Target::host(budget_file(), Form::Plain), value)
}

impl Sim {
    /// Plan in force that made a cgroup with a budget.
    fn in_force() -> Self {
        let mut sim = Self::new().with_cpu();
        sim.kernel.v1(&["/lab"]);
        let budget = [("cpu.rt_period_us", "20000"), ("cpu.rt_runtime_us", "4000")];
        sim.case.cpu = tasks::group(&group(), Path::new(CPU), "other nice 0", &budget);
        sim.case.cpu[2].knob = "budget".to_owned();
        sim.apply().unwrap();
        sim
    }

    fn other_program(&self, value: &str) {
        HostFiles::write(&self.kernel, &budget_file(), value).unwrap();
    }

    fn budget(&self) -> String {
        self.kernel.get(budget_file().to_str().unwrap()).trim().to_owned()
    }

    /// Whether a revert puts everything back.
    fn reverts(&self) -> bool {
        self.revert(OnConflict::Report).done && !self.kernel.at(group()).exists()
    }
}

/// Function that is called before each read of the budget.
struct Watched<'a>(&'a dyn Fn());

impl Intercept for Watched<'_> {
    fn intercept<T>(
        &self,
        path: &Path,
        change: Option<&str>,
        call: impl FnOnce() -> io::Result<T>,
    ) -> io::Result<T> {
        if change.is_none() && path == budget_file() {
            (self.0)();
        }
        call()
    }
}

fn of_budget(knob: &str, path: &str) -> bool {
    knob == "budget" && path.ends_with("cpu.rt_runtime_us")
}

#[test]
fn a_changed_setting_is_set_again_and_only_that_one() {
    let sim = Sim::in_force();
    let restored = sim.session().restore(&of_budget, &sim.machine()).unwrap();
    assert!(restored.written.is_empty(), "nothing has changed: {restored:?}");
    sim.other_program("3000");
    let restored = sim.session().restore(&|_, _| false, &sim.machine()).unwrap();
    assert!(restored.written.is_empty() && sim.budget() == "3000");
    let restored = sim.session().restore(&of_budget, &sim.machine()).unwrap();
    assert_eq!(restored.written.len(), 1);
    assert_eq!((restored.written[0].old.as_deref(), sim.budget().as_str()), (Some("3000"), "4000"));
    assert!(sim.reverts());
    let error = sim.session().restore(&of_budget, &sim.machine()).unwrap_err();
    assert!(matches!(error, ApplyError::NothingInForce));
}

#[test]
fn a_setting_that_cannot_be_read_back_is_not_said_to_be_set() {
    let restored = |fails: Fails| {
        let sim = Sim::in_force();
        sim.other_program("3000");
        let injector = Injector::new(fails, Errno::IO, false);
        let host = InterceptedHost(&sim.kernel, injector.clone());
        let machine = Machine::with_host(&sim.root, &host, &NoGuests);
        (sim.session().restore(&of_budget, &machine).unwrap(), injector.calls())
    };
    let (whole, calls) = restored(Fails::Never);
    assert_eq!((whole.written.len(), whole.failed.len()), (1, 0), "{whole:?}");
    // The last call reads what was written.
    let (unread, _) = restored(Fails::At(vec![calls]));
    assert_eq!((unread.written.len(), unread.failed.len()), (0, 1), "{unread:?}");
    assert!(unread.failed[0].1.contains("not known"), "{unread:?}");
}

#[test]
fn a_setting_that_is_left_is_forgotten_as_it_is() {
    let sim = Sim::in_force();
    assert_eq!(sim.session().release(&of_budget, &sim.machine()).unwrap(), Vec::<String>::new());
    sim.other_program("3000");
    assert_eq!(sim.session().release(&of_budget, &sim.machine()).unwrap(), ["budget"]);
    assert_eq!(sim.session().restore(&of_budget, &sim.machine()).unwrap().written.len(), 0);
    assert_eq!(sim.budget(), "3000");
    assert!(sim.reverts(), "the group goes all the same");
}

/// A program moves the setting to a level while it is in force.
#[test]
fn a_level_is_no_change_of_another_program() {
    let sim = Sim::in_force();
    let levels = Write { levels: vec!["2000".to_owned()], ..budget("4000") };
    sim.session().amend(&[levels], &sim.machine(), &mut Silent).unwrap();
    sim.other_program("2000");
    assert_eq!(sim.session().release(&of_budget, &sim.machine()).unwrap(), Vec::<String>::new());
    let restored = sim.session().restore(&of_budget, &sim.machine()).unwrap();
    assert!(restored.written.is_empty() && sim.budget() == "2000", "{restored:?}");
    assert!(sim.reverts(), "it is still ours to put back");
}

/// Another rtvirtio journals a new value before it writes it.
#[test]
fn a_value_that_is_journaled_and_not_written_yet_is_no_change() {
    let sim = Sim::in_force();
    sim.session().amend(&[budget("3000")], &sim.machine(), &mut Silent).unwrap();
    // State of the budget where it is written before this read of it, and the number of reads.
    let seen = |written: u32| {
        sim.other_program("4000");
        let reads = Cell::new(0);
        let count = || {
            reads.set(reads.get() + 1);
            if reads.get() == written {
                sim.other_program("3000");
            }
        };
        let host = InterceptedHost(&sim.kernel, Watched(&count));
        let machine = Machine::with_host(&sim.root, &host, &NoGuests);
        let knobs = status(&sim.case.state, &machine).unwrap().unwrap().knobs;
        (knobs.into_iter().find(|knob| knob.knob == "budget").unwrap().state, reads.get())
    };
    let changed = || KnobState::Changed { found: "4000".to_owned() };
    assert_eq!(seen(1), (KnobState::InForce, 1));
    assert_eq!(seen(2), (KnobState::InForce, 2));
    assert_eq!(seen(3), (changed(), 2), "no rtvirtio is about to write it");
    let _writer = sim.session();
    assert_eq!(seen(5), (KnobState::InForce, 5));
    assert_eq!(seen(99), (changed(), 11), "and not for ever");
}

#[test]
fn what_a_revert_has_left_is_not_in_force() {
    let sim = Sim::in_force();
    let of = || sim.status().unwrap();
    assert!(of().is_whole() && !of().leftover);
    sim.other_program("3000");
    let reverted = sim.revert(OnConflict::Report);
    assert!(!reverted.done, "{}", reverted.summary());
    // Also where the setting has our value again.
    sim.other_program("4000");
    assert!(of().leftover && !of().is_whole(), "{:?}", of());
    assert!(sim.reverts());
}

#[test]
fn another_value_of_a_file_is_journaled_first_at_every_point() {
    for at in 1.. {
        let sim = Sim::in_force();
        let counted = Points::new(at, || panic!("cut"));
        let host = InterceptedHost(&sim.kernel, counted.clone());
        let machine = Machine::with_host(&sim.root, &host, &NoGuests);
        let amend = || sim.session().amend(&[budget("5000")], &machine, &mut CountedSteps(counted)).map(drop);
        let done = catch_unwind(AssertUnwindSafe(amend)).is_ok();
        assert!(["4000", "5000"].contains(&sim.budget().as_str()), "cut at {at}: {}", sim.budget());
        assert!(sim.reverts(), "cut at {at}");
        if done {
            assert!(at > 3);
            break;
        }
    }
}

#[test]
fn what_changes_other_files_cannot_be_added() {
    let sim = Sim::in_force();
    let error = |write: Write| sim.session().amend(&[write], &sim.machine(), &mut Silent).unwrap_err();
    let side = Write { side_effects: vec![Target::host("/x", Form::Plain)], ..budget("5000") };
    assert!(matches!(error(side), ApplyError::CannotAct { .. }));
    let made = Write { created_by: Some(0), ..budget("5000") };
    assert!(matches!(error(made), ApplyError::CannotAct { .. }));
    sim.kernel.boot("two\n");
    assert!(matches!(error(budget("5000")), ApplyError::NotWhole { .. }));
    let restored = sim.session().restore(&of_budget, &sim.machine());
    assert!(matches!(restored, Err(ApplyError::NotWhole { .. })));
    let released = sim.session().release(&of_budget, &sim.machine());
    assert!(matches!(released, Err(ApplyError::NotWhole { .. })));
}
