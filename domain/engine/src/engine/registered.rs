//! Files that are registered with a ring: the kernel does not look their descriptors up, and counts
//! no reference, for each request.

use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};

use io_uring::types::Fd;
use io_uring::{opcode, squeue};

/// No file in a slot.
const NONE: RawFd = -1;

/// A file as an operation names it: by slot if it is registered, by descriptor otherwise.
#[derive(Clone, Copy, Debug)]
pub struct FileRef {
    fd: Fd,
    flags: squeue::Flags,
}

impl FileRef {
    /// Number for the operation.
    pub fn fd(self) -> Fd {
        self.fd
    }

    /// Names the file in an entry that was built with [`FileRef::fd`].
    pub fn apply(self, entry: squeue::Entry) -> squeue::Entry {
        entry.flags(self.flags)
    }
}

/// State of a slot.
#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    /// Updates that the kernel has not completed.
    pending: u32,
    /// Whether the kernel has the file of the slot.
    is_registered: bool,
}

/// The registered files of a ring: one slot for each place of a VM, as far as there are slots.
///
/// A registered file stays open, with its locks, until its slot is cleared.
#[derive(Debug)]
pub struct RegisteredFiles {
    /// Read by the kernel when an update is submitted.
    fds: Box<[RawFd]>,
    slots: Box<[Slot]>,
}

impl RegisteredFiles {
    /// So many empty slots.
    pub fn new(slots: u32) -> Self {
        let n = slots as usize;
        Self { fds: vec![NONE; n].into(), slots: vec![Slot::default(); n].into() }
    }

    /// Whether there is no slot.
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Puts another file, or none, into a slot. Returns the operation for the kernel; `None` where
    /// there is nothing to change.
    pub fn replace(&mut self, at: usize, file: Option<&File>) -> Option<squeue::Entry> {
        let fd = file.map_or(NONE, AsRawFd::as_raw_fd);
        let (place, slot) = (self.fds.get_mut(at)?, self.slots.get_mut(at)?);
        if *place == NONE && fd == NONE {
            return None;
        }
        // Until the kernel has completed the last update, the descriptor is used. An update that it
        // reads late has the newest file.
        *place = fd;
        (slot.is_registered, slot.pending) = (false, slot.pending + 1);
        let entry = opcode::FilesUpdate::new(std::ptr::from_ref(place), 1);
        Some(entry.offset(i32::try_from(at).ok()?).build())
    }

    /// The kernel has completed an update. Kernels without the operation refuse it.
    pub fn on_update(&mut self, at: usize, result: i32) {
        let Some(slot) = self.slots.get_mut(at) else { return };
        slot.pending = slot.pending.saturating_sub(1);
        slot.is_registered = result == 1 && slot.pending == 0 && self.fds[at] != NONE;
    }

    /// A file as operations name it, which is that of the slot if the slot has one.
    pub fn get(&self, at: usize, file: &File) -> FileRef {
        let fd = file.as_raw_fd();
        let is_registered = self.slots.get(at).is_some_and(|slot| slot.is_registered);
        match i32::try_from(at) {
            Ok(index) if is_registered && self.fds.get(at) == Some(&fd) => {
                FileRef { fd: Fd(index), flags: squeue::Flags::FIXED_FILE }
            }
            _ => FileRef { fd: Fd(fd), flags: squeue::Flags::empty() },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_by_slot(files: &RegisteredFiles, at: usize, file: &File) -> bool {
        let named = files.get(at, file);
        let by_slot = named.flags.contains(squeue::Flags::FIXED_FILE);
        assert_eq!(named.fd.0, if by_slot { at as i32 } else { file.as_raw_fd() });
        by_slot
    }

    /// A file is named by its slot between the completion of its update and the next change only.
    #[test]
    fn a_slot_is_used_while_the_kernel_has_its_file() {
        let (first, second) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        let mut files = RegisteredFiles::new(2);
        assert!(files.replace(1, Some(&first)).is_some());
        assert!(!is_by_slot(&files, 1, &first));
        files.on_update(1, 1);
        assert!(is_by_slot(&files, 1, &first));
        assert!(!is_by_slot(&files, 1, &second) && !is_by_slot(&files, 0, &first));
        // Removed, and another one in its place before the kernel has completed that.
        assert!(files.replace(1, None).is_some());
        assert!(!is_by_slot(&files, 1, &first));
        assert!(files.replace(1, Some(&second)).is_some());
        files.on_update(1, 1);
        assert!(!is_by_slot(&files, 1, &second));
        files.on_update(1, 1);
        assert!(is_by_slot(&files, 1, &second));
    }

    #[test]
    fn a_refused_update_and_a_place_without_a_slot_use_the_descriptor() {
        let file = tempfile::tempfile().unwrap();
        let mut files = RegisteredFiles::new(1);
        assert!(files.replace(0, Some(&file)).is_some());
        files.on_update(0, -libc::EINVAL);
        assert!(!is_by_slot(&files, 0, &file));
        assert!(files.replace(1, Some(&file)).is_none());
        assert!(!is_by_slot(&files, 1, &file));
        files.on_update(7, 1);
        // An empty slot needs no operation.
        assert!(RegisteredFiles::new(1).replace(0, None).is_none());
    }
}
