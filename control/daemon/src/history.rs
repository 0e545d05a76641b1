//! History of events, in order: in memory for clients, and on disk for people.

use std::collections::VecDeque;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use serde::{Deserialize, Serialize};

use crate::host::SettingChange;
use crate::lock::lock;

use rtvirtio_kernel::trusted;

/// Number of events kept in memory for clients.
const KEPT: usize = 1_000;
/// Size in bytes beyond which the file is rotated; one older file is kept.
const LARGEST: u64 = 4 << 20;

/// Kinds of events of the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    /// The service has started.
    Started,
    /// Settings were written, with their reason.
    Changed,
    /// A step was not done.
    Failed,
    /// A setting was changed by another program, and left so.
    Drift,
    /// A contract was refused, or gives way.
    Refused,
    /// A file is not used.
    Fault,
    /// A VM was found running.
    Appeared,
    /// A VM does not run.
    Gone,
    /// A contract waits for acceptance.
    Waiting,
    /// Something else to know.
    Note,
}

/// Entry of the history.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Sequence number; restarts at 1 with the service.
    pub id: u64,
    /// RFC 3339, to the millisecond.
    pub time: String,
    /// Kind, in JSON as `snake_case`.
    pub kind: EventKind,
    /// The VM that it concerns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<String>,
    /// In words, with the reason.
    pub text: String,
    /// Settings that were changed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub changes: Vec<SettingChange>,
}

impl Event {
    /// JSON without line breaks, as in the file.
    #[must_use]
    pub fn to_json(&self) -> String {
        // Plain data: it cannot fail.
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// The time now, as RFC 3339 has it, to the millisecond.
#[must_use]
pub fn now() -> String {
    let now = jiff::Timestamp::now();
    now.round(jiff::Unit::Millisecond).unwrap_or(now).to_string()
}

/// Events in memory.
#[derive(Debug, Default)]
pub struct History {
    events: VecDeque<Event>,
    /// Number of the last event; 0 before the first.
    last: u64,
}

impl History {
    /// Adds an event, and returns it.
    pub fn push(
        &mut self,
        kind: EventKind,
        vm: Option<&str>,
        text: impl Into<String>,
        changes: Vec<SettingChange>,
    ) -> Event {
        let (vm, text) = (vm.map(str::to_owned), text.into());
        self.last += 1;
        let event = Event { id: self.last, time: now(), kind, vm, text, changes };
        if self.events.len() == KEPT {
            self.events.pop_front();
        }
        self.events.push_back(event.clone());
        event
    }

    /// At most `most` latest events with a number above `id`, oldest first.
    #[must_use]
    pub fn after(&self, id: u64, most: usize) -> Vec<Event> {
        let found: Vec<Event> = self.events.iter().filter(|e| e.id > id).cloned().collect();
        found[found.len().saturating_sub(most)..].to_vec()
    }
}

/// File of events.
#[derive(Debug)]
pub(crate) struct HistoryFile {
    path: PathBuf,
    /// Error of the last write to the file; `None` if it succeeded.
    problem: Option<String>,
}

impl HistoryFile {
    /// A file to which events are appended, behind those that earlier processes wrote.
    pub fn new(path: PathBuf) -> Self {
        Self { path, problem: None }
    }

    /// Error of the last write to the file; `None` if it succeeded.
    pub fn problem(&self) -> Option<&str> {
        self.problem.as_deref()
    }

    fn append(&mut self, event: &Event) {
        self.problem = append(&self.path, event).err().map(|e| format!("{}: {e}", self.path.display()));
    }
}

/// Adds an event to the memory, then to the file, and returns it. A disk that does not answer holds
/// up the caller alone: clients read the memory meanwhile. On a full disk the event is in memory
/// only. One thread alone may call it, so that lines are in the order of their numbers.
pub(crate) fn record(
    memory: &Mutex<History>,
    file: &Mutex<HistoryFile>,
    kind: EventKind,
    vm: Option<&str>,
    text: String,
    changes: Vec<SettingChange>,
) -> Event {
    let event = lock(memory).push(kind, vm, text, changes);
    lock(file).append(&event);
    event
}

fn append(path: &Path, event: &Event) -> io::Result<()> {
    if std::fs::metadata(path).is_ok_and(|data| data.len() > LARGEST) {
        std::fs::rename(path, path.with_extension("jsonl.1"))?;
    }
    let mut line = serde_json::to_vec(event)?;
    line.push(b'\n');
    let mut file = trusted::append_own(path, 0o640)?;
    file.write_all(&line)
}

/// Reads the events of a file, for people; lines that are cut are skipped.
pub fn read(path: &Path) -> io::Result<Vec<Event>> {
    let lines = BufReader::new(trusted::open_config(path)?).lines();
    Ok(lines.map_while(Result::ok).filter_map(|line| serde_json::from_str(&line).ok()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_counted_kept_and_written() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let path = dir.path().join("history.jsonl");
        let (memory, file) = (Mutex::default(), Mutex::new(HistoryFile::new(path.clone())));
        for i in 0..1_200 {
            record(&memory, &file, EventKind::Note, Some("plc"), format!("{i}"), Vec::new());
        }
        assert_eq!(lock(&file).problem(), None);
        let history: History = memory.into_inner().unwrap();
        assert_eq!(history.after(0, 5_000).len(), KEPT);
        assert_eq!(history.after(1_198, 10).iter().map(|e| e.id).collect::<Vec<_>>(), [1_199, 1_200]);
        assert_eq!(history.after(0, 1)[0].text, "1199");
        let written = read(&path).unwrap();
        assert!(written.iter().map(|e| e.id).eq(1..=1_200_u64));
    }

    #[test]
    fn a_full_disk_loses_the_line_and_nothing_else() {
        if !Path::new("/dev/full").exists() {
            return rtvirtio_testkit::skip("a_full_disk_loses_the_line_and_nothing_else", "no /dev/full");
        }
        let (memory, file) = (Mutex::default(), Mutex::new(HistoryFile::new("/dev/full".into())));
        let event = record(&memory, &file, EventKind::Note, None, "x".to_owned(), Vec::new());
        assert_eq!(lock(&memory).after(0, 9), [event]);
        assert!(lock(&file).problem().is_some_and(|why| why.contains("/dev/full")));
    }

    #[test]
    fn the_memory_answers_while_the_disk_does_not() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let path = dir.path().join("history.jsonl");
        let (memory, file) = (Mutex::default(), Mutex::new(HistoryFile::new(path.clone())));
        std::thread::scope(|scope| {
            let stuck = lock(&file);
            scope.spawn(|| record(&memory, &file, EventKind::Note, None, "x".to_owned(), Vec::new()));
            while lock(&memory).after(0, 9).is_empty() {
                std::thread::yield_now();
            }
            assert!(!path.exists());
            drop(stuck);
        });
        assert_eq!(read(&path).unwrap(), lock(&memory).after(0, 9));
    }
}
