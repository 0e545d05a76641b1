//! `apply` and `revert` of a contract, killed with SIGKILL after exact steps.

use std::os::unix::process::ExitStatusExt as _;
use std::process::Command;

use rtvirtio_apply::points::{CountedSteps, Points, kill_self};
use rtvirtio_apply::{Machine, NoGuests, OnConflict, Session};
use rtvirtio_cpu::{Ask, Backend, Contract, Level, Order, choose, probe, settings};
use rtvirtio_kernel::{Root, sched};
use rtvirtio_units::Nanos;
use rtvirtio_vmm::VmHandle;
use rtvirtio_vmm::threads::discover;

use crate::plc::{Plc, program, state_dir};

const JOB: &str = "RTVIRTIO_TEST_CRASH";
/// Every so many steps of `apply` and of `revert` there is a kill: all of them would take minutes
/// in the box, and are swept elsewhere.
const STRIDE: usize = 2;

#[test]
#[ignore = "the process that the crash tests start and kill"]
fn crash_child() {
    let Ok(job) = std::env::var(JOB) else { return };
    let [action, at, pid, backend] = job.split(' ').collect::<Vec<_>>()[..] else { panic!("bad job {job}") };
    let (root, mut observer) = (Root::default(), CountedSteps(Points::new(at.parse().unwrap(), kill_self)));
    let machine = Machine::new(&root, &NoGuests);
    let session = Session::open(state_dir()).unwrap();
    if action == "revert" {
        assert!(session.revert(OnConflict::Report, &machine, &mut observer).unwrap().unwrap().done);
        return;
    }
    let (backend, order) = match backend {
        "deadline" => (Backend::Deadline, Order::Contract),
        "cap" => (Backend::CpuMax, Order::Contract),
        _ => (Backend::Throttle, Order::Rt),
    };
    let probe = probe(&root).unwrap();
    assert!(choose(&probe, Some(backend), false).is_some());
    let threads = discover(&root, &VmHandle::of_pid(pid.parse().unwrap())).unwrap();
    let contract = Contract::new(Nanos::from_millis(15), Nanos::from_millis(20)).unwrap();
    let ask = Ask { vm: "plc", threads: &threads, contract, order, level: Level::ALONE, used: &[] };
    let writes = settings(&root, &probe, backend, &ask).unwrap().writes;
    session.apply(&writes, &machine, &mut observer).unwrap();
}

/// True when the child killed itself, false when it was done before.
fn killed(plc: &Plc, action: &str, at: usize, backend: Backend) -> bool {
    let backend = match backend {
        Backend::Deadline => "deadline",
        Backend::CpuMax => "cap",
        _ => "rt",
    };
    let out = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "crash::crash_child", "--ignored", "--nocapture", "--test-threads=1"])
        .env(JOB, format!("{action} {at} {} {backend}", plc.pid()))
        .output()
        .unwrap();
    let said = || String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    if out.status.signal() == Some(9) {
        return true;
    }
    assert!(out.status.success() && said().contains("1 passed"), "{action} {at}: {}\n{}", out.status, said());
    false
}

/// Kills `apply`, then `revert`, at every second step, and puts back with the program each time.
/// Returns how many kills there were of each.
pub fn sweep(plc: &Plc, before: &str, backend: Backend) -> (usize, usize) {
    let mut counts = [0, 0];
    let check = |what: String| {
        program(&["revert"]);
        let after = plc.snapshot();
        assert!(before == after, "{what}: before\n{before}\nafter\n{after}");
        assert!(!state_dir().join(rtvirtio_apply::JOURNAL_FILE).exists(), "{what}: a journal is left");
    };
    // Step 1 is before the journal is written.
    for at in (2..).step_by(STRIDE) {
        let was_killed = killed(plc, "apply", at, backend);
        if was_killed {
            check(format!("{backend}: apply killed after step {at}"));
            counts[0] += 1;
            continue;
        }
        let applied = plc.snapshot();
        assert!(applied != before, "{backend} changed nothing");
        break;
    }
    // It is in force now.
    for at in (1..).step_by(STRIDE) {
        if !killed(plc, "revert", at, backend) {
            check(format!("{backend}: reverted"));
            break;
        }
        check(format!("{backend}: revert killed after step {at}"));
        counts[1] += 1;
        assert!(!killed(plc, "apply", usize::MAX, backend));
    }
    if backend == Backend::Deadline {
        assert!(!killed(plc, "apply", usize::MAX, backend));
        // Killed after a reservation was given back and before the policy was: no step of ours lies
        // there.
        let held = plc.threads().into_iter().find(|t| t["policy"] == "deadline").unwrap();
        let tid = u32::try_from(held["tid"].as_u64().unwrap()).unwrap();
        sched::set(tid, &sched::get(tid).unwrap().released().unwrap()).unwrap();
        check("given back and killed".to_owned());
    }
    assert!(counts.iter().all(|c| *c >= 2), "{counts:?}");
    (counts[0], counts[1])
}
