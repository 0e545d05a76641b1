//! Measurement of a device.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rtvirtio_apply::Session;
use rtvirtio_kernel::{BlockDevice, Claim, Root, Stack};
use rtvirtio_measure::MeasureError;
use rtvirtio_measure::pm_qos::PmQosGuard;
use rtvirtio_measure::profile::{Extent, GENTLE_DEPTHS, ProfileControl, ProfileOptions, least_time, measure};
use rtvirtio_model::Profile;
use rtvirtio_units::Bytes;

use crate::bfq;
use crate::data_guard;
use crate::dirs::{Dirs, is_there, profile_key};
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
    /// Like `Reads`, also while VMs use it: the user accepts that they are slowed.
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

/// Measures the device of a site, and I/O as its first VM sees it. `on_real` is the access to a
/// device that was not made for the site.
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

/// Measures a device. The elevator is changed on the disks that order its requests; a device
/// without such disks is measured as it is.
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
    measured(stack, (length, false), access, access.extent(), dirs, progress)
}

/// Measures the device of a site that was made for the measurement, for all of `length` or until
/// all is known.
///
/// # Errors
/// As [`of_device`]; [`Kind::Argument`](crate::Kind::Argument) for another device.
pub fn of_made(
    site: &Site,
    length: Duration,
    all_of_length: bool,
    dirs: &Dirs,
    progress: &dyn Progress,
) -> Result<Profile> {
    ensure!(site.spec.device.is_made(), Argument, "the device was not made for a measurement");
    let access = Access::Made;
    access.check_length(length)?;
    measured(&site.stack, (length, all_of_length), access, access.extent(), dirs, progress)
}

/// Measures a few points of a device, to compare them with a profile of the same kind of device.
/// `access` is that of a whole measurement.
pub fn few_points_of(stack: &Stack, access: Access, dirs: &Dirs, progress: &dyn Progress) -> Result<Profile> {
    let length = CONFIRMING.max(least_time(BLOCK, Extent::Confirming, access.writes()) * 2);
    // All of it: a profile of another device is compared with these points, and no plan is made.
    measured(stack, (length, true), access, Extent::Confirming, dirs, progress)
}

/// `length`, and whether all of it is used, also where everything is known before.
fn measured(
    stack: &Stack,
    (length, all_of_length): (Duration, bool),
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
    let _awake = if made { PmQosGuard::hold().ok() } else { None };
    options.watch = made;
    options.extent = extent;
    options.bfq = choice;
    options.budget = length;
    options.all_of_budget = all_of_length;
    let claim = match access {
        Access::Made => Some(Claim::of_made(&path)?),
        Access::DestroyData => Some(data_guard::claim(&path, &[], progress)?),
        Access::Reads | Access::ReadsUnderVms => {
            data_guard::warn_of_load(&path, progress)?;
            None
        }
        Access::Gentle => None,
    };
    // Whatever is measured: no plan is applied or put back meanwhile.
    let (elevator, _lock) = if gentle {
        (None, Some(Session::open(&dirs.state)?))
    } else {
        (Some(MeasuredElevator::open(stack, dirs, progress)?), None)
    };
    let wanted = RefCell::new(None);
    let mut seen = Elevators::new(&root, stack, gentle)?;
    let mut bar = progress.bar(&format!("measuring {}", device.name), 100);
    let result = measure(
        &options,
        &mut ProfileControl {
            set_elevator: &mut |name| match &elevator {
                Some(elevator) if choice => {
                    *wanted.borrow_mut() = Some(name.to_owned());
                    elevator.set(name).map_err(Into::into)
                }
                _ => Ok(()),
            },
            claim: claim.as_ref(),
            progress: &mut |done, total, what| {
                bar.set_message(&format!("measuring {}: {what}", device.name));
                bar.set(done * 100 / total.max(1));
                seen.check(wanted.borrow().as_deref());
            },
            cancel: progress.cancel_flag(),
        },
    );
    drop(bar);
    seen.check(wanted.borrow().as_deref());
    if let Some(elevator) = elevator {
        elevator.put_back()?;
    }
    let mut profile = match result {
        Err(MeasureError::Cancelled) => return Err(Error::cancelled()),
        other => Profile { identity: identity::of_block(&root, device)?, ..other? },
    };
    if let Some(mixed) = seen.mixed() {
        progress.warn(&mixed);
        profile.doubts.insert(0, mixed);
    }
    if gentle {
        profile.doubts.insert(0, not_known(seen.first()));
    }
    Ok(profile)
}

/// The elevators under which a device is measured, read between the points.
struct Elevators<'a> {
    root: &'a Root,
    /// The disks that order requests; for a gentle measurement the device itself where none does.
    disks: Vec<&'a BlockDevice>,
    /// Elevator of each disk at the start.
    first: Vec<String>,
    /// Deviations from the expected elevator, as text.
    other: BTreeSet<String>,
}

impl<'a> Elevators<'a> {
    fn new(root: &'a Root, stack: &'a Stack, gentle: bool) -> Result<Self> {
        let mut disks: Vec<&BlockDevice> = stack.disks.iter().collect();
        if gentle && disks.is_empty() {
            disks.push(&stack.device);
        }
        let first = disks.iter().map(|disk| Ok(disk.elevators(root)?.current)).collect::<Result<_>>()?;
        Ok(Self { root, disks, first, other: BTreeSet::new() })
    }

    fn first(&self) -> &str {
        self.first.first().map_or("none", String::as_str)
    }

