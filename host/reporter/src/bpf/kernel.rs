//! bpf(2): maps and programs.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};

/// Commands and kinds (`include/uapi/linux/bpf.h`).
const MAP_CREATE: libc::c_long = 0;
const PROG_LOAD: libc::c_long = 5;
const RAW_TRACEPOINT_OPEN: libc::c_long = 17;
const MAP_TYPE_ARRAY: u32 = 2;
const F_MMAPABLE: u32 = 1 << 10;
const PROG_TYPE_TRACING: u32 = 26;
const TRACE_RAW_TP: u32 = 23;
/// What the kernel asks of programs that read its structures.
const LICENSE: &CStr = c"Dual BSD/GPL";
/// Room for the reasons why a program is refused.
const LOG: usize = 64 << 10;

/// `union bpf_attr`, as far as it is used.
#[repr(C, align(8))]
struct Attributes([u8; 128]);

impl Attributes {
    fn new() -> Self {
        Self([0; 128])
    }

    fn word(mut self, at: usize, value: u32) -> Self {
        self.0[at..at + 4].copy_from_slice(&value.to_ne_bytes());
        self
    }

    fn double(mut self, at: usize, value: u64) -> Self {
        self.0[at..at + 8].copy_from_slice(&value.to_ne_bytes());
        self
    }

    /// Makes the call; the result is a descriptor.
    fn call(&self, command: libc::c_long) -> io::Result<OwnedFd> {
        // SAFETY: the attributes live and are as long as said; what they point to lives for the
        // call (the callers hold it); the kernel reads no more than their lengths say.
        let fd = unsafe { libc::syscall(libc::SYS_bpf, command, self.0.as_ptr(), self.0.len()) };
        match i32::try_from(fd) {
            // SAFETY: the kernel has just made it, for us alone.
            Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// An array of `n` values of `size` bytes that can be mapped.
pub fn array(n: u32, size: u32) -> io::Result<OwnedFd> {
    let attributes = Attributes::new().word(0, MAP_TYPE_ARRAY).word(4, 4).word(8, size).word(12, n);
    attributes.word(16, F_MMAPABLE).call(MAP_CREATE)
}

/// Loads a program and runs it at a tracepoint, whose type has the number `tracepoint`, for as long
/// as both descriptors are open. An error has the verifier's last lines.
pub fn attach(code: &[u64], tracepoint: u32) -> io::Result<[OwnedFd; 2]> {
    let load = |log: &mut [u8]| {
        let count = u32::try_from(code.len()).unwrap_or(u32::MAX);
        let attributes = Attributes::new().word(0, PROG_TYPE_TRACING).word(4, count);
        let attributes = attributes.double(8, code.as_ptr() as u64).double(16, LICENSE.as_ptr() as u64);
        let attributes = attributes.word(68, TRACE_RAW_TP).word(108, tracepoint);
        if log.is_empty() {
            return attributes.call(PROG_LOAD);
        }
        let length = u32::try_from(log.len()).unwrap_or(0);
        attributes.word(24, 1).word(28, length).double(32, log.as_mut_ptr() as u64).call(PROG_LOAD)
    };
    let program = load(&mut []).or_else(|first| {
        let mut log = vec![0; LOG];
        load(&mut log).map_err(|_| {
            let text = String::from_utf8_lossy(log.split(|b| *b == 0).next().unwrap_or_default());
            let lines: Vec<&str> = text.lines().rev().take(3).collect();
            let why: Vec<&str> = lines.into_iter().rev().collect();
            io::Error::new(first.kind(), format!("{first} ({})", why.join("; ")))
        })
    })?;
    let descriptor = program.as_raw_fd().unsigned_abs();
    // Without a name: the program knows its tracepoint.
    let link = Attributes::new().word(8, descriptor).call(RAW_TRACEPOINT_OPEN)?;
    Ok([program, link])
}
