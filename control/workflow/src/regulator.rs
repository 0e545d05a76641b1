//! A spec's traffic limits as settings of regulators, on this host where they act here. Changes
//! nothing.

use std::path::{Path, PathBuf};

use rtvirtio_kernel::resctrl::{self, Maker, MemoryBandwidth, Offer, Resctrl, USUAL_MOUNT};
use rtvirtio_kernel::{Cgroups, Hierarchy, HostError, Root, Stack};
use rtvirtio_spec::{Device, HostHandle, HostSpec, Reach, Vm, VmDisk};
use rtvirtio_traffic::{
    Actuator, AxiPort, Cache, CompileError, Compiled, Direction, MemoryControl, Place, ResctrlPlace, Tspec,
    compile_among,
};
use rtvirtio_units::{Bytes, BytesPerSec};
use rtvirtio_vmm::threads;
use serde::Serialize;

use crate::controls::on_device;
use crate::dirs::Dirs;
use crate::error::{Kind, Result, bail, one_line};
use crate::find;
use crate::find::drives::MonitorTime;
use crate::uncovered::{self, Covered, Uncovered};

/// Choice of VMs and regulators, and values that this host cannot tell.
#[derive(Clone, Debug, Default)]
pub struct RegulatorOptions {
    /// Name of the only VM; `None` for all.
    pub vm: Option<String>,
    /// Only these; all when empty.
    pub actuators: Vec<Actuator>,
    /// The network interface of the VMs: `$TAP` without.
    pub interface: Option<String>,
    /// Memory bandwidth at 100 %, as measured.
    pub full_bandwidth: Option<BytesPerSec>,
    /// Ways of the L3 cache for each VM's group.
    pub ways: Option<u32>,
    /// The port of a QoS-400.
    pub port: Option<AxiPort>,
    /// Bytes of the largest unit of service: the largest request or frame.
    pub largest: Option<Bytes>,
}

/// Result for one direction and one actuator.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Settings, and what they keep.
    Compiled(Box<Compiled>),
    /// Not possible, and why.
    Refused {
        /// Actuator that cannot apply the limit.
        actuator: Actuator,
        /// Direction of the limit.
        direction: Direction,
        /// Reason, as text for the user.
        why: String,
    },
}

/// Regulator settings for one VM's limits.
#[derive(Clone, Debug, Serialize)]
pub struct VmRegulators {
    /// Name of the VM in the spec.
    pub vm: String,
    /// By direction, then by actuator.
    pub outcomes: Vec<Outcome>,
    /// Shell variables in the settings, each with the reason why its value is unknown.
    pub unknown: Vec<String>,
    /// I/O on which no limit of its cgroup acts now, while it runs.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub uncovered: Vec<Uncovered>,
}

/// Compiles every limit of a spec.
///
/// # Errors
/// [`Kind::Argument`] for a VM that is not there, and for a spec without limits; when what resctrl
/// shows cannot be read.
pub fn regulators(
    host: &HostSpec,
    options: &RegulatorOptions,
    root: &Root,
    dirs: &Dirs,
) -> Result<Vec<VmRegulators>> {
    if let Some(name) = options.vm.as_ref().filter(|name| !host.vms().iter().any(|vm| vm.name == **name)) {
        bail!(Argument, "the spec has no VM \"{name}\"");
    }
    let chosen = |vm: &&Vm| options.vm.as_ref().is_none_or(|name| vm.name == *name);
    let vms: Vec<&Vm> = host.vms().iter().filter(chosen).filter(|vm| !vm.traffic.is_none()).collect();
    if vms.is_empty() {
        bail!(
            Argument,
            "{}: add traffic = {{ rate = \"20MB/s\" }} to a [[vm]]",
            match &options.vm {
                Some(name) => format!("vm {name} has no `traffic`"),
                None => "no VM of the spec has `traffic`".to_owned(),
            }
        );
    }
    let offer = resctrl::find(root)?;
    vms.into_iter().map(|vm| of_vm(vm, host, options, root, &offer, dirs)).collect()
}

