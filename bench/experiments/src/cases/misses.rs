//! Causes of the misses of our schemes: whether any tried setting passes, and what limits the case.

use std::collections::BTreeMap;

use rtvirtio_model::{DepthPoint, Profile};
use rtvirtio_planner::scheme_name;
use rtvirtio_units::Nanos;
use serde::Serialize;

use crate::cases::Case;
use crate::cases::passes::{OURS, case_of, keeps_rate, passed, passed_awake, same_settings, worst};
use rtvirtio_learn::dataset::{Outcome, Point};
use rtvirtio_learn::load::{Stream, vm_name};

/// Limit that keeps a case from passing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Limit {
    /// The host stalls: less its stalls every run passes.
    Host,
    /// A matter of chance: the same setting passed in another run of the case.
    Chance,
    /// A different setting that was tried passes: ours was chosen wrongly.
    Choice,
    /// A declared rate is not kept under any setting that was tried.
    Rate,
    /// The device holds a request for longer than the target: alone, with one in flight, or in the
    /// late runs, in which it completed none meanwhile.
    Device,
    /// Requests wait for others' under every setting that was tried.
    Waiting,
}

impl Limit {
    /// All limits, in the order of tables.
    pub const ALL: [Self; 6] =
        [Self::Host, Self::Chance, Self::Choice, Self::Rate, Self::Device, Self::Waiting];

    /// Name in tables and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Chance => "chance",
            Self::Choice => "choice",
            Self::Rate => "rate",
            Self::Device => "device",
            Self::Waiting => "waiting",
        }
    }
}

/// A case with runs of ours that did not pass.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Miss {
    /// Name of the case ([`Case::name`]).
    pub case: String,
    /// Schemes of ours that missed, each with the largest measured over target.
    pub missed: Vec<(String, f64)>,
    /// Runs of the case, trials included.
    pub tried: usize,
    /// Runs of these that passed.
    pub passed: usize,
    /// Limit that keeps the case from passing.
    pub limit: Limit,
    /// Measured values that show the limit, as text.
    pub why: String,
}

/// The misses of ours in these cases, in their order. `points` are all runs, trials of tuning
/// included.
#[must_use]
pub fn misses(cases: &[Case], points: &[Point], profiles: &BTreeMap<String, Profile>) -> Vec<Miss> {
    let miss = |case: &Case| {
        let runs: Vec<&Point> = points.iter().filter(|p| case_of(&p.id) == case.name).collect();
        let profile = runs.first().and_then(|p| profiles.get(&p.device));
        miss(&case.name, &runs, profile)
    };
    cases.iter().filter_map(miss).collect()
}

fn miss(case: &str, runs: &[&Point], profile: Option<&Profile>) -> Option<Miss> {
    let of_ours = |p: &&&Point| OURS.iter().any(|ours| p.is_of(ours));
    let late: Vec<&Point> = runs.iter().filter(of_ours).filter(|p| !passed(p)).copied().collect();
    let (limit, why) = limit(&late, runs, profile)?;
    let mut missed: Vec<(String, f64)> = Vec::new();
    for scheme in OURS {
        let of = late.iter().filter(|p| p.is_of(scheme));
        missed.extend(of.map(|p| worst(p)).reduce(f64::max).map(|w| (scheme.to_owned(), w)));
    }
    let passed = runs.iter().filter(|p| passed(p)).count();
    Some(Miss { case: case.to_owned(), missed, tried: runs.len(), passed, limit, why })
}

