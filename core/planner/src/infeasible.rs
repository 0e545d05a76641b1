//! The report when not every target fits: the VMs given up, the conflict, targets that would fit.

use std::cmp::Ordering;

use rtvirtio_model::ModelKind;
use rtvirtio_units::{Iops, Nanos, Percentile};

use crate::evaluate::{Evaluator, Judged, Outcome, Problem};
use crate::search::{self, search};
use crate::types::RATE_KEPT;
use crate::{Infeasible, PlanError, Relaxation};

/// Most targets for which [`conflict`] searches without each of them; with more, only
/// configurations evaluated before are checked.
const SEARCHED: usize = 48;

/// Most searches for a smaller common relaxation.
const STEPS: u32 = 8;

/// Least factor between two relaxations that is worth a search.
const NOTICEABLE: f64 = 1.02;

/// Factor that widens a relaxation which no search finds.
const EASIER: f64 = 1.1;

/// Covers the rounding of targets to ns.
const ROUNDING: f64 = 1.001;

/// Largest factor of a relaxation that is reported.
const MOST_RELAXED: f64 = 1e5;

pub(crate) fn describe(
    problem: &Problem<'_>,
    evaluator: &mut Evaluator<'_>,
    found: &Outcome,
) -> Result<Infeasible, PlanError> {
    let problem = &search::released(
        &Problem { thorough: false, ..problem.clone() },
        evaluator,
        problem.targets.clone(),
    );
    let name = |i: usize| {
        problem.spec.goals().nth(i).map_or_else(String::new, |(vm, task, target)| match target {
            // A task with several targets needs the percentile to identify one.
            Some(t) if task.targets.len() > 1 => format!("{}/{} {}", vm.name, task.name, t.percentile),
            _ => format!("{}/{}", vm.name, task.name),
        })
    };
    let sacrificed: Vec<String> =
        found.missing(problem).rev().map(|vm| problem.spec.vms[vm].name.clone()).collect();
    let conflict: Vec<String> = conflict(problem, evaluator)?.into_iter().map(name).collect();
    let asked = search::asked(problem, evaluator);
    // Longer targets alone cannot provide a rate that the device does not have.
    let relaxation = if asked > 1.0 { Vec::new() } else { relax(problem, evaluator, found)? };
    let starved = starved(problem, evaluator, found);
    let margin = 100.0 * problem.options.safety.0;
    let by = match problem.options.model {
        ModelKind::Bound => "no bound shows that".to_owned(),
        _ if margin > 0.0 => format!("no prediction says, with {margin:.0} % to spare, that"),
        _ => "no prediction says that".to_owned(),
    };
    let mut reason = match conflict.as_slice() {
        [one] => format!("{by} {one} meets its target under any setting, even if all others gave theirs up"),
        many => format!("{by} {} targets hold together: {}", many.len(), many.join(", ")),
    };
    if asked > 1.0 {
        reason = format!(
            "the rates of the VMs with targets take {:.0} % of what the device can do; {reason}",
            100.0 * asked
        );
    }
    if problem.targets.iter().flatten().count() > SEARCHED || evaluator.is_spent() {
        reason.push_str("; there are too many settings to search them all");
    }
    let limited = limited(problem, &starved);
    if !starved.is_empty() {
        reason.push_str(&format!(
            "; {} would not keep the declared rate",
            starved.into_iter().map(name).collect::<Vec<_>>().join(", ")
        ));
    }
    limited.iter().for_each(|why| reason.push_str(&format!("; {why}")));
    if relaxation.is_empty() && limited.is_empty() {
        reason.push_str("; no longer target fits either: lower the declared rates or move a VM away");
    }
    Ok(Infeasible { sacrificed, conflict, relaxation, reason })
}

