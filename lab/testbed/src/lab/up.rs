//! Makes a lab: device, cgroups, I/O domain, guests.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::Ordering;

use rtvirtio_kernel::holders::describe_unseen;
use rtvirtio_kernel::leftovers::mark;
use rtvirtio_kernel::{BlockDevice, Cgroups, Claim, Hierarchy, Root};
use rtvirtio_spec::{Device, LabKind, Priorities, Reach, Spec};
use rtvirtio_units::Bytes;
use rtvirtio_vmm::spawn::Lifetime;
use rtvirtio_workflow::domain::start::{self, Inherited};
use rtvirtio_workflow::inventory::{Inventory, ListedGuest, ListedVm};
use rtvirtio_workflow::leftovers::LAB_FILE;

use crate::FileDisk;
use crate::qemu::{DiskRegion, GUEST_DISK, GuestDisk, QemuConfig, QemuError, QemuGuest, QemuHandle};
use crate::state::LabVm;
use crate::twin::TwinHandle;

use super::{
    ALIGNMENT, CGROUP, DOMAIN_DIR, GUESTS, IodCommand, Lab, LabError, SMALLEST_PART, UpOptions, domain_socket,
};

impl Lab {
    pub(super) fn build(&mut self, spec: &Spec, options: &UpOptions<'_>) -> Result<(), LabError> {
        let root = Root::default();
        let cgroups = Cgroups::detect(&root)?;
        self.save()?;
        let (device, size) = self.make_device(spec, options)?;
        stop_when_cancelled(options)?;
        (options.progress)("making the VMs' cgroups");
        self.make_cgroups(&root, &cgroups, spec)?;
        let part = size.0 / spec.vms.len() as u64 / ALIGNMENT * ALIGNMENT;
        if part < SMALLEST_PART {
            let message = format!(
                "{size} is too small for {} VMs: each needs {}",
                spec.vms.len(),
                Bytes(SMALLEST_PART)
            );
            return Err(LabError::Device { path: device, message });
        }
        for (i, vm) in spec.vms.iter().enumerate() {
            self.state.vms.push(LabVm {
                name: vm.name.clone(),
                cgroup: self.state.cgroups.get(i + 1).cloned().unwrap_or_default(),
                offset: i as u64 * part,
                size: part,
                kernel: String::new(),
                qemu: None,
            });
        }
        if let Some(command) = options.iod {
            self.start_iod(&root, &cgroups, &device, command, options)?;
            stop_when_cancelled(options)?;
        }
        if spec.vms.iter().any(|vm| vm.reach == Reach::Lab(LabKind::Qemu)) {
            self.start_guests(&cgroups, &device, spec, options)?;
        }
        self.state.complete = true;
        self.save()?;
        Ok(self.inventory().save(&self.run_dir)?)
    }

    /// The list by which the product finds the VMs.
    fn inventory(&self) -> Inventory {
        let state = &self.state;
        let guest = |qemu: &QemuHandle| ListedGuest {
            process: qemu.process.clone(),
            qmp: qemu.qmp_socket(),
            agent: qemu.agent_socket(),
            disk: PathBuf::from(GUEST_DISK),
        };
        let vm = |vm: &LabVm| ListedVm {
            name: vm.name.clone(),
            cgroup: vm.cgroup.clone(),
            guest: vm.qemu.as_ref().map(guest),
            region: vm.region(),
        };
        let mut list = Inventory::new(&state.spec_name, &state.spec_text, self.device());
        list.device_text.clone_from(&state.device_text);
        list.vmm.clone_from(&state.vmm);
        list.accelerator.clone_from(&state.accelerator);
        list.domain.clone_from(&state.iod);
        list.emulator = state.twin.as_ref().and_then(|twin| twin.process.clone());
        list.vms = state.vms.iter().map(vm).collect();
        list
    }

