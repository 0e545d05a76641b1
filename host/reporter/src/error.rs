//! Why a guest cannot report.

use std::io;
use std::path::PathBuf;

/// Why a guest cannot report.
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
        /// The device's directory.
        device: PathBuf,
    },
    /// Another process of this guest reports.
    #[error("another process reports already ({lock}): end it first; `rtvirtio-guest bpf` reports for all processes", lock = lock.display())]
    Taken {
        /// The file that it has locked.
        lock: PathBuf,
    },
    /// The guest's kernel lacks something.
    #[error("this kernel cannot watch its scheduler: {what}; `rtvirtio-guest run` works without")]
    Kernel {
        /// What it lacks.
        what: String,
    },
    /// The page has too few blocks.
    #[error("vCPU {vcpu} has no block: the page has {blocks}; give the device more memory")]
    TooSmall {
        /// The first one without.
        vcpu: usize,
        /// Blocks.
        blocks: usize,
    },
    /// Something could not be read or written.
    #[error("cannot {action} {path}: {source}", path = path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// With what.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
}

impl ReporterError {
    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }
}
