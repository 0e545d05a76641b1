//! Submits the scheduler's pieces to io_uring.

use std::io;
use std::os::fd::AsRawFd;

use io_uring::opcode;
use io_uring::types::{Fd, FsyncFlags};
use rtvirtio_sched::{Next, Op, Piece, VmId};
use rtvirtio_units::Nanos;

use super::{EventLoop, now};
use crate::engine::blocks::BlockRange;
use crate::engine::data::{copy_from_guest, ioprio, map_iovecs, rw_sqe};
use crate::engine::uring::CompletionToken;

/// Pieces that fail before submission, in one round: they hold no slot, so only this bounds them.
const MAX_FAILED_SUBMISSIONS: u32 = 16;

impl EventLoop {
    /// Submits all pieces that the scheduler admits; returns the moment of the next attempt.
    pub(super) fn dispatch(&mut self) -> io::Result<Nanos> {
        self.failed_submissions = 0;
        loop {
            let time = now();
            if self.failed_submissions >= MAX_FAILED_SUBMISSIONS {
                return Ok(time);
            }
            match self.scheduler.next(time) {
                Next::Piece(piece) => {
                    // A piece before that moment was not held by the regulator.
                    if let Some(at) = self.regulator_wakeup.take_if(|at| time >= *at) {
                        self.regulator_lateness.record(Nanos(time.0 - at.0));
                    }
                    self.submit_piece(time, piece)?;
                }
                Next::Wait(at) => {
                    self.regulator_wakeup = Some(at);
                    return Ok(at);
                }
                Next::Full | Next::Idle => {
                    // When the device is full, the regulator does not determine the next piece.
                    self.regulator_wakeup = None;
                    return Ok(Nanos(u64::MAX));
                }
            }
        }
    }

    pub(super) fn submit_piece(&mut self, time: Nanos, piece: Piece) -> io::Result<()> {
        // The table has a slot for every piece of the scheduler. A piece without a slot would never
        // complete, and all others would wait for it.
        let Some(index) = self.free_pieces.pop() else {
            return Err(io::Error::other("the scheduler gave more than the device may hold: a defect"));
        };
        let vm = &mut self.vms[piece.vm];
        let slot = &mut self.pieces[index as usize];
        slot.piece = Some(piece);
        (slot.bounced, slot.blocks, slot.is_reading_first) = (false, None, false);
        let Some(request) = vm.requests.get(piece.tag as u32) else {
            return self.fail_submission(index, -libc::EIO);
        };
        request.mark_submitted(time, &piece);
        if let Some(backing) =
            vm.disk.as_ref().map(|disk| &disk.backing).filter(|b| b.direct && b.has_partial_blocks())
        {
            let blocks = BlockRange::around(request.offset + piece.offset, piece.len, backing.block);
            if piece.op.moves_data() && blocks.is_partial {
                (slot.blocks, slot.is_reading_first) = (Some(blocks), piece.op == Op::Write);
            }
            if !matches!(piece.op, Op::Read | Op::Flush) && !vm.block_writes.begin(index, blocks) {
                return Ok(());
            }
        }
        self.start_piece(index)
    }

    /// Starts writes that have waited for others to their blocks.
    pub(super) fn start_waiting(&mut self, vm: VmId) -> io::Result<()> {
        // A piece that fails at once comes here again.
        if std::mem::replace(&mut self.vms[vm].block_writes.is_starting, true) {
            return Ok(());
        }
        while let Some(index) = self.vms[vm].block_writes.next() {
            self.start_piece(index)?;
        }
        self.vms[vm].block_writes.is_starting = false;
        Ok(())
    }

