//! Latency histograms of every disk.

use rtvirtio_domain_config::CapConfig;
use rtvirtio_domain_protocol::histograms::{DirectionHistogram, DiskHistograms, Histograms, VERSION};

use crate::engine::{Command, VmStatus};
use crate::running::Running;

fn has_cap(cap: CapConfig) -> bool {
    cap.requests.is_some() || cap.bytes.is_some() || cap.share.is_some()
}

fn direction(vm: &VmStatus, i: usize) -> DirectionHistogram {
    DirectionHistogram {
        requests: vm.counters.completed[i],
        bytes: vm.counters.bytes[i],
        cap_hits: vm.counters.cap_hits[i],
        latencies: vm.latencies[i].snapshot().iter().map(|(latency, n)| (latency.0, n)).collect(),
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
            for (vm, member) in places.iter_enumerated() {
                let Some(member) = member else { continue };
                let Ok(Some(status)) = handle.ask(|reply| Command::VmStatus { vm, reply }) else { continue };
                let disk = device.disks.iter().find(|disk| disk.name == member.name());
                disks.push(DiskHistograms {
                    device: name.clone(),
                    name: member.name().to_owned(),
                    peer: member.server.peer(),
                    capped: disk.map_or([false; 2], |d| [d.read_cap, d.write_cap].map(has_cap)),
                    read: direction(&status, 0),
                    write: direction(&status, 1),
                });
            }
        }
        Histograms { version: VERSION, disks }
    }
}
