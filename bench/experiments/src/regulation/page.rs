//! The points as a page, and its figures as files.

use crate::experiment::Experiment;
use std::path::Path;

use rtvirtio_report::svg::{Series, Spread};
use rtvirtio_traffic::Direction;

use super::claims::{claims, outcomes};
use super::model::judged_victims;
use super::{Beside, Point, RegulationData};
use crate::page::xy::{axis, plot, series, table};
use crate::page::{Plot, Section, Table};
use crate::report::{ExperimentReport, read};

impl Experiment for RegulationData {
    const FORM: &str = "rtvirtio-regulation/1";
    const FILE: &str = "regulation.json";
    const TITLE: &str = "rtvirtio: regulated traffic";

    fn report(&self) -> anyhow::Result<ExperimentReport> {
        let lead = format!(
            "{}: {} points; {}. The memory load writes over {} MiB, spread over all CPUs; the largest cache has {} MiB.",
            self.host.device,
            self.points.len(),
            self.command,
            self.memory >> 20,
            self.cache >> 20
        );
        ExperimentReport::of_data(self, self.host.clone(), claims(self), lead, sections(self))
    }
}

/// Reads a saved result.
pub fn load(path: &Path) -> anyhow::Result<RegulationData> {
    read(path)
}

/// The figures of a saved result: name of the file and its text.
pub fn svg(path: &Path) -> anyhow::Result<Vec<(String, String)>> {
    let data: RegulationData = read(path)?;
    let of = |name: String, (_, plot): (String, Plot)| (name, plot.standalone_svg());
    let all = flows(&data).into_iter().flat_map(|flow| {
        let name = |what: &str| format!("regulation-{what}-{}.svg", flow.name());
        [of(name("alpha"), alpha(&data.points, flow)), of(name("delta"), delta(&data.points, flow))]
    });
    Ok(all.collect())
}

fn flows(data: &RegulationData) -> Vec<Direction> {
    Direction::ALL.into_iter().filter(|flow| data.points.iter().any(|p| p.flow == *flow)).collect()
}

fn sections(data: &RegulationData) -> Vec<Section> {
    let mut all: Vec<Section> = flows(data).into_iter().map(|flow| section(data, flow)).collect();
    if !data.victims.is_empty() {
        all.push(victims(data));
    }
    all
}

fn regulated(points: &[Point], flow: Direction, beside: Beside) -> Vec<&Point> {
    let mut of: Vec<&Point> =
        points.iter().filter(|p| p.flow == flow && p.beside == beside && p.rate.is_some()).collect();
    of.sort_by_key(|p| p.rate);
    of
}

/// Loads that were measured.
fn loads(points: &[Point]) -> Vec<Beside> {
    Beside::ALL.into_iter().filter(|beside| points.iter().any(|p| p.beside == *beside)).collect()
}

fn curves(points: &[Point], flow: Direction, value: impl Fn(&Point) -> f64) -> Vec<Series> {
    let of = |(i, beside): (usize, Beside)| {
        let points = regulated(points, flow, beside).into_iter().map(|p| {
            let rate = p.rate.unwrap_or(0);
            (rate as f64, value(p), format!("{rate}/s: {:.3}, n {}", value(p), p.n))
        });
        series(i, beside.name(), points.collect())
    };
    loads(points).into_iter().enumerate().map(of).collect()
}

fn named(title: &str, y: &str, curves: Vec<Series>) -> Plot {
    plot(
        title,
        axis("rate of the regulator, units per second", Spread::Log),
        axis(y, Spread::Log),
        curves,
        None,
    )
}

fn alpha(points: &[Point], flow: Direction) -> (String, Plot) {
    let title = format!("alpha of {} over the rate of its regulator", flow.name());
    let plot = named(&title, "alpha, units per second", curves(points, flow, |p| p.alpha));
    (title, plot)
}

