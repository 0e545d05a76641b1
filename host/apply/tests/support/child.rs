//! Process that applies or reverts and kills itself with SIGKILL at one exact point.
//!
//! The test binary runs itself again with one ignored test that calls [`main`]. Points are counted
//! in the injected files (before and after every single write) and in the injected observer; the
//! code under test knows nothing of it.

use std::env;
use std::fs;
use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, ExitStatus, Stdio};

use rtvirtio_apply::points::{CountedSteps, InterceptedHost, Points, kill_self};
use rtvirtio_apply::{ApplyError, Guests, HostFiles, Machine, NoGuests, OnConflict, Session};

use super::Case;
use super::inject::InterceptedGuests;
use super::sim::{SimGuests, SimKernel};

const VAR: &str = "RTVIRTIO_TEST_CHILD";

/// Carries out `apply` or `revert`, counting points.
pub fn act(case: &Case, action: &str, points: &Points) -> Result<(), ApplyError> {
    let root = case.root();
    let sim = SimKernel::new(&case.root);
    let host: &dyn HostFiles = if root.is_real() { &root } else { &sim };
    let sim_guests = SimGuests;
    let guests: &dyn Guests = if case.guests.is_some() { &sim_guests } else { &NoGuests };
    let (host, guests) = (InterceptedHost(host, points.clone()), InterceptedGuests(guests, points.clone()));
    let machine = Machine::with_host(&root, &host, &guests);
    let mut observer = CountedSteps(points.clone());
    let session = Session::open(&case.state)?;
    if action == "apply" {
        session.apply(&case.writes(&machine)?, &machine, &mut observer)?;
    } else {
        let reverted = session.revert(OnConflict::Report, &machine, &mut observer)?;
        if let Some(r) = reverted {
            assert!(r.done, "{}", r.summary());
        }
    }
    Ok(())
}

/// Carries out `apply` or `revert` to its end.
pub fn whole(case: &Case, action: &str) -> Result<(), ApplyError> {
    act(case, action, &Points::new(0, || {}))
}

/// Entry of the child process: does nothing unless it was started by [`run`] or [`start`].
pub fn main() {
    let Ok(job) = env::var(VAR) else { return };
    let [action, at, case] = job.splitn(3, ' ').collect::<Vec<_>>()[..] else { panic!("bad job {job}") };
    let case: Case = serde_json::from_slice(&fs::read(case).unwrap()).unwrap();
    if action == "hold" {
        let _session = Session::open(&case.state).unwrap();
        println!("held");
        let _ = io::stdin().read_line(&mut String::new());
        return;
    }
    act(&case, action, &Points::new(at.parse().unwrap(), kill_self)).unwrap();
}

/// Starts a child; `at` 0 means that it does not kill itself.
pub fn command(case: &Case, action: &str, at: u64) -> Command {
    let file = case.state.with_extension("case");
    fs::write(&file, serde_json::to_vec(case).unwrap()).unwrap();
    let mut command = Command::new(env::current_exe().unwrap());
    command
        .args(["--exact", "crash_child", "--ignored", "--nocapture", "--test-threads=1"])
        .env(VAR, format!("{action} {at} {}", file.display()))
        .env_remove("RUST_BACKTRACE")
        .stdout(Stdio::piped())
        .stdin(Stdio::piped());
    command
}

/// Runs a child to its end; `true` when it killed itself, `false` when it finished. Any other end
/// is a failure.
pub fn killed(case: &Case, action: &str, at: u64) -> bool {
    let output = command(case, action, at).stderr(Stdio::piped()).output().unwrap();
    let status: ExitStatus = output.status;
    if status.signal() == Some(9) {
        return true;
    }
    assert!(status.success(), "{action} at {at}: {status}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "the child did not run");
    false
}

/// Environment variable with the step between points that are tried: 2 for every second one.
pub const STEP: &str = "RTVIRTIO_CRASH_STEP";

/// Kills `apply` at every point ([`STEP`]), and each time reverts and compares; then kills `revert`
/// at every point. Returns the last of both.
pub fn sweep(case: &Case, dirs: &[std::path::PathBuf]) -> (u64, u64) {
    let snapshot = || case.snapshot(dirs);
    let before = snapshot();
    let step: u64 = std::env::var(STEP).map_or(1, |s| s.parse().unwrap());
    let mut at = 1;
    while killed(case, "apply", at) {
        whole(case, "revert").unwrap();
        super::assert_same(&before, &snapshot(), &format!("apply killed at point {at}, reverted"));
        assert!(!case.state.join(rtvirtio_apply::JOURNAL_FILE).exists(), "journal left at point {at}");
        at += step;
    }
    let applied = snapshot();
    assert!(applied != before, "the plan changed nothing");
    whole(case, "revert").unwrap();
    super::assert_same(&before, &snapshot(), "applied, reverted");
    let applies = at - 1;
    at = 1;
    loop {
        whole(case, "apply").unwrap();
        super::assert_same(&applied, &snapshot(), &format!("applied again before {at}"));
        let was_killed = killed(case, "revert", at);
        whole(case, "revert").unwrap();
        super::assert_same(&before, &snapshot(), &format!("revert killed at point {at}, reverted again"));
        if !was_killed {
            return (applies, at - 1);
        }
        at += step;
    }
}
