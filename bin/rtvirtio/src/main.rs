//! The rtvirtio command line: arguments, output and wiring.

mod args;
mod cmd;

use std::process::ExitCode;

use rtvirtio_arguments::Section;
use rtvirtio_console::{Ui, finish};

use args::{Cli, Command, GROUPS};

fn main() -> ExitCode {
    let cli: Cli = match rtvirtio_arguments::parse_grouped(Section::User, GROUPS) {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    let result = Ui::new(&cli.global).and_then(|ui| run(&cli, &ui));
    // Another program may give these threads reservations at once.
    rtvirtio_kernel::sched::settle();
    finish(result, cli.global.json)
}

fn run(cli: &Cli, ui: &Ui) -> anyhow::Result<ExitCode> {
    let global = &cli.global;
    match &cli.command {
        Command::Check(args) => cmd::check::run(args, global, ui),
        Command::Discover(args) => cmd::discover::run(args, global, ui),
        Command::Profile(args) => cmd::profile::run(args, global, ui),
        Command::Predict(args) => cmd::plan::predict(args, global, ui),
        Command::Plan(args) => cmd::plan::make(args, global, ui),
        Command::Simulate(args) => cmd::simulate::run(args, global, ui),
        Command::Apply(args) => cmd::apply::apply(args, global, ui),
        Command::Ivshmem(args) => cmd::ivshmem::run(args, ui),
        Command::Measure(command) => cmd::measure::run(command, global, ui),
        Command::Keep(args) => cmd::keep::run(args, global, ui),
        Command::Starts(args) => cmd::starts::run(args, global, ui),
        Command::Contract(args) => cmd::contract::run(args, global, ui),
        Command::Top(args) => cmd::top::run(args, global, ui),
        Command::Regulator(args) => cmd::regulator::run(args, global, ui),
        Command::Status => cmd::status::status(global, ui),
        Command::Revert(args) => cmd::revert::revert(args, global, ui),
        Command::Tune(args) => cmd::tune::run(args, global, ui),
        Command::Verify(args) => cmd::verify::run(args, global, ui),
        Command::Threads(args) => cmd::threads::run(args, global, ui),
        Command::Fleet(args) => cmd::fleet::run(args, ui),
        Command::Iod(command) => cmd::iod::run(command, global, ui),
    }
}
