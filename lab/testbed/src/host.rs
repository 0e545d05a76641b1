//! Labs with directories of their own, for an experiment, a demo or a twin's profile.

use std::path::{Path, PathBuf};
use std::process::Command;

use rtvirtio_spec::{Kernel, Spec};
use rtvirtio_units::Bytes;
use rtvirtio_vmm::{KvmProbe, probe_kvm};
use rtvirtio_workflow::apply::revert_all;
use rtvirtio_workflow::{Context as _, Dirs, Error, Kind, Progress, Result};

use crate::boxed::BoxError;
use crate::image::{GuestImage, ImageError, ensure_kernel};
use crate::kvm_verdict;
use crate::lab::{GuestImages, IodCommand, Lab, LabError, UpOptions, guest_kernels};
use crate::qemu::Accel;

/// State directory of a lab of its own, below its run directory.
const STATE: &str = "state";

/// Accelerator for guests, as the user chooses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccelChoice {
    /// KVM where a stock guest really boots under it, else TCG.
    Auto,
    /// Always KVM, without a probe.
    Kvm,
    /// Always TCG, QEMU's translator.
    Tcg,
}

/// Directories of labs, and the program that serves their twins.
#[derive(Clone, Debug)]
pub struct LabHost {
    /// State and run directories.
    pub dirs: Dirs,
    /// Directory of downloaded guest kernels and images.
    pub cache_dir: PathBuf,
    /// Makes the command that serves a twin from profile, size and mount directory.
    pub twin_server: fn(&str, Bytes, &Path) -> Command,
}

impl From<LabError> for Error {
    fn from(e: LabError) -> Self {
        match e {
            LabError::Cancelled => Self::cancelled(),
            LabError::Inventory(e) => e,
            LabError::Claim(_) => Self::from_source(Kind::Guarded, e),
            LabError::AlreadyUp(_) => Self::from_source(Kind::InForce, e),
            LabError::NotUp | LabError::Incomplete(_) => Self::from_source(Kind::NotRunning, e),
            LabError::NotALab(_) | LabError::Profile(_) => Self::from_source(Kind::File, e),
            other => Self::from_source(Kind::System, other),
        }
    }
}

impl From<ImageError> for Error {
    fn from(e: ImageError) -> Self {
        Self::from_source(Kind::System, e)
    }
}

impl From<BoxError> for Error {
    fn from(e: BoxError) -> Self {
        match e {
            BoxError::Cancelled => Self::cancelled(),
            BoxError::Word | BoxError::NotEmpty { .. } => Self::from_source(Kind::Argument, e),
            other => Self::from_source(Kind::System, other),
        }
    }
}

impl LabHost {
    /// The host of a lab that shares no directory with the user's lab: its settings are never mixed
    /// with those that the user has applied, and `rtvirtio-lab down` finds it after a crash.
    #[must_use]
    pub fn below(&self, dir: &str) -> Self {
        let run = self.dirs.run.join(dir);
        Self { dirs: Dirs { state: run.join(STATE), run }, ..self.clone() }
    }

    /// Reverts the settings that are applied to a lab with a state directory of its own, and
    /// removes the lab and its directory. Returns whether there was a lab.
    ///
    /// # Errors
    /// When a setting cannot be reverted (the lab is removed all the same) or a part of the lab
    /// cannot be removed.
    pub fn remove(&self) -> Result<bool> {
        let reverted = revert_all(&self.dirs);
        let was_up = Lab::remove(&self.dirs.run)?;
        // The settings of a removed device end with it, so a failed revert keeps no lab.
        reverted?;
        match std::fs::remove_dir_all(&self.dirs.run) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                Err(e).with_context(|| format!("cannot remove {}", self.dirs.run.display()))
            }
            _ => Ok(was_up),
        }
    }

    /// The guest image with this kernel, downloaded at its first use.
    ///
    /// # Errors
    /// When it cannot be made, or the user stops it.
    pub fn guest_image(&self, kernel: Kernel, progress: &dyn Progress) -> Result<GuestImage> {
        let image = ensure_kernel(&self.cache_dir, kernel, &|line| progress.step(line));
        // Ctrl-C also reaches apt, whose failure is then only a consequence.
        progress.check_cancelled()?;
        Ok(image?)
    }

    /// Makes the lab of a spec, with guest images where it has QEMU guests. `spec_source` is the
    /// spec's name and text.
    pub fn up(
        &self,
        spec: &Spec,
        spec_source: (&str, &str),
        accel: AccelChoice,
        iod: Option<&IodCommand<'_>>,
        progress: &dyn Progress,
    ) -> Result<Lab> {
        let mut images = GuestImages::new();
        for kernel in guest_kernels(spec) {
            images.insert(kernel, self.guest_image(kernel, progress)?);
        }
        // Whether KVM works does not depend on the kernel.
        let accel = images.values().next().map(|image| choose_accel(accel, image, progress)).transpose()?;
        let step = |text: &str| progress.step(text);
        let options = UpOptions {
            run_dir: &self.dirs.run,
            twin_server: &self.twin_server,
            guests: accel.map(|accel| (&images, accel)),
            iod,
            cancel: progress.cancel_flag(),
            progress: &step,
        };
        let (name, text) = spec_source;
        let made = Lab::up(spec, name, text, &options);
        // An unreadable state does not prove that nothing is left. A lab that was up stays.
        let stays = matches!(made, Ok(_) | Err(LabError::AlreadyUp(_)));
        if !stays && Lab::is_there(&self.dirs.run).unwrap_or(true) {
            progress.warn("not all of the lab could be removed: try `rtvirtio-lab down`");
            return Ok(made?);
        }
        match made {
            Err(_) if progress.is_cancelled() => Err(Error::cancelled()),
            other => Ok(other?),
        }
    }
}

/// The accelerator of guests: as chosen, or KVM where a stock guest boots under it.
pub fn choose_accel(choice: AccelChoice, image: &GuestImage, progress: &dyn Progress) -> Result<Accel> {
    match choice {
        AccelChoice::Kvm => Ok(Accel::Kvm),
        AccelChoice::Tcg => Ok(Accel::Tcg),
        AccelChoice::Auto => {
            if let Some((reason, file)) = kvm_verdict::recall(&image.kernel) {
                progress.step(&format!(
                    "KVM does not run a stock guest here ({reason}; found out less than an hour ago, and tried \
                     again once {} is removed): using TCG emulation, which is slower",
                    file.display()
                ));
                return Ok(Accel::Tcg);
            }
            progress.step("finding out whether KVM really works");
            let reason = match probe_kvm(&image.kernel, &image.initrd)? {
                KvmProbe::Works => return Ok(Accel::Kvm),
                KvmProbe::Broken { reason } => {
                    kvm_verdict::remember(&image.kernel, &reason);
                    format!("KVM does not run a stock guest here ({reason})")
                }
                KvmProbe::Absent { reason } => format!("no KVM here ({reason})"),
            };
            progress.step(&format!("{reason}: using TCG emulation, which is slower"));
            Ok(Accel::Tcg)
        }
    }
}
