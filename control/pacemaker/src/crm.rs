//! Pacemaker's own tools.

use std::process::{Command, Stdio};

use crate::PacemakerError;

/// Pacemaker's command line tools on this node.
#[derive(Clone, Copy, Debug, Default)]
pub struct Crm;

impl Crm {
    /// Runs a tool and returns what it printed.
    ///
    /// # Errors
    /// [`PacemakerError::NoTool`], [`PacemakerError::Tool`].
    pub fn run(self, program: &str, args: &[&str]) -> Result<String, PacemakerError> {
        let out = Command::new(program)
            .args(args)
            .env("LC_ALL", "C")
            .stdin(Stdio::null())
            .output()
            .map_err(|source| PacemakerError::NoTool { program: program.to_owned(), source })?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        if out.status.success() {
            return Ok(text(&out.stdout));
        }
        let said = [text(&out.stderr), text(&out.stdout)].into_iter().find(|t| !t.is_empty());
        let message = said.unwrap_or_else(|| out.status.to_string());
        Err(PacemakerError::Tool { command: command(program, args), message })
    }

    /// This node's name in the cluster.
    ///
    /// # Errors
    /// When the cluster does not run.
    pub fn node_name(self) -> Result<String, PacemakerError> {
        self.run("crm_node", &["--name"])
    }

    /// A node's capacity of one utilization attribute; written only where it differs, because each
    /// write is a change of the CIB.
    ///
    /// # Errors
    /// Those of the tool.
    pub fn set_capacity(self, node: &str, name: &str, value: u32) -> Result<(), PacemakerError> {
        let args = ["--node", node, "--utilization", "--name", name];
        let now = self.run("crm_attribute", &[&args[..], &["--query", "--quiet"]].concat());
        let value = value.to_string();
        // Not there and not readable are the same here: it is written.
        if now.is_ok_and(|now| now == value) {
            return Ok(());
        }
        self.run("crm_attribute", &[&args[..], &["--update", &value]].concat()).map(|_| ())
    }

    /// A transient attribute of a node: it is gone when the node leaves the cluster.
    ///
    /// # Errors
    /// Those of the tool.
    pub fn set_attribute(self, node: &str, name: &str, value: &str) -> Result<(), PacemakerError> {
        self.run("attrd_updater", &["--name", name, "--update", value, "--node", node]).map(|_| ())
    }

    /// A transient attribute on every node that has it: node and value.
    ///
    /// # Errors
    /// Those of the tool; an attribute that no node has is no error.
    pub fn attribute(self, name: &str) -> Result<Vec<(String, String)>, PacemakerError> {
        let args = ["--query", "--all", "--name", name];
        let text = match self.run("attrd_updater", &args) {
            Ok(text) => text,
            // It says so of an attribute that was never set.
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

fn command(program: &str, args: &[&str]) -> String {
    std::iter::once(program).chain(args.iter().copied()).collect::<Vec<_>>().join(" ")
}
