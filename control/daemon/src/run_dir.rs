//! Lock and socket of the service in its run directory.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use rtvirtio_kernel::{flock, trusted};

use crate::error::DaemonError;

/// Name of the lock in the run directory.
pub(crate) const LOCK: &str = "rtvirtiod.lock";
/// The socket, in the run directory.
pub const SOCKET: &str = "rtvirtiod.sock";

/// Takes the lock of the run directory, for one service at a time. It ends with the process.
pub(crate) fn take_lock(run: &Path) -> Result<File, DaemonError> {
    let io = |action, path: &Path| {
        let path = path.to_owned();
        move |source| DaemonError::Io { action, path, source }
    };
    fs::create_dir_all(run).map_err(io("create", run))?;
    let path = run.join(LOCK);
    let file = trusted::lock_file(&path).map_err(io("open", &path))?;
    match flock::lock(&file) {
        Ok(true) => Ok(file),
        Ok(false) => Err(DaemonError::Runs { path }),
        Err(source) => Err(DaemonError::Io { action: "lock", path, source }),
    }
}

/// Whether a service runs on this run directory.
///
/// # Errors
/// When that is unknown.
pub(crate) fn runs(run: &Path) -> rtvirtio_workflow::Result<bool> {
    match trusted::open_lock(run.join(LOCK)) {
        Ok(file) => Ok(flock::is_held(&file)?),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// Path of the API socket in a run directory.
#[must_use]
pub fn socket(run: &Path) -> PathBuf {
    run.join(SOCKET)
}
