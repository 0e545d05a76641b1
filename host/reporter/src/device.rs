//! The `ivshmem` device of this guest (QEMU's `docs/specs/ivshmem-spec.rst`): BAR 2 is the shared
//! memory, BAR 0 has the doorbell register at byte 12.

use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use rtvirtio_urgency::page::Region;

use rtvirtio_bpf::Mapping;

use crate::ReporterError;

/// Directory in which Linux lists PCI devices.
const DEVICES: &str = "/sys/bus/pci/devices";
/// Vendor and device of `ivshmem`.
const ID: [&str; 2] = ["0x1af4", "0x1110"];
/// Word of the doorbell register in BAR 0.
const DOORBELL: usize = 3;
/// Largest part of BAR 2 that is mapped, in bytes: 288 vCPUs need less.
const MAX_MAPPED: u64 = 64 << 10;

/// Shared memory of the device, and its doorbell.
#[derive(Debug)]
pub struct Device {
    path: PathBuf,
    memory: Mapping,
    registers: Option<Mapping>,
}

impl Device {
    /// Finds the first `ivshmem` device in which a host offers a page. A machine may have others
    /// for other purposes.
    ///
    /// # Errors
    /// [`ReporterError::NoDevice`], [`ReporterError::NotOffered`], or when it cannot be mapped.
    pub fn find() -> Result<Self, ReporterError> {
        Self::find_in(Path::new(DEVICES))
    }

    fn find_in(devices: &Path) -> Result<Self, ReporterError> {
        let mut paths = Vec::new();
        for entry in fs::read_dir(devices).map_err(ReporterError::io("list", devices))?.flatten() {
            // kernel file
            let word = |name: &str| fs::read_to_string(entry.path().join(name)).unwrap_or_default();
            if [word("vendor").trim(), word("device").trim()] == ID {
                paths.push(entry.path());
            }
        }
        paths.sort();
        let mut last = ReporterError::NoDevice;
        for path in paths {
            let device = Self::open(&path)?;
            if device.region().is_offered() {
                return Ok(device);
            }
            last = ReporterError::NotOffered { device: path };
        }
        Err(last)
    }

    fn open(path: &Path) -> Result<Self, ReporterError> {
        // No driver of the kernel takes it, so nothing else enables its memory. An error shows in
        // the mapping.
        let _ = fs::write(path.join("enable"), "1");
        let map = |name: &str, most: u64| -> Result<Mapping, ReporterError> {
            let path = path.join(name);
            // kernel file
            let file = OpenOptions::new().read(true).write(true).open(&path);
            let file = file.map_err(ReporterError::io("open", &path))?;
            let bytes = file.metadata().map_err(ReporterError::io("look at", &path))?.len().min(most);
            let bytes = usize::try_from(bytes).unwrap_or(0);
            Mapping::new(&file, bytes.next_multiple_of(rustix::param::page_size()))
                .map_err(ReporterError::io("map", &path))
        };
        let memory = map("resource2", MAX_MAPPED)?;
        if Region::new(memory.as_words()).is_none() {
            return Err(ReporterError::TooSmall { vcpu: 0, blocks: 0 });
        }
        // BAR 1, the interrupt table, is there only in a device with a doorbell.
        let registers =
            if path.join("resource1").exists() { Some(map("resource0", MAX_MAPPED)?) } else { None };
        Ok(Self { path: path.to_owned(), memory, registers })
    }

    /// Directory of the device in `/sys`.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Layout of the page in the shared memory.
    ///
    /// # Panics
    /// Never: its size is checked when it is opened.
    #[must_use]
    pub fn region(&self) -> Region<'_> {
        Region::new(self.memory.as_words()).expect("a page of the least size")
    }

    /// Rings the doorbell, if the host has asked for it.
    pub fn ring(&self) {
        if let (Some(registers), Some(value)) = (&self.registers, self.region().doorbell()) {
            registers.as_words()[DOORBELL].store(value.to_le(), Ordering::Release);
        }
    }
}
