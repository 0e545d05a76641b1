//! A VM's memory as buffers that are registered with an engine's ring.

use std::io;
use std::sync::{Arc, Weak};

use rtvirtio_units::Bytes;

use super::uring::{BufferRow, Uring};
use crate::log::write_line;
use crate::memory::{GuestMem, Pinner};

/// The registered buffers of one VM.
#[derive(Debug, Default)]
pub struct VmBuffers {
    /// The memory, and its row of the ring's table.
    taken: Option<(Weak<GuestMem>, BufferRow)>,
    /// A failure was logged: a front end can repeat it, and the engine does not wait for the log.
    is_reported: bool,
}

impl VmBuffers {
    /// Whether they are of this memory.
    fn is_of(&self, mem: &Arc<GuestMem>) -> bool {
        // The allocation of a weak reference is not used for anything else.
        self.taken.as_ref().is_some_and(|(of, _)| std::ptr::eq(of.as_ptr(), Arc::as_ptr(mem)))
    }

    /// Takes the pinned memory of a VM over, in place of any other.
    pub fn replace(&mut self, ring: &mut Uring, mem: &Arc<GuestMem>, name: &str) {
        if self.is_of(mem) {
            return;
        }
        self.release(ring, name);
        let Some(pins) = mem.pins() else { return };
        match ring.take_buffers(pins.pinner()) {
            Ok(row) => self.taken = Some((Arc::downgrade(mem), row)),
            Err(e) => self
                .report(format_args!("{name}: its memory is pinned, and its requests do not use that: {e}")),
        }
    }

    /// Gives the buffers up, before the control thread unpins the memory: that takes long.
    pub fn release(&mut self, ring: &mut Uring, name: &str) {
        let Some((_, row)) = self.taken.take() else { return };
        if let Err(e) = ring.release_buffers(&row) {
            self.report(format_args!("{name}: its memory stays pinned: {e}"));
        }
    }

    /// Logs the first failure.
    fn report(&mut self, text: std::fmt::Arguments<'_>) {
        if !std::mem::replace(&mut self.is_reported, true) {
            write_line(text);
        }
    }

    /// The registered buffer of some bytes of this memory, if all of them are in one.
    pub fn find(&self, mem: &Arc<GuestMem>, start: *const u8, len: usize) -> Option<u16> {
        let (_, row) = self.taken.as_ref().filter(|_| self.is_of(mem))?;
        let buffer = mem.pins()?.buffer(start, len).filter(|buffer| *buffer < row.len())?;
        u16::try_from(row.first() + buffer).ok()
    }
}

