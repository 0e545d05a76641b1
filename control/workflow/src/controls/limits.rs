//! Limits that several VMs may share, as requests per second of each.

use rtvirtio_spec::{Task, Vm};
use rtvirtio_units::Bytes;

use super::ControlKind;

/// Direction of the requests that a limit counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Read,
    Write,
    Both,
}

/// Unit in which a limit counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    Requests,
    Bytes,
}

/// A limit on some VMs together.
#[derive(Clone, Debug)]
pub(super) struct Limited {
    pub kind: ControlKind,
    /// Text for the user that names the origin of the limit.
    pub by: String,
    pub direction: Direction,
    pub unit: Unit,
    /// Most per second in the long run.
    pub value: f64,
    /// Most per second that it lets through in a burst; `None` where that is not bounded.
    pub passes: Option<f64>,
    /// Text for the user on how to raise the limit.
    pub remedy: String,
    /// The VMs that share it.
    pub vms: Vec<usize>,
    /// Whether it is the cap of one VM's configuration, which a plan may change.
    pub of_plan: bool,
}

impl Limited {
    /// Mean amount that a request of a task consumes, in requests or bytes.
    fn taken(&self, task: &Task) -> f64 {
        let writes = task.op.write_share();
        let share = match self.direction {
            Direction::Read => 1.0 - writes,
            Direction::Write => writes,
            Direction::Both => 1.0,
        };
        match self.unit {
            Unit::Requests => share,
            Unit::Bytes => share * task.mean_block(),
        }
    }

    /// Mean amount that a request of the VM consumes, over its tasks: weighted by their rates where
    /// all have one.
    fn per_request(&self, vm: &Vm) -> f64 {
        let all_rated = vm.tasks.iter().all(|t| t.rate.is_some_and(|r| r.0 > 0.0));
        let part = |t: &Task| t.rate.filter(|_| all_rated).map_or(1.0, |r| r.0);
        let sum: f64 = vm.tasks.iter().map(part).sum();
        vm.tasks.iter().map(|t| part(t) * self.taken(t)).sum::<f64>() / sum.max(f64::MIN_POSITIVE)
    }

    /// Amount per second that the VM demands; infinite with a task without a rate.
    fn demand(&self, vm: &Vm) -> f64 {
        let of = |t: &Task| match (self.taken(t), t.rate) {
            (taken, _) if taken <= 0.0 => 0.0,
            (taken, Some(rate)) => taken * rate.0,
            (_, None) => f64::INFINITY,
        };
        vm.tasks.iter().map(of).sum()
    }

    /// `limited to 30/s by /machine.slice (io.max)`, for each VM on which it acts.
    pub fn texts<'v>(&self, spec: &[&'v Vm]) -> impl Iterator<Item = (&'v str, String)> {
        let acts: Vec<&'v Vm> =
            self.vms.iter().map(|&i| spec[i]).filter(|vm| self.per_request(vm) > 0.0).collect();
        let names: Vec<&'v str> = acts.iter().map(|vm| vm.name.as_str()).collect();
        let value = match self.unit {
            Unit::Requests => format!("{}/s", self.value),
            Unit::Bytes => format!("{}/s", Bytes(self.value as u64)),
        };
        let lines: Vec<(&'v str, String)> = acts
            .into_iter()
            .map(|vm| {
                let one_way = match self.direction {
                    Direction::Read => vm.tasks.iter().all(|t| t.op.write_share() <= 0.0),
                    Direction::Write => vm.tasks.iter().all(|t| t.op.write_share() >= 1.0),
                    Direction::Both => true,
                };
                let what = match self.direction {
                    _ if one_way => "",
                    Direction::Read => "reads ",
                    Direction::Write => "writes ",
                    Direction::Both => "",
                };
                let with: Vec<&str> = names.iter().copied().filter(|name| *name != vm.name).collect();
                let with = if with.is_empty() {
                    String::new()
                } else {
                    format!(", together with {}", with.join(", "))
                };
                (
                    vm.name.as_str(),
                    format!("{what}limited to {value} by {}{with}{}", self.by, self.beyond(vm)),
                )
            })
            .collect();
        lines.into_iter()
    }

    /// Text on what passes in excess of the limit, and how predictions count it.
    fn beyond(&self, vm: &Vm) -> String {
        match self.passes {
            None => ": QEMU joins neighbouring requests before this limit counts them, so that it bounds no requests of the guest, and a \
                     VM without targets counts as without it: limit bytes too, or set request-merging=off"
                .to_owned(),
            Some(passes) if passes > self.value => {
                let passes = match self.unit {
                    Unit::Requests => format!("{passes}/s"),
                    Unit::Bytes => format!("{}/s", Bytes(passes as u64)),
                };
                let counted = if has_target(vm) { "not in the predictions of others" } else { "as which it counts" };
                format!(", and to {passes} in a burst, {counted}")
            }
            Some(_) => String::new(),
        }
    }

    /// Amount per second that predictions count: the long-run limit for a VM with a target, the
    /// burst for one without, since its neighbours meet that.
    fn counted(&self, vm: &Vm) -> Option<f64> {
        if has_target(vm) { Some(self.value) } else { self.passes }
    }
}

fn has_target(vm: &Vm) -> bool {
    vm.tasks.iter().any(|task| !task.targets.is_empty())
}

/// Most requests per second that each VM gets through all limits, those of its own configuration
/// left out, and the one that is the least: of a limit that several share, what the others'
/// declared rates leave it, and at least an equal part.
pub(super) fn ceilings<'l>(limits: &'l [Limited], spec: &[&Vm]) -> Vec<Option<(f64, &'l Limited)>> {
    let one = |vm: usize| {
        let here = limits.iter().filter(|l| !l.of_plan && l.vms.contains(&vm));
        let most = here.filter_map(|limit| {
            let (each, value) = (limit.per_request(spec[vm]), limit.counted(spec[vm])?);
            let others = limit.vms.iter().filter(|&&i| i != vm).map(|&i| limit.demand(spec[i])).collect();
            (each > 0.0).then(|| (room(value, others) / each, limit))
        });
        most.reduce(|least, other| if other.0 < least.0 { other } else { least })
    };
    (0..spec.len()).map(one).collect()
}

/// Max-min fair share of a limit for a VM that wants all of it, given the demands of the others.
fn room(limit: f64, mut others: Vec<f64>) -> f64 {
    others.sort_by(f64::total_cmp);
    let (mut left, mut users) = (limit, others.len() + 1);
    for demand in others {
        if demand >= left / users as f64 {
            break;
        }
        left -= demand;
        users -= 1;
    }
    left / users as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shared_limit_leaves_what_the_others_do_not_take() {
        assert_eq!(room(30.0, vec![]), 30.0);
        assert_eq!(room(30.0, vec![5.0]), 25.0);
        assert_eq!(room(30.0, vec![100.0]), 15.0);
        assert_eq!(room(30.0, vec![f64::INFINITY, 4.0]), 13.0);
        assert_eq!(room(30.0, vec![20.0, 20.0]), 10.0);
    }
}
