//! `kill -9` of the service at each change of the host while it puts one contract in force and
//! takes it back: started again, it finishes what was begun, and nothing is left that was not there
//! before. Each run kills at another part of the points; `RTVIRTIO_KILL_STRIDE=1` at all of them,
//! which takes a minute or two.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use common::{Plc, Rig, can_run, try_answer};
use rtvirtio_apply::points::KILL_AT;
use rtvirtio_kernel::{Root, sched, task};
use rtvirtio_testkit::site::{Random, number};
use rtvirtio_testkit::{HANG, skip};
use serde_json::Value;

/// What the service may change: of each thread its policy and its groups, of the host the budget
/// from which contracts are granted.
#[derive(Debug, PartialEq)]
struct HostState {
    threads: BTreeMap<u32, (String, String)>,
    budget: Option<String>,
    has_group: bool,
    journals: Vec<String>,
}

impl HostState {
    fn of(rig: &Rig, plc: &Plc) -> Self {
        let (root, pid) = (Root::default(), plc.machine.as_ref().unwrap().pid());
        let thread = |tid: u32| {
            let attr = sched::get(tid).ok()?;
            let groups = task::cgroups(&root, pid, tid).ok()?;
            Some((tid, (attr.to_string(), format!("{groups:?}"))))
        };
        let tids = task::tids(&root, pid).unwrap();
        Self {
            threads: tids.into_iter().filter_map(thread).collect(),
            budget: fs::read_to_string("/sys/fs/cgroup/cpu/cpu.rt_runtime_us").ok(),
            has_group: plc.group().exists(),
            journals: journals(&rig.site.state_dir()),
        }
    }
}

/// Journals below a directory.
fn journals(dir: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.path().is_dir() {
            found.extend(journals(&entry.path()));
        } else if entry.file_name() == rtvirtio_apply::JOURNAL_FILE {
            found.push(entry.path().display().to_string());
        }
    }
    found.sort();
    found
}

/// How the service says that the contract stands; empty while it does not answer.
fn state(rig: &Rig, plc: &Plc) -> String {
    let Ok(stream) = UnixStream::connect(rig.socket()) else { return String::new() };
    let path = format!("/v1/vms/{}", plc.name);
    let Some((200, body)) = try_answer(stream, "GET", &path) else { return String::new() };
    let vm: Value = serde_json::from_str(&body).unwrap_or_default();
    vm["state"].as_str().unwrap_or_default().to_owned()
}

/// Waits for this. A service that has killed itself meanwhile is started again, and lives; returns
/// whether that was so.
fn outlived(rig: &mut Rig, what: &str, is_so: impl Fn(&Rig) -> bool) -> bool {
    let (begin, mut was_killed) = (Instant::now(), false);
    while !is_so(rig) {
        if let Some(status) = rig.service.as_mut().unwrap().0.try_wait().unwrap() {
            assert!(status.signal() == Some(9) && !was_killed, "{what}: {status}\n{}", rig.log());
            was_killed = true;
            rig.start(&[]);
        }
        assert!(begin.elapsed() < HANG, "{what}\n{}", rig.log());
        std::thread::sleep(Duration::from_millis(2));
    }
    was_killed
}

#[test]
fn killed_at_any_write_it_leaves_nothing_and_goes_on() {
    let test = "killed_at_any_write_it_leaves_nothing_and_goes_on";
    if !can_run(test) {
        return;
    }
    if !cfg!(debug_assertions) {
        return skip(test, "only a debug build counts its changes");
    }
    let stride = number("RTVIRTIO_KILL_STRIDE", 12).max(1);
    let mut random = Random::new();
    println!("RTVIRTIO_SEED={}", random.seed());
    let mut rig = Rig::new();
    let plc = Plc::start(&rig, "plc");
    let before = HostState::of(&rig, &plc);
    let spec = plc.spec(&rig, "4ms", "");
    let contract = rig.contracts().join(format!("{}.toml", plc.name));
    let (mut at, mut kills) = (1 + (random.next() * stride as f64) as u64, [0, 0]);
    loop {
        let mut command = rig.command(&[]);
        command.env(KILL_AT, at.to_string());
        rig.run(command);
        fs::copy(&spec, spec.with_extension("new")).unwrap();
        fs::rename(spec.with_extension("new"), &contract).unwrap();
        let in_force = |rig: &Rig| state(rig, &plc) == "in_force";
        let on_the_way = outlived(&mut rig, &format!("in force, killed at {at}"), in_force);
        assert_eq!(plc.budget().as_deref(), Some("4000"), "killed at {at}");
        fs::remove_file(&contract).unwrap();
        let back = |rig: &Rig| HostState::of(rig, &plc) == before;
        let what = format!("as before, killed at {at}: {before:#?}");
        let on_the_way_back = outlived(&mut rig, &what, back);
        rig.kill();
        kills[0] += u64::from(on_the_way);
        kills[1] += u64::from(on_the_way_back);
        if !on_the_way && !on_the_way_back {
            break;
        }
        at += stride;
    }
    println!("killed {} times while it put in force, {} times while it put back", kills[0], kills[1]);
    // Some 36 points on the way, and 31 back.
    assert!(kills.iter().all(|n| *n >= 12 / stride), "{kills:?}");
}
