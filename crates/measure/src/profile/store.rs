//! Profile files.

use std::path::Path;

use rtvirtio_model::{PROFILE_SCHEMA, Profile};

use crate::MeasureError;
use crate::error::io_error;
use crate::local::write_atomic;

/// Reads a profile.
///
/// # Errors
/// [`MeasureError::Profile`] when it is not a profile of this version, [`MeasureError::Io`] when it cannot be read.
pub fn load(path: &Path) -> Result<Profile, MeasureError> {
    let text = std::fs::read_to_string(path).map_err(io_error("read", path))?;
    let refuse = |reason: String| MeasureError::Profile { path: path.to_owned(), reason };
    let value: serde_json::Value =
        serde_json::from_str(&text).map_err(|e| refuse(format!("it is not JSON: {e}")))?;
    // The version first: a file of another version would only say that some field is unknown.
    match value.get("schema").and_then(|s| s.as_str()) {
        Some(PROFILE_SCHEMA) => {}
        Some(other) => return Err(refuse(format!("its schema is {other:?}, not {PROFILE_SCHEMA:?}"))),
        None => return Err(refuse("it has no schema".to_owned())),
    }
    // Parsed from the text again: errors then have a line and a column.
    serde_json::from_str(&text).map_err(|e| refuse(e.to_string()))
}

/// Writes a profile as JSON. After a crash the file is the old one or the new one, never half.
///
/// # Errors
/// [`MeasureError::Io`] when it cannot be written.
pub fn save(profile: &Profile, path: &Path) -> Result<(), MeasureError> {
    let mut json = serde_json::to_vec_pretty(profile)
        .map_err(|e| MeasureError::Profile { path: path.to_owned(), reason: e.to_string() })?;
    json.push(b'\n');
    write_atomic(path, &json).map_err(io_error("write", path))
}
