//! A test bed: a device of its own with VMs, made for an experiment and removed after it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use rtvirtio_apply::Binding;
use rtvirtio_kernel::Root;
use rtvirtio_learn::dataset::OtherHost;
use rtvirtio_learn::load::vm_name;
use rtvirtio_learn::runs::{MeasuredDevice, Runs, RunsFile, began_with};
use rtvirtio_learn::stage::Stage;
use rtvirtio_learn::sweep::{Allowed, Cost, Learning, profile_cost};
use rtvirtio_measure::local::ensure_fio;
use rtvirtio_measure::pm_qos::PmQosGuard;
use rtvirtio_model::{Config, Elevator, GuestPoint, HostModel, ModelKind, Profile};
use rtvirtio_spec::{Device, LabKind};
use rtvirtio_testbed::Lab;
use rtvirtio_testbed::twin::{Access, mean_service};
use rtvirtio_units::{Bytes, Nanos};

use rtvirtio_testbed::{AccelChoice, LabHost};

use crate::{BENCH_DIR, cores};
use rtvirtio_workflow::guest_point;
use rtvirtio_workflow::guests::GuestAgents;
use rtvirtio_workflow::model_choice::ModelChoice;
use rtvirtio_workflow::profile::{Access as Permission, of_made, of_site};
use rtvirtio_workflow::site::Site;
use rtvirtio_workflow::{Dirs, Error, Progress, generated};

/// Time for the profile of a device.
const PROFILE_TIME: Duration = Duration::from_secs(36);

/// Size of the device: 200 MB for each of five VMs.
const DEVICE_SIZE: Bytes = Bytes(1 << 30);

/// Prefix of a device that is a file on a disk of this machine.
const FILE: &str = "file:";

/// Device and VMs of an experiment, removed on drop.
pub struct TestBed<'a> {
    /// The device, by its names in datasets and in specs.
    pub device: MeasuredDevice,
    site: Site,
    lab: Lab,
    labs: LabHost,
    /// Keeps idle CPUs awake, as in a real-time host, which an emulated device stands in for.
    awake: Option<PmQosGuard>,
    progress: &'a dyn Progress,
}

impl<'a> TestBed<'a> {
    /// Makes VMs on a device of their own: `twin:NAME`, `file:PATH` for a file on a disk of this
    /// machine, or `/dev/nullbN` of null_blk, which keeps no data.
    pub fn make(
        device: &str,
        vms: usize,
        kind: LabKind,
        labs: &LabHost,
        progress: &'a dyn Progress,
    ) -> anyhow::Result<Self> {
        let text = device_text(device)?;
        let mut bed = Self::make_on(device_name(device), &text, (vms, kind), labs, progress)?;
        bed.awake = cores::keep_awake(progress);
        Ok(bed)
    }

    fn make_on(
        name: &str,
        device: &str,
        (vms, kind): (usize, LabKind),
        labs: &LabHost,
        progress: &'a dyn Progress,
    ) -> anyhow::Result<Self> {
        if kind == LabKind::Process {
            ensure_fio()?;
        }
        let labs = labs.below(BENCH_DIR);
        labs.remove()?;
        let text = idle_spec(device, vms, kind);
        let spec = rtvirtio_spec::parse(BENCH_DIR, &text)?;
        let lab = labs.up(&spec, (BENCH_DIR, &text), AccelChoice::Auto, None, progress)?;
        let spec_device = spec.device.clone();
        let bed = |site| Self {
            device: MeasuredDevice { name: name.to_owned(), spec: spec_device },
            site,
            lab,
            labs: labs.clone(),
            awake: None,
            progress,
        };
        match Site::find(spec, &labs.dirs) {
            Ok(site) => {
                site.load_bfq(progress);
                Ok(bed(site))
            }
            Err(e) => {
                let _ = labs.remove();
                Err(e.into())
            }
        }
    }

    /// Whether the data on the device may be overwritten.
    #[must_use]
    pub fn may_write(&self) -> bool {
        self.device.spec.is_made()
    }

    /// Measures the device.
    pub fn profile(&self) -> anyhow::Result<Profile> {
        let profile = of_site(&self.site, Permission::Reads, PROFILE_TIME, &self.labs.dirs, self.progress)?;
        self.site.stack.device.renew_elevator(&Root::default(), "bfq")?;
        Ok(profile)
    }

    /// Measures the device without its VMs: for all of the time of a profile, or until all is
    /// known.
    pub fn profile_of_device(&self, all_of_time: bool) -> anyhow::Result<Profile> {
        let profile = of_made(&self.site, PROFILE_TIME, all_of_time, &self.labs.dirs, self.progress)?;
        self.site.stack.device.renew_elevator(&Root::default(), "bfq")?;
        Ok(profile)
    }

    /// The profile with the latency that guests of this accelerator add, measured where it is
    /// missing.
    fn with_guest(&self, profile: Profile) -> anyhow::Result<Profile> {
        let of_these = |guest: &GuestPoint| guest.kind == format!("qemu-{}", self.facts().accelerator);
        let guests = self.site.spec.lab_kind() == Some(LabKind::Qemu);
        if !guests || profile.guest.as_ref().is_some_and(of_these) {
            return Ok(profile);
        }
        let guest = guest_point::measure(&self.site, &profile, &self.labs.dirs, self.progress)?;
        self.site.stack.device.renew_elevator(&Root::default(), "bfq")?;
        Ok(Profile { guest: Some(guest), ..profile })
    }

