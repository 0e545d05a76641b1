//! Effect of a change of plan on each VM, and whether it may be made without consent.

use std::collections::BTreeSet;

use rtvirtio_model::Config;
use rtvirtio_spec::{Criticality, Spec};
use serde::{Deserialize, Serialize};

use crate::TaskOutlook;

/// Predictions that differ by less than this share count as equal.
const SAME: f64 = 0.05;

/// Effect of a change on a VM, by severity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    /// Better in something, and worse in nothing.
    Better,
    /// Equal within 5 % in everything.
    Same,
    /// Worse in something: a longer tail, less rate, a lower limit or share.
    Worse,
    /// A target that is met now is predicted to be missed.
    Misses,
}

impl Change {
    /// Short phrase for reports.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Better => "better",
            Self::Same => "as now",
            Self::Worse => "worse",
            Self::Misses => "misses a target that it meets now",
        }
    }
}

/// Effect of a change on one VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Effect {
    pub vm: String,
    /// Criticality in the VM's contract.
    pub criticality: Criticality,
    /// Predicted change for the VM.
    pub change: Change,
}

/// Predicted results of one VM under one configuration.
struct VmForecast {
    missed: u32,
    /// Longest tail as a share of its target; without targets, the longest tail in ns.
    tail: f64,
    kept: f64,
    cap: f64,
    /// Share of the weights of all VMs.
    share: f64,
}

impl VmForecast {
    fn new(vm: usize, spec: &Spec, config: &Config, outlook: &[TaskOutlook]) -> Option<Self> {
        let name = &spec.vms.get(vm)?.name;
        let here = config.vms.get(vm)?;
        let all: u32 = config.vms.iter().map(|v| v.weight).sum();
        let mut standing = Self {
            missed: 0,
            tail: 0.0,
            kept: 1.0,
            cap: here.cap.map_or(f64::INFINITY, |cap| cap.0),
            share: f64::from(here.weight) / f64::from(all.max(1)),
        };
        for task in outlook.iter().filter(|t| t.vm == *name) {
            let (tail, kept) = (task.forecast.judged().0 as f64, task.forecast.rate_kept);
            standing.kept = standing.kept.min(kept);
            match task.target_ns {
                Some(target) => {
                    standing.missed += u32::from(task.misses());
                    standing.tail = standing.tail.max(tail / target.0.max(1) as f64);
                }
                None => standing.tail = standing.tail.max(tail),
            }
        }
        Some(standing)
    }

    fn change(&self, then: &Self, has_targets: bool) -> Change {
        let less = |a: f64, b: f64| a < b * (1.0 - SAME);
        if then.missed > self.missed {
            return Change::Misses;
        }
        // Without targets the tail does not count, only the rate.
        let tail_is_worse = has_targets && less(self.tail, then.tail);
        let gets_less = less(then.kept, self.kept) || less(then.cap, self.cap);
        let share_is_less = !has_targets && less(then.share, self.share);
        if tail_is_worse || gets_less || share_is_less {
            return Change::Worse;
        }
        let tail_is_better = has_targets && less(then.tail, self.tail);
        if then.missed < self.missed
            || tail_is_better
            || less(self.kept, then.kept)
            || less(self.cap, then.cap)
        {
            return Change::Better;
        }
        Change::Same
    }
}

/// Predicted effect of replacing configuration `now` by `then`, for each VM of a device.
#[must_use]
pub fn effects(spec: &Spec, now: (&Config, &[TaskOutlook]), then: (&Config, &[TaskOutlook])) -> Vec<Effect> {
    let of = |(vm, of): (usize, &rtvirtio_spec::Vm)| {
        let has_targets = of.tasks.iter().any(|task| !task.targets.is_empty());
        let before = VmForecast::new(vm, spec, now.0, now.1)?;
        let after = VmForecast::new(vm, spec, then.0, then.1)?;
        let change = before.change(&after, has_targets);
        Some(Effect { vm: of.name.clone(), criticality: of.criticality, change })
    };
    spec.vms.iter().enumerate().filter_map(of).collect()
}

/// Tasks (`VM/TASK`) that a configuration is predicted to let miss a target.
#[must_use]
pub fn given_up(outlook: &[TaskOutlook]) -> BTreeSet<String> {
    let missed = outlook.iter().filter(|task| task.misses());
    missed.map(|t| format!("{}/{}", t.vm, t.task)).collect()
}

/// Reason why a change needs consent; `None` where it does not. No VM is made worse for the sake of
/// less critical ones, and none misses a target for the sake of equally critical ones.
#[must_use]
pub fn objection(effects: &[Effect]) -> Option<String> {
    let gains = effects.iter().filter(|e| e.change == Change::Better).map(|e| e.criticality).max();
    let hurt = effects.iter().filter(|e| match e.change {
        Change::Better | Change::Same => false,
        Change::Worse => gains.is_none_or(|gains| e.criticality > gains),
        Change::Misses => gains.is_none_or(|gains| e.criticality >= gains),
    });
    let hurt: Vec<String> =
        hurt.map(|e| format!("{} ({}): {}", e.vm, e.criticality.word(), e.change.word())).collect();
    (!hurt.is_empty()).then(|| hurt.join("; "))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn effect(criticality: Criticality, change: Change) -> Effect {
        Effect { vm: "vm".to_owned(), criticality, change }
    }

    #[test]
    fn the_less_critical_gives_way_and_not_the_other_way_round() {
        use Change::{Better, Misses, Same, Worse};
        use Criticality::{High, Low, Medium};
        let may = |all: &[(Criticality, Change)]| {
            let all: Vec<Effect> = all.iter().map(|(c, change)| effect(*c, *change)).collect();
            objection(&all).is_none()
        };
        assert!(may(&[]) && may(&[(High, Same)]));
        assert!(may(&[(High, Better), (Low, Worse)]) && may(&[(High, Better), (Medium, Misses)]));
        assert!(may(&[(Medium, Better), (Medium, Worse)]));
        assert!(!may(&[(Medium, Better), (Medium, Misses)]));
        assert!(!may(&[(Medium, Better), (High, Worse)]));
        assert!(!may(&[(Low, Worse)]), "nobody gains by it");
    }

    fn any_effect() -> impl Strategy<Value = Effect> {
        let criticality =
            prop_oneof![Just(Criticality::Low), Just(Criticality::Medium), Just(Criticality::High)];
        let change =
            prop_oneof![Just(Change::Better), Just(Change::Same), Just(Change::Worse), Just(Change::Misses)];
        (criticality, change).prop_map(|(criticality, change)| effect(criticality, change))
    }

    proptest! {
        #[test]
        fn what_may_be_done_unasked_hurts_no_higher_criticality(
            all in proptest::collection::vec(any_effect(), 0..8),
        ) {
            if objection(&all).is_none() {
                for worse in all.iter().filter(|e| matches!(e.change, Change::Worse | Change::Misses)) {
                    let is_for = |e: &&Effect| e.change == Change::Better && e.criticality >= worse.criticality;
                    prop_assert!(all.iter().any(|e| is_for(&e)), "{worse:?} for no one");
                }
            }
        }
    }
}