/// Reasons for VMs whose tasks lose rate by limits outside of the plan, below what they declare: no
/// setting of a plan and no longer target helps there.
fn limited(problem: &Problem<'_>, starved: &[usize]) -> Vec<String> {
    let mut vms: Vec<usize> = starved.iter().map(|&i| problem.vm_of[i]).collect();
    vms.dedup();
    let one = |vm: usize| {
        let ceiling = problem.options.placements.ceiling(vm)?;
        let of = &problem.spec.vms[vm];
        let declared: f64 = of.tasks.iter().map(|t| t.rate.map_or(f64::INFINITY, |r| r.0)).sum();
        (declared * RATE_KEPT > ceiling.0).then(|| {
            let by = problem.options.placements.ceiling_by(vm);
            let asks = if declared.is_finite() {
                format!("its tasks ask for {}", Iops(declared))
            } else {
                "its tasks ask for more".to_owned()
            };
            format!("{} gets at most {ceiling}, and {asks}: {by}", of.name)
        })
    };
    vms.into_iter().filter_map(one).collect()
}

/// Tasks with a target that lose rate under `found`.
fn starved(problem: &Problem<'_>, evaluator: &mut Evaluator<'_>, found: &Outcome) -> Vec<usize> {
    let Some(judged) = evaluator.judge(&found.config) else { return Vec::new() };
    (0..problem.targets.len())
        .filter(|&i| problem.targets[i].is_some() && judged.kept[i] < RATE_KEPT)
        .collect()
}

/// A minimal set of targets that no searched setting is predicted to meet together: each target
/// whose removal leaves the rest infeasible is removed, the least urgent VM's first, so that what
/// remains is infeasible and would not be without any one of its members.
fn conflict(problem: &Problem<'_>, evaluator: &mut Evaluator<'_>) -> Result<Vec<usize>, PlanError> {
    let mut order: Vec<usize> = Vec::new();
    for &vm in problem.urgency.iter().rev() {
        order.extend(
            (0..problem.targets.len())
                .rev()
                .filter(|&i| problem.vm_of[i] == vm && problem.targets[i].is_some()),
        );
    }
    let searched = order.len() <= SEARCHED;
    let mut targets = problem.targets.clone();
    for &i in &order {
        let removed = targets[i].take();
        let without = search::released(problem, evaluator, targets.clone());
        let feasible = without.targets.iter().all(Option::is_none)
            || evaluator.any_meets(&without)
            || (searched && search(&without, evaluator)?.missed == 0);
        if feasible {
            targets[i] = removed;
        }
    }
    Ok((0..targets.len()).filter(|&i| targets[i].is_some()).collect())
}

