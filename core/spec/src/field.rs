//! Reads the keys of one table: presence, type, words, names and paths.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::Hash;
use std::path::{Component, Path, PathBuf};

use toml::de::{DeTable, DeValue};

use crate::error::Report;
use crate::name::{MAX_NAME, name_problem, repaired};
use crate::source::{Span, decoded_escape, printable};
use crate::suggest::closest;

/// Longest path of a Unix socket in bytes: `sun_path` of unix(7) less its NUL.
const MAX_SOCKET_PATH: usize = 107;
/// Longest path in bytes: the kernel's `PATH_MAX` less its NUL.
const MAX_PATH: usize = 4095;

/// Value of a key, after its check.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Field<T> {
    /// The key is absent.
    Absent,
    /// The value of the key is invalid and was reported.
    Bad,
    /// The key has a valid value.
    Given(T),
}

impl<T> Field<T> {
    pub(crate) fn given(&self) -> Option<&T> {
        match self {
            Field::Given(v) => Some(v),
            _ => None,
        }
    }

    /// Returns the value; `None` when absent or bad.
    pub(crate) fn into_value(self) -> Option<T> {
        self.optional().flatten()
    }

    /// Returns the value, or the default when absent; `None` when bad.
    pub(crate) fn or(self, default: T) -> Option<T> {
        self.optional().map(|value| value.unwrap_or(default))
    }

    /// Returns the value as an option; `None` when bad.
    pub(crate) fn optional(self) -> Option<Option<T>> {
        match self {
            Field::Absent => Some(None),
            Field::Bad => None,
            Field::Given(v) => Some(Some(v)),
        }
    }

    pub(crate) fn and_then<U>(self, f: impl FnOnce(T) -> Field<U>) -> Field<U> {
        match self {
            Field::Absent => Field::Absent,
            Field::Bad => Field::Bad,
            Field::Given(v) => f(v),
        }
    }

    pub(crate) fn map<U>(self, f: impl FnOnce(T) -> U) -> Field<U> {
        self.and_then(|v| Field::Given(f(v)))
    }
}

impl<T> From<Option<T>> for Field<T> {
    /// `None` means that an error was reported.
    fn from(value: Option<T>) -> Self {
        value.map_or(Field::Bad, Field::Given)
    }
}

/// Spans of a key and its value.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) key: Span,
    pub(crate) value: Span,
}

/// A table of the file whose keys have been checked.
pub(crate) struct Section<'t, 'i> {
    /// Name in messages, such as `[device]`.
    pub(crate) title: &'static str,
    /// Span for errors about a missing key.
    pub(crate) span: Span,
    /// Whether no unknown key was reported.
    pub(crate) known: bool,
    table: &'t DeTable<'i>,
    /// Keys that misspelt ones were probably meant to be; these are not reported as missing too.
    meant: Vec<String>,
}

/// Name of a value's type with its article: "an integer", "a string".
pub(crate) fn kind(value: &DeValue<'_>) -> String {
    let name = value.type_str();
    let article = if name.starts_with(['a', 'e', 'i', 'o', 'u']) { "an" } else { "a" };
    format!("{article} {name}")
}

/// List in words: "a, b or c", with the conjunction given.
pub(crate) fn listing(words: &[&str], conjunction: &str) -> String {
    match words {
        [] => String::new(),
        [one] => (*one).to_owned(),
        [init @ .., last] => format!("{} {conjunction} {last}", init.join(", ")),
    }
}

/// Names in quotes, of which one is to be chosen.
pub(crate) fn any_of<'n>(names: impl IntoIterator<Item = &'n str>) -> String {
    let quoted: Vec<String> = names.into_iter().map(|name| format!("\"{name}\"")).collect();
    listing(&quoted.iter().map(String::as_str).collect::<Vec<_>>(), "or")
}

/// Text of the file for a message: quoted and shortened.
pub(crate) fn quoted(text: &str) -> String {
    format!("\"{}\"", printable(text, 60))
}

