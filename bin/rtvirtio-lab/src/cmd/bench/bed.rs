//! A test bed: a lab on a device of its own, made for an experiment and removed after it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::ensure;
use rtvirtio_kernel::Root;
use rtvirtio_learn::dataset::OtherHost;
use rtvirtio_learn::load::vm_name;
use rtvirtio_learn::runs::{MeasuredDevice, Runs, RunsFile, began_with};
use rtvirtio_learn::stage::Stage;
use rtvirtio_learn::sweep::{Allowed, Cost, profile_cost};
use rtvirtio_measure::awake::Awake;
use rtvirtio_measure::local::ensure_fio;
use rtvirtio_model::{Config, Elevator, GuestPoint, HostModel, ModelKind, Profile};
use rtvirtio_spec::{Device, LabKind};
use rtvirtio_testbed::Lab;
use rtvirtio_testbed::twin::{Access, TwinProfile, mean_service};
use rtvirtio_units::{Bytes, Nanos};

use super::{BENCH_DIR, cores};
use crate::args::AccelName;
use crate::cmd::lab::{self, below};
use rtvirtio_console::Global;
use rtvirtio_console::Ui;
use rtvirtio_console::generated;
use rtvirtio_workflow::Error;
use rtvirtio_workflow::guest_point;
use rtvirtio_workflow::guests::GuestAgents;
use rtvirtio_workflow::model_choice::ModelChoice;
use rtvirtio_workflow::profile::of_site;
use rtvirtio_workflow::site::{self, Site};

/// Time for the profile of a device.
const PROFILE_TIME: Duration = Duration::from_secs(36);

/// Size of a device that is made: 200 MB for each of five VMs.
const MADE_SIZE: Bytes = Bytes(1 << 30);

/// Prefix of the path of a file that stands for a disk.
const FILE: &str = "file:";

/// A lab that is removed when this is dropped.
pub struct Bed<'a> {
    /// The device, by its names in datasets and in specs.
    pub device: MeasuredDevice,
    site: Site,
    lab: Lab,
    global: Global,
    /// A made device stands for one in a real-time host, whose CPUs do not sleep; a real one is taken as it is.
    awake: Option<Awake>,
    ui: &'a Ui,
}

impl<'a> Bed<'a> {
    /// VMs on a device that is made for them: `twin:NAME`, or `file:PATH` for a file on a disk of this machine.
    pub fn made(
        device: &str,
        vms: usize,
        kind: LabKind,
        global: &Global,
        ui: &'a Ui,
    ) -> anyhow::Result<Self> {
        let text = device_text(device)?;
        let mut bed = Self::make(device_name(device), &text, (vms, kind), global, ui)?;
        bed.awake = cores::keep_awake(ui);
        Ok(bed)
    }

    fn make(
        name: &str,
        device: &str,
        (vms, kind): (usize, LabKind),
        global: &Global,
        ui: &'a Ui,
    ) -> anyhow::Result<Self> {
        if kind == LabKind::Process {
            ensure_fio()?;
        }
        let global = below(global, BENCH_DIR);
        lab::remove(&global)?;
        let text = idle_spec(device, vms, kind);
        let spec = rtvirtio_spec::parse(BENCH_DIR, &text)?;
        let lab = lab::up(&spec, BENCH_DIR, &text, AccelName::Auto, None, &global, ui)?;
        let spec_device = spec.device.clone();
        let bed = |site| Self {
            device: MeasuredDevice { name: name.to_owned(), spec: spec_device },
            site,
            lab,
            global: global.clone(),
            awake: None,
            ui,
        };
        match Site::find(spec, &global.dirs()) {
            Ok(site) => {
                site.load_bfq(ui);
                Ok(bed(site))
            }
            Err(e) => {
                let _ = lab::remove(&global);
                Err(e.into())
            }
        }
    }

    /// Whether its data may be overwritten.
    pub fn may_write(&self) -> bool {
        self.device.spec.is_made()
    }

    /// Measures the device.
    pub fn profile(&self) -> anyhow::Result<Profile> {
        let profile = of_site(&self.site, PROFILE_TIME, &self.global.dirs(), self.ui)?;
        self.site.device.renew_elevator(&Root::default(), "bfq")?;
        Ok(profile)
    }

