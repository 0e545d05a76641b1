//! Kills at the same points, against the real kernel: a loop device, real BFQ, real cgroups.

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rtvirtio_apply::{
    ApplyError, Fate, Form, JOURNAL_FILE, Machine, NoGuests, OnConflict, Session, Silent, Target, Write,
};
use rtvirtio_kernel::{BlockDevice, Cgroups, Hierarchy, Root};
use rtvirtio_testbed::boxed::{self, BoxRun};
use rtvirtio_testbed::image;
use rtvirtio_testkit::skip;
use support::child::{STEP, sweep, whole};
use support::{Case, assert_same, full_plan, snapshot};

#[test]
#[ignore = "the process that the crash tests start and kill"]
fn crash_child() {
    support::child::main();
}

/// A loop device and a cgroup for each of three VMs; all removed at the end.
struct Real {
    dir: tempfile::TempDir,
    device: Option<BlockDevice>,
    cgroups: Cgroups,
    parent: PathBuf,
}

impl Real {
    /// Prints the reason and returns `None` where the machine does not allow the test.
    fn new(test: &str) -> Option<Self> {
        let root = Root::default();
        if !rustix::process::geteuid().is_root() {
            skip(test, "needs root");
            return None;
        }
        let cgroups = Cgroups::detect(&root).inspect_err(|e| skip(test, &e.to_string())).ok()?;
        let parent = PathBuf::from(format!("/rtvirtio-{}", rtvirtio_testkit::unique(test)));
        let mut real = Self { dir: rtvirtio_testkit::tempdir().unwrap(), device: None, cgroups, parent };
        let file = real.dir.path().join("disk");
        fs::File::create(&file).unwrap().set_len(16 << 20).unwrap();
        let out = Command::new("losetup").args(["--find", "--show"]).arg(&file).output();
        let out = out.inspect_err(|e| skip(test, &format!("losetup: {e}"))).ok()?;
        if !out.status.success() {
            skip(test, &format!("losetup: {}", String::from_utf8_lossy(&out.stderr).trim()));
            return None;
        }
        let node = String::from_utf8(out.stdout).unwrap();
        let device = BlockDevice::find(&root, node.trim()).unwrap();
        real.device = Some(device.clone());
        // An earlier user of this loop device may have left another.
        device.set_elevator(&root, "none").unwrap();
        device.offers(&root, "bfq").inspect_err(|e| skip(test, &e.to_string())).ok()?;
        for n in 0..3 {
            real.cgroups.create(&root, &real.parent.join(format!("vm{n}"))).unwrap();
        }
        Some(real)
    }

    fn device(&self) -> &BlockDevice {
        self.device.as_ref().unwrap()
    }

    fn case(&self) -> Case {
        Case {
            root: "/".into(),
            device: self.device().name.clone(),
            parent: self.parent.clone(),
            plan: full_plan(false),
            ..Case::new(self.dir.path())
        }
    }

    /// Directories that must be restored to the byte: the queue with its tunables, and the cgroups'
    /// weights and limits.
    fn dirs(&self) -> Vec<PathBuf> {
        vec![self.device().queue(""), self.cgroups.dir(&self.parent).unwrap()]
    }

    fn snapshot(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        snapshot(&self.dirs())
    }

    /// Tunes mq-deadline, as a user had it before.
    fn tune_deadline(&self) {
        let (root, device) = (Root::default(), self.device());
        device.set_elevator(&root, "mq-deadline").unwrap();
        root.write(device.tunable("read_expire"), "780").unwrap();
        root.write(device.queue("nr_requests"), "100").unwrap();
    }

    fn vm(&self, n: usize, file: &str) -> PathBuf {
        self.cgroups.dir(&self.parent.join(format!("vm{n}"))).unwrap().join(file)
    }

    fn weight_file(&self) -> &'static str {
        if self.cgroups.hierarchy == Hierarchy::V1 { "blkio.bfq.weight_device" } else { "io.bfq.weight" }
    }
}

impl Drop for Real {
    fn drop(&mut self) {
        let root = Root::default();
        for n in 0..3 {
            let _ = self.cgroups.remove(&root, &self.parent.join(format!("vm{n}")));
        }
        let _ = self.cgroups.remove(&root, &self.parent);
        if let Some(device) = &self.device {
            // A loop device keeps its queue settings when it is detached.
            let _ = root.write(device.queue("scheduler"), "none");
            let _ = Command::new("losetup").arg("-d").arg(format!("/dev/{}", device.name)).status();
        }
    }
}

