//! Notes in the run directory of state directories whose settings are in force. The run directory
//! and the settings both end at a reboot, so a lost or mistyped state directory is not taken for a
//! host without settings.

use std::fmt;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use rtvirtio_apply::{JOURNAL_FILE, StateDir};
use serde::{Deserialize, Serialize};

use crate::dirs::{Dirs, digest, is_there, write_state};
use crate::error::{Context as _, Error, Kind, Result, bail};
use crate::scope_files;

/// Directory of the notes, in the run directory.
const NOTES: &str = "acting.d";
/// File with the mark of a state directory, as in its note; one made anew has another mark.
const MARK: &str = "acting";

/// Content of a note, as JSON.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    /// Canonical path of the state directory, lossy where it is not UTF-8.
    state: PathBuf,
    /// Content of its file [`MARK`] when the note was written.
    mark: String,
}

/// Settings that act although the state directory knows nothing of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Acting {
    /// The state directory whose journal has the values from before.
    pub state: PathBuf,
    /// The note that says so.
    pub note: PathBuf,
    /// Whether they can be put back from there.
    #[serde(flatten)]
    pub journal: Journal,
}

/// State of the journal of such settings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "journal")]
pub enum Journal {
    /// The state directory still has it: `revert` there puts the settings back.
    There,
    /// The directory's mark is gone or another one, so the journal is lost.
    Lost,
    /// Not known, since the directory cannot be read.
    Unknown {
        /// Error with its causes.
        why: String,
    },
}

impl fmt::Display for Acting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (state, note) = (self.state.display(), self.note.display());
        match &self.journal {
            Journal::There => write!(
                f,
                "settings act that another state directory has in its journal: name it with `--state-dir {state}`"
            ),
            Journal::Lost => write!(
                f,
                "settings act that were journaled in {state}, and their journal is lost: restore the directory (a \
                 backup, a mount) and `rtvirtio revert`; or set them back by hand and remove {note}; a restart of the \
                 host ends them too"
            ),
            Journal::Unknown { why } => {
                write!(f, "settings of {state} may act, which cannot be determined: {why} (noted in {note})")
            }
        }
    }
}

fn notes(dirs: &Dirs) -> PathBuf {
    dirs.run.join(NOTES)
}

/// Canonical path of a directory; its absolute path where it does not exist.
fn resolved(path: &Path) -> PathBuf {
    path.canonicalize().or_else(|_| std::path::absolute(path)).unwrap_or_else(|_| path.to_owned())
}

fn note_name(state: &Path) -> String {
    format!("{}.json", digest(state.as_os_str().as_encoded_bytes()))
}

/// The mark of a state directory; `None` where it has none.
fn mark(state: &Path) -> Result<Option<String>> {
    let Some(dir) = StateDir::find(state)? else { return Ok(None) };
    match dir.read(MARK) {
        Ok(text) => Ok(Some(String::from_utf8_lossy(&text).into_owned())),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e).with_context(|| state.join(MARK).display().to_string()),
    }
}

/// Notes that settings of the state directory are about to act.
///
/// # Errors
/// [`Kind::InForce`] where some act already whose journal is lost: what they have set would be
/// taken for what was there before. When it cannot be written.
pub(crate) fn note(dirs: &Dirs) -> Result<()> {
    if let Some(lost) = elsewhere(dirs)?.into_iter().find(|of| of.journal == Journal::Lost) {
        bail!(InForce, "{lost}");
    }
    note_own(dirs)
}

/// Like [`note`], for settings of one VM's threads and groups, which no other state directory has
/// set: refused only where this directory's own journal is lost.
pub(crate) fn note_own(dirs: &Dirs) -> Result<()> {
    let own = note_name(&resolved(&dirs.state));
    let lost = match elsewhere(dirs) {
        Ok(all) => all.into_iter().find(|of| of.journal == Journal::Lost && of.note.ends_with(&own)),
        // Where this one has a note, that may be the one which cannot be read.
        Err(e) if is_there(&notes(dirs).join(&own))? => return Err(e),
        Err(_) => None,
    };
    if let Some(lost) = lost {
        bail!(InForce, "{lost}");
    }
    StateDir::open_or_create(&dirs.state)?;
    let mark = match mark(&dirs.state)? {
        Some(mark) => mark,
        None => {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let mark = format!("{:x}-{:x}", now.as_nanos(), std::process::id());
            write_state(&dirs.state, MARK, mark.as_bytes())?;
            mark
        }
    };
    let state = resolved(&dirs.state);
    let name = note_name(&state);
    // A path that is not UTF-8 has no JSON.
    let state = PathBuf::from(state.to_string_lossy().into_owned());
    let text = serde_json::to_vec(&Note { state, mark })?;
    // Each contract calls this: only a changed or unreadable note is written.
    let there = StateDir::find(notes(dirs))?.and_then(|dir| dir.read(&name).ok());
    if there.as_deref() == Some(&text[..]) {
        return Ok(());
    }
    write_state(&notes(dirs), &name, &text)
}

