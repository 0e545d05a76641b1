//! Errors of contracts that cannot be carried out; nothing was written.

use std::path::PathBuf;

use rtvirtio_kernel::HostError;

use crate::{Backend, Contract};

/// Contract, or order of threads, that this host cannot provide.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    /// The sum of all budgets is more than the kernel grants.
    #[error("{vm}: its contract of {contract} is {by:.1} % of each CPU too much: {grant}; {remedy}")]
    TooMuch {
        vm: String,
        contract: Contract,
        /// Excess of the sum, in percent of each CPU.
        by: f64,
        /// Description of the kernel's grant and the shares taken.
        grant: String,
        /// Largest budget that would fit, or another way to make room.
        remedy: String,
    },
    /// No mechanism of this kernel can hold the contract.
    #[error("{vm}: no mechanism of this kernel can enforce its contract: {why}; {remedy}")]
    NoBackend {
        vm: String,
        /// Reason for each mechanism.
        why: String,
        remedy: String,
    },
    /// The mechanism cannot hold this VM's threads.
    #[error("{vm}: {backend} cannot limit its threads: {why}; {remedy}")]
    CannotHold {
        vm: String,
        backend: Backend,
        /// Reason, such as pinning or a shared cgroup.
        why: String,
        remedy: String,
    },
    /// The VM has no thread any more.
    #[error("{vm}: none of its threads is there: has it ended?")]
    NoThreads { vm: String },
    /// No thread of one of its processes is known to run vCPUs: the guest would run outside of the
    /// contract.
    #[error(
        "{vm}: which of the {threads} threads of process {pid} ({name}) run its vCPUs is not known, so no contract can limit them: name the VM by \
         `qmp` or `domain`, or start QEMU with `-name NAME,debug-threads=on`"
    )]
    NoVcpu {
        vm: String,
        /// Process in which no thread has a vCPU's name.
        pid: u32,
        name: String,
        threads: usize,
    },
    /// A cgroup with the name that ours would have exists already.
    #[error(
        "{vm}: the cgroup {path} is there already: if it is left from another run, revert that first or remove it with rmdir"
    )]
    GroupExists {
        vm: String,
        /// Directory of the existing cgroup.
        path: PathBuf,
    },
    /// The host could not be read.
    #[error(transparent)]
    Host(#[from] HostError),
}
