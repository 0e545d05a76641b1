//! What can go wrong between the page and the threads.

use std::io;
use std::path::PathBuf;

use rtvirtio_apply::ApplyError;
use rtvirtio_kernel::HostError;
use rtvirtio_vmm::VmmError;

/// Why a VM's urgency is not followed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UrgencyError {
    /// QEMU has no such device.
    #[error(
        "{vm}: its QEMU has no ivshmem device for the urgency page: start it with `-object memory-backend-file,id=urgency,size=4K,share=on,mem-path=/dev/shm/rtvirtio-{vm} \
         -device ivshmem-plain,memdev=urgency` (libvirt: <shmem name='rtvirtio-{vm}'><model type='ivshmem-plain'/><size unit='M'>1</size></shmem>)"
    )]
    NoDevice {
        /// The VM.
        vm: String,
    },
    /// Its memory cannot be reached from here.
    #[error(
        "{vm}: the memory of its ivshmem device cannot be used: {why}; use memory-backend-file with share=on"
    )]
    NoMemory {
        /// The VM.
        vm: String,
        /// Why.
        why: String,
    },
    /// Others could put files where the server of a doorbell has its own.
    #[error(
        "the directory {dir} of an ivshmem server's socket cannot be trusted: {why}; use one of root's, as /run/rtvirtio, and run `rtvirtio ivshmem` as root",
        dir = dir.display()
    )]
    Place {
        /// The directory.
        dir: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// Another process follows it.
    #[error("{vm}: another process follows its urgency page {path}: end that `rtvirtio keep` first", path = path.display())]
    Taken {
        /// The VM.
        vm: String,
        /// The page's file.
        path: PathBuf,
    },
    /// Its monitor cannot be reached.
    #[error("{vm}: its QEMU cannot be asked: {why}")]
    NoMonitor {
        /// The VM.
        vm: String,
        /// Why.
        why: String,
    },
    /// KVM's interrupts are not seen.
    #[error("this kernel cannot say when KVM interrupts a vCPU: {why}; remove `interrupts = \"kvm\"`")]
    Kvm {
        /// What it lacks.
        why: String,
    },
    /// Two vCPUs share a thread.
    #[error(
        "{vm}: one thread runs several vCPUs, so it has no urgency of its own: start QEMU with `-accel tcg,thread=multi`"
    )]
    SharedThread {
        /// The VM.
        vm: String,
    },
    /// The guest has named memory that it does not have.
    #[error("{vm}: the guest says that its reports are at {address:#x}, where it has no memory: {why}")]
    Address {
        /// The VM.
        vm: String,
        /// Guest-physical address.
        address: u64,
        /// QEMU's answer.
        why: String,
    },
    /// QEMU's monitor.
    #[error(transparent)]
    Monitor(#[from] VmmError),
    /// The journal.
    #[error(transparent)]
    Journal(#[from] ApplyError),
    /// The kernel's files.
    #[error(transparent)]
    Host(#[from] HostError),
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

impl UrgencyError {
    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }
}
