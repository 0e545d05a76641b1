//! Opens spec files without blocking: the path may be one that others control.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// Reads at most `limit` bytes of a regular file. Links are followed; a FIFO or a device is not
/// opened.
pub(crate) fn read(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    regular(&fs::metadata(path)?)?;
    let file: File = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    // Checked again: the name may refer to another file by now.
    regular(&file.metadata()?)?;
    let mut bytes = Vec::new();
    file.take(limit).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn regular(meta: &Metadata) -> io::Result<()> {
    match meta.file_type() {
        kind if kind.is_file() => Ok(()),
        kind if kind.is_dir() => Err(io::Error::from_raw_os_error(libc::EISDIR)),
        _ => {
            Err(io::Error::new(io::ErrorKind::InvalidInput, "it is a FIFO or a device, and no regular file"))
        }
    }
}
