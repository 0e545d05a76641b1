//! Setup of io_uring: features by kernel, restrictions, tables.

use std::io;

use io_uring::register::Restriction;
use io_uring::{IoUring, opcode};

use crate::memory::{BUFFERS_UPDATE, CLONE_BUFFERS};

/// The operations that the engine uses. Requests in a ring pass no seccomp filter, so the ring
/// itself is restricted (`IORING_REGISTER_RESTRICTIONS`, Linux 5.10): no other operation, no flag,
/// no registering. With `pin` of a disk there are operations on buffers too, and buffers may be
/// registered.
const ALLOWED_OPCODES: [u8; 8] = [
    opcode::Read::CODE,
    opcode::Readv::CODE,
    opcode::Writev::CODE,
    opcode::Write::CODE,
    opcode::Fsync::CODE,
    opcode::Fallocate::CODE,
    opcode::PollAdd::CODE,
    opcode::AsyncCancel::CODE,
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

/// Makes a ring. Returns the size of its table of buffers too: as asked for, or 0.
pub fn build(entries: u32, buffers: u32, deferred: bool, restricted: bool) -> io::Result<(IoUring, u32)> {
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
        let buffers = register(&ring, buffers);
        return Ok((ring, buffers));
    }
    let ring = builder.setup_r_disabled().build(entries)?;
    let mut buffers = register(&ring, buffers);
    let mut allowed = Vec::from(ALLOWED_OPCODES.map(Restriction::sqe_op));
    let without_buffers = allowed.len();
    if buffers > 0 {
        allowed.extend(FIXED_OPCODES.map(Restriction::sqe_op));
        allowed.extend([BUFFERS_UPDATE, CLONE_BUFFERS].map(Restriction::register_op));
    }
    let mut restrict = |n: usize| ring.submitter().register_restrictions(&mut allowed[..n]);
    // A kernel refuses restrictions that name what it does not know, and takes others after that.
    if buffers == 0 || restrict(without_buffers + FIXED_OPCODES.len() + 2).is_err() {
        buffers = 0;
        restrict(without_buffers)?;
    }
    ring.submitter().register_enable_rings()?;
    Ok((ring, buffers))
}

/// Registers an empty table of buffers; returns its size.
fn register(ring: &IoUring, buffers: u32) -> u32 {
    let is_there = buffers > 0 && ring.submitter().register_buffers_sparse(buffers).is_ok();
    if is_there { buffers } else { 0 }
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
