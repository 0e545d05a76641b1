//! The spec's device and VMs on this host, and the settings in force.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rtvirtio_apply::{Binding, VmBinding};
use rtvirtio_kernel::cgroup::{Limit, MemberGroup};
use rtvirtio_kernel::{BlockDevice, Cgroups, Hierarchy, Root, Stack, text};
use rtvirtio_measure::workload::{Place, VmLoad};
use rtvirtio_measure::{HostFacts, VmKind};
use rtvirtio_model::{Bfq, Config, Elevator, VmConfig};
use rtvirtio_planner::{Knob, Plan, PlanOptions, Setting};
use rtvirtio_spec::{Device, LabKind, Part, Spec, Vm, VmDisk};
use rtvirtio_units::{Bytes, Iops, Nanos, blk_throttle};

use crate::bfq;
use crate::controls::{Control, ControlKind, Controls};
use crate::dirs::Dirs;
use crate::error::{Context as _, Result, bail};
use crate::find::{self, HostVm};
use crate::host::{cpus, kernel_release};
use crate::inventory::Inventory;
use crate::model_choice::ModelChoice;
use crate::progress::Progress;
use crate::uncovered;
use survey::guest_settings;

mod survey;

pub use survey::Survey;

/// A spec, with its device and VMs on this host.
pub struct Site {
    /// Spec of this device and the VMs on it.
    pub spec: Spec,
    /// The name of the device in its file, if it has one.
    label: Option<String>,
    /// The disk of each task, as in [`Part::disks`].
    disks: Vec<Vec<Option<VmDisk>>>,
    /// The shared device, with the disks that order its requests.
    pub stack: Stack,
    /// The VMs as a lab lists them, when they are a lab's.
    pub lab: Option<Inventory>,
    /// Load an object that ends fio's waits on time into the fio of guests that are no lab's.
    pub preload: bool,
    /// The other devices of the file, each with the names of its VMs.
    others: Vec<(PathBuf, Vec<String>)>,
    root: Root,
    cgroups: Cgroups,
    /// In spec order, each with its cgroup.
    vms: Vec<(HostVm, PathBuf)>,
}

impl Site {
    /// For steps that change settings: loads BFQ, where it is a module, so that a plan can choose
    /// it. Warns where the device does not offer it then, and the plan does without it.
    pub fn load_bfq(&self, progress: &dyn Progress) {
        bfq::load_or_warn(&self.stack, &self.root, progress);
    }

    /// For steps that change nothing: warns where BFQ is a module that is not loaded.
    pub fn warn_without_bfq(&self, progress: &dyn Progress) {
        if bfq::lacks_module(&self.stack, &self.root) {
            progress.warn(&format!(
                "{} does not offer BFQ now, so the plan does without it; `apply` loads the module first, and so does `modprobe bfq`",
                self.stack.device.name
            ));
        }
    }

    /// Finds the device and every VM. Changes nothing.
    ///
    /// # Errors
    /// [`Kind::NotRunning`](crate::Kind::NotRunning) with the missing VM.
    pub fn find(part: impl Into<Part>, dirs: &Dirs) -> Result<Self> {
        let Part { name: label, spec, disks } = part.into();
        let root = Root::default();
        let cgroups = Cgroups::detect(&root)?;
        let lab = match spec.lab_kind() {
            Some(_) => Some(Inventory::of_spec(&spec, &dirs.run)?),
            None => None,
        };
        let stack = match (&spec.device, &lab) {
            (_, Some(lab)) => Stack::find(&root, &lab.device)?,
            (Device::Path(path), None) => Stack::find(&root, path)?,
            (Device::Twin { .. } | Device::File { .. }, None) => {
                bail!(NotRunning, "the device exists only in a lab")
            }
        };
        let vms = find::of_spec_in(&spec, lab.as_ref())?;
        let with_cgroup = |vm: HostVm| vm.io_cgroup(&root, &cgroups).map(|cgroup| (vm, cgroup));
        let vms = vms.into_iter().map(with_cgroup).collect::<Result<_>>()?;
        Ok(Self { spec, label, disks, stack, lab, preload: false, others: Vec::new(), root, cgroups, vms })
    }

