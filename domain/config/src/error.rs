//! Errors of a configuration file.

use std::path::PathBuf;

use rtvirtio_sched::ConfigError;
use rtvirtio_sched::bound::Refusal;

/// Why a configuration file cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// It cannot be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It is not such a file.
    #[error("{}: {message}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// What is wrong, with the line.
        message: String,
    },
    /// Numbers that do not go together.
    #[error("device \"{device}\": {message}")]
    Sched {
        /// The device.
        device: String,
        /// What, with the disk's name.
        message: String,
        /// What.
        source: ConfigError,
    },
    /// Two settings that hurt each other.
    #[error(
        "device \"{device}\": `poll` and `fifo` together: the kernel stops a real-time thread that never sleeps for 50 ms in every second (sched_rt_runtime_us); leave one of them out"
    )]
    Conflict {
        /// The device.
        device: String,
    },
    /// A reservation's deadline that cannot be kept.
    #[error("device \"{device}\": {message}")]
    Refused {
        /// The device.
        device: String,
        /// Why, with the disk's name where a single one is at fault.
        message: String,
        /// Why, with the number.
        source: Refusal,
    },
    /// Two paths that would be the same file.
    #[error("{first} and {second} are the same path, {}; give each its own", path.display())]
    Collision {
        /// One.
        first: String,
        /// The other.
        second: String,
        /// The path, absolute.
        path: PathBuf,
    },
    /// A name or socket twice.
    #[error("{what} \"{name}\" is there twice")]
    Duplicate {
        /// What kind of thing.
        what: &'static str,
        /// Which.
        name: String,
    },
}
