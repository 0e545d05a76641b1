//! Pass rates: which scheme meets all targets of which case, how often.

use std::collections::{BTreeMap, BTreeSet};

use rtvirtio_units::Nanos;
use serde::Serialize;

use crate::cases::{Case, Tier};
use crate::claims::Claim;
use rtvirtio_learn::dataset::{Outcome, Point};
use rtvirtio_learn::load::Stream;
use rtvirtio_learn::statistic::median;
use rtvirtio_measure::verdict::RATE_KEPT;
use rtvirtio_planner::scheme_name;

/// A little more than two runs of one condition differ in the median where BFQ does not idle (1.21,
/// `docs/results/accuracy.md`): a smaller difference does not separate schemes that miss.
pub const NOISE: f64 = 1.3;

/// [`Point::scheme`] of the trials of tuning.
pub const TRIAL: &str = "trial";

/// Schemes of ours, for the comparison with the others.
pub const OURS: [&str; 3] = ["slice", "bound", "tuned"];

/// Pass rates of the RT-VirtIO paper's 24 cases (its section VII-B), as shares.
pub const PUBLISHED: [(&str, f64); 5] = [
    ("default-bfq", 0.4042),
    ("ionice", 0.4896),
    ("rt-xen", 0.3854),
    ("rt-virtio-analytical", 0.6903),
    ("rt-virtio-mlp", 0.6944),
];

/// Name of a point of a case: the schemes that share a run are in [`Point::scheme`], separated by
/// commas.
#[must_use]
pub fn point_id(case: &str, repetition: usize, schemes: &str) -> String {
    format!("{case}/{repetition}/{schemes}")
}

/// The case of a point's name.
#[must_use]
pub fn case_of(id: &str) -> &str {
    id.split('/').next().unwrap_or(id)
}

/// Whether all targets of a run were met and all declared rates kept.
#[must_use]
pub fn passed(point: &Point) -> bool {
    worst(point) <= 1.0
}

/// [`passed`], with the host's own stalls subtracted from the tails where they are known.
#[must_use]
pub fn passed_awake(point: &Point) -> bool {
    worst_awake(point) <= 1.0
}

/// The largest of measured over target; at least the lost rate's share above 1 when a rate was not
/// kept.
#[must_use]
pub fn worst(point: &Point) -> f64 {
    worst_of(point, |outcome| outcome.p9999)
}

/// [`worst`], with the host's own stalls subtracted from the tails where they are known.
#[must_use]
pub fn worst_awake(point: &Point) -> f64 {
    worst_of(point, Outcome::tail)
}

fn worst_of(point: &Point, tail: impl Fn(&Outcome) -> Nanos) -> f64 {
    let mut worst = 0.0f64;
    for (_, stream, outcome) in point.tasks() {
        let Some(target) = stream.target else { continue };
        worst = worst.max(tail(outcome).0 as f64 / target.0 as f64);
        if let (Some(rate), false) = (stream.rate, keeps_rate(stream, outcome)) {
            worst = worst.max(2.0 - outcome.rate.0 / rate.0);
        }
    }
    worst
}

/// Number of tasks of a run that met their targets and kept their rates.
fn met(point: &Point) -> f64 {
    let of = point.tasks().filter(|(_, s, r)| s.target.is_some_and(|t| r.p9999 <= t) && keeps_rate(s, r));
    of.count() as f64
}

/// Whether a task got the rate that it declared, to 99 %; true without one.
#[must_use]
pub fn keeps_rate(stream: &Stream, outcome: &Outcome) -> bool {
    stream.rate.is_none_or(|rate| outcome.rate.0 / rate.0 >= RATE_KEPT)
}

/// Cause of a run that did not pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cause {
    /// A declared rate was not kept.
    Rate,
    /// The run would have passed without the host's own stalls; where they are not known, the
    /// longest was at least half of the worst tail.
    Host,
    /// The disk itself completed nothing with requests in it, for at least half of the worst tail
    /// ([`rtvirtio_measure::standstill`]).
    Disk,
    /// Requests waited for other requests or for BFQ.
    Waiting,
}

