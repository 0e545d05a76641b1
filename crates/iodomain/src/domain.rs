//! All devices of a configuration, running.

use std::io;

use serde::Serialize;

use crate::backing::{Backing, BackingConfig, BackingError};
use crate::config::File;
use crate::engine::{self, Command, Engine, EngineConfig, EngineError, EngineHandle, VmStatus};
use crate::frontend::{DiskInfo, Frontend};

/// Why a domain does not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DomainError {
    /// A disk.
    #[error("disk \"{disk}\": {source}")]
    Disk {
        /// Which.
        disk: String,
        /// Why.
        source: BackingError,
    },
    /// Two disks on the same bytes.
    #[error(
        "disks \"{first}\" and \"{second}\" lie on the same part of one file, and at least one of them is written; give each its own part, or say `shared = true` for both if their guests know of each other"
    )]
    Overlap {
        /// One.
        first: String,
        /// The other.
        second: String,
    },
    /// An engine.
    #[error("device \"{device}\": {source}")]
    Engine {
        /// Which.
        device: String,
        /// Why.
        source: EngineError,
    },
    /// A socket.
    #[error("disk \"{disk}\": {source}")]
    Socket {
        /// Which.
        disk: String,
        /// Why.
        source: io::Error,
    },
}

/// A running domain; it ends when this is dropped.
#[derive(Debug)]
pub struct Domain {
    // Frontends end before the engines that they talk to.
    frontends: Vec<Frontend>,
    /// Files of which several disks are parts are locked once for all of them.
    _locks: Vec<std::fs::File>,
    engines: Vec<(String, Engine)>,
}

impl Domain {
    /// Opens all disks, then starts all engines, then listens.
    ///
    /// # Errors
    /// [`DomainError`]; nothing runs then.
    pub fn start(file: &File) -> Result<Self, DomainError> {
        let mut backings: Vec<Vec<Backing>> = Vec::new();
        for device in &file.devices {
            let mut disks: Vec<Backing> = Vec::new();
            for disk in &device.disks {
                // Disks of one file take its lock once; whether they collide is found out below.
                let mut config = BackingConfig::from(disk);
                config.shared |= file
                    .devices
                    .iter()
                    .flat_map(|d| &d.disks)
                    .any(|d| d.name != disk.name && d.path == disk.path);
                let backing = Backing::open(&config)
                    .map_err(|source| DomainError::Disk { disk: disk.name.clone(), source })?;
                disks.push(backing);
            }
            backings.push(disks);
        }
        let named = || {
            let disks = file.devices.iter().flat_map(|d| &d.disks);
            disks.zip(backings.iter().flatten()).enumerate()
        };
        for (i, (first, a)) in named() {
            for (_, (second, b)) in named().skip(i + 1) {
                let meant = first.shared && second.shared;
                if a.overlaps(b) && !meant && !(a.limits.read_only && b.limits.read_only) {
                    return Err(DomainError::Overlap {
                        first: first.name.clone(),
                        second: second.name.clone(),
                    });
                }
            }
        }
        let mut domain = Self { frontends: Vec::new(), _locks: locks(file)?, engines: Vec::new() };
        for (device, backings) in file.devices.iter().zip(backings) {
            let config = EngineConfig {
                name: device.name.clone(),
                cpus: device.cpus.clone(),
                fifo: device.fifo,
                poll: device.poll,
                pass_priority: device.pass_priority,
            };
            let infos = device.disks.iter().zip(&backings).enumerate().map(|(vm, (disk, b))| DiskInfo {
                name: disk.name.clone(),
                vm,
                limits: b.limits,
                block: b.block,
                queues: disk.queues,
                hugepages: disk.hugepages,
                socket: disk.socket.clone(),
            });
            let infos: Vec<DiskInfo> = infos.collect();
            let disks = device.disks.iter().zip(backings).map(|(disk, backing)| engine::Disk {
                name: disk.name.clone(),
                backing,
                serial: disk.serial.clone().unwrap_or_else(|| disk.name.clone()),
                queues: disk.queues,
            });
            let started = Engine::start(config, &device.sched(), disks.collect())
                .map_err(|source| DomainError::Engine { device: device.name.clone(), source })?;
            let handle = started.handle();
            domain.engines.push((device.name.clone(), started));
            for info in infos {
                let disk = info.name.clone();
                let frontend = Frontend::start(info, handle.clone())
                    .map_err(|source| DomainError::Socket { disk, source })?;
                domain.frontends.push(frontend);
            }
        }
        Ok(domain)
    }

    /// To ask the engines.
    #[must_use]
    pub fn handles(&self) -> Vec<(String, EngineHandle)> {
        self.engines.iter().map(|(name, e)| (name.clone(), e.handle())).collect()
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        self.frontends.clear();
        self.engines.clear();
    }
}

