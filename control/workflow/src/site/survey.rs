//! Survey of a site: controls that no plan sets, and the settings inside guests.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rtvirtio_kernel::{Cgroups, HostError, Root, Stack, text};
use rtvirtio_model::{Bfq, Config, Elevator};
use rtvirtio_spec::Device;
use rtvirtio_vmm::GuestAgent;

use super::{Site, bfq_of, elevator};
use crate::controls::{self, Control, Controls, Placed};
use crate::error::{Error, Result};
use crate::find::HostVm;
use crate::find::drives::MonitorTime;
use crate::progress::Progress;
use crate::uncovered::{self, Covered, Uncovered};

/// Time limit of a guest agent's answer when its settings are read.
const AGENT_TIMEOUT: Duration = Duration::from_secs(5);
/// Largest settings file read from a guest, bytes.
const SMALL_FILE: usize = 4096;

/// Settings and controls in force on a site.
pub struct Survey {
    /// Settings that a plan may change.
    pub config: Config,
    /// Controls that act besides and are set by no plan.
    pub controls: Controls,
}

/// Hierarchy of the CPU controller; `None` where there is none, and so no limit on CPU time.
fn cpu_hierarchy(root: &Root) -> Result<Option<Cgroups>> {
    match Cgroups::detect_cpu(root) {
        Err(HostError::NoCpuController { .. }) => Ok(None),
        found => Ok(Some(found?)),
    }
}

impl Site {
    /// The settings in force, and all that acts already and is set by no plan. Warns of each.
    pub fn survey(&self, progress: &dyn Progress) -> Result<Survey> {
        let (config, doubts) = self.config_and_doubts()?;
        let placed = self.placed(&config);
        let mut controls = self.controls(&placed)?;
        controls.list.extend(doubts);
        if config.elevator == Elevator::Bfq {
            controls.list.extend(controls::shares_in_force(&placed, &controls.placements, &config));
        }
        controls.list.iter().for_each(|control| progress.warn(&control.to_string()));
        Ok(Survey { config, controls })
    }

    /// Controls that [`Self::loads`] bypass, because they run on the host.
    #[must_use]
    pub fn bypassed(&self, controls: &Controls) -> Vec<Control> {
        controls::bypassed(controls, |name| self.host_vms().any(|vm| vm.name == name && !self.has_agent(vm)))
    }

    /// Paths of the device.
    pub(crate) fn device_names(&self) -> Vec<PathBuf> {
        let mut names = vec![Path::new("/dev").join(&self.stack.device.name)];
        if let Device::Path(path) = &self.spec.device {
            names.push(path.clone());
        }
        names
    }

    /// Whether the device and the VMs' cgroups are those that were found: the same path may mean
    /// another disk by now. No monitor and no libvirt is asked again. False also where that cannot
    /// be told: another look-up has the reason.
    pub(crate) fn is_in_place(&self) -> bool {
        let device = match (&self.spec.device, &self.lab) {
            (_, Some(lab)) => &lab.device,
            (Device::Path(path), None) => path,
            (Device::Twin { .. } | Device::File { .. }, None) => return false,
        };
        let is_same = |(vm, cgroup): &(HostVm, PathBuf)| {
            vm.io_cgroup(&self.root, &self.cgroups).is_ok_and(|now| now == *cgroup)
        };
        Stack::find(&self.root, device).is_ok_and(|now| now == self.stack) && self.vms.iter().all(is_same)
    }