    /// Begins a file of runs on this test bed, or continues one. A continued file keeps its first
    /// profile; a new one gets `profile`, or measures the device. `model` is the learned model
    /// whose schemes run.
    ///
    /// # Errors
    /// When the file is of another device or host, or the device cannot be measured.
    pub fn runs(
        &'a self,
        path: &Path,
        command: String,
        length: Nanos,
        (profile, model): (Option<Profile>, Option<&HostModel>),
        other: OtherHost,
    ) -> anyhow::Result<Runs<'a>> {
        let profile = match (began_with(path, &self.device.name)?, profile) {
            (Some(began_with), _) => began_with,
            (None, Some(named)) => self.with_guest(named)?,
            (None, None) => self.profile()?,
        };
        let (host, generated) = (self.facts(), generated());
        let file = RunsFile { path, command, generated, host, profile, model, other };
        Ok(Runs::begin(&self.device, self.stage()?, file, length, self.progress).map_err(Error::from)?)
    }

    /// Permissions and device times of a sweep.
    pub fn allowed(&self, profile: &Profile) -> anyhow::Result<Allowed> {
        Ok(Allowed {
            elevators: self.elevators()?,
            writes: self.may_write(),
            cost: Some(self.cost(profile)?),
        })
    }

    /// Turns the kernel's scheduler off, for the I/O domain. Returns the device's path and its size
    /// in bytes.
    pub fn without_elevator(&self) -> anyhow::Result<(PathBuf, u64)> {
        self.site.stack.device.set_elevator(&Root::default(), "none")?;
        Ok((self.lab.device().to_owned(), DEVICE_SIZE.0))
    }

    /// Chooses the kernel's scheduler of the device, as a new instance with its defaults.
    pub fn renew_elevator(&self, elevator: &str) -> anyhow::Result<()> {
        let device = &self.site.stack.device;
        if elevator == "none" {
            return Ok(device.set_elevator(&Root::default(), "none")?);
        }
        Ok(device.renew_elevator(&Root::default(), elevator)?)
    }

    /// Sectors of 512 bytes that the device has read and written so far.
    pub fn sectors(&self) -> anyhow::Result<u64> {
        let path = self.site.stack.device.sysfs().join("stat");
        let text = Root::default().read(&path)?;
        let fields: Vec<&str> = text.split_whitespace().collect();
        let field = |i: usize| fields.get(i).and_then(|f| f.parse::<u64>().ok());
        let sum = field(2).zip(field(6)).map(|(read, written)| read + written);
        sum.with_context(|| format!("{} is not understood", path.display()))
    }

    /// The `cgroup.procs` file of the VM at this position.
    pub fn cgroup_procs(&self, vm: usize) -> anyhow::Result<PathBuf> {
        let binding = self.binding()?;
        let cgroup = binding.vms.get(&vm_name(vm)).and_then(|vm| vm.cgroup.clone());
        let (cgroup, groups) = cgroup.zip(binding.cgroups).context("no such VM")?;
        Ok(groups.dir(&cgroup)?.join("cgroup.procs"))
    }

    /// Device and VMs as settings are applied to them, by the journal of [`Self::dirs`].
    pub fn binding(&self) -> anyhow::Result<Binding> {
        Ok(self.site.binding()?)
    }

    /// Device and VMs, as the product finds them.
    #[must_use]
    pub fn site(&self) -> &Site {
        &self.site
    }

    /// Path of the block device.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.lab.device()
    }

    /// Directories of the test bed's lab.
    #[must_use]
    pub fn dirs(&self) -> &Dirs {
        &self.labs.dirs
    }

    /// VMs and device as a stage, with the settings of this test bed as its baseline.
    pub fn stage(&self) -> anyhow::Result<Stage<'_>> {
        let work: PathBuf = self.labs.dirs.run.join("fio");
        let stage = Stage::new(&self.lab, self.baseline()?, &GuestAgents, &self.labs.dirs.state, &work)?;
        Ok(stage.awake(self.awake.is_some()).fresh(self.device.spec.is_made()))
    }

    /// The settings of the lab when nothing is applied.
    pub fn baseline(&self) -> anyhow::Result<Config> {
        Ok(self.site.config()?)
    }

    /// The host, as a result file describes it.
    #[must_use]
    pub fn facts(&self) -> rtvirtio_measure::HostFacts {
        let mut facts = self.site.facts();
        // A loop device's number changes with each run, and a path is private.
        match &self.device.spec {
            Device::Twin { profile, .. } => facts.device = format!("twin {profile} (emulated)"),
            Device::File { size, .. } => {
                facts.device = format!("file of {size} on a disk of this machine, direct I/O");
            }
            Device::Path(_) => {}
        }
        facts
    }

    /// Elevators that the device offers.
    pub fn elevators(&self) -> anyhow::Result<Vec<Elevator>> {
        let options = self.site.plan_options(self.baseline()?, &ModelChoice::formula(ModelKind::Slice))?;
        Ok(options.space.elevators)
    }

    /// Device time of one request, by share of writes and block size, in seconds: a twin's as
    /// declared, a real device's from its profile.
    pub fn cost(&self, profile: &Profile) -> anyhow::Result<Cost> {
        let Device::Twin { profile: twin, .. } = &self.device.spec else {
            return Ok(profile_cost(profile));
        };
        let twin = rtvirtio_files::load_twin(twin)?;
        Ok(Box::new(move |writes: f64, block: Bytes| {
            let of = |access| mean_service(&twin, access, block.0).as_secs_f64();
            // A random request costs an average seek and half a revolution of the disk.
            let arm = twin
                .arm
                .as_ref()
                .map_or(0.0, |arm| arm.average_seek.as_secs_f64() + arm.revolution.as_secs_f64() / 2.0);
            let channels = f64::from(twin.channels.max(1));
            (arm + (1.0 - writes) * of(Access::Read) + writes * of(Access::Write)) / channels
        }))
    }

    /// Removes device and VMs. Dropping the test bed does the same without reporting errors.
    pub fn remove(self) -> anyhow::Result<()> {
        self.labs.remove()?;
        Ok(())
    }
}

