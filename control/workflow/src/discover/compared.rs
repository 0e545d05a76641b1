//! Tests whether mean rates describe the observed I/O: the tails predicted for the spec that is
//! written are compared with those observed.

use rtvirtio_measure::observe::{Observed, Tail};
use rtvirtio_model::{Config, ModelKind, Profile};
use rtvirtio_planner::{Placements, TaskOutlook};
use rtvirtio_spec::{Arrival, Burst, HostSpec, Op, Spec};
use rtvirtio_units::Nanos;
use rtvirtio_vmm::disk_stats::Direction;

use super::{Discovery, FoundVm, spec_text};
use crate::dirs::Dirs;
use crate::error::{Kind, Result};
use crate::model_choice::ModelChoice;
use crate::plan::{load_profile, outlook};
use crate::progress::Progress;
use crate::site::default_config;

/// Ratio of observed to predicted tail above which the requests do not come evenly.
const NOT_EXPLAINED: f64 = 2.0;
/// Most requests at once that a spec takes.
const MOST_AT_ONCE: u32 = 1024;

/// Notes the VMs whose tails their mean rates do not explain, as far as their devices were
/// measured.
pub fn compare(found: &mut Discovery, dirs: &Dirs, progress: &dyn Progress) {
    let profile_of = |spec: &Spec| match load_profile(spec, None, dirs) {
        Ok(profile) => Some(profile),
        Err(e) if e.kind() == Kind::NotMeasured => {
            progress.step(&format!("the observation is not compared with a prediction: {e:#}"));
            None
        }
        Err(e) => {
            progress.warn(&format!("the observation is not compared with a prediction: {e:#}"));
            None
        }
    };
    if let Err(e) = with(found, &profile_of) {
        progress.warn(&format!("the observation is not compared with a prediction: {e:#}"));
    }
}

pub(super) fn with(found: &mut Discovery, profile_of: &dyn Fn(&Spec) -> Option<Profile>) -> Result<()> {
    // Without observed I/O the spec has no device.
    let Ok(host) = HostSpec::parse("discovered", &spec_text(found, "")) else { return Ok(()) };
    let choice = ModelChoice::formula(ModelKind::Slice);
    for part in host.parts() {
        let Some(profile) = profile_of(&part.spec) else { continue };
        let config = default_config(&part.spec);
        let all = outlook_of(&part.spec, &profile, &choice, &config)?;
        for (i, ((vm, task, _), outlook)) in part.spec.goals().zip(all).enumerate() {
            let Some(vm) = found.vms.iter_mut().find(|of| of.name == vm.name) else { continue };
            let direction = if task.op == Op::Read { Direction::Read } else { Direction::Write };
            // Durable writes are a write and a flush, whose tails are apart.
            let Some(seen) = only(vm, direction).filter(|_| task.sync.is_none()) else { continue };
            let Some(tail) = unexplained(seen, &outlook) else { continue };
            let name = (vm.name.clone(), task.name.clone());
            let judged = |spec: &Spec| -> Result<Option<Nanos>> {
                let all = outlook_of(spec, &profile, &choice, &config)?;
                Ok(all.get(i).map(|of| of.forecast.judged()))
            };
            let at_once = at_once(&part.spec, &name, tail.latency_ns, &judged)?;
            let note = note(seen, tail, &outlook, at_once);
            vm.notes.push(note);
        }
    }
    Ok(())
}

/// Observed I/O of a VM in a direction; `None` unless exactly one disk was observed.
fn only(vm: &FoundVm, direction: Direction) -> Option<&Observed> {
    let mut disks = vm.disks.iter().filter_map(|disk| disk.activity.as_ref());
    let (Some(activity), None) = (disks.next(), disks.next()) else { return None };
    activity.directions.iter().find(|of| of.direction == direction)
}

fn outlook_of(
    spec: &Spec,
    profile: &Profile,
    choice: &ModelChoice,
    config: &Config,
) -> Result<Vec<TaskOutlook>> {
    outlook(spec, profile, choice, config, &Placements::default())
}

/// The tail that was seen, where it is much longer than predicted.
fn unexplained<'t>(seen: &'t Observed, predicted: &TaskOutlook) -> Option<&'t Tail> {
    let tail = seen.tails.iter().find(|t| t.percentile == predicted.percentile)?;
    let judged = predicted.forecast.judged();
    (tail.latency_ns.0 as f64 > judged.0 as f64 * NOT_EXPLAINED).then_some(tail)
}

/// Least requests at once whose predicted tail is as long as the observed one; `None` where that of
/// `MOST_AT_ONCE` is shorter.
fn at_once(
    spec: &Spec,
    (vm, task): &(String, String),
    tail: Nanos,
    judged: &dyn Fn(&Spec) -> Result<Option<Nanos>>,
) -> Result<Option<u32>> {
    let explains = |requests: u32| -> Result<bool> {
        let mut spec = spec.clone();
        let vm = spec.vms.iter_mut().find(|of| of.name == *vm);
        let Some(task) = vm.and_then(|vm| vm.tasks.iter_mut().find(|of| of.name == *task)) else {
            return Ok(false);
        };
        (task.burst, task.arrival) = (Some(Burst::Requests { requests }), Arrival::Open);
        task.depth = task.depth.max(requests);
        Ok(judged(&spec)?.is_some_and(|judged| judged >= tail))
    };
    // The prediction does not fall with the number.
    let (mut least, mut most) = (2, MOST_AT_ONCE);
    if !explains(most)? {
        return Ok(None);
    }
    while least < most {
        let middle = least + (most - least) / 2;
        if explains(middle)? {
            most = middle;
        } else {
            least = middle + 1;
        }
    }
    Ok(Some(most))
}

fn note(seen: &Observed, tail: &Tail, predicted: &TaskOutlook, at_once: Option<u32>) -> String {
    let remedy = match at_once {
        Some(n) => format!("for {n} at once as much is predicted: declare burst = {n}"),
        None => "no number of requests at once explains as much".to_owned(),
    };
    format!(
        "{} of its {} was {}, and {} requests in a second that come evenly are predicted at {}: they come many at once, or \
         something slowed them while they were watched. A mean rate does not describe the former, and predictions of it are too good; {remedy}",
        tail.percentile,
        predicted.task,
        tail.latency_ns,
        seen.rate.0.ceil(),
        predicted.forecast.judged(),
    )
}
