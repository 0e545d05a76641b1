//! Errors of publication.

use std::io;
use std::path::PathBuf;

/// Errors of publishing inventories. Anything published before stays.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlacementError {
    /// A file with a secret or certificates.
    #[error("cannot read {}: {source}", .path.display())]
    Read {
        /// Path as in the configuration.
        path: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
    /// A value of the configuration is invalid.
    #[error("{0}")]
    Config(String),
    /// The service does not answer.
    #[error("{url} does not answer: {why}")]
    Away {
        /// URL of the request.
        url: String,
        /// Transport error, or the HTTP status of a gateway.
        why: String,
    },
    /// Keystone gives no token.
    #[error(
        "keystone at {url} gives no token ({status}): {why}: check the application credential's id and secret"
    )]
    Token {
        /// URL of the token request.
        url: String,
        /// HTTP status of the answer.
        status: u16,
        /// Error text of the answer.
        why: String,
    },
    /// The service rejects the token or its roles (401, 403).
    #[error(
        "placement refuses {what} ({status}): {why}: the token must be of a user with the role admin or service"
    )]
    Forbidden {
        /// Object of the request, in words.
        what: String,
        /// HTTP status of the answer.
        status: u16,
        /// Error text of the answer.
        why: String,
    },
    /// The host has no resource provider.
    #[error(
        "placement has no resource provider {name}: nova-compute makes it when it starts on this host; write its name in `placement.provider` (`openstack resource provider list`)"
    )]
    NoProvider {
        /// Name or UUID in the configuration.
        name: String,
    },
    /// The provider was changed by others again and again.
    #[error("the resource provider was changed by others {tries} times in a row; it is tried again")]
    Conflict {
        /// Number of attempts of the round.
        tries: u32,
    },
    /// The service answers with an unexpected status.
    #[error("placement refuses {what} ({status}): {why}")]
    Refused {
        /// Object of the request, in words.
        what: String,
        /// HTTP status of the answer.
        status: u16,
        /// Error text of the answer.
        why: String,
    },
    /// An answer that cannot be parsed.
    #[error("the answer to {what} is not understood: {why}: is `placement.url` right?")]
    Answer {
        /// Object of the request, in words.
        what: String,
        /// Parse error, or the unexpected value.
        why: String,
    },
}