fn delta(points: &[Point], flow: Direction) -> (String, Plot) {
    let title = format!("Delta of {} over the rate of its regulator", flow.name());
    let mut all = curves(points, flow, |p| p.service().delta * 1e3);
    let loads = loads(points);
    for (i, beside) in loads.iter().copied().enumerate() {
        let judged = outcomes(points);
        let mut of: Vec<(f64, f64, String)> = judged
            .iter()
            .filter(|j| j.point.flow == flow && j.point.beside == beside)
            .map(|j| {
                let (rate, ms) = (j.point.rate.unwrap_or(0) as f64, j.bound.delta * 1e3);
                (rate, ms, format!("bound at {rate}/s: {ms:.3} ms"))
            })
            .collect();
        of.sort_by(|a, b| a.0.total_cmp(&b.0));
        all.push(Series {
            dashed: true,
            ..series(loads.len() + i, &format!("bound, {}", beside.name()), of)
        });
    }
    let plot = named(&title, "Delta, ms", all);
    (title, plot)
}

fn section(data: &RegulationData, flow: Direction) -> Section {
    let ms = |ns: u64| format!("{:.3}", ns as f64 / 1e6);
    let rows = data.points.iter().filter(|p| p.flow == flow).map(|p| {
        vec![
            p.rate.map_or("none".to_owned(), |rate| rate.to_string()),
            p.beside.name().to_owned(),
            p.n.to_string(),
            format!("{:.2}", p.alpha),
            ms(p.median_ns),
            ms(p.delta_ns),
            p.awake_ns.map_or("-".to_owned(), ms),
            p.memory.map_or("-".to_owned(), |rate| format!("{:.2}", rate / 1e9)),
        ]
    });
    let head = ["rate", "beside", "n", "alpha /s", "median gap ms", "Delta ms", "less stalls", "load GB/s"];
    Section {
        title: format!("Regulated: {}", flow.name()),
        plots: vec![alpha(&data.points, flow), delta(&data.points, flow)],
        tables: vec![table("points", &head, rows.collect())],
        ..Section::default()
    }
}

fn victims(data: &RegulationData) -> Section {
    let judged = judged_victims(&data.victims);
    let rows = data.victims.iter().map(|v| {
        let of = judged.iter().find(|j| (j.point.rate, j.point.round) == (v.rate, v.round));
        let (s, ms) = (v.victim.service(), |s: f64| format!("{:.3}", s * 1e3));
        vec![
            v.rate.map_or("no neighbour".to_owned(), |rate| rate.to_string()),
            v.victim.n.to_string(),
            format!("{:.0}", v.neighbour),
            format!("{:.0}", s.alpha),
            of.map_or("-".to_owned(), |j| format!("{:.0}", j.expected.alpha)),
            of.map_or("-".to_owned(), |j| format!("{:.0}", j.bound.alpha)),
            ms(s.delta),
            of.map_or("-".to_owned(), |j| ms(j.bound.delta)),
        ]
    });
    let head =
        ["neighbour's rate", "n", "it got /s", "alpha /s", "expected", "bound", "Delta ms", "bound ms"];
    Section {
        title: "A victim next to a regulated neighbour".to_owned(),
        text: vec![
            "Reads of 4 KiB of both on one disk, one at a time, first come first served. Values without a bound are those from which curve and bound are made."
                .to_owned(),
        ]
        .into_iter()
        .chain(data.refused.iter().flatten().map(|r| {
            let (alpha, delta) = (r.target.alpha, r.target.delta * 1e3);
            format!("Refused: alpha {alpha:.0}/s with Delta {delta:.2} ms: {}.", r.why)
        }))
        .collect(),
        tables: std::iter::once(table("victim", &head, rows.collect())).chain(chosen(data)).collect(),
        ..Section::default()
    }
}

fn chosen(data: &RegulationData) -> Option<Table> {
    let rows = data.choices.iter().map(|c| {
        let got = c.measured.victim.service();
        vec![
            format!("{:.0}", c.target.alpha),
            format!("{:.3}", c.target.delta * 1e3),
            format!("{:.0}", c.chosen),
            format!("{:.0}", got.alpha),
            format!("{:.3}", got.delta * 1e3),
            if c.is_held() { "held" } else { "MISSED" }.to_owned(),
        ]
    });
    let head = ["alpha asked /s", "Delta asked ms", "neighbour's rate", "alpha /s", "Delta ms", ""];
    (!data.choices.is_empty()).then(|| table("choices", &head, rows.collect()))
}
