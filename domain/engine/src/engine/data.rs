//! Data transfer between guest memory and the device.

use io_uring::types::Fd;
use io_uring::{opcode, squeue};
use rtvirtio_sched::{Class, Op, Piece, Priority};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use super::table::{InflightRequest, PieceSlot};
use crate::blk::{self, Segment};
use crate::memory::{GuestMem, Memory};

/// Writes the serial number, padded with zeroes; returns the number of bytes.
pub fn write_serial(mem: &Memory, segments: &[Segment], serial: &str) -> u64 {
    let mut id = [0u8; blk::ID_LEN];
    let n = serial.len().min(id.len());
    id[..n].copy_from_slice(&serial.as_bytes()[..n]);
    let mut done = 0;
    for s in segments {
        let part = (s.len as usize).min(id.len() - done);
        if mem.write_slice(&id[done..done + part], s.addr).is_err() {
            break;
        }
        done += part;
    }
    done as u64
}

/// The ranges of guest memory that hold a piece's data.
fn guest_ranges<'a>(
    segments: &'a [Segment],
    piece: &Piece,
) -> impl Iterator<Item = (GuestAddress, usize)> + 'a {
    let (mut skip, mut left) = (piece.offset, piece.len);
    segments.iter().filter_map(move |s| {
        let len = u64::from(s.len);
        let from = skip.min(len);
        skip -= from;
        let part = (len - from).min(left);
        left -= part;
        (part > 0).then_some((GuestAddress(s.addr.0 + from), part as usize))
    })
}

/// Fills the iovecs of a piece: with guest memory, or with the bounce buffer when guest memory is
/// not aligned to `align`, or the piece is no whole blocks.
pub fn map_iovecs(
    slot: &mut PieceSlot,
    request: &InflightRequest,
    mem: &Memory,
    piece: &Piece,
    align: Option<u32>,
) -> Result<(), i32> {
    slot.iovecs.clear();
    slot.bounced = slot.blocks.is_some();
    if let Some(blocks) = slot.blocks {
        slot.map_bounce(blocks.len());
        return Ok(());
    }
    slot.reserve_iovecs();
    let mut aligned = true;
    for (at, part) in guest_ranges(&request.segments, piece) {
        for slice in GuestMemoryBackend::get_slices(mem, at, part) {
            let Ok(slice) = slice else { return Err(-libc::EFAULT) };
            if slot.iovecs.len() == slot.iovecs.capacity() {
                return Err(-libc::EIO);
            }
            let base = slice.ptr_guard_mut().as_ptr();
            aligned &= align.is_none_or(|a| base as usize % a as usize == 0 && slice.len() % a as usize == 0);
            slot.iovecs.push(libc::iovec { iov_base: base.cast(), iov_len: slice.len() });
        }
    }
    if aligned {
        return Ok(());
    }
    slot.bounced = true;
    if piece.op == Op::Write {
        copy_from_guest(slot, request, mem, piece)?;
    }
    slot.map_bounce(piece.len);
    Ok(())
}

/// Marks the bytes that the kernel may have written for a read, or for a part of one that failed.
pub fn mark_read(request: &InflightRequest, mem: &GuestMem, piece: &Piece) {
    for (at, part) in guest_ranges(&request.segments, piece) {
        mem.mark_written(at, part);
    }
}

pub fn copy_to_guest(
    slot: &mut PieceSlot,
    request: &InflightRequest,
    mem: &Memory,
    piece: &Piece,
) -> Result<(), i32> {
    copy_bounce(slot, request, mem, piece, true)
}

pub fn copy_from_guest(
    slot: &mut PieceSlot,
    request: &InflightRequest,
    mem: &Memory,
    piece: &Piece,
) -> Result<(), i32> {
    copy_bounce(slot, request, mem, piece, false)
}

/// Copies a piece's data between guest memory and the bounce buffer.
fn copy_bounce(
    slot: &mut PieceSlot,
    request: &InflightRequest,
    mem: &Memory,
    piece: &Piece,
    to_guest: bool,
) -> Result<(), i32> {
    let skip = slot.blocks.map_or(0, |blocks| blocks.skip);
    let bytes = slot.bounce.bytes(skip + piece.len as usize);
    let bytes = bytes.get_mut(skip..).ok_or(-libc::EFAULT)?;
    let mut done = 0;
    for (at, part) in guest_ranges(&request.segments, piece) {
        let ours = &mut bytes[done..done + part];
        let copied = if to_guest { mem.write_slice(ours, at) } else { mem.read_slice(ours, at) };
        copied.map_err(|_| -libc::EFAULT)?;
        done += part;
    }
    if done == bytes.len() { Ok(()) } else { Err(-libc::EFAULT) }
}

/// The operation for a piece whose iovecs are filled; `buffer` is the registered buffer that its
/// only iovec lies in.
pub fn rw_sqe(
    slot: &PieceSlot,
    piece: &Piece,
    (fd, buffer): (Fd, Option<u16>),
    offset: u64,
    write_through: bool,
    priority: u16,
) -> squeue::Entry {
    let n = slot.iovecs.len() as u32;
    let at = slot.blocks.map_or(offset + piece.offset, |blocks| blocks.start);
    let is_read = piece.op == Op::Read || slot.is_reading_first;
    let flags = if write_through && !is_read { libc::RWF_DSYNC } else { 0 };
    // A piece in one segment needs no list, which the kernel would copy and check.
    match (slot.only(), buffer) {
        (Some((to, len)), Some(buffer)) if is_read => {
            opcode::ReadFixed::new(fd, to, len, buffer).offset(at).ioprio(priority).build()
        }
        (Some((to, len)), None) if is_read => {
            opcode::Read::new(fd, to, len).offset(at).ioprio(priority).build()
        }
        (None, _) if is_read => {
            opcode::Readv::new(fd, slot.iovecs.as_ptr(), n).offset(at).ioprio(priority).build()
        }
        (Some((from, len)), Some(buffer)) => {
            let write = opcode::WriteFixed::new(fd, from, len, buffer);
            write.offset(at).ioprio(priority).rw_flags(flags).build()
        }
        (Some((from, len)), None) => {
            opcode::Write::new(fd, from, len).offset(at).ioprio(priority).rw_flags(flags).build()
        }
        (None, _) => {
            let vectors = opcode::Writev::new(fd, slot.iovecs.as_ptr(), n);
            vectors.offset(at).ioprio(priority).rw_flags(flags).build()
        }
    }
}

/// A priority as Linux's `ioprio` value.
pub fn ioprio(p: Priority) -> u16 {
    let class = match p.class {
        Class::RealTime => 1,
        Class::BestEffort => 2,
        Class::Idle => 3,
    };
    class << 13 | u16::from(p.level)
}
