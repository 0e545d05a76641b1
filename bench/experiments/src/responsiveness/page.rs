//! The matrix as figures and tables, like the paper's Figs. 1 to 3.

use crate::experiment::{Experiment, report};
use std::path::Path;

use rtvirtio_report::svg::{TimeBar, TimePlot, TimeRow};

use super::{Cell, GUEST_LOADS, HOST_LOADS, Plane, ResponsivenessData, claims};
use crate::page::{Plot, Section, Table};
use crate::report::{ExperimentReport, read};

impl Experiment for ResponsivenessData {
    const FORM: &str = "rtvirtio-responsiveness/1";
    const FILE: &str = "responsiveness.json";
    const TITLE: &str = "rtvirtio: responsiveness";

    fn report(&self) -> anyhow::Result<ExperimentReport> {
        let lead = format!(
            "Start-ups in a guest ({} under {}) with cold caches; over {} s is a failure; {}.",
            self.host.vmm, self.host.accelerator, self.limit, self.command
        );
        let mut sections: Vec<Section> =
            groups(self).iter().map(|(of, cells)| section(self, of, cells)).collect();
        if !self.videos.is_empty() {
            sections.push(videos(self));
        }
        ExperimentReport::of_data(self, self.host.clone(), claims(self), lead, sections)
    }
}

/// Report of [`VIDEO_FILE`](super::VIDEO_FILE): late frames, and claims on its start-ups with ids
/// of their own.
pub fn report_of_video(path: &Path) -> anyhow::Result<ExperimentReport> {
    let mut report = report::<ResponsivenessData>(path)?;
    let (late, mut starts): (Vec<_>, Vec<_>) =
        report.claims.into_iter().partition(|claim| claim.id.starts_with("startup.late_frames"));
    starts.iter_mut().for_each(|claim| claim.id.push_str("@video"));
    report.claims = late.into_iter().chain(starts).collect();
    Ok(report)
}

/// The figures of a saved result, one for each device, application and pair of schedulers: name of
/// the file and its text.
pub fn svg(path: &Path) -> anyhow::Result<Vec<(String, String)>> {
    let data: ResponsivenessData = read(path)?;
    let of = |(of, cells): &([String; 4], Vec<Cell>)| {
        let [device, app, guest, host] = of;
        // The paper's figures are under BFQ.
        let schedulers =
            if guest == "bfq" && host == "bfq" { String::new() } else { format!("-{guest}-{host}") };
        // A file on a disk has a path as its name.
        let device: String =
            device.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        let name = format!("responsiveness-{device}-{app}{schedulers}.svg");
        (name, Plot::Times(plot(&data, of, cells, &planes(&data, cells))).standalone_svg())
    };
    Ok(groups(&data).iter().map(of).collect())
}

/// Cells by figure, in the order of the paper's figures and not by name.
fn groups(data: &ResponsivenessData) -> Vec<([String; 4], Vec<Cell>)> {
    let mut cells = data.cells();
    let mut names: Vec<[String; 4]> = cells.iter().map(group).collect();
    names.sort();
    names.dedup();
    cells.sort_by_key(|cell| (place(&GUEST_LOADS, &cell.guest_load), place(&HOST_LOADS, &cell.host_load)));
    let of = |name: [String; 4]| {
        let cells = cells.iter().filter(|cell| group(cell) == name).cloned().collect();
        (name, cells)
    };
    names.into_iter().map(of).collect()
}

/// Planes with a run in one of these cells.
fn planes(data: &ResponsivenessData, cells: &[Cell]) -> Vec<Plane> {
    Plane::ALL.into_iter().filter(|p| cells.iter().any(|c| data.point(c, *p).is_some())).collect()
}

fn place(list: &[&str], name: &str) -> usize {
    list.iter().position(|known| *known == name).unwrap_or(list.len())
}

fn group(cell: &Cell) -> [String; 4] {
    [&cell.device, &cell.app, &cell.guest_scheduler, &cell.host_scheduler].map(Clone::clone)
}

