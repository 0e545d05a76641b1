//! `rtvirtio tune`.

use std::fmt::Write as _;
use std::process::ExitCode;

use rtvirtio_console::{Global, INFEASIBLE, Ui, exit_code, need_root, show, style, write_file};
use rtvirtio_report::{knob_name, text};
use rtvirtio_workflow::Progress;
use rtvirtio_workflow::apply::PlanWith;
use rtvirtio_workflow::check_writable;
use rtvirtio_workflow::find::load_spec;
use rtvirtio_workflow::site::Site;
use rtvirtio_workflow::tune::{Outcome, TuneOptions, Tuned, tune};

use crate::args::TuneArgs;

pub fn run(args: &TuneArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    args.out.as_deref().map_or(Ok(()), check_writable)?;
    need_root("tune")?;
    let dirs = &global.dirs();
    let _lock = dirs.lock_vms()?;
    let spec = load_spec(&args.spec)?;
    anyhow::ensure!(
        spec.tasks().any(|(_, t)| !t.targets.is_empty()),
        "{}: no task has a target, so there is nothing to tune for",
        args.spec.display()
    );
    let mut site = Site::find(spec, dirs)?;
    site.preload = args.fio_preload;
    site.load_bfq(ui);
    site.guard_data(args.destroy_data)?;
    let options = TuneOptions {
        spec_file: &args.spec,
        budget: args.budget,
        length: args.length,
        trials: args.trials,
        put_back: args.put_back,
        compromise: args.compromise,
        with: PlanWith {
            profile: args.profile.as_deref(),
            model: args.model.into(),
            enough: args.margin.enough(),
        },
        knob_name: &knob_name,
    };
    match tune(&site, &options, dirs, ui)? {
        Tuned::TooMuch { given_up } => {
            let names = if given_up.is_empty() { "no VM".to_owned() } else { given_up.join(", ") };
            ui.warn(&format!(
                "not tuned: the device cannot carry all declared rates. Lower them, move a VM away, or tune with --compromise ({names} given up for the others)"
            ));
            Ok(ExitCode::from(INFEASIBLE))
        }
        Tuned::Done(outcome) => finish(args, &site, &outcome, ui),
    }
}

fn finish(args: &TuneArgs, site: &Site, outcome: &Outcome, ui: &Ui) -> anyhow::Result<ExitCode> {
    show(ui, outcome, || {
        let mut s = text::results(&outcome.result, &style());
        let _ = writeln!(
            s,
            "\n{} trials; {}",
            outcome.trials.len(),
            match (outcome.in_force, outcome.missed()) {
                (true, _) if !outcome.given_up.is_empty() => format!(
                    "the settings are in force, with {} given up: put them back with `rtvirtio revert`",
                    outcome.given_up.join(", ")
                ),
                (true, _) => "the settings are in force: put them back with `rtvirtio revert`".to_owned(),
                (false, 0) => "the settings are put back".to_owned(),
                (false, n) => format!(
                    "{n} targets of {} are still missed, so nothing was left in force",
                    site.spec.goals().filter(|(.., target)| target.is_some()).count()
                ),
            }
        );
        s
    })?;
    // Written last: a full disk must not cost the result or the report of settings in force.
    if let Some(out) = &args.out {
        write_file(out, &serde_json::to_vec_pretty(&outcome.plan)?)?;
    }
    Ok(exit_code(&outcome.counted()))
}
