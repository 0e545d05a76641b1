//! A device measured.

use std::path::PathBuf;
use std::time::Duration;

use rtvirtio_kernel::{Claim, Root, Stack};
use rtvirtio_measure::MeasureError;
use rtvirtio_measure::awake::Awake;
use rtvirtio_measure::profile::{Extent, GENTLE_DEPTHS, ProfileControl, ProfileOptions, least_time, measure};
use rtvirtio_model::Profile;
use rtvirtio_units::Bytes;

use crate::bfq;
use crate::data_guard;
use crate::dirs::{Dirs, profile_key};
use crate::elevator::MeasuredElevator;
use crate::error::{Context as _, Error, Result, bail, ensure};
use crate::identity;
use crate::progress::Progress;
use crate::site::Site;

/// Permissions of a measurement on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reads at low depths only, under the elevator that is set: VMs may use it.
    Gentle,
    /// Reads only: it holds data, and may be in use. Refused while VMs use it.
    Reads,
    /// The same although VMs use it: the user accepts that they are slowed.
    ReadsUnderVms,
    /// Reads and writes: the user accepts the loss of its data. Refused while anything uses it.
    DestroyData,
    /// Reads and writes on a device that was made for the measurement and holds no data.
    Made,
}

impl Access {
    fn writes(self) -> bool {
        matches!(self, Self::DestroyData | Self::Made)
    }

    fn extent(self) -> Extent {
        if self == Self::Gentle { Extent::Gentle } else { Extent::Whole }
    }

    /// Refuses a measurement that is too short, before anything is touched.
    ///
    /// # Errors
    /// [`Kind::Argument`](crate::Kind::Argument) with the least length.
    pub fn check_length(self, length: Duration) -> Result<()> {
        let least = least_time(BLOCK, self.extent(), self.writes()).as_secs_f64().ceil();
        let writes = if self.writes() { " with writes" } else { "" };
        ensure!(
            length >= Duration::from_secs_f64(least),
            Argument,
            "--for {:.0}s is too short{writes}: give at least {least}s",
            length.as_secs_f64()
        );
        Ok(())
    }
}

/// Size of the requests that the models expect.
const BLOCK: Bytes = Bytes::from_kib(4);

/// Length of a measurement of a few points, at least.
const CONFIRMING: Duration = Duration::from_secs(6);

/// The device of a site, and I/O as its first VM sees it. `on_real` is how a device that was not
/// made for the site may be measured.
///
/// # Errors
/// As [`of_device`].
pub fn of_site(
    site: &Site,
    on_real: Access,
    length: Duration,
    dirs: &Dirs,
    progress: &dyn Progress,
) -> Result<Profile> {
    let made = site.spec.device.is_made();
    let access = if made { Access::Made } else { on_real };
    let mut profile = of_device(&site.stack, length, access, dirs, progress)?;
    if made {
        // A loop device's number is chance, and so is the file behind it.
        profile.device = profile_key(&site.spec.device)?;
        profile.identity = identity::of_device(&site.spec.device)?;
    }
    if site.lab.is_some() {
        profile.guest = Some(crate::guest_point::measure(site, &profile, dirs, progress)?);
    }
    Ok(profile)
}

/// A device. The elevator is changed on the disks that order its requests; of a device that leaves
/// no choice, only what it does is measured.
///
/// # Errors
/// [`Kind::Guarded`](crate::Kind::Guarded) when it is in use by VMs, or by anything when writes are
/// asked for; [`Kind::Argument`](crate::Kind::Argument) for a measurement that is too short;
/// [`Kind::InForce`](crate::Kind::InForce) while a plan is in force,
/// [`Kind::Cancelled`](crate::Kind::Cancelled) when the user stops it; the elevator is put back.
pub fn of_device(
    stack: &Stack,
    length: Duration,
    access: Access,
    dirs: &Dirs,
    progress: &dyn Progress,
) -> Result<Profile> {
    access.check_length(length)?;
    measured(stack, length, access, access.extent(), dirs, progress)
}

