//! Form of all commands that measure an experiment, or show its saved result.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use rtvirtio_console::{Global, MISSED, Ui, generated, need_root, show, write_file};
use rtvirtio_experiments::experiment::{Experiment, report};
use rtvirtio_experiments::report::{ExperimentReport, save};
use rtvirtio_experiments::run_basis::check_out;
use rtvirtio_testbed::LabHost;
use rtvirtio_workflow::{Progress as _, check_writable};

use super::lab_host;
use crate::args::BenchResult;

/// A command with its output options.
pub struct Run<'a> {
    /// Name of the command.
    pub name: &'static str,
    pub result: &'a BenchResult,
    pub global: &'a Global,
    pub ui: &'a Ui,
}

impl Run<'_> {
    /// Measures, unless the saved result is to be shown alone, and returns the path of the result.
    /// `check` refuses what cannot be measured, before anything else is.
    pub fn measured(
        &self,
        file: &str,
        check: impl FnOnce() -> anyhow::Result<()>,
        measure: impl FnOnce(&Path, &LabHost) -> anyhow::Result<()>,
    ) -> anyhow::Result<PathBuf> {
        let path = self.result.out.join(file);
        if !self.result.report_only {
            check()?;
            self.check_result()?;
            need_root(&format!("rtvirtio-bench {}", self.name))?;
            measure(&path, &lab_host(self.global))?;
        }
        Ok(path)
    }

    /// Refuses a result that cannot be written, before anything is measured.
    pub fn check_result(&self) -> anyhow::Result<()> {
        check_out(&self.result.out)?;
        check_page(self.result.html.as_deref())
    }

    /// Shows the report of a saved result.
    pub fn shown<E: Experiment>(&self, path: &Path) -> anyhow::Result<ExitCode> {
        self.print(report::<E>(path)?, E::TITLE)
    }

    /// Shows a report.
    pub fn print(&self, report: ExperimentReport, title: &str) -> anyhow::Result<ExitCode> {
        print(report, title, self.result.html.as_deref(), self.ui)
    }

    /// Measures with `measure`, and shows the report.
    pub fn whole<E: Experiment>(
        &self,
        check: impl FnOnce() -> anyhow::Result<()>,
        measure: impl FnOnce(&Path, &LabHost) -> anyhow::Result<()>,
    ) -> anyhow::Result<ExitCode> {
        self.shown::<E>(&self.measured(E::FILE, check, measure)?)
    }

    /// Shows the report of what `measure` measures and writes to the result's path.
    pub fn written<E: Experiment>(
        &self,
        check: impl FnOnce() -> anyhow::Result<()>,
        measure: impl FnOnce(&Path, &LabHost) -> anyhow::Result<()>,
    ) -> anyhow::Result<ExitCode> {
        self.whole::<E>(check, |path, labs| {
            measure(path, labs)?;
            self.ui.step(&format!("wrote {}", path.display()));
            Ok(())
        })
    }

    /// Measures with `measure`, which needs neither root nor a device, and shows the report.
    pub fn without_device<E: Experiment>(
        &self,
        measure: impl FnOnce() -> anyhow::Result<E>,
    ) -> anyhow::Result<ExitCode> {
        let path = self.result.out.join(E::FILE);
        if !self.result.report_only {
            self.check_result()?;
            save(&path, &measure()?, self.ui)?;
        }
        self.shown::<E>(&path)
    }
}

/// Nothing is to be checked before the result's path.
pub fn unchecked() -> anyhow::Result<()> {
    Ok(())
}

pub fn check_page(html: Option<&Path>) -> anyhow::Result<()> {
    html.map_or(Ok(()), check_writable).context("--html")
}

/// Prints a report, and writes its page. Exit code 2 when a claim is not met.
pub fn print(
    mut report: ExperimentReport,
    title: &str,
    html: Option<&Path>,
    ui: &Ui,
) -> anyhow::Result<ExitCode> {
    if let Some(out) = html {
        write_file(out, report.html(title, generated()).as_bytes())?;
        ui.step(&format!("wrote {}", out.display()));
    }
    let is_met = report.is_met();
    let (file, text) = report.into_file();
    show(ui, &file, || text)?;
    Ok(if is_met { ExitCode::SUCCESS } else { ExitCode::from(MISSED) })
}
