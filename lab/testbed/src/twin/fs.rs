//! The FUSE file behind a twin: one file, `disk`, whose reads and writes complete at the service
//! model's times.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite,
    Request, WriteFlags,
};
use rustix::time::{ClockId, clock_gettime};

use super::{Access, ServiceModel};

/// Name of the only file.
pub const FILE_NAME: &str = "disk";

const ROOT: INodeNo = INodeNo(1);
const DISK: INodeNo = INodeNo(2);
/// Lifetime of cached attributes, which never change.
const TTL: Duration = Duration::from_secs(3600);
/// Requests that the kernel may have outstanding; above a loop device's own queue depth of 128.
const MAX_BACKGROUND: u16 = 256;

/// A service model that can be changed while requests are served.
#[derive(Clone)]
pub struct SharedModel(Arc<Mutex<ServiceModel>>);

impl SharedModel {
    /// Wraps a model for sharing.
    #[must_use]
    pub fn new(model: ServiceModel) -> Self {
        Self(Arc::new(Mutex::new(model)))
    }

    /// Locks the model. Poisoned means a panic while holding plain numbers: still usable.
    pub fn lock(&self) -> MutexGuard<'_, ServiceModel> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A file system with one file, its content in memory and its service times of the model.
pub struct TwinFs {
    model: SharedModel,
    content: File,
    size: u64,
}

impl TwinFs {
    /// A file of `size` zero bytes; only written pages take memory.
    pub fn new(model: SharedModel, size: u64) -> io::Result<Self> {
        let fd = rustix::fs::memfd_create("rtvirtio-twin", rustix::fs::MemfdFlags::CLOEXEC)?;
        let content = File::from(fd);
        content.set_len(size)?;
        Ok(Self { model, content, size })
    }

    /// Waits until the model's completion time of the request.
    fn serve(&self, access: Access, offset: u64, len: u64) {
        let due = self.model.lock().complete_at(now(), access, offset, len);
        sleep_until(due);
    }

    fn attr(&self, ino: INodeNo) -> FileAttr {
        let dir = ino == ROOT;
        FileAttr {
            ino,
            size: if dir { 0 } else { self.size },
            blocks: if dir { 0 } else { self.size / 512 },
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind: if dir { FileType::Directory } else { FileType::RegularFile },
            perm: if dir { 0o700 } else { 0o600 },
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }
}

/// Time of CLOCK_MONOTONIC in ns.
fn now() -> u64 {
    let t = clock_gettime(ClockId::Monotonic);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// Sleeps to an absolute time, so that a late wake-up does not add up.
fn sleep_until(due: u64) {
    let at = libc::timespec { tv_sec: (due / 1_000_000_000) as i64, tv_nsec: (due % 1_000_000_000) as i64 };
    loop {
        // SAFETY: `at` is a valid timespec and the remaining-time pointer may be null for an
        // absolute sleep.
        let r = unsafe {
            libc::clock_nanosleep(
                libc::CLOCK_MONOTONIC,
                libc::TIMER_ABSTIME,
                &raw const at,
                std::ptr::null_mut(),
            )
        };
        if r != libc::EINTR {
            return;
        }
    }
}

impl Filesystem for TwinFs {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Without it the loop device's worker would wait for each request before it sends the next:
        // a queue depth of 1.
        config.add_capabilities(InitFlags::FUSE_ASYNC_DIO).map_err(|_| {
            io::Error::new(io::ErrorKind::Unsupported, "this kernel's FUSE has no asynchronous direct I/O")
        })?;
        // Both limits have kernel maxima; a refused value leaves the default.
        let _ = config.set_max_background(MAX_BACKGROUND);
        let _ = config.set_congestion_threshold(MAX_BACKGROUND);
        Ok(())
    }

    fn lookup(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if parent == ROOT && name == FILE_NAME {
            reply.entry(&TTL, &self.attr(DISK), Generation(0));
        } else {
            reply.error(Errno::ENOENT);
        }
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        if ino == ROOT || ino == DISK {
            reply.attr(&TTL, &self.attr(ino));
        } else {
            reply.error(Errno::ENOENT);
        }
    }

    fn open(&self, _req: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        // Direct I/O: every request must reach the model, none may be served from the page cache.
        reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES);
    }

    fn read(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let len = u64::from(size).min(self.size.saturating_sub(offset));
        let mut data = vec![0; len as usize];
        let result = self.content.read_exact_at(&mut data, offset);
        self.serve(Access::Read, offset, len);
        match result {
            Ok(()) => reply.data(&data),
            Err(_) => reply.error(Errno::EIO),
        }
    }

    fn write(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        if offset.saturating_add(data.len() as u64) > self.size {
            reply.error(Errno::ENOSPC);
            return;
        }
        let result = self.content.write_all_at(data, offset);
        self.serve(Access::Write, offset, data.len() as u64);
        match result {
            Ok(()) => reply.written(data.len() as u32),
            Err(_) => reply.error(Errno::EIO),
        }
    }

    fn flush(&self, _req: &Request, _ino: INodeNo, _fh: FileHandle, _lock: LockOwner, reply: ReplyEmpty) {
        // close(2), not a cache flush.
        reply.ok();
    }

    fn fsync(&self, _req: &Request, _ino: INodeNo, _fh: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        self.serve(Access::Flush, 0, 0);
        reply.ok();
    }
}
