//! A loop device on a file.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A loop device, detached when dropped.
#[derive(Debug)]
pub struct LoopDevice(pub PathBuf);

impl LoopDevice {
    /// Attaches a file; `None` where loop devices cannot be made.
    #[must_use]
    pub fn attach(file: &Path) -> Option<Self> {
        Self::with_options(file, &[])
    }

    /// Attaches a file with logical blocks of another size, in bytes.
    #[must_use]
    pub fn with_blocks(file: &Path, bytes: u32) -> Option<Self> {
        Self::with_options(file, &["--sector-size", &bytes.to_string()])
    }

    /// Attaches a file with options of losetup.
    #[must_use]
    pub fn with_options(file: &Path, options: &[&str]) -> Option<Self> {
        let out = Command::new("losetup").args(["--find", "--show"]).args(options).arg(file).output().ok()?;
        out.status.success().then(|| Self(String::from_utf8_lossy(&out.stdout).trim().into()))
    }

    /// Sets the device to the current size of its file.
    pub fn update_size(&self) {
        let done = Command::new("losetup").arg("--set-capacity").arg(&self.0).status().expect("losetup");
        assert!(done.success());
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}