    /// The same profile with what this bed's guests add, where it is not of such guests.
    fn with_guest(&self, profile: Profile) -> anyhow::Result<Profile> {
        let of_these = |guest: &GuestPoint| guest.kind == format!("qemu-{}", self.facts().accelerator);
        let guests = self.site.spec.lab_kind() == Some(LabKind::Qemu);
        if !guests || profile.guest.as_ref().is_some_and(of_these) {
            return Ok(profile);
        }
        let guest = guest_point::measure(&self.site, &profile, &self.global.dirs(), self.ui)?;
        self.site.device.renew_elevator(&Root::default(), "bfq")?;
        Ok(Profile { guest: Some(guest), ..profile })
    }

    /// Begins a file of runs on this bed, or goes on with one. A file that goes on keeps the profile
    /// that it began with; else it is `profile`, or measured here. `model` is the learned one that
    /// takes part.
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
        Ok(Runs::begin(&self.device, self.stage()?, file, length, self.ui).map_err(Error::from)?)
    }

    /// What a sweep may do to the device.
    pub fn allowed(&self, profile: &Profile) -> anyhow::Result<Allowed> {
        Ok(Allowed {
            elevators: self.elevators()?,
            writes: self.may_write(),
            cost: Some(self.cost(profile)?),
        })
    }

    /// The device without a scheduler of the kernel, for one that schedules above it, and its size in bytes.
    pub fn plain(&self) -> anyhow::Result<(PathBuf, u64)> {
        self.site.device.set_elevator(&Root::default(), "none")?;
        Ok((self.lab.device().to_owned(), MADE_SIZE.0))
    }

    /// The stage on it.
    pub fn stage(&self) -> anyhow::Result<Stage<'_>> {
        let work: PathBuf = self.global.run_dir.join("fio");
        let stage = Stage::new(&self.lab, self.baseline()?, &GuestAgents, &self.global.state_dir, &work)?;
        Ok(stage.awake(self.awake.is_some()).fresh(self.device.spec.is_made()))
    }

    /// The settings of the lab when nothing is applied.
    pub fn baseline(&self) -> anyhow::Result<Config> {
        Ok(self.site.config()?)
    }

    /// What one needs to know of the host.
    pub fn facts(&self) -> rtvirtio_measure::HostFacts {
        let mut facts = self.site.facts();
        // A loop device's number is chance, and a path is nobody's business.
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
        let twin = TwinProfile::load(twin)?;
        Ok(Box::new(move |writes: f64, block: Bytes| {
            let of = |access| mean_service(&twin, access, block.0).as_secs_f64();
            // A random request moves the arm: an average seek and half a turn.
            let arm = twin
                .arm
                .as_ref()
                .map_or(0.0, |arm| arm.average_seek.as_secs_f64() + arm.revolution.as_secs_f64() / 2.0);
            let channels = f64::from(twin.channels.max(1));
            (arm + (1.0 - writes) * of(Access::Read) + writes * of(Access::Write)) / channels
        }))
    }

    /// Removes it; also done on drop, where errors cannot be told.
    pub fn remove(self) -> anyhow::Result<()> {
        lab::remove(&self.global).map(|_| ())
    }
}

impl Drop for Bed<'_> {
    fn drop(&mut self) {
        // Nothing to do after `remove`.
        let _ = lab::remove(&self.global);
    }
}

/// A device that is made, as the lines of a spec.
fn device_text(device: &str) -> anyhow::Result<String> {
    Ok(match device.strip_prefix(FILE) {
        Some(path) => {
            let path = std::path::absolute(path)?;
            format!("file = {:?}\nsize = \"{MADE_SIZE}\"", path.display().to_string())
        }
        None => format!("twin = {:?}\nsize = \"{MADE_SIZE}\"", device_name(device)),
    })
}

/// The same as a spec has it; nothing is made.
pub fn spec_device(device: &str) -> anyhow::Result<Device> {
    let text = idle_spec(&device_text(device)?, 1, LabKind::Process);
    Ok(rtvirtio_spec::parse(BENCH_DIR, &text)?.device)
}

/// Refuses a profile, or what was learned with one, of another device.
pub fn owns(device: &Device, profile: &Profile) -> anyhow::Result<()> {
    let (theirs, ours) = (&profile.device, site::profile_key(device)?);
    ensure!(
        *theirs == ours,
        "the profile or model is of {theirs}, this is {ours}: name one of this device, or leave it out to have the device measured"
    );
    Ok(())
}

/// A spec of VMs that are there but have next to nothing to do.
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

/// A device's name in datasets.
pub fn device_name(text: &str) -> &str {
    if text.starts_with(FILE) { "own-disk" } else { text.strip_prefix("twin:").unwrap_or(text) }
}
