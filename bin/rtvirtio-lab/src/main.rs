//! The laboratory's command line: arguments, output and wiring.

mod args;
mod cmd;

use std::process::ExitCode;

use rtvirtio_arguments::Section;
use rtvirtio_console::{Ui, finish};

use args::{Cli, Command};

fn main() -> ExitCode {
    let cli: Cli = match rtvirtio_arguments::parse(Section::User) {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    if let Command::TwinServe(args) = &cli.command {
        // The twin's server handles its own end, so the signal handlers below are not installed.
        return finish(serve_twin(args), cli.global.json);
    }
    let result = Ui::new(&cli.global).and_then(|ui| run(&cli, &ui));
    finish(result, cli.global.json)
}

fn run(cli: &Cli, ui: &Ui) -> anyhow::Result<ExitCode> {
    let global = &cli.global;
    match &cli.command {
        Command::Demo(args) => cmd::demo::run(args, global, ui),
        Command::Up(args) => cmd::lab::up_command(args, global, ui),
        Command::Run(args) => cmd::lab::run_command(args, global, ui),
        Command::Down => cmd::lab::down(global, ui),
        Command::Status => cmd::lab::status(global, ui),
        Command::Profile(args) => cmd::profile::run(args, global, ui),
        Command::Kvm => cmd::kvm::run(global, ui),
        Command::Box(args) => cmd::boxed::run(args, global, ui),
        Command::TwinServe(args) => serve_twin(args),
    }
}

fn serve_twin(args: &args::TwinServeArgs) -> anyhow::Result<ExitCode> {
    rtvirtio_testbed::twin::serve(&rtvirtio_testbed::twin::ServeConfig {
        profile: args.profile.clone(),
        size: args.size,
        seed: args.seed,
        mount: args.mount.clone(),
        slow_by: args.slow_by,
    })?;
    Ok(ExitCode::SUCCESS)
}
