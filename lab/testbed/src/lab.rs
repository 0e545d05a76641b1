//! A lab's life: up, run, down. Everything it makes is in its state file before it is made.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rtvirtio_kernel::holders::describe_unseen;
use rtvirtio_kernel::leftovers::mark;
use rtvirtio_kernel::process::Process;
use rtvirtio_kernel::{BlockDevice, Cgroups, Claim, ClaimError, HostError, Root};
use rtvirtio_spec::{Device, Kernel, LabKind, Priorities, Reach, Spec};
use rtvirtio_units::Bytes;
use rtvirtio_vmm::spawn::Lifetime;
use rtvirtio_workflow::domain::start::{self, Inherited, IodError};
use rtvirtio_workflow::inventory::{Inventory, ListedGuest, ListedVm};
use rtvirtio_workflow::leftovers::LAB_FILE;

use crate::FileDisk;
use crate::image::{GuestImage, ImageError};
use crate::qemu::{Accel, DiskRegion, GUEST_DISK, GuestDisk, QemuConfig, QemuError, QemuGuest, QemuHandle};
use crate::state::{LabState, LabVm};
use crate::twin::{ProfileError, TwinError, TwinHandle, TwinProfile};
use rtvirtio_measure::workload::{Place, VmLoad};

/// Start of the name of the lab's cgroup, below the hierarchy's root; the pid of its maker follows, so that labs with different run
/// directories do not meet.
const CGROUP: &str = "/rtvirtio-lab-";
/// Directory of the I/O domain's sockets and log, below the run directory.
pub const DOMAIN_DIR: &str = "iod";
/// Directory of the guests' sockets and logs, below the run directory.
const GUESTS: &str = "guests";
/// Parts of the device begin at multiples of this.
const ALIGNMENT: u64 = 1 << 20;
/// Smallest part of the device for one VM.
const SMALLEST_PART: u64 = 16 << 20;
/// How long a stray process may take to end.
pub(crate) const STOP_PATIENCE: Duration = Duration::from_secs(2);

