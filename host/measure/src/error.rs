//! Errors of measuring, each with its remedy.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Measurement that could not be made, or whose output cannot be trusted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MeasureError {
    /// A file operation failed.
    #[error("cannot {op} {}: {source}", path.display())]
    Io {
        /// Operation that failed, such as `read`.
        op: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    /// fio is not installed.
    #[error("fio is not installed: run `apt-get install fio`")]
    FioMissing,
    /// fio could not be started for another reason, such as a cgroup that is gone.
    #[error("cannot start fio{}: {source}", in_cgroups(cgroups))]
    Start {
        /// Files `cgroup.procs` of the cgroups for it.
        cgroups: Vec<PathBuf>,
        source: io::Error,
    },
    /// fio ended with an error of its own.
    #[error("fio failed ({status}): {stderr}")]
    Fio {
        /// Exit status as text.
        status: String,
        /// End of its text on stderr.
        stderr: String,
    },
    /// fio reported an error for one task.
    #[error("task {task} failed: {reason}; check that the device is still there and large enough")]
    Task { task: String, reason: String },
    /// A flow that was not run, or got no answers.
    #[error("flow {vm}/{flow}: {reason}")]
    Flow {
        vm: String,
        flow: String,
        /// Reason, and the remedy.
        reason: String,
    },
    /// A task that fio cannot run as declared.
    #[error("task {task} cannot be measured: {reason}")]
    Unsupported {
        task: String,
        /// Reason, and the remedy.
        reason: String,
    },
    /// A path or region that a job file cannot hold.
    #[error("job of VM {vm}: {reason}")]
    JobFile {
        vm: String,
        /// Reason, and the remedy.
        reason: String,
    },
    /// Output of fio in an unknown format.
    #[error("fio's JSON output cannot be read: {reason}; is fio 3.33 or newer installed?")]
    Json { reason: String },
    /// A latency log with a bad line.
    #[error("latency log of task {task}, line {line}: {reason}")]
    Log {
        task: String,
        /// Line, counted from 1.
        line: usize,
        reason: String,
    },
    /// A latency log that does not hold every request.
    #[error(
        "latency log of task {task} holds {logged} requests but fio completed {completed}: \
         is the disk that holds the log full?"
    )]
    LogIncomplete { task: String, logged: u64, completed: u64 },
    /// Output larger than any possible run makes.
    #[error("{what} is larger than {limit} bytes: it is not from a run that rtvirtio started")]
    TooBig {
        /// Description of the output.
        what: String,
        limit: u64,
    },
    /// The user stopped it.
    #[error("cancelled")]
    Cancelled,
    /// fio did not end in time and was killed.
    #[error("fio did not end within {} s: the device hangs or the host is overloaded", after.as_secs())]
    TimedOut {
        /// Time that it was given.
        after: Duration,
    },
    /// The caller could not set the elevator.
    #[error("cannot set elevator {elevator}: {reason}")]
    Elevator { elevator: &'static str, reason: String },
    /// A profile file that this version cannot use.
    #[error("profile {}: {reason}; make a new one with `rtvirtio profile`", path.display())]
    Profile { path: PathBuf, reason: String },
}

fn in_cgroups(cgroups: &[PathBuf]) -> String {
    if cgroups.is_empty() {
        return String::new();
    }
    let names: Vec<_> = cgroups.iter().map(|p| p.display().to_string()).collect();
    format!(" in cgroup {}", names.join(", "))
}

/// Maps the error of a file operation to [`MeasureError::Io`].
pub(crate) fn io_error(op: &'static str, path: &Path) -> impl FnOnce(io::Error) -> MeasureError {
    let path = path.to_owned();
    move |source| MeasureError::Io { op, path, source }
}
