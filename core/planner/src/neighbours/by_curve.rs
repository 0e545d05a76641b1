//! Limits by a measured curve of one victim and one neighbour, in requests.

use rtvirtio_spec::Task;
use rtvirtio_traffic::{Actuator, Direction, Service, VictimCurve, largest_that_holds};

use super::{Need, Neighbour, NeighbourError, NeighbourPlan, VictimOutlook, goes, refused, requests};

pub(super) fn choose(
    curve: &VictimCurve,
    needs: &[Need<'_>],
    all: &[Neighbour<'_>],
    actuator: Actuator,
) -> Result<NeighbourPlan, NeighbourError> {
    let ([need], [neighbour]) = (needs, all) else {
        return Err(other(format!(
            "it is of one victim and one neighbour, and the spec has {} and {}",
            needs.len(),
            all.len()
        )));
    };
    fits(curve, need, neighbour)?;
    let model = curve.model()?;
    let most = curve.runs.iter().filter_map(|run| run.limit).map(|limit| limit.rate).fold(1.0, f64::max);
    let at = |rate: f64| {
        let limit = neighbour.limit(requests(actuator, rate, None), actuator)?;
        let expected = model.curve().at(limit.kept.rate.min(model.curve().largest()));
        let bound = model.bound(&limit.kept);
        let latency = match need.task {
            Some(_) => model.latency(&limit.kept, need.rate, need.burst),
            None => bound.map(|service| service.delta),
        };
        let victim = need.outlook(latency, bound.map_or(0.0, |service| service.alpha), expected);
        Ok::<_, NeighbourError>((vec![limit], vec![victim]))
    };
    // The measured service has to suffice too.
    let seen = |victim: &VictimOutlook| {
        victim.expected.is_none_or(|service| outlook(need, Some(service), None).is_held())
    };
    let held = |rate: f64| at(rate).ok().filter(|(_, v)| v.iter().all(|v| v.is_held() && seen(v)));
    let Some((_, (limits, victims))) = largest_that_holds(1.0, most, held) else {
        let (limits, victims) = at(1.0)?;
        // Where the bound holds, the measured service does not.
        let missed = |v: VictimOutlook| if v.is_held() { outlook(need, v.expected, v.expected) } else { v };
        let victims = victims.into_iter().map(missed).collect();
        return Err(refused(victims, &limits));
    };
    let order = if curve.oldest_first { "the oldest request first" } else { "any order of service" };
    Ok(NeighbourPlan {
        basis: "curve",
        actuator,
        limits,
        victims,
        notes: vec![format!(
            "the bound is for {order}, with {} of the victim's and {} of the neighbour's requests of {} bytes outstanding, as the curve was measured",
            curve.outstanding.victim, curve.outstanding.neighbour, curve.block
        )],
    })
}

/// A measured service counts from one completion to the next; a request also waits for the other
/// requests of its own burst.
fn outlook(need: &Need<'_>, service: Option<Service>, expected: Option<Service>) -> VictimOutlook {
    let latency = |s: Service| if need.task.is_some() { s.delta + need.burst / s.alpha } else { s.delta };
    need.outlook(service.map(latency), service.map_or(0.0, |s| s.alpha), expected)
}

fn other(why: String) -> NeighbourError {
    NeighbourError::OtherCurve { why }
}

fn fits(curve: &VictimCurve, need: &Need<'_>, neighbour: &Neighbour<'_>) -> Result<(), NeighbourError> {
    let opposite = |task: &Task| {
        [Direction::Read, Direction::Write].into_iter().any(|d| goes(task.op, d) != (d == curve.direction))
    };
    let tasks = || need.vm.tasks.iter().chain(&neighbour.vm.tasks);
    if let Some(task) = tasks().find(|task| opposite(task)) {
        return Err(other(format!("it is of {}s, and task {} is not", curve.direction.name(), task.name)));
    }
    if let Some(task) = tasks().find(|task| task.block.0 != curve.block || !task.mix.is_empty()) {
        return Err(other(format!(
            "it is of requests of {} bytes, and task {} has others",
            curve.block, task.name
        )));
    }
    if let Some(task) = need.task.filter(|task| task.depth != curve.outstanding.victim) {
        return Err(other(format!(
            "its victim has {} requests outstanding, and task {} has {}",
            curve.outstanding.victim, task.name, task.depth
        )));
    }
    if neighbour.depth > curve.outstanding.neighbour {
        return Err(other(format!(
            "its neighbour has {} requests outstanding, and vm {} has {}",
            curve.outstanding.neighbour, neighbour.vm.name, neighbour.depth
        )));
    }
    Ok(())
}
