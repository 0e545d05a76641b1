//! The programs with directories of their own, and a check for leftovers.

use std::cell::RefCell;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::{HANG, Need, has};

/// Longest time until a site is clean.
const LAST_CLOSE: Duration = Duration::from_secs(20);

/// Profile of the flash twin, measured once; measuring it again would take longer than a test.
pub const PROFILE: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../control/learn/data/qlc-nvme.profile.json");

/// The complete rows of a dataset.
#[must_use]
pub fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines().filter_map(|l| serde_json::from_str(l).ok()).collect()
}

/// A program of this workspace, as `cargo test` has built it.
///
/// # Panics
/// When it is not built: `cargo build --workspace`.
#[must_use]
pub fn program(name: &str) -> PathBuf {
    find_program(name).unwrap_or_else(|| panic!("{name} is not built: cargo build --workspace"))
}

/// Path of a program of this workspace; `None` when it is not built.
pub(crate) fn find_program(name: &str) -> Option<PathBuf> {
    // A test program lies in `deps` of the directory that holds the others.
    let test = std::env::current_exe().ok()?;
    let program = test.parent()?.parent()?.join(name);
    program.exists().then_some(program)
}

/// State and run directories for the programs under test. Dropping it reverts the settings in
/// force, removes its lab and the cgroups of its VMs, and then the directories.
#[derive(Debug)]
pub struct Site {
    /// Parent of these directories.
    pub dir: tempfile::TempDir,
    /// Names given by [`Site::vm`].
    vms: RefCell<Vec<String>>,
}

impl Default for Site {
    fn default() -> Self {
        Self::new()
    }
}

impl Site {
    /// An empty site.
    #[must_use]
    pub fn new() -> Self {
        // Short, because sockets below it have to fit into 107 bytes (unix(7)).
        let dir = crate::tempdir_in("/tmp").unwrap();
        fs::create_dir(dir.path().join("tmp")).unwrap();
        Self { dir, vms: RefCell::default() }
    }

    /// A unique name for a VM. The cgroup of its CPU contract is removed with the site.
    #[must_use]
    pub fn vm(&self, name: &str) -> String {
        let name = crate::unique(name);
        self.vms.borrow_mut().push(name.clone());
        name
    }

