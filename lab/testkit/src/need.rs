//! Requirements of a test, and its skip without them.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

/// A requirement that not every machine meets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Root privileges of the test.
    Root,
    /// A program of this name with an option `--version`.
    Program(&'static str),
    /// A path that exists; the text names the missing feature.
    Path(&'static str, &'static str),
    /// CPUs that this process may use.
    Cpus(usize),
}

impl Need {
    pub const QEMU: Self = Self::Program("qemu-system-x86_64");
    /// Budgets of real-time groups, where cgroup v1 mounts them.
    pub const RT_GROUPS: Self =
        Self::Path("/sys/fs/cgroup/cpu/cpu.rt_runtime_us", "no real-time groups of cgroup v1");

    /// Reason for which the requirement is not met; `None` where it is.
    fn missing(self) -> Option<String> {
        match self {
            Self::Root => (!rustix::process::geteuid().is_root()).then(|| "needs root".to_owned()),
            Self::Program(name) => {
                let version =
                    Command::new(name).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
                version.is_err().then(|| format!("{name} is not installed"))
            }
            Self::Path(path, lack) => (!Path::new(path).exists()).then(|| lack.to_owned()),
            Self::Cpus(least) => {
                let few = std::thread::available_parallelism().is_ok_and(|n| n.get() < least);
                few.then(|| format!("needs {least} CPUs"))
            }
        }
    }
}

/// Whether all requirements of a test are met; [`skip`]s it by name if not.
#[must_use]
pub fn has(test: &str, needs: &[Need]) -> bool {
    crate::sweep();
    let missing = needs.iter().find_map(|n| n.missing());
    if let Some(why) = &missing {
        skip(test, why);
    }
    missing.is_none()
}

/// Reports by name that a test does not run here, and why, on a line that `make test` counts.
///
/// # Panics
/// With `RTVIRTIO_NO_SKIP` set, as in CI, where nothing may skip.
pub fn skip(test: &str, why: &str) {
    assert!(std::env::var_os("RTVIRTIO_NO_SKIP").is_none(), "{test} may not skip here: {why}");
    // Directly to standard error: the test runner hides the output of a passing test. A closed one
    // only hides the skip.
    let _ = writeln!(std::io::stderr(), "SKIP {test}: {why}");
}
