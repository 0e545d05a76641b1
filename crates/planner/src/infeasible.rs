//! What to say when not every target fits: who is given up, what conflicts, what would fit.

use rtvirtio_model::ModelKind;
use rtvirtio_units::Nanos;

use crate::evaluate::{Evaluator, Outcome, Problem, RATE_KEPT};
use crate::search::search;
use crate::{Infeasible, PlanError, Relaxation};

/// Targets beyond this many are checked against evaluated configurations only, without a search for each.
const SEARCHED: usize = 48;

/// Steps of the bisection for the smallest common relaxation: to about 1 % of the factor.
const STEPS: u32 = 8;

/// A relaxation by more than this factor is no answer.
const MOST_RELAXED: f64 = 1e5;

pub(crate) fn describe(
    problem: &Problem<'_>,
    evaluator: &mut Evaluator<'_>,
    found: &Outcome,
) -> Result<Infeasible, PlanError> {
    let problem = &Problem { thorough: false, ..problem.clone() };
    let name = |i: usize| {
        let (vm, task) = problem.spec.tasks().nth(i).map_or(("", ""), |(v, t)| (&v.name, &t.name));
        format!("{vm}/{task}")
    };
    let sacrificed: Vec<String> = problem
        .urgency
        .iter()
        .zip(&found.missed_by_urgency)
        .rev()
        .filter(|(_, missed)| **missed > 0)
        .map(|(&vm, _)| problem.spec.vms[vm].name.clone())
        .collect();
    let conflict: Vec<String> = conflict(problem, evaluator)?.into_iter().map(name).collect();
    let relaxation = relax(problem, evaluator, found)?;
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
    if problem.targets.iter().flatten().count() > SEARCHED || evaluator.is_spent() {
        reason.push_str("; there are too many settings to search them all");
    }
    if !starved.is_empty() {
        reason.push_str(&format!(
            "; {} would not keep the declared rate",
            starved.into_iter().map(name).collect::<Vec<_>>().join(", ")
        ));
    }
    if relaxation.is_empty() {
        reason.push_str("; no longer target fits either: lower the declared rates or move a VM away");
    }
    Ok(Infeasible { sacrificed, conflict, relaxation, reason })
}

/// Tasks with a target that lose rate under the compromise.
fn starved(problem: &Problem<'_>, evaluator: &mut Evaluator<'_>, found: &Outcome) -> Vec<usize> {
    let Some(judged) = evaluator.judge(&found.config) else { return Vec::new() };
    (0..problem.targets.len())
        .filter(|&i| problem.targets[i].is_some() && judged.kept[i] < RATE_KEPT)
        .collect()
}

/// A minimal set of targets that no searched setting is predicted to meet together: each target whose removal leaves the rest infeasible is removed, the
/// least urgent VM's first, so that what remains is infeasible and would not be without any one of its members.
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
        let without = problem.with_targets(targets.clone());
        let feasible = without.targets.iter().all(Option::is_none)
            || evaluator.any_meets(&without)
            || (searched && search(&without, evaluator)?.missed == 0);
        if feasible {
            targets[i] = removed;
        }
    }
    Ok((0..targets.len()).filter(|&i| targets[i].is_some()).collect())
}

/// The smallest targets that fit for the tasks missed, all else as declared.
///
/// All missed targets are stretched by one factor, the smallest (by bisection) at which a search meets everything; each is
/// then cut back to what its task is predicted there. What is returned was searched again and found feasible.
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
    // The compromise itself meets targets stretched this far, as long as it keeps the rates.
    let wanted = missed.iter().map(|&(i, t)| judged.latency[i] / problem.limit(t)).fold(1.0, f64::max);
    let stretched = |factor: f64| {
        let mut targets = problem.targets.clone();
        for &(i, t) in &missed {
            targets[i] = Some((t * factor).ceil());
        }
        problem.with_targets(targets)
    };
    let (mut low, mut high) = (1.0f64, wanted * 1.01);
    let mut fits = None;
    while high < MOST_RELAXED {
        let relaxed = stretched(high);
        let outcome = search(&relaxed, evaluator)?;
        if outcome.missed == 0 {
            fits = Some((relaxed, outcome));
            break;
        }
        low = high;
        high *= 2.0;
    }
    let Some((mut relaxed, mut outcome)) = fits else { return Ok(Vec::new()) };
    for _ in 0..STEPS {
        let middle = (low * high).sqrt();
        let candidate = stretched(middle);
        let o = search(&candidate, evaluator)?;
        if o.missed == 0 {
            (high, relaxed, outcome) = (middle, candidate, o);
        } else {
            low = middle;
        }
    }
    // Cut each back to what it is predicted; keep the cut only if a search still finds its way there.
    if let Some(judged) = evaluator.judge(&outcome.config) {
        let mut targets = relaxed.targets.clone();
        for &(i, t) in &missed {
            let needed = (judged.latency[i] / (1.0 - problem.options.safety.0)).ceil() + 1.0;
            targets[i] = targets[i].map(|stretched| stretched.min(needed.max(t)));
        }
        let tight = problem.with_targets(targets);
        if search(&tight, evaluator)?.missed == 0 {
            relaxed = tight;
        }
    }
    let tasks: Vec<_> = problem.spec.tasks().collect();
    Ok(missed
        .iter()
        .filter_map(|&(i, declared)| {
            let fits = relaxed.targets[i]?;
            (fits > declared).then(|| Relaxation {
                vm: tasks[i].0.name.clone(),
                task: tasks[i].1.name.clone(),
                declared_ns: Nanos(declared as u64),
                fits_ns: Nanos(fits as u64),
            })
        })
        .collect())
}
