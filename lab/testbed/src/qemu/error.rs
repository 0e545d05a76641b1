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
    Name {
        /// Name that was given.
        name: String,
    },
    /// QEMU is not installed.
    #[error("{program} is not installed; install the package qemu-system-x86")]
    NoQemu {
        /// Name of the program.
        program: &'static str,
    },
    /// The disk cannot be used.
    #[error("disk {path:?} of guest {name}: {detail}")]
    Disk {
        /// Name of the guest.
        name: String,
        /// Path of the device or file.
        path: PathBuf,
        /// Cause, with the remedy.
        detail: String,
    },
    /// A cgroup cannot be joined.
    #[error("cannot open {path:?}: {source}; the cgroup of the guest is gone or not ours (are you root?)")]
    Cgroup {
        /// Path of the `cgroup.procs` file.
        path: PathBuf,
        /// Error of the kernel.
        source: io::Error,
    },
    /// The QEMU process could not be started.
    #[error(
        "cannot start QEMU for guest {name} in the cgroups {cgroups:?}: {source}; a cgroup that vanished gives ENODEV, a full pids limit EAGAIN"
    )]
    Spawn {
        /// Name of the guest.
        name: String,
        /// The `cgroup.procs` files to join.
        cgroups: Vec<PathBuf>,
        /// Error of the kernel.
        source: io::Error,
    },
    /// A guest of this name already runs in this directory.
    #[error("a guest named {name} already runs in {run_dir:?}; end it with `rtvirtio-lab down`")]
    Busy {
        /// Name of the guest.
        name: String,
        run_dir: PathBuf,
    },
    /// QEMU has ended unexpectedly.
    #[error("guest {name} is gone ({status}){log}")]
    Gone {
        /// Name of the guest.
        name: String,
        /// Exit status of the process, or `ended`.
        status: String,
        /// End of its output, line by line, or nothing.
        log: String,
    },
    /// QEMU runs, but the guest is paused.
    #[error("guest {name} does not run: QEMU reports {status:?}; if it was started with KVM, try TCG{log}")]
    Paused {
        /// Name of the guest.
        name: String,
        /// Run state that QEMU reports.
        status: String,
        /// End of its output.
        log: String,
    },
    /// The guest runs, but its agent does not answer.
    #[error("guest {name} has not finished booting within {} s; is the host overloaded?{log}", waited.as_secs())]
    NoAgent {
        /// Name of the guest.
        name: String,
        /// Timeout that was exceeded.
        waited: Duration,
        /// End of its output.
        log: String,
    },
    /// An exchange with QEMU or the agent failed, and the guest still runs.
    #[error("guest {name}: {source}")]
    Vmm {
        /// Name of the guest.
        name: String,
        /// Error of the monitor or the agent.
        source: VmmError,
    },
    /// A migration failed, was cancelled or did not end.
    #[error("guest {name} is not migrated: {state}")]
    Migration {
        /// Name of the guest.
        name: String,
        /// State of the migration, as QEMU says it.
        state: String,
    },
    /// QEMU does not end after SIGKILL.
    #[error(
        "QEMU of guest {name} (pid {pid}) does not end, not even by SIGKILL: it waits for its disk in the kernel; end what serves that disk"
    )]
    Stuck {
        /// Name of the guest.
        name: String,
        /// Process id of QEMU.
        pid: u32,
    },
    /// A file cannot be accessed.
    #[error("cannot {operation} {path:?}: {source}")]
    Io {
        /// Operation that failed, as a verb.
        operation: &'static str,
        path: PathBuf,
        /// Error of the kernel.
        source: io::Error,
    },
}

impl QemuError {
    pub(crate) fn gone(name: &str) -> QemuError {
        QemuError::Gone { name: name.to_owned(), status: "ended".into(), log: String::new() }
    }
}
