//! Errors of a run of the box.

use std::path::PathBuf;
use std::time::Duration;

use rtvirtio_vmm::probe::QEMU;

use crate::image::ImageError;

/// Reasons for a run without an outcome.
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
    Qemu { status: String, stderr: String },
    /// A word of a command that no shell can pass: with a NUL character.
    #[error("a word of the command holds a NUL character")]
    Word,
    /// The directory for a command's results is not empty.
    #[error("{} is not empty: name another directory", path.display())]
    NotEmpty { path: PathBuf },
    /// Results of a command cannot be unpacked.
    #[error("what the command left cannot be unpacked: {stderr}")]
    Results { stderr: String },
    /// The user stopped the run.
    #[error("stopped as asked")]
    Cancelled,
    /// No boot reached the script.
    #[error("the box did not boot in {boots} tries; the last console ends with:\n{console}")]
    Boot { boots: u32, console: String },
    /// The script did not end in time.
    #[error("the box {} within {} s; the script printed last:\n{output}\nthe console ends with:\n{console}",
        if *quiet { "printed nothing" } else { "did not finish" }, waited.as_secs())]
    Timeout {
        waited: Duration,
        /// Whether that is [`BoxRun::quiet`](super::BoxRun::quiet).
        quiet: bool,
        output: String,
        console: String,
    },
}
