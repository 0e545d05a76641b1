//! Errors of following urgency reports.

use std::io;
use std::path::PathBuf;

use rtvirtio_apply::ApplyError;
use rtvirtio_kernel::HostError;
use rtvirtio_vmm::VmmError;

/// Reason why a VM's urgency is not followed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UrgencyError {
    /// QEMU has no such device.
    #[error(
        "{vm}: its QEMU has no ivshmem device for the urgency page: start it with `-object memory-backend-file,id=urgency,size=4K,share=on,mem-path=/dev/shm/rtvirtio-{vm} \
         -device ivshmem-plain,memdev=urgency` (libvirt: <shmem name='rtvirtio-{vm}'><model type='ivshmem-plain'/><size unit='M'>1</size></shmem>)"
    )]
    NoDevice { vm: String },
    /// The memory of its device cannot be opened.
    #[error(
        "{vm}: the memory of its ivshmem device cannot be used: {why}; use memory-backend-file with share=on"
    )]
    NoMemory {
        vm: String,
        /// Reason, such as a private mapping.
        why: String,
    },
    /// Other users could put files into the directory of a doorbell server.
    #[error(
        "the directory {dir} of an ivshmem server's socket cannot be trusted: {why}; use one of root's, as /run/rtvirtio, and run `rtvirtio ivshmem` as root",
        dir = dir.display()
    )]
    Place {
        /// Directory of the socket.
        dir: PathBuf,
        why: String,
    },
    /// The page is followed by another process.
    #[error("{vm}: another process follows its urgency page {path}: end that `rtvirtio keep` first", path = path.display())]
    Taken { vm: String, path: PathBuf },
    /// The monitor of its QEMU cannot be reached.
    #[error("{vm}: its QEMU cannot be asked: {why}")]
    NoMonitor { vm: String, why: String },
    /// Interrupts of KVM cannot be traced.
    #[error("this kernel cannot say when KVM interrupts a vCPU: {why}; remove `interrupts = \"kvm\"`")]
    Kvm {
        /// Missing feature, with the error.
        why: String,
    },
    /// Two vCPUs share a thread.
    #[error(
        "{vm}: one thread runs several vCPUs, so it has no urgency of its own: start QEMU with `-accel tcg,thread=multi`"
    )]
    SharedThread { vm: String },
    /// The guest has named an address without memory.
    #[error("{vm}: the guest says that its reports are at {address:#x}, where it has no memory: {why}")]
    Address {
        vm: String,
        /// Guest-physical address from the guest.
        address: u64,
        /// Answer of QEMU, or the rule that was broken.
        why: String,
    },
    /// Error of QEMU's monitor.
    #[error(transparent)]
    Monitor(#[from] VmmError),
    /// Error of the journal or its lock.
    #[error(transparent)]
    Journal(#[from] ApplyError),
    /// Error of the kernel's files.
    #[error(transparent)]
    Host(#[from] HostError),
    /// Something could not be read or written.
    #[error("cannot {action} {path}: {source}", path = path.display())]
    Io {
        /// Verb of the failed operation, such as `open`.
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
}

impl UrgencyError {
    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }
}
