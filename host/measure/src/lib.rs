//! Load by fio, latency from the intended start, verdicts, device profile.
//!
//! - [`fio`]: tasks become a fio job file; fio's JSON and latency logs become data.
//! - [`intended`]: fio's latencies, counted again from when each request should have started.
//! - [`verdict`]: whether a target is met, missed, or not shown either way.
//! - [`run`]: all of that for one VM.
//! - [`local`]: fio as a child process of this one, for process VMs and for the profile.
//! - [`tail`]: what p99.99 probably is when the samples are too few.
//! - [`noise`]: whether and when the host itself stood still meanwhile.
//! - [`stalls`]: the spans in which it did, to be subtracted.
//! - [`standstill`]: whether the disk itself did.
//! - [`late`]: what share of late requests these explain.
//! - [`awake`]: keeps its CPUs from sleeping.
//! - [`profile`]: what a device can do, measured.
//! - [`observe`]: what a VM does while it works, from counters of QEMU and the kernel.
//! - [`waits`]: which VM waits for which on a device.
//! - [`flow`]: frames to a guest and back, and their verdicts.
//! - [`http`]: requests to a web server, as load.
//! - [`workload`]: the tasks of several VMs at once, each where it belongs.
//!
//! How latency is counted, and the experiment that shows why, stand in
//! `docs/explanation/measuring.md`.

pub mod awake;
mod error;
pub mod fio;
pub mod flow;
pub mod http;
pub mod intended;
pub mod late;
pub mod local;
pub mod noise;
pub mod observe;
pub mod profile;
mod result;
pub mod run;
mod sampler;
pub mod stalls;
pub mod standstill;
pub mod tail;
pub mod verdict;
pub mod waits;
pub mod workload;

pub use error::MeasureError;
pub use result::*;