/// Why a lab cannot be made or removed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LabError {
    /// There is one already.
    #[error("a lab is up already (from {0}): remove it with `rtvirtio-lab down`")]
    AlreadyUp(String),
    /// There is none.
    #[error("no lab is up: make one with `rtvirtio-lab up SPEC`")]
    NotUp,
    /// The lab's state is not complete: it crashed on its way up.
    #[error("the lab from {0} did not come up completely: remove it with `rtvirtio-lab down`")]
    Incomplete(String),
    /// The spec has VMs that are not the lab's to start.
    #[error(
        "vm {0} is not a lab VM: give it `lab = \"qemu\"` or `lab = \"process\"`, or use `rtvirtio verify` for existing VMs"
    )]
    NotALab(String),
    /// The device is too small.
    #[error("device {}: {message}", path.display())]
    Device {
        /// The device.
        path: PathBuf,
        /// What is wrong, with the remedy.
        message: String,
    },
    /// The lab's state file.
    #[error("lab state in {}: {source}", path.display())]
    State {
        /// The run directory.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The user stopped it.
    #[error("cancelled")]
    Cancelled,
    /// The device is in use; a lab needs one of its own.
    #[error("a lab needs a device of its own: {0}")]
    Claim(#[from] ClaimError),
    /// A kernel file.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The twin's profile.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// The twin.
    #[error(transparent)]
    Twin(#[from] TwinError),
    /// The guest image.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// A guest.
    #[error(transparent)]
    Qemu(#[from] QemuError),
    /// The I/O domain.
    #[error(transparent)]
    Iod(#[from] IodError),
    /// The list of VMs for the product.
    #[error(transparent)]
    Inventory(#[from] rtvirtio_workflow::Error),
}

/// Given the shared device, the VMs with their parts of it, and the run directory (see [`domain_socket`] and [`DOMAIN_DIR`]): the I/O domain's command.
pub type IodCommand<'a> = dyn Fn(&Path, &[LabVm], &Path) -> Result<Command, IodError> + 'a;

/// The I/O domain's socket of a VM's disk.
#[must_use]
pub fn domain_socket(run_dir: &Path, vm: &str) -> PathBuf {
    run_dir.join(DOMAIN_DIR).join(format!("{vm}.sock"))
}

/// A guest image for each kernel.
pub type GuestImages = BTreeMap<Kernel, GuestImage>;

/// The kernels that the guests of a spec boot.
#[must_use]
pub fn guest_kernels(spec: &Spec) -> BTreeSet<Kernel> {
    spec.vms.iter().filter(|vm| vm.reach == Reach::Lab(LabKind::Qemu)).map(|vm| vm.kernel).collect()
}

/// What `up` needs to know beside the spec.
pub struct UpOptions<'a> {
    /// State file, sockets, logs.
    pub run_dir: &'a Path,
    /// The command that serves a twin: given profile, size and mount directory.
    pub twin_server: &'a dyn Fn(&str, Bytes, &Path) -> Command,
    /// An image for each kernel that the guests have ([`guest_kernels`]), and how they run; not needed for process VMs.
    pub guests: Option<(&'a GuestImages, Accel)>,
    /// The command that serves the guests' disks through the I/O domain; QEMU's own backend on the device does without.
    pub iod: Option<&'a IodCommand<'a>>,
    /// Set by anyone to stop.
    pub cancel: &'a AtomicBool,
    /// Told what happens.
    pub progress: &'a dyn Fn(&str),
}

/// A lab that is up.
#[derive(Clone, Debug)]
pub struct Lab {
    run_dir: PathBuf,
    state: LabState,
}

impl Lab {
    /// Makes device, cgroups and guests. On failure or cancellation everything made so far is removed.
    ///
    /// # Errors
    /// [`LabError`].
    pub fn up(spec: &Spec, name: &str, text: &str, options: &UpOptions<'_>) -> Result<Self, LabError> {
        for vm in &spec.vms {
            if !matches!(vm.reach, Reach::Lab(_)) {
                return Err(LabError::NotALab(vm.name.clone()));
            }
        }
        if let Some(old) = load(options.run_dir)? {
            return Err(LabError::AlreadyUp(old.spec_name));
        }
        let mut lab = Self { run_dir: options.run_dir.to_owned(), state: LabState::new(name, text) };
        match lab.build(spec, options) {
            Ok(()) => Ok(lab),
            Err(e) => {
                if let Err(also) = lab.down() {
                    (options.progress)(&format!("could not remove all of the lab: {also}"));
                }
                Err(e)
            }
        }
    }

    /// The lab that is up in this run directory.
    ///
    /// # Errors
    /// [`LabError::NotUp`], [`LabError::Incomplete`], or an unreadable state.
    pub fn open(run_dir: &Path) -> Result<Self, LabError> {
        let state = load(run_dir)?.ok_or(LabError::NotUp)?;
        if !state.complete {
            return Err(LabError::Incomplete(state.spec_name));
        }
        Ok(Self { run_dir: run_dir.to_owned(), state })
    }

    /// Whether a lab, complete or not, is in this run directory.
    ///
    /// # Errors
    /// When its state cannot be read.
    pub fn is_there(run_dir: &Path) -> Result<bool, LabError> {
        Ok(load(run_dir)?.is_some())
    }

    /// Removes what a lab left in this run directory, complete or not. False when there was none.
    ///
    /// # Errors
    /// The first part that cannot be removed; the state then stays, so that it can be tried again.
    pub fn remove(run_dir: &Path) -> Result<bool, LabError> {
        let Some(state) = load(run_dir)? else { return Ok(false) };
        Self { run_dir: run_dir.to_owned(), state }.down()?;
        Ok(true)
    }

    /// What is up.
    #[must_use]
    pub fn state(&self) -> &LabState {
        &self.state
    }

    /// The shared device.
    #[must_use]
    pub fn device(&self) -> &Path {
        self.state.device.as_deref().unwrap_or(Path::new("/dev/null"))
    }

    /// Where each VM's tasks run, in spec order.
    ///
    /// # Errors
    /// When there is no block I/O cgroup hierarchy.
    pub fn loads(&self, spec: &Spec) -> Result<Vec<VmLoad>, LabError> {
        let root = Root::default();
        let cgroups = Cgroups::detect(&root)?;
        let mut loads = Vec::new();
        for (vm, here) in spec.vms.iter().zip(&self.state.vms) {
            let place = match &here.qemu {
                Some(qemu) => Place::Guest { agent: qemu.agent_socket(), target: PathBuf::from(GUEST_DISK) },
                None => Place::Host {
                    cgroup_procs: vec![cgroups.dir(&here.cgroup)?.join("cgroup.procs")],
                    target: self.device().to_owned(),
                    region: Some(here.region()),
                },
            };
            loads.push(VmLoad { vm: vm.clone(), place, predicted: Vec::new(), io_class: None });
        }
        Ok(loads)
    }

    fn build(&mut self, spec: &Spec, options: &UpOptions<'_>) -> Result<(), LabError> {
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

    /// The VMs as the product finds them.
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
                let size = Bytes(device.size(&root)?);
                self.state.device = Some(path.clone());
                self.state.device_text = format!("{} ({size})", device.name);
                self.save()?;
                Ok((path.clone(), size))
            }
            Device::Twin { profile, size } => {
                let declared = TwinProfile::load(profile)?;
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
                // What the papers start from, and many distributions' udev rules set. A loop device begins with another.
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
        // So that it is known for a leftover should the state be lost. Where it takes no mark it
        // never is.
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
        // It orders requests itself; an elevator below it would do so again. That of a device which is not the lab's is the user's.
        if self.state.twin.is_some() || self.state.file.is_some() {
            BlockDevice::find(root, device)?.set_elevator(root, "none")?;
        } else {
            (options.progress)(
                "the device's elevator is left as it is; under the I/O domain `none` is right",
            );
        }
        // In the lab's own cgroup from the start: a crash before it is saved leaves it there, where `down` finds it.
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
                GuestDisk::VhostUser { socket: domain_socket(&self.run_dir, &vm.name), queues: 1 }
            } else {
                let (offset, size) = (Bytes(vm.offset), Bytes(vm.size));
                DiskRegion { path: device.to_owned(), offset, size }.into()
            };
            configs.push(QemuConfig {
                accel,
                cgroup_procs: vec![cgroups.dir(&vm.cgroup)?.join("cgroup.procs")],
                // From the start: a crash before it is saved leaves it in its cgroup, where `down` finds it.
                lifetime: Lifetime::Detached,
                // The paper's priorities are with locked memory; another process cannot lock it later.
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

    /// Stops the guests and removes cgroups and device. Safe to call again.
    ///
    /// # Errors
    /// The first part that cannot be removed; the state stays, so that it can be tried again.
    pub fn down(&mut self) -> Result<(), LabError> {
        let root = Root::default();
        Inventory::remove(&self.run_dir)?;
        for vm in &mut self.state.vms {
            if let Some(qemu) = vm.qemu.take() {
                qemu.kill()?;
            }
        }
        if let Some(iod) = self.state.iod.take() {
            iod.stop(STOP_PATIENCE);
        }
        if !self.state.cgroups.is_empty() {
            let cgroups = Cgroups::detect(&root)?;
            for cgroup in self.state.cgroups.iter().rev() {
                if root.exists(cgroups.dir(cgroup)?)? {
                    // A crash between starting a process and saving its id leaves it only here. The groups are the lab's own.
                    for pid in cgroups.pids(&root, cgroup)? {
                        stop_in(&cgroups, &root, cgroup, pid)?;
                    }
                    cgroups.remove(&root, cgroup)?;
                }
            }
        }
        self.state.cgroups.clear();
        for file in self.state.io_enabled.iter().rev() {
            // Files below the removed cgroups are gone with them. Refused (EBUSY) when somebody uses the controller below by now: then
            // it is theirs and stays on.
            if root.exists(file)? {
                let _ = root.write(file, "-io");
            }
        }
        self.state.io_enabled.clear();
        if let Some(twin) = &mut self.state.twin {
            twin.remove()?;
        }
        self.state.twin = None;
        if let Some(file) = &mut self.state.file {
            file.remove()?;
        }
        self.state.file = None;
        // Only a log.
        let _ = std::fs::remove_file(self.run_dir.join("twin.log"));
        // Sockets and logs of guests that a crash left; the guests themselves are gone with their cgroups.
        for dir in [GUESTS, DOMAIN_DIR] {
            match std::fs::remove_dir_all(self.run_dir.join(dir)) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(self.state_error(e)),
                _ => {}
            }
        }
        LabState::forget(&self.run_dir).map_err(|source| self.state_error(source))
    }

    fn save(&self) -> Result<(), LabError> {
        self.state.save(&self.run_dir).map_err(|source| self.state_error(source))
    }

    fn state_error(&self, source: io::Error) -> LabError {
        LabError::State { path: self.run_dir.clone(), source }
    }
}

fn load(run_dir: &Path) -> Result<Option<LabState>, LabError> {
    LabState::load(run_dir).map_err(|source| LabError::State { path: run_dir.to_owned(), source })
}

/// Stops a process that was listed in a cgroup, if the process that has this id is still in it.
fn stop_in(cgroups: &Cgroups, root: &Root, cgroup: &Path, pid: u32) -> Result<(), LabError> {
    let failed = |source| LabError::State { path: format!("/proc/{pid}").into(), source };
    let Some(process) = Process::open(pid).map_err(failed)? else { return Ok(()) };
    // The pidfd is of the process that is in the list now, not of one that got the id since the list was made.
    if cgroups.pids(root, cgroup)?.contains(&pid) {
        // One that does not end keeps the cgroup busy, which is told when that is removed.
        process.stop(STOP_PATIENCE).map_err(failed)?;
    }
    Ok(())
}

fn stop_when_cancelled(options: &UpOptions<'_>) -> Result<(), LabError> {
    if options.cancel.load(Ordering::Relaxed) { Err(LabError::Cancelled) } else { Ok(()) }
}
