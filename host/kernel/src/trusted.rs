//! Opens files that another user may have put in place, each by a stated policy.
//!
//! A privileged process that opens a path which another user can shape reads, writes or waits for
//! whatever that user chooses. So no product code opens a path outside of `/proc` and `/sys` by
//! itself; each place uses the policy that fits:
//!
//! | function | links | what is accepted |
//! |---|---|---|
//! | [`read_config`], [`open_config`] | followed | a regular file, bounded; never waits |
//! | [`read_named`] | followed | pipes and terminals too; a signal ends the wait |
//! | [`lock_file`], [`open_lock`], [`read_own`], [`append_own`] | refused | one name, own or root's |
//! | [`append_named`] | followed | a regular file that the user of a command names |
//! | [`process`] | no path at all | a file that a process has mapped writable |

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;

use rustix::event::{PollFd, PollFlags, poll};

pub mod process;

#[cfg(test)]
mod tests;

/// Largest configuration file, in bytes.
pub const CONFIG_LIMIT: u64 = 1 << 20;
/// Largest file of measurements or of a model, in bytes.
pub const DATA_LIMIT: u64 = 64 << 20;
/// Permissions of group and others.
const OTHERS: u32 = 0o077;

/// Reason to refuse a file. In an [`io::Error`] of kind `InvalidData`, whose context has the path.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// A FIFO, a device, a socket or a directory.
    #[error("it is a {kind}, and must be a regular file: remove it, or name another file")]
    NotRegular {
        /// Type of the file, such as `FIFO`.
        kind: &'static str,
    },
    /// A symbolic link, where none is followed.
    #[error("it is a symbolic link, and none is followed here: check its target, and remove it")]
    Link,
    /// A file that has another name too.
    #[error("it is a hard link to another file: check which one, and remove it")]
    HardLink,
    /// A file of another user.
    #[error("it belongs to user {uid}: check it, and remove it or give it to this user")]
    Owner {
        /// User id of the owner.
        uid: u32,
    },
    /// A file that is too large.
    #[error("it has more than {limit} bytes, the most for such a file: shorten it, or name another file")]
    TooLarge {
        /// Largest size accepted, in bytes.
        limit: u64,
    },
}

impl Refusal {
    /// The refusal in an error; `None` for another error.
    #[must_use]
    pub fn find_in(error: &io::Error) -> Option<&Self> {
        error.get_ref()?.downcast_ref()
    }
}

impl From<Refusal> for io::Error {
    fn from(refusal: Refusal) -> Self {
        Self::new(io::ErrorKind::InvalidData, refusal)
    }
}

/// Opens a regular file to read it. Links are followed. Neither a FIFO nor a lease blocks the
/// caller, and no device is opened.
///
/// # Errors
/// [`Refusal::NotRegular`], or as open(2) reports.
pub fn open_config(path: impl AsRef<Path>) -> io::Result<File> {
    let path = path.as_ref();
    // Opening a device may change it, so the type is checked first.
    regular(&std::fs::metadata(path)?)?;
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)?;
    // The name may be another file's by now.
    regular(&file.metadata()?)?;
    Ok(file)
}

/// Content of a regular file of at most `limit` bytes, as [`open_config`] opens it.
///
/// # Errors
/// [`Refusal::NotRegular`], [`Refusal::TooLarge`], or as the system calls report.
pub fn read_config(path: impl AsRef<Path>, limit: u64) -> io::Result<Vec<u8>> {
    bounded(open_config(path)?, limit)
}

/// Text of a regular file, as [`read_config`].
///
/// # Errors
/// As [`read_config`]; kind `InvalidData` for bytes that are not UTF-8.
pub fn read_config_text(path: impl AsRef<Path>, limit: u64) -> io::Result<String> {
    text(read_config(path, limit)?)
}

/// Whether a path leads to a pipe or a character device.
#[must_use]
pub fn is_stream(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|meta| meta.file_type().is_fifo() || meta.file_type().is_char_device())
}

/// Content of a path that the user of a command names: a file, and a pipe such as `/dev/stdin` or
/// `<(...)` too, of at most `limit` bytes. A signal ends the wait for a pipe.
///
/// # Errors
/// [`Refusal::TooLarge`], [`Refusal::NotRegular`] for a block device, kind `Interrupted` after a
/// signal, or as the system calls report.
pub fn read_named(path: impl AsRef<Path>, limit: u64) -> io::Result<Vec<u8>> {
    let path = path.as_ref();
    if !is_stream(path) {
        return read_config(path, limit);
    }
    let mut file =
        OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)?;
    let mut bytes = Vec::new();
    let mut part = [0; 16 << 10];
    loop {
        // Before the first byte a FIFO without a writer reads as empty; poll(2) waits for one, and
        // is not restarted after a signal.
        poll(&mut [PollFd::new(&file, PollFlags::IN)], None)?;
        match file.read(&mut part) {
            Ok(0) => return Ok(bytes),
            Ok(n) => bytes.extend_from_slice(&part[..n]),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(e) => return Err(e),
        }
        if bytes.len() as u64 > limit {
            return Err(Refusal::TooLarge { limit }.into());
        }
    }
}

