//! Pass rates and the cases one by one: the paper's Figs. 7 and 8.

use super::misses::{Limit, Miss};
use super::neighbours::NeighbourRates;
use super::passes::{Cause, OURS, PUBLISHED, PassTable, case_of};
use super::{Case, Tier};
use crate::page::{Plot, Section, Table};
use rtvirtio_learn::dataset::Point;
use rtvirtio_learn::statistic::median;
use rtvirtio_planner::scheme_name;
use rtvirtio_report::svg::{Axis, Bar, BarPlot, BarRow, Series, Spread};

use crate::page::xy::{axis, plot};

/// Display names of schemes.
fn names(schemes: &[String]) -> impl Iterator<Item = String> {
    schemes.iter().map(|s| scheme_name(s).to_owned())
}

/// Fig. 8: pass rates by scheme and tier, and the paper's.
pub fn pass_rates(tables: &[PassTable]) -> Section {
    let mut series: Vec<String> = tables.iter().map(|t| format!("{} tier, here", t.tier.name())).collect();
    series.push("published by the paper (its own machine, its targets)".to_owned());
    let mut schemes: Vec<String> = tables.iter().flat_map(|t| t.schemes.clone()).collect();
    schemes.sort_by_key(|s| super::passes::order(s));
    schemes.dedup();
    let row = |scheme: &String| {
        let mut bars = Vec::new();
        for (i, t) in tables.iter().enumerate() {
            let (share, cases, n) = t.pass_rate(scheme);
            if n > 0 {
                let awake = 100.0 * t.pass_rate_awake(scheme).0;
                let note = format!("of {n} runs, {cases} cases; {awake:.0} % less the host's own stalls");
                bars.push(Bar { series: i, share, note, pale: false });
            }
        }
        if let Some((_, share)) = PUBLISHED.iter().find(|(name, _)| name == scheme) {
            bars.push(Bar { series: tables.len(), share: *share, note: "published".to_owned(), pale: true });
        }
        BarRow { name: scheme_name(scheme).to_owned(), bars }
    };
    let plot = BarPlot { title: "pass rates".to_owned(), series, rows: schemes.iter().map(row).collect() };
    Section {
        title: "Pass rates (the paper's Fig. 8)".to_owned(),
        text: vec![
            "A run passes when every task keeps its p99.99 target and its declared rate. Pass rates of the paper are from other \
             hardware and runs of 100 minutes: what compares is the order of the schemes."
                .to_owned(),
        ],
        plots: vec![("share of runs that passed, mean over the cases".to_owned(), Plot::Bars(plot))],
        tables: Vec::new(),
    }
}

/// Every case: passes, the worst measured over target, and the rates of VMs without a target.
pub fn cases(table: &PassTable, rates: &[NeighbourRates]) -> Section {
    let mut head = vec!["case".to_owned()];
    head.extend(names(&table.schemes));
    let rows = table
        .cases
        .iter()
        .zip(&table.cells)
        .filter(|(_, row)| row.iter().any(|c| c.n > 0))
        .map(|(case, row)| {
            let cell = |c: &super::passes::Cell| {
                if c.n == 0 {
                    "-".to_owned()
                } else {
                    let (low, high) =
                        c.worst.iter().fold((f64::INFINITY, 0.0f64), |(l, h), w| (l.min(*w), h.max(*w)));
                    let awake = match c.passed_awake {
                        more if more > c.passed => format!(", awake {more}"),
                        _ => String::new(),
                    };
                    format!(
                        "{}/{}{awake}; {:.2} ({low:.2} to {high:.2})",
                        c.passed,
                        c.n,
                        median(c.worst.clone())
                    )
                }
            };
            std::iter::once(case.clone()).chain(row.iter().map(cell)).collect()
        })
        .collect();
    let causes: Vec<String> = table
        .schemes
        .iter()
        .filter(|s| !table.causes(s).is_empty())
        .map(|s| {
            let of = table.causes(s);
            let n = |c: Cause| of.get(&c).copied().unwrap_or(0);
            format!(
                "{}: {} rate, {} host, {} disk, {} waiting",
                scheme_name(s),
                n(Cause::Rate),
                n(Cause::Host),
                n(Cause::Disk),
                n(Cause::Waiting)
            )
        })
        .collect();
    let (any, ours) = (&table.possible, table.ours_of_possible());
    let missed: Vec<&String> = any.iter().filter(|c| !ours.contains(c)).collect();
    let mut text = vec![format!(
        "passed/runs, and how many more would have less the host's own stalls; median (smallest to largest) of the worst task's measured p99.99 over its target. Some setting that was tried passes {} of {} \
         measured cases in at least half of its runs, rtvirtio {}.",
        any.len(),
        table.cells.iter().filter(|row| row.iter().any(|c| c.n > 0)).count(),
        ours.len()
    )];
    if !causes.is_empty() {
        text.push(format!(
            "Runs missed because a rate was not kept, because of the host's own stalls alone, because the disk itself stalled (not observed in \
             data of earlier than 2026-11-25), or because requests waited: {}.",
            causes.join("; ")
        ));
    }
    if !missed.is_empty() {
        let names: Vec<&str> = missed.iter().map(|s| s.as_str()).collect();
        text.push(format!("Passed under another setting and not by rtvirtio: {}.", names.join(", ")));
    }
    Section {
        title: format!("The {} tier, case by case", table.tier.name()),
        text,
        plots: Vec::new(),
        tables: std::iter::once(Table { label: format!("{} tier", table.tier.name()), head, rows })
            .chain(neighbours(table, rates))
            .collect(),
    }
}

