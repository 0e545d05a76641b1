//! Whether a mean rate describes what was seen: what is predicted of the spec that is written, held
//! against the tails that were there.

use rtvirtio_measure::observe::{Observed, Tail};
use rtvirtio_model::{ModelKind, Profile};
use rtvirtio_planner::{Placements, TaskOutlook};
use rtvirtio_spec::{HostSpec, Op, Spec};
use rtvirtio_vmm::disk_stats::Direction;

use super::{Discovery, FoundVm, spec_text};
use crate::dirs::Dirs;
use crate::error::{Kind, Result};
use crate::model_choice::ModelChoice;
use crate::plan::{load_profile, outlook};
use crate::progress::Progress;
use crate::site::default_config;

/// A tail so many times as long as predicted is not one of requests that come evenly.
const NOT_EXPLAINED: f64 = 2.0;

/// Notes the VMs whose tails their mean rates do not explain, as far as their devices were
/// measured.
pub fn compare(found: &mut Discovery, dirs: &Dirs, progress: &dyn Progress) {
    let profile_of = |spec: &Spec| match load_profile(spec, None, dirs) {
        Ok(profile) => Some(profile),
        Err(e) if e.kind() == Kind::NotMeasured => {
            progress.step(&format!("what was seen is not held against a prediction: {e:#}"));
            None
        }
        Err(e) => {
            progress.warn(&format!("what was seen is not held against a prediction: {e:#}"));
            None
        }
    };
    if let Err(e) = with(found, &profile_of) {
        progress.warn(&format!("what was seen is not held against a prediction: {e:#}"));
    }
}

pub(super) fn with(found: &mut Discovery, profile_of: &dyn Fn(&Spec) -> Option<Profile>) -> Result<()> {
    // Without anything that was seen it has no device.
    let Ok(host) = HostSpec::parse("discovered", &spec_text(found, "")) else { return Ok(()) };
    let choice = ModelChoice::formula(ModelKind::Slice);
    for part in host.parts() {
        let Some(profile) = profile_of(&part.spec) else { continue };
        let config = default_config(&part.spec);
        let all = outlook(&part.spec, &profile, &choice, &config, &Placements::default())?;
        for ((vm, task, _), outlook) in part.spec.goals().zip(all) {
            let Some(vm) = found.vms.iter_mut().find(|of| of.name == vm.name) else { continue };
            let direction = if task.op == Op::Read { Direction::Read } else { Direction::Write };
            // Durable writes are a write and a flush, whose tails are apart.
            let Some(seen) = only(vm, direction).filter(|_| task.sync.is_none()) else { continue };
            if let Some(note) = note(seen, &outlook) {
                vm.notes.push(note);
            }
        }
    }
    Ok(())
}

/// What a VM with one disk does in a direction.
fn only(vm: &FoundVm, direction: Direction) -> Option<&Observed> {
    let mut disks = vm.disks.iter().filter_map(|disk| disk.activity.as_ref());
    let (Some(activity), None) = (disks.next(), disks.next()) else { return None };
    activity.directions.iter().find(|of| of.direction == direction)
}

fn note(seen: &Observed, predicted: &TaskOutlook) -> Option<String> {
    let of = |t: &&Tail| t.percentile == predicted.percentile;
    let tail = seen.tails.iter().find(of)?;
    let judged = predicted.forecast.judged();
    (tail.latency_ns.0 as f64 > judged.0 as f64 * NOT_EXPLAINED).then(|| {
        format!(
            "{} of its {} was {}, and {} requests in a second that come evenly are predicted at {judged}: they come many at once, or \
             something slowed them while they were watched. A mean rate does not describe the former, and predictions of it are too good: \
             declare the highest rate of a moment, or leave `rate` out and write as `depth` how many come at once",
            tail.percentile,
            predicted.task,
            tail.latency_ns,
            seen.rate.0.ceil()
        )
    })
}
