//! The fair server of CPUs over a directory that stands in for debugfs: switched off and put back,
//! after a kill at any step too, and not forgotten where debugfs is not mounted.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use rtvirtio_apply::{
    ApplyError, Fate, Form, KnobState, Machine, NoGuests, Observer, OnConflict, Reverted, Session, Silent,
    Step, Target, Write, dry_run, status,
};
use rtvirtio_kernel::{Root, fair_server};
use rustix::io::Errno;
use support::inject::{FailingHost, Fails, Injector};

mod support;

const ON: &str = "50000000";

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
        host.set(4, ON);
        host.set(5, ON);
        host
    }

    fn put(&self, path: &Path, text: &str) {
        let path = self.root.at(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn set(&self, cpu: u32, runtime: &str) {
        self.put(&fair_server::runtime_file(cpu), &format!("{runtime}\n"));
    }

    fn now(&self) -> [String; 2] {
        [4, 5].map(|cpu| self.root.read(fair_server::runtime_file(cpu)).unwrap().trim().to_owned())
    }

    fn writes(&self) -> Vec<Write> {
        let of = |cpu: u32| Target::host(fair_server::runtime_file(cpu), Form::Plain);
        [4, 5].map(|cpu| Write::new(format!("fair server of CPU {cpu}"), of(cpu), "0")).to_vec()
    }

    fn state(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    fn machine(&self) -> Machine<'_> {
        Machine::new(&self.root, &NoGuests)
    }

    fn apply(&self, observer: &mut dyn Observer) -> Result<(), ApplyError> {
        let session = Session::open(self.state())?;
        session.apply(&self.writes(), &self.machine(), observer).map(drop)
    }

    fn states(&self) -> Vec<KnobState> {
        let status = status(&self.state(), &self.machine()).unwrap().unwrap();
        status.knobs.into_iter().map(|knob| knob.state).collect()
    }

    fn revert(&self, on_conflict: OnConflict) -> Reverted {
        let session = Session::open(self.state()).unwrap();
        session.revert(on_conflict, &self.machine(), &mut Silent).unwrap().unwrap()
    }
}

struct KillAt(Step);

impl Observer for KillAt {
    fn step(&mut self, step: Step) {
        assert_ne!(step, self.0, "killed");
    }
}

#[test]
fn fair_servers_are_switched_off_and_put_back() {
    let host = Host::new();
    let lines = dry_run(&host.writes(), &host.machine()).unwrap();
    assert_eq!(lines[0].to_string(), "/sys/kernel/debug/sched/fair_server/cpu4/runtime: 50000000 -> 0");
    assert_eq!(host.now(), [ON, ON]);
    host.apply(&mut Silent).unwrap();
    assert_eq!(host.now(), ["0", "0"]);
    assert_eq!(host.states(), [KnobState::InForce, KnobState::InForce]);
    assert!(host.revert(OnConflict::Report).done);
    assert_eq!(host.now(), [ON, ON]);

    // A user had switched one off before: that stays.
    host.set(5, "0");
    host.apply(&mut Silent).unwrap();
    assert!(host.revert(OnConflict::Report).done);
    assert_eq!(host.now(), [ON, "0"]);
}

#[test]
fn a_share_that_a_user_has_set_meanwhile_is_a_conflict() {
    let host = Host::new();
    host.apply(&mut Silent).unwrap();
    host.set(5, "10000000");
    assert_eq!(host.states()[1], KnobState::Changed { found: "10000000".to_owned() });
    let reverted = host.revert(OnConflict::Report);
    assert!(!reverted.done && reverted.outcomes.iter().any(|o| matches!(o.fate, Fate::Conflict { .. })));
    assert_eq!(host.now(), [ON, "10000000"]);
    assert!(host.revert(OnConflict::Force).done);
    assert_eq!(host.now(), [ON, ON]);
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
        let host = Host::new();
        let killed = catch_unwind(AssertUnwindSafe(|| host.apply(&mut KillAt(step))));
        assert!(killed.is_err() && host.now() == now, "{step:?}");
        assert!(host.revert(OnConflict::Report).done);
        assert_eq!(host.now(), [ON, ON], "{step:?}");
    }
}

/// The kernel keeps what was written while nothing of debugfs is seen.
#[test]
fn nothing_is_forgotten_where_debugfs_is_not_mounted() {
    let host = Host::new();
    host.apply(&mut Silent).unwrap();
    let (debugfs, aside) = (host.root.at("/sys/kernel/debug"), host.root.at("/aside"));
    fs::rename(&debugfs, &aside).unwrap();
    fs::create_dir(&debugfs).unwrap();
    assert!(host.states().iter().all(|state| matches!(state, KnobState::Unknown { .. })));
    let reverted = host.revert(OnConflict::Report);
    let mounts =
        |fate: &Fate| matches!(fate, Fate::Failed { error } if error.contains("is debugfs mounted?"));
    assert!(!reverted.done && reverted.outcomes.iter().all(|o| mounts(&o.fate)), "{reverted:?}");
    fs::remove_dir(&debugfs).unwrap();
    fs::rename(&aside, &debugfs).unwrap();
    assert!(host.revert(OnConflict::Report).done);
    assert_eq!(host.now(), [ON, ON]);
    // Nor is anything written where it is not seen.
    fs::rename(&debugfs, &aside).unwrap();
    let error = host.apply(&mut Silent).unwrap_err().to_string();
    assert!(error.contains("is debugfs mounted?"), "{error}");
    assert_eq!(status(&host.state(), &host.machine()).unwrap(), None);
}

/// Reservations may have taken meanwhile what the server had.
#[test]
fn a_server_that_the_kernel_refuses_to_put_back_stays_in_the_journal() {
    let host = Host::new();
    host.apply(&mut Silent).unwrap();
    let injector = Injector::new(Fails::Write("cpu4/runtime".into()), Errno::BUSY, false);
    let failing = FailingHost(&host.root, injector);
    let machine = Machine::with_host(&host.root, &failing, &NoGuests);
    let session = Session::open(host.state()).unwrap();
    let reverted = session.revert(OnConflict::Report, &machine, &mut Silent).unwrap().unwrap();
    assert!(!reverted.done && host.now() == ["0", ON], "{reverted:?}");
    drop(session);
    assert!(host.revert(OnConflict::Report).done);
    assert_eq!(host.now(), [ON, ON]);
}
