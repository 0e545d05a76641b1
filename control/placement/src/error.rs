//! Why nothing was published.

use std::io;
use std::path::PathBuf;

/// Why nothing, or not everything, was published. What was published before stays.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlacementError {
    /// A file with a secret or certificates.
    #[error("cannot read {}: {source}", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The configuration.
    #[error("{0}")]
    Config(String),
    /// The service does not answer.
    #[error("{url} does not answer: {why}")]
    Away {
        /// What was asked.
        url: String,
        /// Why not.
        why: String,
    },
    /// Keystone gives no token.
    #[error(
        "keystone at {url} gives no token ({status}): {why}: check the application credential's id and secret"
    )]
    Token {
        /// What was asked.
        url: String,
        /// HTTP's status.
        status: u16,
        /// Its words.
        why: String,
    },
    /// The service does not know who asks, or does not let it.
    #[error(
        "placement refuses {what} ({status}): {why}: the token must be of a user with the role admin or service"
    )]
    Forbidden {
        /// What was tried.
        what: String,
        /// HTTP's status.
        status: u16,
        /// Its words.
        why: String,
    },
    /// The host has no resource provider.
    #[error(
        "placement has no resource provider {name}: nova-compute makes it when it starts on this host; write its name in `placement.provider` (`openstack resource provider list`)"
    )]
    NoProvider {
        /// As the configuration names it.
        name: String,
    },
    /// The provider was changed by others again and again.
    #[error("the resource provider was changed by others {tries} times in a row; it is tried again")]
    Conflict {
        /// How often.
        tries: u32,
    },
    /// Another answer than expected.
    #[error("placement refuses {what} ({status}): {why}")]
    Refused {
        /// What was tried.
        what: String,
        /// HTTP's status.
        status: u16,
        /// Its words.
        why: String,
    },
    /// An answer that is not understood.
    #[error("the answer to {what} is not understood: {why}: is `placement.url` right?")]
    Answer {
        /// What was asked.
        what: String,
        /// What is wrong with it.
        why: String,
    },
}
