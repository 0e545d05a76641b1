//! Why a contract is not carried out; nothing was written.

use std::path::PathBuf;

use rtvirtio_kernel::HostError;

use crate::{Backend, Contract};

/// A contract, or an order of threads, that cannot be had here.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    /// The sum of all budgets is more than the kernel grants.
    #[error("{vm}: its contract of {contract} is {by:.1} % of each CPU too much: {grant}; {remedy}")]
    TooMuch {
        /// Which VM.
        vm: String,
        /// What it asks for.
        contract: Contract,
        /// By how much the sum is too large, in percent of each CPU.
        by: f64,
        /// What is granted and what is taken.
        grant: String,
        /// The most that it can have, or where to ask.
        remedy: String,
    },
    /// No mechanism of this kernel can hold the contract.
    #[error("{vm}: no mechanism of this kernel can hold its contract: {why}; {remedy}")]
    NoBackend {
        /// Which VM.
        vm: String,
        /// Why not, for each mechanism.
        why: String,
        /// What to do.
        remedy: String,
    },
    /// The mechanism cannot hold this VM's threads.
    #[error("{vm}: {backend} cannot hold its threads: {why}; {remedy}")]
    CannotHold {
        /// Which VM.
        vm: String,
        /// Which mechanism.
        backend: Backend,
        /// Why not.
        why: String,
        /// What to do.
        remedy: String,
    },
    /// The VM has no thread any more.
    #[error("{vm}: none of its threads is there: has it ended?")]
    NoThreads {
        /// Which VM.
        vm: String,
    },
    /// No thread of one of its processes is known to run vCPUs: the guest would run outside of the
    /// contract.
    #[error(
        "{vm}: which of the {threads} threads of process {pid} ({name}) run its vCPUs is not known, so no contract can hold them: name the VM by \
         `qmp` or `domain`, or start QEMU with `-name NAME,debug-threads=on`"
    )]
    NoVcpu {
        /// Which VM.
        vm: String,
        /// The process that runs no thread with a vCPU's name.
        pid: u32,
        /// Its name.
        name: String,
        /// How many threads it has.
        threads: usize,
    },
    /// A group of the name that ours would have is there already.
    #[error(
        "{vm}: the cgroup {path} is there already: if it is left from another run, revert that first or remove it with rmdir"
    )]
    GroupExists {
        /// Which VM.
        vm: String,
        /// The group's directory.
        path: PathBuf,
    },
    /// The host could not be read.
    #[error(transparent)]
    Host(#[from] HostError),
}