#[test]
fn killed_at_every_point_from_a_tuned_deadline_scheduler() {
    let Some(real) = Real::new("killed_at_every_point_from_a_tuned_deadline_scheduler") else { return };
    real.tune_deadline();
    let (apply, revert) = sweep(&real.case(), &real.dirs());
    println!("points: apply {apply}, revert {revert}; 0 differences");
    assert!(apply > 25 && revert > 20, "{apply} {revert}");
}

#[test]
fn killed_at_every_point_with_bfq_tuned_before() {
    let Some(real) = Real::new("killed_at_every_point_with_bfq_tuned_before") else { return };
    let root = Root::default();
    let device = real.device();
    device.set_elevator(&root, "bfq").unwrap();
    root.write(device.tunable("slice_idle_us"), "1500").unwrap();
    root.write(device.tunable("timeout_sync"), "60").unwrap();
    root.write(device.tunable("low_latency"), "0").unwrap();
    if real.cgroups.hierarchy == Hierarchy::V1 {
        let dev = &device.dev;
        root.write(real.vm(0, real.weight_file()), "200").unwrap();
        root.write(real.vm(1, real.weight_file()), &format!("{dev} 55")).unwrap();
        root.write(real.vm(2, "blkio.throttle.read_iops_device"), &format!("{dev} 77")).unwrap();
    }
    sweep(&real.case(), &real.dirs());
}

/// A switch away from BFQ loses weights of cgroups that the plan does not name.
#[test]
fn leaving_bfq_keeps_the_weights_of_others() {
    let Some(real) = Real::new("leaving_bfq_keeps_the_weights_of_others") else { return };
    if real.cgroups.hierarchy == Hierarchy::V2 {
        return skip(
            "leaving_bfq_keeps_the_weights_of_others",
            "the io controller is not enabled for a group of ours",
        );
    }
    let root = Root::default();
    real.device().set_elevator(&root, "bfq").unwrap();
    let file = real.vm(1, real.weight_file());
    root.write(&file, &format!("{} 900", real.device().dev)).unwrap();
    let mut case = real.case();
    case.plan = support::plan(&[(rtvirtio_planner::Knob::HostElevator, "none")]);
    let before = real.snapshot();
    whole(&case, "apply").unwrap();
    assert!(!root.read(&file).unwrap().contains("900"), "the kernel forgets it, which is why it is captured");
    whole(&case, "revert").unwrap();
    assert_same(&before, &real.snapshot(), "left BFQ and came back");
}

/// Writes that the kernel refuses, each after one that it accepted.
#[test]
fn a_refused_value_undoes_the_rest() {
    let Some(real) = Real::new("a_refused_value_undoes_the_rest") else { return };
    let root = Root::default();
    let device = real.device();
    let dev = device.dev.clone();
    let elevator = || Write::new("elevator", Target::host(device.queue("scheduler"), Form::Elevator), "bfq");
    let depth = || Write::new("nr_requests", Target::host(device.queue("nr_requests"), Form::Plain), "64");
    let bad = [
        Write::new("elevator", Target::host(device.queue("scheduler"), Form::Elevator), "nonesuch"),
        Write::new("max_budget", Target::host(device.tunable("max_budget"), Form::Plain), "-1"),
        Write::new(
            "weight",
            Target::host(real.vm(0, real.weight_file()), Form::DeviceWeight { dev }),
            "5000",
        ),
    ];
    let before = real.snapshot();
    for bad in bad {
        if !root.exists(&bad.target.path).unwrap() && !bad.target.path.ends_with("max_budget") {
            skip("a_refused_value_undoes_the_rest", "the io controller is not enabled for a group of ours");
            continue;
        }
        let session = Session::open(real.dir.path().join("state")).unwrap();
        let machine = Machine::new(&root, &NoGuests);
        let value = bad.value.clone();
        let first = if bad.knob == "elevator" { depth() } else { elevator() };
        let writes = [first, Write { created_by: Some(0), ..bad }];
        let error = session.apply(&writes, &machine, &mut Silent).unwrap_err();
        let ApplyError::RolledBack { cause, rollback } = &error else { panic!("{error}") };
        // Linux 6.18 accepts an unknown elevator without an error while the current one is `none`:
        // the read-back detects it.
        assert!(matches!(**cause, ApplyError::Refused { .. } | ApplyError::ReadBack { .. }), "{cause}");
        assert!(error.to_string().contains(&value) && rollback.done, "{error}");
        assert!(error.to_string().ends_with("everything was put back"), "{error}");
        assert!(!session.in_force().unwrap());
        assert_same(&before, &real.snapshot(), &value);
    }
}

