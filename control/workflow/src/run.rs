//! Runs a site's tasks in the guests that have an agent, and on the host for the others.

use std::time::Duration;

use rtvirtio_measure::workload::{self, RunOptions, VmLoad};
use rtvirtio_measure::{Run, VmKind};
use rtvirtio_planner::scheme_name;
use rtvirtio_units::Nanos;

use crate::block_sizes;
use crate::data_guard;
use crate::devices::{Devices, Predictions};
use crate::dirs::Dirs;
use crate::error::{Error, Result};
use crate::missed;
use crate::progress::Progress;
use crate::reached::{self, Counters};
use crate::site::{self, Site};

/// Runs all tasks of a site at once and judges them.
///
/// # Errors
/// [`Kind::Guarded`](crate::Kind::Guarded) when a target is in use,
/// [`Kind::Cancelled`](crate::Kind::Cancelled) when the user stops it.
pub fn measure(
    site: &Site,
    scheme: &str,
    length: Duration,
    predicted: &[Option<Nanos>],
    dirs: &Dirs,
    progress: &dyn Progress,
) -> Result<Run> {
    let loads = site.loads(predicted)?;
    run(&[site], loads, scheme, length, dirs, progress)
}

/// Like [`measure`], with loads that are not the spec's, such as more than a task declares.
pub fn measure_loads(
    site: &Site,
    loads: Vec<VmLoad>,
    scheme: &str,
    length: Duration,
    dirs: &Dirs,
    progress: &dyn Progress,
) -> Result<Run> {
    run(&[site], loads, scheme, length, dirs, progress)
}

/// Runs all tasks of a host at once, on all its devices, and judges them.
pub fn measure_all(
    devices: &Devices,
    scheme: &str,
    length: Duration,
    predicted: &Predictions,
    dirs: &Dirs,
    progress: &dyn Progress,
) -> Result<Run> {
    let loads = devices.loads(predicted)?;
    let sites: Vec<&Site> = devices.sites.iter().collect();
    run(&sites, loads, scheme, length, dirs, progress)
}

fn run(
    sites: &[&Site],
    mut loads: Vec<VmLoad>,
    scheme: &str,
    length: Duration,
    dirs: &Dirs,
    progress: &dyn Progress,
) -> Result<Run> {
    for site in sites {
        block_sizes::check(&site.spec, &site.stack.device, progress)?;
    }
    let _claims = data_guard::claim_targets(sites, &loads, progress)?;
    let _groups = site::member_groups(sites, &mut loads)?;
    let total = length.as_secs() + 1;
    let tasks: usize = loads.iter().map(|load| load.vm.tasks.len()).sum();
    let mut bar = progress.bar(
        &format!("running {tasks} task{} ({})", if tasks == 1 { "" } else { "s" }, scheme_name(scheme)),
        total,
    );
    let work_dir = dirs.fio();
    // Pauses are those of one disk: of several, none is watched.
    let disk = match sites {
        [one] => Some(one.stack.device.sysfs()),
        _ => None,
    };
    let lab = sites.iter().any(|site| site.lab.is_some());
    let before = Counters::read(sites, &loads);
    // Counters of a VM with disks on several devices do not tell these apart.
    let alone = match sites {
        [one] => Some(*one),
        _ => None,
    };
    let mut readings = alone.map(|site| missed::Readings::begin(site, progress));
    let mut options = RunOptions {
        length,
        warm_up: workload::WARM_UP,
        seed: 1,
        // A lab's VMs do nothing else; next to others a probe could be in the way.
        watch: lab,
        disk: disk.as_deref(),
        work_dir: &work_dir,
        cancel: progress.cancel_flag(),
        on_tick: &mut |elapsed| bar.set(elapsed.as_secs()),
        on_moment: &mut |moment| {
            if let Some(readings) = &mut readings {
                readings.take(moment, progress);
            }
        },
    };
    let mut result = workload::run(&loads, &mut options);
    drop(bar);
    if let Ok((tasks, noise, disk)) = &mut result {
        // While the groups of tasks on the host are there, which hold their counters.
        reached::judge(sites, &loads, (&before, &Counters::read(sites, &loads)), tasks);
        let watched = missed::Watched { noise: noise.as_ref(), disk: disk.as_ref() };
        if let Some(readings) = readings {
            readings.explain(&loads, &watched, tasks, progress);
        }
    }
    // Empty now, unless fio's files are still there after an error: then they help to find it.
    let _ = std::fs::remove_dir(&work_dir);
    let kinds: Vec<VmKind> = sites.iter().map(|site| site.kind()).collect();
    let kind = match kinds.first() {
        Some(first) if kinds.iter().all(|kind| kind == first) => *first,
        Some(_) => VmKind::Mixed,
        None => VmKind::Qemu,
    };
    match result {
        Ok((tasks, noise, disk)) => {
            Ok(Run { scheme: scheme.to_owned(), kind, seconds: length.as_secs_f64(), noise, disk, tasks })
        }
        Err(e) if e.is_cancelled() => Err(Error::cancelled()),
        Err(e) => Err(e.into()),
    }
}