fn of_vm(
    vm: &Vm,
    host: &HostSpec,
    options: &RegulatorOptions,
    root: &Root,
    offer: &Offer,
    dirs: &Dirs,
) -> Result<VmRegulators> {
    let wanted: Vec<Actuator> = Actuator::ALL
        .into_iter()
        .filter(|a| options.actuators.is_empty() || options.actuators.contains(a))
        .collect();
    let mut here = Here { vm, host, options, root, offer, dirs, unknown: Vec::new() };
    let mut outcomes = Vec::new();
    let mut limits: Vec<(Direction, Tspec)> = Tspec::all(&vm.traffic).collect();
    for (_, tspec) in &mut limits {
        if let (Some(largest), rtvirtio_traffic::Unit::Bytes) = (options.largest, tspec.unit) {
            tspec.largest = largest.0;
            tspec.burst = tspec.burst.max(largest.0);
        }
    }
    for (direction, tspec) in limits.clone() {
        for &actuator in &wanted {
            // What was not asked for by name is left out where it never fits.
            let fits = match actuator {
                Actuator::IoMax | Actuator::ThrottleV1 | Actuator::Qemu => direction.is_disk(),
                Actuator::TcTbf | Actuator::TcHtb => !direction.is_disk(),
                Actuator::Qos400 => options.port.is_some(),
                Actuator::IoDomain | Actuator::Libvirt | Actuator::Resctrl => true,
            };
            if options.actuators.is_empty() && !fits {
                continue;
            }
            let compiled =
                here.place(actuator).and_then(|place| compile_among(&tspec, direction, &limits, &place));
            outcomes.push(match compiled {
                Ok(compiled) => Outcome::Compiled(Box::new(compiled)),
                Err(e) => Outcome::Refused { actuator, direction, why: e.to_string() },
            });
        }
    }
    let uncovered = here.uncovered();
    Ok(VmRegulators { vm: vm.name.clone(), outcomes, unknown: here.unknown, uncovered })
}

/// Finds the places of a VM's regulators; unknown ones become shell variables.
struct Here<'a> {
    vm: &'a Vm,
    host: &'a HostSpec,
    options: &'a RegulatorOptions,
    root: &'a Root,
    offer: &'a Offer,
    dirs: &'a Dirs,
    unknown: Vec<String>,
}