impl<'t, 'i> Section<'t, 'i> {
    /// Takes a table and reports every key in it that is not in `keys`; `aliases` maps names of
    /// other tools to the key or phrase to suggest.
    pub(crate) fn open(
        report: &mut Report<'_>,
        title: &'static str,
        table: &'t DeTable<'i>,
        span: Span,
        keys: &[&str],
        aliases: &[(&str, &str)],
    ) -> Self {
        let (mut meant, mut known) = (Vec::new(), true);
        for (key, _) in table.iter() {
            let name: &str = key.get_ref();
            if keys.contains(&name) {
                continue;
            }
            known = false;
            if report.is_full() {
                report.add(key.span(), "", "");
                continue;
            }
            let alias = aliases.iter().find(|(from, _)| from.eq_ignore_ascii_case(name)).map(|(_, to)| *to);
            let alias = alias.or_else(|| closest(name, keys.iter().copied()));
            let help = match alias {
                // An alias maps to a key of this table, or to a phrase that names the right place.
                Some(known) if keys.contains(&known) => format!("did you mean `{known}`?"),
                Some(phrase) => format!("did you mean {phrase}?"),
                None => format!("{title} takes {}", listing(keys, "and")),
            };
            meant.extend(alias.map(str::to_owned));
            report.add(key.span(), format!("unknown key `{}` in {title}", printable(name, 60)), help);
        }
        Self { title, span, known, table, meant }
    }

    /// For a table whose keys have been checked already.
    pub(crate) fn checked(title: &'static str, table: &'t DeTable<'i>, span: Span) -> Self {
        Self { title, span, known: true, table, meant: Vec::new() }
    }

    /// Whether a misspelt key was probably meant to be `key`.
    pub(crate) fn meant(&self, key: &str) -> bool {
        self.meant.iter().any(|m| m == key)
    }

    /// Field of an absent key; `Bad` when a misspelt key has been reported for it.
    pub(crate) fn absent<T>(&self, key: &str) -> Field<T> {
        if self.meant(key) { Field::Bad } else { Field::Absent }
    }

    /// Spans and value of a key; `None` when it is absent.
    pub(crate) fn get(&self, key: &str) -> Option<(Place, &'t DeValue<'i>)> {
        let (name, value) = self.table.get_key_value(key)?;
        Some((Place { key: name.span(), value: value.span() }, value.get_ref()))
    }

    /// Spans of a key and its value; `None` when it is absent.
    pub(crate) fn place(&self, key: &str) -> Option<Place> {
        self.get(key).map(|(place, _)| place)
    }

    /// Span of a key's value; that of the table's header when it is absent.
    pub(crate) fn value_span(&self, key: &str) -> Span {
        self.place(key).map_or_else(|| self.span.clone(), |p| p.value)
    }

    /// Reports an absent key; returns the field unchanged otherwise.
    pub(crate) fn required<T>(
        &self,
        report: &mut Report<'_>,
        key: &str,
        example: &str,
        field: Field<T>,
    ) -> Field<T> {
        if matches!(field, Field::Absent) {
            report.add(
                self.span.clone(),
                format!("{} has no `{key}`", self.title),
                format!("add {key} = {example}"),
            );
        }
        field
    }

    /// Table under a key that is no list; `help` is the remedy for another type.
    pub(crate) fn table(
        &self,
        report: &mut Report<'_>,
        key: &str,
        help: impl Into<String>,
    ) -> Field<(Place, &'t DeTable<'i>)> {
        match self.get(key) {
            None => self.absent(key),
            Some((place, DeValue::Table(table))) => Field::Given((place, table)),
            Some((place, other)) => {
                report.add(place.value, format!("`{key}` must be a table, not {}", kind(other)), help);
                Field::Bad
            }
        }
    }