/// Limit of the late runs: the first that applies, from the easiest to remove to the hardest.
/// `None` without a late run.
fn limit(late: &[&Point], runs: &[&Point], profile: Option<&Profile>) -> Option<(Limit, String)> {
    let (point, task) = late.iter().filter_map(|p| Some((*p, latest(p)?))).max_by(|a, b| {
        let over = |x: &(&Point, Judged)| worst(x.0);
        over(a).total_cmp(&over(b))
    })?;
    if late.iter().all(|p| passed_awake(p)) {
        let stall = late.iter().map(|p| p.noise.max_ns).max().unwrap_or_default();
        let why = format!("less the host's own stalls (longest {stall}) all runs of ours pass");
        return Some((Limit::Host, why));
    }
    let same: Vec<&&Point> = runs.iter().filter(|p| same_settings(p, point)).collect();
    let again = same.iter().filter(|p| passed(p)).count();
    if again > 0 {
        let why = format!("{}; {again} of {} runs under this setting pass", task.text(), same.len());
        return Some((Limit::Chance, why));
    }
    let best = |good: fn(&Point) -> bool| {
        runs.iter().filter(|p| good(p)).min_by(|a, b| worst(a).total_cmp(&worst(b)))
    };
    let run_text = |p: &Point| {
        let schemes: Vec<&str> = p.scheme.split(',').map(scheme_name).collect();
        format!("{} ({}, {:.2} of the target)", p.knobs, schemes.join(", "), worst(p))
    };
    if let Some(other) = best(passed) {
        return Some((Limit::Choice, format!("{}; passes: {}", task.text(), run_text(other))));
    }
    if let Some(other) = best(passed_awake) {
        let why = format!("{}; passes less the host's own stalls: {}", task.text(), run_text(other));
        return Some((Limit::Choice, why));
    }
    let nearest = best(|_| true).map(|p| format!("; nearest of {} runs: {}", runs.len(), run_text(p)));
    let nearest = nearest.unwrap_or_default();
    if runs.iter().all(|p| p.tasks().any(|(_, s, o)| s.target.is_some() && !keeps_rate(s, o))) {
        let asked = profile.map_or(String::new(), |profile| {
            format!(
                "; the declared rates take {:.0} % of what the device can do",
                100.0 * device_share(point, profile)
            )
        });
        return Some((Limit::Rate, format!("{}{asked}{nearest}", task.text())));
    }
    let still = |p: &Point| p.disk.is_some_and(|disk| disk.longest_ns > task.target);
    if late.iter().all(|p| still(p)) {
        return Some((Limit::Device, format!("{}{nearest}", task.text())));
    }
    if let Some(alone) = profile.and_then(|profile| alone(point, profile)).filter(|a| *a > task.target) {
        let why = format!("the device alone, at depth 1, held a request for {alone}; {}", task.text());
        return Some((Limit::Device, format!("{why}{nearest}")));
    }
    Some((Limit::Waiting, format!("{}{nearest}", task.text())))
}

/// A task with a target.
struct Judged {
    name: String,
    tail: Nanos,
    target: Nanos,
    rate: Option<(f64, f64)>,
    /// Longest standstill of the disk in the run, where it is at least a quarter of the tail.
    still: Option<Nanos>,
}

impl Judged {
    fn text(&self) -> String {
        let rate = match self.rate {
            Some((got, asked)) => format!(", {got:.0} of {asked:.0}/s"),
            None => String::new(),
        };
        let still = match self.still {
            Some(still) => format!(", the disk itself completing nothing for {still}"),
            None => String::new(),
        };
        format!("{} took {} of {}{rate}{still}", self.name, self.tail, self.target)
    }
}

/// The task of a run that is farthest from its target; a task that lost its rate before all others.
fn latest(point: &Point) -> Option<Judged> {
    let mut worst_task: Option<(f64, Judged)> = None;
    for (vm, stream, outcome) in point.tasks() {
        let Some(target) = stream.target else { continue };
        let lost = !keeps_rate(stream, outcome);
        let over = outcome.p9999.0 as f64 / target.0 as f64 + if lost { 1e9 } else { 0.0 };
        if worst_task.as_ref().is_none_or(|(most, _)| over > *most) {
            let rate = stream.rate.filter(|_| lost).map(|asked| (outcome.rate.0, asked.0));
            let longest = point.disk.map(|disk| disk.longest_ns);
            let still = longest.filter(|still| still.0.saturating_mul(4) >= outcome.p9999.0);
            worst_task =
                Some((over, Judged { name: name(vm, stream), tail: outcome.p9999, target, rate, still }));
        }
    }
    worst_task.map(|(_, judged)| judged)
}

fn name(vm: usize, stream: &Stream) -> String {
    let rate = stream.rate.map_or_else(|| "no rate".to_owned(), |r| format!("{:.0}/s", r.0));
    format!("{} at {rate}", vm_name(vm))
}

/// Share of the device's best throughput that the declared rates take.
fn device_share(point: &Point, profile: &Profile) -> f64 {
    let best = |points: &[DepthPoint]| points.iter().map(|p| p.iops.0).reduce(f64::max);
    let read = best(&profile.read).unwrap_or(1.0);
    let write = best(&profile.write).unwrap_or(read);
    let of = |s: &Stream, _: &Outcome| {
        let blocks = (s.block.0 as f64 / profile.block.0 as f64).max(1.0);
        s.rate.map_or(0.0, |r| r.0 * blocks * ((1.0 - s.writes) / read + s.writes / write))
    };
    point.tasks().map(|(_, s, o)| of(s, o)).sum()
}

