//! Page of the isolation experiment: a figure for each question.

use rtvirtio_report::svg::{Axis, SERIES, Series, Spread};

use super::modes::{AT_ONCE, BURST_PERIOD, Case, Mode};
use super::{IsolationData, IsolationRun};
use crate::page::xy::{axis, plot, series, table};
use crate::page::{Plot, Section, Table};

/// Differences from the published benchmark.
const DEVIATIONS: &str = "isol-bench runs up to 256 fio processes on NVMe drives and ten cores, and takes CPU profiles; here four VMs share \
     a device that is made for the run, on the CPUs of this machine, and CPU time is not measured: overhead is that of latency and rate. \
     Its priority by io.prio.class is an I/O class of the first VM's process, under mq-deadline only, where all VMs share one cgroup. \
     Its sizes of 4 and 256 KiB are 4 and 64 KiB, its mixes of reads and writes two VMs of each; drives are not preconditioned. \
     Settings rest on a profile of the device: limits on its reads per second, latency targets on multiples of its p99, the planner's \
     targets too. Next to its knobs stand QEMU's limits, a plan of rtvirtio and the I/O domain, whose clients are no fio.";

/// The sections of the page: what was left out, then a section for each question.
pub fn sections(data: &IsolationData) -> Vec<Section> {
    let mut first =
        Section { title: "Conditions".to_owned(), text: vec![DEVIATIONS.to_owned()], ..Section::default() };
    if !data.skipped.is_empty() {
        let row =
            |(mode, why, cases): (Mode, &str, String)| vec![mode.name().to_owned(), why.to_owned(), cases];
        let rows = data.left_out().into_iter().map(row).collect();
        first.tables.push(table("left out", &["mode", "reason", "cases"], rows));
    }
    vec![first, overhead(data), fairness(data), priority(data), bursts(data)]
}

/// Curves of all modes over positions of cases.
fn curves(data: &IsolationData, cases: &[Case], figure: fn(&IsolationRun) -> f64) -> Vec<Series> {
    let of = |(index, mode): (usize, Mode)| {
        let point = |(x, case): (usize, &Case)| {
            let (value, _) = data.median(*case, mode, |run| Some(figure(run)))?;
            Some((x as f64, value, format!("{}, {}: {value:.3}", mode.name(), case.name())))
        };
        let points = cases.iter().enumerate().filter_map(point).collect();
        Series { dashed: index >= SERIES, ..series(index, mode.name(), points) }
    };
    data.modes().enumerate().map(of).filter(|curve| !curve.points.is_empty()).collect()
}

/// An axis with a name at each position.
fn named<'a>(label: &str, names: impl Iterator<Item = &'a str>) -> Axis {
    let marks: Vec<(f64, String)> = names.enumerate().map(|(x, name)| (x as f64, name.to_owned())).collect();
    let ends = Some((-0.5, marks.len() as f64 - 0.5));
    Axis { ends, marks: Some(marks), ..axis(label, Spread::Linear) }
}

/// A table with a row for each mode and a column for each case.
fn rows(data: &IsolationData, label: &str, cases: &[Case], figure: fn(&IsolationRun) -> f64) -> Table {
    let cell = |case: &Case, mode: Mode| {
        let found = data.median(*case, mode, |run| Some(figure(run)));
        found.map_or_else(|| "-".to_owned(), |(value, n)| format!("{value:.3} ({n})"))
    };
    let row = |mode: Mode| {
        let cells = cases.iter().map(|case| cell(case, mode));
        std::iter::once(mode.name().to_owned()).chain(cells).collect::<Vec<String>>()
    };
    let head: Vec<&str> = std::iter::once("mode").chain(cases.iter().map(|case| case.name())).collect();
    table(label, &head, data.modes().map(row).collect())
}

fn mib(run: &IsolationRun) -> f64 {
    run.bytes() / f64::from(1 << 20)
}

fn overhead(data: &IsolationData) -> Section {
    let apps = [Case::Apps1, Case::Apps2, Case::Apps4];
    let x = named("VMs with one read in flight", ["1", "2", "4"].into_iter());
    let drawn = curves(data, &apps, IsolationRun::p99_ms);
    let figure = plot("overhead", x, axis("highest p99, ms", Spread::Log), drawn, None);
    Section {
        title: "1. Overhead".to_owned(),
        text: vec![
            "Every mode is in force and holds nothing back: equal weights, limits and targets out of reach."
                .to_owned(),
        ],
        plots: vec![("highest p99 of the VMs".to_owned(), figure)],
        tables: vec![
            rows(data, "highest p99, ms (n)", &apps, IsolationRun::p99_ms),
            rows(data, "rate of four VMs that read as fast as they can, MiB/s (n)", &[Case::Batch], mib),
        ],
    }
}

