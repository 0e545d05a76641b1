//! The flood, windows and costs as a page.

use crate::experiment::Experiment;

use rtvirtio_measure::Run;

use super::window::{WINDOW_SCHEMES, WindowRun};
use super::{IodData, claims};
use crate::page::Section;
use crate::page::xy::table;
use crate::report::ExperimentReport;

impl Experiment for IodData {
    const FORM: &str = "rtvirtio-iod/1";
    const FILE: &str = "iod.json";
    const TITLE: &str = "rtvirtio: the I/O domain";

    fn report(&self) -> anyhow::Result<ExperimentReport> {
        let lead = format!(
            "{}: {} rounds; {}. Measured by a vhost-user-blk frontend without a VM, from the intended start of each request.",
            self.host.device,
            self.rounds.len(),
            self.command
        );
        let report = ExperimentReport::of_data(self, self.host.clone(), claims(self), lead, sections(self))?;
        Ok(ExperimentReport { runs: self.rounds.iter().flatten().cloned().collect(), ..report })
    }
}

fn sections(data: &IodData) -> Vec<Section> {
    let windows = (!data.windows.is_empty()).then(|| windows(&data.windows));
    std::iter::once(section(&data.rounds)).chain(windows).collect()
}

fn windows(rounds: &[Vec<WindowRun>]) -> Section {
    let head = ["round", "window", "requests/s", "rates kept", "p50 ms", "p99.99 ms", "at the end"];
    let rows = rounds.iter().enumerate().flat_map(|(round, runs)| {
        runs.iter().zip(&WINDOW_SCHEMES).map(move |(w, scheme)| {
            vec![
                (round + 1).to_string(),
                scheme.name.to_owned(),
                format!("{:.0}", w.iops),
                format!("{:.3}", w.kept),
                format!("{:.2}", w.p50_ms),
                format!("{:.1}", w.p9999_ms),
                w.window.to_string(),
            ]
        })
    });
    Section {
        title: "Windows under the flood".to_owned(),
        text: vec![
            "Requests per second of all VMs; p50 and p99.99 of the slowest task with a reservation."
                .to_owned(),
        ],
        tables: vec![table("windows", &head, rows.collect())],
        ..Section::default()
    }
}

fn section(rounds: &[Vec<Run>]) -> Section {
    let head = ["round", "scheme", "task", "rate", "p50", "p99", "p99.99", "longest"];
    let rows = rounds.iter().enumerate().flat_map(|(i, runs)| {
        runs.iter().flat_map(move |run| {
            run.tasks.iter().map(move |t| {
                vec![
                    (i + 1).to_string(),
                    run.scheme.clone(),
                    format!("{}/{}", t.vm, t.task),
                    format!("{:.0}", t.achieved_rate.0),
                    t.p50_ns.to_string(),
                    t.p99_ns.to_string(),
                    t.p9999_ns.to_string(),
                    t.max_ns.to_string(),
                ]
            })
        })
    });
    Section {
        title: "A flood next to declared rates".to_owned(),
        tables: vec![table("flood", &head, rows.collect())],
        ..Section::default()
    }
}
