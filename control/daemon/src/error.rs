//! Errors that keep the service from running.

use std::io;
use std::path::PathBuf;

/// An error that keeps the service from starting, or ends it. What concerns one VM or one file is
/// no error of the service: it is shown with that VM or file.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// A second service uses the same run directory.
    #[error("another rtvirtiod runs (it holds {path}): stop it first")]
    Runs {
        /// Lock file that it holds.
        path: PathBuf,
    },
    /// A second service uses the same state directory, perhaps with another run directory.
    #[error(
        "another rtvirtiod runs on this state directory: {service} holds {path}; stop it first, or give this one a directory of its own (--state-dir)"
    )]
    RunsOnState {
        /// Description of the other service.
        service: String,
        /// Lock file that it holds.
        path: PathBuf,
    },
    /// The configuration has a mistake.
    #[error("{path}: {why}")]
    Config {
        /// Configuration file that was read.
        path: PathBuf,
        /// Mistake, with its line.
        why: String,
    },
    /// A file or socket could not be used.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// Verb of the failed operation, such as `read`.
        action: &'static str,
        /// File, socket or address of the operation.
        path: PathBuf,
        /// Error of the operation.
        source: io::Error,
    },
    /// An address that is not this host's own.
    #[error(
        "{address} is no loopback address: the interface has no passwords, so it is served to this host only"
    )]
    NotLoopback {
        /// Address that was asked for.
        address: String,
    },
    /// An operation of the workflow library failed.
    #[error(transparent)]
    Workflow(#[from] rtvirtio_workflow::Error),
}
