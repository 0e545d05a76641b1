//! A space-filling design of loads and settings, measured: the datasets that models learn from.

use std::path::{Path, PathBuf};

use clap::Args;
use rtvirtio_learn::dataset::OtherHost;
use rtvirtio_learn::design::MAX_VMS;
use rtvirtio_learn::sweep::{Design, GUESTS, Sweep};
use rtvirtio_model::Profile;
use rtvirtio_spec::LabKind;
use rtvirtio_testbed::LabHost;
use rtvirtio_units::Nanos;
use rtvirtio_workflow::{Error, Progress};

use crate::run_basis::check_out;
use rtvirtio_harness::test_bed::{TestBed, check_profile, device_name, spec_device};

/// Suffix of the name of a dataset of runs in QEMU guests.
pub const IN_GUESTS: &str = "-qemu";

/// Options of the experiment.
#[derive(Args, Clone, Debug)]
pub struct SweepOptions {
    /// Emulated devices, or `file:PATH` for a file that is made on a disk of this machine and
    /// removed afterwards; one dataset each.
    #[arg(value_name = "twin:NAME", required = true)]
    pub devices: Vec<String>,
    /// Conditions per device.
    #[arg(long, default_value_t = 100)]
    pub points: usize,
    /// Length of each run.
    #[arg(long = "for", value_name = "TIME", default_value = "8s")]
    pub length: Nanos,
    /// Additional conditions of the RT-VirtIO paper's Table II, for its coefficients and its
    /// network.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub paper: usize,
    /// Number of conditions run two times more, to show how far runs of one condition differ.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub again: usize,
    /// Run the first N of them that three emulated guests can carry in QEMU guests, into a file of
    /// their own.
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with_all = ["again", "paper"])]
    pub qemu: usize,
    /// Seed of the design.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// A profile of the device, instead of measuring it.
    #[arg(long, value_name = "FILE")]
    pub profile: Option<PathBuf>,
    /// Directory of the dataset.
    #[arg(long, value_name = "DIR", default_value = "data")]
    pub out: PathBuf,
}

impl SweepOptions {
    /// Refuses options that cannot be measured or written, before the first device is swept for
    /// hours; returns the named profile.
    ///
    /// # Errors
    /// An invalid option, by its name.
    pub fn check(&self) -> anyhow::Result<Option<Profile>> {
        let profile = self.profile.as_deref().map(rtvirtio_measure::profile::load).transpose()?;
        for device in &self.devices {
            let device = spec_device(device)?;
            profile.as_ref().map_or(Ok(()), |p| check_profile(&device, p))?;
        }
        check_out(&self.out)?;
        Ok(profile)
    }
}

/// Measures a dataset for each device.
///
/// # Errors
/// A device that cannot be made, a profile of another device, and cancellation.
pub fn measure(options: &SweepOptions, labs: &LabHost, progress: &dyn Progress) -> anyhow::Result<()> {
    let profile = options.check()?;
    let _lock = labs.dirs.lock_vms()?;
    for device in &options.devices {
        let (vms, kind, suffix) = match options.qemu {
            0 => (MAX_VMS + 1, LabKind::Process, ""),
            _ => (GUESTS, LabKind::Qemu, IN_GUESTS),
        };
        let bed = TestBed::make(device, vms, kind, labs, progress)?;
        let path = options.out.join(format!("{}{suffix}.jsonl", device_name(device)));
        let mut command = format!(
            "rtvirtio-bench sweep {device} --points {} --seed {} --for {}",
            options.points, options.seed, options.length
        );
        if options.qemu > 0 {
            command.push_str(" --qemu");
        }
        let measured = measure_on(options, &bed, &path, command, profile.clone(), progress);
        bed.remove()?;
        measured?;
    }
    Ok(())
}

fn measure_on(
    options: &SweepOptions,
    bed: &TestBed<'_>,
    path: &Path,
    command: String,
    profile: Option<Profile>,
    progress: &dyn Progress,
) -> anyhow::Result<()> {
    let runs = bed.runs(path, command, options.length, (profile, None), OtherHost::Refused)?;
    let allowed = bed.allowed(&runs.profile)?;
    let design = Design {
        points: options.points,
        seed: options.seed,
        again: options.again,
        paper: options.paper,
        guests: (options.qemu > 0).then_some(options.qemu),
    };
    Ok(Sweep::new(&bed.device, allowed, runs, progress).design(&design).map_err(Error::from)?)
}