/// Cause of a run that did not pass; `None` for one that did.
#[must_use]
pub fn cause(point: &Point) -> Option<Cause> {
    if passed(point) {
        return None;
    }
    let late = point.tasks().filter(|(_, s, r)| s.target.is_some_and(|t| r.p9999 > t));
    let Some(longest) = late.map(|(_, _, r)| r.p9999.0).max() else { return Some(Cause::Rate) };
    let lost = point.tasks().any(|(_, s, r)| s.target.is_some() && !keeps_rate(s, r));
    Some(if lost {
        Cause::Rate
    } else if passed_awake(point) || (!is_known(point) && point.noise.max_ns.0 * 2 >= longest) {
        Cause::Host
    } else if point.disk.is_some_and(|disk| disk.longest_ns.0.saturating_mul(2) >= longest) {
        Cause::Disk
    } else {
        Cause::Waiting
    })
}

/// Whether the host's stalls are known of every tail that is judged.
fn is_known(point: &Point) -> bool {
    point.tasks().all(|(_, s, r)| s.target.is_none() || r.p9999_awake.is_some())
}

/// Runs of one scheme in one case.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Cell {
    /// Runs, without trials of tuning.
    pub n: usize,
    /// Runs that met all targets and kept all rates.
    pub passed: usize,
    /// Runs that passed with the host's own stalls subtracted.
    pub passed_awake: usize,
    /// [`worst`] of each run.
    pub worst: Vec<f64>,
    /// Targets that each run met, with the rate kept.
    pub met: Vec<f64>,
    /// Causes of the runs that did not pass.
    pub causes: Vec<Cause>,
}

/// Results of the schemes in the cases of one tier.
#[derive(Clone, Debug, Serialize)]
pub struct PassTable {
    /// Tier of all cases.
    pub tier: Tier,
    /// Names of the cases, in the tier's order.
    pub cases: Vec<String>,
    /// Schemes in order of appearance in [`order`].
    pub schemes: Vec<String>,
    /// Results by case, then scheme.
    pub cells: Vec<Vec<Cell>>,
    /// Cases that some setting passed in at least half of its runs, trials of tuning included.
    pub possible: Vec<String>,
}

impl PassTable {
    /// Results of the measured points in the given cases. Trials of tuning belong to no scheme, but
    /// show which cases are possible.
    #[must_use]
    pub fn new(tier: Tier, cases: &[Case], points: &[Point]) -> Self {
        let mut by: BTreeMap<(&str, &str), Cell> = BTreeMap::new();
        let mut names = BTreeSet::new();
        for p in points.iter().filter(|p| p.scheme != TRIAL) {
            for scheme in p.scheme.split(',') {
                let cell = by.entry((case_of(&p.id), scheme)).or_default();
                cell.n += 1;
                cell.passed += usize::from(passed(p));
                cell.passed_awake += usize::from(passed_awake(p));
                cell.worst.push(worst(p));
                cell.met.push(met(p));
                cell.causes.extend(cause(p));
                names.insert(scheme);
            }
        }
        let mut schemes: Vec<String> = names.into_iter().map(str::to_owned).collect();
        schemes.sort_by_key(|s| order(s));
        let cases: Vec<String> = cases.iter().map(|c| c.name.clone()).collect();
        let cell = |c: &String, s: &String| by.get(&(c.as_str(), s.as_str())).cloned().unwrap_or_default();
        let cells = cases.iter().map(|c| schemes.iter().map(|s| cell(c, s)).collect()).collect();
        let possible = cases.iter().filter(|c| is_possible(c, points)).cloned().collect();
        Self { tier, cases, schemes, cells, possible }
    }

