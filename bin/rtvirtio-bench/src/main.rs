//! The experiments' command line: arguments, output and wiring.

mod args;
mod cmd;

use std::process::ExitCode;

use rtvirtio_arguments::Section;
use rtvirtio_console::{Ui, finish};

fn main() -> ExitCode {
    let cli: args::Cli = match rtvirtio_arguments::parse(Section::User) {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    let result = Ui::new(&cli.global).and_then(|ui| cmd::run(&cli.command, &cli.global, &ui));
    finish(result, cli.global.json)
}
