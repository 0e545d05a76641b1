//! Loop devices: attached with direct I/O, found again, detached.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rtvirtio_kernel::{BlockDevice, Root};

use crate::twin::TwinError;

/// Longest time until the kernel has detached a device.
const STOP_DEADLINE: Duration = Duration::from_secs(5);

fn losetup(args: &[&str], path: &Path) -> Result<String, TwinError> {
    let loop_error = |message: String| TwinError::Loop { path: path.to_owned(), message };
    let out = Command::new("losetup").args(args).arg(path).output().map_err(|e| loop_error(e.to_string()))?;
    if out.status.success() {
        Ok(String::from_utf8_lossy(&out.stdout).trim().to_owned())
    } else {
        Err(loop_error(String::from_utf8_lossy(&out.stderr).trim().to_owned()))
    }
}

fn find(device: &Path) -> Option<(Root, BlockDevice)> {
    let root = Root::default();
    let device = BlockDevice::find(&root, device).ok()?;
    Some((root, device))
}

pub(crate) fn elevator_of(device: &Path) -> Option<String> {
    let (root, device) = find(device)?;
    Some(device.elevators(&root).ok()?.current)
}

/// Sets the elevator if possible: a device is detached in any case.
pub(crate) fn set_elevator(device: &Path, elevator: &str) {
    if let Some((root, device)) = find(device) {
        let _ = device.set_elevator(&root, elevator);
    }
}

pub(crate) fn attach(file: &Path) -> Result<PathBuf, TwinError> {
    losetup(&["--find", "--show", "--direct-io=on"], file).map(PathBuf::from)
}

/// Attaches without direct I/O, which memory file systems of older kernels lack.
pub(crate) fn attach_buffered(file: &Path) -> Result<PathBuf, TwinError> {
    losetup(&["--find", "--show"], file).map(PathBuf::from)
}

/// Detaches a device when its last user closes it.
pub(crate) fn detach_later(device: &Path) -> Result<(), TwinError> {
    losetup(&["--detach"], device).map(|_| ())
}

pub(crate) fn detach(device: &Path) -> Result<(), TwinError> {
    losetup(&["--detach"], device)?;
    // Detaching is asynchronous while another process has the device open.
    let backing =
        Path::new("/sys/block").join(device.file_name().unwrap_or_default()).join("loop/backing_file");
    let deadline = Instant::now() + STOP_DEADLINE;
    let there = || {
        backing.try_exists().map_err(|source| TwinError::Io {
            what: "look at",
            path: backing.clone(),
            source,
        })
    };
    while there()? {
        if Instant::now() > deadline {
            return Err(TwinError::Loop {
                path: device.to_owned(),
                message: "still in use after detaching".to_owned(),
            });
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// Loop devices whose backing file is `file`. From sysfs, because the file's own file system may be
/// dead.
pub(crate) fn loops_on(file: &Path) -> Result<Vec<PathBuf>, TwinError> {
    let failed = |path: &Path, source| TwinError::Io { what: "read", path: path.to_owned(), source };
    let block = Path::new("/sys/block");
    let mut loop_devices = Vec::new();
    for entry in fs::read_dir(block).map_err(|e| failed(block, e))? {
        let entry = entry.map_err(|e| failed(block, e))?;
        let backing = entry.path().join("loop/backing_file");
        match fs::read_to_string(&backing) {
            Ok(text) if Path::new(text.trim_end()) == file => {
                loop_devices.push(Path::new("/dev").join(entry.file_name()));
            }
            Ok(_) => {}
            // No loop device, or one that is detached at this moment.
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) if e.raw_os_error() == Some(rustix::io::Errno::NODEV.raw_os_error()) => {}
            Err(e) => return Err(failed(&backing, e)),
        }
    }
    Ok(loop_devices)
}
