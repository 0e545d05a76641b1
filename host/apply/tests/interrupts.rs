//! CPUs of interrupts over a directory that stands in for the kernel: set, put back, refused by the
//! kernel, and never written once the number is another interrupt's.

mod support;

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use rtvirtio_apply::points::{Intercept, InterceptedHost};
use rtvirtio_apply::{
    Applied, ApplyError, HostFiles, KnobState, LeftCause, Machine, NoGuests, Observer, OnConflict, Reverted,
    Silent, Step, Target, Write, dry_run,
};
use rtvirtio_kernel::Root;
use rtvirtio_kernel::irq::{Vector, affinity_file};
use rustix::io::Errno;
use support::Sim;
use support::inject::{Fails, Injector};

const VECTORS: &str = "/sys/devices/pci0000:00/0000:00:04.0/msi_irqs";

fn with_interrupts() -> Sim {
    let sim = Sim { is_plain: true, ..Sim::new() };
    for number in [24, 25] {
        sim.kernel.put(Path::new(VECTORS).join(number.to_string()), "msix\n");
        sim.set(number, "0-7");
    }
    sim
}

impl Sim {
    fn set(&self, number: u32, cpus: &str) {
        self.kernel.put(affinity_file(number), &format!("{cpus}\n"));
    }

    /// CPUs of both interrupts.
    fn cpus(&self) -> [String; 2] {
        [24, 25].map(|number| self.kernel.get(affinity_file(number)).trim().to_owned())
    }

    fn writes(&self) -> [Write; 2] {
        [24, 25].map(|number: u32| {
            let file = Path::new(VECTORS).join(number.to_string());
            let inode = self.root.inode(&file).unwrap();
            let cpus = BTreeSet::new();
            let vector = Vector { number, file, inode, cpus, effective: None, is_fixed: false };
            Write::new(format!("CPUs of interrupt {number}"), Target::interrupt(&vector), "0-3")
        })
    }

    fn move_all(&self) -> Applied {
        self.move_watched(&mut Silent).unwrap()
    }

    fn move_watched(&self, observer: &mut dyn Observer) -> Result<Applied, ApplyError> {
        self.session().apply(&self.writes(), &self.machine(), observer)
    }

    fn move_on(&self, files: &dyn HostFiles) -> Applied {
        let machine = Machine::with_host(&self.root, files, &NoGuests);
        self.session().apply(&self.writes(), &machine, &mut Silent).unwrap()
    }

    fn revert_on(&self, files: &dyn HostFiles) -> Reverted {
        let machine = Machine::with_host(&self.root, files, &NoGuests);
        self.session().revert(OnConflict::Report, &machine, &mut Silent).unwrap().unwrap()
    }

    /// The files, where the kernel refuses each write of an interrupt's CPUs with this error.
    fn refusing(&self, number: u32, errno: Errno) -> InterceptedHost<'_, Injector> {
        let file = format!("irq/{number}/smp_affinity_list");
        InterceptedHost(&self.root, Injector::new(Fails::Write(file.into()), errno, false))
    }

    fn online(&self, cpus: &str) {
        self.kernel.put("/sys/devices/system/cpu/online", &format!("{cpus}\n"));
    }

    fn is_put_back(&self) -> bool {
        self.revert(OnConflict::Report).done
    }

    /// The number is given out again, to another device's vector.
    fn reuse(&self, number: u32) {
        let file = Path::new(VECTORS).join(number.to_string());
        // Kept, so that its inode is not used again.
        fs::rename(self.root.at(&file), self.root.at("/gone")).unwrap();
        self.kernel.put(&file, "msix\n");
        self.set(number, "4-7");
    }
}

#[test]
fn interrupts_are_moved_and_put_back() {
    let sim = with_interrupts();
    let lines = dry_run(&sim.writes(), &sim.machine()).unwrap();
    assert_eq!(lines[0].to_string(), "/proc/irq/24/smp_affinity_list: 0-7 -> 0-3");
    assert_eq!(sim.cpus()[0], "0-7");
    let applied = sim.move_all();
    assert!(applied.knobs.len() == 2 && applied.left.is_empty(), "{applied:?}");
    assert_eq!(sim.cpus(), ["0-3", "0-3"]);
    assert_eq!(sim.states(), [KnobState::InForce, KnobState::InForce]);
    // Another program moves one, as irqbalance does.
    sim.set(25, "6");
    assert_eq!(sim.states()[1], KnobState::Changed { found: "6".to_owned() });
    assert!(sim.is_put_back(), "it is left to that program");
    assert_eq!(sim.cpus(), ["0-7", "6"]);
    // A part of ours is what a chip, or irqbalance, has left of it.
    let sim = with_interrupts();
    sim.move_all();
    sim.set(25, "2");
    assert!(sim.is_put_back());
    assert_eq!(sim.cpus()[1], "0-7");
}