    /// Controls that act already, without the settings in force.
    pub(super) fn controls(&self, placed: &[Placed<'_>]) -> Result<Controls> {
        let cpu = cpu_hierarchy(&self.root)?;
        let names = self.device_names();
        let at = controls::Survey {
            root: &self.root,
            io: &self.cgroups,
            cpu: cpu.as_ref(),
            names: &names,
            stack: &self.stack,
        };
        controls::survey(&at, placed)
    }

    /// The VMs with what is known of them here.
    pub(super) fn placed<'a>(&'a self, config: &Config) -> Vec<Placed<'a>> {
        let time = MonitorTime::of_settings();
        let all = self.spec.vms.iter().zip(&self.vms).zip(&config.vms);
        all.map(|((vm, (host_vm, cgroup)), of_vm)| Placed {
            vm,
            cgroup,
            drives: host_vm.drives(&time).map_err(|e| format!("{e:#}")).transpose(),
            pids: host_vm.pids().map_err(|e| format!("{e:#}")),
            has_cap: of_vm.cap.is_some(),
            uncovered: self.uncovered_of(host_vm, cgroup),
        })
        .collect()
    }

    /// I/O of a VM on which no setting of this device acts now. None for a lab, which starts its
    /// VMs itself.
    pub(super) fn uncovered_of(&self, vm: &HostVm, cgroup: &Path) -> Vec<Uncovered> {
        if self.lab.is_some() {
            return Vec::new();
        }
        let unknown = |e: Error| vec![Uncovered::unknown(&vm.name, &e)];
        let look = || {
            let pids = vm.pids()?;
            let charges_write_back = uncovered::charges_write_back(&self.root, &self.cgroups, cgroup)?;
            let (devices, others) = ([self.stack.device.name.clone()], self.others_of(&vm.name)?);
            let of =
                Covered { vm: &vm.name, pids: &pids, devices: &devices, others: &others, charges_write_back };
            Ok(uncovered::scan(&self.root, &of))
        };
        look().unwrap_or_else(unknown)
    }

    /// Kernel names of the other devices on which the spec has tasks of a VM.
    fn others_of(&self, vm: &str) -> Result<Vec<String>> {
        let of = self.others.iter().filter(|(_, vms)| vms.iter().any(|name| name == vm));
        of.map(|(path, _)| Ok(Stack::find(&self.root, path)?.device.name)).collect()
    }

    /// Like `uncovered_of`, for the VM of this name; empty where there is none.
    pub(crate) fn uncovered_named(&self, name: &str) -> Vec<Uncovered> {
        let of = self.vms.iter().filter(|(vm, _)| vm.name == name);
        of.flat_map(|(vm, cgroup)| self.uncovered_of(vm, cgroup)).collect()
    }

    /// The I/O cgroup of the VM of this name.
    pub(crate) fn io_group(&self, name: &str) -> Option<&Path> {
        self.vms.iter().find(|(vm, _)| vm.name == name).map(|(_, cgroup)| cgroup.as_path())
    }

    pub(crate) fn root(&self) -> &Root {
        &self.root
    }

    pub(crate) fn cgroups(&self) -> &Cgroups {
        &self.cgroups
    }

    /// Like `uncovered_of`, for all VMs.
    #[must_use]
    pub fn uncovered(&self) -> Vec<Uncovered> {
        self.vms.iter().flat_map(|(vm, cgroup)| self.uncovered_of(vm, cgroup)).collect()
    }
}

/// Elevator and BFQ tunables inside a guest; `None` where there is no agent or the spec names no
/// disk: the model then assumes `none`. `Err` says why they are unknown.
pub(super) fn guest_settings(
    vm: &HostVm,
    root: &Root,
) -> std::result::Result<Option<(Elevator, Bfq)>, String> {
    let agent = vm.agent(root).map_err(|e| format!("{e:#}"))?;
    let Some(agent) = agent.filter(|_| vm.names_disk()) else { return Ok(None) };
    let disk = vm.disk(root).map_err(|e| format!("{e:#}"))?;
    let Some(disk) = disk.as_deref().and_then(Path::file_name).and_then(|name| name.to_str()) else {
        return Ok(None);
    };
    let mut agent = GuestAgent::reach(&agent, AGENT_TIMEOUT).map_err(|e| e.to_string())?;
    let mut read = |path: &str| {
        let path = format!("/sys/block/{disk}/queue/{path}");
        let bytes = agent.read_file(&path, SMALL_FILE).map_err(|e| e.to_string())?;
        String::from_utf8(bytes).map_err(|_| format!("{path} in the guest is not text"))
    };
    let scheduler = read("scheduler")?;
    let offered = text::elevators(&scheduler);
    let offered =
        offered.ok_or_else(|| format!("its scheduler is `{}`", rtvirtio_vmm::shown(scheduler.trim())))?;
    let elevator = elevator(&offered.current);
    let mut bfq = Bfq::default();
    if elevator == Elevator::Bfq {
        let names = ["slice_idle", "timeout_sync", "low_latency", "max_budget", "strict_guarantees"];
        let tunables = names.into_iter().map(|n| Ok((n.to_owned(), read(&format!("iosched/{n}"))?)));
        bfq = bfq_of(&tunables.collect::<std::result::Result<_, String>>()?).map_err(|e| format!("{e:#}"))?;
    }
    Ok(Some((elevator, bfq)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_controller_that_cannot_be_read_is_not_taken_for_none() {
        let (_dir, root) = crate::fixtures::root();
        let mounts = root.at("/proc/self/mountinfo");
        crate::fixtures::put(&root, "/proc/self/mountinfo", "30 1 0:30 / /proc rw - proc proc rw\n");
        assert!(cpu_hierarchy(&root).unwrap().is_none());
        std::fs::write(&mounts, "38 31 0:35 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n").unwrap();
        let controllers = root.at("/sys/fs/cgroup/cgroup.controllers");
        std::fs::create_dir_all(&controllers).unwrap();
        assert!(cpu_hierarchy(&root).is_err());
        std::fs::remove_dir(&controllers).unwrap();
        std::fs::write(&controllers, "io\n").unwrap();
        assert!(cpu_hierarchy(&root).unwrap().is_none());
        std::fs::write(&controllers, "cpu io\n").unwrap();
        assert!(cpu_hierarchy(&root).unwrap().is_some());
    }
}
