//! Load by fio, latency from the intended start, verdicts, device profile.
//!
//! - [`fio`]: tasks become a fio job file; fio's JSON and latency logs become data.
//! - [`intended`]: fio's latencies, counted anew from when each request should have started.
//! - [`verdict`]: whether a target is met, missed, or not proven either way.
//! - [`run`]: all of that for one VM.
//! - [`local`]: fio as a child process of this one, for process VMs and for the profile.
//! - [`tail`]: estimate of p99.99 when the samples are too few.
//! - [`noise`]: stalls of the host itself during a run.
//! - [`stalls`]: their spans, to be subtracted.
//! - [`standstill`]: times in which the disk itself completed nothing.
//! - [`memory_waits`]: times in which a VM waited for memory that had to be read back.
//! - [`late`]: share of late requests that these explain.
//! - [`pm_qos`]: keeps the host's CPUs out of idle states.
//! - [`profile`]: throughput and latency of a device, measured.
//! - [`observe`]: a VM's I/O while it works, from counters of QEMU and the kernel.
//! - [`waits`]: waiting of VMs for each other on a device.
//! - [`flow`]: frames to a guest and back, and their verdicts.
//! - [`http`]: requests to a web server, as load.
//! - [`workload`]: the tasks of several VMs at once, each in its guest or cgroup.
//!
//! `docs/explanation/measuring.md` explains how latency is counted, with the experiment that shows
//! why.

mod error;
pub mod fio;
pub mod flow;
pub mod http;
pub mod intended;
pub mod late;
pub mod local;
pub mod memory_waits;
pub mod noise;
pub mod observe;
pub mod pm_qos;
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
