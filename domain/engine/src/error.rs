//! Why a domain does not start, or does not serve what comes.

use std::io;

use rtvirtio_domain_resources::OpenError;

use crate::engine::EngineError;

/// Why a domain does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DomainError {
    /// A disk, uplink or socket cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A network cannot start.
    #[error("network \"{network}\": {source}")]
    Network {
        /// Name of the network.
        network: String,
        /// The cause.
        source: EngineError,
    },
    /// An engine cannot start.
    #[error("device \"{device}\": {source}")]
    Engine {
        /// Name of the device.
        device: String,
        /// The cause.
        source: EngineError,
    },
    /// A socket cannot be served.
    #[error("{device}: {source}")]
    Socket {
        /// The disk or port.
        device: String,
        /// The cause.
        source: io::Error,
    },
}
