//! Errors of a spec file: place, message and remedy.

use std::fmt;

use serde::Serialize;

use crate::limits::MAX_FILE_BYTES;
use crate::source::{Excerpt, Source, Span, printable};

/// Limit of errors shown for one file; the text form has the number of further ones.
pub const MAX_SHOWN_ERRORS: usize = 100;
/// Limit of errors collected, so that a hostile file cannot fill the memory.
const MAX_COLLECTED: usize = 1000;
/// Limit of characters in a message or a remedy; both may quote the file.
const MAX_MESSAGE: usize = 400;

/// A mistake in a spec file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SpecError {
    /// Name of the file as the user gave it.
    pub file: String,
    /// Line, from 1; `None` when the error concerns the file as a whole (missing, too large).
    pub line: Option<usize>,
    /// Column in characters, from 1; `None` together with `line`.
    pub column: Option<usize>,
    /// Description of the mistake.
    pub message: String,
    /// Remedy, such as a corrected value.
    pub help: String,
    #[serde(skip)]
    excerpt: Option<Excerpt>,
}

/// Errors of one spec file, in file order; never empty.
///
/// Displays like a compiler's messages; serialises as a list of
/// `{file, line, column, message, help}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct SpecErrors {
    errors: Vec<SpecError>,
    #[serde(skip)]
    omitted: usize,
}

impl SpecErrors {
    /// Errors in file order, at most [`MAX_SHOWN_ERRORS`].
    #[must_use]
    pub fn errors(&self) -> &[SpecError] {
        &self.errors
    }

    fn whole_file(file: &str, message: String, help: &str) -> Self {
        let file = printable(file, MAX_MESSAGE);
        let error =
            SpecError { file, line: None, column: None, message, help: help.to_owned(), excerpt: None };
        Self { errors: vec![error], omitted: 0 }
    }

    /// Error of a file that could not be opened or read: `source`. `file` as in
    /// [`HostSpec::parse`](crate::HostSpec::parse).
    #[must_use]
    pub fn unreadable(file: &str, source: &std::io::Error) -> Self {
        let help = match source.kind() {
            std::io::ErrorKind::NotFound => "check the path; examples/ holds specs to start from",
            std::io::ErrorKind::PermissionDenied => "make the file readable for this user, or run as root",
            std::io::ErrorKind::IsADirectory => "give the path of a spec file in it",
            _ => "give the path of a readable spec file",
        };
        Self::whole_file(file, format!("cannot read the spec file: {source}"), help)
    }

    pub(crate) fn too_large(file: &str) -> Self {
        let message = format!("the file is larger than {} MiB, so it is no spec", MAX_FILE_BYTES >> 20);
        Self::whole_file(file, message, "check the path; a spec with 64 VMs has less than 1 MiB")
    }

    /// Reports the first invalid byte: `good` bytes at the start of `bytes` are UTF-8.
    pub(crate) fn not_utf8(file: &str, bytes: &[u8], good: usize) -> Self {
        // The lossy text is equal up to the invalid byte, so that offset is valid in it.
        let text = String::from_utf8_lossy(bytes);
        let mut report = Report::new(file, &text);
        let byte = bytes.get(good).copied().unwrap_or_default();
        report.add(
            good..good + '\u{fffd}'.len_utf8(),
            format!("the file is not UTF-8: byte 0x{byte:02x} does not belong here"),
            "save the file as UTF-8; a spec is plain text",
        );
        report.into_errors()
    }
}

impl fmt::Display for SpecError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "error: {}", self.message)?;
        let (Some(line), Some(column), Some(excerpt)) = (self.line, self.column, &self.excerpt) else {
            writeln!(f, " --> {}", self.file)?;
            return write!(f, "  = help: {}", self.help);
        };
        let number = line.to_string();
        let gutter = " ".repeat(number.len());
        writeln!(f, "{gutter}--> {}:{line}:{column}", self.file)?;
        writeln!(f, "{gutter} |")?;
        writeln!(f, "{}", format!("{number} | {}", excerpt.text).trim_end())?;
        writeln!(f, "{gutter} | {}{}", " ".repeat(excerpt.indent), "^".repeat(excerpt.width))?;
        write!(f, "{gutter} = help: {}", self.help)
    }
}

impl fmt::Display for SpecErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, error) in self.errors.iter().enumerate() {
            if i > 0 {
                f.write_str("\n\n")?;
            }
            error.fmt(f)?;
        }
        match self.omitted {
            0 => Ok(()),
            n => write!(f, "\n\n{n} more errors are not shown"),
        }
    }
}

impl std::error::Error for SpecError {}
impl std::error::Error for SpecErrors {}

/// Collects the errors of one file while it is read.
#[derive(Debug)]
pub(crate) struct Report<'a> {
    file: &'a str,
    source: Source<'a>,
    found: Vec<(Span, String, String)>,
    omitted: usize,
}

impl<'a> Report<'a> {
    pub(crate) fn new(file: &'a str, text: &'a str) -> Self {
        Self { file, source: Source::new(text), found: Vec::new(), omitted: 0 }
    }

    /// Name of the spec file.
    pub(crate) fn file(&self) -> &'a str {
        self.file
    }

    /// Records an error at `span`.
    pub(crate) fn add(&mut self, span: Span, message: impl Into<String>, help: impl Into<String>) {
        if self.is_full() {
            self.omitted += 1;
        } else {
            self.found.push((span, message.into(), help.into()));
        }
    }

    /// Whether further errors are only counted, so that their text is not needed.
    pub(crate) fn is_full(&self) -> bool {
        self.found.len() >= MAX_COLLECTED
    }

    /// Number of the line at a byte offset, for "the first is on line N".
    pub(crate) fn line(&self, offset: usize) -> usize {
        self.source.line(offset)
    }

    /// Text of the file at `span`; empty for an invalid span.
    pub(crate) fn text(&self, span: &Span) -> &'a str {
        self.source.text(span)
    }

    /// Returns the value if no error was reported, else the errors.
    pub(crate) fn finish<T>(mut self, spec: Option<T>) -> Result<T, SpecErrors> {
        match spec {
            Some(spec) if self.found.is_empty() => return Ok(spec),
            // Readers return `None` only after a report; this keeps the list of errors non-empty
            // even so.
            None if self.found.is_empty() => {
                self.add(0..0, "the spec is not valid", "compare it with the specs in examples/");
            }
            _ => {}
        }
        Err(self.into_errors())
    }

    pub(crate) fn into_errors(mut self) -> SpecErrors {
        self.found.sort_by_key(|(span, ..)| span.start);
        let omitted = self.omitted + self.found.len().saturating_sub(MAX_SHOWN_ERRORS);
        let file = printable(self.file, MAX_MESSAGE);
        let source = &self.source;
        let one = |(span, message, help): (Span, String, String)| {
            let position = source.position(span.start);
            SpecError {
                file: file.clone(),
                line: Some(position.line),
                column: Some(position.column),
                message: printable(&message, MAX_MESSAGE),
                help: printable(&help, MAX_MESSAGE),
                excerpt: Some(source.excerpt(&span)),
            }
        };
        SpecErrors { errors: self.found.into_iter().take(MAX_SHOWN_ERRORS).map(one).collect(), omitted }
    }
}
