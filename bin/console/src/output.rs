//! Results and errors on a terminal, in a pipe, as JSON.

use std::io::{self, IsTerminal as _};
use std::process::ExitCode;

use rtvirtio_arguments::{print, print_error};
use rtvirtio_report::text::Style;
use rtvirtio_report::{terminal, terminal_lines};
use rtvirtio_workflow::{Kind, one_line};
use serde::Serialize;

use crate::{INTERRUPTED, Ui};

/// Limit of characters of a printed error: a guest's program may print megabytes.
const LONGEST_ERROR: usize = 4000;

/// Colour, character set and width for standard output.
#[must_use]
pub fn style() -> Style {
    let tty = io::stdout().is_terminal();
    let width = if tty { terminal_width() } else { 100 };
    let utf8 = ["LC_ALL", "LC_CTYPE", "LANG"]
        .iter()
        .find_map(|name| std::env::var(name).ok().filter(|v| !v.is_empty()))
        .is_none_or(|v| v.to_ascii_lowercase().contains("utf"));
    Style { colour: tty && std::env::var_os("NO_COLOR").is_none(), ascii: !utf8, width }
}

fn terminal_width() -> usize {
    rustix::termios::tcgetwinsize(io::stdout()).map_or(100, |size| usize::from(size.ws_col).clamp(80, 160))
}

/// Prints the result: JSON when asked, else the text, of which no name from elsewhere reaches the
/// terminal with control characters.
pub fn show<T: Serialize>(ui: &Ui, value: &T, text: impl FnOnce() -> String) -> anyhow::Result<()> {
    let out = if ui.json { serde_json::to_string_pretty(value)? + "\n" } else { terminal_lines(&text()) };
    Ok(print(&out)?)
}

/// Exit code of a program. Errors go to standard error: the spec's unchanged (they hold lines of
/// the file), others on one line; as JSON when asked.
#[must_use]
pub fn finish(result: anyhow::Result<ExitCode>, json: bool) -> ExitCode {
    let error = match result {
        Ok(code) => return code,
        Err(error) => error,
    };
    let step = error.downcast_ref::<rtvirtio_workflow::Error>();
    if step.is_some_and(|e| e.kind() == Kind::Cancelled) {
        print_error(&format!("rtvirtio: {}", terminal(&error.to_string(), false)));
        return ExitCode::from(INTERRUPTED);
    }
    let spec = error.downcast_ref().or_else(|| step?.cause::<rtvirtio_spec::SpecErrors>());
    match spec {
        Some(errors) if json => {
            if let Ok(text) = serde_json::to_string_pretty(&serde_json::json!({ "errors": errors })) {
                // If printing fails, the exit code still reports the error.
                let _ = print(&(text + "\n"));
            }
        }
        Some(errors) => print_error(&errors.to_string()),
        None => {
            // An error may contain output of a guest, whose control bytes must not reach the
            // terminal.
            let whole = one_line(error.as_ref());
            let text: String = whole.chars().take(LONGEST_ERROR).collect();
            print_error(&format!("rtvirtio: {}", terminal(&text, false)));
            // Commands to be copied, line by line; the error has no control characters.
            let of_step = step.and_then(|e| e.cause::<rtvirtio_apply::ApplyError>());
            let readable = error
                .chain()
                .find_map(|e| e.downcast_ref::<rtvirtio_apply::ApplyError>())
                .or(of_step)
                .and_then(rtvirtio_apply::ApplyError::readable);
            if let Some(readable) = readable {
                print_error(&readable.to_string());
            }
            if json {
                let _ = print(&format!("{}\n", serde_json::json!({ "error": whole, "journal": readable })));
            }
        }
    }
    ExitCode::FAILURE
}
