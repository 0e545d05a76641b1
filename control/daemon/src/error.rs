//! Why the service does not run.

use std::io;
use std::path::PathBuf;

/// An error that keeps the service from starting, or ends it. What concerns one VM or one file is
/// no error of the service: it is shown with that VM or file.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// Another one runs.
    #[error("another rtvirtiod runs (it holds {path}): stop it first")]
    Runs {
        /// Its lock.
        path: PathBuf,
    },
    /// Another one runs on the same state directory, perhaps with another run directory.
    #[error(
        "another rtvirtiod runs on this state directory: {service} holds {path}; stop it first, or give this one a directory of its own (--state-dir)"
    )]
    RunsOnState {
        /// The other one, in words.
        service: String,
        /// The lock.
        path: PathBuf,
    },
    /// The configuration has a mistake.
    #[error("{path}: {why}")]
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong, with its line.
        why: String,
    },
    /// A file or socket could not be used.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// Which file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// An address that is not this host's own.
    #[error(
        "{address} is no loopback address: the interface has no passwords, so it is served to this host only"
    )]
    NotLoopback {
        /// The address.
        address: String,
    },
    /// A step of the library.
    #[error(transparent)]
    Workflow(#[from] rtvirtio_workflow::Error),
}
