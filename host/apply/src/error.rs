//! Why nothing was applied, or why it was put back.

use std::io;
use std::path::PathBuf;

use rtvirtio_kernel::HostError;

use crate::outcome::Reverted;
use crate::readable::Readable;

/// A plan that was not applied, or a journal that could not be used.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// The plan cannot act as it stands; nothing was touched.
    #[error("{knob} cannot be applied: {why}; {remedy}")]
    CannotAct {
        /// The setting, as users know it.
        knob: String,
        /// Why it would have no effect, or another one than meant.
        why: String,
        /// What to do.
        remedy: String,
    },
    /// The host is not as the plan needs it; nothing was touched.
    #[error(transparent)]
    Host(#[from] HostError),
    /// A knob could not be read before the first write; nothing was touched.
    #[error("cannot read {label}: {source}{hint}")]
    Capture {
        /// The knob's file.
        label: String,
        /// Why not.
        source: io::Error,
        /// What to do, ready to be appended.
        hint: String,
    },
    /// A knob's file has a form that is not known; nothing was touched.
    #[error("{label} holds `{text}`, which is not understood; please report this kernel's form")]
    Form {
        /// The knob's file.
        label: String,
        /// Its content.
        text: String,
    },
    /// The kernel refused a value.
    #[error("the kernel refuses `{value}` for {label}: {source}")]
    Refused {
        /// The knob's file.
        label: String,
        /// What was written.
        value: String,
        /// Why not.
        source: io::Error,
    },
    /// The kernel took a value and shows another.
    #[error(
        "{label} was set to `{wanted}` but shows `{found}`: the kernel, or another program, keeps it from being set"
    )]
    ReadBack {
        /// The knob's file.
        label: String,
        /// What was written.
        wanted: String,
        /// What it shows.
        found: String,
    },
    /// Another program changed a knob while the plan was being applied.
    #[error(
        "{label} changed from `{was}` to `{found}` while the plan was being applied: stop the other program and try again"
    )]
    Raced {
        /// Position of the write.
        entry: usize,
        /// The knob's file.
        label: String,
        /// Captured value.
        was: String,
        /// Value just before the write.
        found: String,
    },
    /// The caller asked to stop.
    #[error("interrupted")]
    Interrupted,
    /// Applying failed half way; what was done has been undone as far as possible.
    #[error("{cause}; {}", .rollback.summary())]
    RolledBack {
        /// What failed.
        cause: Box<ApplyError>,
        /// What became of each knob.
        rollback: Reverted,
    },
    /// Applying failed, and undoing it failed before it could begin; the journal is still there.
    #[error("{cause}; putting back failed too: {rollback}; run `rtvirtio revert`")]
    RollbackFailed {
        /// What failed first.
        cause: Box<ApplyError>,
        /// What failed then.
        rollback: Box<ApplyError>,
    },
    /// An earlier plan is in force.
    #[error("a plan is already in force (journal {path}): run `rtvirtio revert` first")]
    InForce {
        /// The journal.
        path: PathBuf,
    },
    /// There is nothing that could be added to.
    #[error("nothing is in force: `rtvirtio apply` first")]
    NothingInForce,
    /// What is in force was cut off, is being or has been put back but for conflicts, or the host
    /// was restarted since.
    #[error("what is in force is not whole (journal {path}): run `rtvirtio revert`, then apply again")]
    NotWhole {
        /// The journal.
        path: PathBuf,
    },
    /// Another rtvirtio is at work.
    #[error("another rtvirtio{} holds {path}: wait for it, or stop it", holder(*.pid))]
    Locked {
        /// The lock file.
        path: PathBuf,
        /// Its process id, when it has written it.
        pid: Option<u32>,
    },
    /// The journal cannot be trusted; nothing was touched, and the file is kept as it is.
    #[error(
        "the journal {path} is damaged: {why}; no knob was touched, and the file is kept. Restore by hand (`rtvirtio status` lists the \
         commands for what can be read of it), or reboot (the kernel then has its defaults), and then move the file away"
    )]
    BadJournal {
        /// The journal.
        path: PathBuf,
        /// What is wrong.
        why: String,
        /// What can still be read of it, with the commands that would restore it. Not part of the
        /// error's text.
        readable: Readable,
    },
    /// The journal was written by another version; nothing was touched.
    #[error(
        "the journal {path} has form `{found}`, this rtvirtio knows `{known}`: run `revert` with the version that applied the plan"
    )]
    OtherVersion {
        /// The journal.
        path: PathBuf,
        /// Its schema.
        found: String,
        /// Ours.
        known: &'static str,
    },
    /// Another user could have changed what is in the state directory, or can make root write
    /// elsewhere.
    #[error(
        "the state directory {path} cannot be trusted: {why}; choose another one with --state-dir, or, when everything in it is yours, \
         `chown {} {path}` and `chmod go-w {path}`",
        rustix::process::geteuid().as_raw()
    )]
    UntrustedState {
        /// The directory.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The state directory could not be used.
    #[error("cannot {action} {path}: {source}{}", state_hint(source))]
    State {
        /// What was tried.
        action: &'static str,
        /// Which file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

impl ApplyError {
    /// What can be read of the journal that cannot be trusted, when that is what is wrong here.
    #[must_use]
    pub fn readable(&self) -> Option<&Readable> {
        match self {
            Self::BadJournal { readable, .. } => Some(readable),
            Self::RollbackFailed { cause, rollback } => cause.readable().or_else(|| rollback.readable()),
            Self::RolledBack { cause, .. } => cause.readable(),
            _ => None,
        }
    }
}

fn holder(pid: Option<u32>) -> String {
    pid.map_or_else(String::new, |pid| format!(" (process {pid})"))
}

fn state_hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => " (free some space there)",
        io::ErrorKind::PermissionDenied => " (run as root, or choose another state directory)",
        io::ErrorKind::ReadOnlyFilesystem => " (choose a state directory that can be written)",
        _ => "",
    }
}
