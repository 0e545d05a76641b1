//! What an experiment's data show, in every form in which it is told.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use rtvirtio_bench::claims::{BenchFile, Claim};
use rtvirtio_bench::dataset::Dataset;
use rtvirtio_bench::saved::{Saved, from_json};
use rtvirtio_measure::{HostFacts, Run};
use rtvirtio_report::{BenchPage, BenchSection, bench_html};
use serde::Serialize;
use serde_json::Value;

use super::page;
use rtvirtio_console::Ui;
use rtvirtio_console::generated;
use rtvirtio_console::{show, write_file};
use rtvirtio_workflow::Progress as _;

/// The device whose claims have no device in their names.
const FIRST: &str = "qlc-nvme";

/// What an experiment's data show.
pub struct Found {
    /// Where it was measured.
    pub host: HostFacts,
    /// The runs.
    pub runs: Vec<Run>,
    /// What was measured, as it was saved, where runs do not hold all of it.
    pub data: Vec<Value>,
    /// What they show.
    pub claims: Vec<Claim>,
    /// The same for a terminal.
    pub text: String,
    /// The same for a page.
    pub sections: Vec<BenchSection>,
    /// How it was measured, for a page.
    pub lead: Vec<String>,
}

/// Reads what an experiment saved.
pub fn read<T: Saved>(path: &Path) -> anyhow::Result<T> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    from_json(&text).with_context(|| path.display().to_string())
}

/// Saves what an experiment has measured so far.
pub fn keep<T: Serialize>(path: &Path, data: &T) -> anyhow::Result<()> {
    write_file(path, serde_json::to_string(data)?.as_bytes())
}

/// Saves what an experiment measured, and says so.
pub fn save<T: Serialize>(path: &Path, data: &T, ui: &Ui) -> anyhow::Result<()> {
    keep(path, data)?;
    ui.step(&format!("wrote {}", path.display()));
    Ok(())
}

impl Found {
    /// Nothing yet, of some data.
    pub fn of(data: &Dataset) -> Self {
        let host = data.header.host.clone();
        let mut lead = vec![format!(
            "{}: {} runs on Linux {} with {} CPUs, process VMs; {}.",
            host.device,
            data.points.len(),
            host.kernel,
            host.cpus,
            data.header.command
        )];
        lead.extend(
            data.moves
                .iter()
                .map(|(before, host)| format!("From run {} on under Linux {}.", before + 1, host.kernel)),
        );
        Self {
            host,
            runs: Vec::new(),
            data: Vec::new(),
            claims: Vec::new(),
            text: String::new(),
            sections: Vec::new(),
            lead,
        }
    }

    /// Puts the name of a device, and what else sets data apart, behind the claims' names.
    pub fn about(mut self, name: &str) -> Self {
        if name != FIRST {
            self.claims.iter_mut().for_each(|c| c.id = format!("{}@{name}", c.id));
        }
        self
    }

    /// This, and all of `more` behind it.
    pub fn with(mut self, more: Self) -> Self {
        self.runs.extend(more.runs);
        self.data.extend(more.data);
        self.claims.extend(more.claims);
        self.text.push_str(&more.text);
        self.sections.extend(more.sections);
        self.lead.extend(more.lead);
        self
    }

    /// The claims as a table in Markdown.
    pub fn markdown(&self) -> String {
        let mut s = String::from("| claim | what | value | n | should be | |\n|---|---|---|---|---|---|\n");
        for row in self.claims.iter().map(page::claim) {
            let [id, what, value, unit, n, limit, met] = row.map(|cell| cell.replace('|', "\\|"));
            s.push_str(&format!("| `{id}` | {what} | {value} {unit} | {n} | {limit} | {met} |\n"));
        }
        s
    }

    /// Tells it: a page where one is asked for, and a table or JSON. Exit code 2 when a claim is not met.
    pub fn tell(self, title: &str, html: Option<&Path>, ui: &Ui) -> anyhow::Result<ExitCode> {
        if let Some(out) = html {
            let sections = std::iter::once(page::claims(&self.claims)).chain(self.sections).collect();
            let page =
                BenchPage { title: title.to_owned(), lead: self.lead, sections, generated: generated() };
            write_file(out, bench_html(&page).as_bytes())?;
            ui.step(&format!("wrote {}", out.display()));
        }
        let met = self.claims.iter().all(|c| c.met);
        show(ui, &BenchFile::new(self.host, self.runs, self.data, self.claims), || self.text)?;
        Ok(if met { ExitCode::SUCCESS } else { ExitCode::from(2) })
    }
}
