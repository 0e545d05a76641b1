//! A test bed: a lab of process VMs on a device of its own, made for an experiment and removed after it.

use std::path::PathBuf;
use std::time::Duration;

use rtvirtio_bench::load::vm_name;
use rtvirtio_bench::stage::Stage;
use rtvirtio_host::Root;
use rtvirtio_lab::Lab;
use rtvirtio_lab::twin::{Access, TwinProfile, mean_service};
use rtvirtio_model::{Config, Elevator, ModelKind, Profile};
use rtvirtio_spec::Device;
use rtvirtio_units::Bytes;

use super::BENCH_DIR;
use crate::args::{AccelName, Global};
use crate::cmd::lab::{self, DEMO_STATE};
use crate::cmd::profile::of_site;
use crate::guests::GuestAgents;
use crate::model_choice::ModelChoice;
use crate::site::Site;
use crate::ui::Ui;

/// Time for the profile of a device.
const PROFILE_TIME: Duration = Duration::from_secs(36);

/// Size of the twin: 200 MB for each of five VMs.
const TWIN_SIZE: Bytes = Bytes(1 << 30);

/// A lab that is removed when this is dropped.
pub struct Bed<'a> {
    /// Name of the device in datasets.
    pub device: String,
    /// The device in specs.
    pub spec_device: Device,
    site: Site,
    global: Global,
    ui: &'a Ui,
}

impl<'a> Bed<'a> {
    /// A twin with `vms` process VMs.
    pub fn twin(name: &str, vms: usize, global: &Global, ui: &'a Ui) -> anyhow::Result<Self> {
        let mut global = global.clone();
        global.run_dir = global.run_dir.join(BENCH_DIR);
        global.state_dir = global.run_dir.join(DEMO_STATE);
        lab::remove(&global)?;
        let device = Device::Twin { profile: name.to_owned(), size: TWIN_SIZE };
        let text = idle_spec(name, vms);
        let spec = rtvirtio_spec::parse(BENCH_DIR, &text)?;
        lab::up(&spec, BENCH_DIR, &text, AccelName::Auto, &global, ui)?;
        let bed =
            |site| Self { device: name.to_owned(), spec_device: device, site, global: global.clone(), ui };
        match Site::find(spec, &global) {
            Ok(site) => Ok(bed(site)),
            Err(e) => {
                let _ = lab::remove(&global);
                Err(e)
            }
        }
    }

    /// Measures the device.
    pub fn profile(&self) -> anyhow::Result<Profile> {
        let profile = of_site(&self.site, PROFILE_TIME, &self.global, self.ui)?;
        self.reset()?;
        Ok(profile)
    }

    /// BFQ with the kernel's defaults, whatever was there: the elevator's values do not survive a change of it.
    fn reset(&self) -> anyhow::Result<()> {
        let root = Root::default();
        self.site.device.set_elevator(&root, "none")?;
        self.site.device.set_elevator(&root, "bfq")?;
        Ok(())
    }

    /// The stage on it.
    pub fn stage(&self) -> anyhow::Result<Stage<'_>> {
        let work: PathBuf = self.global.run_dir.join("fio");
        Ok(Stage::new(self.lab()?, self.baseline()?, &GuestAgents, &self.global.state_dir, &work)?)
    }

    /// The settings of the lab when nothing is applied.
    pub fn baseline(&self) -> anyhow::Result<Config> {
        self.site.config()
    }

    /// What one needs to know of the host.
    pub fn facts(&self) -> rtvirtio_measure::HostFacts {
        let mut facts = self.site.facts();
        // A loop device's number is chance.
        if let Device::Twin { profile, .. } = &self.spec_device {
            facts.device = format!("twin {profile} (emulated)");
        }
        facts
    }

    /// Elevators that the device offers.
    pub fn elevators(&self) -> anyhow::Result<Vec<Elevator>> {
        let options = self.site.plan_options(self.baseline()?, &ModelChoice::formula(ModelKind::Slice))?;
        Ok(options.space.elevators)
    }

    /// Device time of one request, by share of writes and block size, in seconds.
    pub fn cost(&self) -> anyhow::Result<impl Fn(f64, Bytes) -> f64 + use<>> {
        let Device::Twin { profile, .. } = &self.spec_device else {
            anyhow::bail!("only a twin's service time is known beforehand")
        };
        let profile = TwinProfile::load(profile)?;
        Ok(move |writes: f64, block: Bytes| {
            let of = |access| mean_service(&profile, access, block.0).as_secs_f64();
            // A random request moves the arm: an average seek and half a turn.
            let arm = profile
                .arm
                .as_ref()
                .map_or(0.0, |arm| arm.average_seek.as_secs_f64() + arm.revolution.as_secs_f64() / 2.0);
            let channels = f64::from(profile.channels.max(1));
            (arm + (1.0 - writes) * of(Access::Read) + writes * of(Access::Write)) / channels
        })
    }

    fn lab(&self) -> anyhow::Result<&Lab> {
        self.site.lab.as_ref().ok_or_else(|| anyhow::anyhow!("the bed has no lab"))
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

/// A spec of VMs that are there but have next to nothing to do.
fn idle_spec(twin: &str, vms: usize) -> String {
    let mut text = format!("[device]\ntwin = {twin:?}\nsize = \"{TWIN_SIZE}\"\n");
    for i in 0..vms {
        text.push_str(&format!(
            "[[vm]]\nname = \"{}\"\nlab = \"process\"\n[[vm.task]]\nname = \"t0\"\nop = \"read\"\nblock = \"4KiB\"\nrate = \"1/s\"\n",
            vm_name(i)
        ));
    }
    text
}

/// A device with a name for datasets.
pub fn twin_name(text: &str) -> &str {
    text.strip_prefix("twin:").unwrap_or(text)
}
