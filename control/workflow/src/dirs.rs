//! Paths of the files of an installation.

use std::path::{Path, PathBuf};

use rtvirtio_apply::{Session, StateDir};
use rtvirtio_kernel::{BlockDevice, Root};
use rtvirtio_spec::Device;
use sha2::{Digest as _, Sha256};

use crate::error::{Context as _, Result};

/// Bytes of a digest that are kept.
const DIGEST_BYTES: usize = 16;

/// The directories of an installation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dirs {
    /// Journal, lock, profiles, models.
    pub state: PathBuf,
    /// Sockets, and the list of VMs that a lab has started.
    pub run: PathBuf,
}

impl Dirs {
    /// State directory of the plan that the service holds.
    #[must_use]
    pub fn held_plan(&self) -> PathBuf {
        self.state.join("contracts").join("plan")
    }

    /// Directories of the plan that the service holds.
    pub(crate) fn of_held_plan(&self) -> Self {
        Self { state: self.held_plan(), run: self.run.clone() }
    }

    /// Path of a device's profile; the key is from [`profile_key`].
    #[must_use]
    pub fn profile(&self, key: &str) -> PathBuf {
        self.state.join("profiles").join(format!("{key}.json"))
    }

    /// Path of a device's learned model.
    #[must_use]
    pub fn model(&self, key: &str) -> PathBuf {
        self.state.join("models").join(format!("{key}.json"))
    }

    /// Path of the runs from which a device's model was learned.
    #[must_use]
    pub fn sweep(&self, key: &str) -> PathBuf {
        self.state.join("sweeps").join(format!("{key}.jsonl"))
    }

    /// Path of a VM's CPU profile.
    #[must_use]
    pub fn cpu_profile(&self, vm: &str) -> PathBuf {
        self.state.join("cpu-profiles").join(format!("{vm}.json"))
    }

    /// fio's files, while tasks run.
    #[must_use]
    pub fn fio(&self) -> PathBuf {
        self.run.join("fio")
    }

    /// Locks the run directory: only one rtvirtio at a time works on its VMs.
    ///
    /// # Errors
    /// [`Kind::InForce`](crate::Kind::InForce) with the holder's process.
    pub fn lock_vms(&self) -> Result<Session> {
        Ok(Session::open(&self.run)?)
    }
}

/// Name under which a device's profile is saved.
///
/// # Errors
/// When the device does not exist.
pub fn profile_key(device: &Device) -> Result<String> {
    Ok(match device {
        Device::Twin { profile, .. } => {
            let name = Path::new(profile)
                .file_stem()
                .map_or_else(|| profile.clone(), |s| s.to_string_lossy().into());
            format!("twin-{}", if profile.contains('/') { name } else { profile.clone() })
        }
        Device::File { path, .. } => {
            format!("file-{}", path.file_name().unwrap_or_default().to_string_lossy())
        }
        Device::Path(path) => BlockDevice::find(&Root::default(), path)?.name,
    })
}

/// First 16 bytes of the SHA-256 of a content, in hex.
pub(crate) fn digest(content: &[u8]) -> String {
    Sha256::digest(content).iter().take(DIGEST_BYTES).map(|byte| format!("{byte:02x}")).collect()
}

/// Writes a file of the state directory, or of a directory in it, so that a crash leaves the old or
/// the new one. No symbolic link is followed, and a directory that another user owns or can write
/// to is refused.
pub fn write_state(dir: &Path, name: &str, content: &[u8]) -> Result<()> {
    let path = dir.join(name);
    let dir = StateDir::open_or_create(dir)?;
    dir.replace(name, 0o644, content).with_context(|| format!("cannot write {}", path.display()))
}

/// Like [`write_state`] without a sync, for a file that is valid only with a journal written after
/// it: a killed process leaves the old or the new content, a crash of the host may lose both.
pub(crate) fn write_before_journal(dir: &StateDir, name: &str, content: &[u8]) -> Result<()> {
    let path = || format!("cannot write {}", dir.path().join(name).display());
    dir.replace_unsynced(name, 0o644, content).with_context(path)
}

/// Whether a path exists.
///
/// # Errors
/// When that is unknown, as without permission: this is not absence.
pub fn is_there(path: &Path) -> Result<bool> {
    path.try_exists().with_context(|| format!("cannot inspect {}: run it with sudo?", path.display()))
}
