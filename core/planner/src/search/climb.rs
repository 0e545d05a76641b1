//! Hill climbing over all knobs: one knob, one level at a time, while the result improves. For
//! models that can be evaluated, but not inverted.

use rtvirtio_model::{Bfq, Config, Elevator, weights_act};

use super::{
    ALL_NEIGHBOURS, Edits, Pressed, above, below, settle, weighed, weights_allowed, whole_cap,
    whole_cap_below,
};
use crate::evaluate::{Evaluator, Outcome, Problem};

/// Factor of one step of a cap.
const CAP_STEP: f64 = 1.6;

/// Climbs from `from` for at most `steps` moves, each the best of all neighbours.
pub(crate) fn climb(
    problem: &Problem<'_>,
    evaluator: &mut Evaluator<'_>,
    from: Outcome,
    steps: usize,
) -> Outcome {
    let mut best = from;
    for _ in 0..steps {
        let mut better: Option<Outcome> = None;
        for config in neighbours(problem, evaluator, &best) {
            let Some(o) = evaluator.outcome(problem, settle(problem, config)) else { continue };
            if o.climbs_over(better.as_ref().unwrap_or(&best)) {
                better = Some(o);
            }
        }
        match better {
            Some(b) => best = b,
            None => break,
        }
    }
    best
}

fn neighbours(problem: &Problem<'_>, evaluator: &mut Evaluator<'_>, at: &Outcome) -> Vec<Config> {
    let config = &at.config;
    let mut out = Edits::new(config);
    let mut push = |edit: &dyn Fn(&mut Config)| out.push(edit);
    let space = &problem.options.space;
    if config.elevator == Elevator::Bfq {
        for value in adjacent(&space.slice_idle, config.bfq.slice_idle) {
            push(&|c| c.bfq.slice_idle = value);
        }
        if config.bfq.slice_idle.0 > 0 {
            for value in adjacent(&space.timeout_sync, config.bfq.timeout_sync) {
                push(&|c| c.bfq.timeout_sync = value);
            }
            for &value in &space.max_budget {
                push(&|c| c.bfq.max_budget = value);
            }
        }
        if space.low_latency {
            push(&|c| c.bfq.low_latency = !c.bfq.low_latency);
        }
    }
    for &elevator in &space.elevators {
        push(&|c| {
            if elevator == Elevator::Bfq && c.elevator != Elevator::Bfq {
                c.bfq = Bfq::default();
            }
            c.elevator = elevator;
        });
    }
    if space.caps {
        for &i in &problem.cappable {
            if let Some(cap) = config.vms[i].cap {
                push(&|c| c.vms[i].cap = Some(whole_cap(cap.0 * CAP_STEP)));
                push(&|c| c.vms[i].cap = Some(whole_cap_below(cap.0 / CAP_STEP)));
                push(&|c| c.vms[i].cap = None);
            }
        }
    }
    if weights_allowed(problem) && weights_act(problem.spec, config) {
        for i in candidates(problem, evaluator, at) {
            for value in adjacent(&space.weights, config.vms[i].weight) {
                push(&|c| c.vms[i].weight = value);
            }
        }
    }
    out.changed
}

/// VMs whose weight is worth moving.
fn candidates(problem: &Problem<'_>, evaluator: &mut Evaluator<'_>, at: &Outcome) -> Vec<usize> {
    if problem.spec.vms.len() <= ALL_NEIGHBOURS {
        return weighed(problem);
    }
    let Some(of) = Pressed::new(problem, evaluator, at) else { return Vec::new() };
    let mut out: Vec<usize> = [of.worst, of.easiest, of.missing].into_iter().flatten().collect();
    out.sort_unstable();
    out.dedup();
    out
}

/// The nearest levels below and above a value.
fn adjacent<T: Copy + Ord>(levels: &[T], value: T) -> Vec<T> {
    below(levels, value).into_iter().chain(above(levels, value)).collect()
}

#[cfg(test)]
mod tests {
    use rtvirtio_units::Nanos;

    use super::*;

    #[test]
    fn levels_adjacent_to_a_value() {
        let levels = [0, 1, 2, 4, 8].map(Nanos::from_millis);
        let ms = Nanos::from_millis;
        assert_eq!(adjacent(&levels, ms(2)), [ms(1), ms(4)]);
        assert_eq!(adjacent(&levels, ms(3)), [ms(2), ms(4)], "a value between levels");
        assert_eq!(adjacent(&levels, ms(0)), [ms(1)]);
        assert_eq!(adjacent(&levels, ms(9)), [ms(8)]);
    }
}
