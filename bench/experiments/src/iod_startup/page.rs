//! The start-ups as a page.

use crate::experiment::Experiment;

use super::{StartupData, claims};
use crate::page::Section;
use crate::page::xy::table;
use crate::report::ExperimentReport;

impl Experiment for StartupData {
    const FORM: &str = "rtvirtio-iod-startup/1";
    const FILE: &str = "iod-startup.json";
    const TITLE: &str = "rtvirtio: start-up of an application";

    fn report(&self) -> anyhow::Result<ExperimentReport> {
        let lead = format!(
            "{}: start-ups of `{}` in a guest ({} under {}); {}.",
            self.host.device,
            self.app.join(" "),
            self.host.vmm,
            self.host.accelerator,
            self.command
        );
        ExperimentReport::of_data(self, self.host.clone(), claims(self), lead, vec![section(self)])
    }
}

fn section(data: &StartupData) -> Section {
    let head = ["round", "scheme", "seconds", "requests", "bytes", "by reservation", "other VM, MB/s"];
    let rows = data.starts.iter().map(|s| {
        vec![
            (s.round + 1).to_string(),
            s.scheme.clone(),
            if s.timed_out { format!("over {}", data.limit) } else { format!("{:.2}", s.seconds) },
            s.requests.to_string(),
            s.bytes.to_string(),
            s.reserved.to_string(),
            format!("{:.2}", s.flood / 1e6),
        ]
    });
    Section {
        title: "Start-up of an application in a guest".to_owned(),
        tables: vec![table("starts", &head, rows.collect())],
        ..Section::default()
    }
}