    /// Mean over the measured cases of the share of runs that passed, with the number of cases and
    /// of runs.
    #[must_use]
    pub fn pass_rate(&self, scheme: &str) -> (f64, usize, usize) {
        self.rate_of(scheme, |c| c.passed)
    }

    /// [`PassTable::pass_rate`], with the host's own stalls subtracted.
    #[must_use]
    pub fn pass_rate_awake(&self, scheme: &str) -> (f64, usize, usize) {
        self.rate_of(scheme, |c| c.passed_awake)
    }

    fn rate_of(&self, scheme: &str, passed: impl Fn(&Cell) -> usize) -> (f64, usize, usize) {
        let Some(at) = self.schemes.iter().position(|s| s == scheme) else { return (0.0, 0, 0) };
        let measured: Vec<&Cell> = self.cells.iter().map(|row| &row[at]).filter(|c| c.n > 0).collect();
        let sum: f64 = measured.iter().map(|c| passed(c) as f64 / c.n as f64).sum();
        (sum / measured.len().max(1) as f64, measured.len(), measured.iter().map(|c| c.n).sum())
    }

    /// The possible cases that one of our schemes passed in at least half of its runs.
    #[must_use]
    pub fn ours_of_possible(&self) -> Vec<String> {
        let often = |(c, s): (&Cell, &String)| OURS.contains(&s.as_str()) && c.n > 0 && 2 * c.passed >= c.n;
        let ours = |case: &&String| {
            let at = self.cases.iter().position(|c| c == *case);
            at.is_some_and(|at| self.cells[at].iter().zip(&self.schemes).any(often))
        };
        self.possible.iter().filter(ours).cloned().collect()
    }

