//! The state directory: root writes there, so only a directory that no other user can change is
//! used.

use std::cell::Cell;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

use crate::error::ApplyError;

/// Write permission for the group or for others.
const OTHERS_WRITE: u32 = 0o022;
/// Mode of a new directory; private files have their own mode.
const DIR_MODE: u32 = 0o755;

/// Waits for the disk so far, of this thread.
#[must_use]
pub fn syncs() -> u64 {
    SYNCS.get()
}

thread_local! {
    static SYNCS: Cell<u64> = const { Cell::new(0) };
}

fn count_sync() {
    SYNCS.set(SYNCS.get() + 1);
}

/// A directory that belongs to this user or to root and that no other user can write to. Its files
/// are opened relative to it, without following symbolic links.
///
/// The check covers the directory itself, not those above it: a user that owns a directory above
/// can move the state away, but can never make this process write somewhere else.
#[derive(Debug)]
pub struct StateDir {
    path: PathBuf,
    dir: OwnedFd,
}

impl StateDir {
    /// Opens a directory that exists.
    ///
    /// # Errors
    /// [`ApplyError::UntrustedState`] when another user owns it or can write to it;
    /// [`ApplyError::State`] when it cannot be opened, with kind `NotFound` when there is none.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, ApplyError> {
        let path = path.into();
        let failed = |source: io::Error| ApplyError::State { action: "open", path: path.clone(), source };
        // A link of another user could lead to any directory of ours.
        let link = fs::symlink_metadata(&path).map_err(failed)?;
        if link.is_symlink() && !is_trusted(link.uid()) {
            return Err(untrusted(&path, format!("it is a symbolic link of user {}", link.uid())));
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::open(&path, flags, Mode::empty()).map_err(|e| failed(e.into()))?;
        // Of the opened directory, which the path need not name any more.
        let stat = rustix::fs::fstat(&dir).map_err(|e| failed(e.into()))?;
        if !is_trusted(stat.st_uid) {
            return Err(untrusted(&path, format!("it belongs to user {}", stat.st_uid)));
        }
        if stat.st_mode & OTHERS_WRITE != 0 {
            let mode = stat.st_mode & 0o7777;
            return Err(untrusted(&path, format!("other users can write to it (mode {mode:04o})")));
        }
        Ok(Self { path, dir })
    }

