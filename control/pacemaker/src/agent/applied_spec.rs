//! Copies of spec files beside the journal of a contract: of the one that was applied, and of one
//! that could not be applied in its place.

use std::io;
use std::path::Path;

use rtvirtio_apply::StateDir;
use rtvirtio_spec::HostSpec;
use rtvirtio_workflow::{Dirs, write_state};

use crate::PacemakerError;

/// Name of the file with the spec as applied; valid only with a journal, or the marker of a
/// contract without settings.
const APPLIED: &str = "applied.toml";
/// Name of the file with a spec that could not be applied in its place.
const REFUSED: &str = "refused.toml";

/// Saves the spec that is about to be applied.
pub(super) fn save(own: &Dirs, text: &[u8]) -> Result<(), PacemakerError> {
    Ok(write_state(&own.state, APPLIED, text)?)
}

/// The spec as applied, with its text; `None` where no copy of it is there. `file` is the path that
/// it was read from: relative paths in it are relative to that file's directory.
///
/// # Errors
/// When that is unknown, or the copy is damaged.
pub(super) fn applied(own: &Dirs, file: &Path) -> Result<Option<(HostSpec, Vec<u8>)>, PacemakerError> {
    let Some(text) = read(own, APPLIED)? else { return Ok(None) };
    let host = HostSpec::parse_bytes(&file.display().to_string(), &text)
        .map_err(|e| failed(own, APPLIED, io::Error::new(io::ErrorKind::InvalidData, e)))?;
    Ok(Some((host, text)))
}

/// Notes a spec that is about to take the place of the one in force: unless it is accepted, no
/// other try is made while the file has this text. A spec that is applied already is not noted.
pub(super) fn refuse(own: &Dirs, text: &[u8]) -> Result<(), PacemakerError> {
    if read(own, APPLIED)?.is_some_and(|applied| applied == text) {
        return Ok(());
    }
    Ok(write_state(&own.state, REFUSED, text)?)
}

/// Whether a spec with this text could not be applied.
///
/// # Errors
/// When that is unknown.
pub(super) fn is_refused(own: &Dirs, text: &[u8]) -> Result<bool, PacemakerError> {
    Ok(read(own, REFUSED)?.is_some_and(|refused| refused == text))
}

/// Notes that a spec with this text is in force: if it was noted before, it is no longer refused.
///
/// # Errors
/// When that is unknown, or the copy cannot be removed. A spec that is in force is not asked for
/// anew, so the copy does no harm.
pub(super) fn accept(own: &Dirs, text: &[u8]) -> Result<(), PacemakerError> {
    if is_refused(own, text)? { remove(own, &[REFUSED]) } else { Ok(()) }
}

/// Removes both copies.
pub(super) fn forget(own: &Dirs) -> Result<(), PacemakerError> {
    remove(own, &[APPLIED, REFUSED])
}

fn remove(own: &Dirs, names: &[&str]) -> Result<(), PacemakerError> {
    let Some(dir) = StateDir::find(&own.state)? else { return Ok(()) };
    for name in names {
        dir.remove(name).map_err(|e| failed(own, name, e))?;
    }
    Ok(())
}

fn read(own: &Dirs, name: &str) -> Result<Option<Vec<u8>>, PacemakerError> {
    let Some(dir) = StateDir::find(&own.state)? else { return Ok(None) };
    match dir.read(name) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        read => read.map(Some).map_err(|e| failed(own, name, e)),
    }
}

fn failed(own: &Dirs, name: &str, source: io::Error) -> PacemakerError {
    PacemakerError::State { path: own.state.join(name), source }
}
