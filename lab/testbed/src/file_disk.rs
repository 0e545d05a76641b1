//! A file on a disk of this machine as a block device: real hardware for machines without a spare
//! device.
//!
//! The file is written in full, so that no request hits a hole, and a loop device with direct I/O
//! passes requests on to the disk below it. Other users of that disk are measured too.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rtvirtio_units::Bytes;
use serde::{Deserialize, Serialize};

use crate::LabError;
use crate::loops::{attach, detach, elevator_of, loops_on, set_elevator};
use crate::twin::TwinError;

/// Bytes written at a time.
const CHUNK: usize = 1 << 20;
/// Size of a block; each differs from all others, against compression and deduplication.
const BLOCK: usize = 4096;

/// Parts of a file disk, saved so that they are found and removed also after a crash.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileDisk {
    path: PathBuf,
    /// Device and inode of the file as made: another file at the same path is not removed.
    identity: Option<(u64, u64)>,
    device: Option<PathBuf>,
    elevator: Option<String>,
}

impl FileDisk {
    /// Makes file and loop device, and returns the device. `save` is called with the handle before
    /// each part is made.
    ///
    /// # Errors
    /// [`LabError`]: the file exists, the disk is full, no loop device, cancelled. The parts made
    /// so far are removed.
    pub fn make(
        path: &Path,
        size: Bytes,
        cancel: &AtomicBool,
        save: &mut dyn FnMut(&Self) -> Result<(), LabError>,
    ) -> Result<(Self, PathBuf), LabError> {
        let looked = path.symlink_metadata();
        if !looked.is_err_and(|e| e.kind() == io::ErrorKind::NotFound) {
            let message =
                "exists already; the lab makes and removes a file of its own: give another name".to_owned();
            return Err(LabError::Device { path: path.to_owned(), message });
        }
        let mut disk = Self { path: path.to_owned(), ..Self::default() };
        match disk.build(size, cancel, save) {
            Ok(device) => Ok((disk, device)),
            Err(e) => {
                // The first error is reported; parts that cannot be removed stay in the saved
                // handle.
                let _ = disk.remove();
                Err(e)
            }
        }
    }

    fn build(
        &mut self,
        size: Bytes,
        cancel: &AtomicBool,
        save: &mut dyn FnMut(&Self) -> Result<(), LabError>,
    ) -> Result<PathBuf, LabError> {
        let path = self.path.clone();
        save(self)?;
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)
            .map_err(io_at("create", &path))?;
        self.identity = Some(identity(&file.metadata().map_err(io_at("look at", &path))?));
        save(self)?;
        fill(&mut file, size, cancel).map_err(|e| match e.kind() {
            io::ErrorKind::Interrupted => LabError::Cancelled,
            _ => io_at("write", &path)(e).into(),
        })?;
        drop(file);
        let device = attach(&path)?;
        self.device = Some(device.clone());
        self.elevator = elevator_of(&device);
        save(self)?;
        Ok(device)
    }

    /// Removes loop device and file; missing parts are no error. Safe to call again.
    pub fn remove(&mut self) -> Result<(), TwinError> {
        for device in loops_on(&self.path)? {
            set_elevator(&device, self.elevator.as_deref().unwrap_or("none"));
            detach(&device)?;
        }
        self.device = None;
        let there = match self.path.symlink_metadata() {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            looked => looked.map_err(io_at("look at", &self.path))?,
        };
        // A crash right after the file was made leaves it empty and its identity unknown.
        let ours = match self.identity {
            Some(made) => identity(&there) == made,
            None => there.is_file() && there.len() == 0,
        };
        if ours {
            fs::remove_file(&self.path).map_err(io_at("remove", &self.path))?;
        }
        Ok(())
    }
}

fn identity(meta: &fs::Metadata) -> (u64, u64) {
    (meta.dev(), meta.ino())
}

fn io_at(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> TwinError {
    let path = path.to_owned();
    move |source| TwinError::Io { what, path, source }
}

/// Writes the whole file and waits until the disk has it. [`io::ErrorKind::Interrupted`] when
/// cancelled.
fn fill(file: &mut File, size: Bytes, cancel: &AtomicBool) -> io::Result<()> {
    let mut chunk = vec![0u8; CHUNK];
    // Any incompressible numbers will do.
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for word in chunk.chunks_exact_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word.copy_from_slice(&state.to_le_bytes());
    }
    let mut written = 0u64;
    while written < size.0 {
        if cancel.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let len = CHUNK.min((size.0 - written) as usize);
        for (i, block) in chunk[..len].chunks_mut(BLOCK).enumerate() {
            let at = written + (i * BLOCK) as u64;
            let stamp = block.len().min(8);
            block[..stamp].copy_from_slice(&at.to_le_bytes()[..stamp]);
        }
        file.write_all(&chunk[..len])?;
        written += len as u64;
    }
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_written_in_full_and_blocks_differ() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let path = dir.path().join("disk");
        let mut file = File::create(&path).unwrap();
        let size = Bytes((3 << 20) + 8192);
        fill(&mut file, size, &AtomicBool::new(false)).unwrap();
        let bytes = fs::read(&path).unwrap();
        assert_eq!(bytes.len() as u64, size.0);
        let mut blocks: Vec<&[u8]> = bytes.chunks(BLOCK).collect();
        let n = blocks.len();
        blocks.sort_unstable();
        blocks.dedup();
        assert_eq!(blocks.len(), n);
        let stopped = fill(&mut file, size, &AtomicBool::new(true)).unwrap_err();
        assert_eq!(stopped.kind(), io::ErrorKind::Interrupted);
    }

    #[test]
    fn a_file_of_somebody_else_is_neither_overwritten_nor_removed() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let path = dir.path().join("disk");
        fs::write(&path, "precious").unwrap();
        let made = FileDisk::make(&path, Bytes(1 << 20), &AtomicBool::new(false), &mut |_| Ok(()));
        assert!(made.unwrap_err().to_string().contains("exists already"));
        for identity in [None, Some((1, 1))] {
            FileDisk { path: path.clone(), identity, ..FileDisk::default() }.remove().unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
        }
        // A crash right after it was made.
        fs::write(&path, "").unwrap();
        FileDisk { path: path.clone(), ..FileDisk::default() }.remove().unwrap();
        assert!(!path.exists());
    }
}
