//! A device measured.

use std::path::PathBuf;
use std::time::Duration;

use rtvirtio_kernel::{Claim, Root, Stack};
use rtvirtio_measure::MeasureError;
use rtvirtio_measure::awake::Awake;
use rtvirtio_measure::profile::{ProfileControl, ProfileOptions, measure};
use rtvirtio_model::Profile;
use rtvirtio_units::Bytes;

use crate::bfq;
use crate::data_guard;
use crate::dirs::{Dirs, profile_key};
use crate::elevator::MeasuredElevator;
use crate::error::{Context as _, Error, Result, bail};
use crate::progress::Progress;
use crate::site::Site;

/// Permissions of a measurement on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reads only: it holds data, and may be in use.
    Reads,
    /// Reads and writes: the user accepts the loss of its data. Refused while anything uses it.
    DestroyData,
    /// Reads and writes on a device that was made for the measurement and holds no data.
    Made,
}

/// The device of a site, and I/O as its first VM sees it.
///
/// # Errors
/// As [`of_device`].
pub fn of_site(site: &Site, length: Duration, dirs: &Dirs, progress: &dyn Progress) -> Result<Profile> {
    let made = site.spec.device.is_made();
    let access = if made { Access::Made } else { Access::Reads };
    let mut profile = of_device(&site.stack, length, access, dirs, progress)?;
    if made {
        // A loop device's number is chance.
        profile.device = profile_key(&site.spec.device)?;
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
/// [`Kind::Guarded`](crate::Kind::Guarded) when writes are asked for and it is in use,
/// [`Kind::InForce`](crate::Kind::InForce) while a plan is in force,
/// [`Kind::Cancelled`](crate::Kind::Cancelled) when the user stops it; the elevator is put back.
pub fn of_device(
    stack: &Stack,
    length: Duration,
    access: Access,
    dirs: &Dirs,
    progress: &dyn Progress,
) -> Result<Profile> {
    let root = Root::default();
    let device = &stack.device;
    if let (true, Some(partition)) = (access != Access::Reads, &device.partition) {
        // The measurement is of the whole disk: writing would reach the partition table and the
        // other partitions.
        bail!(
            Guarded,
            "{partition} is a partition of {}: writes can be measured on a whole disk only",
            device.name
        );
    }
    let path = PathBuf::from("/dev").join(device.name.replace('!', "/"));
    let choice = !stack.disks.is_empty();
    if choice {
        bfq::load(stack, progress)?;
    }
    let dir = work_dir(dirs)?;
    let mut options = ProfileOptions::new(path.clone(), Bytes(device.size(&root)?), dir.path().to_owned());
    let made = access == Access::Made;
    // A made device has the machine for itself, as on a real-time host: its CPUs do not sleep, and
    // stalls of the host are not the device's.
    let _awake = if made { Awake::hold().ok() } else { None };
    options.watch = made;
    options.bfq = choice;
    options.budget = length;
    let claim = match access {
        Access::Made => Some(Claim::of_made(&path)?),
        Access::DestroyData => Some(data_guard::claim(&path, &[], progress)?),
        Access::Reads => {
            data_guard::warn_of_load(&path, progress)?;
            None
        }
    };
    let elevator = MeasuredElevator::open(stack, dirs, progress)?;
    let mut bar = progress.bar(&format!("measuring {}", device.name), 100);
    let result = measure(
        &options,
        &mut ProfileControl {
            set_elevator: &mut |name| if choice { elevator.set(name).map_err(Into::into) } else { Ok(()) },
            claim: claim.as_ref(),
            progress: &mut |done, total, what| {
                bar.set_message(&format!("measuring {}: {what}", device.name));
                bar.set(done * 100 / total.max(1));
            },
            cancel: progress.cancel_flag(),
        },
    );
    drop(bar);
    elevator.put_back()?;
    match result {
        Err(MeasureError::Cancelled) => Err(Error::cancelled()),
        other => Ok(Profile { identity: device.identity(&root)?, ..other? }),
    }
}

/// A directory for fio's files, removed afterwards.
fn work_dir(dirs: &Dirs) -> Result<tempfile::TempDir> {
    std::fs::create_dir_all(&dirs.run).with_context(|| format!("cannot create {}", dirs.run.display()))?;
    Ok(tempfile::Builder::new().prefix("profile-").tempdir_in(&dirs.run)?)
}