    /// Cases in which the best of ours is not behind the best of the others beyond [`NOISE`], and
    /// cases with runs of both.
    #[must_use]
    pub fn not_behind(&self) -> (usize, usize) {
        // Share of runs that passed, targets that were met, and how far above its targets: more of
        // the first two, then less of the third.
        let best = |row: &[Cell], ours: bool| {
            let of =
                row.iter().zip(&self.schemes).filter(|(c, s)| c.n > 0 && OURS.contains(&s.as_str()) == ours);
            let passed = |c: &Cell| c.passed as f64 / c.n as f64;
            let judged = of.map(|(c, _)| (passed(c), median(c.met.clone()), median(c.worst.clone())));
            judged.max_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)).then(b.2.total_cmp(&a.2)))
        };
        let both: Vec<_> =
            self.cells.iter().filter_map(|row| Some((best(row, true)?, best(row, false)?))).collect();
        type Best = (f64, f64, f64);
        let good = |((ours, met, by), (other, other_met, other_by)): &&(Best, Best)| {
            let no_worse = *ours == 1.0 || met > other_met || (met == other_met && *by <= NOISE * other_by);
            ours > other || (ours == other && no_worse)
        };
        (both.iter().filter(good).count(), both.len())
    }

    /// Number of runs of a scheme that missed, by cause.
    #[must_use]
    pub fn causes(&self, scheme: &str) -> BTreeMap<Cause, usize> {
        let mut out = BTreeMap::new();
        if let Some(at) = self.schemes.iter().position(|s| s == scheme) {
            for cause in self.cells.iter().flat_map(|row| &row[at].causes) {
                *out.entry(*cause).or_default() += 1;
            }
        }
        out
    }

    /// Whether the device can carry the rates of every case, by its runs: some setting passes, or
    /// some scheme missed by another cause.
    fn fits(&self) -> bool {
        let other = |cell: &Cell| cell.causes.iter().any(|cause| *cause != Cause::Rate);
        let mut rows = self.cases.iter().zip(&self.cells);
        rows.all(|(case, row)| self.possible.contains(case) || row.iter().any(other))
    }

    /// Pass rates, comparisons and coverage of the tier. A limit counts where all of its cases are
    /// measured, one on pass rates where the device can carry their rates.
    #[must_use]
    pub fn claims(&self) -> Vec<Claim> {
        let (tier, all) = (self.tier.name(), self.cases.len());
        let mut out = Vec::new();
        for scheme in &self.schemes {
            let (rate, cases, n) = self.pass_rate(scheme);
            let what = format!(
                "share of runs of the {tier} tier in which {} met every target, {cases} of {all} cases",
                scheme_name(scheme)
            );
            let claim = Claim::new(format!("cases.{tier}.{scheme}.pass_rate"), what, rate, "share", n);
            out.push(match (self.tier, scheme.as_str()) {
                // Cases are measured from the easiest on: a part of them does not represent the
                // tier.
                _ if cases < all || !self.fits() => claim,
                (Tier::Paper, "bound" | "tuned") => claim.at_least(0.95),
                (Tier::Tight, "bound" | "tuned") => claim.at_least(0.9),
                (Tier::Strict, "bound" | "tuned") => claim.at_least(0.7),
                _ => claim,
            });
            let (rate, cases, n) = self.pass_rate_awake(scheme);
            let what = format!("the same less the host's own stalls, {cases} of {all} cases");
            out.push(Claim::new(format!("cases.{tier}.{scheme}.pass_rate_awake"), what, rate, "share", n));
        }
        let (any, ours) = (&self.possible, self.ours_of_possible());
        let share = if any.is_empty() { 0.0 } else { ours.len() as f64 / any.len() as f64 };
        let seen = self.cells.iter().filter(|row| row.iter().any(|c| c.n > 0)).count();
        let what = format!(
            "share of the {tier} cases that any tried setting passes which ours pass too, {seen} of {all} measured"
        );
        let claim = Claim::new(format!("cases.{tier}.ours_of_possible"), what, share, "share", any.len());
        out.push(if seen < all { claim } else { claim.at_least(1.0) });
        let (good, of) = self.not_behind();
        if of == 0 {
            // No other scheme was measured.
            return out;
        }
        let what = format!(
            "share of {tier} cases in which our best passes as often as others' and, if neither always does, meets more targets or as many with misses up to {NOISE} times theirs, {of} of {all} measured"
        );
        let share = good as f64 / of as f64;
        let claim = Claim::new(format!("cases.{tier}.ours_at_least_others"), what, share, "share", of);
        out.push(if of < all { claim } else { claim.at_least(1.0) });
        out
    }
}

/// Whether two runs of a case have the same settings.
pub(crate) fn same_settings(a: &Point, b: &Point) -> bool {
    (&a.knobs, &a.classes, has_servers(a)) == (&b.knobs, &b.classes, has_servers(b))
}

/// Whether budget servers ran in addition to the knobs: such a run has other settings.
fn has_servers(point: &Point) -> bool {
    point.is_of("rt-xen")
}

/// Whether some setting that was tried in a case passed in at least half of its runs.
fn is_possible(case: &str, points: &[Point]) -> bool {
    let runs: Vec<&Point> = points.iter().filter(|p| case_of(&p.id) == case).collect();
    runs.iter().any(|a| {
        let same = || runs.iter().filter(|b| same_settings(a, b));
        2 * same().filter(|b| passed(b)).count() >= same().count()
    })
}

/// Place of a scheme in tables: the paper's order, then ours.
#[must_use]
pub fn order(scheme: &str) -> usize {
    PUBLISHED.iter().map(|(s, _)| *s).chain(OURS).position(|s| s == scheme).unwrap_or(usize::MAX)
}

#[cfg(test)]
pub(crate) mod tests {
    use rtvirtio_measure::VmKind;
    use rtvirtio_measure::noise::Noise;
    use rtvirtio_measure::standstill::Standstills;
    use rtvirtio_units::{Iops, Nanos};