impl Drop for TestBed<'_> {
    fn drop(&mut self) {
        // Nothing to do after `remove`.
        let _ = self.labs.remove();
    }
}

/// A device that is made, as the lines of a spec.
///
/// # Errors
/// A name that is neither a twin nor a file that can be used.
pub fn device_text(device: &str) -> anyhow::Result<String> {
    if is_null_block(device) {
        return Ok(format!("path = {device:?}"));
    }
    Ok(match device.strip_prefix(FILE) {
        Some(path) => {
            let path = std::path::absolute(path)?;
            format!("file = {:?}\nsize = \"{DEVICE_SIZE}\"", path.display().to_string())
        }
        None => format!("twin = {:?}\nsize = \"{DEVICE_SIZE}\"", device_name(device)),
    })
}

/// Whether it is a device of null_blk.
fn is_null_block(device: &str) -> bool {
    let number = device.strip_prefix("/dev/nullb").unwrap_or_default();
    !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit())
}

/// A device of this name as specs have it; nothing is made.
pub fn spec_device(device: &str) -> anyhow::Result<Device> {
    let text = idle_spec(&device_text(device)?, 1, LabKind::Process);
    let device = rtvirtio_spec::parse(BENCH_DIR, &text)?.device;
    if let Device::Twin { profile, .. } = &device {
        rtvirtio_files::load_twin(profile)?;
    }
    Ok(device)
}

/// Refuses a profile, or a model learned with one, of another device.
///
/// # Errors
/// Text with the names of both devices.
pub fn check_profile(device: &Device, profile: &Profile) -> anyhow::Result<()> {
    let (profiled, device) = (&profile.device, rtvirtio_workflow::profile_key(device)?);
    ensure!(
        *profiled == device,
        "the profile or model is of {profiled}, this is {device}: name one of this device, or leave it out to have the device measured"
    );
    Ok(())
}

/// A spec of VMs whose only task reads once a second.
fn idle_spec(device: &str, vms: usize, kind: LabKind) -> String {
    let lab = if kind == LabKind::Qemu { "qemu" } else { "process" };
    let mut text = format!("[device]\n{device}\n");
    for i in 0..vms {
        text.push_str(&format!(
            "[[vm]]\nname = \"{}\"\nlab = \"{lab}\"\n[[vm.task]]\nname = \"t0\"\nop = \"read\"\n\
             block = \"4KiB\"\nrate = \"1/s\"\n",
            vm_name(i)
        ));
    }
    text
}

/// Name of a device in datasets.
#[must_use]
pub fn device_name(text: &str) -> &str {
    if text.starts_with(FILE) { "own-disk" } else { text.strip_prefix("twin:").unwrap_or(text) }
}

/// Learns a host model on a test bed in the given time. The dataset is kept, so that a later sweep
/// continues it.
///
/// # Errors
/// Too few runs in this time, and cancellation.
pub fn learn(
    bed: &TestBed<'_>,
    profile: &Profile,
    data: &Path,
    time: Duration,
    progress: &dyn Progress,
) -> anyhow::Result<HostModel> {
    let learning = Learning {
        device: &bed.device,
        allowed: bed.allowed(profile)?,
        profile,
        host: bed.facts(),
        data,
        time,
        generated: generated(),
    };
    Ok(rtvirtio_learn::sweep::learn(learning, bed.stage()?, progress).map_err(Error::from)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_devices_that_are_there_only_those_without_data_are_taken() {
        assert_eq!(spec_device("/dev/nullb0").unwrap(), Device::Path("/dev/nullb0".into()));
        for other in ["/dev/nullb", "/dev/nullb0p1", "/dev/sda"] {
            assert!(spec_device(other).is_err(), "{other}");
        }
        assert!(spec_device("twin:qlc-nvme").unwrap().is_made());
    }
}
