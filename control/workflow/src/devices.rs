//! A whole spec on this host: each of its devices with the VMs on it.

use std::collections::{BTreeMap, HashMap};

use rtvirtio_kernel::Root;
use rtvirtio_measure::HostFacts;
use rtvirtio_measure::workload::VmLoad;
use rtvirtio_spec::HostSpec;
use rtvirtio_units::Nanos;

use crate::dirs::Dirs;
use crate::error::{Context as _, Error, Kind, Result};
use crate::find::HostVm;
use crate::progress::Progress;
use crate::site::Site;

/// Predictions by VM and task: one for each target of the task, in its order, or one without a
/// target.
pub type Predictions = HashMap<(String, String), Vec<Nanos>>;

/// A spec on this host.
pub struct Devices {
    /// The spec with all its devices.
    pub host: HostSpec,
    /// Site of each part of the spec, in order; never empty. [`Devices::find_each`] leaves out the
    /// parts that it does not find.
    pub sites: Vec<Site>,
}

impl Devices {
    /// Finds every device and every VM. Changes nothing.
    ///
    /// # Errors
    /// As [`Site::find`]; [`Kind::File`] when two devices are one disk.
    pub fn find(host: HostSpec, dirs: &Dirs) -> Result<Self> {
        let (found, lost) = Self::find_each(host, dirs);
        lost.into_iter().next().map_or(Ok(found), |(_, error)| Err(error))
    }

    /// Like [`Devices::find`], but leaves out of [`Devices::sites`] what is not found and returns
    /// each error with its index among the parts. Two devices that are one disk are both not found.
    #[must_use]
    pub fn find_each(host: HostSpec, dirs: &Dirs) -> (Self, Vec<(usize, Error)>) {
        let mut found: Vec<(usize, Site)> = Vec::new();
        let mut lost: Vec<(usize, Error)> = Vec::new();
        for (place, part) in host.parts().iter().enumerate() {
            let site = Site::find(part.clone(), dirs).map(|site| site.among(host.parts()));
            let site = match &part.name {
                Some(name) => site.with_context(|| format!("device {name}")),
                None => site,
            };
            match site {
                Ok(site) => found.push((place, site)),
                Err(e) => lost.push((place, e)),
            }
        }
        let mut shared: BTreeMap<usize, Error> = BTreeMap::new();
        for (i, (second, site)) in found.iter().enumerate() {
            for (first, other) in found.iter().take(i) {
                let Some(disk) = other.shares(site) else { continue };
                for place in [first, second] {
                    let message = format!(
                        "the devices {} and {} of the spec are on one disk ({disk}), and what is set there is set for both: \
                         name that disk once, with the VMs of both",
                        other.name(),
                        site.name()
                    );
                    shared.entry(*place).or_insert_with(|| Error::new(Kind::File, message));
                }
            }
        }
        found.retain(|(place, _)| !shared.contains_key(place));
        lost.extend(shared);
        (Self { host, sites: found.into_iter().map(|(_, site)| site).collect() }, lost)
    }

    /// Loads BFQ for steps that change settings, as [`Site::load_bfq`].
    pub fn load_bfq(&self, progress: &dyn Progress) {
        self.sites.iter().for_each(|site| site.load_bfq(progress));
    }

    /// Calls [`Site::warn_without_bfq`] for each device.
    pub fn warn_without_bfq(&self, progress: &dyn Progress) {
        self.sites.iter().for_each(|site| site.warn_without_bfq(progress));
    }

    /// Warns as [`Site::warn_without_agent`], once for each VM.
    pub fn warn_without_agent(&self, progress: &dyn Progress) {
        let root = Root::default();
        self.host_vms()
            .into_iter()
            .filter_map(|vm| vm.agent_note(&root))
            .for_each(|note| progress.warn(&note));
    }

    /// Every VM once, in the order of the file: any of its sites leads to its threads.
    #[must_use]
    pub fn host_vms(&self) -> Vec<&HostVm> {
        let all = || self.sites.iter().flat_map(Site::host_vms);
        self.host.vms().iter().filter_map(|vm| all().find(|found| found.name == vm.name)).collect()
    }

    /// Warns of what no setting for the devices acts on now.
    pub fn warn_uncovered(&self, progress: &dyn Progress) {
        let mut all: Vec<String> = Vec::new();
        for line in self.sites.iter().flat_map(Site::uncovered).map(|of| of.to_string()) {
            if !all.contains(&line) {
                progress.warn(&line);
                all.push(line);
            }
        }
    }

    /// Checks each device as [`Site::guard_data`].
    ///
    /// # Errors
    /// [`Kind::Guarded`] when a task would overwrite data.
    pub fn guard_data(&self, may_destroy: bool) -> Result<()> {
        self.sites.iter().try_for_each(|site| site.guard_data(may_destroy))
    }

    /// Every VM once, with all its tasks and the disk of each.
    ///
    /// # Errors
    /// [`Kind::File`] for a VM that runs already and has no `disk`.
    pub fn loads(&self, predicted: &Predictions) -> Result<Vec<VmLoad>> {
        let of_sites = self.sites.iter().map(|site| site.loads(&[])).collect::<Result<Vec<_>>>()?;
        let mut loads = Vec::new();
        for (i, vm) in self.host.vms().iter().enumerate() {
            let disks = self.host.disks(i);
            let of_part = |part: usize| {
                let load = of_sites.get(part).and_then(|loads| loads.iter().find(|l| l.vm.name == vm.name));
                load.with_context(|| format!("vm {}: its device is gone", vm.name))
            };
            let first = of_part(disks.first().map_or(0, |disk| disk.part))?;
            let mut load =
                VmLoad { vm: vm.clone(), targets: Vec::new(), predicted: Vec::new(), ..first.clone() };
            for (task, disk) in vm.tasks.iter().zip(disks) {
                let here = of_part(disk.part)?;
                let position = here.vm.tasks.iter().position(|t| t.name == task.name);
                let position = position.with_context(|| format!("vm {}: a task is gone", vm.name))?;
                load.targets.push(here.target(position).to_owned());
            }
            for task in &vm.tasks {
                let of_task = predicted.get(&(vm.name.clone(), task.name.clone()));
                let of_goal = |goal: usize| of_task.and_then(|all| all.get(goal)).copied();
                load.predicted.extend((0..task.goals().count()).map(of_goal));
            }
            loads.push(load);
        }
        Ok(loads)
    }

    /// The host, as a result file describes it.
    #[must_use]
    pub fn facts(&self) -> HostFacts {
        let mut all = self.sites.iter().map(Site::facts);
        let mut facts = all.next().unwrap_or_else(|| HostFacts {
            kernel: crate::kernel_release(),
            cpus: crate::cpus(),
            vmm: String::new(),
            accelerator: String::new(),
            device: String::new(),
        });
        for more in all {
            facts.device = format!("{}, {}", facts.device, more.device);
        }
        facts
    }
}