/// A knob that another program changed is left alone, unless `--force` is given.
#[test]
fn a_change_by_someone_else_is_reported_and_left() {
    let Some(real) = Real::new("a_change_by_someone_else_is_reported_and_left") else { return };
    let root = Root::default();
    let device = real.device();
    device.set_elevator(&root, "bfq").unwrap();
    let before = real.snapshot();
    whole(&real.case(), "apply").unwrap();
    root.write(device.tunable("slice_idle"), "5").unwrap();
    let session = Session::open(real.dir.path().join("state")).unwrap();
    let machine = Machine::new(&root, &NoGuests);
    let reverted = session.revert(OnConflict::Report, &machine, &mut Silent).unwrap().unwrap();
    let open: Vec<_> = reverted.outcomes.iter().filter(|o| matches!(o.fate, Fate::Conflict { .. })).collect();
    assert_eq!(open.len(), 1, "{:#?}", reverted.outcomes);
    assert!(open[0].path.ends_with("slice_idle") && !reverted.done && session.in_force().unwrap());
    assert_eq!(device.tunables(&root).unwrap()["slice_idle"], "5");
    let again = session.revert(OnConflict::Report, &machine, &mut Silent).unwrap().unwrap();
    assert_eq!((again.done, again.outcomes.len()), (false, 1), "still reported, and nothing else");
    let forced = session.revert(OnConflict::Force, &machine, &mut Silent).unwrap().unwrap();
    assert!(forced.done && !session.in_force().unwrap());
    assert_same(&before, &real.snapshot(), "forced");
}

#[test]
fn cgroups_that_are_gone_are_no_errors() {
    let Some(real) = Real::new("cgroups_that_are_gone_are_no_errors") else { return };
    let root = Root::default();
    whole(&real.case(), "apply").unwrap();
    let vm2 = real.parent.join("vm2");
    real.cgroups.remove(&root, &vm2).unwrap();
    real.cgroups.remove(&root, &real.parent.join("vm1")).unwrap();
    // A restarted VM: same name, another cgroup.
    real.cgroups.create(&root, &vm2).unwrap();
    let session = Session::open(real.dir.path().join("state")).unwrap();
    let machine = Machine::new(&root, &NoGuests);
    let reverted = session.revert(OnConflict::Report, &machine, &mut Silent).unwrap().unwrap();
    assert!(reverted.done, "{}", reverted.summary());
    let gone: Vec<_> = reverted.outcomes.iter().filter(|o| matches!(o.fate, Fate::Gone { .. })).collect();
    assert!(gone.len() >= 4 && gone.iter().all(|o| !o.path.contains("vm0")), "{gone:#?}");
    let elevators = real.device().elevators(&root).unwrap();
    assert_eq!(elevators.current, "none");
}

/// The journal is damaged: the printed commands, run by a shell, put everything back all the same.
#[test]
fn the_commands_of_a_damaged_journal_put_back() {
    const NAME: &str = "the_commands_of_a_damaged_journal_put_back";
    let Some(real) = Real::new(NAME) else { return };
    real.tune_deadline();
    let before = real.snapshot();
    whole(&real.case(), "apply").unwrap();
    let applied = real.snapshot();
    assert!(applied != before);
    let path = real.dir.path().join("state").join(JOURNAL_FILE);
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replacen("boot_id", "boot_ie", 1)).unwrap();
    let error = whole(&real.case(), "revert").unwrap_err();
    assert_same(&applied, &real.snapshot(), "refused");
    let script = error.readable().unwrap().to_string();
    assert!(script.lines().filter(|l| l.starts_with("echo '")).count() > 5, "{script}");
    let output = Command::new("sh").arg("-e").arg("-c").arg(&script).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && errors.is_empty(), "{errors}\n{script}");
    assert_same(&before, &real.snapshot(), "by hand");
    fs::remove_file(path).unwrap();
}

