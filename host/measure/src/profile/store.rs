//! Reads and writes profile files.

use std::path::Path;

use rtvirtio_kernel::trusted::read_config;
use rtvirtio_model::{PROFILE_SCHEMA, Profile};

use crate::MeasureError;
use crate::error::io_error;

/// Largest profile file, in bytes; a complete one has 5 KiB.
pub const MAX_FILE_BYTES: usize = 1 << 20;

/// Reads a profile.
///
/// # Errors
/// As [`parse`]; [`MeasureError::Io`] when it cannot be read.
pub fn load(path: &Path) -> Result<Profile, MeasureError> {
    parse(path, &read_config(path, MAX_FILE_BYTES as u64).map_err(io_error("read", path))?)
}

/// Parses the bytes of the profile file at `path`, which is used in errors only.
///
/// # Errors
/// [`MeasureError::Profile`] when it is not a profile of this version, holds impossible numbers
/// ([`Profile::check`]), or is larger than [`MAX_FILE_BYTES`].
pub fn parse(path: &Path, bytes: &[u8]) -> Result<Profile, MeasureError> {
    let refuse = |reason: String| MeasureError::Profile { path: path.to_owned(), reason };
    if bytes.len() > MAX_FILE_BYTES {
        return Err(refuse(format!("it is larger than {} MiB", MAX_FILE_BYTES >> 20)));
    }
    let value: serde_json::Value =
        serde_json::from_slice(bytes).map_err(|e| refuse(format!("it is not JSON: {e}")))?;
    // The version first: a file of another version would only say that some field is unknown.
    match value.get("schema").and_then(|s| s.as_str()) {
        Some(PROFILE_SCHEMA) => {}
        Some(other) => return Err(refuse(format!("its schema is {other:?}, not {PROFILE_SCHEMA:?}"))),
        None => return Err(refuse("it has no schema".to_owned())),
    }
    // Parsed from the text again, so that errors have a line and a column.
    let profile: Profile = serde_json::from_slice(bytes).map_err(|e| refuse(e.to_string()))?;
    profile.check().map_err(refuse)?;
    Ok(profile)
}

/// Writes a profile as JSON. After a crash the file is the old one or the new one, never half.
pub fn save(profile: &Profile, path: &Path) -> Result<(), MeasureError> {
    rtvirtio_kernel::atomic_write(path, &to_json(profile, path)?).map_err(io_error("write", path))
}

/// JSON of a profile as [`save`] writes it; `path` is for the error.
pub fn to_json(profile: &Profile, path: &Path) -> Result<Vec<u8>, MeasureError> {
    let mut json = serde_json::to_vec_pretty(profile)
        .map_err(|e| MeasureError::Profile { path: path.to_owned(), reason: e.to_string() })?;
    json.push(b'\n');
    Ok(json)
}
