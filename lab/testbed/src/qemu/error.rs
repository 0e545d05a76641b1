//! Errors of lab guests.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use rtvirtio_vmm::VmmError;

/// Reasons for which a guest could not be started, used or ended.
#[derive(Debug, thiserror::Error)]
pub enum QemuError {
    /// A name that cannot be used for files and threads.
    #[error(
        "guest name {name:?} is not usable; take 1 to 40 letters, digits, `-`, `_` or `.`, with a letter or digit first"
    )]
    Name { name: String },
    /// QEMU is not installed.
    #[error("{program} is not installed; install the package qemu-system-x86")]
    NoQemu { program: &'static str },
    /// The disk cannot be used.
    #[error("disk {path:?} of guest {name}: {detail}")]
    Disk {
        name: String,
        path: PathBuf,
        /// Cause, with the remedy.
        detail: String,
    },
    /// A cgroup cannot be joined.
    #[error("cannot open {path:?}: {source}; the cgroup of the guest is gone or not ours (are you root?)")]
    Cgroup { path: PathBuf, source: io::Error },
    /// The QEMU process could not be started.
    #[error(
        "cannot start QEMU for guest {name} in the cgroups {cgroups:?}: {source}; a cgroup that vanished gives ENODEV, a full pids limit EAGAIN"
    )]
    Spawn { name: String, cgroups: Vec<PathBuf>, source: io::Error },
    /// A guest of this name already runs in this directory.
    #[error("a guest named {name} already runs in {run_dir:?}; end it with `rtvirtio-lab down`")]
    Busy { name: String, run_dir: PathBuf },
    /// QEMU has ended unexpectedly.
    #[error("guest {name} is gone ({status}){log}")]
    Gone {
        name: String,
        status: String,
        /// End of its output, line by line, or nothing.
        log: String,
    },
    /// QEMU runs, but the guest is paused.
    #[error("guest {name} does not run: QEMU reports {status:?}; if it was started with KVM, try TCG{log}")]
    Paused { name: String, status: String, log: String },
    /// The guest runs, but its agent does not answer.
    #[error("guest {name} has not finished booting within {} s; is the host overloaded?{log}", waited.as_secs())]
    NoAgent { name: String, waited: Duration, log: String },
    /// An exchange with QEMU or the agent failed, and the guest still runs.
    #[error("guest {name}: {source}")]
    Vmm { name: String, source: VmmError },
    /// A migration failed, was cancelled or did not end.
    #[error("guest {name} is not migrated: {state}")]
    Migration { name: String, state: String },
    /// QEMU does not end after SIGKILL.
    #[error(
        "QEMU of guest {name} (pid {pid}) does not end, not even by SIGKILL: it waits for its disk in the kernel; end what serves that disk"
    )]
    Stuck { name: String, pid: u32 },
    /// A file cannot be accessed.
    #[error("cannot {operation} {path:?}: {source}")]
    Io { operation: &'static str, path: PathBuf, source: io::Error },
}

impl QemuError {
    pub(crate) fn gone(name: &str) -> QemuError {
        QemuError::Gone { name: name.to_owned(), status: "ended".into(), log: String::new() }
    }
}
