//! Directory below which all kernel files are found.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::{HostError, is_gone};

/// Directory below which `/proc`, `/sys` and `/dev` are looked for: `/`, or a temporary directory
/// in tests.
///
/// Paths given to its methods are absolute as seen on the host, such as
/// `/sys/block/sda/queue/scheduler`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Root(PathBuf);

impl Default for Root {
    fn default() -> Self {
        Self(PathBuf::from("/"))
    }
}

impl Root {
    /// All paths are looked for below `dir`.
    #[must_use]
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self(dir.into())
    }

    /// Whether this is the real machine.
    #[must_use]
    pub fn is_real(&self) -> bool {
        self.0 == Path::new("/")
    }

    /// Real path of a host path, below this root.
    #[must_use]
    pub fn at(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.0.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// Host path of a file below this root.
    #[must_use]
    pub fn host_path(&self, real: &Path) -> PathBuf {
        real.strip_prefix(&self.0).map_or_else(|_| real.to_owned(), |p| Path::new("/").join(p))
    }

    /// Reads the whole text of a file.
    ///
    /// # Errors
    /// [`HostError::Read`] when it cannot be read or is not UTF-8.
    pub fn read(&self, path: impl AsRef<Path>) -> Result<String, HostError> {
        let path = path.as_ref();
        fs::read_to_string(self.at(path)).map_err(|source| HostError::Read { path: path.to_owned(), source })
    }

    /// Text without surrounding white space; `None` when the file does not exist.
    pub fn read_optional(&self, path: impl AsRef<Path>) -> Result<Option<String>, HostError> {
        match self.read(path) {
            Ok(text) => Ok(Some(text.trim().to_owned())),
            Err(e) if e.is_gone() => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Number in a file.
    pub fn number<T: FromStr>(&self, path: impl AsRef<Path>) -> Result<T, HostError> {
        let path = path.as_ref();
        let text = self.read(path)?;
        text.trim().parse().map_err(|_| HostError::form(path, &text, "a number"))
    }

    /// Number in a file; `None` when the file does not exist.
    pub fn optional_number<T: FromStr>(&self, path: impl AsRef<Path>) -> Result<Option<T>, HostError> {
        let path = path.as_ref();
        let Some(text) = self.read_optional(path)? else { return Ok(None) };
        text.parse().map(Some).map_err(|_| HostError::form(path, &text, "a number"))
    }

    /// Writes to a file that exists, in one `write(2)`: kernel files take each write as one whole
    /// value.
    ///
    /// # Errors
    /// [`HostError::Write`] when the file does not exist or the kernel refuses the value.
    pub fn write(&self, path: impl AsRef<Path>, value: &str) -> Result<(), HostError> {
        let path = path.as_ref();
        self.write_bytes(path, value.as_bytes()).map_err(|source| HostError::Write {
            path: path.to_owned(),
            value: value.to_owned(),
            source,
        })
    }

    fn write_bytes(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        // Never O_CREAT: a missing kernel file must be an error. O_TRUNC is ignored by sysfs and
        // cgroupfs.
        let mut file = fs::OpenOptions::new().write(true).truncate(true).open(self.at(path))?;
        // `File` is unbuffered, so this is one system call; a short write means that the kernel
        // took part of a value.
        match file.write(bytes)? {
            n if n == bytes.len() => Ok(()),
            n => Err(io::Error::new(
                io::ErrorKind::WriteZero,
                format!("only {n} of {} bytes taken", bytes.len()),
            )),
        }
    }

    /// Whether a path exists; a symbolic link is followed.
    ///
    /// # Errors
    /// [`HostError::Read`] for any other failure. Only `ENOENT`, `ENODEV` and `ESRCH` mean that
    /// nothing exists, and `ENOTDIR`: below a file there can be nothing.
    pub fn exists(&self, path: impl AsRef<Path>) -> Result<bool, HostError> {
        let path = path.as_ref();
        match fs::metadata(self.at(path)) {
            Ok(_) => Ok(true),
            Err(e) if is_gone(&e) || e.kind() == io::ErrorKind::NotADirectory => Ok(false),
            Err(source) => Err(HostError::Read { path: path.to_owned(), source }),
        }
    }

    /// Permissions of a file; `None` without it.
    pub fn mode(&self, path: impl AsRef<Path>) -> Result<Option<u32>, HostError> {
        let path = path.as_ref();
        match fs::metadata(self.at(path)) {
            Ok(of) => Ok(Some(of.mode())),
            Err(e) if is_gone(&e) => Ok(None),
            Err(source) => Err(HostError::Read { path: path.to_owned(), source }),
        }
    }

    /// Names in a directory, sorted.
    pub fn list(&self, dir: impl AsRef<Path>) -> Result<Vec<String>, HostError> {
        let dir = dir.as_ref();
        let wrap = |source| HostError::Read { path: dir.to_owned(), source };
        let mut names = Vec::new();
        for entry in fs::read_dir(self.at(dir)).map_err(wrap)? {
            names.push(entry.map_err(wrap)?.file_name().to_string_lossy().into_owned());
        }
        names.sort();
        Ok(names)
    }

    /// Inode number of a directory or file: kernfs never reuses one while the machine runs, so a
    /// cgroup that was removed and made again has another.
    pub fn inode(&self, path: impl AsRef<Path>) -> Result<u64, HostError> {
        let path = path.as_ref();
        fs::metadata(self.at(path))
            .map(|m| m.ino())
            .map_err(|source| HostError::Read { path: path.to_owned(), source })
    }
}

#[cfg(test)]
mod tests;