    /// Makes it one of several parts: a VM's disks on the others' devices are not uncovered.
    #[must_use]
    pub fn among(mut self, parts: &[Part]) -> Self {
        let names = |part: &Part| part.spec.vms.iter().map(|vm| vm.name.clone()).collect();
        let others = parts.iter().filter(|part| part.spec.device != self.spec.device);
        let other = |part: &Part| match &part.spec.device {
            Device::Path(path) => Some((path.clone(), names(part))),
            Device::Twin { .. } | Device::File { .. } => None,
        };
        self.others = others.filter_map(other).collect();
        self
    }

    /// The device and the VMs as `apply` takes them.
    pub fn binding(&self) -> Result<Binding> {
        self.bound(true)
    }

    /// Like [`Site::binding`], for a plan: no guest is asked where the plan sets nothing in guests.
    pub(crate) fn binding_for(&self, plan: &Plan) -> Result<Binding> {
        let is_in_guest = |s: &Setting| matches!(s.knob, Knob::GuestElevator { .. } | Knob::GuestBfq { .. });
        self.bound(plan.settings.iter().any(is_in_guest))
    }

    fn bound(&self, asks_guests: bool) -> Result<Binding> {
        let mut vms = BTreeMap::new();
        for (i, (vm, cgroup)) in self.vms.iter().enumerate() {
            let agent = if asks_guests { vm.agent(&self.root)? } else { None };
            let guest_disks = if agent.is_some() { self.guest_disks(i) } else { Vec::new() };
            vms.insert(vm.name.clone(), VmBinding { cgroup: Some(cgroup.clone()), agent, guest_disks });
        }
        Ok(Binding { stack: self.stack.clone(), cgroups: Some(self.cgroups.clone()), vms })
    }

    /// Name of the device in the spec; the kernel's name where it has none.
    #[must_use]
    pub fn name(&self) -> &str {
        self.label.as_deref().unwrap_or(&self.stack.device.name)
    }

    /// A disk on which the settings of both sites act, if there is one.
    #[must_use]
    pub fn shares(&self, other: &Self) -> Option<String> {
        let disks = |site: &Self| {
            let stack = &site.stack;
            std::iter::once(&stack.device).chain(&stack.disks).map(|d| d.name.clone()).collect::<Vec<_>>()
        };
        let others = disks(other);
        disks(self).into_iter().find(|name| others.contains(name))
    }

