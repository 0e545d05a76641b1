//! Replaces files atomically.

use std::fs::{File, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

/// Replaces a file's content so that after a crash either the old or the new one is there, whole: a
/// temporary file in the same directory, fsync, rename, fsync of the directory. Mode 0666 within
/// the umask.
pub fn atomic_write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let dir = match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    };
    // The default mode, 0600, is for secrets.
    let readable = Permissions::from_mode(0o666);
    let mut file = tempfile::Builder::new().permissions(readable).tempfile_in(dir)?;
    file.write_all(bytes)?;
    file.as_file().sync_all()?;
    file.persist(path).map_err(|e| e.error)?;
    File::open(dir)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_and_nothing_else_is_left() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let path = dir.path().join("x");
        for content in ["old", "new"] {
            atomic_write(&path, content.as_bytes()).unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), content);
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        let error = atomic_write(&dir.path().join("none/x"), b"").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