    use super::*;
    use crate::cases::{CaseOptions, cases};
    use rtvirtio_learn::dataset::Outcome;
    use rtvirtio_learn::load::Knobs;
    use rtvirtio_learn::synthetic::alike;

    /// The smallest one of the paper.
    pub(crate) fn case() -> Case {
        let options = CaseOptions { writes: 0.0, third_of: None };
        cases(Tier::Paper, &options).into_iter().find(|c| c.name == "1vm-L-paper").unwrap()
    }

    /// A run of one 100/s task with a target of 400 ms.
    pub(crate) fn run(scheme: &str, repetition: usize, tail_ms: u64, rate: f64, stall_ms: u64) -> Point {
        let tail = Nanos::from_millis(tail_ms);
        Point {
            id: point_id("1vm-L-paper", repetition, scheme),
            device: "qlc-nvme".to_owned(),
            kind: VmKind::Process,
            scheme: scheme.to_owned(),
            seed: 1,
            seconds: 10.0,
            knobs: Knobs::default_bfq(1),
            classes: None,
            vms: case().vms,
            noise: Noise { max_ns: Nanos::from_millis(stall_ms), ..Noise::default() },
            disk: None,
            results: vec![Outcome { hist: vec![1, 1000], ..alike(1000, Iops(rate), tail) }],
        }
    }

    #[test]
    fn tail_and_rate_decide_and_causes_are_told_apart() {
        assert!(passed(&run("x", 0, 400, 100.0, 0)));
        assert!(!passed(&run("x", 0, 401, 100.0, 0)));
        assert!(!passed(&run("x", 0, 1, 98.0, 0)), "a short tail with less work done is not a pass");
        assert_eq!(cause(&run("x", 0, 300, 100.0, 0)), None);
        assert_eq!(cause(&run("x", 0, 1, 90.0, 0)), Some(Cause::Rate));
        assert_eq!(cause(&run("x", 0, 500, 100.0, 300)), Some(Cause::Host));
        let mut waited = run("x", 0, 500, 100.0, 20);
        assert_eq!(cause(&waited), Some(Cause::Waiting));
        for (ms, of) in [(249, Cause::Waiting), (250, Cause::Disk)] {
            waited.disk =
                Some(Standstills { longest_ns: Nanos::from_millis(ms), count: 1, ..Standstills::default() });
            assert_eq!(cause(&waited), Some(of), "{ms}");
        }
        waited.results[0].rate = Iops(90.0);
        assert_eq!(cause(&waited), Some(Cause::Rate));
    }

    #[test]
    fn a_tail_that_only_the_host_made_is_the_hosts() {
        let with = |awake_ms, rate| {
            let mut p = run("x", 0, 500, rate, 300);
            p.results[0].p9999_awake = Some(Nanos::from_millis(awake_ms));
            p
        };
        let (host, ours) = (with(390, 100.0), with(410, 100.0));
        assert!(!passed(&host) && passed_awake(&host) && !passed_awake(&ours));
        // However long the host stalled: the remaining latency is too long by itself.
        assert_eq!((cause(&host), cause(&ours)), (Some(Cause::Host), Some(Cause::Waiting)));
        assert_eq!(cause(&with(390, 90.0)), Some(Cause::Rate));
        let table = PassTable::new(Tier::Paper, &[case()], &[host, ours]);
        assert_eq!((table.pass_rate("x").0, table.pass_rate_awake("x").0), (0.0, 0.5));
    }