/// The kernel gives an interrupt all CPUs that are online when the last one of its own goes, and
/// takes no CPUs of which none is online.
#[test]
fn cpus_that_have_gone_offline_keep_nothing_from_being_put_back() {
    let sim = with_interrupts();
    sim.move_all();
    sim.online("4-6");
    sim.set(24, "4-6");
    assert!(sim.is_put_back());
    assert_eq!(sim.cpus(), ["0-7", "0-7"]);

    let sim = with_interrupts();
    sim.set(24, "6-7");
    sim.move_all();
    sim.online("0-5");
    assert!(sim.is_put_back());
    assert_eq!(sim.cpus(), ["0-5", "0-7"]);
}

#[test]
fn a_number_that_is_another_interrupts_is_never_written() {
    let sim = with_interrupts();
    sim.move_all();
    sim.reuse(24);
    fs::remove_file(sim.root.at(Path::new(VECTORS).join("25"))).unwrap();
    assert!(sim.states().iter().all(|state| matches!(state, KnobState::Gone { .. })));
    assert!(sim.is_put_back());
    assert_eq!(sim.cpus(), ["4-7", "0-3"]);

    // Nor after a restart of the host, nor between resolving and applying.
    let sim = with_interrupts();
    sim.move_all();
    sim.kernel.boot("two\n");
    assert!(sim.is_put_back());
    assert_eq!(sim.cpus()[0], "0-3");
    let writes = sim.writes();
    sim.reuse(24);
    let applied = sim.session().apply(&writes, &sim.machine(), &mut Silent).unwrap();
    assert!(applied.knobs.iter().all(|line| line.path.contains("/25/")), "{applied:?}");
    assert_eq!(sim.cpus()[0], "4-7");
}

/// Queues whose interrupts the kernel manages: before Linux 6.11 it tells by refusing only.
#[test]
fn an_interrupt_that_the_kernel_manages_hinders_nothing() {
    for errno in [Errno::IO, Errno::PERM] {
        let sim = with_interrupts();
        let applied = sim.move_on(&sim.refusing(24, errno));
        assert_eq!((applied.knobs.len(), applied.left.len()), (1, 1), "{applied:?}");
        assert_eq!(applied.left[0].cause, LeftCause::Fixed);
        assert!(applied.left[0].knob.contains("interrupt 24"), "{applied:?}");
        assert_eq!(sim.cpus(), ["0-7", "0-3"]);
        assert_eq!(sim.states(), [KnobState::InForce], "the refused one is in no journal");
        assert!(sim.is_put_back());
        assert_eq!(sim.cpus()[1], "0-7");
    }
    // Chips that move none, CPUs without room for a vector.
    for errno in [Errno::INVAL, Errno::NOSPC] {
        let sim = with_interrupts();
        let applied = sim.move_on(&sim.refusing(25, errno));
        assert_eq!(applied.left[0].cause, LeftCause::Refused, "{applied:?}");
        assert_eq!(applied.left[0].error, io::Error::from(errno).to_string());
        assert_eq!(sim.cpus(), ["0-3", "0-7"]);
        assert_eq!(sim.states(), [KnobState::InForce]);
    }
}

/// Other program whose value follows each write of an interrupt; and CPUs that the kernel refuses.
struct Irqbalance<'a>(&'a Root, &'static str, Option<&'static str>);

impl Intercept for Irqbalance<'_> {
    fn intercept<T>(
        &self,
        path: &Path,
        change: Option<&str>,
        call: impl FnOnce() -> io::Result<T>,
    ) -> io::Result<T> {
        let Some(value) = change else { return call() };
        if self.2 == Some(value.trim()) {
            return Err(Errno::NOSPC.into());
        }
        let result = call()?;
        HostFiles::write(self.0, path, self.1)?;
        Ok(result)
    }
}

