//! Signals of urgent requests and frames of a VM from the I/O domain to the thread that follows the
//! VM's urgency.

use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use rtvirtio_domain_protocol::{Command, Signalled, Status};
use rtvirtio_domain_resources::handover::send_descriptors;
use rustix::event::{EventfdFlags, eventfd};

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
    /// Process id of the VM's QEMU.
    pid: u32,
    eventfd: OwnedFd,
    dirs: Dirs,
    /// Control socket and names of the last request, to withdraw it.
    asked: Option<(PathBuf, Served)>,
}

impl UrgentSignals {
    /// For the VM of this process; the second descriptor is read by what follows its urgency.
    pub fn new(pid: u32, dirs: &Dirs) -> Result<(Self, OwnedFd)> {
        let eventfd = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).context("an eventfd")?;
        let to_read = eventfd.try_clone().context("an eventfd")?;
        Ok((Self { pid, eventfd, dirs: dirs.clone(), asked: None }, to_read))
    }

    /// Asks the I/O domain that runs, if any, for the disks and ports that the VM has there now. To
    /// be called periodically: an I/O domain that was restarted, and a disk that was attached, know
    /// nothing of it.
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
            // An I/O domain that has gone signals nothing.
            let _ = signal(control, served, None);
        }
    }
}

/// Disks and ports of an I/O domain's status to which this process is connected.
fn served_to(status: &Status, pid: u32) -> Served {
    let disks = status.vms.iter().filter(|vm| vm.peer == Some(pid)).map(|vm| vm.name.clone());
    let ports = status.ports.iter().filter(|port| port.peer == Some(pid)).map(|port| port.name.clone());
    Served { disks: disks.collect(), ports: ports.collect() }
}

/// Requests signals for these; without an eventfd, withdraws the request.
fn signal(control: &Path, served: &Served, eventfd: Option<&OwnedFd>) -> Result<()> {
    let stream = connect(control)?;
    if let Some(eventfd) = eventfd {
        send_descriptors(&stream, &[eventfd.as_fd()])?;
    }
    let Served { disks, ports } = served;
    let command = Command::SignalUrgent { disks: disks.clone(), ports: ports.clone() };
    let signalled: Result<Signalled> = client::request(&stream, control, &command, client::ANSWER_TIMEOUT);
    signalled.map(drop).with_context(|| control.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_process_is_connected_to_is_found() {
        let disk = |name: &str, peer: Option<u32>| {
            serde_json::json!({ "device": "d", "name": name, "socket": "", "connected": true, "attached": true,
                "peer": peer, "read": {}, "write": {}, "promises": [], "refused": null, "refused_requests": {} })
        };
        let port = |name: &str, peer: u32| {
            serde_json::json!({ "network": "n", "name": name, "socket": "", "mac": "", "connected": true,
                "attached": true, "peer": peer, "tx": {}, "rx": {}, "promises": [], "drops": {}, "refused": null,
                "throttled": null })
        };
        let status = serde_json::from_value(serde_json::json!({
            "version": 1, "devices": [], "networks": [],
            "vms": [disk("a", Some(7)), disk("b", None), disk("c", Some(7))],
            "ports": [port("plc", 7), port("hmi", 9)],
        }));
        let status: Status = status.unwrap();
        let names = |all: &[&str]| all.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        assert_eq!(served_to(&status, 7), Served { disks: names(&["a", "c"]), ports: names(&["plc"]) });
        assert_eq!(served_to(&status, 9), Served { disks: names(&[]), ports: names(&["hmi"]) });
        assert_eq!(served_to(&status, 8), Served::default());
        assert_eq!(served_to(&Status::default(), 7), Served::default());
    }
}
