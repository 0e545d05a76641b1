//! Errors of applying, putting back and reading the journal.

use std::io;
use std::path::PathBuf;

use rtvirtio_kernel::HostError;

use crate::outcome::Reverted;
use crate::readable::Readable;

/// A plan that was not applied, or a journal that could not be used. `label` is the path of the
/// file of a knob, after `VM:` inside a guest.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// The plan cannot act as it stands; nothing was touched.
    #[error("{knob} cannot be applied: {why}; {remedy}")]
    CannotAct {
        knob: String,
        /// Reason why it would have no effect, or another one than meant.
        why: String,
        remedy: String,
    },
    /// The host is not as the plan needs it; nothing was touched.
    #[error(transparent)]
    Host(#[from] HostError),
    /// A knob could not be read before the first write; nothing was touched.
    #[error("cannot read {label}: {source}{hint}")]
    Capture {
        label: String,
        source: io::Error,
        /// Remedy, to be appended to the text; may be empty.
        hint: String,
    },
    /// A knob's file has a form that is not known; nothing was touched.
    #[error("{label} holds `{text}`, which is not understood; please report this kernel's form")]
    Form { label: String, text: String },
    /// The kernel refused a value.
    #[error("the kernel refuses `{value}` for {label}: {source}")]
    Refused { label: String, value: String, source: io::Error },
    /// The kernel took a value and shows another.
    #[error(
        "{label} was set to `{wanted}` but shows `{found}`: the kernel, or another program, keeps it from being set"
    )]
    ReadBack { label: String, wanted: String, found: String },
    /// A knob was changed by another program while the plan was being applied.
    #[error(
        "{label} changed from `{was}` to `{found}` while the plan was being applied: stop the other program and try again"
    )]
    Raced {
        entry: usize,
        label: String,
        /// Value captured before the first write.
        was: String,
        /// Value just before the write.
        found: String,
    },
    /// A setting that another program has changed could not be left to it: what gives it to systemd
    /// could not be put back.
    #[error("`{value}` for {label}: {why}; the setting is not left to the other program yet")]
    NotLeft {
        label: String,
        value: String,
        /// Error of the write, or what stands against it.
        why: String,
    },
    /// The caller asked to stop.
    #[error("interrupted")]
    Interrupted,
    /// Applying failed half way; what was done has been undone as far as possible.
    #[error("{cause}; {}", .rollback.summary())]
    RolledBack {
        cause: Box<ApplyError>,
        /// Fate of each knob.
        rollback: Reverted,
    },
    /// Applying failed, and undoing it failed before it could begin; the journal is still there.
    #[error("{cause}; putting back failed too: {rollback}; run `rtvirtio revert`")]
    RollbackFailed { cause: Box<ApplyError>, rollback: Box<ApplyError> },
    /// An earlier plan is in force.
    #[error("a plan is already in force (journal {path}): run `rtvirtio revert` first")]
    InForce { path: PathBuf },
    /// There is nothing that could be added to.
    #[error("nothing is in force: `rtvirtio apply` first")]
    NothingInForce,
    /// The journal in force is incomplete: its apply was cut off, its revert has begun or left
    /// conflicts, or the host was restarted since.
    #[error("what is in force is not whole (journal {path}): run `rtvirtio revert`, then apply again")]
    NotWhole { path: PathBuf },
    /// The lock of the state directory is held by another rtvirtio process.
    #[error("another rtvirtio{} holds {path}: wait for it, or stop it", holder(*.pid))]
    Locked {
        path: PathBuf,
        /// Process id of the holder, when it has written it.
        pid: Option<u32>,
    },
    /// The journal cannot be trusted; nothing was touched, and the file is kept as it is.
    #[error(
        "the journal {path} is damaged: {why}; no setting was touched, and the file is kept. Restore by hand (`rtvirtio status` lists the \
         commands for what can be read of it), or reboot (the kernel then has its defaults), and then move the file away"
    )]
    BadJournal {
        path: PathBuf,
        /// Damage found, with control characters escaped.
        why: String,
        /// Entries that can still be read, with the commands that would restore them. Not part of
        /// the error's text.
        readable: Readable,
    },
    /// The journal was written by another version; nothing was touched.
    #[error(
        "the journal {path} has form `{found}`, this rtvirtio knows `{known}`: run `revert` with the version that applied the plan"
    )]
    OtherVersion {
        path: PathBuf,
        /// Schema in the journal, escaped.
        found: String,
        /// Schema that this version reads.
        known: &'static str,
    },
    /// The state directory could be changed by another user, or lead root to write elsewhere.
    #[error(
        "the state directory {path} cannot be trusted: {why}; choose another one with --state-dir, or, when everything in it is yours, \
         `chown {} {path}` and `chmod go-w {path}`",
        rustix::process::geteuid().as_raw()
    )]
    UntrustedState {
        /// Path as the caller gave it.
        path: PathBuf,
        /// Reason, such as its owner or mode.
        why: String,
    },
    /// The state directory could not be used.
    #[error("cannot {action} {path}: {source}{}", state_hint(source))]
    State {
        /// Verb of the failed operation, such as `open`.
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
}

impl ApplyError {
    /// Entries that can still be read, when the error is or contains `BadJournal`.
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
