//! Commands to a running I/O domain.

use serde::{Deserialize, Serialize};

use crate::handover::{DiskFacts, PortFacts};

/// A command; descriptors of files precede its line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Command {
    /// Asks for the [`Status`](crate::Status).
    Status,
    /// Asks for the [`Histograms`](crate::histograms::Histograms).
    Histograms,
    /// Asks for what a reload would do: a [`Preview`](crate::Preview).
    Preview,
    /// Reads the configuration again; the reply is [`Changed`](crate::Changed).
    Reload {
        /// Detach disks and ports even while guests use them.
        #[serde(default)]
        force: bool,
        /// Facts of disks to attach, in the order of their descriptors.
        #[serde(default)]
        disks: Vec<DiskFacts>,
        /// Facts of ports to attach, in the order of their descriptors.
        #[serde(default)]
        ports: Vec<PortFacts>,
    },
    /// Signals an eventfd for urgent completions of these disks and frames to these ports, or
    /// without one no more; the reply is [`Signalled`](crate::Signalled).
    SignalUrgent {
        /// Names of disks whose eventfd is set or removed.
        #[serde(default)]
        disks: Vec<String>,
        /// Names of ports whose eventfd is set or removed.
        #[serde(default)]
        ports: Vec<String>,
    },
    /// Ends the process; the reply is [`Stop`](crate::Stop).
    Stop {
        /// Also while guests are connected.
        #[serde(default)]
        force: bool,
    },
    /// Sends the lines of [`trace`](crate::trace).
    Trace {
        /// Length of the trace in ms; until the listener shuts down its side when `None`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        for_ms: Option<u64>,
    },
}

/// Error of a line that is no command.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// Unknown name, or no JSON.
    #[error("there are the commands {}", NAMES.join(", ").replace(", trace", " and trace"))]
    Unknown,
    /// A command with other contents.
    #[error("{command}: {source}")]
    Invalid {
        /// Name of the command.
        command: String,
        /// Error of the JSON parser.
        source: serde_json::Error,
    },
}

const NAMES: [&str; 7] = ["status", "histograms", "preview", "reload", "signal_urgent", "stop", "trace"];

impl Command {
    /// The line of a connection, with its newline.
    ///
    /// # Errors
    /// For a path that is no UTF-8.
    pub fn line(&self) -> serde_json::Result<String> {
        Ok(serde_json::to_string(self)? + "\n")
    }

    /// Reads a line.
    pub fn parse(line: &str) -> Result<Self, CommandError> {
        #[derive(Deserialize)]
        struct Name {
            command: String,
        }
        serde_json::from_str(line).map_err(|source| match serde_json::from_str(line) {
            Ok(Name { command }) if NAMES.contains(&command.as_str()) => {
                CommandError::Invalid { command, source }
            }
            _ => CommandError::Unknown,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_go_both_ways() {
        let disk = DiskFacts {
            name: "a".into(),
            path: "/dev/a".into(),
            socket: "/run/a".into(),
            len: 1 << 20,
            block: 512,
            discard: true,
            direct: true,
            read_only: false,
            lock: None,
        };
        let all = [
            Command::Status,
            Command::Histograms,
            Command::Preview,
            Command::Reload { force: true, disks: vec![disk], ports: Vec::new() },
            Command::SignalUrgent { disks: vec!["a".into()], ports: vec!["p".into()] },
            Command::Stop { force: true },
            Command::Trace { for_ms: Some(7) },
            Command::Trace { for_ms: None },
        ];
        for command in all {
            let line = command.line().unwrap();
            assert_eq!(Command::parse(&line).unwrap(), command, "{line}");
        }
        for name in NAMES {
            assert!(Command::parse(&format!("{{\"command\": \"{name}\", \"later\": 1}}")).is_ok(), "{name}");
        }
    }

    #[test]
    fn what_is_no_command_is_told_apart_from_a_wrong_one() {
        for line in ["", "{", "null", "{}", "{\"command\": 7}", "{\"command\": \"restart\"}"] {
            assert!(matches!(Command::parse(line), Err(CommandError::Unknown)), "{line}");
        }
        let all = "there are the commands status, histograms, preview, reload, signal_urgent, stop and trace";
        assert_eq!(Command::parse("").unwrap_err().to_string(), all);
        let wrong = ["\"stop\", \"force\": 1", "\"reload\", \"disks\": [{}]", "\"trace\", \"for_ms\": -1"];
        for rest in wrong {
            let parsed = Command::parse(&format!("{{\"command\": {rest}}}"));
            assert!(matches!(parsed, Err(CommandError::Invalid { .. })), "{rest}");
        }
    }
}
