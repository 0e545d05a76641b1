//! Urgent requests and frames of a VM in the I/O domain, signalled to what follows the VM's
//! urgency.

use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use rtvirtio_engine::handover::send_descriptors;
use rustix::event::{EventfdFlags, eventfd};
use serde_json::{Value, json};

use super::client::{self, ask, connect, listener};
use super::process;
use crate::dirs::Dirs;
use crate::error::{Context as _, Result};

/// Names of a VM's disks and ports in an I/O domain.
#[derive(Debug, Default, PartialEq, Eq)]
struct Served {
    disks: Vec<String>,
    ports: Vec<String>,
}

/// An eventfd that the I/O domain signals before it interrupts a VM for a real-time request or an
/// urgent frame.
#[derive(Debug)]
pub struct UrgentSignals {
    /// QEMU's process.
    pid: u32,
    eventfd: OwnedFd,
    dirs: Dirs,
    /// What was asked for last, and where.
    asked: Option<(PathBuf, Served)>,
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

    /// Asks the I/O domain that runs, if any, for the disks and ports that the VM has there now. To
    /// be called again and again: a domain that was started anew, and a disk that was attached,
    /// know nothing of it.
    ///
    /// # Errors
    /// When the domain does not answer, or refuses.
    pub fn renew(&mut self) -> Result<()> {
        let control = match process::control(&self.dirs.state) {
            Ok(Some(control)) => control,
            Ok(None) => self.dirs.run.join("iod.sock"),
            Err(e) => return Err(e),
        };
        if listener(&control)?.is_none() {
            self.asked = None;
            return Ok(());
        }
        let served = served_to(&ask(&control)?, self.pid);
        if served == Served::default() {
            self.asked = None;
            return Ok(());
        }
        signal(&control, &served, Some(&self.eventfd))?;
        self.asked = Some((control, served));
        Ok(())
    }
}

impl Drop for UrgentSignals {
    fn drop(&mut self) {
        if let Some((control, served)) = &self.asked {
            // A domain that has gone signals nothing.
            let _ = signal(control, served, None);
        }
    }
}

/// The disks and ports of a domain's status to which this process is connected.
fn served_to(status: &Value, pid: u32) -> Served {
    let names = |list: &str| {
        let all = status[list].as_array().map(Vec::as_slice).unwrap_or_default();
        let ours = all.iter().filter(|one| one["peer"].as_u64() == Some(u64::from(pid)));
        ours.filter_map(|one| one["name"].as_str().map(str::to_owned)).collect()
    };
    Served { disks: names("vms"), ports: names("ports") }
}

/// Asks for signals of these; without an eventfd, for none more.
fn signal(control: &Path, served: &Served, eventfd: Option<&OwnedFd>) -> Result<()> {
    let stream = connect(control)?;
    if let Some(eventfd) = eventfd {
        send_descriptors(&stream, &[eventfd.as_fd()])?;
    }
    let Served { disks, ports } = served;
    let request = json!({ "command": "signal_urgent", "disks": disks, "ports": ports });
    let reply = client::request(&stream, control, &request, client::PATIENCE)?;
    client::refused(&reply).with_context(|| control.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_process_is_connected_to_is_found() {
        let status = json!({
            "vms": [
                { "name": "a", "peer": 7 }, { "name": "b", "peer": null }, { "name": "c", "peer": 7 }, { "name": "d" },
            ],
            "ports": [{ "name": "plc", "peer": 7 }, { "name": "hmi", "peer": 9 }],
        });
        let names = |all: &[&str]| all.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        assert_eq!(served_to(&status, 7), Served { disks: names(&["a", "c"]), ports: names(&["plc"]) });
        assert_eq!(served_to(&status, 9), Served { disks: names(&[]), ports: names(&["hmi"]) });
        assert_eq!(served_to(&status, 8), Served::default());
        assert_eq!(served_to(&Value::Null, 7), Served::default());
    }
}
