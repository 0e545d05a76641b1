//! Faults of every kind, over a directory that answers like a kernel.

mod support;

use std::cell::Cell;
use std::fs;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use rtvirtio_apply::points::{Intercept, InterceptedHost};
use rtvirtio_apply::{
    ApplyError, Fate, GuestFiles, Guests, HostFiles as _, KnobState, Machine, NoGuests, Observer, OnConflict,
    Session, Silent, Step, dry_run, status,
};
use rtvirtio_planner::{BfqTunable, Knob, LimitKind};
use rtvirtio_testkit::skip;
use rtvirtio_vmm::AgentAddress;
use support::sim::SimKernel;
use support::{Sim, assert_same, limit, plan, weight};

#[test]
#[ignore = "the process that the tests start"]
fn crash_child() {
    support::child::main();
}

const IDLE: &str = "/sys/block/loop0/queue/iosched/slice_idle";
const VM0: &str = "/sys/fs/cgroup/blkio/lab/vm0";

fn lab(elevator: &str) -> Sim {
    let mut lab = Sim::new().with_disk(false, &["/lab", "/lab/vm0", "/lab/vm1", "/lab/vm2"], elevator);
    lab.case.plan = plan(&basic());
    lab
}

impl Sim {
    /// Writes of the plan.
    fn writes(&self) -> Vec<rtvirtio_apply::Write> {
        self.case.writes(&self.machine()).unwrap()
    }
}

fn basic() -> Vec<(Knob, &'static str)> {
    vec![
        (Knob::HostElevator, "bfq"),
        (Knob::HostBfq(BfqTunable::SliceIdle), "0"),
        (weight(0), "700"),
        (limit(1, LimitKind::ReadIops), "500"),
    ]
}

#[test]
fn a_dry_run_prints_old_and_new_and_writes_nothing() {
    let mut lab = lab("none").with_guests(&["mq-deadline"]);
    let before = lab.snapshot();
    let mut settings = basic();
    settings.push((Knob::GuestElevator { vm: "vm0".into() }, "none"));
    lab.case.plan = plan(&settings);
    let lines: Vec<_> =
        dry_run(&lab.writes(), &lab.machine()).unwrap().iter().map(ToString::to_string).collect();
    assert_eq!(
        lines,
        [
            "/sys/block/loop0/queue/scheduler: none -> bfq",
            "/sys/block/loop0/queue/iosched/slice_idle: (not there yet) -> 0",
            "/sys/fs/cgroup/blkio/lab/vm0/blkio.bfq.weight_device: 7:0 default -> 7:0 700",
            "/sys/fs/cgroup/blkio/lab/vm1/blkio.throttle.read_iops_device: 7:0 max -> 7:0 500",
            "vm0:/sys/block/vda/queue/scheduler: mq-deadline -> none",
        ]
    );
    assert_same(&before, &lab.snapshot(), "dry run");
    assert!(!lab.case.state.exists());
}

#[test]
fn a_second_rtvirtio_is_refused_with_the_pid_of_the_first() {
    let lab = lab("bfq");
    let mut holder = support::child::command(&lab.case, "hold", 0).spawn().unwrap();
    let mut lines = BufReader::new(holder.stdout.take().unwrap()).lines();
    assert!(lines.by_ref().any(|l| l.unwrap().contains("held")));
    let error = Session::open(&lab.case.state).unwrap_err();
    assert!(matches!(error, ApplyError::Locked { pid, .. } if pid == Some(holder.id())), "{error}");
    // The lock ends with the process that holds it, even when killed.
    holder.kill().unwrap();
    holder.wait().unwrap();
    drop(lab.session());
}

#[test]
fn a_plan_in_force_must_be_reverted_first() {
    let lab = lab("none");
    lab.apply().unwrap();
    let error = lab.apply().unwrap_err();
    assert!(matches!(error, ApplyError::InForce { .. }), "{error}");
    assert!(lab.revert(OnConflict::Report).done);
    lab.apply().unwrap();
}

#[test]
fn status_tells_in_force_from_changed_and_gone() {
    let lab = lab("none");
    assert_eq!(lab.status(), None);
    lab.apply().unwrap();
    let states = || -> Vec<_> {
        let status = lab.status().unwrap();
        assert!(status.complete && !status.reverting);
        status.knobs.into_iter().map(|k| k.state).collect()
    };
    assert!(states().iter().all(|s| *s == KnobState::InForce));
    lab.kernel.write(Path::new(IDLE), "5").unwrap();
    lab.kernel.write(&Path::new(VM0).join("blkio.bfq.weight_device"), "100").unwrap();
    fs::remove_dir_all(lab.kernel.at("/sys/fs/cgroup/blkio/lab/vm1")).unwrap();
    let now = states();
    assert_eq!(now[..3], [KnobState::InForce, KnobState::Changed { found: "5".into() }, KnobState::Original]);
    assert!(matches!(now[3], KnobState::Gone { .. }));
}

