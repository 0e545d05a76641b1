//! The rounds as a page.

use crate::experiment::Experiment;

use super::{CrashData, claims};
use crate::page::Section;
use crate::page::xy::table;
use crate::report::ExperimentReport;

impl Experiment for CrashData {
    const FORM: &str = "rtvirtio-iod-crash/1";
    const FILE: &str = "iod-crash.json";
    const TITLE: &str = "rtvirtio: the I/O domain, killed";

    fn report(&self) -> anyhow::Result<ExperimentReport> {
        let lead = format!(
            "{}: {} kills in {} rounds under a guest ({} under {}); {}.",
            self.host.device,
            self.kills.len(),
            self.rounds.len(),
            self.host.vmm,
            self.host.accelerator,
            self.command
        );
        ExperimentReport::of_data(self, self.host.clone(), claims(self), lead, vec![section(self)])
    }
}

fn section(data: &CrashData) -> Section {
    let head =
        ["round", "region", "seed", "written", "read", "flushes", "lost", "corrupt", "errors", "longest ms"];
    let rows = data.rounds.iter().enumerate().map(|(i, r)| {
        let name = if r.again { format!("{} (again)", i + 1) } else { (i + 1).to_string() };
        let numbers = [r.region, r.seed, r.written, r.read, r.flushes, r.lost, r.corrupt, r.io_errors];
        let mut row = vec![name];
        row.extend(numbers.map(|n| n.to_string()));
        row.push(format!("{:.0}", r.longest_ms));
        row
    });
    Section {
        title: "The domain is killed under a guest".to_owned(),
        tables: vec![table("rounds", &head, rows.collect())],
        ..Section::default()
    }
}
