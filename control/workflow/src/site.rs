//! The spec's device and VMs on this host, and the settings in force.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rtvirtio_apply::{Binding, VmBinding};
use rtvirtio_kernel::cgroup::{Limit, MemberGroup};
use rtvirtio_kernel::{BlockDevice, Cgroups, Hierarchy, Root, text};
use rtvirtio_measure::workload::{Place, VmLoad};
use rtvirtio_measure::{HostFacts, VmKind};
use rtvirtio_model::{Bfq, Config, Elevator, VmConfig};
use rtvirtio_planner::{CgroupMode, PlanOptions};
use rtvirtio_spec::{Device, LabKind, Spec, Vm};
use rtvirtio_units::{Bytes, Iops, Nanos};
use rtvirtio_vmm::GuestAgent;

use crate::bfq;
use crate::dirs::Dirs;
use crate::error::{Context as _, Result, bail};
use crate::find::{self, HostVm};
use crate::host::{cpus, kernel_release};
use crate::inventory::Inventory;
use crate::model_choice::ModelChoice;
use crate::progress::Progress;

/// Time limit of a guest agent's answer when its settings are read.
const AGENT_TIMEOUT: Duration = Duration::from_secs(5);
/// Largest settings file read from a guest, bytes.
const SMALL_FILE: usize = 4096;

/// A spec, with its device and VMs on this host.
pub struct Site {
    /// The spec.
    pub spec: Spec,
    /// The shared device.
    pub device: BlockDevice,
    /// The VMs as a lab lists them, when they are a lab's.
    pub lab: Option<Inventory>,
    root: Root,
    cgroups: Cgroups,
    /// In spec order, each with its cgroup.
    vms: Vec<(HostVm, PathBuf)>,
}

impl Site {
    /// For steps that change settings: loads BFQ, where it is a module, so that a plan can choose
    /// it.
    pub fn load_bfq(&self, progress: &dyn Progress) {
        // An error means that the device does not offer it, which the plan takes into account.
        let _ = bfq::load(&self.device, progress);
    }

    /// For steps that change nothing: warns where BFQ is a module that is not loaded.
    pub fn warn_without_bfq(&self, progress: &dyn Progress) {
        if bfq::lacks_module(&self.device, &self.root) {
            progress.warn(&format!(
                "{} does not offer BFQ now, so the plan does without it; `apply` loads the module first, and so does `modprobe bfq`",
                self.device.name
            ));
        }
    }

    /// Finds the device and every VM. Changes nothing.
    ///
    /// # Errors
    /// [`Kind::NotRunning`](crate::Kind::NotRunning) with the missing VM.
    pub fn find(spec: Spec, dirs: &Dirs) -> Result<Self> {
        let root = Root::default();
        let cgroups = Cgroups::detect(&root)?;
        let lab = match spec.lab_kind() {
            Some(_) => Some(Inventory::of_spec(&spec, &dirs.run)?),
            None => None,
        };
        let device = match (&spec.device, &lab) {
            (_, Some(lab)) => BlockDevice::find(&root, &lab.device)?,
            (Device::Path(path), None) => BlockDevice::find(&root, path)?,
            (Device::Twin { .. } | Device::File { .. }, None) => {
                bail!(NotRunning, "the device exists only in a lab")
            }
        };
        let vms = find::of_spec_in(&spec, lab.as_ref())?;
        let with_cgroup = |vm: HostVm| vm.io_cgroup(&root, &cgroups).map(|cgroup| (vm, cgroup));
        let vms = vms.into_iter().map(with_cgroup).collect::<Result<_>>()?;
        Ok(Self { spec, device, lab, root, cgroups, vms })
    }

    /// The device and the VMs as `apply` takes them.
    pub fn binding(&self) -> Result<Binding> {
        let mut vms = BTreeMap::new();
        for (vm, cgroup) in &self.vms {
            let agent = vm.agent(&self.root)?;
            // Only settings in the guest need the disk's name there, and report that it is missing.
            let disk = agent.as_ref().and_then(|_| vm.disk(&self.root).ok().flatten());
            let guest_disk =
                disk.as_deref().and_then(Path::file_name).map(|n| n.to_string_lossy().into_owned());
            vms.insert(vm.name.clone(), VmBinding { cgroup: Some(cgroup.clone()), agent, guest_disk });
        }
        Ok(Binding { device: self.device.clone(), cgroups: Some(self.cgroups.clone()), vms })
    }

