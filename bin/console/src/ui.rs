//! Progress on a terminal, and Ctrl-C.

use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use rtvirtio_report::{terminal, terminal_lines};
use rtvirtio_workflow::Progress;

use crate::Global;

/// Progress on standard error: a bar on a terminal, plain lines elsewhere, nothing when quiet.
#[derive(Clone)]
pub struct Ui {
    /// Results go to standard output as JSON.
    pub json: bool,
    quiet: bool,
    tty: bool,
    cancelled: Arc<AtomicBool>,
}

impl Ui {
    /// Also handles SIGINT, SIGTERM and SIGHUP: from now on they set a flag that long operations
    /// check, so that all changes are put back.
    pub fn new(global: &Global) -> anyhow::Result<Self> {
        let cancelled = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, Arc::clone(&cancelled))?;
        }
        let tty = std::io::stderr().is_terminal();
        Ok(Self { json: global.json, quiet: global.quiet, tty, cancelled })
    }
}

impl Progress for Ui {
    fn step(&self, text: &str) {
        if !self.quiet {
            // A closed standard error must not stop the work.
            let _ = writeln!(std::io::stderr(), "rtvirtio: {}", terminal_lines(text));
        }
    }

    fn warn(&self, text: &str) {
        let _ = writeln!(std::io::stderr(), "{}", warning(text));
    }

    fn bar(&self, label: &str, total: u64) -> Box<dyn rtvirtio_workflow::Bar> {
        let bar = if self.quiet || !self.tty {
            ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::hidden())
        } else {
            ProgressBar::new(total)
        };
        if let Ok(style) = ProgressStyle::with_template("  {msg:<44} [{bar:30}] {percent:>3}% {eta} left") {
            bar.set_style(style.progress_chars("=> "));
        }
        let label = terminal(label, false);
        bar.set_message(label.clone());
        bar.enable_steady_tick(Duration::from_millis(500));
        let plain = !self.quiet && !self.tty;
        if plain {
            self.step(&format!("{label} ..."));
        }
        Box::new(Bar { bar, total, plain, shown: 0, ui: self.clone(), label })
    }

    fn cancel_flag(&self) -> &AtomicBool {
        &self.cancelled
    }
}

/// Line of a warning, which may name what QEMU, a guest or another user has named.
fn warning(text: &str) -> String {
    format!("rtvirtio: {}", terminal(text, false))
}

/// A progress bar; without a terminal a line every quarter.
struct Bar {
    bar: ProgressBar,
    total: u64,
    plain: bool,
    shown: u64,
    ui: Ui,
    label: String,
}

impl rtvirtio_workflow::Bar for Bar {
    fn set(&mut self, done: u64) {
        self.bar.set_position(done.min(self.total));
        let quarter = done * 4 / self.total.max(1);
        if self.plain && quarter > self.shown && quarter < 4 {
            self.shown = quarter;
            self.ui.step(&format!("{} {}%", self.label, quarter * 25));
        }
    }

    fn set_message(&mut self, text: &str) {
        self.bar.set_message(terminal(text, false));
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warning_is_one_line_without_control_characters() {
        let line = warning("a: \u{1b}]0;t\u{7}x\nrtvirtio: y");
        assert_eq!(line, "rtvirtio: a: \u{FFFD}]0;t\u{FFFD}x rtvirtio: y");
    }
}