/// Text of a path that the user of a command names, as [`read_named`].
///
/// # Errors
/// As [`read_named`]; kind `InvalidData` for bytes that are not UTF-8.
pub fn read_named_text(path: impl AsRef<Path>, limit: u64) -> io::Result<String> {
    text(read_named(path, limit)?)
}

/// Opens a regular file to append to it, and creates it where there is none. Links are followed,
/// and a FIFO does not block the caller.
pub fn append_named(path: impl AsRef<Path>) -> io::Result<File> {
    let file = OpenOptions::new()
        .append(true)
        .create(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)?;
    regular(&file.metadata()?)?;
    Ok(file)
}

/// Content of a file that only this user or root writes, such as one in a run directory that others
/// can write to. No link is followed.
///
/// # Errors
/// A [`Refusal`], or as the system calls report.
pub fn read_own(path: impl AsRef<Path>, limit: u64) -> io::Result<Vec<u8>> {
    bounded(own(path.as_ref(), OpenOptions::new().read(true))?, limit)
}

/// Opens a file to append to it, and creates it with the permissions `mode` where there is none; as
/// [`read_own`].
///
/// # Errors
/// A [`Refusal`], or as the system calls report.
pub fn append_own(path: impl AsRef<Path>, mode: u32) -> io::Result<File> {
    own(path.as_ref(), OpenOptions::new().append(true).create(true).mode(mode))
}

/// Opens a lock file (flock(2)), and creates it where there is none. Only this user can open it:
/// any process that can open a file, even only to read it, can lock it. A file that others could
/// open is closed to them; processes that have it open keep it until they end.
///
/// # Errors
/// A [`Refusal`], or as the system calls report.
pub fn lock_file(path: impl AsRef<Path>) -> io::Result<File> {
    let file = own(
        path.as_ref(),
        OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600),
    )?;
    let meta = file.metadata()?;
    let mode = meta.mode() & 0o7777;
    // Root may open another user's file, which keeps its owner.
    if mode & OTHERS != 0 {
        file.set_permissions(std::fs::Permissions::from_mode(mode & !OTHERS))?;
    }
    Ok(file)
}

/// Opens a lock file that exists, to find its holder.
///
/// # Errors
/// A [`Refusal`], or as open(2) reports.
pub fn open_lock(path: impl AsRef<Path>) -> io::Result<File> {
    own(path.as_ref(), OpenOptions::new().read(true))
}

fn own(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
    let file = options.custom_flags(flags).open(path).map_err(|e| match e.raw_os_error() {
        Some(libc::ELOOP) => Refusal::Link.into(),
        // A FIFO without a reader that is opened to write, or a socket.
        Some(libc::ENXIO) => match std::fs::symlink_metadata(path).map(|m| regular(&m)) {
            Ok(Err(refusal)) => refusal.into(),
            _ => e,
        },
        _ => e,
    })?;
    let meta = file.metadata()?;
    regular(&meta)?;
    if meta.uid() != 0 && meta.uid() != rustix::process::geteuid().as_raw() {
        return Err(Refusal::Owner { uid: meta.uid() }.into());
    }
    // A second name may be that of any file of ours elsewhere.
    if meta.nlink() > 1 {
        return Err(Refusal::HardLink.into());
    }
    Ok(file)
}

fn regular(meta: &std::fs::Metadata) -> Result<(), Refusal> {
    let kind = meta.file_type();
    let kind = match () {
        () if kind.is_file() => return Ok(()),
        () if kind.is_fifo() => "FIFO",
        () if kind.is_dir() => "directory",
        () if kind.is_socket() => "socket",
        () if kind.is_symlink() => "symbolic link",
        () => "device",
    };
    Err(Refusal::NotRegular { kind })
}

fn bounded(file: File, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    // The reported size may be wrong, as in /proc, or grow meanwhile.
    file.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        return Err(Refusal::TooLarge { limit }.into());
    }
    Ok(bytes)
}

fn text(bytes: Vec<u8>) -> io::Result<String> {
    String::from_utf8(bytes).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e.utf8_error()))
}