    /// The settings in force.
    ///
    /// # Errors
    /// When the kernel's files cannot be read.
    pub fn config(&self) -> Result<Config> {
        let mut config = device_config(&self.device, &self.root, 0)?;
        for (vm, (host_vm, cgroup)) in self.spec.vms.iter().zip(&self.vms) {
            let (weight, cap) = (self.weight(cgroup)?, self.cap(vm, cgroup)?);
            let mut of_vm = VmConfig { weight, cap, ..default_vm() };
            if let Some((elevator, bfq)) = guest_settings(host_vm, &self.root) {
                of_vm.guest_elevator = elevator;
                of_vm.guest_bfq = bfq;
            }
            config.vms.push(of_vm);
        }
        Ok(config)
    }

    /// Options for a search from the settings in force, limited to what this host offers.
    pub fn plan_options(&self, start: Config, model: &ModelChoice) -> Result<PlanOptions> {
        let mut options = model.options(start);
        let offered: Vec<Elevator> =
            self.device.elevators(&self.root)?.available.iter().map(|name| elevator(name)).collect();
        options.space.elevators.retain(|e| offered.contains(e));
        let mut cgroups: Vec<&PathBuf> = self.vms.iter().map(|(_, cgroup)| cgroup).collect();
        cgroups.sort();
        cgroups.dedup();
        if cgroups.len() < self.vms.len() || cgroups.iter().any(|c| Cgroups::is_root(c)) {
            options.mode = CgroupMode::Shared;
        }
        options.space.guests &= self.host_vms().all(|vm| self.has_agent(vm) && vm.names_disk());
        Ok(options)
    }

    /// Where the tasks run.
    pub fn loads(&self, predicted: &[Option<Nanos>]) -> Result<Vec<VmLoad>> {
        let mut loads = match &self.lab {
            Some(lab) => self.lab_loads(lab)?,
            None => self.existing_loads()?,
        };
        let mut predicted = predicted.iter().copied();
        for load in &mut loads {
            let goals = load.vm.tasks.iter().flat_map(rtvirtio_spec::Task::goals);
            load.predicted = goals.map(|_| predicted.next().flatten()).collect();
        }
        Ok(loads)
    }

    /// Refuses tasks that would overwrite data of a real device, unless `may_destroy`.
    pub fn guard_data(&self, may_destroy: bool) -> Result<()> {
        let writer = self.spec.tasks().find(|(_, task)| task.op.write_share() > 0.0);
        match (writer, &self.spec.device) {
            (Some((vm, task)), Device::Path(path)) if !may_destroy => bail!(
                Guarded,
                "task {}/{} writes, and {} is a real device: what the task overwrites is lost. \
                 If the tasks' disks hold nothing that you need, say --destroy-data",
                vm.name,
                task.name,
                path.display()
            ),
            _ => Ok(()),
        }
    }

    /// The kind of the VMs.
    pub fn kind(&self) -> VmKind {
        if self.spec.lab_kind() == Some(LabKind::Process) || self.host_vms().any(|vm| !self.has_agent(vm)) {
            VmKind::Process
        } else {
            VmKind::Qemu
        }
    }

    /// The host, as a result file describes it.
    pub fn facts(&self) -> HostFacts {
        let (vmm, accelerator, device) = match &self.lab {
            Some(lab) => {
                let domain = if lab.domain.is_some() { ", disks through the I/O domain" } else { "" };
                (
                    format!("{}{domain}", lab.vmm),
                    lab.accelerator.clone(),
                    format!("{}: {}", self.device.name, lab.device_text),
                )
            }
            None => ("existing".to_owned(), "unknown".to_owned(), self.device.name.clone()),
        };
        HostFacts { kernel: kernel_release(), cpus: cpus(), vmm, accelerator, device }
    }

