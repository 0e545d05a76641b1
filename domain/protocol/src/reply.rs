//! Replies to commands, but for the status and the histograms.

use std::path::PathBuf;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// A command that is refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The cause, with the remedy.
    pub error: String,
    /// The configuration file of a preview that is refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config: Option<PathBuf>,
}

/// Disks and ports that a reload would attach and detach.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Preview {
    /// The configuration file, absolute.
    pub config: PathBuf,
    /// Names of disks that would be attached.
    pub attach: Vec<String>,
    /// Disks that would be detached.
    pub detach: Vec<Leaving>,
    /// Names of ports that would be attached.
    pub attach_ports: Vec<String>,
    /// Ports that would be detached.
    pub detach_ports: Vec<Leaving>,
}

/// A disk or port that would be detached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leaving {
    /// Name of the disk or port.
    pub name: String,
    /// A QEMU is connected.
    pub connected: bool,
}

/// Changes that a reload has made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Changed {
    /// The changes, each with its place.
    pub changed: Vec<String>,
}

/// Disks and ports whose eventfd was set or removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Signalled {
    /// Names of disks, as in the command.
    pub signalled: Vec<String>,
    /// Names of ports, as in the command.
    pub signalled_ports: Vec<String>,
}

/// Result of a stop command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Stop {
    /// The process runs on, because guests are connected.
    Serves {
        /// The disks and ports to which a QEMU is connected.
        guests: Vec<String>,
    },
    /// The process ends after this reply.
    Ends {
        /// Always true; tells the reply from `Serves`.
        stopping: bool,
    },
}

/// Error of a reply.
#[derive(Debug, thiserror::Error)]
pub enum ReplyError {
    /// The I/O domain refuses the command.
    #[error("{0}")]
    Refused(String),
    /// Reply of another form, or one without a required field.
    #[error(transparent)]
    Invalid(#[from] serde_json::Error),
}

/// Reads the reply to a command.
pub fn parse_reply<T: DeserializeOwned>(line: &str) -> Result<T, ReplyError> {
    match serde_json::from_str(line) {
        Ok(Failure { error, .. }) => Err(ReplyError::Refused(error)),
        Err(_) => Ok(serde_json::from_str(line)?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_no_reply_and_a_missing_list_is_not_an_empty_one() {
        let refused = parse_reply::<Preview>(r#"{"config": "/x", "error": "line 3"}"#).unwrap_err();
        assert!(matches!(refused, ReplyError::Refused(why) if why == "line 3"));
        for line in ["", "null", "{}", r#"{"changed": null}"#, r#"{"attach": []}"#] {
            assert!(matches!(parse_reply::<Changed>(line), Err(ReplyError::Invalid(_))), "{line}");
            assert!(matches!(parse_reply::<Preview>(line), Err(ReplyError::Invalid(_))), "{line}");
            assert!(matches!(parse_reply::<Stop>(line), Err(ReplyError::Invalid(_))), "{line}");
        }
        let serves = parse_reply::<Stop>(r#"{"guests": ["a"], "later": 1}"#).unwrap();
        assert_eq!(serves, Stop::Serves { guests: vec!["a".into()] });
        assert_eq!(parse_reply::<Stop>(r#"{"stopping": true}"#).unwrap(), Stop::Ends { stopping: true });
    }
}
