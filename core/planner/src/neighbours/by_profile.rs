//! Limits by the profile, in units of device time: the device serves one second of requests per
//! second after its longest stall, in any order.

use rtvirtio_model::{Profile, service};
use rtvirtio_spec::Task;
use rtvirtio_traffic::{Actuator, Arrival, Direction, Service, Tspec, Unit, largest_that_holds};
use rtvirtio_units::Bytes;

use super::{
    Need, Neighbour, NeighbourError, NeighbourLimit, NeighbourPlan, VictimOutlook, goes, is_closed, refused,
    requests,
};

/// Ratio of rate to peak where a peak is chosen: the rest makes up for late wake-ups.
const OF_PEAK: f64 = 0.9;

pub(super) fn choose(
    profile: &Profile,
    needs: &[Need<'_>],
    all: &[Neighbour<'_>],
    actuator: Actuator,
) -> Result<NeighbourPlan, NeighbourError> {
    let disk = Disk { of: service(profile)? };
    let flows = disk.flows(needs)?;
    let costs = all
        .iter()
        .map(|one| disk.cost(one.direction, one.blocks.1, &one.vm.name))
        .collect::<Result<Vec<f64>, _>>()?;
    let outlook = |limits: &[NeighbourLimit]| -> Result<Vec<VictimOutlook>, NeighbourError> {
        let mut cross = Vec::new();
        for (limit, one) in limits.iter().zip(all) {
            let cost = match limit.tspec.unit {
                Unit::Requests => disk.cost(one.direction, one.blocks.1, &one.vm.name)?,
                // Bytes cost most in small requests.
                Unit::Bytes => disk.cost(one.direction, one.blocks.0, &one.vm.name)? / one.blocks.0.0 as f64,
            };
            cross.push(scaled(&limit.kept, cost));
        }
        Ok(needs.iter().enumerate().map(|(i, need)| disk.outlook(need, i, &flows, &cross)).collect())
    };
    // Each chosen limit has the same share of the device's time.
    let at = |share: f64, tspec: &dyn Fn(f64) -> Tspec| -> Result<Vec<NeighbourLimit>, NeighbourError> {
        let of = |(one, cost): (&Neighbour<'_>, &f64)| {
            one.limit(one.given.unwrap_or_else(|| tspec(share / cost)), actuator)
        };
        all.iter().zip(&costs).map(of).collect()
    };
    let held = |limits: Vec<NeighbourLimit>| {
        let victims = outlook(&limits).ok()?;
        victims.iter().all(VictimOutlook::is_held).then_some((limits, victims))
    };
    // One request per second of the most expensive kind.
    let least = costs.iter().copied().fold(0.0, f64::max);
    let plain = |rate: f64| requests(actuator, rate, None);
    let one_by_one = |rate: f64| Tspec { burst: 1, ..requests(actuator, rate, None) };
    let largest =
        |tspec: &dyn Fn(f64) -> Tspec| largest_that_holds(least, 1.0, |share| held(at(share, tspec).ok()?));
    let by_burst = largest(&plain);
    // A peak keeps a burst from coming at once, where the regulator has one.
    let by_peak = (actuator == Actuator::IoDomain).then(|| largest(&one_by_one)).flatten();
    let by_peak = by_peak
        .map(|(share, _)| share)
        .filter(|share| by_burst.as_ref().is_none_or(|(plain, _)| OF_PEAK * share > *plain));
    let with_peak = by_peak.and_then(|share| {
        held(at(OF_PEAK * share, &|rate| requests(actuator, rate, Some((rate / OF_PEAK).floor()))).ok()?)
    });
    let Some((limits, victims)) = with_peak.or(by_burst.map(|(_, found)| found)) else {
        let limits = at(least, &plain)?;
        return Err(refused(outlook(&limits)?, &limits));
    };
    Ok(NeighbourPlan {
        basis: "profile",
        actuator,
        limits,
        victims,
        notes: vec![
            format!(
                "the bound counts the longest stall that the profile has seen, {:.2} ms, and any order of service: elevator none, and a device that is as it was measured",
                disk.of.stall.as_secs_f64() * 1e3
            ),
            "it is of the device: what a guest's own CPU time adds is not in it".to_owned(),
        ],
    })
}

fn scaled(of: &Arrival, cost: f64) -> Arrival {
    let peak = of.peak.map(|(peak, piece)| (peak * cost, piece * cost));
    Arrival { rate: of.rate * cost, burst: of.burst * cost, peak }
}

struct Disk {
    of: rtvirtio_model::Service,
}

impl Disk {
    /// Device time of a request, in seconds.
    fn cost(&self, direction: Direction, block: Bytes, vm: &str) -> Result<f64, NeighbourError> {
        let line = match direction {
            Direction::Write => {
                self.of.write.as_ref().ok_or_else(|| NeighbourError::NoWrites { vm: vm.to_owned() })?
            }
            _ => &self.of.read,
        };
        Ok(line.occupancy + line.per_byte * block.0.saturating_sub(self.of.block.0) as f64)
    }

    /// Device time of a task's most expensive request, and the additional latency on an idle
    /// device, s.
    fn of_task(&self, task: &Task, vm: &str) -> Result<(f64, f64), NeighbourError> {
        let mut most = (0.0f64, 0.0f64);
        for direction in [Direction::Read, Direction::Write] {
            if !goes(task.op, direction) {
                continue;
            }
            let cost = self.cost(direction, task.block, vm)?;
            let line = if direction == Direction::Write { self.of.write.as_ref() } else { None };
            let line = line.unwrap_or(&self.of.read);
            let more = task.block.0.saturating_sub(self.of.block.0) as f64;
            let alone = line.alone + line.alone_per_byte * more;
            most = (most.0.max(cost), most.1.max(alone - cost));
        }
        Ok(most)
    }

    /// Arrivals of each need as seen by the others, and the costs of its own requests.
    ///
    /// A delayed task catches up: it may send at once the requests of one latency target.
    fn flows<'a>(&self, needs: &[Need<'a>]) -> Result<Vec<Flow<'a>>, NeighbourError> {
        let is_other = |a: &Need<'_>, b: &Need<'_>| match b.task {
            Some(task) => a.vm.name != b.vm.name || a.largest.name != task.name,
            None => a.vm.name != b.vm.name,
        };
        let unpaced = needs.iter().find(|need| need.task.is_some() && need.rate == 0.0);
        if let Some(need) = unpaced.filter(|need| needs.iter().any(|one| is_other(need, one))) {
            let task = need.largest.name.clone();
            return Err(NeighbourError::Unpaced { vm: need.vm.name.clone(), task });
        }
        let of = |need: &Need<'a>| {
            let (cost, beyond) = self.of_task(need.largest, &need.vm.name)?;
            let burst = 1.0 + need.rate * need.within;
            let arrival = Arrival { rate: need.rate * cost, burst: burst * cost, peak: None };
            // The service of a whole VM is the sum over its tasks.
            Ok(Flow { vm: &need.vm.name, arrival: need.task.is_some().then_some(arrival), cost, beyond })
        };
        needs.iter().map(of).collect()
    }

    /// The worst case of one need next to all other traffic.
    fn outlook(&self, need: &Need<'_>, own: usize, flows: &[Flow<'_>], cross: &[Arrival]) -> VictimOutlook {
        // A service asked for a whole VM is for all tasks of it together.
        let is_own = |i: usize| if need.task.is_some() { i == own } else { flows[i].vm == flows[own].vm };
        let others = flows.iter().enumerate().filter(|(i, _)| !is_own(*i));
        let cross: Vec<Arrival> =
            others.filter_map(|(_, flow)| flow.arrival).chain(cross.iter().copied()).collect();
        let Flow { cost, beyond, .. } = flows[own];
        let whole = Service { alpha: 1.0, delta: self.of.stall.as_secs_f64() + beyond };
        // A closed loop has the idle device's latency in each request.
        let closed = need.task.is_some_and(is_closed) && need.rate > 0.0;
        let each = if closed { cost + beyond } else { cost };
        let long = sum(cross.iter().map(|a| (a.rate, a.burst)));
        let short = sum(cross.iter().map(|a| a.peak.unwrap_or((a.rate, a.burst))));
        let delay = |line: &Arrival| {
            let left = whole.left_by(line)?;
            (need.rate * each <= left.alpha).then(|| left.delta + need.burst * cost / left.alpha)
        };
        let bound = [delay(&long), delay(&short)].into_iter().flatten().reduce(f64::min);
        need.outlook(bound, (1.0 - long.rate).max(0.0) / each, None)
    }
}

#[derive(Clone, Copy, Debug)]
struct Flow<'a> {
    vm: &'a str,
    arrival: Option<Arrival>,
    cost: f64,
    beyond: f64,
}

fn sum(lines: impl Iterator<Item = (f64, f64)>) -> Arrival {
    let (rate, burst) = lines.fold((0.0, 0.0), |all, one| (all.0 + one.0, all.1 + one.1));
    Arrival { rate, burst, peak: None }
}
