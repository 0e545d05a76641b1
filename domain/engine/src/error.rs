//! Errors of starting an I/O domain.

use std::io;

use rtvirtio_domain_resources::OpenError;

use crate::engine::EngineError;

/// Reason why an I/O domain does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DomainError {
    /// A disk, uplink or socket cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A network cannot start.
    #[error("network \"{network}\": {source}")]
    Network {
        network: String,
        /// Error of the network's engine.
        source: EngineError,
    },
    /// An engine cannot start.
    #[error("device \"{device}\": {source}")]
    Engine {
        device: String,
        /// Error of the device's engine.
        source: EngineError,
    },
    /// A socket cannot be served.
    #[error("{device}: {source}")]
    Socket {
        /// Kind and name of the disk or port.
        device: String,
        /// Error of the thread that serves it.
        source: io::Error,
    },
}