/// Locks of files that several disks are parts of.
fn locks(file: &File) -> Result<Vec<std::fs::File>, DomainError> {
    let mut by_path: std::collections::BTreeMap<_, Vec<_>> = std::collections::BTreeMap::new();
    for disk in file.devices.iter().flat_map(|d| &d.disks) {
        by_path.entry(&disk.path).or_default().push(disk);
    }
    let parted = by_path.values().filter(|disks| disks.len() > 1 && !disks.iter().all(|d| d.shared));
    parted
        .map(|disks| {
            let read_only = disks.iter().all(|d| d.read_only);
            crate::backing::lock_file(&disks[0].path, read_only)
                .map_err(|source| DomainError::Disk { disk: disks[0].name.clone(), source })
        })
        .collect()
}

/// One direction of one VM, for people and programs.
#[derive(Clone, Debug, Serialize)]
pub struct FlowReport {
    /// Requests answered.
    pub requests: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// Median latency in ns, from the guest's queue to the answer.
    pub p50_ns: u64,
    /// 99th percentile.
    pub p99_ns: u64,
    /// 99.99th percentile; the maximum where there are fewer than 10 000.
    pub p9999_ns: u64,
    /// Longest.
    pub max_ns: u64,
    /// alpha: bytes per second while it had something to ask.
    pub alpha_bytes_per_second: f64,
    /// Delta: longest time between two pieces while it had something to ask, in ns.
    pub delta_ns: u64,
    /// Pieces that had to wait for a cap.
    pub cap_hits: u64,
}

/// One VM.
#[derive(Clone, Debug, Serialize)]
pub struct VmReport {
    /// Its device.
    pub device: String,
    /// Its name.
    pub name: String,
    /// Whether a guest is attached.
    pub attached: bool,
    /// Requests that wait or run.
    pub outstanding: usize,
    /// Reads.
    pub read: FlowReport,
    /// Writes, flushes, discards.
    pub write: FlowReport,
    /// Pieces that went by their deadline.
    pub reserved: u64,
    /// Pieces that shared what was left.
    pub shared: u64,
    /// Requests that the device refused.
    pub errors: u64,
    /// Chains that were no requests.
    pub malformed: u64,
    /// Queues given up because the guest broke them.
    pub broken: u64,
}

/// One device.
#[derive(Clone, Debug, Serialize)]
pub struct DeviceReport {
    /// Its name.
    pub name: String,
    /// Pieces that it may hold now.
    pub window: u32,
    /// Pieces that a regulator held.
    pub held: u64,
    /// How much later than the exact moment such a piece went: median, in ns.
    pub late_p50_ns: u64,
    /// 99.99th percentile; the maximum where there are fewer than 10 000.
    pub late_p9999_ns: u64,
}

/// Everybody.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// The devices.
    pub devices: Vec<DeviceReport>,
    /// Their VMs.
    pub vms: Vec<VmReport>,
}

fn tail(l: &engine::Latencies) -> u64 {
    if l.n() < 10_000 { l.max().0 } else { l.at(99.99).0 }
}

fn vm_report(device: &str, vm: VmStatus) -> VmReport {
    let flow = |i: usize| {
        let (l, c) = (&vm.latencies[i], &vm.contracts[i]);
        FlowReport {
            requests: vm.counters.finished[i],
            bytes: vm.counters.bytes[i],
            p50_ns: l.at(50.0).0,
            p99_ns: l.at(99.0).0,
            p9999_ns: tail(l),
            max_ns: l.max().0,
            alpha_bytes_per_second: c.bytes_per_second,
            delta_ns: c.longest_gap_ns,
            cap_hits: vm.counters.hits[i],
        }
    };
    VmReport {
        device: device.to_owned(),
        attached: vm.queues > 0,
        outstanding: vm.outstanding,
        read: flow(0),
        write: flow(1),
        reserved: vm.counters.reserved,
        shared: vm.counters.shared,
        errors: vm.errors,
        malformed: vm.malformed,
        broken: vm.broken,
        name: vm.name,
    }
}

/// What all VMs got since the start.
#[must_use]
pub fn report(handles: &[(String, EngineHandle)]) -> Report {
    let mut all = Report::default();
    for (name, handle) in handles {
        let Ok(status) = handle.ask(|reply| Command::Status { reply }) else { continue };
        all.devices.push(DeviceReport {
            name: name.clone(),
            window: status.window,
            held: status.late.n(),
            late_p50_ns: status.late.at(50.0).0,
            late_p9999_ns: tail(&status.late),
        });
        all.vms.extend(status.vms.into_iter().map(|vm| vm_report(name, vm)));
    }
    all
}