impl<'a> Irqbalance<'a> {
    fn on(sim: &'a Sim, value: &'static str, refused: Option<&'static str>) -> InterceptedHost<'a, Self> {
        InterceptedHost(&sim.root, Self(&sim.root, value, refused))
    }
}

#[test]
fn an_interrupt_that_another_program_sets_right_after_us_is_left_to_it() {
    for (found, is_left) in [("6", true), ("2", false)] {
        let sim = with_interrupts();
        let other = Irqbalance::on(&sim, found, None);
        let applied = sim.move_on(&other);
        let all = if is_left { (0, 2) } else { (2, 0) };
        assert_eq!((applied.knobs.len(), applied.left.len()), all, "{applied:?}");
        assert!(applied.left.iter().all(|left| left.cause == LeftCause::Raced), "{applied:?}");
        // What it does while all is put back hinders nothing either.
        let reverted = sim.revert_on(&other);
        assert!(reverted.done, "{reverted:?}");
        assert_eq!(sim.cpus()[0], found);
    }
}

#[test]
fn old_cpus_that_the_kernel_refuses_keep_nothing_from_being_put_back() {
    for errno in [Errno::NOSPC, Errno::INVAL, Errno::BUSY] {
        let sim = with_interrupts();
        sim.move_all();
        sim.online("0-5");
        let reverted = sim.revert_on(&sim.refusing(24, errno));
        assert!(reverted.done, "{reverted:?}");
        assert_eq!(sim.cpus(), ["0-3", "0-7"]);
    }
    // All CPUs that are online are taken.
    let sim = with_interrupts();
    sim.move_all();
    sim.online("0-5");
    let reverted = sim.revert_on(&Irqbalance::on(&sim, "0-5", Some("0-7")));
    assert!(reverted.done, "{reverted:?}");
    assert_eq!(sim.cpus(), ["0-5", "0-5"]);
}

/// Another program that moves interrupt 24 after its value was captured, and a user who stops or
/// kills the apply after the first write.
struct RaceAndStop<'a> {
    sim: &'a Sim,
    kills: bool,
    stops: bool,
}

impl Observer for RaceAndStop<'_> {
    fn step(&mut self, step: Step) {
        match step {
            Step::Journaled => self.sim.set(24, "6"),
            Step::Wrote { .. } => {
                assert!(!self.kills, "killed");
                self.stops = true;
            }
            _ => {}
        }
    }

    fn stop(&mut self) -> bool {
        self.stops
    }
}

#[test]
fn an_interrupt_that_was_left_is_not_put_back_by_a_rollback() {
    let sim = with_interrupts();
    let mut observer = RaceAndStop { sim: &sim, kills: false, stops: false };
    let error = sim.move_watched(&mut observer).unwrap_err();
    let ApplyError::RolledBack { cause, rollback } = &error else { panic!("{error}") };
    assert!(matches!(**cause, ApplyError::Interrupted), "{cause}");
    assert!(rollback.done && rollback.outcomes.len() == 1, "{rollback:?}");
    assert_eq!(sim.cpus(), ["6", "0-7"]);
    assert_eq!(sim.status(), None);
}

#[test]
fn an_interrupt_that_was_left_keeps_no_killed_apply_from_being_put_back() {
    let sim = with_interrupts();
    let apply = || sim.move_watched(&mut RaceAndStop { sim: &sim, kills: true, stops: false }).map(drop);
    assert!(catch_unwind(AssertUnwindSafe(apply)).is_err());
    assert_eq!(sim.states().len(), 2, "the journal is as before the first write");
    assert!(sim.is_put_back());
    assert_eq!(sim.cpus(), ["6", "0-7"]);
}

#[test]
fn what_is_set_again_is_shown_as_the_kernel_has_left_it() {
    let sim = with_interrupts();
    sim.move_all();
    sim.set(24, "6");
    let cuts = Irqbalance::on(&sim, "2", None);
    let machine = Machine::with_host(&sim.root, &cuts, &NoGuests);
    let restored = sim.session().restore(&|_, _| true, &machine).unwrap();
    assert!(restored.failed.is_empty() && restored.written.len() == 1, "{restored:?}");
    assert_eq!((restored.written[0].old.as_deref(), restored.written[0].new.as_str()), (Some("6"), "2"));
}
