//! Urgent requests of a VM's disks in the I/O domain, signalled to what follows the VM's urgency.

use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use rtvirtio_engine::handover::send_descriptors;
use rustix::event::{EventfdFlags, eventfd};
use serde_json::{Value, json};

use super::client::{self, ask, connect, listener};
use super::process;
use crate::dirs::Dirs;
use crate::error::{Context as _, Result};

/// An eventfd that the I/O domain signals before it interrupts a VM for a real-time request.
#[derive(Debug)]
pub struct UrgentSignals {
    /// QEMU's process.
    pid: u32,
    eventfd: OwnedFd,
    dirs: Dirs,
    /// What was asked for last: where, and which disks.
    asked: Option<(PathBuf, Vec<String>)>,
}

impl UrgentSignals {
    /// For the VM of this process; the second descriptor is read by what follows its urgency.
    ///
    /// # Errors
    /// When the kernel has no descriptor left.
    pub fn new(pid: u32, dirs: &Dirs) -> Result<(Self, OwnedFd)> {
        let eventfd = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).context("an eventfd")?;
        let to_read = eventfd.try_clone().context("an eventfd")?;
        Ok((Self { pid, eventfd, dirs: dirs.clone(), asked: None }, to_read))
    }

    /// Asks the I/O domain that runs, if any, for the disks that the VM has there now. To be called
    /// again and again: a domain that was started anew, and a disk that was attached, know nothing
    /// of it. Returns the names of the disks.
    ///
    /// # Errors
    /// When the domain does not answer, or refuses.
    pub fn renew(&mut self) -> Result<&[String]> {
        let control = match process::control(&self.dirs.state) {
            Ok(Some(control)) => control,
            Ok(None) => self.dirs.run.join("iod.sock"),
            Err(e) => return Err(e),
        };
        if listener(&control)?.is_none() {
            self.asked = None;
            return Ok(&[]);
        }
        let disks = disks_of(&ask(&control)?, self.pid);
        if !disks.is_empty() {
            signal(&control, &disks, Some(&self.eventfd))?;
        }
        Ok(&self.asked.insert((control, disks)).1)
    }
}

impl Drop for UrgentSignals {
    fn drop(&mut self) {
        if let Some((control, disks)) = &self.asked {
            // A domain that has gone signals nothing.
            let _ = signal(control, disks, None);
        }
    }
}

/// The disks of a domain's status to which this process is connected.
fn disks_of(status: &Value, pid: u32) -> Vec<String> {
    let vms = status["vms"].as_array().map(Vec::as_slice).unwrap_or_default();
    let ours = vms.iter().filter(|vm| vm["peer"].as_u64() == Some(u64::from(pid)));
    ours.filter_map(|vm| vm["name"].as_str().map(str::to_owned)).collect()
}

/// Asks for signals of these disks; without an eventfd, for none more.
fn signal(control: &Path, disks: &[String], eventfd: Option<&OwnedFd>) -> Result<()> {
    let stream = connect(control)?;
    if let Some(eventfd) = eventfd {
        send_descriptors(&stream, &[eventfd.as_fd()])?;
    }
    let request = json!({ "command": "signal_urgent", "disks": disks });
    let reply = client::request(&stream, control, &request, client::PATIENCE)?;
    client::refused(&reply).with_context(|| control.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_disks_of_a_process_are_found() {
        let status = json!({ "vms": [
            { "name": "a", "peer": 7 }, { "name": "b", "peer": null }, { "name": "c", "peer": 7 }, { "name": "d" },
        ] });
        assert_eq!(disks_of(&status, 7), ["a", "c"]);
        assert!(disks_of(&status, 8).is_empty() && disks_of(&Value::Null, 7).is_empty());
    }
}
