//! End of the process in bounded time: a device that completes nothing would hold it up for good.

use std::io;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;

use rtvirtio_sched::{IndexVec, VmId};

use crate::confine::{Confine, Role};
use crate::disk::Member;
use crate::log::write_line;
use crate::network::RunningNetwork;
use crate::running::Running;

/// Disks and ports whose servers are closed, with the names of their devices and networks.
/// Dropping them waits until nothing of them is in flight.
#[derive(Debug, Default)]
pub(crate) struct Closed {
    pub(crate) devices: Vec<(String, IndexVec<VmId, Option<Member>>)>,
    pub(crate) networks: Vec<(String, RunningNetwork)>,
}

impl Closed {
    /// Devices and networks of which something is in flight still, with their disks and ports.
    pub(crate) fn unended(&self) -> Vec<String> {
        let mut all = Vec::new();
        for (device, places) in &self.devices {
            let left = places.iter().flatten().filter(|disk| !disk.server.has_ended());
            let left: Vec<&str> = left.map(Member::name).collect();
            if !left.is_empty() {
                all.push(format!("device {device} (disks: {})", left.join(", ")));
            }
        }
        for (network, running) in &self.networks {
            let left = running.members().filter(|(_, port)| !port.server.has_ended());
            let left: Vec<&str> = left.map(|(_, port)| port.name.as_str()).collect();
            if !left.is_empty() {
                all.push(format!("network {network} (ports: {})", left.join(", ")));
            }
        }
        all
    }
}

/// Limit for the end of the process.
#[derive(Debug)]
pub struct EndLimit {
    begin: SyncSender<()>,
}

impl EndLimit {
    /// Starts the thread that ends the process `limit` after [`Self::begin`], unless it has ended by
    /// itself before: requests that a device has not completed are left to it.
    ///
    /// # Errors
    /// The thread cannot be started or confined.
    pub fn start(running: Running, limit: Duration, confine: &Confine) -> io::Result<Self> {
        let (begin, begun) = sync_channel(1);
        let watch = move || {
            if begun.recv().is_ok() {
                std::thread::sleep(limit);
                lines(&running.unended(), limit).iter().for_each(write_line);
                // As asked for: a service manager must not start it again.
                std::process::exit(0);
            }
        };
        confine.spawn("iod-end", Role::Control, watch)?;
        Ok(Self { begin })
    }

    /// Begins the time.
    pub fn begin(&self) {
        // Fails only where the thread has ended, which it does with the process.
        let _ = self.begin.send(());
    }
}

fn lines(unended: &[String], limit: Duration) -> Vec<String> {
    let seconds = limit.as_secs();
    if unended.is_empty() {
        return vec![format!("an engine has not ended within {seconds} s: the process ends without it")];
    }
    let line = |what: &String| {
        format!(
            "{what}: requests at it have not ended within {seconds} s, and the process ends without them; whether they \
             were carried out is not known, and front ends that track them have them in flight at the next start"
        )
    };
    unended.iter().map(line).collect()
}