/// Rates of the VMs without a target; none where no case has one.
fn neighbours(table: &PassTable, rates: &[NeighbourRates]) -> Option<Table> {
    let row = |kind: &NeighbourRates| {
        let name = format!("{} ({} cases)", kind.neighbour, kind.cases);
        std::iter::once(name).chain(kind.cells()).collect()
    };
    let head = std::iter::once("requests/s, median".to_owned()).chain(names(&table.schemes)).collect();
    (!rates.is_empty()).then(|| Table {
        label: format!("rate of the VM without a target in the {} tier", table.tier.name()),
        head,
        rows: rates.iter().map(row).collect(),
    })
}

/// The case of the paper's Fig. 7: VMs with targets, and their tasks.
const EXAMPLE: (usize, &str) = (3, "L+M");

/// Fig. 7: the tails of every task of one case under each scheme, and their targets; none where the
/// case was not measured.
pub fn achieved(of_tier: &[Case], schemes: &[String], points: &[Point]) -> Option<Section> {
    let is_example = |c: &&Case| (c.targeted, c.set.as_str()) == EXAMPLE;
    let of = |case: &Case| points.iter().filter(|p| case_of(&p.id) == case.name).collect::<Vec<_>>();
    let (case, runs) =
        of_tier.iter().filter(is_example).map(|c| (c, of(c))).find(|(_, runs)| !runs.is_empty())?;
    let (ours, others): (Vec<&String>, Vec<&String>) =
        schemes.iter().partition(|s| OURS.contains(&s.as_str()));
    let panels = [("the paper's schemes", others), ("rtvirtio", ours)];
    Some(Section {
        title: format!("One case, task by task: {} (as the paper's Fig. 7)", case.name),
        text: vec![
            "A run passes when every task is at or below its target. Of several runs the median is drawn."
                .to_owned(),
        ],
        plots: panels
            .into_iter()
            .filter(|(_, of)| !of.is_empty())
            .map(|(name, of)| (format!("p99.99 of each task, {name}"), tasks(case, &of, &runs)))
            .collect(),
        tables: Vec::new(),
    })
}

fn tasks(case: &Case, schemes: &[&String], runs: &[&Point]) -> Plot {
    let all = || case.vms.iter().enumerate().flat_map(|(vm, tasks)| tasks.iter().map(move |t| (vm, t)));
    let of = |scheme: &String| -> Vec<(f64, f64, String)> {
        let runs: Vec<&&Point> = runs.iter().filter(|p| p.is_of(scheme)).collect();
        all()
            .enumerate()
            .filter(|(i, (_, t))| t.target.is_some() && runs.iter().any(|p| p.results.len() > *i))
            .map(|(i, _)| {
                let tails = runs.iter().filter_map(|p| p.results.get(i));
                let ms = median(tails.map(|r| r.p9999.as_secs_f64() * 1e3).collect());
                (i as f64, ms, format!("{ms:.2} ms"))
            })
            .collect()
    };
    let targets = all().enumerate().filter_map(|(i, (_, t))| {
        let ms = t.target?.as_secs_f64() * 1e3;
        Some((i as f64, ms, format!("{ms} ms")))
    });
    let target = Series { name: "target".to_owned(), index: 0, dashed: true, points: targets.collect() };
    let curves = schemes.iter().enumerate().map(|(i, s)| Series {
        name: scheme_name(s).to_owned(),
        index: i + 1,
        dashed: false,
        points: of(s),
    });
    let marks = all()
        .enumerate()
        .filter(|(_, (_, t))| t.target.is_some())
        .map(|(i, (vm, t))| (i as f64, format!("VM{vm} {:.0}/s", t.rate.map_or(0.0, |r| r.0))));
    let marks: Vec<_> = marks.collect();
    let x = Axis {
        ends: Some((-0.5, marks.len() as f64 - 0.5)),
        marks: Some(marks),
        ..axis("task", Spread::Linear)
    };
    let title = format!("tails and targets of {}", case.name);
    plot(&title, x, axis("p99.99, ms", Spread::Log), std::iter::once(target).chain(curves).collect(), None)
}

/// Section on the misses of our schemes; `None` without misses.
pub fn misses(tier: Tier, misses: &[Miss]) -> Option<Section> {
    if misses.is_empty() {
        return None;
    }
    let row = |miss: &Miss| {
        let by: Vec<String> =
            miss.missed.iter().map(|(scheme, worst)| format!("{} {worst:.2}", scheme_name(scheme))).collect();
        let passed = format!("{} of {}", miss.passed, miss.tried);
        vec![miss.case.clone(), by.join(", "), passed, miss.limit.name().to_owned(), miss.why.clone()]
    };
    let counts: Vec<String> = Limit::ALL
        .into_iter()
        .map(|limit| (limit, misses.iter().filter(|m| m.limit == limit).count()))
        .filter(|(_, n)| *n > 0)
        .map(|(limit, n)| format!("{n} {}", limit.name()))
        .collect();
    let head =
        ["case", "missed by, over target", "runs that pass", "limit", "evidence"].map(str::to_owned).to_vec();
    Some(Section {
        title: format!("Misses of rtvirtio in the {} tier, and their causes", tier.name()),
        text: vec![format!(
            "{}. host: less the host's own stalls all runs of rtvirtio pass; chance: the same setting passes in another run; choice: another setting that was tried \
             passes; rate: no setting keeps a declared rate; device: the device alone takes longer than the target; waiting: requests wait for others' \
             under every setting that was tried.",
            counts.join(", ")
        )],
        plots: Vec::new(),
        tables: vec![Table {
            label: format!("misses of the {} tier", tier.name()),
            head,
            rows: misses.iter().map(row).collect(),
        }],
    })
}