    /// Submits a piece of which the slot knows all.
    fn start_piece(&mut self, index: u32) -> io::Result<()> {
        let slot = &mut self.pieces[index as usize];
        let Some(piece) = slot.piece else { return Ok(()) };
        let vm = &mut self.vms[piece.vm];
        let Some(request) = vm.requests.get(piece.tag as u32) else {
            return self.fail_submission(index, -libc::EIO);
        };
        let (Some(mem), Some(disk)) = (request.mem.clone(), &vm.disk) else {
            return self.fail_submission(index, -libc::EIO);
        };
        let backing = &disk.backing;
        let fd = Fd(backing.file.as_raw_fd());
        let entry = match piece.op {
            Op::Read | Op::Write => {
                let ready =
                    map_iovecs(slot, request, &mem.mem, &piece, backing.direct.then_some(backing.block));
                // Data that was copied, or is read later, may be zeroes in place of the guest's.
                let ready = if mem.is_lost() { Err(-libc::EFAULT) } else { ready };
                if let Err(code) = ready {
                    // This is not the last reference when the request ends: unmapping guest memory
                    // takes long.
                    drop(mem);
                    return self.fail_submission(index, code);
                }
                let priority = if self.config.pass_priority { ioprio(piece.priority) } else { 0 };
                let buffer = slot.only().and_then(|(at, len)| vm.buffers.find(&mem, at, len as usize));
                rw_sqe(slot, &piece, (fd, buffer), request.offset, request.write_through, priority)
            }
            Op::Flush => opcode::Fsync::new(fd).flags(FsyncFlags::DATASYNC).build(),
            Op::Discard | Op::WriteZeroes => {
                let zero = piece.op == Op::WriteZeroes && !request.unmap;
                let mode = if zero { libc::FALLOC_FL_ZERO_RANGE } else { libc::FALLOC_FL_PUNCH_HOLE };
                let (mut offset, mut len) = (request.offset + piece.offset, piece.len);
                if backing.has_partial_blocks() {
                    match BlockRange::within(offset, len, backing.block) {
                        Some(blocks) if blocks.len() == len => {}
                        // The guest writes the zeroes itself.
                        _ if piece.op == Op::WriteZeroes => {
                            drop(mem);
                            return self.fail_submission(index, -libc::EOPNOTSUPP);
                        }
                        // What is no whole block is not deallocated.
                        Some(blocks) => (offset, len) = (blocks.start, blocks.len()),
                        None => {
                            drop(mem);
                            return self.fail_submission(index, 0);
                        }
                    }
                }
                let mode = mode | libc::FALLOC_FL_KEEP_SIZE;
                opcode::Fallocate::new(fd, len).offset(offset).mode(mode).build()
            }
        };
        self.ring.push(&entry.user_data(CompletionToken::Piece(index).to_user_data()))
    }

    /// Writes the blocks that were read for a piece, with the guest's bytes in them. `Err` with an
    /// error number where these cannot be had.
    pub(super) fn write_blocks(&mut self, index: u32, piece: &Piece) -> io::Result<Result<(), i32>> {
        let vm = &mut self.vms[piece.vm];
        let slot = &mut self.pieces[index as usize];
        let (Some(request), Some(disk)) = (vm.requests.get(piece.tag as u32), &vm.disk) else {
            return Ok(Err(-libc::EIO));
        };
        let Some(mem) = request.mem.clone() else { return Ok(Err(-libc::EIO)) };
        let copied = copy_from_guest(slot, request, &mem.mem, piece);
        let copied = if mem.is_lost() { Err(-libc::EFAULT) } else { copied };
        if copied.is_err() {
            return Ok(copied);
        }
        slot.is_reading_first = false;
        let priority = if self.config.pass_priority { ioprio(piece.priority) } else { 0 };
        let fd = Fd(disk.backing.file.as_raw_fd());
        let entry = rw_sqe(slot, piece, (fd, None), request.offset, request.write_through, priority);
        self.ring.push(&entry.user_data(CompletionToken::Piece(index).to_user_data()))?;
        Ok(Ok(()))
    }

    /// A piece fails before submission. Its VM caused work without device time.
    fn fail_submission(&mut self, index: u32, code: i32) -> io::Result<()> {
        self.failed_submissions += 1;
        if let Some(piece) = self.pieces.get(index as usize).and_then(|r| r.piece) {
            self.vms[piece.vm].deferred = true;
        }
        self.on_completion(now(), index, code)
    }
}
