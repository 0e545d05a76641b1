//! Latency histograms of every disk, for a program that judges targets over windows of its own: the
//! difference of two replies is what came in between.

use serde::Serialize;

use crate::config::CapConfig;
use crate::engine::{Command, VmStatus};
use crate::running::Running;

/// Version of the reply: fields may be added, none is removed or changes its meaning.
pub const VERSION: u32 = 1;

/// One direction of one disk, since it is served.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DirectionHistogram {
    /// Requests completed.
    pub requests: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// Pieces that waited for a cap.
    pub cap_hits: u64,
    /// Latencies from fetch to completion in ns, rising, each with its requests; rounded up by less
    /// than 1 %.
    pub latencies: Vec<(u64, u64)>,
}

/// One disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DiskHistograms {
    /// Its device.
    pub device: String,
    /// Its name.
    pub name: String,
    /// The process of the QEMU that is connected; `null` where it is not known.
    pub peer: Option<u32>,
    /// Whether its reads or writes have a cap.
    pub capped: [bool; 2],
    /// Reads.
    pub read: DirectionHistogram,
    /// Writes, flushes, discards.
    pub write: DirectionHistogram,
}

/// All disks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Histograms {
    /// [`VERSION`].
    pub version: u32,
    /// The disks.
    pub disks: Vec<DiskHistograms>,
}

fn has_cap(cap: CapConfig) -> bool {
    cap.requests.is_some() || cap.bytes.is_some() || cap.share.is_some()
}

fn direction(vm: &VmStatus, i: usize) -> DirectionHistogram {
    DirectionHistogram {
        requests: vm.counters.completed[i],
        bytes: vm.counters.bytes[i],
        cap_hits: vm.counters.cap_hits[i],
        latencies: vm.latencies[i].iter().map(|(latency, n)| (latency.0, n)).collect(),
    }
}

impl Running {
    /// The histograms of all disks. Each disk is a command of its own: an engine serves guests in
    /// between.
    #[must_use]
    pub fn histograms(&self) -> Histograms {
        let mut disks = Vec::new();
        let state = self.state();
        let devices = self.engines().iter().zip(&state.places).zip(&state.file.devices);
        for (((name, handle), places), device) in devices {
            for (vm, member) in places.iter().enumerate() {
                let Some(member) = member else { continue };
                let Ok(Some(status)) = handle.ask(|reply| Command::VmStatus { vm, reply }) else { continue };
                let disk = device.disks.iter().find(|disk| disk.name == member.name());
                disks.push(DiskHistograms {
                    device: name.clone(),
                    name: member.name().to_owned(),
                    peer: member.server().peer(),
                    capped: disk.map_or([false; 2], |d| [d.read_cap, d.write_cap].map(has_cap)),
                    read: direction(&status, 0),
                    write: direction(&status, 1),
                });
            }
        }
        Histograms { version: VERSION, disks }
    }
}
