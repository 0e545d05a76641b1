//! CPUs of interrupts over a directory that stands in for the kernel: set, put back, refused by the
//! kernel, and never written once the number is another interrupt's.

mod support;

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use rtvirtio_apply::{
    Applied, ApplyError, HostFiles, KnobState, LeftCause, Machine, NoGuests, Observer, OnConflict, Session,
    Silent, Step, Target, Write, dry_run, status,
};
use rtvirtio_kernel::Root;
use rtvirtio_kernel::irq::Vector;
use rtvirtio_kernel::sched::Attr;
use rustix::io::Errno;
use support::inject::{FailingHost, Fails, Injector};

const VECTORS: &str = "/sys/devices/pci0000:00/0000:00:04.0/msi_irqs";

struct Host {
    dir: tempfile::TempDir,
    root: Root,
}

impl Host {
    fn new() -> Self {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let root = Root::new(dir.path().join("root"));
        let host = Self { dir, root };
        host.put(Path::new("/proc/sys/kernel/random/boot_id"), "one\n");
        for number in [24, 25] {
            host.put(&Path::new(VECTORS).join(number.to_string()), "msix\n");
            host.set(number, "0-7");
        }
        host
    }

    fn put(&self, path: &Path, text: &str) {
        let path = self.root.at(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn set(&self, number: u32, cpus: &str) {
        self.put(&rtvirtio_kernel::irq::affinity_file(number), &format!("{cpus}\n"));
    }

    fn cpus(&self, number: u32) -> String {
        self.root.read(rtvirtio_kernel::irq::affinity_file(number)).unwrap().trim().to_owned()
    }

    fn writes(&self) -> Vec<Write> {
        let write = |number: u32| {
            let file = Path::new(VECTORS).join(number.to_string());
            let inode = self.root.inode(&file).unwrap();
            let cpus = BTreeSet::new();
            let vector = Vector { number, file, inode, cpus, effective: None, is_fixed: false };
            Write::new(format!("CPUs of interrupt {number}"), Target::interrupt(&vector), "0-3")
        };
        [24, 25].map(write).to_vec()
    }

    fn state(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    fn machine(&self) -> Machine<'_> {
        Machine::new(&self.root, &NoGuests)
    }

    fn apply(&self) -> Applied {
        let session = Session::open(self.state()).unwrap();
        session.apply(&self.writes(), &self.machine(), &mut Silent).unwrap()
    }

    fn online(&self, cpus: &str) {
        self.put(Path::new("/sys/devices/system/cpu/online"), &format!("{cpus}\n"));
    }

    fn states(&self) -> Vec<KnobState> {
        let status = status(&self.state(), &self.machine()).unwrap().unwrap();
        status.knobs.into_iter().map(|knob| knob.state).collect()
    }

    fn revert(&self) -> bool {
        let session = Session::open(self.state()).unwrap();
        session.revert(OnConflict::Report, &self.machine(), &mut Silent).unwrap().unwrap().done
    }

    /// The number is given out again, to another device's vector.
    fn reuse(&self, number: u32) {
        let file = Path::new(VECTORS).join(number.to_string());
        // Kept, so that its inode is not used again.
        fs::rename(self.root.at(&file), self.root.at("/gone")).unwrap();
        self.put(&file, "msix\n");
        self.set(number, "4-7");
    }
}

#[test]
fn interrupts_are_moved_and_put_back() {
    let host = Host::new();
    let lines = dry_run(&host.writes(), &host.machine()).unwrap();
    assert_eq!(lines[0].to_string(), "/proc/irq/24/smp_affinity_list: 0-7 -> 0-3");
    assert_eq!(host.cpus(24), "0-7");
    let applied = host.apply();
    assert!(applied.knobs.len() == 2 && applied.left.is_empty(), "{applied:?}");
    assert_eq!([24, 25].map(|number| host.cpus(number)), ["0-3", "0-3"]);
    assert_eq!(host.states(), [KnobState::InForce, KnobState::InForce]);
    // Another program moves one, as irqbalance does.
    host.set(25, "6");
    assert_eq!(host.states()[1], KnobState::Changed { found: "6".to_owned() });
    assert!(host.revert(), "it is left to that program");
    assert_eq!([24, 25].map(|number| host.cpus(number)), ["0-7", "6"]);
    // A part of ours is what a chip, or irqbalance, has left of it.
    let host = Host::new();
    host.apply();
    host.set(25, "2");
    assert!(host.revert());
    assert_eq!(host.cpus(25), "0-7");
}

/// The kernel gives an interrupt all CPUs that are online when the last one of its own goes, and
/// takes no CPUs of which none is online.
#[test]
fn cpus_that_have_gone_offline_keep_nothing_from_being_put_back() {
    let host = Host::new();
    host.apply();
    host.online("4-6");
    host.set(24, "4-6");
    assert!(host.revert());
    assert_eq!([24, 25].map(|number| host.cpus(number)), ["0-7", "0-7"]);

    let host = Host::new();
    host.set(24, "6-7");
    host.apply();
    host.online("0-5");
    assert!(host.revert());
    assert_eq!([24, 25].map(|number| host.cpus(number)), ["0-5", "0-7"]);
}

#[test]
fn a_number_that_is_another_interrupts_is_never_written() {
    let host = Host::new();
    host.apply();
    host.reuse(24);
    fs::remove_file(host.root.at(Path::new(VECTORS).join("25"))).unwrap();
    assert!(host.states().iter().all(|state| matches!(state, KnobState::Gone { .. })));
    assert!(host.revert());
    assert_eq!([24, 25].map(|number| host.cpus(number)), ["4-7", "0-3"]);

    // Nor after a restart of the host, nor between resolving and applying.
    let host = Host::new();
    host.apply();
    host.put(Path::new("/proc/sys/kernel/random/boot_id"), "two\n");
    assert!(host.revert());
    assert_eq!(host.cpus(24), "0-3");
    let writes = host.writes();
    host.reuse(24);
    let session = Session::open(host.state()).unwrap();
    let applied = session.apply(&writes, &host.machine(), &mut Silent).unwrap();
    assert!(applied.knobs.iter().all(|line| line.path.contains("/25/")), "{applied:?}");
    assert_eq!(host.cpus(24), "4-7");
}

/// Queues whose interrupts the kernel manages: before Linux 6.11 it tells by refusing only.
#[test]
fn an_interrupt_that_the_kernel_manages_hinders_nothing() {
    for errno in [Errno::IO, Errno::PERM] {
        let host = Host::new();
        let injector = Injector::new(Fails::Write("irq/24/smp_affinity_list".into()), errno, false);
        let failing = FailingHost(&host.root, injector);
        let machine = Machine::with_host(&host.root, &failing, &NoGuests);
        let session = Session::open(host.state()).unwrap();
        let applied = session.apply(&host.writes(), &machine, &mut Silent).unwrap();
        assert_eq!((applied.knobs.len(), applied.left.len()), (1, 1), "{applied:?}");
        assert_eq!(applied.left[0].cause, LeftCause::Fixed);
        assert!(applied.left[0].knob.contains("interrupt 24"), "{applied:?}");
        assert_eq!([24, 25].map(|number| host.cpus(number)), ["0-7", "0-3"]);
        assert_eq!(host.states(), [KnobState::InForce], "the refused one is in no journal");
        drop(session);
        assert!(host.revert());
        assert_eq!(host.cpus(25), "0-7");
    }
    // Chips that move none, CPUs without room for a vector.
    for errno in [Errno::INVAL, Errno::NOSPC] {
        let host = Host::new();
        let injector = Injector::new(Fails::Write("irq/25/smp_affinity_list".into()), errno, false);
        let failing = FailingHost(&host.root, injector);
        let machine = Machine::with_host(&host.root, &failing, &NoGuests);
        let session = Session::open(host.state()).unwrap();
        let applied = session.apply(&host.writes(), &machine, &mut Silent).unwrap();
        assert_eq!(applied.left[0].cause, LeftCause::Refused, "{applied:?}");
        assert_eq!(applied.left[0].error, io::Error::from(errno).to_string());
        assert_eq!([24, 25].map(|number| host.cpus(number)), ["0-3", "0-7"]);
        assert_eq!(host.states(), [KnobState::InForce]);
    }
}

/// Host where each write of an interrupt is followed by another program's, and where the kernel
/// refuses some CPUs.
struct Irqbalance<'a>(&'a Root, &'static str, Option<&'static str>);

impl HostFiles for Irqbalance<'_> {
    fn read(&self, path: &Path) -> io::Result<String> {
        HostFiles::read(self.0, path)
    }
    fn write(&self, path: &Path, value: &str) -> io::Result<()> {
        if self.2 == Some(value.trim()) {
            return Err(Errno::NOSPC.into());
        }
        HostFiles::write(self.0, path, value)?;
        HostFiles::write(self.0, path, self.1)
    }
    fn list(&self, dir: &Path) -> io::Result<Vec<String>> {
        HostFiles::list(self.0, dir)
    }
    fn identity(&self, path: &Path) -> io::Result<u64> {
        HostFiles::identity(self.0, path)
    }
    fn make_dir(&self, path: &Path) -> io::Result<()> {
        HostFiles::make_dir(self.0, path)
    }
    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        HostFiles::remove_dir(self.0, path)
    }
    fn thread_start(&self, pid: u32, tid: u32) -> io::Result<u64> {
        HostFiles::thread_start(self.0, pid, tid)
    }
    fn scheduling(&self, pid: u32, tid: u32) -> io::Result<Attr> {
        HostFiles::scheduling(self.0, pid, tid)
    }
    fn set_scheduling(&self, pid: u32, tid: u32, attr: &Attr) -> io::Result<()> {
        HostFiles::set_scheduling(self.0, pid, tid, attr)
    }
}

