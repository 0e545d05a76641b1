//! Shared memory as a file that is read and written.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use rtvirtio_urgency::page::Memory;

/// Part of a file: the device's memory, or a guest's memory by way of `/proc/PID/mem`. Nothing is
/// mapped: a truncated file gives an error and no signal.
#[derive(Clone, Debug)]
pub struct FileMemory {
    file: Arc<File>,
    first: u64,
}

impl FileMemory {
    /// Part of the file from `first` on.
    #[must_use]
    pub fn new(file: File, first: u64) -> Self {
        Self { file: Arc::new(file), first }
    }

    /// File that holds the memory.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    fn at(&self, at: usize) -> io::Result<u64> {
        self.first.checked_add(at as u64).ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }
}

impl Memory for FileMemory {
    type Error = io::Error;

    fn read(&self, at: usize, into: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(into, self.at(at)?)
    }

    fn write(&self, at: usize, from: &[u8]) -> io::Result<()> {
        self.file.write_all_at(from, self.at(at)?)
    }
}