    /// Opens a directory; `None` when there is none.
    ///
    /// # Errors
    /// As [`StateDir::open`], but for a directory that does not exist.
    pub fn find(path: impl Into<PathBuf>) -> Result<Option<Self>, ApplyError> {
        match Self::open(path) {
            Ok(dir) => Ok(Some(dir)),
            Err(ApplyError::State { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Opens a directory, and makes it first where there is none. The mode of one that exists is
    /// left as it is.
    ///
    /// # Errors
    /// As [`StateDir::open`], or when it cannot be made.
    pub fn open_or_create(path: impl Into<PathBuf>) -> Result<Self, ApplyError> {
        let path = path.into();
        fs::DirBuilder::new()
            .recursive(true)
            .mode(DIR_MODE)
            .create(&path)
            .map_err(|source| ApplyError::State { action: "create", path: path.clone(), source })?;
        Self::open(path)
    }

    /// The directory's path, as it was given.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Descriptor of the open directory.
    pub(crate) fn descriptor(&self) -> &OwnedFd {
        &self.dir
    }

    /// Makes a new, empty file for writing, with at most the permissions `mode` (such as `0o600`).
    /// A file or symbolic link of that name is removed first, never written to.
    ///
    /// # Errors
    /// As the system calls report; kind `InvalidInput` when `name` is not the name of a file in
    /// this directory.
    pub fn create_file(&self, name: &str, mode: u32) -> io::Result<File> {
        self.remove(name)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
        self.open_at(name, flags, mode).map(File::from)
    }

    /// Opens a file for reading and writing, and makes it with the permissions `mode` where there
    /// is none. Its content stays.
    ///
    /// # Errors
    /// As the system calls report; kind `InvalidData` for a symbolic link, anything but a regular
    /// file, or a file of another user.
    pub fn open_file(&self, name: &str, mode: u32) -> io::Result<File> {
        self.writable(name, OFlags::RDWR | OFlags::CREATE, mode)
    }

    /// The whole content of a file.
    ///
    /// # Errors
    /// As [`StateDir::open_file`]; kind `NotFound` when there is none.
    pub fn read(&self, name: &str) -> io::Result<Vec<u8>> {
        let file = self.open_at(name, OFlags::RDONLY, 0)?;
        self.check(name, &rustix::fs::fstat(&file)?)?;
        let mut bytes = Vec::new();
        File::from(file).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// Replaces a file's content so that after a crash either the old or the new one is there,
    /// whole. The new content is first written to `NAME.new`.
    ///
    /// # Errors
    /// As the system calls report; which of the two contents is there is not known then, but one of
    /// them is, whole.
    pub fn replace(&self, name: &str, mode: u32, bytes: &[u8]) -> io::Result<()> {
        self.replace_unordered(name, mode, bytes)?;
        self.sync()
    }

    /// Replaces like [`StateDir::replace`] without waiting until the new name is on disk: after a
    /// crash of the host the old content may be there again, whole. A process that is killed leaves
    /// the new one.
    pub fn replace_unordered(&self, name: &str, mode: u32, bytes: &[u8]) -> io::Result<()> {
        self.exchange(name, mode, bytes, |file| {
            count_sync();
            file.sync_all()
        })
    }

    /// Replaces like [`StateDir::replace`] without waiting for the disk: after a crash of the host
    /// the content may be lost. A process that is killed leaves the old or the new one, whole.
    pub fn replace_unsynced(&self, name: &str, mode: u32, bytes: &[u8]) -> io::Result<()> {
        self.exchange(name, mode, bytes, |_| Ok(()))
    }

    fn exchange(
        &self,
        name: &str,
        mode: u32,
        bytes: &[u8],
        sync: impl FnOnce(&File) -> io::Result<()>,
    ) -> io::Result<()> {
        let temp = format!("{name}.new");
        let written = self.create_file(&temp, mode).and_then(|mut file| {
            file.write_all(bytes)?;
            sync(&file)
        });
        let renamed = written.and_then(|()| Ok(rustix::fs::renameat(&self.dir, &temp, &self.dir, name)?));
        if renamed.is_err() {
            // A partial new content is of no use, and may fill the disk.
            let _ = self.remove(&temp);
        }
        renamed
    }

    /// Removes a file; none is no error. A symbolic link itself is removed, not its target.
    /// [`StateDir::sync`] makes the removal durable.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        match rustix::fs::unlinkat(&self.dir, one_name(name)?, AtFlags::empty()) {
            Err(Errno::NOENT) => Ok(()),
            done => Ok(done?),
        }
    }

    /// Distinguishes the content of a file from any other that is put in its place.
    pub(crate) fn version(&self, name: &str) -> io::Result<FileVersion> {
        let stat = rustix::fs::statat(&self.dir, one_name(name)?, AtFlags::SYMLINK_NOFOLLOW)?;
        let changed = (stat.st_ctime.into(), i128::from(stat.st_ctime_nsec));
        Ok(FileVersion { file: (stat.st_dev, stat.st_ino), size: stat.st_size, changed })
    }

    /// Whether something of that name exists, a dangling symbolic link included.
    pub fn exists(&self, name: &str) -> io::Result<bool> {
        match rustix::fs::statat(&self.dir, one_name(name)?, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }

    /// Waits until the names in the directory are on disk.
    pub fn sync(&self) -> io::Result<()> {
        count_sync();
        Ok(rustix::fs::fsync(&self.dir)?)
    }

    fn writable(&self, name: &str, flags: OFlags, mode: u32) -> io::Result<File> {
        let file = self.open_at(name, flags, mode)?;
        let stat = rustix::fs::fstat(&file)?;
        self.check(name, &stat)?;
        // A second name may be that of any file of ours elsewhere.
        if stat.st_nlink > 1 {
            return Err(self.refused(name, "it is a hard link to another file"));
        }
        Ok(file.into())
    }

    fn open_at(&self, name: &str, flags: OFlags, mode: u32) -> io::Result<OwnedFd> {
        // NONBLOCK: a FIFO of that name must not hold the process; it has no effect on a regular
        // file.
        let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        rustix::fs::openat(&self.dir, one_name(name)?, flags, Mode::from_raw_mode(mode)).map_err(
            |e| match e {
                Errno::LOOP => self.refused(name, "it is a symbolic link"),
                e => e.into(),
            },
        )
    }

    fn check(&self, name: &str, stat: &Stat) -> io::Result<()> {
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(self.refused(name, "it is not a regular file"));
        }
        if !is_trusted(stat.st_uid) {
            return Err(self.refused(name, &format!("it belongs to user {}", stat.st_uid)));
        }
        Ok(())
    }

    fn refused(&self, name: &str, why: &str) -> io::Error {
        let path = self.path.join(name);
        let text =
            format!("{why}; rtvirtio does not make such files: look at {} and remove it", path.display());
        io::Error::new(io::ErrorKind::InvalidData, text)
    }
}

/// Identifies the content of a file, which is only ever replaced as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileVersion {
    /// Device and inode.
    file: (u64, u64),
    size: i64,
    /// Time of the last change of content, name or attributes: seconds and nanoseconds.
    changed: (i128, i128),
}

/// Whether files of this user are trusted: our own, or root's, who can change everything anyway.
fn is_trusted(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}

fn untrusted(path: &Path, why: String) -> ApplyError {
    ApplyError::UntrustedState { path: path.to_owned(), why }
}

/// The name of a file right in the directory.
fn one_name(name: &str) -> io::Result<&OsStr> {
    let mut parts = Path::new(name).components();
    match (parts.next(), parts.next()) {
        (Some(Component::Normal(part)), None) if part == name => Ok(part),
        _ => Err(io::Error::new(io::ErrorKind::InvalidInput, format!("`{name}` is not a file name"))),
    }
}
