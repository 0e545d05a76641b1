//! Limits of cgroups, judged by all that is below them: one VM, or several and other programs, as
//! in a slice.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rtvirtio_blame::{Limit, Limiter, OtherUsers};
use rtvirtio_kernel::Cgroups;
use rtvirtio_spec::Task;

use crate::controls::absolute;
use crate::vm_counters::Dimension;

/// Part of what a limit lets through up to which its use by unknown programs does not matter:
/// counters are not read at the same instant.
const NEGLIGIBLE: f64 = 0.02;

/// VM whose requests a limit may count.
#[derive(Clone, Copy, Debug)]
pub struct Member<'a> {
    /// Cgroup of its processes.
    pub group: &'a Path,
    /// Tasks on the device.
    pub tasks: &'a [Task],
    /// Amount per second that its tasks completed; `None` where that is not known.
    pub completed: Option<f64>,
}

/// Limit of a cgroup for a device.
#[derive(Clone, Debug)]
pub struct GroupLimit<'a> {
    /// Cgroup whose requests it counts, with those below.
    pub cgroup: &'a Path,
    /// Limit in words: its cgroup and file.
    pub name: String,
    /// Limit per second.
    pub value: f64,
    /// Part of I/O that it counts.
    pub dimension: Dimension,
}

impl GroupLimit<'_> {
    /// Limit as a fact about one VM, by what all below its cgroup used of it and ask for. `used` is
    /// the amount per second that a cgroup moved, `None` where the kernel does not count that.
    /// `None` where what all together used is not known.
    pub fn fact(
        self,
        vm: &Member<'_>,
        others: &[Member<'_>],
        used: &dyn Fn(&Path) -> Option<f64>,
    ) -> Option<Limit> {
        let is_below = |other: &&Member<'_>| absolute(other.group).starts_with(self.cgroup);
        let sharing: Vec<&Member<'_>> = others.iter().filter(is_below).collect();
        let is_own = self.cgroup.starts_with(Cgroups::unit_of(&absolute(vm.group)));
        let asked = self.dimension.asked(vm.tasks);
        if sharing.is_empty() && is_own {
            // What programs in the VM use that is no task's counts too.
            let used = vm.completed.into_iter().chain(used(self.cgroup)).reduce(f64::max)?;
            return Some(self.dimension.fact(Limiter::Kernel, self.name, self.value, (used, asked)));
        }
        // What tasks completed is not all that a slice's limit counts.
        let all = used(self.cgroup)?;
        let fact = self.dimension.fact(Limiter::Kernel, self.name.clone(), self.value, (all, asked));
        let negligible = NEGLIGIBLE * fact.passes;
        let of_others = self.of_others(vm, &sharing, used, negligible);
        // What is counted for no VM is a program's, which asks for this at least.
        let of_programs = of_others.known.map(|known| (all - known).max(0.0));
        let is_declared = of_programs.is_some_and(|used| used <= negligible);
        let others = if is_declared { OtherUsers::Declared } else { OtherUsers::Undeclared };
        Some(Limit { asked: asked + of_others.asked + of_programs.unwrap_or_default(), others, ..fact })
    }

    /// Cgroup in which the requests of a VM below the limit are counted.
    fn unit(&self, vm: &Member<'_>) -> PathBuf {
        let group = absolute(vm.group);
        let unit = Cgroups::unit_of(&group);
        if unit.starts_with(self.cgroup) { unit } else { group }
    }

    /// Use of the limit by the other VMs below its cgroup.
    fn of_others(
        &self,
        vm: &Member<'_>,
        sharing: &[&Member<'_>],
        used: &dyn Fn(&Path) -> Option<f64>,
        negligible: f64,
    ) -> OfOthers {
        let own = self.unit(vm);
        let mut units: BTreeMap<PathBuf, Vec<&Member<'_>>> = BTreeMap::new();
        for other in sharing {
            units.entry(self.unit(other)).or_default().push(other);
        }
        let is_nested = |a: &PathBuf| {
            units.keys().chain([&own]).any(|b| a != b && (a.starts_with(b) || b.starts_with(a)))
        };
        let mut found = OfOthers { asked: 0.0, known: used(&own) };
        if units.keys().any(is_nested) {
            found.known = None;
        }
        for (unit, members) in &units {
            let declared: f64 = members.iter().map(|one| self.dimension.asked(one.tasks)).sum();
            let completed: Option<f64> = members.iter().map(|one| one.completed).sum();
            if *unit == own {
                // Which of the VMs in one cgroup sends more than it declares is not known.
                let all = declared + self.dimension.asked(vm.tasks);
                found.asked += declared;
                found.known = found.known.filter(|used| *used <= all + negligible);
                continue;
            }
            let by_kernel = used(unit);
            found.known = found.known.zip(by_kernel).map(|(sum, used)| sum + used);
            found.asked += match by_kernel.into_iter().chain(completed).reduce(f64::max) {
                // A VM at rest asks for nothing, one that sends more than it declares for that.
                Some(used) if used <= negligible => used,
                Some(used) => declared.max(used),
                None => 0.0,
            };
        }
        found
    }
}

/// Use of a limit by the other VMs below its cgroup.
struct OfOthers {
    /// Amount per second that they ask for, at least.
    asked: f64,
    /// Amount per second that all VMs below moved, the one in question too; `None` where that is
    /// not counted.
    known: Option<f64>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{READS, spec};

    fn tasks(rate: &str) -> Vec<Task> {
        let rate = if rate.is_empty() { String::new() } else { format!("rate = \"{rate}\"\n") };
        spec("name = \"a\"\npid = 7", &format!("{READS}{rate}")).vms()[0].tasks.clone()
    }

    /// Fact about a VM that declares 100/s, of a limit of 150/s on `/s`.
    fn fact(
        group: &str,
        completed: Option<f64>,
        others: &[(&str, &str)],
        all: &[(&str, f64)],
    ) -> Option<Limit> {
        let declared: Vec<(&str, Vec<Task>)> = others.iter().map(|(at, rate)| (*at, tasks(rate))).collect();
        let others: Vec<Member<'_>> = declared
            .iter()
            .map(|(at, tasks)| Member { group: Path::new(at), tasks, completed: None })
            .collect();
        let own = tasks("100/s");
        let vm = Member { group: Path::new(group), tasks: &own, completed };
        let dimension = Dimension { reads: true, writes: false, bytes: false };
        let of = GroupLimit { cgroup: Path::new("/s"), name: "/s".to_owned(), value: 150.0, dimension };
        of.fact(&vm, &others, &|at| all.iter().find(|(of, _)| Path::new(of) == at).map(|(_, used)| *used))
    }

    fn numbers(of: Option<Limit>) -> Option<(f64, f64, OtherUsers)> {
        of.map(|of| (of.used, of.asked, of.others))
    }

    #[test]
    fn a_limit_of_the_vms_own_cgroup_needs_no_counter() {
        let own = |all: &[(&str, f64)]| numbers(fact("/s", Some(75.0), &[], all));
        assert_eq!(own(&[]), Some((75.0, 100.0, OtherUsers::None)));
        assert_eq!(own(&[("/s", 90.0)]), Some((90.0, 100.0, OtherUsers::None)), "with other programs of it");
        let elsewhere = fact("/s", Some(75.0), &[("/t/b", "500/s")], &[]);
        assert_eq!(numbers(elsewhere), Some((75.0, 100.0, OtherUsers::None)), "the other is not below it");
    }

    #[test]
    fn a_limit_of_a_slice_is_used_by_all_below_it() {
        let shared = |rate, all: &[(&str, f64)]| numbers(fact("/s/a", Some(75.0), &[("/s/b", rate)], all));
        let both = [("/s", 150.0), ("/s/a", 75.0), ("/s/b", 75.0)];
        assert_eq!(shared("90/s", &both), Some((150.0, 190.0, OtherUsers::Declared)));
        assert_eq!(shared("", &both), Some((150.0, f64::INFINITY, OtherUsers::Declared)));
        assert_eq!(shared("30/s", &both), Some((150.0, 175.0, OtherUsers::Declared)), "more than declared");
        let rest = [("/s", 76.0), ("/s/a", 75.0), ("/s/b", 1.0)];
        assert_eq!(shared("90/s", &rest), Some((76.0, 101.0, OtherUsers::Declared)), "the other rests");
        let program = [("/s", 150.0), ("/s/a", 75.0), ("/s/b", 25.0)];
        assert_eq!(shared("25/s", &program), Some((150.0, 175.0, OtherUsers::Undeclared)));
    }

    #[test]
    fn a_slice_of_which_some_is_not_counted_is_not_judged_by_the_vm_alone() {
        assert_eq!(fact("/s/a", Some(75.0), &[], &[]), None, "a slice may hold other programs");
        assert_eq!(fact("/s/a", Some(75.0), &[("/s/b", "90/s")], &[]), None);
        let unseen = fact("/s/a", Some(75.0), &[("/s/b", "90/s")], &[("/s", 150.0), ("/s/a", 75.0)]);
        assert_eq!(numbers(unseen), Some((150.0, 100.0, OtherUsers::Undeclared)));
        let nested = [("/s", 150.0), ("/s/a", 150.0), ("/s/a/b", 75.0)];
        let nested = fact("/s/a", Some(75.0), &[("/s/a/b", "90/s")], &nested);
        assert_eq!(nested.unwrap().others, OtherUsers::Undeclared);
    }

    #[test]
    fn vms_in_one_cgroup_are_told_apart_by_what_they_declare_alone() {
        let both = |used| numbers(fact("/s", Some(75.0), &[("/s", "20/s")], &[("/s", used)]));
        assert_eq!(both(118.0), Some((118.0, 120.0, OtherUsers::Declared)));
        assert_eq!(both(150.0), Some((150.0, 120.0, OtherUsers::Undeclared)), "one of the two sends more");
    }
}