    fn make_device(&mut self, spec: &Spec, options: &UpOptions<'_>) -> Result<(PathBuf, Bytes), LabError> {
        let root = Root::default();
        match &spec.device {
            Device::Path(path) => {
                let device = BlockDevice::find(&root, path)?;
                // The guests may overwrite it.
                let claim = Claim::take(path, &[])?;
                if let Some(unseen) = describe_unseen(claim.unseen()) {
                    (options.progress)(&format!("whether {} is in use: {unseen}", path.display()));
                }
                drop(claim);
                let size = Bytes(device.named_size(&root)?);
                self.state.device = Some(path.clone());
                let name = device.partition.as_ref().unwrap_or(&device.name);
                self.state.device_text = format!("{name} ({size})");
                self.save()?;
                Ok((path.clone(), size))
            }
            Device::Twin { profile, size } => {
                let declared = rtvirtio_files::load_twin(profile)?;
                (options.progress)(&format!("making a twin of {size}: {}", declared.description));
                let mount = self.run_dir.join("twin");
                let log = self.run_dir.join("twin.log");
                let server = (options.twin_server)(profile, *size, &mount);
                self.state.device_text = format!("twin {profile} (emulated): {}", declared.description);
                let (run_dir, state) = (&self.run_dir, &mut self.state);
                let (handle, device) = TwinHandle::make(&mount, *size, server, &log, &mut |handle| {
                    state.twin = Some(handle.clone());
                    state.save(run_dir)
                })?;
                self.state.twin = Some(handle);
                self.state.device = Some(device.path.clone());
                self.save()?;
                // The papers' starting point, and the default of many distributions' udev rules. A
                // loop device begins with another.
                BlockDevice::find(&root, &device.path)?.set_elevator(&root, "bfq")?;
                Ok((device.path, *size))
            }
            Device::File { path, size } => {
                (options.progress)(&format!("writing {size} to {}", path.display()));
                self.state.device_text = format!("file {} ({size}), direct I/O", path.display());
                let (run_dir, state) = (&self.run_dir, &mut self.state);
                let (disk, device) = FileDisk::make(path, *size, options.cancel, &mut |disk| {
                    state.file = Some(disk.clone());
                    let failed = |source| LabError::State { path: run_dir.clone(), source };
                    state.save(run_dir).map_err(failed)
                })?;
                self.state.file = Some(disk);
                self.state.device = Some(device.clone());
                self.save()?;
                BlockDevice::find(&root, &device)?.set_elevator(&root, "bfq")?;
                Ok((device, *size))
            }
        }
    }

    fn make_cgroups(&mut self, root: &Root, cgroups: &Cgroups, spec: &Spec) -> Result<(), LabError> {
        let parent = PathBuf::from(format!("{CGROUP}{}", std::process::id()));
        let ours: Vec<PathBuf> = spec.vms.iter().map(|vm| parent.join(&vm.name)).collect();
        self.state.cgroups.push(parent);
        self.state.cgroups.extend(ours.iter().cloned());
        self.save()?;
        for cgroup in self.state.cgroups.clone() {
            cgroups.create(root, &cgroup)?;
        }
        // Marks the group as a leftover of this lab should the state be lost. A group that takes no
        // mark is not found then.
        if let Some(parent) = self.state.cgroups.first() {
            let _ = mark(root, &cgroups.dir(parent)?, &self.run_dir.join(LAB_FILE));
        }
        // On v2 a cgroup has I/O files only when its parents pass the controller on.
        if let Some(first) = ours.first() {
            let files = cgroups.io_to_enable(root, first)?;
            self.state.io_enabled.clone_from(&files);
            self.save()?;
            for file in files {
                root.write(&file, "+io")?;
            }
        }
        Ok(())
    }

    fn start_iod(
        &mut self,
        root: &Root,
        cgroups: &Cgroups,
        device: &Path,
        command: &IodCommand<'_>,
        options: &UpOptions<'_>,
    ) -> Result<(), LabError> {
        (options.progress)("starting the I/O domain");
        let dir = self.run_dir.join(DOMAIN_DIR);
        std::fs::create_dir_all(&dir).map_err(|source| LabError::State { path: dir.clone(), source })?;
        let command = command(device, &self.state.vms, &self.run_dir)?;
        // The I/O domain orders requests itself; an elevator below it would do so again. The
        // elevator of a device which is not the lab's is left to the user.
        if self.state.twin.is_some() || self.state.file.is_some() {
            BlockDevice::find(root, device)?.set_elevator(root, "none")?;
        } else {
            (options.progress)(
                "the device's elevator is left as it is; under the I/O domain `none` is right",
            );
        }
        // In the lab's own cgroup from the start: after a crash before the state is saved, `down`
        // finds the process there.
        let procs = match self.state.cgroups.first() {
            Some(own) => Some(cgroups.dir(own)?.join("cgroup.procs")),
            None => None,
        };
        let path = dir.join("log");
        let log =
            std::fs::File::create(&path).map_err(|source| LabError::State { path: path.clone(), source })?;
        let inherited = Inherited { stdin: Stdio::null(), log, read_log: &|| std::fs::read(&path) };
        self.state.iod = Some(start::start(command, procs.as_deref(), inherited)?);
        self.save()
    }