    /// Whether no earlier table has this value of `key`; otherwise reported with `message`, and in
    /// the remedy the line of the first, then `more`. `lines` has the values so far.
    pub(crate) fn first_use<K: Eq + Hash>(
        &self,
        report: &mut Report<'_>,
        key: &str,
        (lines, value): (&mut HashMap<K, usize>, K),
        message: impl Into<String>,
        more: &str,
    ) -> bool {
        let at = self.value_span(key);
        match lines.entry(value) {
            Entry::Vacant(new) => {
                new.insert(report.line(at.start));
                true
            }
            Entry::Occupied(first) => {
                report.add(at, message, format!("the first is on line {}{more}", first.get()));
                false
            }
        }
    }

    /// Reads a string; `example` is a valid value for messages.
    pub(crate) fn string(&self, report: &mut Report<'_>, key: &str, example: &str) -> Field<&'t str> {
        match self.get(key) {
            None => self.absent(key),
            Some((_, DeValue::String(text))) => Field::Given(text),
            Some((place, other)) => {
                let message = format!("`{key}` must be a string, not {}", kind(other));
                report.add(place.value, message, format!("write {key} = {example}"));
                Field::Bad
            }
        }
    }

    /// Reads an integer from `least` to `most`.
    pub(crate) fn integer(&self, report: &mut Report<'_>, key: &str, least: u32, most: u32) -> Field<u32> {
        let (place, value) = match self.get(key) {
            None => return self.absent(key),
            Some(found) => found,
        };
        let DeValue::Integer(number) = value else {
            let help = match value {
                DeValue::String(text) if text.parse::<u32>().is_ok() => {
                    format!("write {key} = {text} without quotes")
                }
                _ => format!("write a whole number from {least} to {most}"),
            };
            report.add(place.value, format!("`{key}` must be an integer, not {}", kind(value)), help);
            return Field::Bad;
        };
        match u32::from_str_radix(number.as_str(), number.radix()) {
            Ok(n) if (least..=most).contains(&n) => Field::Given(n),
            _ => {
                let message = format!("`{key}` is {number}, out of its range");
                report.add(place.value, message, format!("write a whole number from {least} to {most}"));
                Field::Bad
            }
        }
    }

    /// Reads one of `words`; `aliases` maps words of other tools to these.
    pub(crate) fn word<T: Copy>(
        &self,
        report: &mut Report<'_>,
        key: &str,
        words: &[(&str, T)],
        aliases: &[(&str, &str)],
    ) -> Field<T> {
        let names = any_of(words.iter().map(|(w, _)| *w));
        let example = format!("\"{}\"", words.first().map_or("", |(w, _)| w));
        self.string(report, key, &example).and_then(|text| {
            if let Some((_, value)) = words.iter().find(|(w, _)| *w == text) {
                return Field::Given(*value);
            }
            let alias = aliases
                .iter()
                .find(|(from, _)| from.eq_ignore_ascii_case(text))
                .map(|(_, to)| (*to).to_owned());
            let near = || closest(text, words.iter().map(|(w, _)| *w)).map(|w| format!("{key} = \"{w}\""));
            let help = match alias.or_else(near) {
                Some(line) => format!("did you mean {line}?"),
                None => format!("write {names}"),
            };
            report.add(self.value_span(key), format!("`{key}` cannot be {}", quoted(text)), help);
            Field::Bad
        })
    }

    /// Reads the key `name` and checks the form of the name.
    pub(crate) fn name(&self, report: &mut Report<'_>, example: &str) -> Field<&'t str> {
        let field = self.string(report, "name", example);
        self.required(report, "name", example, field).and_then(|name| {
            let Some(problem) = name_problem(name) else { return Field::Given(name) };
            let help = match repaired(name) {
                Some(good) => format!("write name = \"{good}\""),
                None => format!(
                    "use 1 to {MAX_NAME} letters, digits, `-`, `_` and `.`, with a letter or digit first, such as {example}"
                ),
            };
            report.add(self.value_span("name"), format!("the name {} {problem}", quoted(name)), help);
            Field::Bad
        })
    }

    /// Reads an absolute path without `..`, normalised for double slashes and `.`.
    pub(crate) fn path(&self, report: &mut Report<'_>, key: &str, example: &str) -> Field<PathBuf> {
        self.limited_path(report, key, example, MAX_PATH)
    }

    /// Reads a path as `path` does, short enough for a Unix socket.
    pub(crate) fn socket(&self, report: &mut Report<'_>, key: &str, example: &str) -> Field<PathBuf> {
        self.limited_path(report, key, example, MAX_SOCKET_PATH)
    }

    fn limited_path(&self, report: &mut Report<'_>, key: &str, example: &str, most: usize) -> Field<PathBuf> {
        self.string(report, key, example).and_then(|text| {
            if let Some((escape, inner)) = decoded_escape(report.text(&self.value_span(key))) {
                let escape = printable(escape, 8);
                let message =
                    format!("`{key}` in double quotes: TOML takes `{escape}` for another character");
                let help = format!("write it in single quotes: {key} = '{inner}'");
                report.add(self.value_span(key), message, help);
                return Field::Bad;
            }
            let example = format!("such as {example}");
            let path = Path::new(text);
            let problem = if text.is_empty() {
                ("is empty", format!("write an absolute path, {example}"))
            } else if text.contains(char::is_control) {
                ("holds a control character", format!("write a plain path, {example}"))
            } else if !path.is_absolute() {
                ("is not an absolute path", format!("write the whole path from `/`, {example}"))
            } else if path.components().any(|c| c == Component::ParentDir) {
                ("contains `..`", "write the path without `..`".to_owned())
            } else if path.parent().is_none() {
                ("is the root directory", format!("write the whole path, {example}"))
            } else if text.len() > most {
                ("is too long", format!("use a path of at most {most} bytes"))
            } else {
                return Field::Given(path.components().collect());
            };
            report.add(self.value_span(key), format!("`{key}` {}", problem.0), problem.1);
            Field::Bad
        })
    }
}

/// Entries of an array of tables such as `[[vm]]`; `None` when an error was reported.
pub(crate) fn tables<'t, 'i>(
    report: &mut Report<'_>,
    section: &Section<'t, 'i>,
    key: &str,
    header: &str,
) -> Option<Vec<(&'t DeTable<'i>, Span)>> {
    let help = |what: &str| format!("start each {what} with a line {header} in double brackets");
    let Some((place, value)) = section.get(key) else {
        if section.meant(key) || section.meant(header) {
            return None;
        }
        let message = format!("{} has no {header}", section.title);
        report.add(section.span.clone(), message, help("one"));
        return None;
    };
    let DeValue::Array(items) = value else {
        let message = format!("`{key}` must be a list of tables, not {}", kind(value));
        report.add(place.value, message, help(key));
        return None;
    };
    if items.is_empty() {
        report.add(place.value, format!("`{key}` is an empty list"), help(key));
        return None;
    }
    let mut found = Vec::new();
    for item in items.iter() {
        match item.get_ref() {
            DeValue::Table(table) => found.push((table, item.span())),
            other => {
                let message = format!("each `{key}` must be a table, not {}", kind(other));
                report.add(item.span(), message, help(key));
            }
        }
    }
    (found.len() == items.len()).then_some(found)
}

/// Reads each table of a list, at most `most`; `None` when an error was reported. `owner` has the
/// list of `entries`; `help` is the remedy for too many.
pub(crate) fn each<'t, 'i, T>(
    report: &mut Report<'_>,
    tables: Vec<(&'t DeTable<'i>, Span)>,
    most: usize,
    (owner, entries, help): (&str, &str, &str),
    mut read: impl FnMut(&mut Report<'_>, &'t DeTable<'i>, Span) -> Option<T>,
) -> Option<Vec<T>> {
    let (mut all, mut good) = (Vec::new(), true);
    for (i, (table, span)) in tables.into_iter().enumerate() {
        if i >= most {
            report.add(span, format!("{owner} has at most {most} {entries}"), help);
            return None;
        }
        match read(report, table, span) {
            Some(one) => all.push(one),
            None => good = false,
        }
    }
    good.then_some(all)
}