    /// Whether a guest agent is there to ask. A VM that ended since it was found has none.
    fn has_agent(&self, vm: &HostVm) -> bool {
        vm.agent(&self.root).is_ok_and(|agent| agent.is_some())
    }

    /// Warns of VMs whose guest agent should be there and is not.
    pub fn warn_without_agent(&self, progress: &dyn Progress) {
        self.host_vms().filter_map(|vm| vm.agent_note(&self.root)).for_each(|note| progress.warn(&note));
    }

    /// The VMs on this host, in spec order.
    pub fn host_vms(&self) -> impl Iterator<Item = &HostVm> {
        self.vms.iter().map(|(vm, _)| vm)
    }

    fn weight(&self, cgroup: &Path) -> Result<u32> {
        if Cgroups::is_root(cgroup) {
            return Ok(100);
        }
        let file = self.cgroups.weight_file(&self.root, cgroup)?;
        // No file: BFQ is not loaded, or on v2 `io` is not enabled yet; the kernel's default holds.
        let Some(content) = self.root.read_optional(&file.path)? else { return Ok(100) };
        let weights = text::weights(&content).unwrap_or_default();
        let weight = weights.devices.get(&self.device.dev).copied().or(weights.default).unwrap_or(100);
        Ok(u32::try_from(weight).unwrap_or(100))
    }

    /// The limit on requests in force: the sum over the directions that the VM's tasks use, as in
    /// the models. None when one of these directions has no limit.
    fn cap(&self, vm: &Vm, cgroup: &Path) -> Result<Option<Iops>> {
        if Cgroups::is_root(cgroup) {
            return Ok(None);
        }
        let uses = |limit: Limit| {
            vm.tasks.iter().map(|t| t.op.write_share()).any(|share| match limit {
                Limit::WriteIops => share > 0.0,
                _ => share < 1.0,
            })
        };
        let mut sum = 0;
        for limit in [Limit::ReadIops, Limit::WriteIops].into_iter().filter(|limit| uses(*limit)) {
            let path = self.cgroups.limit_file(cgroup, limit)?;
            let content = self.root.read_optional(&path)?.unwrap_or_default();
            let value = match self.cgroups.hierarchy {
                Hierarchy::V1 => text::throttle_limit(&content, &self.device.dev),
                Hierarchy::V2 => text::io_max_limit(&content, &self.device.dev, limit.key()),
            };
            let Some(value) = value else { return Ok(None) };
            sum += value;
        }
        Ok((sum > 0).then_some(Iops(sum as f64)))
    }

    fn lab_loads(&self, lab: &Inventory) -> Result<Vec<VmLoad>> {
        let mut loads = Vec::new();
        for (vm, here) in self.spec.vms.iter().zip(&lab.vms) {
            let place = match &here.guest {
                Some(guest) => Place::Guest { agent: guest.agent.clone().into(), target: guest.disk.clone() },
                None => Place::Host {
                    cgroup_procs: vec![self.cgroups.dir(&here.cgroup)?.join("cgroup.procs")],
                    target: lab.device.clone(),
                    region: Some(here.region),
                },
            };
            loads.push(VmLoad { vm: vm.clone(), place, predicted: Vec::new(), io_class: None });
        }
        Ok(loads)
    }

    fn existing_loads(&self) -> Result<Vec<VmLoad>> {
        let mut loads = Vec::new();
        for (vm, (host_vm, cgroup)) in self.spec.vms.iter().zip(&self.vms) {
            let agent = host_vm.agent(&self.root)?;
            let Some(disk) = host_vm.disk(&self.root)? else {
                bail!(
                    File,
                    "vm {}: no `disk` in the spec: name the block device or file that its tasks use{}",
                    vm.name,
                    if agent.is_some() { " inside the guest" } else { "" }
                );
            };
            let place = match agent {
                Some(agent) => Place::Guest { agent, target: disk },
                None => Place::Host {
                    cgroup_procs: vec![self.cgroups.dir(cgroup)?.join("cgroup.procs")],
                    target: disk,
                    region: None,
                },
            };
            loads.push(VmLoad { vm: vm.clone(), place, predicted: Vec::new(), io_class: None });
        }
        Ok(loads)
    }

