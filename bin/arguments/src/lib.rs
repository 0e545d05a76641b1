//! The command line of every program: read, with an exit code of its own for mistakes in it; its
//! manual; and what it prints.

mod manual;
mod output;

use std::process::ExitCode;

use clap::Parser;

pub use manual::{Section, write_manual};
pub use output::{print, print_error};

/// Exit code of a mistake in the command line, as `EX_USAGE` of sysexits.h.
pub const USAGE: u8 = 64;

/// Reads the command line of a program whose manual is in this section. What is to be done instead
/// of running the program, as printing the help, is done here.
///
/// # Errors
/// The exit code: 0 after `--help`, `--version` and the manual, [`USAGE`] for a mistake.
pub fn parse<C: Parser>(section: Section) -> Result<C, ExitCode> {
    if let Some(written) = manual::requested(C::command(), section, std::env::args_os()) {
        return Err(written.map_or_else(
            |e| {
                print_error(&format!("the manual is not written: {e}"));
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