    /// Kernel names, inside its guest, of the disks that the VM at this position has on the device.
    fn guest_disks(&self, vm: usize) -> Vec<String> {
        let Some((host_vm, _)) = self.vms.get(vm) else { return Vec::new() };
        // Only settings in the guest need the disk's name there, and report that it is missing.
        let mut paths: Vec<PathBuf> =
            self.disks_of(vm).into_iter().filter_map(|disk| host_vm.disk_at(&self.root, disk).ok()).collect();
        if paths.is_empty() {
            paths.extend(host_vm.disk(&self.root).ok().flatten());
        }
        let mut names: Vec<String> = Vec::new();
        for name in paths.iter().filter_map(|path| path.file_name()) {
            let name = name.to_string_lossy().into_owned();
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names
    }

    /// The different disks that the spec gives the tasks of the VM at this position.
    fn disks_of(&self, vm: usize) -> Vec<&VmDisk> {
        let mut all: Vec<&VmDisk> = Vec::new();
        for disk in self.disks.get(vm).into_iter().flatten().flatten() {
            if !all.contains(&disk) {
                all.push(disk);
            }
        }
        all
    }

    /// The settings in force.
    pub fn config(&self) -> Result<Config> {
        Ok(self.config_and_doubts()?.0)
    }

    /// The settings in force, with what of them is assumed.
    fn config_and_doubts(&self) -> Result<(Config, Vec<Control>)> {
        let mut config = device_config(&self.stack, &self.root, 0)?;
        let mut doubts = Vec::new();
        for (vm, (host_vm, cgroup)) in self.spec.vms.iter().zip(&self.vms) {
            let escapes = uncovered::writes_escape(&self.uncovered_of(host_vm, cgroup));
            let (weight, cap) = (self.weight(cgroup)?, self.cap(vm, cgroup, escapes)?);
            let mut of_vm = VmConfig { weight, cap, ..default_vm() };
            match guest_settings(host_vm, &self.root) {
                Ok(Some((elevator, bfq))) => {
                    of_vm.guest_elevator = elevator;
                    of_vm.guest_bfq = bfq;
                }
                Ok(None) => {}
                Err(why) => doubts.push(Control {
                    kind: ControlKind::Assumed,
                    vm: Some(vm.name.clone()),
                    text: format!(
                        "the settings inside the guest are not known, elevator none is assumed: {why}"
                    ),
                }),
            }
            config.vms.push(of_vm);
        }
        Ok((config, doubts))
    }

    /// Options for a search from the settings in force, limited to what this host offers.
    pub fn plan_options(&self, start: Config, model: &ModelChoice) -> Result<PlanOptions> {
        let placements = self.controls(&self.placed(&start))?.placements;
        self.options(Survey { config: start, controls: Controls { placements, list: Vec::new() } }, model)
    }

    /// Like `plan_options`, from a survey that was made.
    pub fn options(&self, survey: Survey, model: &ModelChoice) -> Result<PlanOptions> {
        let mut options = model.options(survey.config);
        options.placements = survey.controls.placements;
        let offered: Vec<Elevator> =
            self.stack.offered(&self.root)?.iter().map(|name| elevator(name)).collect();
        options.space.elevators.retain(|e| offered.contains(e));
        if self.stack.disks.iter().any(BlockDevice::is_hidden) {
            options.space.weights.clear();
        }
        // Two disks in a guest may have different settings, which a configuration does not hold.
        let one_disk = |i: usize, vm: &HostVm| vm.names_disk() && self.disks_of(i).len() <= 1;
        options.space.guests &=
            self.vms.iter().enumerate().all(|(i, (vm, _))| self.has_agent(vm) && one_disk(i, vm));
        Ok(options)
    }

    /// Tasks of each VM, with the place where they run.
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
        let without = self.host_vms().filter(|vm| !self.has_agent(vm)).count();
        if self.spec.lab_kind() == Some(LabKind::Process)
            || (without > 0 && without == self.host_vms().count())
        {
            VmKind::Process
        } else if without > 0 {
            VmKind::Mixed
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
                    format!("{}: {}", self.stack.device.name, lab.device_text),
                )
            }
            None => ("existing".to_owned(), "unknown".to_owned(), self.stack.device.name.clone()),
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
        let of = |disk: &BlockDevice| self.cgroups.weight_of(&self.root, cgroup, &disk.dev);
        let first = self.stack.disks.first().map_or(Ok(100), of)?;
        for other in &self.stack.disks {
            if of(other)? != first {
                bail!(
                    System,
                    "{} gives {} another weight than the other disks below {}, and predictions take one: set them alike first",
                    self.cgroups.weight_file(&self.root, cgroup)?.path.display(),
                    other.name,
                    self.stack.device.name
                );
            }
        }
        Ok(first)
    }

    /// The limit on requests in force: the sum over the directions that the VM's tasks use, as in
    /// the models. None when one of these directions has no limit, or one that does not act, as
    /// where writes escape the cgroup.
    fn cap(&self, vm: &Vm, cgroup: &Path, escapes: bool) -> Result<Option<Iops>> {
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
                Hierarchy::V1 => text::throttle_limit(&content, &self.stack.device.dev),
                Hierarchy::V2 => text::io_max_limit(&content, &self.stack.device.dev, limit.key()),
            };
            let acts = !(escapes && limit == Limit::WriteIops);
            let Some(value) = value.filter(|_| acts) else { return Ok(None) };
            sum += blk_throttle::let_through(value as f64) as u64;
        }
        Ok((sum > 0).then_some(Iops(sum as f64)))
    }

    fn lab_loads(&self, lab: &Inventory) -> Result<Vec<VmLoad>> {
        let mut loads = Vec::new();
        for (vm, here) in self.spec.vms.iter().zip(&lab.vms) {
            let place = match &here.guest {
                Some(guest) => Place::Guest {
                    agent: guest.agent.clone().into(),
                    target: guest.disk.clone(),
                    preload: true,
                },
                None => Place::Host {
                    cgroup_procs: vec![self.cgroups.dir(&here.cgroup)?.join("cgroup.procs")],
                    target: lab.device.clone(),
                    region: Some(here.region),
                },
            };
            loads.push(VmLoad::new(vm.clone(), place));
        }
        Ok(loads)
    }

    fn existing_loads(&self) -> Result<Vec<VmLoad>> {
        let mut loads = Vec::new();
        for (i, (vm, (host_vm, cgroup))) in self.spec.vms.iter().zip(&self.vms).enumerate() {
            let agent = host_vm.agent(&self.root)?;
            let disk = host_vm.disk(&self.root)?;
            let own = |own: &Option<VmDisk>| match own {
                Some(own) => host_vm.disk_at(&self.root, own).map(Some),
                None => Ok(disk.clone()),
            };
            let of_tasks = self.disks.get(i).map_or(&[][..], Vec::as_slice);
            let targets: Option<Vec<PathBuf>> =
                of_tasks.iter().map(own).collect::<Result<Vec<_>>>()?.into_iter().collect();
            let (Some(disk), Some(targets)) = (disk, targets) else {
                bail!(
                    File,
                    "vm {}: no `disk` in the spec: name the block device or file that its tasks use{}",
                    vm.name,
                    if agent.is_some() { " inside the guest" } else { "" }
                );
            };
            let place = match agent {
                Some(agent) => Place::Guest { agent, target: disk, preload: self.preload },
                None => Place::Host {
                    cgroup_procs: vec![self.cgroups.dir(cgroup)?.join("cgroup.procs")],
                    target: disk,
                    region: None,
                },
            };
            loads.push(VmLoad { targets, ..VmLoad::new(vm.clone(), place) });
        }
        Ok(loads)
    }
}