    /// Makes cgroups for tasks on the host where a VM's own takes no process, and points the loads
    /// at them. They go when the result is dropped.
    ///
    /// # Errors
    /// When a VM's cgroup is gone.
    pub(crate) fn member_groups(&self, loads: &mut [VmLoad]) -> Result<Vec<MemberGroup>> {
        let mut groups = Vec::new();
        if self.lab.is_some() {
            return Ok(groups);
        }
        for (load, (_, cgroup)) in loads.iter_mut().zip(&self.vms) {
            if let Place::Host { cgroup_procs, .. } = &mut load.place {
                let group = self.cgroups.member_group(&self.root, cgroup)?;
                *cgroup_procs = vec![group.procs()];
                groups.push(group);
            }
        }
        Ok(groups)
    }
}

/// The kernel's default BFQ settings for the spec's VMs, the paper's baseline.
pub fn default_config(spec: &Spec) -> Config {
    Config {
        elevator: Elevator::Bfq,
        bfq: Bfq::default(),
        vms: spec.vms.iter().map(|_| default_vm()).collect(),
    }
}

/// The settings of a device in force, with so many VMs that have the kernel's defaults.
///
/// # Errors
/// When the kernel's files cannot be read.
pub fn device_config(device: &BlockDevice, root: &Root, vms: usize) -> Result<Config> {
    let elevator = elevator(&device.elevators(root)?.current);
    let bfq = if elevator == Elevator::Bfq { bfq_of(&device.tunables(root)?)? } else { Bfq::default() };
    Ok(Config { elevator, bfq, vms: vec![default_vm(); vms] })
}

fn default_vm() -> VmConfig {
    VmConfig { weight: 100, cap: None::<Iops>, guest_elevator: Elevator::None, guest_bfq: Bfq::default() }
}

fn elevator(name: &str) -> Elevator {
    match name {
        "bfq" => Elevator::Bfq,
        "kyber" => Elevator::Kyber,
        "mq-deadline" => Elevator::MqDeadline,
        _ => Elevator::None,
    }
}

fn bfq_of(tunables: &BTreeMap<String, String>) -> Result<Bfq> {
    let number = |name: &str| -> Result<u64> {
        let text = tunables.get(name).with_context(|| format!("BFQ has no tunable {name}"))?;
        text.trim().parse().with_context(|| format!("BFQ's {name} is `{}`", text.trim()))
    };
    let max_budget = number("max_budget")?;
    Ok(Bfq {
        slice_idle: Nanos::from_millis(number("slice_idle")?),
        timeout_sync: Nanos::from_millis(number("timeout_sync")?),
        low_latency: number("low_latency")? != 0,
        // In sectors of 512 bytes; 0 is automatic (block/bfq-iosched.c).
        max_budget: (max_budget > 0).then_some(Bytes(max_budget * 512)),
        strict_guarantees: number("strict_guarantees")? != 0,
    })
}

/// Elevator and BFQ tunables inside a guest; `None` without an agent or its answer: the model then
/// assumes `none`.
fn guest_settings(vm: &HostVm, root: &Root) -> Option<(Elevator, Bfq)> {
    let agent = vm.agent(root).ok()??;
    let disk = vm.disk(root).ok()??;
    let disk = disk.file_name()?.to_str()?;
    let mut agent = GuestAgent::reach(&agent, AGENT_TIMEOUT).ok()?;
    let mut read = |path: &str| {
        let bytes = agent.read_file(&format!("/sys/block/{disk}/queue/{path}"), SMALL_FILE).ok()?;
        String::from_utf8(bytes).ok()
    };
    let elevator = elevator(&text::elevators(&read("scheduler")?)?.current);
    let mut bfq = Bfq::default();
    if elevator == Elevator::Bfq {
        let names = ["slice_idle", "timeout_sync", "low_latency", "max_budget", "strict_guarantees"];
        let tunables =
            names.into_iter().filter_map(|n| Some((n.to_owned(), read(&format!("iosched/{n}"))?))).collect();
        bfq = bfq_of(&tunables).ok()?;
    }
    Some((elevator, bfq))
}
