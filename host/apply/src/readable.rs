//! Entries that can still be read of a damaged journal, for a person who restores by hand.
//!
//! All of its text is taken from a damaged file. So nothing here is ever carried out by this
//! program, commands are quoted for the shell and touch nothing outside of `/sys` and of a thread's
//! scheduling, and each line says that it is unverified.

mod command;

use std::fmt::{self, Write as _};

use rtvirtio_vmm::AgentAddress;
use serde::{Deserialize as _, Serialize};
use serde_json::Value;

use crate::target::{Place, Target};

/// Ends every printed line.
const MARK: &str = "# unverified";
/// Bytes of a file that are parsed: a journal of a thousand threads has less than a megabyte.
const LIMIT: usize = 16 << 20;

/// Entries of a damaged journal. Prints as a shell script of unverified lines.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Readable {
    /// In the order in which they are to be restored: the last write first, then files that the
    /// kernel changes along with others.
    pub entries: Vec<ReadableEntry>,
}

/// Entry, as far as it can be read. Its texts are those of the file, which may hold anything:
/// [`Readable`] escapes them when it prints.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ReadableEntry {
    /// The setting as users know it.
    pub knob: String,
    /// Path of its file; inside a guest with the VM's name before it. Empty when it cannot be read.
    pub path: String,
    /// Value before the plan; `None` when its file did not exist, or when that cannot be read.
    pub old: Option<String>,
    /// Value that was to be written; `None` for a file that only changes along, or when that cannot
    /// be read.
    pub new: Option<String>,
    /// Whether the kernel changes it along with another setting.
    pub changes_along: bool,
    /// Shell commands that would restore it, each on one line and quoted, or the reason why there
    /// is none.
    pub commands: Result<Vec<String>, String>,
}

impl Readable {
    /// Reads leniently: each JSON object that looks like an entry, whatever is around it. What is
    /// cut off or changed in its form is left out.
    pub(crate) fn parse(bytes: &[u8]) -> Self {
        let bytes = &bytes[..bytes.len().min(LIMIT)];
        let mut entries = Vec::new();
        let mut at = 0;
        while let Some(start) = bytes[at..].iter().position(|b| *b == b'{').map(|i| at + i) {
            let mut stream = serde_json::Deserializer::from_slice(&bytes[start..]).into_iter::<Value>();
            let entry = stream.next().and_then(Result::ok).and_then(|value| entry(&value));
            at = match entry {
                Some(entry) => {
                    entries.push(entry);
                    start + stream.byte_offset().max(1)
                }
                // The whole journal, or something damaged: entries may be inside.
                None => start + 1,
            };
        }
        // As putting back does it: files that change along with a knob come after it.
        let (along, mut entries): (Vec<_>, Vec<_>) =
            entries.into_iter().partition(|e: &ReadableEntry| e.changes_along);
        entries.reverse();
        // systemd writes a unit's files anew with each property.
        entries.sort_by_key(
            |e| !matches!(&e.commands, Ok(lines) if lines.iter().any(|line| line.starts_with("systemctl "))),
        );
        entries.extend(along);
        Self { entries }
    }
}

fn entry(value: &Value) -> Option<ReadableEntry> {
    let text = |key: &str| value.get(key).and_then(Value::as_str).map(str::to_owned);
    let found = value.get("target")?;
    if let (None, Some(weight), Ok(target)) = (text("knob"), text("value"), Target::deserialize(found)) {
        return Some(ReadableEntry {
            knob: "weight of another device".to_owned(),
            path: target.to_string(),
            commands: command::restore(&target, Some(&weight), false),
            old: Some(weight),
            new: None,
            changes_along: true,
        });
    }
    let (knob, old, new) = (text("knob")?, text("old"), text("new"));
    let created = value.get("created_by").is_some_and(Value::is_u64);
    let changes_along = value.get("changed_by").is_some_and(Value::is_u64);
    // An old value that is no string is damaged.
    let old_is_damaged = value.get("old").is_none_or(|old| !old.is_string() && !old.is_null());
    Some(match Target::deserialize(found) {
        Ok(target) => ReadableEntry {
            knob,
            path: target.to_string(),
            commands: if old_is_damaged {
                Err("its old value cannot be read".to_owned())
            } else {
                command::restore(&target, old.as_deref(), created)
            },
            old,
            new,
            changes_along,
        },
        Err(e) => ReadableEntry {
            knob,
            path: found.get("path").and_then(Value::as_str).unwrap_or_default().to_owned(),
            old,
            new,
            changes_along,
            commands: Err(format!("its file cannot be read: {e}")),
        },
    })
}

impl fmt::Display for Readable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.entries.is_empty() {
            return write!(f, "# No entry of it can be read.");
        }
        writeln!(
            f,
            "# What can be read of it, in the order of restoring. It may be wrong, and entries may be missing:"
        )?;
        write!(f, "# compare each line with the machine before you run it.")?;
        for entry in &self.entries {
            let value = |v: &Option<String>| v.as_deref().map_or_else(|| "-".to_owned(), escaped);
            let (knob, path) = (escaped(&entry.knob), escaped(&entry.path));
            let (old, new) = (value(&entry.old), value(&entry.new));
            write!(f, "\n# {knob}: {path}: was {old}, set to {new}  {MARK}")?;
            match &entry.commands {
                Ok(commands) => commands.iter().try_for_each(|line| write!(f, "\n{line}  {MARK}"))?,
                Err(why) => write!(f, "\n# no command: {}  {MARK}", escaped(why))?,
            }
        }
        Ok(())
    }
}

/// Whether a terminal or a reader could take the character for something else: control characters,
/// characters that change the direction of text, and invisible ones.
fn is_hidden(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

pub(crate) fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if is_hidden(c) {
            // Writing to a String cannot fail.
            let _ = write!(out, "{}", c.escape_unicode());
        } else {
            out.push(c);
        }
    }
    out
}

/// VM and agent of a target inside a guest: no command on the host reaches it.
fn guest(target: &Target) -> Option<(&str, &AgentAddress)> {
    match &target.place {
        Place::Guest { vm, agent } => Some((vm, agent)),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
