//! A disk that completes no write for a while.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::{LoopDevice, Need};

/// Disk of 4 MiB that can be made to complete no write: a loop device whose file is on a file
/// system that is frozen then.
#[derive(Debug)]
pub struct StuckDisk {
    pub disk: LoopDevice,
    mount: PathBuf,
    _below: LoopDevice,
    _dir: tempfile::TempDir,
}

impl StuckDisk {
    /// Needs of [`Self::new`].
    pub const NEEDS: [Need; 4] =
        [Need::Root, Need::Program("mkfs.ext4"), Need::Program("fsfreeze"), Need::Program("losetup")];

    /// Makes a disk that works; `None` where no loop device or no file system can be made.
    #[must_use]
    pub fn new() -> Option<Self> {
        let dir = crate::tempdir().unwrap();
        let (image, mount) = (dir.path().join("image"), dir.path().join("mount"));
        std::fs::File::create(&image).unwrap().set_len(32 << 20).unwrap();
        std::fs::create_dir(&mount).unwrap();
        let below = LoopDevice::attach(&image)?;
        let is_mounted = run("mkfs.ext4", &["-q".as_ref(), below.0.as_os_str()])
            && run("mount", &[below.0.as_os_str(), mount.as_os_str()]);
        if !is_mounted {
            return None;
        }
        let file = mount.join("disk");
        std::fs::write(&file, vec![0; 4 << 20]).unwrap();
        let Some(disk) = LoopDevice::attach(&file) else {
            let _ = run("umount", &["--lazy".as_ref(), mount.as_os_str()]);
            return None;
        };
        Some(Self { disk, mount, _below: below, _dir: dir })
    }

    /// Lets it complete no write until [`Self::free`]; whether that is so.
    #[must_use]
    pub fn stick(&self) -> bool {
        run("fsfreeze", &["-f".as_ref(), self.mount.as_os_str()])
    }

    /// Lets it complete its writes.
    pub fn free(&self) {
        let _ = run("fsfreeze", &["-u".as_ref(), self.mount.as_os_str()]);
    }

    /// Directory of the disk in sysfs.
    #[must_use]
    pub fn sys(&self) -> PathBuf {
        PathBuf::from("/sys/block").join(self.disk.0.file_name().unwrap())
    }

    /// Whether it has requests in flight.
    #[must_use]
    pub fn has_requests(&self) -> bool {
        let text = std::fs::read_to_string(self.sys().join("inflight")).unwrap_or_default();
        text.split_whitespace().any(|count| count != "0")
    }
}

impl Drop for StuckDisk {
    fn drop(&mut self) {
        self.free();
        let _ = run("losetup", &["--detach".as_ref(), self.disk.0.as_os_str()]);
        let _ = run("umount", &["--lazy".as_ref(), self.mount.as_os_str()]);
    }
}

fn run(program: &str, args: &[&OsStr]) -> bool {
    let status = Command::new(program).args(args).stdout(Stdio::null()).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}