fn fairness(data: &IsolationData) -> Section {
    let cases = [Case::Equal, Case::Weights, Case::Sizes, Case::Mixed];
    let x = named("load", cases.iter().map(|case| case.name()));
    let y = Axis { ends: Some((0.0, 1.0)), ..axis("Jain's index of bytes over weights", Spread::Linear) };
    let figure = plot("fairness", x, y, curves(data, &cases, IsolationRun::jain), None);
    Section {
        title: "2. Fairness".to_owned(),
        text: vec![
            "Four VMs that read as fast as they can: with equal shares; with shares of 1, 2, 4 and 8; two of them with larger \
             requests; two of them writing. Modes without weights (none, mq-deadline, io-latency) are told of no shares; \
             the planner gives none without targets."
                .to_owned(),
        ],
        plots: vec![("1 where each VM has its share, 0.25 where one has everything".to_owned(), figure)],
        tables: vec![
            rows(data, "Jain's index (n)", &cases, IsolationRun::jain),
            rows(data, "rate of all VMs, MiB/s (n)", &cases, mib),
        ],
    }
}

fn priority(data: &IsolationData) -> Section {
    let cases = [Case::Weak, Case::Medium, Case::Strong];
    let of = |(index, mode): (usize, Mode)| {
        let point = |case: &Case| {
            let (used, _) = data.median(*case, mode, |run| Some(mib(run)))?;
            let (p99, _) = data.median(*case, mode, |run| Some(run.p99_ms()))?;
            Some((used, p99, format!("{}, {}: {p99:.3} ms at {used:.1} MiB/s", mode.name(), case.name())))
        };
        let mut points: Vec<_> = cases.iter().filter_map(point).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        Series { dashed: index >= SERIES, ..series(index, mode.name(), points) }
    };
    let drawn = data.modes().enumerate().map(of).filter(|curve| !curve.points.is_empty()).collect();
    let x = axis("rate of all VMs, MiB/s", Spread::Linear);
    let y = axis("p99 of the VM with priority, ms", Spread::Log);
    let figure = plot("priority against device use", x, y, drawn, None);
    Section {
        title: "3. Priority against device use".to_owned(),
        text: vec![
            "A VM with one read in flight next to three that read as fast as they can, held back weakly, more, and strongly: by limits of \
             80, 50 and 20 % of the device; weights of 200, 500 and 1000 to 100; latency targets of 8, 3 and 1.2 times its p99; the planner's \
             of 20, 8 and 3 times; reservations of 20, 40 and 60 %. Lower is better for the VM, right for the device. The modes \
             none and mq-deadline have one setting, run three times."
                .to_owned(),
        ],
        plots: vec![("p99 of the first VM over the rate of all".to_owned(), figure)],
        tables: vec![
            rows(data, "p99 of the VM with priority, ms (n)", &cases, IsolationRun::p99_ms),
            rows(data, "rate of all VMs, MiB/s (n)", &cases, mib),
        ],
    }
}

fn bursts(data: &IsolationData) -> Section {
    let modes: Vec<Mode> = data.modes().collect();
    let point = |(x, mode): (usize, &Mode), longest: bool| {
        let longest_ms = |run: &IsolationRun| run.bursts_ns.iter().max().map(|time| time.as_millis_f64());
        let (ms, n) = if longest {
            data.median(Case::Bursts, *mode, longest_ms)?
        } else {
            data.median(Case::Bursts, *mode, IsolationRun::burst_ms)?
        };
        Some((x as f64, ms, format!("{}: {ms:.2} ms, {n} runs", mode.name())))
    };
    let points = |longest| modes.iter().enumerate().filter_map(|at| point(at, longest)).collect::<Vec<_>>();
    let (middle, longest) = (points(false), points(true));
    let rows = middle.iter().zip(&longest).map(|((x, ms, _), (_, most, _))| {
        let name = modes.get(*x as usize).map_or("", |mode| mode.name());
        vec![name.to_owned(), format!("{ms:.2}"), format!("{most:.2}")]
    });
    let rows: Vec<Vec<String>> = rows.collect();
    let drawn = vec![series(0, "median", middle), series(1, "longest", longest)];
    let x = named("mode", modes.iter().map(|mode| mode.name()));
    let figure: Plot = plot("bursts", x, axis("time of a burst, ms", Spread::Log), drawn, None);
    Section {
        title: "4. Bursts".to_owned(),
        text: vec![format!(
            "A VM makes {AT_ONCE} reads at once, every {} ms, next to three that read as fast as they can, under the middle settings of \
             the third question: time from the first request to the end of the last. isol-bench starts an application and waits \
             until it has its rate. The I/O domain's client goes on reading after the first {AT_ONCE} for half of the time.",
            BURST_PERIOD.0 / 1_000_000
        )],
        plots: vec![("median over the rounds".to_owned(), figure)],
        tables: vec![table("bursts", &["mode", "median, ms", "longest, ms"], rows)],
    }
}
