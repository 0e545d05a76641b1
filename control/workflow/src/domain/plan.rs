//! Plans the I/O domain for a spec.

use std::path::{Path, PathBuf};

use rtvirtio_domain_config::File;
use rtvirtio_domain_plan::{DeviceModel, DiskPlace, DomainPlan, Options, plan, plan_networks};
use rtvirtio_domain_resources::check::Directories;
use rtvirtio_model::Profile;
use rtvirtio_planner::{contracts, debt};
use rtvirtio_spec::{Device, HostHandle, HostSpec, Reach, Spec, Vm};

use super::absolute;
use super::cpu_guarantee::CpuGuarantees;
use crate::dirs::Dirs;
use crate::error::{Context as _, Result, bail};
use crate::plan::load_profile;
use crate::progress::Progress;

/// The I/O domain's plan for a spec on its measured device, with warnings of what it rests on.
///
/// # Errors
/// [`Kind::NotMeasured`](crate::Kind::NotMeasured) without a profile.
pub fn make(spec: &Spec, profile: Option<&Path>, dirs: &Dirs, progress: &dyn Progress) -> Result<DomainPlan> {
    let profile = load_profile(spec, profile, dirs)?;
    let plan = of_profile(spec, &profile)?;
    for doubt in &profile.doubts {
        progress.warn(&format!("the profile is in doubt: {doubt}"));
    }
    if profile.guest.is_none() {
        progress.warn(
            "the guest's own part of a request's time was not measured: bounds are from the guest's queue to \
             its answer",
        );
    }
    Ok(plan)
}

/// The plan with the networks and paths of the spec. CPU parts of paths are bounded where this host
/// guarantees their VM's budget.
#[must_use]
pub fn with_networks(plan: DomainPlan, host: &HostSpec, dirs: &Dirs, progress: &dyn Progress) -> DomainPlan {
    let guarantees = CpuGuarantees::read(host, dirs, progress);
    let debt = debt(rtvirtio_cpu::tick(), contracts(host));
    plan.with_networks(plan_networks(host, &absolute(&dirs.run).join("ports"))).with_paths(
        host,
        debt,
        &|vm| guarantees.check(vm),
    )
}

/// Whether a VM's QEMU is libvirt's, which runs it as another user than root.
#[must_use]
pub fn needs_group(host: &HostSpec) -> bool {
    let of_libvirt = |vm: &Vm| matches!(&vm.reach, Reach::Existing { host: HostHandle::Domain(_), .. });
    host.vms().iter().any(of_libvirt)
}

/// The plan's configuration file, checked by the I/O domain's own parser and, as root, by its
/// checks of the disks. `disks` holds `VM=PATH`; `spec_name` and `out` name the files.
///
/// # Errors
/// [`Kind::Argument`](crate::Kind::Argument) for a disk that is missing or given twice, or that the
/// I/O domain would refuse.
pub fn config(
    plan: &DomainPlan,
    spec: &Spec,
    (spec_name, out): (&str, &Path),
    disks: &[String],
    dirs: &Dirs,
    progress: &dyn Progress,
) -> Result<String> {
    let mut places = places(spec, disks, dirs)?;
    let text = |places: &[DiskPlace]| plan.text(spec_name, &control(dirs), places);
    let file = File::parse(out, &text(&places))?;
    if rustix::process::geteuid().is_root() {
        check(&file, out)?;
        places.iter_mut().for_each(|place| place.is_raw = true);
    } else {
        progress.warn("the disks were not checked, and their format is not declared: that needs root");
    }
    Ok(text(&places))
}

/// Plan of a spec's I/O domain on what its twin declares, or on a profile of its device.
///
/// # Errors
/// [`Kind::NotMeasured`](crate::Kind::NotMeasured) without either.
pub fn for_simulation(spec: &Spec, profile: Option<&Path>, dirs: &Dirs) -> Result<DomainPlan> {
    match (&spec.device, profile) {
        (Device::Twin { profile, size }, None) => {
            let twin = rtvirtio_files::load_twin(profile)?;
            Ok(plan(spec, &DeviceModel::declared(profile, &twin, *size), &Options::default()))
        }
        _ => of_profile(spec, &load_profile(spec, profile, dirs)?),
    }
}

/// Checks a configuration as a start does, without starting: paths, sockets, groups, disks with
/// their locks, formats, sizes and overlaps. Directories of sockets may be missing: `apply` makes
/// them. Nothing is changed.
pub(super) fn check(file: &File, config: &Path) -> Result<()> {
    match rtvirtio_domain_resources::check::check(file, config, Directories::AreMade) {
        Ok(_) => Ok(()),
        Err(e) => bail!(Guarded, "{e}"),
    }
}

/// Whether an I/O domain can promise every target of a spec.
#[must_use]
pub fn would_do(spec: &Spec, profile: &Profile) -> bool {
    of_profile(spec, profile).is_ok_and(|plan| plan.feasible)
}

fn of_profile(spec: &Spec, profile: &Profile) -> Result<DomainPlan> {
    let device = DeviceModel::measured(profile)?;
    Ok(plan(spec, &device, &Options::of_profile(profile)))
}

fn control(dirs: &Dirs) -> PathBuf {
    absolute(&dirs.run).join("iod.sock")
}

/// The location of every VM's disk, as given by the user.
fn places(spec: &Spec, disks: &[String], dirs: &Dirs) -> Result<Vec<DiskPlace>> {
    if spec.lab_kind().is_some() {
        bail!(
            Argument,
            "the disks of a lab are made when it is: `rtvirtio-lab up SPEC --domain` plans and starts the I/O domain too"
        );
    }
    let mut said: Vec<(&str, &str)> = Vec::new();
    for disk in disks {
        let Some((vm, path)) = disk.split_once('=') else { bail!(Argument, "--disk {disk}: write VM=PATH") };
        if spec.vm(vm).is_none() {
            bail!(Argument, "--disk {disk}: the spec has no VM \"{vm}\"");
        }
        if said.iter().any(|(other, _)| *other == vm) {
            bail!(Argument, "--disk {disk}: there is another --disk for VM \"{vm}\"");
        }
        said.push((vm, path));
    }
    let place = |name: &str| {
        let Some((_, path)) = said.iter().find(|(vm, _)| *vm == name) else {
            bail!(Argument, "where is the disk of VM \"{name}\" on this host? Say --disk {name}=PATH");
        };
        Ok(DiskPlace {
            socket: absolute(&dirs.run).join("disks").join(format!("{name}.sock")),
            path: std::path::absolute(path).with_context(|| (*path).to_owned())?,
            part: None,
            is_raw: false,
        })
    };
    spec.vms.iter().map(|vm| place(&vm.name)).collect()
}