/// The real kernel interface answers a stat of a cgroup with EIO, and an open of its limit with
/// EMFILE: the limit is still in force.
#[test]
fn an_injected_error_of_a_system_call_is_not_absence() {
    const NAME: &str = "an_injected_error_of_a_system_call_is_not_absence";
    let Some(real) = Real::new(NAME) else { return };
    if !Command::new("strace").arg("-V").output().is_ok_and(|o| o.status.success()) {
        return skip(NAME, "no strace");
    }
    if real.cgroups.hierarchy == Hierarchy::V2 {
        return skip(NAME, "the io controller is not enabled for a group of ours");
    }
    let mut case = real.case();
    case.plan = support::plan(&[(support::limit(0, rtvirtio_planner::LimitKind::ReadIops), "50")]);
    let before = real.snapshot();
    let file = real.vm(0, "blkio.throttle.read_iops_device");
    let group = file.parent().unwrap();
    whole(&case, "apply").unwrap();
    let applied = fs::read_to_string(&file).unwrap();
    assert!(applied.ends_with(" 50\n"), "{applied}");
    for (path, inject) in [
        (group, "inject=statx,newfstatat:error=EIO"),
        (group, "inject=statx,newfstatat:error=EACCES"),
        (file.as_path(), "inject=openat:error=EMFILE"),
    ] {
        let child = support::child::command(&case, "revert", 0);
        let log = real.dir.path().join("strace");
        let mut strace = Command::new("strace");
        strace.args(["-f", "-o"]).arg(&log).arg("-P").arg(path).args(["-e", inject, "--"]);
        strace.arg(child.get_program()).args(child.get_args());
        strace.envs(child.get_envs().filter_map(|(key, value)| Some((key, value?))));
        let output = strace.output().unwrap();
        if !fs::read_to_string(&log).unwrap_or_default().contains("(INJECTED)") {
            return skip(NAME, "strace cannot inject errors here");
        }
        let said = String::from_utf8_lossy(&output.stderr) + String::from_utf8_lossy(&output.stdout);
        assert!(!output.status.success() && said.contains("not put back: "), "{inject}: {said}");
        assert_eq!(fs::read_to_string(&file).unwrap(), applied);
        assert!(case.state.join(JOURNAL_FILE).exists(), "{inject}: the journal is lost");
    }
    whole(&case, "revert").unwrap();
    assert_same(&before, &real.snapshot(), "put back in the end");
    assert!(!case.state.join(JOURNAL_FILE).exists());
}

/// The tests above once more in the box: cgroup v2 with the I/O controller still to be enabled, and
/// Debian's kernel with BFQ as a module. Two of them need I/O files before the plan makes them; on
/// v2 there are none then. A box is slow: every second point.
#[test]
fn the_same_on_cgroup_v2_in_the_box() {
    let test = "the_same_on_cgroup_v2_in_the_box";
    let losetup = ["/usr/sbin/losetup", "/sbin/losetup"].map(Path::new).into_iter().find(|p| p.exists());
    let Some(losetup) = losetup else { return skip(test, "no losetup") };
    let image = match boxed::ensure(&image::default_cache(), &|line| eprintln!("{line}")) {
        Ok(image) => image,
        Err(e) => return skip(test, &e.to_string()),
    };
    let me = std::env::current_exe().unwrap();
    let name = me.file_name().unwrap().to_str().unwrap();
    // Prefixes of the names above; this test itself is not among them.
    let script = format!(
        "set -eu\nexport {STEP}=4 RTVIRTIO_NO_SKIP=1\n{name} killed_at a_change cgroups_that --test-threads=1\n"
    );
    let mut run = BoxRun::new(&script, Duration::from_secs(300));
    let programs = [me.as_path(), losetup];
    run.programs = &programs;
    let out = boxed::run(&image, &run, &|l| eprintln!("box: {l}")).unwrap();
    assert_eq!(out.exit_code, Some(0), "{}\n{}", out.output, out.console);
    assert!(out.output.contains("4 passed"), "{}", out.output);
    eprintln!("the box ran {:.1} s", out.took.as_secs_f64());
}
