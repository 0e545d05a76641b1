//! Maps byte offsets to lines, columns and printable excerpts.

use std::ops::Range;

/// Byte range in the text of a spec.
pub(crate) type Span = Range<usize>;

/// Limit of characters of a source line in an error.
const MAX_SHOWN: usize = 120;
/// Characters shown before the marked place when the line is longer.
const LEAD: usize = 60;

/// Text with an index of its lines.
#[derive(Debug)]
pub(crate) struct Source<'a> {
    text: &'a str,
    line_starts: Vec<usize>,
}

/// Line and column, both from 1; the column counts characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    pub(crate) line: usize,
    pub(crate) column: usize,
}

/// Printable part of a source line with the columns to mark.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Excerpt {
    /// Text without tabs and control characters.
    pub(crate) text: String,
    /// Number of characters before the mark.
    pub(crate) indent: usize,
    /// Number of characters to mark; at least one.
    pub(crate) width: usize,
}

impl<'a> Source<'a> {
    pub(crate) fn new(text: &'a str) -> Self {
        let line_starts = std::iter::once(0).chain(text.match_indices('\n').map(|(i, _)| i + 1)).collect();
        Self { text, line_starts }
    }

    /// Text at `span`; empty where the span is outside.
    pub(crate) fn text(&self, span: &Span) -> &'a str {
        self.text.get(span.clone()).unwrap_or_default()
    }

    /// Number of the line that holds `offset`, from 1.
    pub(crate) fn line(&self, offset: usize) -> usize {
        self.line_starts.partition_point(|&start| start <= offset)
    }

    /// Byte range of the line that holds `offset`, without its end-of-line characters.
    fn line_at(&self, offset: usize) -> (usize, Span) {
        // Line 1 starts at 0, so there is always a line at or before the offset.
        let index = self.line(offset) - 1;
        let start = self.line_starts[index];
        let end = self.line_starts.get(index + 1).map_or(self.text.len(), |next| next - 1);
        let line = &self.text[start..end];
        (index + 1, start..start + line.strip_suffix('\r').unwrap_or(line).len())
    }

    /// Nearest character boundary at or before `offset`.
    fn floor(&self, offset: usize) -> usize {
        let mut at = offset.min(self.text.len());
        while !self.text.is_char_boundary(at) {
            at -= 1;
        }
        at
    }

    /// Line and column of a byte offset; an offset beyond the end is taken as the end.
    pub(crate) fn position(&self, offset: usize) -> Position {
        let offset = self.floor(offset);
        let (line, range) = self.line_at(offset);
        // Editors do not count a byte-order mark as a character of the first line.
        let before = self.text[range.start..offset].trim_start_matches('\u{feff}');
        Position { line, column: before.chars().count() + 1 }
    }

    /// First line of `span`, printable, marked to the end of the span or the line.
    pub(crate) fn excerpt(&self, span: &Span) -> Excerpt {
        let start = self.floor(span.start);
        let (_, range) = self.line_at(start);
        let start = start.min(range.end);
        let end = self.floor(span.end).clamp(start, range.end);
        let before = self.text[range.start..start].trim_start_matches('\u{feff}');
        let skipped = match before.chars().count() {
            long if long > LEAD && self.text[range.clone()].chars().count() > MAX_SHOWN => long - LEAD,
            _ => 0,
        };
        let mut text = String::new();
        if skipped > 0 {
            text.push_str("...");
        }
        text.extend(before.chars().skip(skipped).flat_map(shown));
        let indent = text.chars().count();
        let room = MAX_SHOWN.saturating_sub(before.chars().count() - skipped);
        let mut rest = self.text[start..range.end].chars();
        let mut marked = self.text[start..end].chars().count().min(room);
        text.extend(rest.by_ref().take(marked).flat_map(shown));
        let width = text.chars().count() - indent;
        marked = room - marked;
        text.extend(rest.by_ref().take(marked).flat_map(shown));
        if rest.next().is_some() {
            text.push_str("...");
        }
        Excerpt { text, indent, width: width.max(1) }
    }
}

/// Replaces a tab by four spaces, and characters that move the cursor or reorder text by U+FFFD.
fn shown(c: char) -> impl Iterator<Item = char> {
    let (c, n) = match c {
        '\t' => (' ', 4),
        c if is_unprintable(c) => ('\u{fffd}', 1),
        c => (c, 1),
    };
    std::iter::repeat_n(c, n)
}

/// Whether a character is a control character or changes the direction of text.
fn is_unprintable(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// Text of a file, safe for a terminal and shortened to `most` characters.
pub(crate) fn printable(text: &str, most: usize) -> String {
    let mut out: String = text.chars().take(most).flat_map(shown).collect();
    if text.chars().nth(most).is_some() {
        out.push_str("...");
    }
    out
}

/// First escape sequence that TOML decodes, such as systemd's `\x2d` for `-` in a unit's name, in
/// the source text of a basic string; and the text between the quotes. `\\` and `\"` are taken as
/// intended. A string with a single quote has no single-quoted form and is accepted as TOML reads
/// it.
pub(crate) fn decoded_escape(raw: &str) -> Option<(&str, &str)> {
    let inner = raw.strip_prefix('"')?.strip_suffix('"')?;
    if inner.contains('\'') {
        return None;
    }
    let mut rest = inner;
    while let Some(at) = rest.find('\\') {
        let escape = &rest[at..];
        match escape.chars().nth(1)? {
            c @ ('\\' | '"') => rest = &escape[1 + c.len_utf8()..],
            c => {
                let digits = match c {
                    'x' => 2,
                    'u' => 4,
                    'U' => 8,
                    _ => 0,
                };
                let end = escape.char_indices().nth(2 + digits).map_or(escape.len(), |(i, _)| i);
                return Some((&escape[..end], inner));
            }
        }
    }
    None
}

#[cfg(test)]
mod tests;
