//! Running a site's tasks where they belong.

use std::time::Duration;

use rtvirtio_measure::Run;
use rtvirtio_measure::workload::{self, RunOptions};
use rtvirtio_planner::scheme_name;
use rtvirtio_units::Nanos;

use crate::data_guard;
use crate::dirs::Dirs;
use crate::error::{Error, Result};
use crate::progress::Progress;
use crate::site::Site;

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
    let mut loads = site.loads(predicted)?;
    let _claims = data_guard::claim_targets(site, &loads, progress)?;
    let _groups = site.member_groups(&mut loads)?;
    let total = length.as_secs() + 1;
    let mut bar = progress
        .bar(&format!("running {} tasks ({})", site.spec.tasks().count(), scheme_name(scheme)), total);
    let work_dir = dirs.fio();
    let disk = site.device.sysfs();
    let mut options = RunOptions {
        length,
        warm_up: workload::WARM_UP,
        seed: 1,
        // A lab's VMs do nothing else; next to others a probe could be in the way.
        watch: site.lab.is_some(),
        disk: Some(&disk),
        work_dir: &work_dir,
        cancel: progress.cancel_flag(),
        on_tick: &mut |elapsed| bar.set(elapsed.as_secs()),
    };
    let result = workload::run(&loads, &mut options);
    drop(bar);
    // Empty now, unless fio's files are still there after an error: then they help to find it.
    let _ = std::fs::remove_dir(&work_dir);
    match result {
        Ok((tasks, noise, disk)) => Ok(Run {
            scheme: scheme.to_owned(),
            kind: site.kind(),
            seconds: length.as_secs_f64(),
            noise,
            disk,
            tasks,
        }),
        Err(e) if e.is_cancelled() => Err(Error::cancelled()),
        Err(e) => Err(e.into()),
    }
}