    /// Directory of sockets and labs.
    #[must_use]
    pub fn run_dir(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    /// Directory of journal and profiles.
    #[must_use]
    pub fn state_dir(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    /// Path of a file of the site.
    #[must_use]
    pub fn path(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().unwrap().to_owned()
    }

    /// Writes a file of the site; returns its path.
    pub fn write(&self, name: &str, text: &str) -> String {
        fs::write(self.path(name), text).unwrap();
        self.path(name)
    }

    /// A call of `rtvirtio`, or of `rtvirtio-lab` or `rtvirtio-bench` where the first argument is
    /// `lab` or `bench`.
    #[must_use]
    pub fn command(&self, args: &[&str]) -> Command {
        let (name, args) = match args {
            ["lab", args @ ..] => ("rtvirtio-lab", args),
            ["bench", args @ ..] => ("rtvirtio-bench", args),
            args => ("rtvirtio", args),
        };
        let mut command = Command::new(program(name));
        command
            .args(args)
            .env("RTVIRTIO_RUN_DIR", self.run_dir())
            .env("RTVIRTIO_STATE_DIR", self.state_dir())
            // A killed program leaves its temporary files in the site.
            .env("TMPDIR", self.dir.path().join("tmp"))
            .current_dir(project())
            .stdin(Stdio::null());
        command
    }

    /// Runs a command, whatever its exit code.
    #[must_use]
    pub fn output(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    /// Runs a command and expects exit code 0; returns standard output.
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

    /// Runs a command and expects that it fails; returns standard error.
    pub fn refused(&self, args: &[&str]) -> String {
        let out = self.output(args);
        assert!(!out.status.success(), "{args:?}: {}{}", text(&out.stdout), text(&out.stderr));
        text(&out.stderr)
    }

    /// Runs a command with `--json`, whatever its exit code; returns code and value.
    pub fn json(&self, args: &[&str]) -> (i32, Value) {
        let out = self.output(&[args, &["--json"]].concat());
        let value = serde_json::from_slice(&out.stdout)
            .unwrap_or_else(|e| panic!("{args:?}: {e}\n{}\n{}", text(&out.stdout), text(&out.stderr)));
        (out.status.code().unwrap_or(-1), value)
    }

    /// A configuration of the I/O domain, with one disk `a` in a file of its own.
    #[must_use]
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

    /// Starts a command in the background.
    #[must_use]
    pub fn spawn(&self, args: &[&str]) -> Child {
        self.command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// Leftovers of this site: mounts, loop devices and processes.
    #[must_use]
    pub fn left_behind(&self) -> Vec<String> {
        let mark = self.dir.path().to_str().unwrap().to_owned();
        let mut leftovers: Vec<String> = fs::read_to_string("/proc/self/mountinfo")
            .unwrap()
            .lines()
            .filter(|l| l.contains(&mark))
            .map(|l| format!("mount {l}"))
            .collect();
        for entry in fs::read_dir("/sys/block").unwrap().flatten() {
            let file = fs::read_to_string(entry.path().join("loop/backing_file")).unwrap_or_default();
            if file.contains(&mark) {
                leftovers.push(format!("loop {} on {file}", entry.path().display()));
            }
        }
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            if String::from_utf8_lossy(&line).contains(&mark) {
                leftovers.push(format!(
                    "process {} {}",
                    entry.path().display(),
                    String::from_utf8_lossy(&line).replace('\0', " ")
                ));
            }
        }
        leftovers
    }

    /// Fails when there are leftovers. A loop device is detached when the last process has closed
    /// it, which may be one that lists all devices of the machine.
    ///
    /// # Panics
    /// The leftovers.
    pub fn assert_clean(&self) {
        let end = Instant::now() + LAST_CLOSE;
        let mut leftovers = self.left_behind();
        while !leftovers.is_empty() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(50));
            leftovers = self.left_behind();
        }
        assert!(leftovers.is_empty(), "left behind: {leftovers:#?}");
        assert!(!self.run_dir().join("lab.json").exists());
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        // A panic here ends the whole test program and hides the failure of the test.
        if ["rtvirtio", "rtvirtio-lab"].iter().any(|name| find_program(name).is_none()) {
            return;
        }
        // Settings that a failed test left in force.
        if self.state_dir().exists() {
            let _ = self.output(&["revert", "--force", "--stop-domain", "--quiet"]);
        }
        let _ = self.output(&["lab", "down", "--quiet"]);
        let demo = self.run_dir().join("demo");
        let _ = self.command(&["lab", "down", "--quiet"]).env("RTVIRTIO_RUN_DIR", demo).output();
        self.vms.borrow().iter().for_each(|vm| crate::remove_vm_group(vm));
    }
}

/// The project's directory, in which the programs run.
#[must_use]
pub fn project() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// Output of a program, with invalid UTF-8 replaced.
#[must_use]
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Whether the programs' lab can run here; if not, reports the test's name and the reason on
/// standard error.
#[must_use]
pub fn can_run(test: &str) -> bool {
    let needs = [
        Need::Root,
        Need::Path("/dev/fuse", "no /dev/fuse"),
        Need::Path("/dev/loop-control", "no loop devices"),
        Need::Program("fio"),
    ];
    has(test, &needs)
}

/// Waits for a condition.
///
/// # Panics
/// When it is not true before the test counts as hung ([`HANG`]).
pub fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < HANG, "{what} did not happen within {HANG:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Sends a signal to a process that this test started.
pub fn signal(child: &Child, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(child.id().try_into().unwrap()).unwrap();
    rustix::process::kill_process(pid, signal).unwrap();
}

/// A number from the environment.
#[must_use]
pub fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().map_or(otherwise, |n| n.parse().unwrap())
}

/// Random numbers (xorshift64); `RTVIRTIO_SEED` makes them reproducible.
#[derive(Debug)]
pub struct Random(u64);

impl Default for Random {
    fn default() -> Self {
        Self::new()
    }
}

impl Random {
    /// Seeded from the clock, unless `RTVIRTIO_SEED` is given.
    #[must_use]
    pub fn new() -> Self {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        Self(number("RTVIRTIO_SEED", now.as_nanos() as u64).max(1))
    }

    /// The seed, if no number was drawn yet.
    #[must_use]
    pub fn seed(&self) -> u64 {
        self.0
    }

    /// The next number, from 0 to 1.
    #[expect(clippy::should_implement_trait, reason = "it never ends")]
    pub fn next(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as f64 / (1_u64 << 53) as f64
    }
}
