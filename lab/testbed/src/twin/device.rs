//! A twin as a block device: its process, its mount and its loop device, made and removed together.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rtvirtio_units::Bytes;
use rustix::process::{Pid, Signal};
use serde::{Deserialize, Serialize};

use super::fs::FILE_NAME;
use crate::loops::{attach, detach, elevator_of, loops_on, set_elevator};
use rtvirtio_kernel::ProcessId;

/// Longest time until the twin's process has mounted.
const MOUNT_DEADLINE: Duration = Duration::from_secs(10);
/// Longest time until the twin's process has ended.
const STOP_DEADLINE: Duration = Duration::from_secs(5);

/// Reasons for which a twin could not be made or removed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TwinError {
    /// A file operation failed.
    #[error("cannot {what} {}: {source}", path.display())]
    Io { what: &'static str, path: PathBuf, source: io::Error },
    /// The twin's process ended before its file appeared.
    #[error("the twin's process ended before it served its file: {0}")]
    Ended(String),
    /// The twin's file did not appear in time.
    #[error("the twin's file {} did not appear within {}s", path.display(), MOUNT_DEADLINE.as_secs())]
    Late { path: PathBuf },
    /// An operation of `losetup` failed.
    #[error("losetup failed for {}: {message} (needs root and a free loop device: `modprobe loop`)", path.display())]
    Loop { path: PathBuf, message: String },
}

/// Parts of a twin, by which another process finds and removes it, also after a crash. Saved before
/// each part is made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TwinHandle {
    /// Directory of the FUSE mount.
    pub mount: PathBuf,
    /// Process that serves the FUSE file.
    pub process: Option<ProcessId>,
    /// Path of the loop device, such as `/dev/loop3`.
    pub device: Option<PathBuf>,
    /// Previous elevator of the loop device, which keeps its queue's settings when it is detached.
    pub elevator: Option<String>,
}

/// A running twin. Dropping it does not remove it: the lab's state owns it and calls
/// [`TwinHandle::remove`].
#[derive(Clone, Debug)]
pub struct TwinDevice {
    /// Path of the block device.
    pub path: PathBuf,
    pub size: Bytes,
}

impl TwinHandle {
    /// Starts the process, waits for its file and attaches a loop device to it. `save` is called
    /// with the handle before each part is made, so that a crash at any time leaves a handle that
    /// can remove all parts.
    ///
    /// `server` is the command that ends in [`super::serve`] with the same mount directory.
    ///
    /// # Errors
    /// [`TwinError`]; the parts made so far are removed.
    pub fn make(
        mount: &Path,
        size: Bytes,
        mut server: Command,
        log: &Path,
        save: &mut dyn FnMut(&Self) -> io::Result<()>,
    ) -> Result<(Self, TwinDevice), TwinError> {
        let mut handle = Self { mount: mount.to_owned(), process: None, device: None, elevator: None };
        let result = handle.build(&mut server, log, save);
        match result {
            Ok(path) => Ok((handle, TwinDevice { path, size })),
            Err(e) => {
                // The first error is reported; parts that cannot be removed stay in the saved
                // handle.
                let _ = handle.remove();
                Err(e)
            }
        }
    }

    fn build(
        &mut self,
        server: &mut Command,
        log: &Path,
        save: &mut dyn FnMut(&Self) -> io::Result<()>,
    ) -> Result<PathBuf, TwinError> {
        let err = |what, path: &Path| {
            let path = path.to_owned();
            move |source| TwinError::Io { what, path, source }
        };
        let mount = self.mount.clone();
        save(self).map_err(err("save the lab's state for", &mount))?;
        fs::create_dir_all(&mount).map_err(err("create", &mount))?;
        let out = fs::File::create(log).map_err(err("create", log))?;
        let mut child = server
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(out)
            .spawn()
            .map_err(err("start the twin's process for", &mount))?;
        // Without its start time it could not be ended later; it ends by itself when its standard
        // input is closed.
        self.process = ProcessId::find(child.id()).map_err(err("look at the twin's process for", &mount))?;
        save(self).map_err(err("save the lab's state for", &mount))?;
        // It mounts nothing before this, and ends with this process: if this process is killed
        // between its start and the line above, no unknown part is left.
        if let Some(mut go) = child.stdin.take() {
            // A server that has ended already is reported below.
            let _ = go.write_all(&[super::serve::GO]);
        }
        let file = mount.join(FILE_NAME);
        let deadline = Instant::now() + MOUNT_DEADLINE;
        while !file.exists() {
            if let Ok(Some(status)) = child.try_wait() {
                let log_text = fs::read_to_string(log).unwrap_or_default();
                return Err(TwinError::Ended(format!("{status}; {}", log_text.trim())));
            }
            if Instant::now() > deadline {
                return Err(TwinError::Late { path: file });
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let device = attach(&file)?;
        self.device = Some(device.clone());
        self.elevator = elevator_of(&device);
        save(self).map_err(err("save the lab's state for", &mount))?;
        Ok(device)
    }

    /// Makes the device slower than declared, by the factor that its process was started with, or
    /// as fast as declared again.
    pub fn set_slow(&self, slow: bool) -> Result<(), TwinError> {
        let signal = if slow { Signal::USR1 } else { Signal::USR2 };
        let pid = self.process.as_ref().filter(|process| process.is_alive());
        let pid = pid.and_then(|process| Pid::from_raw(i32::try_from(process.pid).ok()?));
        let gone = || TwinError::Ended("it does not run".to_owned());
        rustix::process::kill_process(pid.ok_or_else(gone)?, signal).map_err(|_| gone())
    }

    /// Removes loop device, mount and process; missing parts are no error. Safe to call again.
    pub fn remove(&mut self) -> Result<(), TwinError> {
        let file = self.mount.join(FILE_NAME);
        // Also devices that were attached just before a crash, before the handle was saved with
        // them.
        for device in loops_on(&file)? {
            // Unknown after a crash at that moment: then the loop driver's own default.
            set_elevator(&device, self.elevator.as_deref().unwrap_or("none"));
            detach(&device)?;
        }
        self.device = None;
        if let Some(process) = self.process.clone() {
            process.stop(STOP_DEADLINE);
            self.process = None;
        }
        // After SIGKILL the dead mount stays; lazily, because a process may still hold it.
        if is_mounted(&self.mount)? {
            rustix::mount::unmount(&self.mount, rustix::mount::UnmountFlags::DETACH)
                .map_err(|e| TwinError::Io { what: "unmount", path: self.mount.clone(), source: e.into() })?;
        }
        match fs::remove_dir(&self.mount) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                Err(TwinError::Io { what: "remove", path: self.mount.clone(), source: e })
            }
            _ => Ok(()),
        }
    }
}

fn is_mounted(path: &Path) -> Result<bool, TwinError> {
    let mounts = Path::new("/proc/self/mountinfo");
    let table = fs::read_to_string(mounts).map_err(|source| TwinError::Io {
        what: "read",
        path: mounts.to_owned(),
        source,
    })?;
    Ok(table.lines().any(|line| line.split(' ').nth(4) == path.to_str()))
}