/// Makes cgroups for tasks on the host where a VM's own takes no process, and points the loads at
/// them. They go when the result is dropped.
///
/// # Errors
/// When a VM's cgroup is gone.
pub(crate) fn member_groups(sites: &[&Site], loads: &mut [VmLoad]) -> Result<Vec<MemberGroup>> {
    let mut groups = Vec::new();
    for load in loads {
        let of_load = |site: &&Site| {
            let found = site.vms.iter().find(|(vm, _)| vm.name == load.vm.name);
            found.filter(|_| site.lab.is_none()).map(|(_, cgroup)| cgroup.clone())
        };
        let found = sites.iter().find_map(|site| Some((site, of_load(site)?)));
        if let (Some((site, cgroup)), Place::Host { cgroup_procs, .. }) = (found, &mut load.place) {
            let group = site.cgroups.member_group(&site.root, &cgroup)?;
            *cgroup_procs = vec![group.procs()];
            groups.push(group);
        }
    }
    Ok(groups)
}

/// The kernel's default BFQ settings for the spec's VMs, the paper's baseline.
pub fn default_config(spec: &Spec) -> Config {
    Config {
        elevator: Elevator::Bfq,
        bfq: Bfq::default(),
        vms: spec.vms.iter().map(|_| default_vm()).collect(),
    }
}

/// The settings of a device in force, with so many VMs that have the kernel's defaults. Where it
/// has several disks below it, they have the same.
///
/// # Errors
/// When the kernel's files cannot be read, or disks below the device have different settings.
pub fn device_config(stack: &Stack, root: &Root, vms: usize) -> Result<Config> {
    let of = |disk: &BlockDevice| -> Result<(Elevator, Bfq)> {
        let elevator = elevator(&disk.elevators(root)?.current);
        let bfq = if elevator == Elevator::Bfq { bfq_of(&disk.tunables(root)?)? } else { Bfq::default() };
        Ok((elevator, bfq))
    };
    let mut disks = stack.disks.iter();
    let (elevator, bfq) = disks.next().map_or(Ok((Elevator::None, Bfq::default())), of)?;
    for disk in disks {
        if of(disk)? != (elevator, bfq) {
            bail!(
                System,
                "the disks below {} ({}) differ in I/O scheduler or its settings, and predictions take one: set them \
                 alike first, such as with `echo none > /sys/block/{}/queue/scheduler`, for each",
                stack.device.name,
                stack.names(),
                disk.name
            );
        }
    }
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
