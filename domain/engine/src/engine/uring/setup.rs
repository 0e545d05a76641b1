//! Setup of io_uring: features by kernel, restrictions, tables.

use std::io;

use io_uring::register::Restriction;
use io_uring::{IoUring, opcode, squeue};

/// The operations that the engine uses. Requests in a ring pass no seccomp filter, so the ring
/// itself is restricted (`IORING_REGISTER_RESTRICTIONS`, Linux 5.10): no other operation, no flag but
/// that of a registered file, no registering but that of files by an operation.
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

/// Makes a ring. Returns the number of files that can be registered too: as many as asked for, or
/// none.
pub fn build(entries: u32, files: u32, deferred: bool, restricted: bool) -> io::Result<(IoUring, u32)> {
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
    let register = |ring: &IoUring| match ring.submitter().register_files_sparse(files) {
        Ok(()) => files,
        Err(_) => 0,
    };
    if !restricted {
        let ring = builder.build(entries)?;
        let files = register(&ring);
        return Ok((ring, files));
    }
    let ring = builder.setup_r_disabled().build(entries)?;
    let files = register(&ring);
    let mut allowed = ALLOWED_OPCODES.map(Restriction::sqe_op).to_vec();
    if files > 0 {
        allowed.push(Restriction::sqe_flags_allowed(squeue::Flags::FIXED_FILE.bits()));
    }
    ring.submitter().register_restrictions(&mut allowed)?;
    ring.submitter().register_enable_rings()?;
    Ok((ring, files))
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
