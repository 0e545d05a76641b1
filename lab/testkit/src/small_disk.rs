//! A file system that can be full.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A file system of 256 KiB in memory, mounted over a directory. Unmounted when it is dropped.
#[derive(Debug)]
pub struct SmallDisk(PathBuf);

impl SmallDisk {
    /// Mounts it; the directory is made where there is none.
    ///
    /// # Panics
    /// Where it cannot be mounted.
    #[must_use]
    pub fn mount(dir: &Path) -> Self {
        fs::create_dir_all(dir).unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=256k,mode=0755", "rtvirtio-test"])
            .arg(dir)
            .status();
        assert!(mounted.unwrap().success());
        Self(dir.to_owned())
    }

    fn filler(&self) -> PathBuf {
        self.0.join("filler")
    }

    /// Takes up all the space that is left.
    pub fn fill(&self) {
        // Ends with the last byte that there is.
        let _ = fs::write(self.filler(), vec![0_u8; 1 << 20]);
    }

    /// Gives that space back.
    ///
    /// # Panics
    /// Where it was not filled.
    pub fn empty(&self) {
        fs::remove_file(self.filler()).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}
