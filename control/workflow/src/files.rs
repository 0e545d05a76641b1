//! Files that a user asked for, and the line that dates them.

use std::io::Write as _;
use std::path::Path;

use crate::error::{Context as _, Error, Kind, Result, ensure};

/// Whether [`write_file`] can write there, as far as it can be known without writing: for a check
/// before a measurement that takes its time.
///
/// # Errors
/// [`Kind::Argument`](crate::Kind::Argument) when it cannot.
pub fn check_writable(path: &Path) -> Result<()> {
    let path = std::path::absolute(path).with_context(|| format!("cannot write {}", path.display()))?;
    ensure!(!path.is_dir(), Argument, "cannot write {}: it is a directory", path.display());
    // Missing directories are made.
    let existing = path.ancestors().skip(1).find(|dir| dir.exists()).unwrap_or(Path::new("/"));
    ensure!(
        existing.is_dir(),
        Argument,
        "cannot write {}: {} is no directory",
        path.display(),
        existing.display()
    );
    rustix::fs::access(existing, rustix::fs::Access::WRITE_OK)
        .map_err(|e| Error::from_source(Kind::Argument, e))
        .with_context(|| format!("cannot write in {}", existing.display()))
}

/// Writes a user's file so that a crash leaves the old or the new one. A symbolic link is followed.
pub fn write_file(path: &Path, content: &[u8]) -> Result<()> {
    let failed = || format!("cannot write {}", path.display());
    let is_link = match path.symlink_metadata() {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => false,
        looked => looked.with_context(failed)?.is_symlink(),
    };
    let target = if is_link { path.canonicalize().with_context(failed)? } else { path.to_owned() };
    let path = target.as_path();
    let dir = match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    };
    std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let mut file =
        tempfile::NamedTempFile::new_in(dir).with_context(|| format!("cannot write in {}", dir.display()))?;
    file.write_all(content).with_context(|| format!("cannot write {}", path.display()))?;
    file.as_file().sync_all().with_context(|| format!("cannot write {}", path.display()))?;
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    file.as_file().set_permissions(mode)?;
    file.persist(path).map_err(|e| e.error).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(())
}

/// Time and version of a result, as text.
#[must_use]
pub fn generated() -> String {
    let now = jiff::Zoned::now().strftime("%Y-%m-%d %H:%M %Z");
    format!("{now}, rtvirtio {}", env!("CARGO_PKG_VERSION"))
}
