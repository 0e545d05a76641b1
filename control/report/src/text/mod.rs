//! Tables and bars for a terminal.
//!
//! Verdicts are always words; colour only emphasises them, and only on request. Lines keep to
//! [`Style::width`] columns by shortening names in their middle; numbers are never cut.

mod domain;
mod forecast;
mod plan;
mod profile;
mod results;
mod table;

pub use domain::{domain_plan, domain_refusals};
pub use forecast::forecast;
pub use plan::{notes, plan};
pub use profile::profile;
pub use results::{before_after, compare, results, run};
pub use table::{Align, Cell, Column, Table};

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// Colour, character set and width of text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Style {
    /// ANSI colours, chosen by the caller from the terminal and `NO_COLOR`.
    pub colour: bool,
    /// Only ASCII characters, for terminals and logs without Unicode.
    pub ascii: bool,
    /// Columns of a line.
    pub width: usize,
}

impl Default for Style {
    /// No colour, Unicode, 100 columns.
    fn default() -> Self {
        Self { colour: false, ascii: false, width: 100 }
    }
}

/// Colour of a piece of text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Paint {
    /// Green, for `met` and the like.
    Good,
    /// Bold red, for failures.
    Bad,
    /// Yellow, for undecided results.
    Open,
    /// Bold, for headings.
    Strong,
}

impl Style {
    /// Text in the colour of `paint`, if colours are enabled.
    #[must_use]
    pub fn paint(&self, text: &str, paint: Paint) -> String {
        if !self.colour || text.is_empty() {
            return text.to_owned();
        }
        let code = match paint {
            Paint::Good => "32",
            Paint::Bad => "1;31",
            Paint::Open => "33",
            Paint::Strong => "1",
        };
        format!("\x1b[{code}m{text}\x1b[0m")
    }

    /// Foreign text without characters that control the terminal.
    pub(crate) fn clean(&self, s: &str) -> String {
        rtvirtio_text::terminal(s, self.ascii)
    }

    /// Bold text, cleaned and wrapped.
    pub(crate) fn heading(&self, s: &str) -> String {
        self.wrap(s, 0).lines().map(|l| format!("{}\n", self.paint(l, Paint::Strong))).collect()
    }

    /// A horizontal bar of `share` (0 to 1) of `width` columns, padded to the full width.
    #[must_use]
    pub fn bar(&self, share: f64, width: usize) -> String {
        let share = if share.is_finite() { share.clamp(0.0, 1.0) } else { 0.0 };
        let mut out = String::new();
        if self.ascii {
            out.push_str(&"#".repeat((share * width as f64).round() as usize));
        } else {
            let eighths = (share * width as f64 * 8.0).round() as usize;
            out.push_str(&"█".repeat(eighths / 8));
            out.extend(['▏', '▎', '▍', '▌', '▋', '▊', '▉'].get((eighths % 8).wrapping_sub(1)));
        }
        let pad = width.saturating_sub(out.chars().count());
        out + &" ".repeat(pad)
    }

    /// Wraps `text` into lines, each with `indent` spaces before it and a newline after it.
    pub fn wrap(&self, text: &str, indent: usize) -> String {
        let room = self.width.saturating_sub(indent).max(20);
        let (mut out, mut line) = (String::new(), String::new());
        for word in self.clean(text).split_whitespace() {
            if !line.is_empty() && line.width() + 1 + word.width() > room {
                out.push_str(&format!("{:indent$}{line}\n", ""));
                line.clear();
            }
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
        if !line.is_empty() {
            out.push_str(&format!("{:indent$}{line}\n", ""));
        }
        out
    }

    /// Text shortened in its middle to at most `room` columns. Both ends are kept: names with a
    /// common prefix differ at their end, and vice versa.
    pub(crate) fn shorten(&self, s: &str, room: usize) -> String {
        if s.width() <= room {
            return s.to_owned();
        }
        let mark = if self.ascii { ".." } else { "…" };
        let Some(keep) = room.checked_sub(mark.width()).filter(|&k| k > 0) else {
            return mark.chars().take(room).collect();
        };
        let head = take_width(s.chars(), keep / 2);
        let tail: String = take_width(s.chars().rev(), keep - keep / 2).chars().rev().collect();
        format!("{head}{mark}{tail}")
    }
}

/// The longest prefix that is at most `room` columns wide.
fn take_width(chars: impl Iterator<Item = char>, room: usize) -> String {
    let mut used = 0;
    chars
        .take_while(|c| {
            used += c.width().unwrap_or(0);
            used <= room
        })
        .collect()
}

#[cfg(test)]
mod tests;
