//! Errors of a configuration file.

use std::path::PathBuf;

use rtvirtio_sched::ConfigError;
use rtvirtio_sched::bound::Refusal;

/// Causes for which a configuration file is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// The file cannot be read.
    #[error("{}: {source}", path.display())]
    Read {
        path: PathBuf,
        /// Error of the read.
        source: std::io::Error,
    },
    /// The text is not valid TOML, or no configuration.
    #[error("{}: {message}", path.display())]
    Parse {
        path: PathBuf,
        /// The error, with its line.
        message: String,
    },
    /// Invalid numbers for the scheduler.
    #[error("device \"{device}\": {message}")]
    Sched {
        device: String,
        /// The error, with the disk's name.
        message: String,
        /// Error of the scheduler's check.
        source: ConfigError,
    },
    /// `poll` and `fifo` exclude each other.
    #[error(
        "device \"{device}\": `poll` and `fifo` together: the kernel stops a real-time thread that never sleeps for 50 ms in every second (sched_rt_runtime_us, from Linux 6.12 on the fair server); leave one of them out"
    )]
    Conflict { device: String },
    /// A reservation that admission refuses.
    #[error("device \"{device}\": {message}")]
    Refused {
        device: String,
        /// The reason, with the disk's name where one disk is the cause.
        message: String,
        /// The reason, with its numbers.
        source: Refusal,
    },
    /// A disk that moves, with a cache or with other writers.
    #[error(
        "disk \"{disk}\": `migrate` is neither with `cached`, because the other host would not see what is in this one's page cache, nor with `shared`, which takes no locks"
    )]
    Migrate { disk: String },
    /// A block size that guests cannot use.
    #[error("disk \"{disk}\": `block_size` must be 512B, 1KiB, 2KiB or 4KiB")]
    BlockSize { disk: String },
    /// A rate that cannot be counted exactly.
    #[error("{place}: {message}")]
    Rate {
        /// The disk and the key.
        place: String,
        /// The rate, and what would do.
        message: String,
    },
    /// A network with an invalid value, or with a reservation that is not admitted.
    #[error("network \"{network}\": {what}")]
    Network {
        network: String,
        /// The error, with the port's name where one port is the cause.
        what: String,
    },
    /// Two paths are the same.
    #[error("{first} and {second} are the same path, {}; give each its own", path.display())]
    Collision {
        /// Key and owner of the first path.
        first: String,
        /// Key and owner of the second path.
        second: String,
        /// The path that both lead to, absolute.
        path: PathBuf,
    },
    /// A duplicate name or socket.
    #[error("{what} \"{name}\" is there twice")]
    Duplicate {
        /// Device, disk, network, port or socket.
        what: &'static str,
        /// The name or socket path.
        name: String,
    },
}
