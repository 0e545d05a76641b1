//! Setup of io_uring: features by kernel, restrictions, tables.

use std::io;

use io_uring::register::Restriction;
use io_uring::types::CloneBuffersFlags;
use io_uring::{IoUring, opcode, squeue};

use super::Tables;
use crate::memory::{BUFFERS_UPDATE, CLONE_BUFFERS};

/// The operations that the engine uses. Requests in a ring pass no seccomp filter, so the ring
/// itself is restricted (`IORING_REGISTER_RESTRICTIONS`, Linux 5.10): no other operation, no flag
/// but that of a registered file, no registering but that of files by an operation. With `pin` of a
/// disk there are operations on buffers too, and buffers may be registered.
const ALLOWED_OPCODES: [u8; 9] = [
    opcode::Read::CODE,
    opcode::Readv::CODE,
    opcode::Writev::CODE,
    opcode::Write::CODE,
    opcode::Fsync::CODE,
    opcode::Fallocate::CODE,
    opcode::PollAdd::CODE,
    opcode::AsyncCancel::CODE,
    opcode::FilesUpdate::CODE,
];

/// Error of a ring that the kernel refuses, with the switch that forbids it.
pub fn reason(error: io::Error) -> io::Error {
    if error.raw_os_error() != Some(libc::EPERM) {
        return error;
    }
    let text = format!(
        "{error}; hardened systems switch io_uring off: `sysctl kernel.io_uring_disabled` says so, and `=0` permits it"
    );
    io::Error::new(error.kind(), text)
}

/// Operations on registered buffers.
const FIXED_OPCODES: [u8; 2] = [opcode::ReadFixed::CODE, opcode::WriteFixed::CODE];

/// Makes a ring. Returns the sizes of its tables too: as asked for, or 0.
pub fn build(
    entries: u32,
    tables: Tables,
    deferred: bool,
    restricted: bool,
) -> io::Result<(IoUring, Tables)> {
    let mut builder = IoUring::builder();
    builder.setup_cqsize(entries * 4);
    if deferred {
        // Task work runs when the engine asks for it (kernel 6.1); older kernels interrupt the
        // thread.
        builder.setup_single_issuer().setup_defer_taskrun();
        // Sets a flag when task work is pending: reaping without waiting then runs it.
        builder.setup_taskrun_flag();
        // An entry that the kernel refuses does not hold back those behind it.
        builder.setup_submit_all();
    }
    if !restricted {
        let ring = builder.build(entries)?;
        let tables = register(&ring, tables);
        return Ok((ring, tables));
    }
    let ring = builder.setup_r_disabled().build(entries)?;
    let mut tables = register(&ring, tables);
    let mut allowed = Vec::from(ALLOWED_OPCODES.map(Restriction::sqe_op));
    if tables.files > 0 {
        allowed.push(Restriction::sqe_flags_allowed(squeue::Flags::FIXED_FILE.bits()));
    }
    let without_buffers = allowed.len();
    if tables.buffers > 0 {
        allowed.extend(FIXED_OPCODES.map(Restriction::sqe_op));
        allowed.extend([BUFFERS_UPDATE, CLONE_BUFFERS].map(Restriction::register_op));
    }
    let mut restrict = |n: usize| ring.submitter().register_restrictions(&mut allowed[..n]);
    // A kernel refuses restrictions that name what it does not know, and takes others after that.
    if tables.buffers == 0 || restrict(without_buffers + FIXED_OPCODES.len() + 2).is_err() {
        tables.buffers = 0;
        restrict(without_buffers)?;
    }
    ring.submitter().register_enable_rings()?;
    Ok((ring, tables))
}

/// Whether the kernel closes a registered file when its place is emptied. Before Linux 6.13 that is
/// a second later, or after requests of other VMs, and the file's locks would outlive the disk.
///
/// Kernels are told apart by a flag that came with 6.13: older ones refuse it before they look for
/// the ring, which does not exist.
fn closes_at_once(ring: &IoUring) -> bool {
    let flags = CloneBuffersFlags::DST_REPLACE;
    let refused = ring.submitter().register_buffers_clone_offset(-1, 0, 0, 1, flags);
    refused.is_err_and(|e| e.raw_os_error() == Some(libc::EBADF))
}

/// Registers empty tables; returns their sizes.
fn register(ring: &IoUring, tables: Tables) -> Tables {
    let submitter = ring.submitter();
    let is_there =
        tables.files > 0 && closes_at_once(ring) && submitter.register_files_sparse(tables.files).is_ok();
    let files = if is_there { tables.files } else { 0 };
    let is_there = tables.buffers > 0 && submitter.register_buffers_sparse(tables.buffers).is_ok();
    Tables { files, buffers: if is_there { tables.buffers } else { 0 } }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_that_is_forbidden_is_refused_with_the_switch() {
        let of = |errno| reason(io::Error::from_raw_os_error(errno)).to_string();
        assert!(of(libc::EPERM).contains("sysctl kernel.io_uring_disabled"), "{}", of(libc::EPERM));
        assert!(!of(libc::ENOMEM).contains("sysctl"), "{}", of(libc::ENOMEM));
    }
}
