//! What fails about a cluster.

use std::io;
use std::path::{Path, PathBuf};

use rtvirtio_kernel::HostError;

use crate::twin::TwinError;

/// Why a cluster does not do what is asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClusterError {
    /// A program is not there.
    #[error("cannot run {program}: `scripts/deps.sh test` installs it")]
    Program {
        /// The program.
        program: String,
        /// The system's answer.
        source: io::Error,
    },
    /// A program refused.
    #[error("{command}: {said}")]
    Refused {
        /// Its command line.
        command: String,
        /// What it printed.
        said: String,
        /// Its exit code; `None` for a signal.
        code: Option<i32>,
    },
    /// A file or group.
    #[error("{}", .path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// A node's emulated drive.
    #[error(transparent)]
    Twin(#[from] TwinError),
    /// A kernel file of its device.
    #[error(transparent)]
    Host(#[from] HostError),
    /// A profile.
    #[error("a profile of the twin")]
    Profile(#[from] serde_json::Error),
    /// Something did not happen.
    #[error("waited in vain for {what}; the nodes' logs end with:\n{log}")]
    Waited {
        /// What.
        what: String,
        /// Last lines of the nodes' logs.
        log: String,
    },
}

impl ClusterError {
    pub(crate) fn io(path: &Path, source: io::Error) -> Self {
        Self::Io { path: path.to_owned(), source }
    }

    pub(crate) fn program(program: &str, source: io::Error) -> Self {
        Self::Program { program: program.to_owned(), source }
    }
}
