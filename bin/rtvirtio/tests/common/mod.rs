//! What the end-to-end tests share: the program with directories of its own, and a check that nothing is left.

#![allow(dead_code, reason = "each test program uses a part of it")]

pub mod plane;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rtvirtio_testkit::{Need, has};
use serde_json::Value;

/// Profile of the flash twin, measured once; measuring it again would take longer than a test.
pub const PROFILE: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../control/learn/data/qlc-nvme.profile.json");

/// The rows of a dataset that are whole.
pub fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines().filter_map(|l| serde_json::from_str(l).ok()).collect()
}

/// The program under test, with state and run directories that vanish with it. Dropping it puts back what is in force and removes its lab.
pub struct Site {
    pub dir: tempfile::TempDir,
}

impl Site {
    pub fn new() -> Self {
        Self { dir: tempfile::Builder::new().prefix("rtvirtio-test-").tempdir_in("/tmp").unwrap() }
    }

    pub fn run_dir(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    pub fn state_dir(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rtvirtio"));
        command
            .args(args)
            .env("RTVIRTIO_RUN_DIR", self.run_dir())
            .env("RTVIRTIO_STATE_DIR", self.state_dir())
            .current_dir(project())
            .stdin(Stdio::null());
        command
    }

    pub fn output(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    /// Runs it and expects exit code 0; returns standard output.
    pub fn ok(&self, args: &[&str]) -> String {
        let out = self.output(args);
        assert!(
            out.status.success(),
            "{args:?}: {}\n{}\n{}",
            out.status,
            text(&out.stdout),
            text(&out.stderr)
        );
        text(&out.stdout)
    }

    /// Runs it with `--json`, whatever the exit code; returns code and value.
    pub fn json(&self, args: &[&str]) -> (i32, Value) {
        let out = self.output(&[args, &["--json"]].concat());
        let value = serde_json::from_slice(&out.stdout)
            .unwrap_or_else(|e| panic!("{args:?}: {e}\n{}\n{}", text(&out.stdout), text(&out.stderr)));
        (out.status.code().unwrap_or(-1), value)
    }

    /// A configuration of the I/O domain, with one disk `a` in a file of its own.
    pub fn domain_of_a_file(&self) -> PathBuf {
        let image = self.dir.path().join("disk.img");
        fs::File::create(&image).unwrap().set_len(16 << 20).unwrap();
        let (file, run) = (self.dir.path().join("file.toml"), self.run_dir());
        let text = format!(
            "control = \"{run}/iod.sock\"\n[[device]]\nname = \"d\"\n[[device.disk]]\nname = \"a\"\n\
             socket = \"{run}/disks/a.sock\"\npath = \"{image}\"\n",
            run = run.display(),
            image = image.display()
        );
        fs::write(&file, text).unwrap();
        file
    }

    /// Starts it in the background.
    pub fn spawn(&self, args: &[&str]) -> Child {
        self.command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// What is on the machine because of this site: mounts, loop devices, cgroups, processes.
    pub fn left_behind(&self) -> Vec<String> {
        let mark = self.dir.path().to_str().unwrap().to_owned();
        let mut left: Vec<String> = fs::read_to_string("/proc/self/mountinfo")
            .unwrap()
            .lines()
            .filter(|l| l.contains(&mark))
            .map(|l| format!("mount {l}"))
            .collect();
        for entry in fs::read_dir("/sys/block").unwrap().flatten() {
            let file = fs::read_to_string(entry.path().join("loop/backing_file")).unwrap_or_default();
            if file.contains(&mark) {
                left.push(format!("loop {} on {file}", entry.path().display()));
            }
        }
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            if String::from_utf8_lossy(&line).contains(&mark) {
                left.push(format!(
                    "process {} {}",
                    entry.path().display(),
                    String::from_utf8_lossy(&line).replace('\0', " ")
                ));
            }
        }
        left
    }

    pub fn assert_clean(&self) {
        let left = self.left_behind();
        assert!(left.is_empty(), "left behind: {left:#?}");
        assert!(!self.run_dir().join("lab.json").exists());
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        // What a test that failed has left in force.
        if self.state_dir().exists() {
            let _ = self.output(&["revert", "--force", "--stop-domain", "--quiet"]);
        }
        let _ = self.output(&["lab", "down", "--quiet"]);
        let demo = self.run_dir().join("demo");
        let _ = self.command(&["lab", "down", "--quiet"]).env("RTVIRTIO_RUN_DIR", demo).output();
    }
}

pub fn project() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// False, with the test's name and the reason on standard error, when something that the test needs is not here.
pub fn can_run(test: &str) -> bool {
    let needs = [
        Need::Root,
        Need::Path("/dev/fuse", "no /dev/fuse"),
        Need::Path("/dev/loop-control", "no loop devices"),
        Need::Program("fio"),
    ];
    has(test, &needs)
}

/// Whether the I/O domain's program is there; [`rtvirtio_testkit::skip`]s the test if not.
pub fn iod_is_built(test: &str) -> bool {
    let program = Path::new(env!("CARGO_BIN_EXE_rtvirtio")).with_file_name("rtvirtio-iod");
    if !program.exists() {
        rtvirtio_testkit::skip(test, "rtvirtio-iod is not built: cargo build --workspace");
    }
    program.exists()
}

/// Waits for a condition.
pub fn wait_for(what: &str, patience: Duration, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < patience, "{what} did not happen within {patience:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Sends a signal to a process that this test started.
pub fn signal(child: &Child, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(child.id().try_into().unwrap()).unwrap();
    rustix::process::kill_process(pid, signal).unwrap();
}

/// A number from the environment.
pub fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().map_or(otherwise, |n| n.parse().unwrap())
}

/// Random numbers (xorshift64); `RTVIRTIO_SEED` makes them the same again.
pub struct Random(u64);

impl Random {
    pub fn new() -> Self {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        Self(number("RTVIRTIO_SEED", now.as_nanos() as u64).max(1))
    }

    /// What it begins with, as long as none was taken.
    pub fn seed(&self) -> u64 {
        self.0
    }

    /// The next one, from 0 to 1.
    pub fn next(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as f64 / (1_u64 << 53) as f64
    }
}
