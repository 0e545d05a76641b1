//! A lab: up, run, down. Each part is in the state file before it is made.

mod down;
mod up;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use rtvirtio_kernel::{Cgroups, ClaimError, HostError, Root};
use rtvirtio_spec::{Kernel, LabKind, Reach, Spec};
use rtvirtio_units::Bytes;
use rtvirtio_workflow::domain::start::IodError;

use crate::image::{GuestImage, ImageError};
use crate::qemu::{Accel, GUEST_DISK, QemuError};
use crate::state::{LabState, LabVm};
use crate::twin::{ProfileError, TwinError};
use rtvirtio_measure::workload::{Place, VmLoad};

/// Prefix of the lab's cgroup, below the hierarchy's root; the pid of its maker follows, so that
/// labs with different run directories do not share it.
const CGROUP: &str = "/rtvirtio-lab-";
/// Cgroup of a VM of the lab that this process makes, below the hierarchy's root.
///
/// On cgroup v1 a guest also joins the group of the memory controller with this path, where there
/// is one: memory stays with the group in which it was first used.
#[must_use]
pub fn vm_cgroup(vm: &str) -> PathBuf {
    PathBuf::from(format!("{CGROUP}{}", std::process::id())).join(vm)
}

/// Directory of the I/O domain's sockets and log, below the run directory.
pub const DOMAIN_DIR: &str = "iod";
/// Directory of the guests' sockets and logs, below the run directory.
const GUESTS: &str = "guests";
/// Parts of the device begin at multiples of this.
const ALIGNMENT: u64 = 1 << 20;
/// Smallest part of the device for one VM.
const SMALLEST_PART: u64 = 16 << 20;
/// Longest wait for the end of a stray process.
pub(crate) const STOP_PATIENCE: Duration = Duration::from_secs(2);

/// Reasons for which a lab cannot be made, used or removed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LabError {
    #[error("a lab is up already (from {0}): remove it with `rtvirtio-lab down`")]
    AlreadyUp(String),
    /// No lab is up in this run directory.
    #[error("no lab is up: make one with `rtvirtio-lab up SPEC`")]
    NotUp,
    /// The lab's state is not complete: it crashed on its way up.
    #[error("the lab from {0} did not come up completely: remove it with `rtvirtio-lab down`")]
    Incomplete(String),
    /// The spec has a VM that the lab does not start.
    #[error(
        "vm {0} is not a lab VM: give it `lab = \"qemu\"` or `lab = \"process\"`, or use `rtvirtio verify` for existing VMs"
    )]
    NotALab(String),
    /// The device is too small.
    #[error("device {}: {message}", path.display())]
    Device {
        path: PathBuf,
        /// Cause, with the remedy.
        message: String,
    },
    /// The lab's state file cannot be read or written.
    #[error("lab state in {}: {source}", path.display())]
    State { path: PathBuf, source: io::Error },
    /// The user stopped it.
    #[error("cancelled")]
    Cancelled,
    /// The device is in use; a lab needs one of its own.
    #[error("a lab needs a device of its own: {0}")]
    Claim(#[from] ClaimError),
    /// A kernel file cannot be accessed.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The twin's profile is not usable.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// An operation on the twin failed.
    #[error(transparent)]
    Twin(#[from] TwinError),
    /// The guest image cannot be made.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// A guest cannot be started or ended.
    #[error(transparent)]
    Qemu(#[from] QemuError),
    /// The I/O domain cannot be started.
    #[error(transparent)]
    Iod(#[from] IodError),
    /// The list of the lab's VMs cannot be saved or removed.
    #[error(transparent)]
    Inventory(#[from] rtvirtio_workflow::Error),
}

/// Makes the I/O domain's command from the shared device, the VMs with their parts of it, and the
/// run directory (see [`domain_socket`] and [`DOMAIN_DIR`]).
pub type IodCommand<'a> = dyn Fn(&Path, &[LabVm], &Path) -> Result<Command, IodError> + 'a;

/// Path of the I/O domain's socket of a VM's disk.
#[must_use]
pub fn domain_socket(run_dir: &Path, vm: &str) -> PathBuf {
    run_dir.join(DOMAIN_DIR).join(format!("{vm}.sock"))
}

pub type GuestImages = BTreeMap<Kernel, GuestImage>;

/// Kernels that the guests of a spec boot.
#[must_use]
pub fn guest_kernels(spec: &Spec) -> BTreeSet<Kernel> {
    spec.vms.iter().filter(|vm| vm.reach == Reach::Lab(LabKind::Qemu)).map(|vm| vm.kernel).collect()
}

/// Options of `up` in addition to the spec.
pub struct UpOptions<'a> {
    /// Directory of state file, sockets and logs.
    pub run_dir: &'a Path,
    /// Makes the command that serves a twin from profile, size and mount directory.
    pub twin_server: &'a dyn Fn(&str, Bytes, &Path) -> Command,
    /// An image for each kernel of the guests ([`guest_kernels`]), and their accelerator; not
    /// needed for process VMs.
    pub guests: Option<(&'a GuestImages, Accel)>,
    /// Makes the command that serves the guests' disks through the I/O domain; `None` for QEMU's
    /// own backend on the device.
    pub iod: Option<&'a IodCommand<'a>>,
    /// Set to stop `up`; the parts made so far are removed.
    pub cancel: &'a AtomicBool,
    /// Receives a line before each step.
    pub progress: &'a dyn Fn(&str),
}

#[derive(Clone, Debug)]
pub struct Lab {
    run_dir: PathBuf,
    state: LabState,
}

impl Lab {
    /// Makes device, cgroups and guests. On failure or cancellation everything made so far is
    /// removed.
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
    pub fn is_there(run_dir: &Path) -> Result<bool, LabError> {
        Ok(load(run_dir)?.is_some())
    }

    /// Removes a lab from this run directory, complete or not. False if there is none.
    ///
    /// # Errors
    /// The first part that cannot be removed; the state then stays, so that it can be tried again.
    pub fn remove(run_dir: &Path) -> Result<bool, LabError> {
        let Some(state) = load(run_dir)? else { return Ok(false) };
        Self { run_dir: run_dir.to_owned(), state }.down()?;
        Ok(true)
    }

    #[must_use]
    pub fn state(&self) -> &LabState {
        &self.state
    }

    /// Path of the shared device.
    #[must_use]
    pub fn device(&self) -> &Path {
        self.state.device.as_deref().unwrap_or(Path::new("/dev/null"))
    }

    /// Place of each VM's tasks, in spec order.
    pub fn loads(&self, spec: &Spec) -> Result<Vec<VmLoad>, LabError> {
        let root = Root::default();
        let cgroups = Cgroups::detect(&root)?;
        let mut loads = Vec::new();
        for (vm, here) in spec.vms.iter().zip(&self.state.vms) {
            let place = match &here.qemu {
                Some(qemu) => Place::Guest {
                    agent: qemu.agent_socket().into(),
                    target: PathBuf::from(GUEST_DISK),
                    preload: true,
                },
                None => Place::Host {
                    cgroup_procs: vec![cgroups.dir(&here.cgroup)?.join("cgroup.procs")],
                    target: self.device().to_owned(),
                    region: Some(here.region()),
                },
            };
            loads.push(VmLoad::new(vm.clone(), place));
        }
        Ok(loads)
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
