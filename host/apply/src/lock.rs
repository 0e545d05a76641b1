//! Exclusive lock of the state directory: one rtvirtio process at a time.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, Write as _};

use rtvirtio_kernel::flock;

use crate::error::ApplyError;
use crate::state_dir::StateDir;

/// Name of the lock file in the state directory. The file stays; the flock ends with the process.
pub const LOCK_FILE: &str = "lock";

/// Opens the file of the lock.
pub(crate) fn open(dir: &StateDir) -> Result<File, ApplyError> {
    let path = dir.path().join(LOCK_FILE);
    dir.open_file(LOCK_FILE, 0o600).map_err(|source| ApplyError::State { action: "open", path, source })
}

/// Holds the lock until dropped.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

impl Lock {
    /// Takes the lock of a state directory.
    pub fn take(dir: &StateDir) -> Result<Self, ApplyError> {
        let path = dir.path().join(LOCK_FILE);
        let failed = |action, source| ApplyError::State { action, path: path.clone(), source };
        let mut file = open(dir)?;
        match flock::lock(&file) {
            Ok(true) => {}
            Ok(false) => {
                let mut text = String::new();
                let pid = file.read_to_string(&mut text).ok().and_then(|_| text.trim().parse().ok());
                return Err(ApplyError::Locked { path, pid });
            }
            Err(e) => return Err(failed("lock", e)),
        }
        // The pid only serves the message to others: a full disk must not keep anyone from
        // reverting.
        let _ = record_pid(&mut file);
        Ok(Self { _file: file })
    }
}

fn record_pid(file: &mut File) -> io::Result<()> {
    file.set_len(0)?;
    file.rewind()?;
    writeln!(file, "{}", std::process::id())
}