/// Removes the note where nothing of the state directory acts any more.
///
/// # Errors
/// When that cannot be told, or it cannot be removed.
pub(crate) fn settle(dirs: &Dirs) -> Result<()> {
    if acts(&dirs.state, dirs)? {
        return Ok(());
    }
    let Some(dir) = StateDir::find(notes(dirs))? else { return Ok(()) };
    let name = note_name(&resolved(&dirs.state));
    dir.remove(&name).with_context(|| notes(dirs).join(&name).display().to_string())
}

/// Whether a state directory has a journal.
fn acts(state: &Path, dirs: &Dirs) -> Result<bool> {
    let of = Dirs { state: state.to_owned(), run: dirs.run.clone() };
    Ok(is_there(&state.join(JOURNAL_FILE))? || scope_files::any_in_force(&of)?)
}

/// Settings that act, and that the journals of this state directory do not have.
pub fn elsewhere(dirs: &Dirs) -> Result<Vec<Acting>> {
    let dir = notes(dirs);
    let entries = match std::fs::read_dir(&dir) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.with_context(|| dir.display().to_string())?,
    };
    let own = resolved(&dirs.state);
    let mut all = Vec::new();
    for entry in entries {
        let path = entry.with_context(|| dir.display().to_string())?.path();
        if path.extension().is_none_or(|e| e != "json") {
            continue;
        }
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        let text = match StateDir::open(&dir)?.read(name) {
            // Removed since the directory was listed.
            Err(e) if e.kind() == ErrorKind::NotFound => continue,
            read => read.with_context(|| path.display().to_string())?,
        };
        let note: Note = serde_json::from_slice(&text)
            .map_err(|e| Error::from_source(Kind::File, e))
            .with_context(|| format!("{} is damaged", path.display()))?;
        // A directory below this one, such as that of the held plan, is a part of it.
        let is_own = resolved(&note.state).starts_with(&own);
        let journal = match mark(&note.state) {
            Ok(mark) if mark.as_ref() != Some(&note.mark) => Ok(Some(Journal::Lost)),
            Ok(_) if is_own => Ok(None),
            Ok(_) => acts(&note.state, dirs).map(|acts| acts.then_some(Journal::There)),
            Err(e) => Err(e),
        };
        let journal = match journal {
            Ok(None) => continue,
            Ok(Some(journal)) => journal,
            Err(e) => Journal::Unknown { why: format!("{e:#}") },
        };
        all.push(Acting { state: note.state, note: path, journal });
    }
    all.sort_by(|a, b| a.state.cmp(&b.state));
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_and_a_mistyped_state_directory_are_not_taken_for_nothing() {
        let temp = rtvirtio_testkit::tempdir().unwrap();
        let at = |state: &str| Dirs { state: temp.path().join(state), run: temp.path().join("run") };
        let dirs = at("state");
        let found =
            |dirs: &Dirs| elsewhere(dirs).unwrap().into_iter().map(|of| of.journal).collect::<Vec<_>>();
        assert_eq!(found(&dirs), []);
        note(&dirs).unwrap();
        assert_eq!(found(&dirs), [], "its journal is about to be written");
        write_state(&dirs.state, JOURNAL_FILE, b"{}").unwrap();
        assert_eq!((found(&dirs), found(&at("sate"))), (vec![], vec![Journal::There]));
        settle(&dirs).unwrap();
        assert_eq!(found(&at("sate")), [Journal::There], "it still acts");
        // Also where the directory was made anew since.
        let away = temp.path().join("away");
        std::fs::rename(&dirs.state, &away).unwrap();
        for state in ["state", "sate"] {
            assert_eq!(found(&at(state)), [Journal::Lost]);
        }
        std::fs::create_dir(&dirs.state).unwrap();
        assert_eq!(found(&dirs), [Journal::Lost]);
        let refused = note(&dirs).unwrap_err();
        assert!(refused.kind() == Kind::InForce && refused.to_string().contains("by hand"), "{refused}");
        std::fs::remove_dir(&dirs.state).unwrap();
        std::fs::rename(&away, &dirs.state).unwrap();
        assert_eq!(found(&dirs), []);
        // Put back, also where the process was killed right after.
        std::fs::remove_file(dirs.state.join(JOURNAL_FILE)).unwrap();
        assert_eq!((found(&dirs), found(&at("sate"))), (vec![], vec![]));
        settle(&dirs).unwrap();
        std::fs::remove_dir_all(&dirs.state).unwrap();
        assert_eq!(found(&dirs), []);
    }

    #[test]
    fn what_lies_below_is_a_part_and_what_cannot_be_read_is_said() {
        let (_temp, dirs) = crate::fixtures::dirs();
        let below = dirs.of_held_plan();
        note(&below).unwrap();
        write_state(&below.state, JOURNAL_FILE, b"{}").unwrap();
        assert_eq!(elsewhere(&dirs).unwrap(), []);
        std::fs::remove_file(below.state.join(MARK)).unwrap();
        std::fs::create_dir(below.state.join(MARK)).unwrap();
        let all = elsewhere(&dirs).unwrap();
        assert!(matches!(all[0].journal, Journal::Unknown { .. }), "{all:?}");
    }
}
