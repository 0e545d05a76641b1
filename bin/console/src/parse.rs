//! The command line read, with an exit code of its own for mistakes in it.

use std::process::ExitCode;

use clap::Parser;

use crate::USAGE;

/// Reads the command line of a program whose manual is in this section. What is to be done instead
/// of running a command, as printing the help, is done here.
///
/// # Errors
/// The exit code: 0 after `--help` and `--version`, [`USAGE`] for a mistake.
pub fn parse<C: Parser>(section: &str) -> Result<C, ExitCode> {
    if let Some(written) = rtvirtio_manual::requested(C::command(), section, std::env::args_os()) {
        return Err(written.map_or_else(
            |e| {
                eprintln!("the manual is not written: {e}");
                ExitCode::FAILURE
            },
            |()| ExitCode::SUCCESS,
        ));
    }
    C::try_parse().map_err(|error| {
        // A closed output is no reason for another code.
        let _ = error.print();
        if error.use_stderr() { ExitCode::from(USAGE) } else { ExitCode::SUCCESS }
    })
}