#[test]
fn a_conflict_can_be_left_forced_or_accepted() {
    for (policy, idle, elevator) in
        [(OnConflict::Report, "5", "bfq"), (OnConflict::Force, "", "none"), (OnConflict::Accept, "5", "bfq")]
    {
        let lab = lab("none");
        let before = lab.snapshot();
        lab.apply().unwrap();
        lab.kernel.write(Path::new(IDLE), "5").unwrap();
        let reverted = lab.revert(policy);
        let queue = lab.kernel.at("/sys/block/loop0/queue/scheduler");
        assert!(fs::read_to_string(queue).unwrap().contains(&format!("[{elevator}]")), "{policy:?}");
        if policy == OnConflict::Force {
            assert_same(&before, &lab.snapshot(), "forced");
        } else {
            // The tunable exists only under the elevator, so the elevator stays too.
            assert_eq!(lab.kernel.get(IDLE).trim(), idle);
        }
        assert_eq!(reverted.done, policy != OnConflict::Report);
        assert_eq!(lab.journal().exists(), policy == OnConflict::Report);
        let weights = lab.kernel.get(Path::new(VM0).join("blkio.bfq.weight_device"));
        assert_eq!(weights, "default 100\n", "what no other program touched is put back in any case");
        if policy == OnConflict::Report {
            let fates: Vec<_> = reverted.outcomes.iter().map(|o| &o.fate).collect();
            assert!(matches!(fates[..2], [Fate::Blocked { .. }, Fate::Conflict { .. }]), "{fates:?}");
            assert!(reverted.summary().contains("slice_idle was changed by another program to `5`"));
        }
    }
}

#[test]
fn a_device_that_is_gone_is_reported_and_forgotten() {
    let lab = lab("bfq");
    lab.apply().unwrap();
    fs::remove_dir_all(lab.kernel.at("/sys/block/loop0")).unwrap();
    let reverted = lab.revert(OnConflict::Report);
    assert!(reverted.done && !lab.journal().exists());
    assert!(reverted.outcomes.iter().all(|o| matches!(o.fate, Fate::Gone { .. })), "{:?}", reverted.outcomes);
}

#[test]
fn a_guest_that_is_gone_is_forgotten_and_one_that_hangs_is_not() {
    struct Hanging;
    impl Guests for Hanging {
        fn connect(&self, _: &AgentAddress) -> io::Result<Box<dyn GuestFiles>> {
            Err(io::ErrorKind::TimedOut.into())
        }
    }
    let mut lab = lab("bfq").with_guests(&["mq-deadline"]);
    let guest = SimKernel::new(lab.dir.path().join("guests/vm0"));
    let old = guest.get("/sys/block/vda/queue/scheduler");
    lab.case.plan = plan(&[
        (Knob::GuestElevator { vm: "vm0".into() }, "bfq"),
        (Knob::GuestBfq { vm: "vm0".into(), tunable: BfqTunable::SliceIdle }, "0"),
        (Knob::HostBfq(BfqTunable::SliceIdle), "1"),
    ]);
    lab.apply().unwrap();
    let session = lab.session();
    let hanging = Machine::with_host(&lab.root, &lab.kernel, &Hanging);
    let reverted = session.revert(OnConflict::Report, &hanging, &mut Silent).unwrap().unwrap();
    assert!(!reverted.done && session.in_force().unwrap(), "still to be put back");
    assert_eq!(lab.kernel.get(IDLE).trim(), "8", "the host is put back all the same");
    let again = session.revert(OnConflict::Report, &lab.machine(), &mut Silent).unwrap().unwrap();
    assert!(again.done, "{}", again.summary());
    assert_eq!(guest.get("/sys/block/vda/queue/scheduler"), old);
    drop(session);

    lab.apply().unwrap();
    fs::remove_file(lab.dir.path().join("guests/vm0.sock")).unwrap();
    let reverted = lab.revert(OnConflict::Report);
    assert!(reverted.done);
    // The tunable did not exist before the elevator was chosen, so there is nothing to report of
    // it.
    let gone: Vec<_> = reverted.outcomes.iter().filter(|o| matches!(o.fate, Fate::Gone { .. })).collect();
    assert!(gone.len() == 1 && gone[0].path == "vm0:/sys/block/vda/queue/scheduler", "{gone:?}");
}

