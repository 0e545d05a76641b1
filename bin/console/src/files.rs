//! Files that a user asked for.

use std::io::Write;
use std::path::Path;

use anyhow::{Context, ensure};
use rtvirtio_apply::StateDir;
use rtvirtio_workflow::write_state;

use crate::Global;

/// Writes a result where the user wants it; a symbolic link there is followed. What is meant for the state directory goes the way
/// of [`write_state`].
///
/// # Errors
/// When it cannot be written.
pub fn write_result(path: &Path, content: &[u8], global: &Global) -> anyhow::Result<()> {
    match (path.parent(), path.file_name().and_then(|name| name.to_str())) {
        (Some(dir), Some(name)) if dir.starts_with(&global.state_dir) => {
            StateDir::open_or_create(&global.state_dir)?;
            Ok(write_state(dir, name, content)?)
        }
        _ => write_file(path, content),
    }
}

/// Whether [`write_file`] can write there, as far as it can be known without writing: for a check
/// before a measurement that takes its time.
///
/// # Errors
/// When it cannot.
pub fn check_writable(path: &Path) -> anyhow::Result<()> {
    let path = std::path::absolute(path).with_context(|| format!("cannot write {}", path.display()))?;
    ensure!(!path.is_dir(), "cannot write {}: it is a directory", path.display());
    // Missing directories are made.
    let there = path.ancestors().skip(1).find(|dir| dir.exists()).unwrap_or(Path::new("/"));
    ensure!(there.is_dir(), "cannot write {}: {} is no directory", path.display(), there.display());
    rustix::fs::access(there, rustix::fs::Access::WRITE_OK)
        .with_context(|| format!("cannot write in {}", there.display()))
}

/// Writes a user's file so that a crash leaves the old or the new one. Where it is a symbolic link, what it leads to is written.
///
/// # Errors
/// When it cannot be written.
pub fn write_file(path: &Path, content: &[u8]) -> anyhow::Result<()> {
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
    file.persist(path).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(())
}
