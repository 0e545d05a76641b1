//! Latency histograms of every disk, for a program that judges targets over windows of its own: the
//! difference of two replies covers the time between them.

use serde::Serialize;

use crate::config::CapConfig;
use crate::engine::{Command, VmStatus};
use crate::running::Running;

/// Version of the reply: fields may be added, none is removed or changes its meaning.
pub const VERSION: u32 = 1;

/// Counters of one direction of a disk, since it is served.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DirectionHistogram {
    /// Completed requests since then.
    pub requests: u64,
    /// Bytes of completed requests.
    pub bytes: u64,
    /// Pieces that waited for a cap.
    pub cap_hits: u64,
    /// Latencies from fetch to completion in ns, rising, each with its requests; rounded up by less
    /// than 1 %.
    pub latencies: Vec<(u64, u64)>,
}

/// Histograms of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DiskHistograms {
    /// Name of the device.
    pub device: String,
    /// Name of the disk.
    pub name: String,
    /// The process of the QEMU that is connected; `null` where it is not known.
    pub peer: Option<u32>,
    /// Whether reads are capped, and whether writes are.
    pub capped: [bool; 2],
    /// Reads of the disk.
    pub read: DirectionHistogram,
    /// Writes, flushes and discards.
    pub write: DirectionHistogram,
}

/// Histograms of all disks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Histograms {
    /// The [`VERSION`] of this reply.
    pub version: u32,
    /// Disks in the order of their devices.
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
