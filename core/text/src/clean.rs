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
}
