//! The host of the day: its device, its guests, and their specs.

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use rtvirtio_kernel::cgroup::Limit;
use rtvirtio_kernel::{BlockDevice, Cgroups, Hierarchy, Root, Stack, text};
use rtvirtio_spec::{Device, Kernel, Spec};
use rtvirtio_testbed::qemu::{Accel, DiskRegion, QemuConfig, QemuGuest};
use rtvirtio_testbed::{AccelChoice, Lab, LabHost, choose_accel};
use rtvirtio_units::Bytes;
use rtvirtio_workflow::profile::{Access, of_device};
use rtvirtio_workflow::{Dirs, Progress, write_file};

use rtvirtio_harness::BENCH_DIR;

/// The VMs, the most critical first.
pub const VMS: [&str; 3] = ["plc", "hist", "batch"];
/// The controller's target, in ms.
pub const TARGET_MS: u64 = 25;
/// Tasks of the VMs, and the remaining lines of a contract.
const TASKS: [(&str, &str); 3] = [
    (
        "criticality = \"high\"\npriorities = \"rt\"\ncpu = { budget = \"8ms\", period = \"20ms\" }\n",
        "name = \"cycle\"\nop = \"read\"\nblock = \"4KiB\"\nrate = \"50/s\"\ntarget = { percentile = \"p99\", latency = \"25ms\" }\n",
    ),
    (
        "",
        "name = \"store\"\nop = \"read\"\nblock = \"64KiB\"\nrate = \"60/s\"\ntarget = { percentile = \"p99\", latency = \"100ms\" }\n",
    ),
    ("criticality = \"low\"\n", "name = \"scan\"\nop = \"read\"\nblock = \"256KiB\"\ndepth = 16\n"),
];
/// Length of the device's measurement.
const PROFILE: Duration = Duration::from_secs(20);

/// Device and guests. All of it is removed on drop.
pub struct DaySetup {
    labs: LabHost,
    lab: Lab,
    guests: Vec<Option<QemuGuest>>,
    configs: Vec<QemuConfig>,
    /// Path of the block device.
    pub device: PathBuf,
}

impl Drop for DaySetup {
    fn drop(&mut self) {
        self.guests.clear();
        // After an error, which is reported.
        let _ = self.labs.remove();
    }
}

impl DaySetup {
    /// Makes the device and the cgroups, measures the device for both `of`, and boots the guests.
    pub fn new(labs: &LabHost, of: &[&Dirs], progress: &dyn Progress) -> anyhow::Result<Self> {
        let labs = labs.below(BENCH_DIR);
        labs.remove()?;
        let text = lab_spec();
        let spec = rtvirtio_spec::parse("day.toml", &text)?;
        let image = labs.guest_image(Kernel::default(), progress)?;
        let accel = choose_accel(AccelChoice::Auto, &image, progress)?;
        // Guests in cgroups of the lab, but started here: they are started again.
        let lab = labs.up(&spec, ("day.toml", &text), AccelChoice::Auto, None, progress)?;
        let device = lab.device().to_owned();
        let mut plant = Self { labs, lab, guests: Vec::new(), configs: Vec::new(), device };
        let stack = Stack::find(&Root::default(), &plant.device)?;
        let profile = of_device(&stack, PROFILE, Access::Reads, of[0], progress)?;
        let name = rtvirtio_workflow::profile_key(&Device::Path(plant.device.clone()))?;
        for dirs in of {
            let path = dirs.profile(&name);
            fs::create_dir_all(path.parent().context("a directory of profiles")?)?;
            write_file(&path, &rtvirtio_measure::profile::to_json(&profile, &path)?)?;
        }
        for vm in plant.lab.state().vms.clone() {
            let (offset, size) = (Bytes(vm.offset), Bytes(vm.size));
            let disk = DiskRegion { path: plant.device.clone(), offset, size };
            let procs = Cgroups::detect(&Root::default())?.dir(&vm.cgroup)?.join("cgroup.procs");
            plant.configs.push(QemuConfig {
                accel,
                cgroup_procs: vec![procs],
                lock_memory: vm.name == VMS[0],
                ..QemuConfig::new(&vm.name, image.clone(), disk, &plant.labs.dirs.run.join("day"))
            });
        }
        progress.step(&format!("starting {} guests ({})", VMS.len(), Accel::as_str(accel)));
        for config in &plant.configs {
            plant.guests.push(Some(QemuGuest::start(config)?));
        }
        plant.close_agents();
        Ok(plant)
    }

    /// Closes the guests' agents for the measurement: QEMU serves one client of each.
    fn close_agents(&mut self) {
        self.guests.iter_mut().flatten().for_each(QemuGuest::close_agent);
    }

