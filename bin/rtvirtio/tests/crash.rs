//! `rtvirtio apply` is killed (`kill -9`) at random moments; `rtvirtio revert` then leaves no
//! difference, and says of nothing that it was put back which was not.
//!
//! `RTVIRTIO_CRASHES` is the number of kills of each kind (12 without it). What was seen is printed
//! with `--nocapture`.

use std::fs;
use std::path::PathBuf;
use std::process::Output;
use std::time::{Duration, Instant};

mod plane;

use plane::{Plane, Snapshot, differences};
use rtvirtio_testkit::site::{Random, Site, number, text};
use rtvirtio_testkit::{Machine, Need, has, vm_spec};

/// What `revert` says when all is back, or when there was nothing.
const CLAIMS: [&str; 3] = ["everything was put back", "every setting was put back", "nothing to put back"];

/// What was seen of one kind of `apply`.
#[derive(Debug, Default)]
struct Tally {
    kills: u64,
    /// Kills that found something changed.
    changed: u64,
    differences: Vec<String>,
    /// `revert` said that all is back while it was not.
    wrong: Vec<String>,
    /// `revert` left something.
    refused: Vec<String>,
}

impl Tally {
    fn judge(&mut self, out: &Output, differences: Vec<String>) {
        let said = text(&out.stdout) + &text(&out.stderr);
        let claims = out.status.success() || CLAIMS.iter().any(|claim| said.contains(claim));
        if claims && !differences.is_empty() {
            self.wrong.push(said.clone());
        }
        if !out.status.success() {
            self.refused.push(format!("{}: {said}", out.status));
        }
        self.differences.extend(differences);
    }
}

/// Kills `rtvirtio ARGS` again and again, and reverts. `look` sees all that it may change.
fn crash(kind: &str, site: &Site, args: &[&str], look: impl Fn() -> Snapshot) -> Tally {
    let before = look();
    // Once to the end, to know how long it takes; that it changes something is seen from it.
    let start = Instant::now();
    site.ok(args);
    let whole = start.elapsed();
    assert!(!differences(&before, &look()).is_empty(), "{args:?} changes nothing");
    let mut tally = Tally::default();
    tally.judge(&site.output(&["revert"]), differences(&before, &look()));
    let mut random = Random::new();
    println!("{kind}: {:.0} ms in whole, seed {}", whole.as_secs_f64() * 1e3, random.seed());
    for _ in 0..number("RTVIRTIO_CRASHES", 12) {
        let wait = whole.mul_f64(random.next());
        let mut child = site.spawn(args);
        std::thread::sleep(wait);
        child.kill().unwrap();
        child.wait().unwrap();
        tally.kills += 1;
        if !differences(&before, &look()).is_empty() {
            tally.changed += 1;
        }
        tally.judge(&site.output(&["revert"]), differences(&before, &look()));
    }
    println!(
        "{kind}: {} kills, {} with something changed; differences after revert {}, wrong claims {}, refused {}",
        tally.kills,
        tally.changed,
        tally.differences.len(),
        tally.wrong.len(),
        tally.refused.len()
    );
    tally
}

fn assert_all_back(tally: &Tally) {
    let right = tally.differences.is_empty() && tally.wrong.is_empty() && tally.refused.is_empty();
    assert!(right, "{tally:#?}");
}

#[test]
fn settings_of_device_and_cgroups() {
    let site = Site::new();
    let Some(plane) = Plane::new("settings_of_device_and_cgroups", &site) else { return };
    let tally = crash("device and cgroups", &site, &["apply", plane.plan()], || plane.snapshot());
    assert_all_back(&tally);
}

#[test]
fn cpu_contracts_of_a_machine() {
    let test = "cpu_contracts_of_a_machine";
    if !has(test, &[Need::Root, Need::RT_GROUPS, Need::QEMU]) {
        return;
    }
    let site = Site::new();
    let machine = Machine::start(site.dir.path(), "plc", &["-smp", "2"]);
    let vm = site.vm("crash");
    let keys = "cpu = { budget = \"4ms\", period = \"20ms\" }\npriorities = \"rt\"";
    let spec = site.write("plant.toml", &vm_spec("/dev/sdz", &vm, machine.qmp(), keys));
    let args = ["apply", &spec, "--cpu-only"];
    let tally = crash("CPU contracts", &site, &args, || threads(machine.pid(), &vm));
    assert_all_back(&tally);
}

/// Scheduling, affinity and cgroups of every thread, and the CPU groups that there are.
fn threads(pid: u32, vm: &str) -> Snapshot {
    let mut files = Snapshot::new();
    for entry in fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten() {
        let dir = entry.path();
        // A worker thread may end meanwhile; it then has no settings.
        let (Ok(stat), Ok(status), Ok(cgroup)) = (
            fs::read_to_string(dir.join("stat")),
            fs::read_to_string(dir.join("status")),
            fs::read(dir.join("cgroup")),
        ) else {
            continue;
        };
        let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_ascii_whitespace().collect();
        // From field 3 on: priority and nice value (18, 19), real-time priority and policy (40,
        // 41).
        let sched = format!("{} {} {} {}", fields[15], fields[16], fields[37], fields[38]);
        files.insert(dir.join("sched"), sched.into_bytes());
        let allowed = status.lines().find(|l| l.starts_with("Cpus_allowed:")).unwrap();
        files.insert(dir.join("cpus"), allowed.as_bytes().to_vec());
        files.insert(dir.join("cgroup"), cgroup);
    }
    for entry in fs::read_dir("/sys/fs/cgroup/cpu").unwrap().flatten() {
        if entry.file_name().to_string_lossy().contains(vm) {
            files.insert(entry.path(), Vec::new());
        }
    }
    files
}

#[test]
fn the_io_domain() {
    let test = "the_io_domain";
    if !has(test, &[Need::Root]) {
        return;
    }
    let site = Site::new();
    let file = site.domain_of_a_file();
    let look = || {
        let of_site = site.left_behind().into_iter().map(|line| (PathBuf::from(line), Vec::new()));
        let mut files: Snapshot = of_site.collect();
        let config = site.state_dir().join("iod.toml");
        if config.exists() {
            files.insert(config, Vec::new());
        }
        files
    };
    let tally = crash("I/O domain", &site, &["apply", file.to_str().unwrap()], look);
    assert_all_back(&tally);
    site.assert_clean();
}

/// Not more than one domain, and not none, whatever moment the first `apply` was killed at.
#[test]
fn a_domain_is_applied_again_after_a_crash() {
    let test = "a_domain_is_applied_again_after_a_crash";
    if !has(test, &[Need::Root]) {
        return;
    }
    let site = Site::new();
    let file = site.domain_of_a_file();
    let args = ["apply", file.to_str().unwrap()];
    let mut random = Random::new();
    let domains = || site.left_behind().iter().filter(|p| p.contains("rtvirtio-iod")).count();
    for _ in 0..4 {
        let mut child = site.spawn(&args);
        std::thread::sleep(Duration::from_secs_f64(random.next() * 0.1));
        child.kill().unwrap();
        child.wait().unwrap();
        let again = site.output(&args);
        assert!(domains() <= 1, "{:#?}", site.left_behind());
        if again.status.success() {
            assert_eq!(domains(), 1);
        } else {
            assert!(text(&again.stderr).contains("applied already"), "{}", text(&again.stderr));
        }
        site.ok(&["revert"]);
        assert_eq!(domains(), 0, "{:#?}", site.left_behind());
        site.ok(&args);
        site.ok(&["revert"]);
    }
    site.assert_clean();
}
