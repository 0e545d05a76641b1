//! Why a run of the box gave no outcome.

use std::path::PathBuf;
use std::time::Duration;

use rtvirtio_vmm::probe::QEMU;

use crate::image::ImageError;

/// Why a run gave no outcome.
#[derive(Debug, thiserror::Error)]
pub enum BoxError {
    /// The image cannot be made, or a file of the run cannot be read.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// QEMU is not installed.
    #[error("{QEMU} is not installed; install the package qemu-system-x86")]
    NoQemu,
    /// QEMU cannot be started.
    #[error("cannot start the box: {0}")]
    Spawn(std::io::Error),
    /// QEMU did not run the box.
    #[error("QEMU ended with {status}: {stderr}")]
    Qemu {
        /// How it ended.
        status: String,
        /// Its standard error.
        stderr: String,
    },
    /// A word of a command cannot be one of a shell.
    #[error("a word of the command holds a NUL character")]
    Word,
    /// The directory for what a command leaves has something in it.
    #[error("{} is not empty: name another directory", path.display())]
    NotEmpty {
        /// The directory.
        path: PathBuf,
    },
    /// What a command left cannot be brought out.
    #[error("what the command left cannot be unpacked: {stderr}")]
    Results {
        /// What tar(1) says.
        stderr: String,
    },
    /// The user stopped it.
    #[error("stopped as asked")]
    Cancelled,
    /// No boot reached the script.
    #[error("the box did not boot in {boots} tries; the last console ends with:\n{console}")]
    Boot {
        /// Boots tried.
        boots: u32,
        /// The end of the last console.
        console: String,
    },
    /// The script did not end in time.
    #[error("the box {} within {} s; the script printed last:\n{output}\nthe console ends with:\n{console}",
        if *quiet { "printed nothing" } else { "did not finish" }, waited.as_secs())]
    Timeout {
        /// The time it had.
        waited: Duration,
        /// Whether that is [`BoxRun::quiet`](super::BoxRun::quiet).
        quiet: bool,
        /// The end of the script's output.
        output: String,
        /// The end of the console.
        console: String,
    },
}