/// The smallest targets that fit for the missed tasks, everything else as declared.
///
/// All missed targets are stretched by one factor, the smallest at which some configuration is
/// known to meet everything; searches try to find one with a noticeably smaller factor. Each target
/// is then reduced to its task's prediction there, if a search still finds a solution.
fn relax(
    problem: &Problem<'_>,
    evaluator: &mut Evaluator<'_>,
    found: &Outcome,
) -> Result<Vec<Relaxation>, PlanError> {
    let Some(judged) = evaluator.judge(&found.config) else { return Ok(Vec::new()) };
    let missed: Vec<(usize, f64)> = problem
        .targets
        .iter()
        .enumerate()
        .filter_map(|(i, t)| t.map(|t| (i, t)))
        .filter(|&(i, t)| !problem.met(t, judged.latency[i], judged.kept[i]))
        .collect();
    let stretched = |factor: f64| {
        let mut targets = problem.targets.clone();
        for &(i, t) in &missed {
            targets[i] = Some((t * factor).ceil());
        }
        problem.with_targets(targets)
    };
    // `found` itself meets targets stretched far enough, as long as it keeps the rates.
    let mut wanted = missed.iter().map(|&(i, t)| judged.latency[i] / problem.limit(t)).fold(1.0, f64::max);
    while least_stretch(problem, evaluator, &missed).is_none() && wanted < MOST_RELAXED {
        search(&stretched(wanted), evaluator)?;
        wanted *= 2.0;
    }
    let Some((mut factor, mut latency)) = least_stretch(problem, evaluator, &missed) else {
        return Ok(Vec::new());
    };
    if factor > MOST_RELAXED {
        return Ok(Vec::new());
    }
    let mut low = 1.0f64;
    let mut near = true;
    for _ in 0..STEPS {
        // Mostly no noticeably smaller factor exists, which one search shows; where one exists, it
        // may be much smaller.
        let wanted = if near { factor / NOTICEABLE } else { (low * factor).sqrt() };
        if wanted <= low {
            break;
        }
        search(&stretched(wanted), evaluator)?;
        match least_stretch(problem, evaluator, &missed) {
            Some(less) if less.0 < factor => (factor, latency) = less,
            _ if near => break,
            _ => low = wanted,
        }
        near = !near;
    }
    // A configuration met in another search should also be found by a search for it; where no
    // search finds it, its result holds all the same.
    let mut relaxed = stretched(factor * ROUNDING);
    for i in 0..STEPS {
        let candidate = stretched(factor * ROUNDING * EASIER.powi(i as i32));
        if search(&candidate, evaluator)?.missed == 0 {
            relaxed = candidate;
            break;
        }
    }
    // One factor for all is the worst one's need: the others are reduced to their own, if a search
    // still finds a solution there.
    let mut targets = relaxed.targets.clone();
    for &(i, t) in &missed {
        let needed = (latency[i] / (1.0 - problem.options.safety.0)).ceil() + 1.0;
        targets[i] = targets[i].map(|stretched| stretched.min(needed.max(t)));
    }
    let tight = problem.with_targets(targets);
    if search(&tight, evaluator)?.missed == 0 {
        relaxed = tight;
    }
    let goals: Vec<_> = problem.spec.goals().collect();
    Ok(missed
        .iter()
        .filter_map(|&(i, declared)| {
            let fits = relaxed.targets[i]?;
            (fits > declared).then(|| Relaxation {
                vm: goals[i].0.name.clone(),
                task: goals[i].1.name.clone(),
                percentile: goals[i].2.map_or(Percentile::P9999, |t| t.percentile),
                declared_ns: Nanos(declared as u64),
                fits_ns: Nanos(fits as u64),
            })
        })
        .collect())
}

/// The smallest factor by which the `missed` targets must be stretched so that a configuration
/// evaluated before meets everything, and its latencies in ns. `None` where no configuration meets
/// the other targets and keeps the rates.
fn least_stretch(
    problem: &Problem<'_>,
    evaluator: &Evaluator<'_>,
    missed: &[(usize, f64)],
) -> Option<(f64, Vec<f64>)> {
    let is_missed = |i: &usize| missed.iter().any(|(m, _)| m == i);
    let factor = |judged: &Judged| -> Option<f64> {
        let mut factor = 1.0f64;
        for (i, target) in problem.targets.iter().enumerate() {
            let Some(target) = *target else { continue };
            let (latency, kept) = (judged.latency[i], judged.kept[i]);
            if is_missed(&i) && kept >= RATE_KEPT {
                factor = factor.max(latency / problem.limit(target));
            } else if !problem.met(target, latency, kept) {
                return None;
            }
        }
        Some(factor)
    };
    let all = evaluator.judged().filter_map(|judged| Some((factor(judged)?, judged)));
    // Among equals the latencies decide: the map has no order, and the same spec must give the same
    // answer.
    let latencies = |a: &Judged, b: &Judged| {
        let pairs = a.latency.iter().zip(&b.latency);
        pairs.map(|(a, b)| a.total_cmp(b)).find(|o| o.is_ne()).unwrap_or(Ordering::Equal)
    };
    let (factor, judged) = all.min_by(|a, b| a.0.total_cmp(&b.0).then_with(|| latencies(a.1, b.1)))?;
    Some((factor, judged.latency.clone()))
}
