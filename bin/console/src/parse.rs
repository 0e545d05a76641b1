//! The command line read, with an exit code of its own for mistakes in it.

use std::process::ExitCode;

use clap::Parser;

use crate::USAGE;

/// Reads the command line. What is to be printed instead of running a command, as the help, is
/// printed here.
///
/// # Errors
/// The exit code: 0 after `--help` and `--version`, [`USAGE`] for a mistake.
pub fn parse<C: Parser>() -> Result<C, ExitCode> {
    C::try_parse().map_err(|error| {
        // A closed output is no reason for another code.
        let _ = error.print();
        if error.use_stderr() { ExitCode::from(USAGE) } else { ExitCode::SUCCESS }
    })
}
