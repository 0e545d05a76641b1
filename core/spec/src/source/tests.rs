use super::*;

fn mark(text: &str, span: Span) -> String {
    let e = Source::new(text).excerpt(&span);
    format!("{}\n{}{}", e.text, " ".repeat(e.indent), "^".repeat(e.width))
}

#[test]
fn columns_count_characters() {
    let source = Source::new("a = 1\nné = \"x\"\n");
    assert_eq!(source.position(0), Position { line: 1, column: 1 });
    assert_eq!(source.position(6), Position { line: 2, column: 1 });
    // The value starts at byte 12: `n`, two bytes of `é`, ` = `.
    assert_eq!(source.position(12), Position { line: 2, column: 6 });
    // Inside a character, beyond the end: never a panic.
    assert_eq!(source.position(8), Position { line: 2, column: 2 });
    assert_eq!(source.position(999), Position { line: 3, column: 1 });
    assert_eq!(Source::new("").position(0), Position { line: 1, column: 1 });
}

#[test]
fn carriage_return_and_byte_order_mark_are_not_shown() {
    let source = Source::new("\u{feff}ab\r\ncd\r\n");
    assert_eq!(source.position(4), Position { line: 1, column: 2 });
    assert_eq!(mark("\u{feff}ab\r\ncd\r\n", 4..5), "ab\n ^");
    assert_eq!(mark("\u{feff}ab\r\ncd\r\n", 7..9), "cd\n^^");
}

#[test]
fn a_mark_stays_on_its_line() {
    assert_eq!(mark("ab\ncd", 1..4), "ab\n ^");
    assert_eq!(mark("ab\ncd", 2..2), "ab\n  ^");
    assert_eq!(mark("ab\n", 3..3), "\n^");
}

#[test]
fn tabs_and_control_characters_keep_the_mark_in_place() {
    assert_eq!(mark("\tx = 1", 1..2), "    x = 1\n    ^");
    assert_eq!(mark("\u{1b}[2Jx\u{202e}y", 4..5), "\u{fffd}[2Jx\u{fffd}y\n    ^");
}

#[test]
fn a_long_line_is_cut_around_the_mark() {
    let text = format!("{}KEY{}", "a".repeat(500), "b".repeat(500));
    let e = Source::new(&text).excerpt(&(500..503));
    assert_eq!(e.text, format!("...{}KEY{}...", "a".repeat(60), "b".repeat(57)));
    assert_eq!((e.indent, e.width), (63, 3));
    let e = Source::new(&text).excerpt(&(0..1003));
    assert_eq!((e.text.chars().count(), e.indent, e.width), (123, 0, 120));
}
