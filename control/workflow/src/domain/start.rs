//! Starting the I/O domain's process.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rtvirtio_kernel::ProcessId;
use rtvirtio_vmm::spawn::{self, Lifetime};

/// Line on standard output when guests may connect.
const READY: &str = "ready";

/// Failure of a start.
#[derive(Debug, thiserror::Error)]
#[error("the I/O domain did not start: {why}")]
pub struct IodError {
    why: String,
}

impl IodError {
    /// Error with the last line of the domain's log, or with the failed step.
    pub fn new(why: impl Into<String>) -> Self {
        Self { why: why.into() }
    }
}

/// Waits until an I/O domain whose standard output is piped reports that guests may connect; false
/// when it ended instead.
pub fn is_ready(domain: &mut Child) -> bool {
    let mut line = String::new();
    if let Some(out) = domain.stdout.take() {
        // End of file and the report of readiness both end the line.
        let _ = BufReader::new(out).read_line(&mut line);
    }
    line.trim_end() == READY
}

/// Files that an I/O domain inherits.
pub struct Inherited<'a> {
    /// Standard input: null, or the locked file that is to stay open.
    pub stdin: Stdio,
    /// Standard error: the log file.
    pub log: File,
    /// Reads that log, for the error when it does not start.
    pub read_log: &'a dyn Fn() -> io::Result<Vec<u8>>,
}

/// Starts an I/O domain that outlives this process, in the cgroup whose `cgroup.procs` is given,
/// and waits until guests may connect.
///
/// # Errors
/// The last line of its log when it did not start.
pub fn start(
    mut command: Command,
    cgroup_procs: Option<&Path>,
    inherited: Inherited<'_>,
) -> Result<ProcessId, IodError> {
    let failed = |what: &str, e: &io::Error| IodError::new(format!("{what}: {e}"));
    command.stdin(inherited.stdin).stdout(Stdio::piped()).stderr(inherited.log);
    let program = command.get_program().to_string_lossy().into_owned();
    let cgroups = match cgroup_procs {
        Some(path) => {
            // kernel file
            let open = fs::OpenOptions::new().write(true).open(path);
            vec![open.map_err(|e| failed(&path.display().to_string(), &e))?]
        }
        None => Vec::new(),
    };
    let mut child = spawn::spawn(command, cgroups, Lifetime::Detached).map_err(|e| failed(&program, &e))?;
    let ready = is_ready(&mut child);
    match ProcessId::find(child.id()) {
        Ok(Some(id)) if ready => Ok(id),
        _ => {
            // A child that has ended already is only reaped.
            let _ = child.kill();
            let _ = child.wait();
            let log_text = (inherited.read_log)().map_err(|e| failed("its log cannot be read", &e))?;
            let log_text = String::from_utf8_lossy(&log_text).into_owned();
            Err(IodError::new(log_text.trim().lines().last().unwrap_or("without a message")))
        }
    }
}
