//! A small file system, for tests of a full one.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A file system of 256 KiB in memory, mounted over a directory. Unmounted when it is dropped.
#[derive(Debug)]
pub struct SmallDisk(PathBuf);

impl SmallDisk {
    /// Mounts the file system; the directory is made if it does not exist.
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

    /// Uses up all free space.
    pub fn fill(&self) {
        // Ends with the last free byte.
        let _ = fs::write(self.filler(), vec![0_u8; 1 << 20]);
    }

    /// Frees that space again.
    pub fn empty(&self) {
        fs::remove_file(self.filler()).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}
