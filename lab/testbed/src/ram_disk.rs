//! A loop device over memory: the fastest block device, for measuring the layers above it.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use rtvirtio_units::Bytes;

use crate::loops;
use crate::twin::TwinError;

/// Directory of a memory file system that every Linux has.
const DIR: &str = "/dev/shm";

/// A loop device over a file in memory. It is removed when this is dropped, and also when the
/// process is killed: the file has no name, and the kernel detaches the device when the last one
/// closes it.
#[derive(Debug)]
pub struct RamDisk {
    device: PathBuf,
    _open: File,
}

impl RamDisk {
    /// Makes a device of this size, all of it written.
    pub fn new(size: Bytes) -> Result<Self, TwinError> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let path = Path::new(DIR).join(format!("rtvirtio-ram-{}-{number}", std::process::id()));
        let fail = |e: std::io::Error| TwinError::Loop { path: path.clone(), message: e.to_string() };
        // Never an existing file or the target of a link of that name: the directory is
        // world-writable.
        let file = File::create_new(&path).map_err(fail)?;
        let fill = || -> std::io::Result<()> {
            let zeroes = vec![0u8; 1 << 20];
            let mut remaining = size.0;
            while remaining > 0 {
                let part = remaining.min(zeroes.len() as u64);
                std::io::Write::write_all(&mut &file, &zeroes[..part as usize])?;
                remaining -= part;
            }
            Ok(())
        };
        let attached = fill().map_err(fail).and_then(|()| loops::attach_buffered(&path));
        let device = attached.inspect_err(|_| {
            let _ = std::fs::remove_file(&path);
        })?;
        let open = File::open(&device).map_err(fail);
        let _ = std::fs::remove_file(&path);
        // While it is open this only marks it for detaching.
        let detached = loops::detach_later(&device);
        let open = open?;
        detached?;
        Ok(Self { device, _open: open })
    }

    /// Path of the block device.
    #[must_use]
    pub fn device(&self) -> &Path {
        &self.device
    }
}