#[test]
fn an_interrupt_that_another_program_sets_right_after_us_is_left_to_it() {
    for (found, is_left) in [("6", true), ("2", false)] {
        let host = Host::new();
        let other = Irqbalance(&host.root, found, None);
        let machine = Machine::with_host(&host.root, &other, &NoGuests);
        let session = Session::open(host.state()).unwrap();
        let applied = session.apply(&host.writes(), &machine, &mut Silent).unwrap();
        let all = if is_left { (0, 2) } else { (2, 0) };
        assert_eq!((applied.knobs.len(), applied.left.len()), all, "{applied:?}");
        assert!(applied.left.iter().all(|left| left.cause == LeftCause::Raced), "{applied:?}");
        // What it does while all is put back hinders nothing either.
        let reverted = session.revert(OnConflict::Report, &machine, &mut Silent).unwrap().unwrap();
        assert!(reverted.done, "{reverted:?}");
        assert_eq!(host.cpus(24), found);
    }
}

#[test]
fn old_cpus_that_the_kernel_refuses_keep_nothing_from_being_put_back() {
    let revert = |host: &Host, files: &dyn HostFiles| {
        let machine = Machine::with_host(&host.root, files, &NoGuests);
        let session = Session::open(host.state()).unwrap();
        session.revert(OnConflict::Report, &machine, &mut Silent).unwrap().unwrap()
    };
    for errno in [Errno::NOSPC, Errno::INVAL, Errno::BUSY] {
        let host = Host::new();
        host.apply();
        host.online("0-5");
        let injector = Injector::new(Fails::Write("irq/24/smp_affinity_list".into()), errno, false);
        let reverted = revert(&host, &FailingHost(&host.root, injector));
        assert!(reverted.done, "{reverted:?}");
        assert_eq!([24, 25].map(|number| host.cpus(number)), ["0-3", "0-7"]);
    }
    // All CPUs that are online are taken.
    let host = Host::new();
    host.apply();
    host.online("0-5");
    let reverted = revert(&host, &Irqbalance(&host.root, "0-5", Some("0-7")));
    assert!(reverted.done, "{reverted:?}");
    assert_eq!([24, 25].map(|number| host.cpus(number)), ["0-5", "0-5"]);
}