impl Here<'_> {
    fn or_variable(&mut self, variable: &str, found: std::result::Result<String, String>) -> String {
        found.unwrap_or_else(|why| {
            self.add_unknown(format!("${variable}: {why}"));
            format!("${variable}")
        })
    }

    fn add_unknown(&mut self, line: String) {
        if !self.unknown.contains(&line) {
            self.unknown.push(line);
        }
    }

    fn place(&mut self, actuator: Actuator) -> std::result::Result<Place, CompileError> {
        Ok(match actuator {
            Actuator::IoDomain => Place::IoDomain,
            Actuator::IoMax => {
                let (cgroup, dev) = (self.cgroup(Hierarchy::V2), self.dev());
                Place::IoMax { cgroup: self.or_variable("CGROUP", cgroup), dev: self.or_variable("DEV", dev) }
            }
            Actuator::ThrottleV1 => {
                let (cgroup, dev) = (self.cgroup(Hierarchy::V1), self.dev());
                let cgroup = self.or_variable("CGROUP_V1", cgroup);
                Place::ThrottleV1 { cgroup, dev: self.or_variable("DEV", dev) }
            }
            Actuator::TcTbf => Place::TcTbf { interface: self.interface() },
            Actuator::TcHtb => Place::TcHtb { interface: self.interface() },
            Actuator::Qemu => {
                let drive = self.drive();
                Place::Qemu { drive: self.or_variable("DRIVE", drive) }
            }
            Actuator::Libvirt => self.libvirt(),
            Actuator::Resctrl => Place::Resctrl(self.resctrl()?),
            Actuator::Qos400 => match &self.options.port {
                Some(port) => Place::Qos400(port.clone()),
                None => {
                    let what = "which regulator? give --soc, --master and --clock".to_owned();
                    return Err(CompileError::Missing { actuator, what });
                }
            },
        })
    }

    fn interface(&mut self) -> String {
        let found = self.options.interface.clone().ok_or_else(|| "the VM's tap: give --interface".to_owned());
        self.or_variable("TAP", found)
    }

    fn libvirt(&mut self) -> Place {
        let (domain, disk) = match &self.vm.reach {
            Reach::Existing { host: HostHandle::Domain(domain), disk, .. } => {
                let target = match disk {
                    Some(VmDisk::Target(target)) => Ok(target.clone()),
                    _ => Err("the disk's target in libvirt: give `disk` in the spec".to_owned()),
                };
                (Ok(domain.domain.clone()), target)
            }
            _ => {
                let other = "the VM is not named by libvirt in the spec".to_owned();
                (Err(other.clone()), Err(other))
            }
        };
        let domain = self.or_variable("DOMAIN", domain);
        let disk = self.or_variable("DISK", disk);
        Place::Libvirt { domain, disk, interface: self.interface() }
    }

    /// Path of QEMU's device whose drive is on the VM's only device.
    fn drive(&self) -> std::result::Result<String, String> {
        const ELSE: &str = "the `qdev` that QEMU's `query-block` shows of the disk";
        if matches!(&self.vm.reach, Reach::Existing { host: HostHandle::Domain(_), .. }) {
            return Err(format!("{ELSE}; libvirt keeps a record of its own: use --actuator libvirt"));
        }
        let vm = find::one_of_host(self.host.vms(), &self.vm.name, self.dirs).map_err(|e| one_line(&e))?;
        let drives =
            vm.drives(&MonitorTime::of_settings()).map_err(|e| format!("{ELSE}: {}", one_line(&e)))?;
        let drives = drives.ok_or_else(|| format!("{ELSE}: the VM is not named by its monitor"))?;
        let names: Vec<PathBuf> = self.paths().map(Path::to_owned).collect();
        match on_device(self.root, &names, &drives)[..] {
            [one] if !one.qdev.is_empty() => Ok(one.qdev.clone()),
            [_] => Err(format!("{ELSE}: no device of the guest has the drive")),
            [] => Err(format!("{ELSE}: none is found to lie on the device")),
            _ => Err(format!("{ELSE}: several lie on the device, set it for each")),
        }
    }

    /// The devices on which the VM has tasks.
    fn devices(&self) -> impl Iterator<Item = &Device> {
        let parts = self.host.parts().iter().filter(|part| part.spec.vm(&self.vm.name).is_some());
        parts.map(|part| &part.spec.device)
    }

    /// Paths of those that are no lab's.
    fn paths(&self) -> impl Iterator<Item = &Path> {
        self.devices().filter_map(|device| match device {
            Device::Path(path) => Some(path.as_path()),
            Device::Twin { .. } | Device::File { .. } => None,
        })
    }

    /// I/O on which no limit of its cgroup acts; empty while it does not run.
    fn uncovered(&self) -> Vec<Uncovered> {
        let look = || -> Result<Vec<Uncovered>> {
            let vm = find::one_of_host(self.host.vms(), &self.vm.name, self.dirs)?;
            let cgroups = Cgroups::detect(self.root)?;
            let (cgroup, pids) = (vm.io_cgroup(self.root, &cgroups)?, vm.pids()?);
            let charges_write_back = uncovered::charges_write_back(self.root, &cgroups, &cgroup)?;
            let devices: Vec<String> = self
                .paths()
                .map(|path| Ok(Stack::find(self.root, path)?.device.name))
                .collect::<Result<_>>()?;
            let of =
                Covered { vm: &vm.name, pids: &pids, devices: &devices, others: &[], charges_write_back };
            Ok(uncovered::scan(self.root, &of))
        };
        match (&self.vm.reach, look()) {
            (Reach::Lab(_), _) => Vec::new(),
            (_, Ok(found)) => found,
            // Limits of VMs that do not run are shown as well, and of devices that are not here.
            (_, Err(e)) if matches!(e.kind(), Kind::NotRunning | Kind::System) => Vec::new(),
            (_, Err(e)) => vec![Uncovered::unknown(&self.vm.name, &e)],
        }
    }

    /// `MAJ:MIN` of the VM's only device.
    fn dev(&self) -> std::result::Result<String, String> {
        let mut devices = self.devices();
        match (devices.next(), devices.next()) {
            (Some(Device::Path(path)), None) => {
                let stack = Stack::find(self.root, path).map_err(|e: HostError| one_line(&e))?;
                Ok(stack.device.dev)
            }
            (Some(Device::Path(_)), Some(_)) => Err("the VM has several devices: set it for each".to_owned()),
            _ => Err("the lab's device, while it is up".to_owned()),
        }
    }

    fn cgroup(&self, hierarchy: Hierarchy) -> std::result::Result<String, String> {
        let cgroups = Cgroups::detect(self.root).map_err(|e| one_line(&e))?;
        if cgroups.hierarchy != hierarchy {
            let (this, other) = match hierarchy {
                Hierarchy::V1 => ("v1", "v2"),
                Hierarchy::V2 => ("v2", "v1"),
            };
            return Err(format!("this host has block I/O on cgroup {other}, not {this}"));
        }
        let found = find::one_of_host(self.host.vms(), &self.vm.name, self.dirs)
            .and_then(|vm| vm.io_cgroup(self.root, &cgroups))
            .and_then(|cgroup| Ok(cgroups.dir(&cgroup)?));
        Ok(found.map_err(|e| one_line(&e))?.display().to_string())
    }

    /// Threads that work for the VM, those of the kernel too; what they start later is in their
    /// group from the beginning.
    fn tasks(&self) -> std::result::Result<Vec<u32>, String> {
        let handle = find::one_of_host(self.host.vms(), &self.vm.name, self.dirs)
            .and_then(|vm| vm.handle_under(self.root, &|_| ()));
        let threads = handle
            .map_err(|e| one_line(&e))
            .and_then(|handle| threads::discover(self.root, &handle).map_err(|e| one_line(&e)))?;
        if threads.is_empty() {
            return Err("it does not run".to_owned());
        }
        Ok(threads.iter().map(|thread| thread.tid).collect())
    }

    fn resctrl(&mut self) -> std::result::Result<ResctrlPlace, CompileError> {
        let missing =
            |what: &str| CompileError::Missing { actuator: Actuator::Resctrl, what: what.to_owned() };
        match self.offer {
            Offer::Absent => {
                Err(missing("this host has no resctrl: its CPU, its kernel or its hypervisor lacks it"))
            }
            Offer::NotMounted => {
                Err(missing(&format!("it is not mounted: mount -t resctrl resctrl {USUAL_MOUNT}")))
            }
            Offer::Mounted(found) => {
                let tasks = self.tasks().unwrap_or_else(|why| {
                    let vm = &self.vm.name;
                    self.add_unknown(format!("threads of {vm}, which go into the group's `tasks`: {why}"));
                    Vec::new()
                });
                Ok(ResctrlPlace { tasks, ..self.group(found) })
            }
        }
    }

    fn group(&self, found: &Resctrl) -> ResctrlPlace {
        let full = self.options.full_bandwidth.map(|rate| rate.0);
        let memory = found.memory.as_ref().map(|memory| memory_control(found.maker, memory, full));
        // With `cdp` there are two lines, which `memory` of the spec knows.
        let cache = found.cache.as_ref().filter(|cache| !cache.cdp);
        let cache = cache.zip(self.options.ways).map(|(cache, ways)| Cache {
            all: cache.all,
            least: cache.least,
            shareable: cache.shareable,
            ways,
        });
        ResctrlPlace {
            group: found.mount.join(&self.vm.name).display().to_string(),
            memory_domains: found.memory.as_ref().map_or_else(Vec::new, |m| m.domains.clone()),
            memory,
            cache_domains: found.cache.as_ref().map_or_else(Vec::new, |c| c.domains.clone()),
            cache,
            tasks: Vec::new(),
        }
    }
}

/// Unit and range of a bandwidth on a host whose 100 % are `full`.
pub(crate) fn memory_control(maker: Maker, memory: &MemoryBandwidth, full: Option<f64>) -> MemoryControl {
    match maker {
        _ if memory.in_mib => MemoryControl::MibPerSecond,
        Maker::Amd => MemoryControl::EighthGb { most: memory.most },
        maker => {
            MemoryControl::Percent { least: memory.least, step: memory.step, full, mpam: maker == Maker::Arm }
        }
    }
}

#[cfg(test)]
mod tests;
