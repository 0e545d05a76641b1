//! `rtvirtio-lab demo`: the whole loop in a lab.

use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context;
use rtvirtio_console::{Global, Ui, exit_code, generated, need_root, show, style, write_file};
use rtvirtio_kernel::Root;
use rtvirtio_measure::{RESULT_SCHEMA, ResultFile, Run, VmKind};
use rtvirtio_model::{ModelKind, Profile};
use rtvirtio_planner::{Plan, TaskOutlook, plan, scheme_name};
use rtvirtio_report::{ReportInput, html, tally, text};
use rtvirtio_testbed::LabHost;
use rtvirtio_units::Nanos;
use rtvirtio_workflow::Progress as _;
use rtvirtio_workflow::apply::{apply_plan, revert_all};
use rtvirtio_workflow::model_choice::ModelChoice;
use rtvirtio_workflow::plan::{old_values, outlook};
use rtvirtio_workflow::profile::{Access, of_site};
use rtvirtio_workflow::run::measure;
use rtvirtio_workflow::site::Site;

use super::lab::{DEMO_DIR, lab_host};
use crate::args::DemoArgs;

/// The paper's Fig. 7 case.
const DEFAULT_SPEC: &str = include_str!("../../../../examples/fig7.toml");
/// Time for the device's profile: shorter than `rtvirtio profile`'s, the demo has ten minutes.
const PROFILE_TIME: Duration = Duration::from_secs(24);

/// Runs it; the exit code is that of the run under the plan.
pub fn run(args: &DemoArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    need_root("demo")?;
    let start = Instant::now();
    let (name, text) = match &args.spec {
        Some(path) => (
            path.display().to_string(),
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?,
        ),
        None => ("examples/fig7.toml (built in)".to_owned(), DEFAULT_SPEC.to_owned()),
    };
    let spec = rtvirtio_spec::parse(&name, &text)?;
    anyhow::ensure!(
        spec.lab_kind().is_some(),
        "{name}: the demo needs lab VMs; for existing ones use plan, apply, verify"
    );
    anyhow::ensure!(
        matches!(spec.device, rtvirtio_spec::Device::Twin { .. }),
        "{name}: the demo runs on a twin only; for a real device use `rtvirtio-lab up`, `plan`, `apply`, `verify`"
    );
    // A journal and a lab of its own: the demo never mixes with the user's settings.
    let _lock = global.dirs().lock_vms()?;
    let labs = lab_host(global).below(DEMO_DIR);
    let stage = Stage { labs: &labs, ui };
    stage.clear()?;
    let lengths = Duration::from_nanos(args.length.0);
    let outcome = {
        // Also on a panic.
        let _guard = ClearOnDrop(&stage);
        stage.run(&spec, &name, &text, args, lengths)
    };
    // Again, because only here an error can be reported; after the guard there is nothing to
    // remove.
    let cleared = stage.clear();
    let code = match outcome {
        Ok(demo) => demo.write(&args.out, ui)?,
        Err(e) => {
            cleared?;
            return Err(e);
        }
    };
    cleared?;
    ui.step(&format!("everything is reverted; {:.0} s in all", start.elapsed().as_secs_f64()));
    Ok(code)
}

/// Result of the demo.
struct DemoResult {
    file: ResultFile,
    plan: Plan,
    profile: Profile,
    notes: Vec<String>,
}

struct ClearOnDrop<'a>(&'a Stage<'a>);

impl Drop for ClearOnDrop<'_> {
    fn drop(&mut self) {
        // The following call reports the error.
        let _ = self.0.clear();
    }
}

struct Stage<'a> {
    labs: &'a LabHost,
    ui: &'a Ui,
}