/// Another program that moves interrupt 24 after its value was captured, and a user who stops or
/// kills the apply after the first write.
struct RaceAndStop<'a> {
    host: &'a Host,
    kills: bool,
    stops: bool,
}

impl Observer for RaceAndStop<'_> {
    fn step(&mut self, step: Step) {
        match step {
            Step::Journaled => self.host.set(24, "6"),
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
    let host = Host::new();
    let session = Session::open(host.state()).unwrap();
    let mut observer = RaceAndStop { host: &host, kills: false, stops: false };
    let error = session.apply(&host.writes(), &host.machine(), &mut observer).unwrap_err();
    let ApplyError::RolledBack { cause, rollback } = &error else { panic!("{error}") };
    assert!(matches!(**cause, ApplyError::Interrupted), "{cause}");
    assert!(rollback.done && rollback.outcomes.len() == 1, "{rollback:?}");
    assert_eq!([24, 25].map(|number| host.cpus(number)), ["6", "0-7"]);
    assert_eq!(status(&host.state(), &host.machine()).unwrap(), None);
}

#[test]
fn an_interrupt_that_was_left_keeps_no_killed_apply_from_being_put_back() {
    let host = Host::new();
    let apply = || {
        let session = Session::open(host.state()).unwrap();
        let mut observer = RaceAndStop { host: &host, kills: true, stops: false };
        session.apply(&host.writes(), &host.machine(), &mut observer).map(drop)
    };
    assert!(catch_unwind(AssertUnwindSafe(apply)).is_err());
    assert_eq!(host.states().len(), 2, "the journal is as before the first write");
    assert!(host.revert());
    assert_eq!([24, 25].map(|number| host.cpus(number)), ["6", "0-7"]);
}

#[test]
fn what_is_set_again_is_shown_as_the_kernel_has_left_it() {
    let host = Host::new();
    host.apply();
    host.set(24, "6");
    let cuts = Irqbalance(&host.root, "2", None);
    let machine = Machine::with_host(&host.root, &cuts, &NoGuests);
    let session = Session::open(host.state()).unwrap();
    let restored = session.restore(&|_, _| true, &machine).unwrap();
    assert!(restored.failed.is_empty() && restored.written.len() == 1, "{restored:?}");
    assert_eq!((restored.written[0].old.as_deref(), restored.written[0].new.as_str()), (Some("6"), "2"));
}
