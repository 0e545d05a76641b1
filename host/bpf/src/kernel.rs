//! bpf(2): maps and programs.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};

/// Commands and types (`include/uapi/linux/bpf.h`).
const MAP_CREATE: libc::c_long = 0;
const MAP_UPDATE: libc::c_long = 2;
const MAP_DELETE: libc::c_long = 3;
const PROG_LOAD: libc::c_long = 5;
const OBJECT_INFO: libc::c_long = 15;
const RAW_TRACEPOINT_OPEN: libc::c_long = 17;
const TYPES_BY_NUMBER: libc::c_long = 19;
const TYPES_NEXT: libc::c_long = 23;
const MAP_TYPE_HASH: u32 = 1;
const MAP_TYPE_ARRAY: u32 = 2;
const MAP_TYPE_RING: u32 = 27;
const F_MMAPABLE: u32 = 1 << 10;
const PROG_TYPE_TRACING: u32 = 26;
const TRACE_RAW_TP: u32 = 23;
const TRACE_FENTRY: u32 = 24;
/// GPL-compatible: required of programs that read kernel structures.
const LICENSE: &CStr = c"Dual BSD/GPL";
/// Bytes for the verifier's log.
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

    fn word_at(&self, at: usize) -> u32 {
        u32::from_ne_bytes([self.0[at], self.0[at + 1], self.0[at + 2], self.0[at + 3]])
    }

    fn double(mut self, at: usize, value: u64) -> Self {
        self.0[at..at + 8].copy_from_slice(&value.to_ne_bytes());
        self
    }

    /// Makes the system call.
    fn ask(&mut self, command: libc::c_long) -> io::Result<i32> {
        // SAFETY: the attributes live and are as long as said; what they point to lives for the
        // call (the callers hold it); the kernel reads and writes no more than their lengths say.
        let done = unsafe { libc::syscall(libc::SYS_bpf, command, self.0.as_mut_ptr(), self.0.len()) };
        match i32::try_from(done) {
            Ok(done) if done >= 0 => Ok(done),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Makes a call whose result is a descriptor.
    fn call(mut self, command: libc::c_long) -> io::Result<OwnedFd> {
        let fd = self.ask(command)?;
        // SAFETY: the kernel has just made it, for us alone.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    fn from_fd(descriptor: &OwnedFd) -> Self {
        Self::new().word(0, descriptor.as_raw_fd().unsigned_abs())
    }
}

/// Array map of `n` values of `size` bytes that can be mapped.
pub fn array(n: u32, size: u32) -> io::Result<OwnedFd> {
    let attributes = Attributes::new().word(0, MAP_TYPE_ARRAY).word(4, 4).word(8, size).word(12, n);
    attributes.word(16, F_MMAPABLE).call(MAP_CREATE)
}

/// Hash map from u32 to u32, `n` entries at most.
pub fn hash(n: u32) -> io::Result<OwnedFd> {
    Attributes::new().word(0, MAP_TYPE_HASH).word(4, 4).word(8, 4).word(12, n).call(MAP_CREATE)
}

/// Ring buffer of `bytes`, a power of two and whole pages, that the kernel writes and this process
/// polls.
pub(crate) fn ring(bytes: u32) -> io::Result<OwnedFd> {
    Attributes::new().word(0, MAP_TYPE_RING).word(12, bytes).call(MAP_CREATE)
}

/// Sets the value of a key in a [`hash`].
pub fn update(hash: &OwnedFd, key: u32, value: u32) -> io::Result<()> {
    let attributes = Attributes::from_fd(hash).double(8, (&raw const key) as u64);
    attributes.double(16, (&raw const value) as u64).ask(MAP_UPDATE).map(drop)
}

pub fn remove(hash: &OwnedFd, key: u32) -> io::Result<()> {
    Attributes::from_fd(hash).double(8, (&raw const key) as u64).ask(MAP_DELETE).map(drop)
}

/// Type information of a module, by which programs are attached to its functions; `None` where the
/// kernel has no module of that name.
pub fn module(name: &str) -> io::Result<Option<OwnedFd>> {
    let mut number = 0;
    loop {
        let mut next = Attributes::new().word(0, number);
        match next.ask(TYPES_NEXT) {
            Ok(_) => {}
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e),
        }
        number = next.word_at(4);
        let types = match Attributes::new().word(0, number).call(TYPES_BY_NUMBER) {
            Ok(types) => types,
            // Unloaded meanwhile.
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            Err(e) => return Err(e),
        };
        // `struct bpf_btf_info`: address and length of the name, and whether it is the kernel's.
        let mut text = [0_u8; 64];
        let mut info = Attributes::new().double(16, text.as_mut_ptr() as u64).word(24, text.len() as u32);
        let length = 32;
        let place = info.0.as_mut_ptr() as u64;
        Attributes::from_fd(&types).word(4, length).double(8, place).ask(OBJECT_INFO)?;
        if info.word_at(28) == 1 && text.split(|b| *b == 0).next() == Some(name.as_bytes()) {
            return Ok(Some(types));
        }
    }
}

/// Attachment point of a program.
#[derive(Clone, Copy, Debug)]
pub enum Place<'a> {
    /// A tracepoint, by the id of its type.
    Tracepoint(u32),
    /// The entry of a function: its id, and the type information of the module that defines it,
    /// `None` for the kernel itself.
    Entry(u32, Option<&'a OwnedFd>),
}

/// Loads a program and attaches it for as long as both descriptors are open. An error has the
/// verifier's last lines.
pub fn attach(code: &[u64], place: Place<'_>) -> io::Result<[OwnedFd; 2]> {
    let (kind, number, module) = match place {
        Place::Tracepoint(number) => (TRACE_RAW_TP, number, None),
        Place::Entry(number, module) => (TRACE_FENTRY, number, module),
    };
    let load = |log: &mut [u8]| {
        let count = u32::try_from(code.len()).unwrap_or(u32::MAX);
        let attributes = Attributes::new().word(0, PROG_TYPE_TRACING).word(4, count);
        let attributes = attributes.double(8, code.as_ptr() as u64).double(16, LICENSE.as_ptr() as u64);
        let attributes = attributes.word(68, kind).word(108, number);
        let attributes = attributes.word(112, module.map_or(0, |fd| fd.as_raw_fd().unsigned_abs()));
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
    // Without a name: the program has its attachment point from the load.
    let link = Attributes::new().word(8, descriptor).call(RAW_TRACEPOINT_OPEN)?;
    Ok([program, link])
}