/// Mean start-ups by load, a bar for each plane.
fn plot(data: &ResponsivenessData, of: &[String; 4], cells: &[Cell], planes: &[Plane]) -> TimePlot {
    let [device, app, ..] = of;
    let idle = cells.first().and_then(|c| data.point(&c.idle(), Plane::Default)).map(|p| p.all.mean);
    let bar = |cell: &Cell, series: usize, plane: Plane| {
        let point = data.point(cell, plane)?;
        let s = point.all;
        let note = format!("n {}, {:.2} to {:.2} s", s.n, s.min, s.max);
        Some(TimeBar { series, seconds: s.mean, failed: point.failed, note })
    };
    let rows = cells.iter().map(|cell| TimeRow {
        name: cell.loads(),
        bars: planes.iter().enumerate().filter_map(|(i, plane)| bar(cell, i, *plane)).collect(),
    });
    TimePlot {
        title: format!("start-up of {app} on {device}"),
        series: planes.iter().map(|p| p.name().to_owned()).collect(),
        rows: rows.collect(),
        reference: idle.map(|seconds| (seconds, "idle device".to_owned())),
        limit: data.limit,
    }
}

/// Figure and table of a device, an application and a pair of schedulers.
fn section(data: &ResponsivenessData, of: &[String; 4], cells: &[Cell]) -> Section {
    let [device, app, guest, host] = of;
    let planes = planes(data, cells);
    let caption = format!(
        "Mean start-up time, lower is better; X: a start took over {} s. Schedulers: {guest} in the guest, {host} on the host (none under the domain).",
        data.limit
    );
    Section {
        title: format!("{app} on {device}, {guest} in the guest, {host} on the host"),
        plots: vec![(caption, Plot::Times(plot(data, of, cells, &planes)))],
        tables: vec![table(data, cells, &planes)],
        ..Section::default()
    }
}

/// Late frames of two VMs that play.
fn videos(data: &ResponsivenessData) -> Section {
    let head = ["device", "plane", "host load", "VM", "frames", "late", "worst ms", "buffer full after ms"];
    let rows = data.videos.iter().flat_map(|v| {
        v.vms.iter().enumerate().map(|(i, vm)| {
            vec![
                v.device.clone(),
                v.plane.name().to_owned(),
                v.host_load.clone(),
                (i + 1).to_string(),
                vm.frames.to_string(),
                vm.late.to_string(),
                format!("{:.1}", vm.worst_ms),
                format!("{:.0}", vm.filled_ms),
            ]
        })
    });
    Section {
        title: "Two VMs that play a video".to_owned(),
        text: vec![
            "24 reads of 256 KiB a second in each, in order, through a buffer of three seconds.".to_owned(),
        ],
        tables: vec![Table {
            label: "videos".to_owned(),
            head: head.map(str::to_owned).to_vec(),
            rows: rows.collect(),
        }],
        ..Section::default()
    }
}

fn table(data: &ResponsivenessData, cells: &[Cell], planes: &[Plane]) -> Table {
    let head = [
        "load",
        "plane",
        "runs",
        "starts",
        "mean s",
        "min",
        "max",
        "deviation",
        "95 % of the mean",
        "95 % of the runs' means",
        "over idle",
        "device MB/s",
        "guest MB/s",
        "device MB/s meanwhile",
        "guest MB/s meanwhile",
    ];
    let within = |v: f64| if v.is_finite() { format!("± {v:.2}") } else { "-".to_owned() };
    let row = |cell: &Cell, plane: Plane| {
        let point = data.point(cell, plane)?;
        let s = point.all;
        let rate = |i: usize| point.meanwhile.map(|rates: [f64; 2]| rates[i]);
        let meanwhile =
            |i: usize| rate(i).map_or_else(|| "-".to_owned(), |rate| format!("{:.2}", rate / 1e6));
        let mean = if point.failed { format!("X ({:.2})", s.mean) } else { format!("{:.2}", s.mean) };
        Some(vec![
            cell.loads(),
            plane.name().to_owned(),
            point.means.n.to_string(),
            s.n.to_string(),
            mean,
            format!("{:.2}", s.min),
            format!("{:.2}", s.max),
            format!("{:.2}", s.deviation),
            within(s.interval),
            within(point.means.interval),
            data.over_idle(cell, plane).map_or_else(|| "-".to_owned(), |over| format!("{over:.2}")),
            format!("{:.2}", point.throughput[0] / 1e6),
            format!("{:.2}", point.throughput[1] / 1e6),
            meanwhile(0),
            meanwhile(1),
        ])
    };
    let rows = cells.iter().flat_map(|cell| planes.iter().filter_map(|plane| row(cell, *plane))).collect();
    Table { label: "start-ups".to_owned(), head: head.map(str::to_owned).to_vec(), rows }
}
