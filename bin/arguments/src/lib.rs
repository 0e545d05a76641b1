//! Command line of the programs: parsing, with a separate exit code for mistakes; the manual; and
//! printing.

mod groups;
mod manual;
mod output;

use std::process::ExitCode;

use clap::{Command, Parser};

pub use groups::Group;
pub use manual::{Section, write_manual};
pub use output::{print, print_error};

/// Exit code of a mistake in the command line, as `EX_USAGE` of sysexits.h.
pub const USAGE: u8 = 64;

/// Parses the command line of a program whose manual is in this section. Actions in place of the
/// program, such as printing the help, are done here.
///
/// # Errors
/// The exit code: 0 after `--help`, `--version` and the manual, [`USAGE`] for a mistake.
pub fn parse<C: Parser>(section: Section) -> Result<C, ExitCode> {
    parse_command(C::command(), section)
}

/// Parses as [`parse`] does, for a program whose help lists its commands under headings.
pub fn parse_grouped<C: Parser>(section: Section, groups: &[Group]) -> Result<C, ExitCode> {
    parse_command(groups::grouped(C::command(), groups), section)
}

fn parse_command<C: Parser>(mut command: Command, section: Section) -> Result<C, ExitCode> {
    if let Some(written) = manual::requested(&command, section, std::env::args_os()) {
        return Err(written.map_or_else(
            |e| {
                print_error(&format!("the manual is not written: {e}"));
                ExitCode::FAILURE
            },
            |()| ExitCode::SUCCESS,
        ));
    }
    let matches = command.try_get_matches_from_mut(std::env::args_os());
    let parsed = matches.and_then(|mut matches| C::from_arg_matches_mut(&mut matches));
    parsed.map_err(|error| {
        let error = error.format(&mut command);
        // The exit code is the same if standard output is closed.
        let _ = error.print();
        if error.use_stderr() { ExitCode::from(USAGE) } else { ExitCode::SUCCESS }
    })
}
