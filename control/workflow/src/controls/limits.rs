//! Limits that several VMs may share, as requests per second of each.

use rtvirtio_spec::{Task, Vm};
use rtvirtio_units::Bytes;

use super::ControlKind;
use crate::vm_counters::Dimension;

/// A limit on some VMs together.
#[derive(Clone, Debug)]
pub(super) struct Limited {
    pub kind: ControlKind,
    /// Text for the user that names the origin of the limit.
    pub by: String,
    pub dimension: Dimension,
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
    /// Mean amount that a request of the VM consumes, over its tasks: weighted by their rates where
    /// all have one.
    fn per_request(&self, vm: &Vm) -> f64 {
        let all_rated = vm.tasks.iter().all(|t| t.rate.is_some_and(|r| r.0 > 0.0));
        let part = |t: &Task| t.rate.filter(|_| all_rated).map_or(1.0, |r| r.0);
        let sum: f64 = vm.tasks.iter().map(part).sum();
        vm.tasks.iter().map(|t| part(t) * self.dimension.of_task(t)).sum::<f64>() / sum.max(f64::MIN_POSITIVE)
    }

    /// `limited to 30/s by /machine.slice (io.max)`, for each VM on which it acts.
    pub fn texts<'v>(&self, spec: &[&'v Vm]) -> impl Iterator<Item = (&'v str, String)> {
        let acts: Vec<&'v Vm> =
            self.vms.iter().map(|&i| spec[i]).filter(|vm| self.per_request(vm) > 0.0).collect();
        let names: Vec<&'v str> = acts.iter().map(|vm| vm.name.as_str()).collect();
        let value = self.per_second(self.value);
        let lines: Vec<(&'v str, String)> = acts
            .into_iter()
            .map(|vm| {
                let all = |writes: f64| vm.tasks.iter().all(|t| t.op.write_share() == writes);
                let what = match (self.dimension.reads, self.dimension.writes) {
                    (true, false) if !all(0.0) => "reads ",
                    (false, true) if !all(1.0) => "writes ",
                    _ => "",
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

    fn per_second(&self, value: f64) -> String {
        if self.dimension.bytes { format!("{}/s", Bytes(value as u64)) } else { format!("{value}/s") }
    }

    /// Text on what passes in excess of the limit, and how predictions count it.
    fn beyond(&self, vm: &Vm) -> String {
        match self.passes {
            None => ": QEMU joins neighbouring requests before this limit counts them, so that it bounds no requests of the guest, and a \
                     VM without targets counts as without it: limit bytes too, or set request-merging=off"
                .to_owned(),
            Some(passes) if passes > self.value => {
                let passes = self.per_second(passes);
                let counted = if has_target(vm) { "not in the predictions of others" } else { "as which it counts" };
                format!(", and to {passes} in a burst, {counted}")
            }
            Some(_) => String::new(),
        }
    }

    /// Amount per second that predictions count: the long-run limit for a VM with a target, the
    /// burst for one without, since its neighbours meet that.
    fn counted(&self, vm: &Vm) -> Option<f64> {
        let held = match self.kind {
            ControlKind::CgroupLimit => self.dimension.let_through(self.value),
            _ => self.value,
        };
        if has_target(vm) { Some(held) } else { self.passes }
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
            let others = limit
                .vms
                .iter()
                .filter(|&&i| i != vm)
                .map(|&i| limit.dimension.asked(&spec[i].tasks))
                .collect();
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
