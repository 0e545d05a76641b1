//! What can go wrong while measuring, each with its remedy.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A measurement that could not be made, or whose output cannot be trusted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MeasureError {
    /// A file operation failed.
    #[error("cannot {op} {}: {source}", path.display())]
    Io {
        /// What was tried, such as `read`.
        op: &'static str,
        /// On which path.
        path: PathBuf,
        /// The operating system's answer.
        source: io::Error,
    },
    /// fio is not installed.
    #[error("fio is not installed: run `apt-get install fio`")]
    FioMissing,
    /// fio could not be started for another reason, such as a cgroup that is gone.
    #[error("cannot start fio{}: {source}", in_cgroups(cgroups))]
    Start {
        /// The `cgroup.procs` files that it was to be put into.
        cgroups: Vec<PathBuf>,
        /// The operating system's answer.
        source: io::Error,
    },
    /// fio ended with an error of its own.
    #[error("fio failed ({status}): {stderr}")]
    Fio {
        /// Exit status as text.
        status: String,
        /// The end of what it wrote to stderr.
        stderr: String,
    },
    /// fio reported an error for one task.
    #[error("task {task} failed: {reason}; check that the device is still there and large enough")]
    Task {
        /// Name of the task.
        task: String,
        /// The error as text.
        reason: String,
    },
    /// A flow that was not run, or that nothing answered.
    #[error("flow {vm}/{flow}: {reason}")]
    Flow {
        /// Name of its VM.
        vm: String,
        /// Its name.
        flow: String,
        /// Why, and what to change.
        reason: String,
    },
    /// A task that fio cannot run as declared.
    #[error("task {task} cannot be measured: {reason}")]
    Unsupported {
        /// Name of the task.
        task: String,
        /// Why, and what to change.
        reason: String,
    },
    /// A path or region that cannot stand in a job file.
    #[error("job of VM {vm}: {reason}")]
    JobFile {
        /// Name of the VM.
        vm: String,
        /// Why, and what to change.
        reason: String,
    },
    /// Output of fio that is not what fio writes.
    #[error("fio's JSON output cannot be read: {reason}; is fio 3.33 or newer installed?")]
    Json {
        /// What is wrong with it.
        reason: String,
    },
    /// A latency log with a bad line.
    #[error("latency log of task {task}, line {line}: {reason}")]
    Log {
        /// Name of the task.
        task: String,
        /// Line, counted from 1.
        line: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// A latency log that does not hold every request.
    #[error(
        "latency log of task {task} holds {logged} requests but fio completed {completed}: \
         is the disk that holds the log full?"
    )]
    LogIncomplete {
        /// Name of the task.
        task: String,
        /// Lines in the log.
        logged: u64,
        /// Requests by fio's own count.
        completed: u64,
    },
    /// Output larger than any honest run makes.
    #[error("{what} is larger than {limit} bytes: it is not from a run that rtvirtio started")]
    TooBig {
        /// Which output.
        what: String,
        /// Limit in bytes.
        limit: u64,
    },
    /// The user stopped it.
    #[error("cancelled")]
    Cancelled,
    /// fio did not end in time and was killed.
    #[error("fio did not end within {} s: the device hangs or the host is overloaded", after.as_secs())]
    TimedOut {
        /// How long it was given.
        after: Duration,
    },
    /// The caller could not set the elevator.
    #[error("cannot set elevator {elevator}: {reason}")]
    Elevator {
        /// Which elevator.
        elevator: &'static str,
        /// The caller's error as text.
        reason: String,
    },
    /// A profile file that this version cannot use.
    #[error("profile {}: {reason}; make a new one with `rtvirtio profile`", path.display())]
    Profile {
        /// The file.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
}

fn in_cgroups(cgroups: &[PathBuf]) -> String {
    if cgroups.is_empty() {
        return String::new();
    }
    let names: Vec<_> = cgroups.iter().map(|p| p.display().to_string()).collect();
    format!(" in cgroup {}", names.join(", "))
}

/// For `map_err` on file operations.
pub(crate) fn io_error(op: &'static str, path: &Path) -> impl FnOnce(io::Error) -> MeasureError {
    let path = path.to_owned();
    move |source| MeasureError::Io { op, path, source }
}
