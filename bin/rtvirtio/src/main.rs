//! The rtvirtio command line: arguments, output and wiring.

mod args;
mod cmd;
mod contracts;
mod cpu_plan;
mod data_guard;
mod elevator;
mod guest_point;
mod guests;
mod model_choice;
mod site;
mod ui;
mod vm_threads;

use std::process::ExitCode;

use clap::Parser;

use args::{Cli, Command};
use ui::{Cancelled, Ui};

/// Exit code after Ctrl-C, as shells give it for SIGINT.
const INTERRUPTED: u8 = 130;

/// Characters of an error that are shown: a guest's program may say megabytes.
const LONGEST_ERROR: usize = 4000;

fn main() -> ExitCode {
    let cli = Cli::parse();
    if let Command::TwinServe(args) = &cli.command {
        // It has its own way to end, so it must not share the signal handling below.
        return finish(serve_twin(args), cli.global.json);
    }
    let result = Ui::new(&cli.global).and_then(|ui| run(&cli, &ui));
    finish(result, cli.global.json)
}

fn run(cli: &Cli, ui: &Ui) -> anyhow::Result<ExitCode> {
    let global = &cli.global;
    match &cli.command {
        Command::Check(args) => cmd::check::run(args, global, ui),
        Command::Profile(args) => cmd::profile::run(args, global, ui),
        Command::Predict(args) => cmd::plan::predict(args, global, ui),
        Command::Plan(args) => cmd::plan::make(args, global, ui),
        Command::Simulate(args) => cmd::simulate::run(args, global, ui),
        Command::Apply(args) => cmd::apply::apply(args, global, ui),
        Command::Keep(args) => cmd::keep::run(args, global, ui),
        Command::Status => cmd::status::status(global, ui),
        Command::Revert(args) => cmd::revert::revert(args, global, ui),
        Command::Tune(args) => cmd::tune::run(args, global, ui),
        Command::Verify(args) => cmd::verify::run(args, global, ui),
        Command::Threads(args) => cmd::threads::run(args, global, ui),
        Command::Lab(command) => cmd::lab::run(command, global, ui),
        Command::Demo(args) => cmd::demo::run(args, global, ui),
        Command::Bench(command) => cmd::bench::run(command, global, ui),
        Command::Iod(command) => cmd::iod::run(command, global, ui),
        Command::TwinServe(args) => serve_twin(args),
    }
}

fn serve_twin(args: &args::TwinServeArgs) -> anyhow::Result<ExitCode> {
    rtvirtio_testbed::twin::serve(&rtvirtio_testbed::twin::ServeConfig {
        profile: args.profile.clone(),
        size: args.size,
        seed: args.seed,
        mount: args.mount.clone(),
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Errors go to standard error: the spec's as they are (they hold lines of the file), others on one line; as JSON when asked.
fn finish(result: anyhow::Result<ExitCode>, json: bool) -> ExitCode {
    let error = match result {
        Ok(code) => return code,
        Err(error) => error,
    };
    if error.is::<Cancelled>() {
        eprintln!("rtvirtio: {error}");
        return ExitCode::from(INTERRUPTED);
    }
    match error.downcast_ref::<rtvirtio_spec::SpecErrors>() {
        Some(errors) if json => {
            if let Ok(text) = serde_json::to_string_pretty(&serde_json::json!({ "errors": errors })) {
                println!("{text}");
            }
        }
        Some(errors) => eprint!("{errors}"),
        None => {
            // An error may hold what a guest said: bytes that must not reach the terminal as they are.
            let text: String = format!("{error:#}").chars().take(LONGEST_ERROR).collect();
            eprintln!("rtvirtio: {}", rtvirtio_report::terminal(&text, false));
            // Commands to be copied, line by line; it prints no control characters.
            let readable =
                error.chain().find_map(|e| e.downcast_ref::<rtvirtio_apply::ApplyError>()?.readable());
            if let Some(readable) = readable {
                eprintln!("{readable}");
            }
            if json {
                println!("{}", serde_json::json!({ "error": format!("{error:#}"), "journal": readable }));
            }
        }
    }
    ExitCode::FAILURE
}
