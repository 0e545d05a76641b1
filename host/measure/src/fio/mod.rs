//! Input and output of fio: job files from tasks, JSON and latency logs back to data.

mod job;
mod json;
mod log;
mod rate;

pub(crate) use job::{COMMON, escaped, fio_args};
pub use job::{Engine, IoClass, JobFile, JobOptions, LogClock, PRELOAD, Region, Section};
pub use json::{Direction, JobStats, parse_json};
pub use log::{Sample, parse_log};
pub use rate::FioRate;

/// Output of one run of fio, on the host or inside a guest.
#[derive(Clone, Debug, Default)]
pub struct FioOutput {
    /// Content of the file at [`JobFile::json_path`].
    pub json: Vec<u8>,
    /// Contents of [`JobFile::log_paths`], one for each section in order; `None` for sections
    /// without a log.
    pub logs: Vec<Option<Vec<u8>>>,
    /// Text on stderr (only its end, when long).
    pub stderr: String,
}

#[cfg(test)]
pub(crate) mod tests;