    /// Compares with the one that was set for the measurement, else with that of the start.
    fn check(&mut self, set: Option<&str>) {
        let mut found = |what: String| {
            self.other.insert(what);
        };
        for (disk, first) in self.disks.iter().zip(&self.first) {
            let wanted = set.unwrap_or(first);
            match disk.elevators(self.root) {
                Ok(now) if now.current == wanted => {}
                Ok(now) => found(format!("{} of {} instead of {wanted}", now.current, disk.name)),
                Err(e) => found(format!("one of {} that cannot be read ({e})", disk.name)),
            }
        }
    }

    fn mixed(&self) -> Option<String> {
        let other = self.other.iter().cloned().collect::<Vec<_>>().join(", ");
        (!other.is_empty()).then(|| {
            format!(
                "another program changed the elevator while it was measured ({other}), so that the numbers are of both: measure it again"
            )
        })
    }
}

/// Refuses a gentle measurement in place of a whole one, which shows more, and of a file of which
/// it is not known what it has, as one of a newer version.
///
/// # Errors
/// [`Kind::Guarded`](crate::Kind::Guarded) with the file and what it has, or why that is not known.
pub fn refuse_lesser(path: &Path, access: Access) -> Result<()> {
    if access != Access::Gentle || !is_there(path)? {
        return Ok(());
    }
    let old = match rtvirtio_measure::profile::load(path) {
        Ok(old) => old,
        Err(e) => bail!(
            Guarded,
            "{e}. What it has is not known, and a gentle measurement may show less: save that elsewhere with --out, or --replace the file"
        ),
    };
    let has = [
        (!old.write.is_empty(), "writes"),
        (!old.read_bfq.is_empty(), "BFQ"),
        (old.large.is_some(), "larger requests"),
    ];
    let has: Vec<&str> = has.into_iter().filter(|(has, _)| *has).map(|(_, what)| what).collect();
    ensure!(
        has.is_empty(),
        Guarded,
        "{} has a whole measurement ({}), and a gentle one shows less: save it elsewhere with --out, or --replace the whole one",
        path.display(),
        has.join(", ")
    );
    Ok(())
}

/// Doubt in a gentle measurement: the behaviour that it does not cover.
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

#[cfg(test)]
mod tests {
    use rtvirtio_measure::profile::{MARGIN, SPARE};
    use rtvirtio_model::{Bfq, Config, Elevator};

    use super::*;

    #[test]
    fn a_profile_is_as_exact_as_plans_need() {
        let start = Config { elevator: Elevator::None, bfq: Bfq::default(), vms: Vec::new() };
        let options = rtvirtio_planner::PlanOptions::new(start);
        assert_eq!(options.safety.0, MARGIN);
        assert!((1.0 / (1.0 - options.enough()) - SPARE).abs() < 1e-9);
    }

    #[test]
    fn an_elevator_that_changed_meanwhile_is_named() {
        let (_dir, root) = crate::fixtures::root();
        let set = |line: &str| crate::fixtures::put(&root, "/sys/block/sdz/queue/scheduler", line);
        set("[none] mq-deadline bfq\n");
        let sdz = BlockDevice { name: "sdz".to_owned(), dev: "8:0".to_owned(), partition: None };
        let stack = Stack { device: sdz.clone(), disks: vec![sdz], notes: Vec::new() };
        let mut seen = Elevators::new(&root, &stack, true).unwrap();
        seen.check(None);
        assert_eq!((seen.first(), seen.mixed()), ("none", None));
        // One that the measurement itself has set is no other.
        set("none mq-deadline [bfq]\n");
        seen.check(Some("bfq"));
        assert_eq!(seen.mixed(), None);
        seen.check(None);
        set("[none] mq-deadline bfq\n");
        seen.check(None);
        let mixed = seen.mixed().unwrap();
        assert!(
            mixed.contains("bfq of sdz instead of none") && mixed.contains("measure it again"),
            "{mixed}"
        );
    }

    #[test]
    fn a_gentle_measurement_does_not_take_the_place_of_a_whole_one() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let whole = Path::new(env!("CARGO_MANIFEST_DIR")).join("../learn/data/qlc-nvme.profile.json");
        let refused = refuse_lesser(&whole, Access::Gentle).unwrap_err();
        assert!(refused.to_string().contains("writes, BFQ"), "{refused}");
        refuse_lesser(&whole, Access::Reads).unwrap();
        refuse_lesser(&dir.path().join("none.json"), Access::Gentle).unwrap();
        // One gentle measurement takes the place of another.
        let mut gentle = rtvirtio_measure::profile::load(&whole).unwrap();
        (gentle.write, gentle.read_bfq, gentle.large) = (Vec::new(), Vec::new(), None);
        let path = dir.path().join("gentle.json");
        std::fs::write(&path, rtvirtio_measure::profile::to_json(&gentle, &path).unwrap()).unwrap();
        refuse_lesser(&path, Access::Gentle).unwrap();
    }

    #[test]
    fn a_gentle_measurement_does_not_take_the_place_of_what_cannot_be_read() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let path = dir.path().join("there.json");
        let refused = || {
            let e = refuse_lesser(&path, Access::Gentle).unwrap_err();
            let text = e.to_string();
            assert!(e.kind() == crate::Kind::Guarded && text.contains("there.json"), "{text}");
            assert!(text.contains("not known") && text.contains("--replace"), "{text}");
            refuse_lesser(&path, Access::Reads).unwrap();
        };
        for text in ["", "{", "{\"schema\": \"rtvirtio.profile.v999\"}"] {
            std::fs::write(&path, text).unwrap();
            refused();
        }
        // No file that can be read, for root either.
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        refused();
    }
}