/// A ring with which so much of a disk's memory is pinned, if the rings of engines take its buffers
/// over, from this place of their tables on.
///
/// # Errors
/// The kernel cannot do that (Linux 6.13), or has no such places.
pub fn pinner(most: Bytes, row: u32) -> io::Result<Pinner> {
    let pinner = Pinner::new(most, row)?;
    let mut engine = Uring::new(64, pinner.row().end)?;
    let row = engine.take_buffers(&pinner)?;
    engine.release_buffers(&row)?;
    Ok(pinner)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use io_uring::opcode;
    use io_uring::types::Fd;
    use rtvirtio_units::Nanos;
    use vm_memory::{Bytes as _, GuestAddress, GuestMemoryBackend as _};

    use super::*;
    use crate::engine::uring::CompletionToken;

    /// Bytes of a large region.
    const SIZE: usize = 4 << 20;

    fn result_of(ring: &mut Uring) -> i32 {
        loop {
            if let Some(done) = ring.next_completion() {
                return done.result;
            }
            ring.enter(true, Nanos(0), Nanos(u64::MAX)).unwrap();
        }
    }

    /// A request in flight keeps its buffer when the buffer is given up, and no later one has it.
    #[test]
    fn buffers_that_are_given_up_last_as_long_as_their_requests() {
        let most = Bytes(SIZE as u64 + (2 << 20));
        // Another disk has the places before and after its own.
        let Ok(before) = pinner(most, 0).map(Arc::new) else {
            let why = "io_uring of this kernel takes no registered buffers over";
            return rtvirtio_testkit::skip("buffers_that_are_given_up_last_as_long_as_their_requests", why);
        };
        let pinner = Arc::new(pinner(most, before.row().end).unwrap());
        let memory = || {
            // The last region is too small.
            let at = [(0, SIZE), (1 << 30, 2 << 20), (1 << 32, (2 << 20) - 1)];
            let mem = GuestMem::anonymous(&at.map(|(base, len)| (GuestAddress(base), len)));
            Arc::new(GuestMem::from_mapped(mem.unwrap()))
        };
        let (mem, other) = (memory(), memory());
        let place = |mem: &GuestMem, at| mem.mem.get_host_address(GuestAddress(at)).unwrap();
        let mut ring = Uring::new(64, pinner.row().end).unwrap();
        let mut buffers = VmBuffers::default();
        buffers.replace(&mut ring, &mem, "a");
        assert_eq!(buffers.find(&mem, place(&mem, 0), 1), None, "not pinned yet");
        let report = mem.pin(&pinner);
        assert!(report.pinned == most.0 && report.left.is_none(), "{report:?}");
        buffers.replace(&mut ring, &mem, "a");
        let buffer = buffers.find(&mem, place(&mem, 4_096), 4_096).unwrap();
        assert_ne!(buffers.find(&mem, place(&mem, 1 << 30), 4_096).unwrap(), buffer);
        assert_eq!(buffers.find(&mem, place(&mem, 4_096), SIZE - 4_095), None);
        assert_eq!(buffers.find(&mem, place(&mem, 1 << 32), 4_096), None, "a small region");
        let (mut neighbour, mut late) = (VmBuffers::default(), VmBuffers::default());
        assert_eq!(other.pin(&before).pinned, most.0);
        neighbour.replace(&mut ring, &other, "b");
        let own = buffers.find(&mem, place(&mem, 4_096), 4_096);
        assert_eq!(own, Some(buffer), "places of another disk");
        assert!(
            neighbour.find(&other, place(&other, 0), 1).is_some_and(|at| u32::from(at) < before.row().end)
        );
        assert_eq!(buffers.find(&other, place(&mem, 4_096), 1), None, "buffers of other memory");
        let (from, to) = rustix::pipe::pipe().unwrap();
        let read = |ring: &mut Uring| {
            let entry = opcode::ReadFixed::new(Fd(from.as_raw_fd()), place(&mem, 4_096), 1, buffer).build();
            ring.push(&entry.user_data(CompletionToken::Piece(1).to_user_data())).unwrap();
            ring.enter(false, Nanos(0), Nanos(0)).unwrap();
        };
        read(&mut ring);
        assert!(ring.next_completion().is_none());
        buffers.release(&mut ring, "a");
        assert_eq!(buffers.find(&mem, place(&mem, 4_096), 1), None);
        rustix::io::write(&to, b"x").unwrap();
        assert_eq!(result_of(&mut ring), 1);
        assert_eq!(mem.mem.read_obj::<u8>(GuestAddress(4_096)).unwrap(), b'x');
        read(&mut ring);
        assert_eq!(result_of(&mut ring), -libc::EFAULT, "the place is empty");
        // The places are used again; a ring without a table says so.
        buffers.replace(&mut ring, &mem, "a");
        assert_eq!(buffers.find(&mem, place(&mem, 4_096), 1), Some(buffer));
        let mut without = Uring::new(64, 0).unwrap();
        assert!(without.take_buffers(&pinner).is_err());
        for _ in 0..2 {
            late.replace(&mut without, &mem, "a failure that is logged once");
            assert!(late.is_reported && late.taken.is_none());
        }
        drop(mem);
        assert_eq!(pinner.end(), 0, "unpinned with the memory");
    }
}