#[test]
fn after_a_reboot_nothing_is_written() {
    let lab = lab("none");
    lab.apply().unwrap();
    lab.kernel.boot("two\n");
    // Another program set it after the restart, or `loop0` is another device now.
    lab.kernel.write(Path::new("/sys/block/loop0/queue/scheduler"), "none").unwrap();
    assert!(lab.status().unwrap().rebooted);
    let before = lab.snapshot();
    let reverted = lab.revert(OnConflict::Force);
    assert!(reverted.rebooted && reverted.done);
    assert!(reverted.outcomes.iter().all(|o| matches!(o.fate, Fate::Gone { .. })));
    assert_eq!(lab.snapshot(), before);
    assert!(!lab.journal().exists());
}

#[test]
fn a_journal_that_cannot_be_used_stops_everything() {
    let lab = lab("none");
    lab.apply().unwrap();
    let good = fs::read_to_string(lab.journal()).unwrap();
    let applied = lab.snapshot();
    let other_path = good.replace("queue/scheduler", "queue/schedulez");
    assert_ne!(other_path, good);
    let (_, body) = good.split_once('\n').unwrap();
    let first = body.trim_start().trim_start_matches('{');
    for (text, expected) in [
        (good[..good.len() / 2].to_owned(), "is damaged"),
        (String::new(), "is damaged"),
        ("\u{0}\u{0}".to_owned(), "is damaged"),
        (body.to_owned(), "is damaged"),
        (other_path, "its checksum does not fit"),
        (good.replace("journal.v2", "journal.v9"), "its checksum does not fit"),
        (format!("{{\n  \"schema\": \"rtvirtio.journal.v1\",{first}"), "has form `rtvirtio.journal.v1`"),
        (
            "{\"schema\":\"rtvirtio.journal.v9\",\"blake3\":\"00\"}\n{}\n".to_owned(),
            "run `revert` with the version that applied",
        ),
    ] {
        fs::write(lab.journal(), &text).unwrap();
        let session = lab.session();
        let error = session.revert(OnConflict::Force, &lab.machine(), &mut Silent).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        drop(session);
        assert!(status(&lab.case.state, &lab.machine()).is_err() && lab.apply().is_err());
        assert_same(&applied, &lab.snapshot(), "nothing touched");
        assert_eq!(fs::read_to_string(lab.journal()).unwrap(), text, "kept as it is");
    }
    fs::write(lab.journal(), good).unwrap();
    assert!(lab.revert(OnConflict::Report).done);
}

/// Observer that stops or interferes at a chosen step.
struct At<F: FnMut()> {
    step: Step,
    action: F,
    stop: bool,
    stopped: bool,
}

impl<F: FnMut()> Observer for At<F> {
    fn step(&mut self, step: Step) {
        if step == self.step {
            (self.action)();
            self.stopped = self.stop;
        }
    }
    fn stop(&mut self) -> bool {
        self.stopped
    }
}

#[test]
fn an_interrupt_puts_everything_back() {
    let lab = lab("none");
    let before = lab.snapshot();
    let session = lab.session();
    let mut observer =
        At { step: Step::Wrote { index: 2, of: 4 }, action: || {}, stop: true, stopped: false };
    let error = session.apply(&lab.writes(), &lab.machine(), &mut observer).unwrap_err();
    assert_eq!(error.to_string(), "interrupted; everything was put back");
    assert_same(&before, &lab.snapshot(), "interrupted");
}

#[test]
fn a_change_while_applying_is_left_to_its_owner() {
    let lab = lab("bfq");
    let session = lab.session();
    let action = || lab.kernel.write(Path::new(IDLE), "5").unwrap();
    let mut observer = At { step: Step::Journaled, action, stop: false, stopped: false };
    let error = session.apply(&lab.writes(), &lab.machine(), &mut observer).unwrap_err();
    let ApplyError::RolledBack { cause, .. } = &error else { panic!("{error}") };
    assert!(
        matches!(&**cause, ApplyError::Raced { was, found, .. } if was == "8" && found == "5"),
        "{error}"
    );
    assert!(error.to_string().ends_with("everything was put back"), "{error}");
    assert_eq!(lab.kernel.get(IDLE).trim(), "5");
    assert!(!session.in_force().unwrap());
}

/// Kernel that accepts every write, drops the last of this number, and refuses all that follow.
struct Lying<'a>(&'a SimKernel, Cell<usize>);

impl Intercept for Lying<'_> {
    fn intercept<T>(
        &self,
        path: &Path,
        change: Option<&str>,
        call: impl FnOnce() -> io::Result<T>,
    ) -> io::Result<T> {
        match (change, self.1.get()) {
            (None, _) => call(),
            (Some(_), 0) => Err(io::ErrorKind::PermissionDenied.into()),
            (Some(_), 1) => {
                self.1.set(0);
                let old = self.0.get(path);
                let result = call()?;
                self.0.put(path, &old);
                Ok(result)
            }
            (Some(_), left) => {
                self.1.set(left - 1);
                call()
            }
        }
    }
}

