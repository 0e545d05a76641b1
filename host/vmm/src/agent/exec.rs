//! Runs programs in the guest: `guest-exec` and `guest-exec-status`.

use std::thread;
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde_json::json;

use super::{GuestAgent, SMALL_REPLY};
use crate::VmmError;

/// Largest answer of `guest-exec-status`, in bytes. The agent keeps up to 16 MiB of each output
/// stream (`GUEST_EXEC_MAX_OUTPUT` in `qga/commands.c`); 24 MiB hold one of them in base64.
const OUTPUT_REPLY: usize = 24 << 20;
/// First and longest pause between two polls. A poll costs the guest CPU time, which disturbs a
/// measurement there.
const POLL_FIRST: Duration = Duration::from_millis(10);
const POLL_LAST: Duration = Duration::from_millis(500);

/// Program that runs in the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process {
    /// Process id inside the guest.
    pub pid: i64,
}

/// Result of a program in the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExecOutput {
    /// Exit status; `None` when a signal ended the program.
    pub code: Option<i32>,
    /// Number of the signal that ended it.
    pub signal: Option<i32>,
    /// Bytes on standard output.
    pub stdout: Vec<u8>,
    /// Bytes on standard error.
    pub stderr: Vec<u8>,
    /// Whether the agent truncated one of the two (it keeps 16 MiB).
    pub truncated: bool,
}

impl ExecOutput {
    /// Whether the exit status is 0.
    #[must_use]
    pub fn success(&self) -> bool {
        self.code == Some(0)
    }
}

#[derive(Deserialize)]
struct Pid {
    pid: i64,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Status {
    exited: bool,
    exitcode: Option<i32>,
    signal: Option<i32>,
    out_data: Option<String>,
    err_data: Option<String>,
    #[serde(default)]
    out_truncated: bool,
    #[serde(default)]
    err_truncated: bool,
}

impl GuestAgent {
    /// Starts a program (`argv[0]` is looked up in the agent's PATH) and returns at once.
    ///
    /// # Errors
    /// An empty `argv`, no such program (the agent refuses), or an error of the connection.
    pub fn spawn(&mut self, argv: &[&str]) -> Result<Process, VmmError> {
        const OP: &str = "guest-exec";
        let Some((path, args)) = argv.split_first() else {
            return Err(self.link.protocol(OP, "no program given"));
        };
        let arguments = json!({ "path": path, "arg": args, "capture-output": true });
        let Pid { pid } = self.call(OP, Some(&arguments), SMALL_REPLY)?;
        Ok(Process { pid })
    }

    /// Result of the program, or `None` while it runs. The agent forgets a program once it has
    /// reported its result.
    ///
    /// # Errors
    /// The agent does not know the program (it was restarted, or the result was fetched before), or
    /// an error of the connection.
    pub fn poll(&mut self, process: Process) -> Result<Option<ExecOutput>, VmmError> {
        const OP: &str = "guest-exec-status";
        let status: Status = self.call(OP, Some(&json!({ "pid": process.pid })), OUTPUT_REPLY)?;
        if !status.exited {
            return Ok(None);
        }
        let decode = |data: Option<String>| {
            STANDARD.decode(data.unwrap_or_default()).map_err(|e| self.link.protocol(OP, e.to_string()))
        };
        Ok(Some(ExecOutput {
            code: status.exitcode,
            signal: status.signal,
            stdout: decode(status.out_data)?,
            stderr: decode(status.err_data)?,
            truncated: status.out_truncated || status.err_truncated,
        }))
    }

    /// Runs a program to its end and returns its output. When it takes longer than `timeout` it is
    /// killed.
    ///
    /// # Errors
    /// As [`GuestAgent::spawn`], and [`VmmError::Timeout`]. A failing program is no error: look at
    /// [`ExecOutput::success`].
    pub fn exec(&mut self, argv: &[&str], timeout: Duration) -> Result<ExecOutput, VmmError> {
        let start = Instant::now();
        let process = self.spawn(argv)?;
        let mut pause = POLL_FIRST;
        loop {
            if let Some(output) = self.poll(process)? {
                return Ok(output);
            }
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                // The time-out is reported; an error of the kill adds nothing.
                let _ = self.kill(process);
                return Err(VmmError::Timeout {
                    peer: self.link.peer().into(),
                    operation: format!("`{}` in the guest", argv.join(" ")),
                    waited: timeout,
                });
            }
            thread::sleep(pause.min(left));
            pause = (pause * 3 / 2).min(POLL_LAST);
        }
    }

    /// Asks a program in the guest to end (SIGTERM), and kills it when it has not ended within
    /// `patience`. A program that is killed cannot end its own children, so SIGTERM comes first.
    pub fn terminate(&mut self, process: Process, patience: Duration) -> Result<(), VmmError> {
        let pid = process.pid.to_string();
        self.spawn(&["kill", "-TERM", &pid])?;
        let start = Instant::now();
        while self.poll(process)?.is_none() {
            if start.elapsed() > patience {
                return self.kill(process);
            }
            thread::sleep(POLL_FIRST * 10);
        }
        Ok(())
    }

    /// Kills a program in the guest (SIGKILL, through the guest's own `kill`: the agent has no
    /// command for it).
    pub fn kill(&mut self, process: Process) -> Result<(), VmmError> {
        let pid = process.pid.to_string();
        self.spawn(&["kill", "-KILL", &pid]).map(drop)
    }
}
