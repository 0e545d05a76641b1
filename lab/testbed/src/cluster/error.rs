//! Errors of a cluster.

use std::io;
use std::path::{Path, PathBuf};

use rtvirtio_kernel::HostError;

use crate::twin::TwinError;

/// Reasons for which a cluster operation fails.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClusterError {
    /// A program cannot be run.
    #[error("cannot run {program}: `scripts/deps.sh test` installs it")]
    Program { program: String, source: io::Error },
    /// A program ended with an error.
    #[error("{command}: {said}")]
    Refused {
        command: String,
        said: String,
        /// Exit code; `None` for a signal.
        code: Option<i32>,
    },
    /// A file or cgroup cannot be read or written.
    #[error("{}", .path.display())]
    Io { path: PathBuf, source: io::Error },
    /// An operation on the emulated drive of a node failed.
    #[error(transparent)]
    Twin(#[from] TwinError),
    /// A kernel file of its device cannot be accessed.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The twin's profile is not valid JSON.
    #[error("a profile of the twin")]
    Profile(#[from] serde_json::Error),
    /// A condition was not met in time.
    #[error("waited in vain for {what}; the nodes' logs end with:\n{log}")]
    Waited { what: String, log: String },
}

impl ClusterError {
    pub(crate) fn io(path: &Path, source: io::Error) -> Self {
        Self::Io { path: path.to_owned(), source }
    }

    pub(crate) fn program(program: &str, source: io::Error) -> Self {
        Self::Program { program: program.to_owned(), source }
    }
}
