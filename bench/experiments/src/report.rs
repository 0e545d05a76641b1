//! The result of an experiment in every form: claims, text, page, JSON.

use std::path::Path;

use crate::claims::{BenchFile, Claim};
use crate::saved::{Saved, from_json};
use anyhow::Context;
use rtvirtio_learn::dataset::Dataset;
use rtvirtio_measure::{HostFacts, Run};
use serde::Serialize;
use serde_json::Value;

use rtvirtio_workflow::write_file;

use crate::page::{Page, Section, claims as claim_rows, page_html};
use rtvirtio_workflow::Progress;

/// Device whose claims' ids have no suffix.
const FIRST: &str = "qlc-nvme";

/// Head of the page of claims.
const CLAIMS_HEAD: &str = "\
# Claims

Every claim with a limit, those that are not met first. The page is generated, not edited:

```
rtvirtio-bench report --data data --markdown docs/results/claims.md --table docs/results/claims.tsv
```

Behind `@` stands the data set; claims without it are of the emulated flash drive `qlc-nvme`. Figures that
have no limit, and stand there for comparison, are in [claims.tsv](claims.tsv). How the figures are made, and
what they are of: [README.md](README.md).
";

/// The result of one or more experiments.
pub struct ExperimentReport {
    /// Host of the measurement.
    pub host: HostFacts,
    /// Runs that the claims are computed from.
    pub runs: Vec<Run>,
    /// The saved data of experiments whose runs do not hold all of it.
    pub data: Vec<Value>,
    /// The claims that follow from runs and data.
    pub claims: Vec<Claim>,
    /// The result as text for a terminal.
    pub text: String,
    /// The result as sections of a page.
    pub sections: Vec<Section>,
    /// Sentences on the method, at the top of a page.
    pub lead: Vec<String>,
}

/// Reads the saved data of an experiment.
///
/// # Errors
/// When the file cannot be read or is of another form or version.
pub fn read<T: Saved>(path: &Path) -> anyhow::Result<T> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    from_json(&text).with_context(|| path.display().to_string())
}

/// Writes the data of an experiment, also between rounds.
pub fn write<T: Serialize>(path: &Path, data: &T) -> anyhow::Result<()> {
    Ok(write_file(path, serde_json::to_string(data)?.as_bytes())?)
}

/// Writes the data of an experiment and reports the path as progress.
pub fn save<T: Serialize>(path: &Path, data: &T, progress: &dyn Progress) -> anyhow::Result<()> {
    write(path, data)?;
    progress.step(&format!("wrote {}", path.display()));
    Ok(())
}

impl ExperimentReport {
    /// A report of a dataset that holds no claim yet.
    #[must_use]
    pub fn new(data: &Dataset) -> Self {
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

    /// A report of saved data that is not a dataset of runs.
    ///
    /// # Errors
    /// When the data cannot be written as JSON.
    pub fn of_data<T: Serialize>(
        data: &T,
        host: HostFacts,
        claims: Vec<Claim>,
        lead: String,
        sections: Vec<Section>,
    ) -> anyhow::Result<Self> {
        Ok(Self {
            host,
            runs: Vec::new(),
            data: vec![serde_json::to_value(data)?],
            text: claim_rows::text(&claims),
            claims,
            sections,
            lead: vec![lead],
        })
    }

    /// Appends a suffix to the claims' ids, such as the device's name, that tells datasets apart.
    #[must_use]
    pub fn with_suffix(mut self, name: &str) -> Self {
        if name != FIRST {
            self.claims.iter_mut().for_each(|c| c.id = format!("{}@{name}", c.id));
        }
        self
    }

    /// Appends another report; the host stays the same.
    #[must_use]
    pub fn and(mut self, more: Self) -> Self {
        self.runs.extend(more.runs);
        self.data.extend(more.data);
        self.claims.extend(more.claims);
        self.text.push_str(&more.text);
        self.sections.extend(more.sections);
        self.lead.extend(more.lead);
        self
    }

    /// The claims that have a limit, as a page in Markdown.
    #[must_use]
    pub fn markdown(&self) -> String {
        let mut page = String::from(CLAIMS_HEAD);
        for (title, met) in [("Not met", false), ("Met", true)] {
            let rows: Vec<&Claim> = self.claims.iter().filter(|c| c.has_limit() && c.met == met).collect();
            page.push_str(&format!("\n## {title}: {}\n", rows.len()));
            page.push_str("\n| claim | what | value | n | limit |\n|---|---|---|---|---|\n");
            for row in rows.into_iter().map(claim_rows::cells) {
                let [id, what, value, unit, n, limit, _] = row.map(|cell| cell.replace('|', "\\|"));
                let limit = limit.replace("at least ", ">= ").replace("at most ", "<= ");
                page.push_str(&format!("| `{id}` | {what} | {value} {unit} | {n} | {limit} |\n"));
            }
        }
        page
    }

    /// All claims, a line each: id, value, unit, n and limit, separated by tabs.
    #[must_use]
    pub fn table(&self) -> String {
        let mut table = String::from("claim\tvalue\tunit\tn\tlimit\n");
        for [id, _, value, unit, n, limit, _] in self.claims.iter().map(claim_rows::cells) {
            let limit = limit.replace("for comparison", "");
            table.push_str(&[id, value, unit, n, limit].join("\t"));
            table.push('\n');
        }
        table
    }

    /// The sections as one HTML document.
    #[must_use]
    pub fn html(&mut self, title: &str, generated: String) -> String {
        let mut sections = vec![claim_rows::section(&self.claims)];
        sections.append(&mut self.sections);
        let lead = std::mem::take(&mut self.lead);
        page_html(&Page { title: title.to_owned(), lead, sections, generated })
    }

    /// Whether every claim is met.
    #[must_use]
    pub fn is_met(&self) -> bool {
        self.claims.iter().all(|c| c.met)
    }

    /// Report as `--json` prints it, and its text.
    #[must_use]
    pub fn into_file(self) -> (BenchFile, String) {
        (BenchFile::new(self.host, self.runs, self.data, self.claims), self.text)
    }
}
