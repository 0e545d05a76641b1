//! Runs Pacemaker's command line tools.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rtvirtio_kernel::child::{Output, Running, read};
use rtvirtio_workflow::Progress;

use crate::PacemakerError;

/// Timeout of a tool: tools wait for the cluster, 30 s by themselves.
const TOOL_TIMEOUT: Duration = Duration::from_secs(60);
/// Limit of a tool's output, in bytes. A CIB of a hundred nodes has some 5 MB.
const LARGEST: usize = 32 << 20;
/// Interval between checks for cancellation.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Pacemaker's command line tools on this node.
#[derive(Clone, Copy)]
pub struct Crm<'p> {
    progress: &'p dyn Progress,
}

impl<'p> Crm<'p> {
    /// Tools that are killed when `progress` is cancelled.
    pub fn new(progress: &'p dyn Progress) -> Self {
        Self { progress }
    }

    /// Runs a tool and returns what it printed.
    ///
    /// # Errors
    /// [`PacemakerError::NoTool`], [`PacemakerError::Tool`], [`PacemakerError::Slow`],
    /// [`PacemakerError::TooMuch`]; when the work is to stop.
    pub fn run(self, program: &str, args: &[&str]) -> Result<String, PacemakerError> {
        self.run_within(program, args, TOOL_TIMEOUT)
    }

    fn run_within(self, program: &str, args: &[&str], patience: Duration) -> Result<String, PacemakerError> {
        let no_tool = |source| PacemakerError::NoTool { program: program.to_owned(), source };
        let mut tool = Command::new(program);
        tool.args(args).env("LC_ALL", "C").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = Running::for_call(&mut tool).map_err(no_tool)?;
        let out = read(child.0.stdout.take(), LARGEST).map_err(no_tool)?;
        let err = read(child.0.stderr.take(), LARGEST).map_err(no_tool)?;
        let end = Instant::now() + patience;
        let wait = |from: &Output| loop {
            match from.wait(POLL_INTERVAL) {
                Some(bytes) => {
                    let bytes = bytes.and_then(|read| read).map_err(no_tool)?;
                    if bytes.len() > LARGEST {
                        return Err(PacemakerError::TooMuch {
                            command: command(program, args),
                            most: LARGEST,
                        });
                    }
                    return Ok(clean(&bytes));
                }
                None if Instant::now() < end => self.progress.check_cancelled()?,
                None => {
                    let waited = patience.as_secs();
                    return Err(PacemakerError::Slow { command: command(program, args), waited });
                }
            }
        };
        let out = wait(&out)?;
        let err = wait(&err)?;
        // Both pipes are closed, so the tool is exiting.
        let status = child.0.wait().map_err(no_tool)?;
        if status.success() {
            return Ok(out);
        }
        let message = [err, out].into_iter().find(|t| !t.is_empty()).unwrap_or_else(|| status.to_string());
        Err(PacemakerError::Tool { command: command(program, args), message })
    }

    /// Name of this node in the cluster.
    ///
    /// # Errors
    /// When the cluster does not run.
    pub fn node_name(self) -> Result<String, PacemakerError> {
        self.run("crm_node", &["--name"])
    }

    /// Sets a node's capacity of one utilization attribute; written only where it differs, because
    /// each write is a change of the CIB.
    pub fn set_capacity(self, node: &str, name: &str, value: u32) -> Result<(), PacemakerError> {
        let args = ["--node", node, "--utilization", "--name", name];
        let now = self.run("crm_attribute", &[&args[..], &["--query", "--quiet"]].concat());
        let value = value.to_string();
        // Written if absent or unreadable.
        if now.is_ok_and(|now| now == value) {
            return Ok(());
        }
        self.run("crm_attribute", &[&args[..], &["--update", &value]].concat()).map(|_| ())
    }

    /// Sets a transient attribute of a node: it is gone when the node leaves the cluster.
    pub fn set_attribute(self, node: &str, name: &str, value: &str) -> Result<(), PacemakerError> {
        self.run("attrd_updater", &["--name", name, "--update", value, "--node", node]).map(|_| ())
    }

    /// Values of a transient attribute: node and value, for every node that has it.
    ///
    /// # Errors
    /// Those of the tool; an attribute that no node has is no error.
    pub fn attribute(self, name: &str) -> Result<Vec<(String, String)>, PacemakerError> {
        let args = ["--query", "--all", "--name", name];
        let text = match self.run("attrd_updater", &args) {
            Ok(text) => text,
            // Message of attrd_updater for an attribute that was never set.
            Err(PacemakerError::Tool { message, .. }) if message.contains("does not exist") => {
                return Ok(Vec::new());
            }
            Err(e) => return Err(e),
        };
        text.lines()
            .filter(|line| !line.trim().is_empty())
            .map(|line| {
                let field =
                    |key: &str| Some(line.split_once(&format!("{key}=\""))?.1.split_once('"')?.0.to_owned());
                let bad = || PacemakerError::Output {
                    command: command("attrd_updater", &args),
                    text: line.to_owned(),
                };
                Ok((field("host").ok_or_else(bad)?, field("value").ok_or_else(bad)?))
            })
            .collect()
    }
}

/// Output as text, without terminal control characters.
fn clean(bytes: &[u8]) -> String {
    let is_text = |c: char| !c.is_control() || matches!(c, '\n' | '\t');
    String::from_utf8_lossy(bytes).trim().chars().map(|c| if is_text(c) { c } else { ' ' }).collect()
}

fn command(program: &str, args: &[&str]) -> String {
    std::iter::once(program).chain(args.iter().copied()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use rtvirtio_workflow::{Kind, Quiet};

    use super::*;

    fn tool(script: &str, progress: &Quiet, patience: Duration) -> Result<String, PacemakerError> {
        Crm::new(progress).run_within("sh", &["-c", script], patience)
    }

    #[test]
    fn a_tool_is_waited_for_and_read_within_limits() {
        let quiet = Quiet::default();
        assert_eq!(tool("echo a; echo b", &quiet, TOOL_TIMEOUT).unwrap(), "a\nb");
        // A hanging tool, also one with a child that keeps its output open.
        for hangs in ["exec sleep 600", "sleep 5 & exit 0"] {
            let slow = tool(hangs, &quiet, Duration::from_millis(100)).unwrap_err();
            assert!(matches!(slow, PacemakerError::Slow { .. }), "{slow}");
        }
        let endless = tool("exec cat /dev/zero", &quiet, TOOL_TIMEOUT).unwrap_err();
        assert!(matches!(endless, PacemakerError::TooMuch { .. }), "{endless}");
        let said = tool("printf '\\033[2Jno\\n' >&2; exit 1", &quiet, TOOL_TIMEOUT).unwrap_err().to_string();
        assert!(said.contains("[2Jno") && !said.contains('\u{1b}'), "{said:?}");
        // Cancellation does not wait for the tool.
        quiet.0.store(true, Ordering::Relaxed);
        let stopped = tool("exec sleep 600", &quiet, Duration::from_secs(600)).unwrap_err();
        assert!(matches!(&stopped, PacemakerError::Step(e) if e.kind() == Kind::Cancelled), "{stopped}");
    }
}