/// The longest request that the profile saw of the device alone, one in flight, of the kinds that
/// the targeted tasks make.
fn alone(point: &Point, profile: &Profile) -> Option<Nanos> {
    let writes = point.tasks().any(|(_, s, _)| s.target.is_some() && s.writes > 0.0);
    let first = |points: &[DepthPoint]| points.first().map(|p| p.max);
    let write = if writes { first(&profile.write) } else { None };
    first(&profile.read).into_iter().chain(write).max()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases::passes::tests::{case, run};
    use rtvirtio_measure::standstill::Standstills;
    use rtvirtio_units::Iops;

    fn one(points: &[Point]) -> Option<Miss> {
        misses(&[case()], points, &BTreeMap::new()).pop()
    }

    #[test]
    fn a_case_that_ours_pass_is_no_miss() {
        assert_eq!(one(&[run("bound", 0, 300, 100.0, 0), run("default-bfq", 0, 900, 100.0, 0)]), None);
        assert_eq!(one(&[]), None);
    }

    #[test]
    fn each_limit_is_told_from_the_others() {
        let late = |tail_ms| run("slice,bound", 0, tail_ms, 100.0, 0);
        let of = |points: &[Point]| one(points).unwrap();
        let mut host = late(500);
        host.results[0].p9999_awake = Some(Nanos::from_millis(100));
        assert_eq!(of(&[host]).limit, Limit::Host);

        let other = |mut p: Point| {
            p.knobs.low_latency = false;
            p
        };
        let chance = of(&[late(500), run("trial", 1, 200, 100.0, 0)]);
        assert_eq!(chance.limit, Limit::Chance);
        assert!(chance.why.contains("1 of 2 runs"), "{}", chance.why);

        let choice = of(&[late(500), other(run("ionice", 0, 200, 100.0, 0))]);
        assert_eq!((choice.limit, choice.tried, choice.passed), (Limit::Choice, 2, 1));
        assert!(choice.why.contains("vm0 at 100/s took 500ms of 400ms"), "{}", choice.why);
        assert!(choice.why.contains("ionice, 0.50 of the target"), "{}", choice.why);
        assert_eq!(choice.missed, [("slice".to_owned(), 1.25), ("bound".to_owned(), 1.25)]);

        let rate = of(&[run("bound", 0, 10, 50.0, 0), run("ionice", 0, 20, 60.0, 0)]);
        assert_eq!(rate.limit, Limit::Rate);
        assert!(rate.why.contains("50 of 100/s"), "{}", rate.why);
        assert_eq!(of(&[late(500), run("ionice", 0, 450, 100.0, 0)]).limit, Limit::Waiting);
    }

    #[test]
    fn a_disk_that_stood_still_in_every_late_run_is_blamed() {
        let late = |repetition, still_ms| {
            let mut p = run("bound", repetition, 500, 100.0, 0);
            let longest_ns = Nanos::from_millis(still_ms);
            p.disk = Some(Standstills { longest_ns, count: 1, total_ns: longest_ns, n: 5_000, held: 0 });
            p
        };
        let of = |points: &[Point]| one(points).unwrap();
        let miss = of(&[late(0, 401), late(1, 480)]);
        assert_eq!(miss.limit, Limit::Device);
        assert!(miss.why.contains("the disk itself completing nothing for 480ms"), "{}", miss.why);
        // Not in every late run, or for less than the target; the evidence is reported only where
        // it matters.
        assert_eq!(of(&[late(0, 480), late(1, 400)]).limit, Limit::Waiting);
        assert!(of(&[late(0, 125)]).why.contains("for 125ms"));
        assert!(!of(&[late(0, 124)]).why.contains("the disk"));
        // A miss that passes in another run of the same setting is random, with the evidence.
        let chance = of(&[late(0, 480), run("trial", 1, 200, 100.0, 0)]);
        assert_eq!(chance.limit, Limit::Chance);
        assert!(chance.why.contains("for 480ms"), "{}", chance.why);
    }

    #[test]
    fn a_device_that_stalls_by_itself_is_blamed() {
        let stall = |max_ms| {
            let point = DepthPoint {
                depth: 1,
                iops: Iops(1000.0),
                spread: 0.0,
                n: 10_000,
                p50: Nanos::from_millis(1),
                p99: Nanos::from_millis(1),
                p9999: Nanos::from_millis(1),
                max: Nanos::from_millis(max_ms),
            };
            let profile = Profile { read: vec![point], ..rtvirtio_learn::synthetic::profile() };
            let late = run("bound", 0, 500, 100.0, 0);
            let by = BTreeMap::from([(late.device.clone(), profile)]);
            misses(&[case()], &[late], &by).pop().unwrap().limit
        };
        assert_eq!((stall(450), stall(390)), (Limit::Device, Limit::Waiting));
    }
}
