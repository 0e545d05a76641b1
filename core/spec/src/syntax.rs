//! Invalid TOML: explains the parser's error for a spec.

use toml::de::Error;

use crate::error::Report;
use crate::source::printable;

/// Reports the syntax error of a file.
pub(crate) fn report(report: &mut Report<'_>, text: &str, error: &Error) {
    let span = error.span().unwrap_or(0..0);
    let marked = text.get(span.clone()).unwrap_or("");
    let (message, help) = match error.message() {
        "duplicate key" => duplicate(text, span.start, marked),
        m if m.starts_with("string values must be quoted") => unquoted(marked),
        m if m.starts_with("cannot recurse further") => (
            "too many levels of nesting".to_owned(),
            "a spec has three: [[vm]], [[vm.task]] and target; remove the inner ones".to_owned(),
        ),
        m if m.starts_with("key with no value") => {
            ("a key has no value".to_owned(), "write key = value on one line, such as depth = 1".to_owned())
        }
        m if m.starts_with("invalid basic string, expected `\"`") => {
            ("the text has no closing quote".to_owned(), "end the value with \" on the same line".to_owned())
        }
        _ if marked.starts_with(char::is_control) => (
            "a control character stands in the text".to_owned(),
            "remove it; a spec is plain text".to_owned(),
        ),
        m => (
            format!("not valid TOML: {m}"),
            "a line is key = value, [device], [[vm]] or [[vm.task]]".to_owned(),
        ),
    };
    report.add(span, message, help);
}

/// Error for a value that is neither number, boolean nor quoted text.
fn unquoted(marked: &str) -> (String, String) {
    let value = marked.trim();
    if value.is_empty() {
        return ("a value is missing".to_owned(), "write it after the `=`, such as depth = 1".to_owned());
    }
    // Only a simple word can be quoted unchanged.
    let plain = |c: char| c.is_alphanumeric() || " ./%_-".contains(c);
    let help = if value.len() <= 60 && value.chars().all(plain) {
        format!("text and numbers with a unit stand in quotes: \"{value}\"")
    } else {
        "text and numbers with a unit stand in quotes".to_owned()
    };
    (format!("the value {} is not quoted", printable(value, 60)), help)
}

/// Error for a key or table that occurs twice.
fn duplicate(text: &str, at: usize, key: &str) -> (String, String) {
    let line_start = text[..at].rfind('\n').map_or(0, |i| i + 1);
    let header = text[line_start..at].trim_start();
    match (header, key) {
        ("[", "vm") | ("[vm.", "task") => {
            let header = if key == "vm" { "[[vm]]" } else { "[[vm.task]]" };
            (format!("`{key}` is a list, but this header has single brackets"), format!("write {header}"))
        }
        (h, _) if h.starts_with('[') => (
            format!("the table `{}` stands twice", printable(key, 60)),
            "merge the two, or remove one".to_owned(),
        ),
        _ => (
            format!("the key `{}` stands twice in one table", printable(key, 60)),
            "keep one of the two lines".to_owned(),
        ),
    }
}
