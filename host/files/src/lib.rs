//! Files that users write and `core` parses: specs and twin profiles.
//!
//! The path may be one that others control, so only a regular file is opened, nothing is waited
//! for, and no more is read than such a file may have.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use rtvirtio_kernel::trusted::{Refusal, open_config};
use rtvirtio_spec::{HostSpec, MAX_FILE_BYTES, SpecErrors};
use rtvirtio_twin::{ProfileError, TwinProfile};
use rustix::io::Errno;

/// Largest twin profile, in bytes; a built-in one has less than 4 KiB.
const MAX_PROFILE_BYTES: u64 = 1 << 20;

/// Reads and validates the spec file at `path`, a regular file or a link to one.
///
/// # Errors
/// As of [`HostSpec::parse_bytes`]; also when the file cannot be read.
pub fn load_spec(path: impl AsRef<Path>) -> Result<HostSpec, SpecErrors> {
    load_spec_with_text(path).map(|(spec, _)| spec)
}

/// Like [`load_spec`], with the bytes of the file.
pub fn load_spec_with_text(path: impl AsRef<Path>) -> Result<(HostSpec, Vec<u8>), SpecErrors> {
    let path = path.as_ref();
    let name = path.display().to_string();
    // One byte more than allowed distinguishes a file of the limit from a larger one.
    let bytes = read_spec(path, MAX_FILE_BYTES as u64 + 1).map_err(|e| SpecErrors::unreadable(&name, &e))?;
    Ok((HostSpec::parse_bytes(&name, &bytes)?, bytes))
}

fn read_spec(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let file = open(path, |kind| match kind {
        "directory" => Errno::ISDIR.into(),
        _ => io::Error::new(io::ErrorKind::InvalidInput, "it is a FIFO or a device, and no regular file"),
    })?;
    let mut bytes = Vec::new();
    file.take(limit).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Finds a twin's profile: a built-in one by its name, or one from a TOML file.
///
/// # Errors
/// [`ProfileError`] when there is none or it is not valid.
pub fn load_twin(name: &str) -> Result<TwinProfile, ProfileError> {
    if TwinProfile::built_in_names().contains(&name) {
        return TwinProfile::built_in(name);
    }
    let text = read_profile(Path::new(name)).map_err(|source| ProfileError::unknown(name, source))?;
    TwinProfile::parse(name, &text)
}

fn read_profile(path: &Path) -> io::Result<String> {
    let no = |why: &str| io::Error::new(io::ErrorKind::InvalidInput, why);
    let file = open(path, |_| no("it is no regular file"))?;
    let mut text = String::new();
    file.take(MAX_PROFILE_BYTES + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_PROFILE_BYTES { Err(no("it has more than 1 MiB")) } else { Ok(text) }
}

/// Opens a regular file; `refused` makes the error for another one from its kind, such as `FIFO`.
fn open(path: &Path, refused: impl Fn(&str) -> io::Error) -> io::Result<File> {
    open_config(path).map_err(|e| match Refusal::find_in(&e) {
        Some(Refusal::NotRegular { kind }) => refused(kind),
        _ => e,
    })
}