#[test]
fn when_undoing_fails_too_both_errors_are_reported_and_the_journal_stays() {
    let lab = lab("none");
    let before = lab.snapshot();
    let lying = InterceptedHost(&lab.kernel, Lying(&lab.kernel, Cell::new(3)));
    let machine = Machine::with_host(&lab.root, &lying, &NoGuests);
    let session = lab.session();
    let error = session.apply(&lab.writes(), &machine, &mut Silent).unwrap_err();
    let ApplyError::RolledBack { cause, rollback } = &error else { panic!("{error}") };
    assert!(
        matches!(&**cause, ApplyError::ReadBack { wanted, found, .. } if wanted == "700" && found == "default")
            && !rollback.done,
        "{error}"
    );
    assert!(session.in_force().unwrap());
    // Once the kernel answers again, revert finishes the job.
    assert!(session.revert(OnConflict::Report, &lab.machine(), &mut Silent).unwrap().unwrap().done);
    assert_same(&before, &lab.snapshot(), "put back in the end");
}

struct Mount(PathBuf);

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

#[test]
fn a_full_disk_for_the_journal_touches_nothing_and_hinders_no_revert() {
    const NAME: &str = "a_full_disk_for_the_journal_touches_nothing_and_hinders_no_revert";
    let lab = lab("none");
    fs::create_dir(&lab.case.state).unwrap();
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=64k,mode=0755", "rtvirtio-test"])
        .arg(&lab.case.state)
        .output();
    match mounted {
        Ok(out) if out.status.success() => {}
        Ok(out) => return skip(NAME, String::from_utf8_lossy(&out.stderr).trim()),
        Err(e) => return skip(NAME, &e.to_string()),
    }
    let _mount = Mount(lab.case.state.clone());
    let fill = || {
        let mut file = fs::File::create(lab.case.state.join("filler")).unwrap();
        while file.write_all(&[0; 4096]).is_ok() {}
    };
    let before = lab.snapshot();
    fill();
    let error = lab.apply().unwrap_err();
    assert!(
        matches!(&error, ApplyError::State { source, .. } if source.kind() == io::ErrorKind::StorageFull),
        "{error}"
    );
    assert_same(&before, &lab.snapshot(), "full disk");
    assert!(!lab.journal().exists());

    fs::remove_file(lab.case.state.join("filler")).unwrap();
    lab.apply().unwrap();
    fill();
    let reverted = lab.revert(OnConflict::Report);
    assert!(
        reverted.done && reverted.summary().contains("not protected against being killed"),
        "{reverted:?}"
    );
    assert_same(&before, &lab.snapshot(), "reverted on a full disk");
}

#[test]
fn an_unusable_state_directory_is_named() {
    let lab = lab("bfq");
    fs::write(&lab.case.state, "a file").unwrap();
    let error = Session::open(&lab.case.state).unwrap_err();
    assert!(
        matches!(&error, ApplyError::State { action: "create", path, .. } if *path == lab.case.state),
        "{error}"
    );
}

/// An error of the state directory changes nothing in the report of the knobs.
#[test]
fn a_journal_that_cannot_be_written_or_removed_is_reported() {
    let lab = lab("none");
    let before = lab.snapshot();
    let temp = lab.case.state.join("journal.json.new");
    fs::create_dir_all(&temp).unwrap();
    let error = lab.apply().unwrap_err();
    assert!(
        matches!(&error, ApplyError::State { action: "write", path, .. } if path.ends_with("journal.json")),
        "{error}"
    );
    assert_same(&before, &lab.snapshot(), "no journal");
    assert!(!lab.journal().exists());
    fs::remove_dir(&temp).unwrap();

    lab.apply().unwrap();
    fs::create_dir(&temp).unwrap();
    let action = || {
        fs::remove_file(lab.journal()).unwrap();
        fs::create_dir(lab.journal()).unwrap();
    };
    let mut observer = At { step: Step::AllBack, action, stop: false, stopped: false };
    let session = lab.session();
    let reverted = session.revert(OnConflict::Report, &lab.machine(), &mut observer).unwrap().unwrap();
    let text = reverted.summary();
    assert!(!reverted.done && text.starts_with("everything was put back, but: not protected"), "{text}");
    assert!(text.contains("the journal is still there: cannot remove"), "{text}");
    assert_same(&before, &lab.snapshot(), "put back all the same");
}