impl Stage<'_> {
    /// Reverts settings and removes the lab: at the start those of a killed demo, at the end its
    /// own.
    fn clear(&self) -> anyhow::Result<()> {
        if self.labs.remove()? {
            self.ui.step("the lab is removed");
        }
        Ok(())
    }

    fn run(
        &self,
        spec: &rtvirtio_spec::Spec,
        name: &str,
        text_of_spec: &str,
        args: &DemoArgs,
        length: Duration,
    ) -> anyhow::Result<DemoResult> {
        let ui = self.ui;
        self.labs.up(spec, (name, text_of_spec), args.accel.into(), None, ui)?;
        let dirs = &self.labs.dirs;
        let site = Site::find(spec.clone(), dirs)?;
        let profile = of_site(&site, Access::Reads, PROFILE_TIME, dirs, ui)?;
        print(&text::profile(&profile, &style()), ui);

        // A new device, with BFQ as distributions set it: nothing is tuned.
        site.stack.device.set_elevator(&Root::default(), "bfq")?;
        let config = site.config()?;
        let before = outlook(spec, &profile, &ModelChoice::formula(ModelKind::Slice), &config)?;
        let default = measure(&site, "default-bfq", length, &latencies(&before), dirs, ui)?;
        print(&text::run(&default, &style()), ui);

        let options = site.plan_options(config.clone(), &ModelChoice::formula(ModelKind::Slice))?;
        let plan = plan(spec, &profile, &options)?;
        print(&text::plan(&plan, &old_values(spec, &config, &plan), &style()), ui);
        let applied = apply_plan(&plan, &site, dirs, ui)?;
        ui.step(&format!("applied {applied} settings, journaled and read back"));
        let planned = measure(&site, &plan.scheme, length, &latencies(&plan.tasks), dirs, ui)?;
        print(&text::compare(&default, &planned, &style()), ui);
        let reverted = revert_all(dirs)?;
        ui.step(&format!("reverted {reverted} settings"));

        let file =
            ResultFile { schema: RESULT_SCHEMA.to_owned(), host: site.facts(), runs: vec![default, planned] };
        let notes = self.notes(spec, &profile, &config, &file)?;
        Ok(DemoResult { file, plan, profile, notes })
    }

    fn notes(
        &self,
        spec: &rtvirtio_spec::Spec,
        profile: &Profile,
        config: &rtvirtio_model::Config,
        file: &ResultFile,
    ) -> anyhow::Result<Vec<String>> {
        let mut notes = Vec::new();
        // The paper's model covers the run under the kernel's defaults.
        let paper = outlook(spec, profile, &ModelChoice::formula(ModelKind::Analytical), config)?;
        let predictions: Vec<String> =
            paper.iter().map(|t| format!("{}/{} {}", t.vm, t.task, t.forecast.latency_ns)).collect();
        notes.push(format!(
            "For default BFQ the RT-VirtIO paper's equations (1)-(5), with its own coefficients, predict: {}.",
            predictions.join(", ")
        ));
        if file.runs.iter().any(|r| r.kind == VmKind::Qemu) && file.host.accelerator == "tcg" {
            notes.push(
                "The guests ran under TCG emulation because KVM does not run stock guests on this host: \
                 their CPU noise is part of every number."
                    .to_owned(),
            );
        }
        Ok(notes)
    }
}

impl DemoResult {
    fn write(&self, dir: &Path, ui: &Ui) -> anyhow::Result<ExitCode> {
        let report = ReportInput {
            title: "rtvirtio-lab demo",
            result: &self.file,
            plan: Some(&self.plan),
            profile: Some(&self.profile),
            notes: &self.notes,
            generated: &generated(),
        };
        let (page, data) = (dir.join("report.html"), dir.join("result.json"));
        write_file(&page, html(&report).as_bytes())?;
        let json = serde_json::to_vec_pretty(&self.file)?;
        write_file(&data, &json)?;
        if ui.json {
            show(ui, &self.file, String::new)?;
        }
        for run in &self.file.runs {
            ui.step(&format!("{}: {}", scheme_name(&run.scheme), tally(run).sentence()));
        }
        if let [before, after] = self.file.runs.as_slice() {
            print(&text::before_after(before, after, &style()), ui);
        }
        ui.step(&format!("wrote {} and {}", page.display(), data.display()));
        Ok(last_code(&self.file.runs))
    }
}

/// A demo succeeds when the plan misses no target: sixty seconds cannot prove every target, which
/// the output states.
fn last_code(runs: &[Run]) -> ExitCode {
    match runs.last() {
        Some(run) if tally(run).missed > 0 => exit_code(run),
        _ => ExitCode::SUCCESS,
    }
}

fn latencies(tasks: &[TaskOutlook]) -> Vec<Option<Nanos>> {
    tasks.iter().map(|t| Some(t.forecast.latency_ns)).collect()
}

/// Text of the demo: to standard output, unless that is for JSON.
fn print(text: &str, ui: &Ui) {
    // A closed output must not end the demo before it has reverted everything.
    if ui.json {
        let _ = writeln!(std::io::stderr(), "{text}");
    } else {
        let _ = writeln!(std::io::stdout(), "{text}");
    }
}