    pub fn cgroup(&self, vm: usize) -> anyhow::Result<PathBuf> {
        Ok(self.lab.state().vms.get(vm).context("a VM")?.cgroup.clone())
    }

    /// Reads per second that a VM may do; `None` without a limit.
    pub fn limit(&self, vm: usize) -> anyhow::Result<Option<u64>> {
        let root = Root::default();
        let (cgroups, dev) = (Cgroups::detect(&root)?, self.dev()?);
        let text = root.read(&cgroups.limit_file(&self.cgroup(vm)?, Limit::ReadIops)?)?;
        Ok(match cgroups.hierarchy {
            Hierarchy::V1 => text::throttle_limit(&text, &dev),
            Hierarchy::V2 => text::io_max_limit(&text, &dev, Limit::ReadIops.key()),
        })
    }

    /// Removes a VM's limit, as another tool may.
    pub fn lift_limit(&self, vm: usize) -> anyhow::Result<()> {
        let root = Root::default();
        let (cgroups, dev) = (Cgroups::detect(&root)?, self.dev()?);
        let none = match cgroups.hierarchy {
            Hierarchy::V1 => format!("{dev} 0"),
            Hierarchy::V2 => format!("{dev} {}=max", Limit::ReadIops.key()),
        };
        Ok(root.write(&cgroups.limit_file(&self.cgroup(vm)?, Limit::ReadIops)?, &none)?)
    }

    fn dev(&self) -> anyhow::Result<String> {
        Ok(BlockDevice::find(&Root::default(), &self.device)?.dev)
    }

    pub fn guest(&mut self, vm: usize) -> anyhow::Result<&mut QemuGuest> {
        self.guests.get_mut(vm).and_then(Option::as_mut).context("a guest")
    }

    /// Ends a VM, and restarts it in a new cgroup, as libvirt does.
    pub fn restart(&mut self, vm: usize) -> anyhow::Result<()> {
        if let Some(guest) = self.guests[vm].take() {
            guest.stop()?;
        }
        let root = Root::default();
        let (cgroups, group) = (Cgroups::detect(&root)?, self.cgroup(vm)?);
        cgroups.remove(&root, &group)?;
        cgroups.create(&root, &group)?;
        self.guests[vm] = Some(QemuGuest::start(&self.configs[vm])?);
        self.close_agents();
        Ok(())
    }

    /// Doubles the device's time for each request, or sets it as declared again.
    pub fn slow(&self, slow: bool) -> anyhow::Result<()> {
        let twin = self.lab.state().twin.as_ref().context("a twin")?;
        Ok(twin.set_slow(slow)?)
    }

    /// The spec of all VMs as an operator writes it: they run, and are found by their monitors.
    pub fn spec_text(&self) -> anyhow::Result<String> {
        let mut text = format!("[device]\npath = \"{}\"\n", self.device.display());
        for (guest, (vm, (contract, task))) in self.guests.iter().flatten().zip(VMS.iter().zip(TASKS)) {
            let handle = guest.handle();
            writeln!(
                text,
                "[[vm]]\nname = \"{vm}\"\nqmp = \"{}\"\nagent = \"{}\"\ndisk = \"/dev/vda\"\n{contract}[[vm.task]]\n{task}",
                handle.qmp_socket().display(),
                handle.agent_socket().display()
            )?;
        }
        Ok(text)
    }

    /// Spec of [`DaySetup::spec_text`], parsed.
    pub fn spec(&self) -> anyhow::Result<Spec> {
        Ok(rtvirtio_spec::parse("day.toml", &self.spec_text()?)?)
    }

    /// Removes the device, the guests and the cgroups.
    pub fn remove(mut self) -> anyhow::Result<()> {
        for guest in self.guests.drain(..).flatten() {
            guest.stop()?;
        }
        self.labs.remove()?;
        Ok(())
    }
}

/// The device, and a cgroup for each VM.
fn lab_spec() -> String {
    let vm = |(name, (_, task)): (&&str, (&str, &str))| {
        format!("[[vm]]\nname = \"{name}\"\nlab = \"process\"\n[[vm.task]]\n{task}")
    };
    let vms: Vec<String> = VMS.iter().zip(TASKS).map(vm).collect();
    format!("[device]\ntwin = \"emmc\"\nsize = \"768MiB\"\n{}", vms.concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lab_of_the_day_is_a_valid_spec() {
        let spec = rtvirtio_spec::parse("day.toml", &lab_spec()).unwrap();
        assert_eq!(spec.vms.iter().map(|vm| vm.name.as_str()).collect::<Vec<_>>(), VMS);
        let target = spec.vms[0].tasks[0].targets[0].latency;
        assert_eq!(target.0, TARGET_MS * 1_000_000);
    }
}
