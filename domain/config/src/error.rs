//! Errors of a configuration file.

use std::path::PathBuf;

use rtvirtio_sched::ConfigError;
use rtvirtio_sched::bound::Refusal;

/// Why a configuration file is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// It cannot be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Its error.
        source: std::io::Error,
    },
    /// It is not a valid configuration.
    #[error("{}: {message}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// The error, with its line.
        message: String,
    },
    /// Invalid numbers for the scheduler.
    #[error("device \"{device}\": {message}")]
    Sched {
        /// The device.
        device: String,
        /// The error, with the disk's name.
        message: String,
        /// The operation.
        source: ConfigError,
    },
    /// `poll` and `fifo` exclude each other.
    #[error(
        "device \"{device}\": `poll` and `fifo` together: the kernel stops a real-time thread that never sleeps for 50 ms in every second (sched_rt_runtime_us); leave one of them out"
    )]
    Conflict {
        /// The device.
        device: String,
    },
    /// A reservation that admission refuses.
    #[error("device \"{device}\": {message}")]
    Refused {
        /// The device.
        device: String,
        /// The reason, with the disk's name where one disk is the cause.
        message: String,
        /// The reason, with its numbers.
        source: Refusal,
    },
    /// A rate that cannot be counted exactly.
    #[error("{place}: {message}")]
    Rate {
        /// The disk and the key.
        place: String,
        /// The rate, and what would do.
        message: String,
    },
    /// An invalid network.
    #[error("network \"{network}\": {what}")]
    Network {
        /// The network.
        network: String,
        /// What is wrong, with the port's name.
        what: String,
    },
    /// Two paths are the same.
    #[error("{first} and {second} are the same path, {}; give each its own", path.display())]
    Collision {
        /// The first one.
        first: String,
        /// The second one.
        second: String,
        /// The absolute path.
        path: PathBuf,
    },
    /// A duplicate name or socket.
    #[error("{what} \"{name}\" is there twice")]
    Duplicate {
        /// Device, disk, network, port or socket.
        what: &'static str,
        /// The name.
        name: String,
    },
}
