//! `rtvirtio verify`, and running a site's tasks for the other commands.

use std::process::ExitCode;
use std::time::Duration;

use rtvirtio_measure::{RESULT_SCHEMA, ResultFile, Run, Verdict};
use rtvirtio_model::ModelKind;
use rtvirtio_report::{ReportInput, html, text};
use rtvirtio_testbed::workload::{self, RunOptions};
use rtvirtio_units::Nanos;

use super::apply::plan_in_force;
use super::{need_root, plan, show, style, write_file};
use crate::args::{Global, ModelName, VerifyArgs};
use crate::data_guard;
use crate::model_choice::ModelChoice;
use crate::site::{self, Site};
use crate::ui::{Cancelled, Ui};

/// Exit code when a target is missed.
const MISSED: u8 = 2;
/// Exit code when none is missed but some are not proven.
const UNPROVEN: u8 = 4;

/// Runs all tasks of a site at once and judges them.
pub fn measure(
    site: &Site,
    scheme: &str,
    length: Duration,
    predicted: &[Option<Nanos>],
    global: &Global,
    ui: &Ui,
) -> anyhow::Result<Run> {
    let loads = site.loads(predicted)?;
    let _claims = data_guard::claim_targets(site, &loads, ui)?;
    let total = length.as_secs() + 1;
    let mut bar = ui.bar(&format!("running {} tasks ({scheme})", site.spec.tasks().count()), total);
    let work_dir = global.run_dir.join("fio");
    let disk = site.device.sysfs();
    let mut options = RunOptions {
        length,
        warm_up: workload::WARM_UP,
        seed: 1,
        // A lab's VMs do nothing else; beside others a probe could be in the way.
        watch: site.lab.is_some(),
        disk: Some(&disk),
        work_dir: &work_dir,
        cancel: ui.cancel_flag(),
        on_tick: &mut |elapsed| bar.set(elapsed.as_secs()),
    };
    let result = workload::run(&loads, &mut options);
    drop(bar);
    // Empty now, unless fio's files are still there after an error: then they help to find it.
    let _ = std::fs::remove_dir(&work_dir);
    match result {
        Ok((tasks, noise, disk)) => Ok(Run {
            scheme: scheme.to_owned(),
            kind: site.kind(),
            seconds: length.as_secs_f64(),
            noise,
            disk,
            tasks,
        }),
        Err(e) if e.is_cancelled() => Err(Cancelled.into()),
        Err(e) => Err(e.into()),
    }
}

/// `rtvirtio verify`.
pub fn run(args: &VerifyArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    need_root("verify")?;
    let _lock = site::lock(global)?;
    let spec = site::load_spec(&args.spec)?;
    let site = Site::find(spec, global)?;
    site.guard_data(args.destroy_data)?;
    let profile = plan::load_profile(&site.spec, None, global)
        .inspect_err(|e| ui.step(&format!("no prediction beside the measurement: {e:#}")))
        .ok();
    let in_force = plan_in_force(&global.state_dir)?;
    let name = match in_force.as_ref().map(|plan| plan.model) {
        Some(ModelKind::Analytical) => ModelName::Analytical,
        Some(ModelKind::Slice) => ModelName::Slice,
        Some(ModelKind::Mlp) => ModelName::Mlp,
        Some(ModelKind::Bound) | None => ModelName::Auto,
    };
    // A prediction beside the measurement when there is a profile; measuring does not depend on it.
    let predicted: Vec<Option<Nanos>> = profile
        .as_ref()
        .and_then(|profile| {
            let choice = ModelChoice::find(name, &site.spec, profile, global, ui).ok()?;
            plan::outlook(&site.spec, profile, &choice, &site.config().ok()?).ok()
        })
        .map_or_else(Vec::new, |tasks| tasks.iter().map(|t| Some(t.forecast.latency_ns)).collect());
    let scheme = in_force.as_ref().map_or("as-found", |plan| plan.scheme.as_str()).to_owned();
    let run = measure(&site, &scheme, Duration::from_nanos(args.length.0), &predicted, global, ui)?;
    let file = ResultFile { schema: RESULT_SCHEMA.to_owned(), host: site.facts(), runs: vec![run] };
    // Shown first: a full disk must not cost the measurement.
    show(ui, &file, || text::results(&file, &style()))?;
    if let Some(out) = &args.out {
        write_file(out, &serde_json::to_vec_pretty(&file)?)?;
    }
    if let Some(out) = &args.html {
        let report = ReportInput {
            title: "rtvirtio verify",
            result: &file,
            plan: in_force.as_ref(),
            profile: profile.as_ref(),
            notes: &[],
            generated: &generated(),
        };
        write_file(out, html(&report).as_bytes())?;
    }
    Ok(exit_code(&file.runs[0]))
}

/// The worst verdict as an exit code.
pub fn exit_code(run: &Run) -> ExitCode {
    let any = |verdict| run.tasks.iter().any(|t| t.verdict == Some(verdict));
    if any(Verdict::Missed) {
        ExitCode::from(MISSED)
    } else if any(Verdict::Unproven) {
        ExitCode::from(UNPROVEN)
    } else {
        ExitCode::SUCCESS
    }
}

/// When and by what a report is made.
pub fn generated() -> String {
    let now = jiff::Zoned::now().strftime("%Y-%m-%d %H:%M %Z");
    format!("{now}, rtvirtio {}", env!("CARGO_PKG_VERSION"))
}