    fn start_guests(
        &mut self,
        cgroups: &Cgroups,
        device: &Path,
        spec: &Spec,
        options: &UpOptions<'_>,
    ) -> Result<(), LabError> {
        let no_image = || LabError::NotALab("QEMU guests need a guest image".to_owned());
        let Some((images, accel)) = options.guests else {
            return Err(no_image());
        };
        self.state.accelerator = accel.as_str().to_owned();
        (options.progress)(&format!("starting {} guests ({})", self.state.vms.len(), accel.as_str()));
        let mut configs = Vec::new();
        for (vm, wanted) in self.state.vms.iter_mut().zip(&spec.vms) {
            let image = images.get(&wanted.kernel).ok_or_else(no_image)?;
            vm.kernel.clone_from(&image.release);
            let disk = if self.state.iod.is_some() {
                GuestDisk::VhostUser { socket: domain_socket(&self.run_dir, &vm.name), queues: Some(1) }
            } else {
                let (offset, size) = (Bytes(vm.offset), Bytes(vm.size));
                DiskRegion { path: device.to_owned(), offset, size }.into()
            };
            configs.push(QemuConfig {
                accel,
                cgroup_procs: procs_of(cgroups, &vm.cgroup)?,
                // From the start: after a crash before the state is saved, `down` finds the guest
                // in its cgroup.
                lifetime: Lifetime::Detached,
                // The paper's priorities are with locked memory, which no other process can lock
                // later.
                lock_memory: wanted.cpu.priorities == Some(Priorities::Rt),
                ..QemuConfig::new(&vm.name, image.clone(), disk, &self.run_dir.join(GUESTS))
            });
        }
        let started: Vec<Result<QemuGuest, QemuError>> = std::thread::scope(|scope| {
            let threads: Vec<_> = configs.iter().map(|c| scope.spawn(|| QemuGuest::start(c))).collect();
            threads
                .into_iter()
                .map(|t| t.join().unwrap_or_else(|_| Err(QemuError::gone("that panicked on its way up"))))
                .collect()
        });
        stop_when_cancelled(options)?;
        let mut guests = started.into_iter().collect::<Result<Vec<_>, _>>()?;
        if let Some(guest) = guests.first_mut() {
            let version = guest.qmp()?.version().qemu;
            self.state.vmm = format!("QEMU {}.{}.{}", version.major, version.minor, version.micro);
        }
        for (vm, guest) in self.state.vms.iter_mut().zip(guests) {
            vm.qemu = Some(guest.detach());
        }
        self.save()
    }
}

fn stop_when_cancelled(options: &UpOptions<'_>) -> Result<(), LabError> {
    if options.cancel.load(Ordering::Relaxed) { Err(LabError::Cancelled) } else { Ok(()) }
}

/// Files by which a guest joins the VM's cgroup, and on v1 the memory controller's of the same path
/// where there is one ([`vm_cgroup`](super::vm_cgroup)).
fn procs_of(cgroups: &Cgroups, vm: &Path) -> Result<Vec<PathBuf>, LabError> {
    let root = Root::default();
    let own = cgroups.dir(vm)?;
    let memory = Cgroups::detect_memory(&root)?.filter(|memory| memory.hierarchy == Hierarchy::V1);
    // A path that is not mounted there is no group.
    let memory = memory.and_then(|memory| memory.dir(vm).ok()).filter(|dir| *dir != own);
    let mut dirs = vec![own];
    if let Some(dir) = memory {
        if root.exists(&dir)? {
            dirs.push(dir);
        }
    }
    Ok(dirs.iter().map(|dir| dir.join("cgroup.procs")).collect())
}

#[cfg(test)]
mod tests {
    use rtvirtio_testkit::{Need, has, skip};

    use super::super::vm_cgroup;
    use super::*;

    #[test]
    fn a_guest_joins_the_memory_group_that_was_made_for_it() {
        let test = "a_guest_joins_the_memory_group_that_was_made_for_it";
        if !has(test, &[Need::Root]) {
            return;
        }
        let root = Root::default();
        let memory = Cgroups::detect_memory(&root).unwrap().filter(|found| found.hierarchy == Hierarchy::V1);
        let Some(memory) = memory else { return skip(test, "no cgroup v1 of the memory controller") };
        let (cgroups, vm) = (Cgroups::detect(&root).unwrap(), vm_cgroup("joins-memory"));
        let without = procs_of(&cgroups, &vm).unwrap();
        memory.create(&root, &vm).unwrap();
        let with = procs_of(&cgroups, &vm).unwrap();
        memory.remove(&root, &vm).unwrap();
        memory.remove(&root, vm.parent().unwrap()).unwrap();
        let own = cgroups.dir(&vm).unwrap().join("cgroup.procs");
        assert_eq!(without, std::slice::from_ref(&own));
        assert_eq!(with, [own, memory.dir(&vm).unwrap().join("cgroup.procs")]);
    }
}
