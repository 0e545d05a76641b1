//! Errors of lab guests.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use rtvirtio_vmm::VmmError;

/// Why a guest could not be started, used or ended.
#[derive(Debug, thiserror::Error)]
pub enum QemuError {
    /// A name that cannot be used for files and threads.
    #[error(
        "guest name {name:?} is not usable; take 1 to 40 letters, digits, `-`, `_` or `.`, with a letter or digit first"
    )]
    Name {
        /// The name.
        name: String,
    },
    /// QEMU is not installed.
    #[error("{program} is not installed; install the package qemu-system-x86")]
    NoQemu {
        /// Its name.
        program: &'static str,
    },
    /// The disk cannot be used.
    #[error("disk {path:?} of guest {name}: {detail}")]
    Disk {
        /// The guest.
        name: String,
        /// The device or file.
        path: PathBuf,
        /// What is wrong, with the remedy.
        detail: String,
    },
    /// A cgroup cannot be joined.
    #[error("cannot open {path:?}: {source}; the cgroup of the guest is gone or not ours (are you root?)")]
    Cgroup {
        /// The `cgroup.procs` file.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The process could not be started.
    #[error(
        "cannot start QEMU for guest {name} in the cgroups {cgroups:?}: {source}; a cgroup that vanished gives ENODEV, a full pids limit EAGAIN"
    )]
    Spawn {
        /// The guest.
        name: String,
        /// The `cgroup.procs` files it was to join.
        cgroups: Vec<PathBuf>,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A guest of this name already runs in this directory.
    #[error("a guest named {name} already runs in {run_dir:?}; end it with `rtvirtio-lab down`")]
    Busy {
        /// The guest.
        name: String,
        /// The directory.
        run_dir: PathBuf,
    },
    /// QEMU has ended.
    #[error("guest {name} is gone ({status}){log}")]
    Gone {
        /// The guest.
        name: String,
        /// How its process ended.
        status: String,
        /// The end of its output, line by line, or nothing.
        log: String,
    },
    /// QEMU runs, the guest does not.
    #[error("guest {name} does not run: QEMU reports {status:?}; if it was started with KVM, try TCG{log}")]
    Paused {
        /// The guest.
        name: String,
        /// QEMU's run state.
        status: String,
        /// The end of its output.
        log: String,
    },
    /// The guest runs, its agent does not answer.
    #[error("guest {name} has not finished booting within {} s; is the host overloaded?{log}", waited.as_secs())]
    NoAgent {
        /// The guest.
        name: String,
        /// The time it had.
        waited: Duration,
        /// The end of its output.
        log: String,
    },
    /// An exchange with QEMU or the agent failed, and the guest lives.
    #[error("guest {name}: {source}")]
    Vmm {
        /// The guest.
        name: String,
        /// The failure.
        source: VmmError,
    },
    /// Not even SIGKILL ends it.
    #[error(
        "QEMU of guest {name} (pid {pid}) does not end, not even by SIGKILL: it waits for its disk in the kernel; end what serves that disk"
    )]
    Stuck {
        /// The guest.
        name: String,
        /// Its process.
        pid: u32,
    },
    /// A file of the run directory.
    #[error("cannot {operation} {path:?}: {source}")]
    Io {
        /// The failed step.
        operation: &'static str,
        /// To which file.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
}

impl QemuError {
    pub(crate) fn gone(name: &str) -> QemuError {
        QemuError::Gone { name: name.to_owned(), status: "ended".into(), log: String::new() }
    }
}