    #[test]
    fn schemes_that_share_a_run_share_its_outcome() {
        let points = [
            run("default-bfq", 0, 900, 100.0, 0),
            run("slice,bound", 0, 2, 100.0, 0),
            run("slice", 1, 900, 100.0, 0),
            run("bound", 1, 2, 100.0, 0),
        ];
        let table = PassTable::new(Tier::Paper, &[case()], &points);
        assert_eq!(table.schemes, ["default-bfq", "slice", "bound"]);
        assert_eq!(table.pass_rate("slice"), (0.5, 1, 2));
        assert_eq!(table.pass_rate("bound"), (1.0, 1, 2));
        assert_eq!(table.pass_rate("nobody"), (0.0, 0, 0));
        assert_eq!(table.causes("default-bfq")[&Cause::Waiting], 1);
        let (any, ours) = (&table.possible, table.ours_of_possible());
        assert_eq!((any.len(), ours.len()), (1, 1));
        let claims = table.claims();
        let claim = |id: &str| claims.iter().find(|c| c.id == id).unwrap();
        assert!(claim("cases.paper.bound.pass_rate").met);
        assert_eq!(claim("cases.paper.default-bfq.pass_rate").value, 0.0);
        assert!(claim("cases.paper.ours_of_possible").met);
        assert_eq!(claim("cases.paper.bound.pass_rate").at_least, Some(0.95));
        assert!(claim("cases.paper.ours_at_least_others").met);
        // A trial of tuning counts as possible, and as no scheme's.
        let mut trial = run(TRIAL, 1, 3, 100.0, 0);
        trial.knobs.low_latency = !trial.knobs.low_latency;
        let missed = PassTable::new(Tier::Paper, &[case()], &[run("bound", 0, 900, 100.0, 0), trial]);
        assert_eq!((missed.schemes.len(), missed.possible.len(), missed.ours_of_possible().len()), (1, 1, 0));
        assert!(missed.claims().iter().any(|c| c.id == "cases.paper.ours_of_possible" && !c.met));
        assert!(
            !missed.claims().iter().any(|c| c.id.ends_with("ours_at_least_others")),
            "there are no others"
        );
        // Where no scheme passes, ours may miss by a little more, but not by 50 % more.
        let late = |ours| {
            let runs = [
                run("ionice", 0, 800, 100.0, 0),
                run("bound", 0, ours, 100.0, 0),
                run("slice", 0, 4_000, 100.0, 0),
            ];
            PassTable::new(Tier::Paper, &[case()], &runs).not_behind()
        };
        assert_eq!((late(1_000), late(1_200)), ((1, 1), (0, 1)));
        assert_eq!(
            PassTable::new(Tier::Paper, &[case()], &[run("bound", 0, 1, 100.0, 0)]).not_behind(),
            (0, 0)
        );
        // The scheme that meets more targets is ahead, however late the other tasks are.
        let two = |scheme: &str, tails: [u64; 2]| {
            let mut p = run(scheme, 0, tails[0], 100.0, 0);
            p.vms.push(p.vms[0].clone());
            p.results.extend(run(scheme, 0, tails[1], 100.0, 0).results);
            p
        };
        let of = |ours, theirs| {
            PassTable::new(Tier::Paper, &[case()], &[two("bound", ours), two("ionice", theirs)]).not_behind()
        };
        assert_eq!((of([4, 9_000], [500, 500]), of([500, 500], [4, 9_000])), ((1, 1), (0, 1)));
        // Rates that no scheme keeps set no limit on pass rates.
        let starved = PassTable::new(Tier::Paper, &[case()], &[run("bound", 0, 900, 50.0, 0)]).claims();
        let claim = starved.iter().find(|c| c.id == "cases.paper.bound.pass_rate").unwrap();
        assert_eq!((claim.value, claim.at_least), (0.0, None));
        // With one of two cases measured the tier has no limit.
        let other = Case { name: "other".to_owned(), ..case() };
        let half = PassTable::new(Tier::Paper, &[case(), other], &points).claims();
        let claim = |id: &str| half.iter().find(|c| c.id == id).unwrap();
        assert!(claim("cases.paper.bound.pass_rate").what.ends_with("1 of 2 cases"));
        assert_eq!(claim("cases.paper.bound.pass_rate").at_least, None);
        assert_eq!(claim("cases.paper.ours_of_possible").at_least, None);
    }
}
