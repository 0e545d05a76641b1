//! Errors of reporting in a guest.

use std::io;
use std::path::PathBuf;

/// Reason why a guest cannot report.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReporterError {
    /// There is no device.
    #[error(
        "this machine has no ivshmem device (1af4:1110): start QEMU with `-object memory-backend-file,id=urgency,size=4K,share=on,mem-path=/dev/shm/rtvirtio-VM \
         -device ivshmem-plain,memdev=urgency`"
    )]
    NoDevice,
    /// There are devices, and no host has offered a page in one.
    #[error(
        "no host offers the urgency page in {device}: run `rtvirtio keep SPEC` on the host, with `urgency` for this machine in the spec"
    )]
    NotOffered {
        /// Directory of the device in `/sys`.
        device: PathBuf,
    },
    /// The lock is held by another process of this guest that reports.
    #[error("another process reports already ({lock}): end it first; `rtvirtio-guest bpf` reports for all processes", lock = lock.display())]
    Taken { lock: PathBuf },
    /// The guest's kernel lacks something.
    #[error("this kernel cannot watch its scheduler: {what}; `rtvirtio-guest run` works without")]
    Kernel { what: String },
    /// The page has too few blocks.
    #[error("vCPU {vcpu} has no block: the page has {blocks}; give the device more memory")]
    TooSmall {
        /// First vCPU without a block.
        vcpu: usize,
        blocks: usize,
    },
    /// Something could not be read or written.
    #[error("cannot {action} {path}: {source}", path = path.display())]
    Io {
        /// Verb of the failed operation, such as `open`.
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
}

impl ReporterError {
    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }
}
