//! `rtvirtio verify`.

use std::process::ExitCode;
use std::time::Duration;

use rtvirtio_console::{Global, Ui, exit_code, generated, need_root, show, style, write_file};
use rtvirtio_measure::{RESULT_SCHEMA, ResultFile};
use rtvirtio_model::ModelKind;
use rtvirtio_report::{ReportInput, html, text};
use rtvirtio_units::Nanos;
use rtvirtio_workflow::check_writable;
use rtvirtio_workflow::find::load_spec;
use rtvirtio_workflow::model_choice::{ModelChoice, ModelName};
use rtvirtio_workflow::plan::{load_profile, outlook};
use rtvirtio_workflow::run::measure;
use rtvirtio_workflow::site::Site;
use rtvirtio_workflow::{Progress, in_force, started};

use crate::args::VerifyArgs;

/// `rtvirtio verify`.
pub fn run(args: &VerifyArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    [&args.out, &args.html].into_iter().flatten().try_for_each(|path| check_writable(path))?;
    need_root("verify")?;
    let dirs = &global.dirs();
    let _lock = dirs.lock_vms()?;
    let site = Site::find(load_spec(&args.spec)?, dirs)?;
    site.warn_without_agent(ui);
    site.guard_data(args.destroy_data)?;
    let none = |e: &rtvirtio_workflow::Error| {
        ui.step(&format!("no prediction next to the measurement: {e:#}"));
    };
    let profile = load_profile(&site.spec, None, dirs).inspect_err(none).ok();
    let in_force = in_force::plan(&dirs.state)?;
    // What is measured is the start that runs now, under the settings that it has.
    started::ended(&dirs.state)?.iter().for_each(|vm| ui.warn(&vm.words()));
    let name = match in_force.as_ref().map(|plan| plan.model) {
        Some(ModelKind::Analytical) => ModelName::Analytical,
        Some(ModelKind::Slice) => ModelName::Slice,
        Some(ModelKind::Mlp) => ModelName::Mlp,
        Some(ModelKind::Bound) | None => ModelName::Auto,
    };
    // A prediction next to the measurement when there is a profile; measuring does not depend on
    // it.
    let survey = site.survey(ui)?;
    site.bypassed(&survey.controls).iter().for_each(|control| ui.warn(&control.to_string()));
    let predicted: Vec<Option<Nanos>> = profile
        .as_ref()
        .and_then(|profile| {
            let choice = ModelChoice::find(name, &site.spec, profile, dirs, ui).ok()?;
            let (config, placements) = (&survey.config, &survey.controls.placements);
            outlook(&site.spec, profile, &choice, config, placements).inspect_err(none).ok()
        })
        .map_or_else(Vec::new, |tasks| tasks.iter().map(|t| Some(t.forecast.latency_ns)).collect());
    let scheme = in_force.as_ref().map_or("as-found", |plan| plan.scheme.as_str()).to_owned();
    let run = measure(&site, &scheme, Duration::from_nanos(args.length.0), &predicted, dirs, ui)?;
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
