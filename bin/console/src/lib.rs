//! Parts that the programs share: global options, progress on standard error, results on standard
//! output, exit codes.

mod files;
mod global;
mod output;
mod saved;
mod ui;

use std::process::ExitCode;

pub use files::write_result;
pub use global::{ExplainingParser, Global, MarginArg, ModelArg};
pub use output::{finish, show, style};
pub use rtvirtio_arguments::print;
pub use saved::{save_model, save_profile};
pub use ui::Ui;

pub use rtvirtio_workflow::{generated, write_file};

/// Exit code when a target was missed.
pub const MISSED: u8 = 2;
/// Exit code when a target cannot be met, or more is asked for than is available.
pub const INFEASIBLE: u8 = MISSED;
/// Exit code when a setting is not as applied, or was not put back.
pub const CONFLICT: u8 = 3;
/// Exit code when no target is missed but some are not proven.
pub const UNPROVEN: u8 = 4;
/// Exit code after Ctrl-C, as of shells for SIGINT.
pub const INTERRUPTED: u8 = 130;

/// Returns an error of one line when not root.
///
/// # Errors
/// A user other than root; the error names the command.
pub fn need_root(what: &str) -> anyhow::Result<()> {
    if rustix::process::geteuid().is_root() {
        Ok(())
    } else {
        anyhow::bail!("{what} needs root: run it with sudo")
    }
}

/// Exit code of the worst verdict of a run.
#[must_use]
pub fn exit_code(run: &rtvirtio_measure::Run) -> ExitCode {
    use rtvirtio_measure::Verdict;
    let any = |verdict| run.tasks.iter().any(|t| t.verdict == Some(verdict));
    if any(Verdict::Missed) {
        ExitCode::from(MISSED)
    } else if any(Verdict::Unproven) {
        ExitCode::from(UNPROVEN)
    } else {
        ExitCode::SUCCESS
    }
}
