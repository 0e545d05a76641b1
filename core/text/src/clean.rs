//! Foreign text for a terminal and for XML.

/// Stands in for a character that must not be passed on.
const REPLACEMENT: char = '\u{FFFD}';

/// Whether a character could move the cursor, start an escape sequence, or reorder the text around
/// it.
///
/// Besides Unicode's control characters these are the explicit direction marks (Unicode Standard
/// Annex 9) and the two non-characters that XML 1.0 does not allow.
fn unsafe_char(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200E}' | '\u{200F}' | '\u{061C}' | '\u{2028}' | '\u{2029}')
        || matches!(c, '\u{202A}'..='\u{202E}' | '\u{2066}'..='\u{2069}' | '\u{FFFE}' | '\u{FFFF}')
}

/// Text for a terminal: one line, no escape sequences; with `ascii` every other character becomes
/// `?`.
#[must_use]
pub fn terminal(s: &str, ascii: bool) -> String {
    s.chars()
        .map(|c| match c {
            '\n' | '\t' | '\u{00A0}' | '\u{202F}' => ' ',
            c if ascii && (unsafe_char(c) || !c.is_ascii()) => '?',
            c if unsafe_char(c) => REPLACEMENT,
            c => c,
        })
        .collect()
}

/// Text of several lines for a terminal, of which parts may not have passed through [`terminal`]:
/// of escape sequences only colours stay, as the report writes them (`ESC [ NUMBERS m`).
#[must_use]
pub fn terminal_lines(s: &str) -> String {
    let mut out = String::with_capacity(s.len());
    let mut rest = s;
    while let Some(c) = rest.chars().next() {
        let (taken, left) = rest.split_at(colour(rest).unwrap_or(c.len_utf8()));
        let stays = taken.len() > c.len_utf8() || matches!(c, '\n' | '\t') || rest.starts_with("\r\n");
        if !stays && unsafe_char(c) {
            out.push(REPLACEMENT);
        } else {
            out.push_str(taken);
        }
        rest = left;
    }
    out
}

/// Length of the escape sequence of a colour at the begin of a text.
fn colour(text: &str) -> Option<usize> {
    let numbers = text.strip_prefix("\x1b[")?;
    let end = numbers.find(|c: char| !c.is_ascii_digit() && c != ';')?;
    numbers[end..].starts_with('m').then_some("\x1b[".len() + end + 1)
}

/// Text for XML and HTML, in element content and in double- or single-quoted attributes.
#[must_use]
pub fn xml(s: &str) -> String {
    let mut out = String::with_capacity(s.len() + 8);
    for c in s.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\n' | '\t' => out.push(' '),
            c if unsafe_char(c) => out.push(REPLACEMENT),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markup_is_escaped() {
        assert_eq!(xml("<b a='x' c=\"y\">&</b>"), "&lt;b a=&#39;x&#39; c=&quot;y&quot;&gt;&amp;&lt;/b&gt;");
    }

    #[test]
    fn control_and_direction_characters_do_not_pass() {
        assert_eq!(terminal("a\u{1b}[31mb\r\u{202e}c", false), "a\u{FFFD}[31mb\u{FFFD}\u{FFFD}c");
        assert_eq!(terminal("a\u{1b}é\n", true), "a?? ");
        assert_eq!(xml("a\u{0}\u{1b}\u{2066}b\nc"), "a\u{FFFD}\u{FFFD}\u{FFFD}b c");
    }

    #[test]
    fn of_several_lines_colours_stay_and_nothing_else_that_moves_the_cursor() {
        let table = "\u{1b}[1;31mmissed\u{1b}[0m  a\té\n\u{2500}\r\n";
        assert_eq!(terminal_lines(table), table);
        let hostile = "\u{1b}[2J\u{1b}]0;t\u{7}\u{1b}[31\u{1b}c\r\u{9b}m\u{202e}";
        assert_eq!(
            terminal_lines(hostile),
            "\u{FFFD}[2J\u{FFFD}]0;t\u{FFFD}\u{FFFD}[31\u{FFFD}c\u{FFFD}\u{FFFD}m\u{FFFD}"
        );
        assert_eq!(terminal_lines("\u{1b}["), "\u{FFFD}[");
    }
}