/// A few points of a device, for a comparison with a profile of the same kind of device. `access`
/// is that of a whole measurement.
///
/// # Errors
/// As [`of_device`].
pub fn few_points_of(stack: &Stack, access: Access, dirs: &Dirs, progress: &dyn Progress) -> Result<Profile> {
    let length = CONFIRMING.max(least_time(BLOCK, Extent::Confirming, access.writes()) * 2);
    measured(stack, length, access, Extent::Confirming, dirs, progress)
}

fn measured(
    stack: &Stack,
    length: Duration,
    access: Access,
    extent: Extent,
    dirs: &Dirs,
    progress: &dyn Progress,
) -> Result<Profile> {
    let root = Root::default();
    let device = &stack.device;
    if let (true, Some(partition)) = (access.writes(), &device.partition) {
        // The measurement is of the whole disk: writing would reach the partition table and the
        // other partitions.
        bail!(
            Guarded,
            "{partition} is a partition of {}: writes can be measured on a whole disk only",
            device.name
        );
    }
    let path = PathBuf::from("/dev").join(device.name.replace('!', "/"));
    if access == Access::Reads {
        data_guard::refuse_under_vms(&path, stack, length)?;
    }
    let gentle = access == Access::Gentle;
    let choice = !gentle && !stack.disks.is_empty();
    if choice && extent == Extent::Whole {
        bfq::load(stack, progress)?;
    }
    let dir = work_dir(dirs)?;
    let mut options = ProfileOptions::new(path.clone(), Bytes(device.size(&root)?), dir.path().to_owned());
    let made = access == Access::Made;
    // A made device has the machine for itself, as on a real-time host: its CPUs do not sleep, and
    // stalls of the host are not the device's.
    let _awake = if made { Awake::hold().ok() } else { None };
    options.watch = made;
    options.extent = extent;
    options.bfq = choice;
    options.budget = length;
    let claim = match access {
        Access::Made => Some(Claim::of_made(&path)?),
        Access::DestroyData => Some(data_guard::claim(&path, &[], progress)?),
        Access::Reads | Access::ReadsUnderVms => {
            data_guard::warn_of_load(&path, progress)?;
            None
        }
        Access::Gentle => None,
    };
    let elevator = if gentle { None } else { Some(MeasuredElevator::open(stack, dirs, progress)?) };
    let mut bar = progress.bar(&format!("measuring {}", device.name), 100);
    let result = measure(
        &options,
        &mut ProfileControl {
            set_elevator: &mut |name| match &elevator {
                Some(elevator) if choice => elevator.set(name).map_err(Into::into),
                _ => Ok(()),
            },
            claim: claim.as_ref(),
            progress: &mut |done, total, what| {
                bar.set_message(&format!("measuring {}: {what}", device.name));
                bar.set(done * 100 / total.max(1));
            },
            cancel: progress.cancel_flag(),
        },
    );
    drop(bar);
    if let Some(elevator) = elevator {
        elevator.put_back()?;
    }
    let mut profile = match result {
        Err(MeasureError::Cancelled) => return Err(Error::cancelled()),
        other => Profile { identity: identity::of_block(&root, device)?, ..other? },
    };
    if gentle {
        profile.doubts.insert(0, not_known(&device.elevators(&root)?.current));
    }
    Ok(profile)
}

/// What a gentle measurement does not show.
fn not_known(elevator: &str) -> String {
    format!(
        "measured gently, with at most {} reads in flight and under the elevator {elevator}, next to what else uses the device: what it does when it is full, what BFQ \
         costs on it, larger requests and writes are not known, so plans for heavy loads are guesses",
        GENTLE_DEPTHS.iter().max().unwrap_or(&1)
    )
}

/// A directory for fio's files, removed afterwards.
fn work_dir(dirs: &Dirs) -> Result<tempfile::TempDir> {
    std::fs::create_dir_all(&dirs.run).with_context(|| format!("cannot create {}", dirs.run.display()))?;
    Ok(tempfile::Builder::new().prefix("profile-").tempdir_in(&dirs.run)?)
}
