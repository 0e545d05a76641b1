//! A VM's memory as buffers that are registered with an engine's ring.

use std::io;
use std::sync::{Arc, Weak};

use super::uring::{BufferRow, Tables, Uring};
use crate::log::write_line;
use crate::memory::{GuestMem, MOST_BUFFERS, Pinner};

/// The registered buffers of one VM.
#[derive(Debug, Default)]
pub struct VmBuffers(Option<(Weak<GuestMem>, BufferRow)>);

impl VmBuffers {
    /// Whether they are of this memory.
    fn is_of(&self, mem: &Arc<GuestMem>) -> bool {
        // The allocation of a weak reference is not used for anything else.
        self.0.as_ref().is_some_and(|(of, _)| std::ptr::eq(of.as_ptr(), Arc::as_ptr(mem)))
    }

    /// Takes the pinned memory of a VM over, in place of any other.
    pub fn replace(&mut self, ring: &mut Uring, mem: &Arc<GuestMem>, name: &str) {
        if self.is_of(mem) {
            return;
        }
        self.release(ring, name);
        let Some(pins) = mem.pins() else { return };
        match ring.take_buffers(pins.pinner()) {
            Ok(row) => self.0 = Some((Arc::downgrade(mem), row)),
            Err(e) => {
                write_line(format_args!(
                    "{name}: its memory is pinned, and its requests do not use that: {e}"
                ));
            }
        }
    }

    /// Gives the buffers up, before the control thread unpins the memory: that takes long.
    pub fn release(&mut self, ring: &mut Uring, name: &str) {
        let Some((_, row)) = self.0.take() else { return };
        if let Err(e) = ring.release_buffers(&row) {
            write_line(format_args!("{name}: its memory stays pinned: {e}"));
        }
    }

    /// The registered buffer of some bytes of this memory, if all of them are in one.
    pub fn find(&self, mem: &Arc<GuestMem>, start: *const u8, len: usize) -> Option<u16> {
        let (_, row) = self.0.as_ref().filter(|_| self.is_of(mem))?;
        let buffer = mem.pins()?.buffer(start, len).filter(|buffer| *buffer < row.len())?;
        u16::try_from(row.first() + buffer).ok()
    }
}

/// A ring with which a disk's memory is pinned, if the rings of engines take its buffers over.
///
/// # Errors
/// The kernel cannot do that (Linux 6.13).
pub fn pinner() -> io::Result<Pinner> {
    let pinner = Pinner::new()?;
    let mut engine = Uring::new(64, Tables { files: 0, buffers: MOST_BUFFERS })?;
    let row = engine.take_buffers(&pinner)?;
    engine.release_buffers(&row)?;
    Ok(pinner)
}
