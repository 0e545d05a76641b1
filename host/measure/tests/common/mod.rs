//! Parts that several integration tests share: skipping by name, a file that stalls, a loop device.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, UNIX_EPOCH};

use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, LockOwner,
    MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite, Request,
    WriteFlags,
};
use rtvirtio_measure::fio::{JobOptions, LogClock, Region};
use rtvirtio_spec::{Arrival, LabKind, Op, Target, Task, Vm};
use rtvirtio_units::{Bytes, Iops, Nanos, Percentile};

pub use rtvirtio_testkit::{LoopDevice, skip};

/// Reason why fio cannot be run here, if any.
pub fn no_fio() -> Option<&'static str> {
    Command::new("fio").arg("--version").output().is_err().then_some("fio is not installed")
}

/// Reason why a FUSE file cannot be made here, if any.
pub fn no_fuse() -> Option<&'static str> {
    let open = std::fs::OpenOptions::new().read(true).write(true).open("/dev/fuse");
    open.is_err().then_some("/dev/fuse cannot be opened: root and CONFIG_FUSE_FS are needed")
}

/// Reason why a loop device cannot be made here, if any.
pub fn no_loop() -> Option<&'static str> {
    let open = std::fs::OpenOptions::new().read(true).write(true).open("/dev/loop-control");
    open.is_err().then_some("/dev/loop-control cannot be opened: root is needed")
}

/// A directory on a real file system (tmpfs has no direct I/O on older kernels), removed when
/// dropped.
pub fn disk_dir() -> tempfile::TempDir {
    rtvirtio_testkit::disk_dir().unwrap()
}

/// A fully written file.
pub fn filled_file(path: &Path, mib: usize) {
    let block: Vec<u8> = (0..1 << 20).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    std::fs::write(path, block.repeat(mib)).unwrap();
}

/// A directory with a file `disk` of 8 MiB.
pub fn filled_disk() -> (tempfile::TempDir, PathBuf) {
    let dir = disk_dir();
    let file = dir.path().join("disk");
    filled_file(&file, 8);
    (dir, file)
}

/// Options of a job on the first 8 MiB of a target.
pub fn options(target: &Path, dir: &Path, runtime: Duration) -> JobOptions {
    JobOptions {
        target: target.to_owned(),
        region: Some(Region { offset: Bytes(0), size: Bytes(8 << 20) }),
        warmup: Duration::from_millis(200),
        runtime,
        seed: 9,
        dir: dir.to_owned(),
        io_class: None,
        clock: LogClock::JobStart,
        preload: true,
    }
}

/// A 4 KiB random task.
pub fn task(name: &str, op: Op, rate: Option<f64>, depth: u32, arrival: Arrival) -> Task {
    Task { op, depth, arrival, ..Task::reads(name, rate.map(Iops)) }
}

/// Target p99 of `ms` milliseconds.
pub fn p99(ms: u64) -> Vec<Target> {
    vec![Target { percentile: Percentile(99.0), latency: Nanos::from_millis(ms) }]
}

/// A VM of these tasks.
pub fn vm(tasks: Vec<Task>) -> Vm {
    Vm::of_lab("vm0", LabKind::Process, tasks)
}

/// Least duration of each flush of a [`StallingFile`].
pub const FLUSH: Duration = Duration::from_millis(12);

/// Change that reached a [`StallingFile`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Seen {
    Write { offset: u64, bytes: usize },
    Flush,
}

/// FUSE file that serves reads in sequence and stalls in given periods after its first read. It
/// records when each read was answered, the truth to compare with, and writes and flushes in their
/// order.
pub struct StallingFile {
    session: Option<fuser::BackgroundSession>,
    dir: tempfile::TempDir,
    server: Arc<Mutex<Server>>,
}

#[derive(Default)]
struct Server {
    first: Option<Instant>,
    first_ns: u64,
    answered: Vec<Duration>,
    seen: Vec<Seen>,
}

struct StallFs {
    stalls: Vec<(Duration, Duration)>,
    server: Arc<Mutex<Server>>,
}

const SIZE: u64 = 16 << 20;

impl StallingFile {
    pub fn new(stalls: &[(Duration, Duration)]) -> Self {
        let dir = disk_dir();
        let server: Arc<Mutex<Server>> = Arc::default();
        let fs = StallFs { stalls: stalls.to_vec(), server: Arc::clone(&server) };
        let mut config = Config::default();
        config.mount_options.push(MountOption::FSName("rtvirtio-stall".to_owned()));
        config.n_threads = Some(8);
        let session = fuser::spawn_mount(fs, dir.path(), &config).unwrap();
        Self { session: Some(session), dir, server }
    }

    pub fn path(&self) -> PathBuf {
        self.dir.path().join("disk")
    }

    /// Arrival of the first read, in ns of CLOCK_MONOTONIC.
    pub fn first_ns(&self) -> u64 {
        self.server.lock().unwrap().first_ns
    }

    /// Time at which each read was answered, in order, since the first read arrived.
    pub fn answered(&self) -> Vec<Duration> {
        self.server.lock().unwrap().answered.clone()
    }

    /// Changes since the last call.
    pub fn take(&self) -> Vec<Seen> {
        std::mem::take(&mut self.server.lock().unwrap().seen)
    }
}

impl Drop for StallingFile {
    fn drop(&mut self) {
        // Unmount before the directory is removed.
        drop(self.session.take());
    }
}

/// Attributes of the directory and the single file of the tests' FUSE file system.
fn attr(ino: u64) -> FileAttr {
    let dir = ino == 1;
    FileAttr {
        ino: INodeNo(ino),
        size: if dir { 0 } else { SIZE },
        blocks: SIZE / 512,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind: if dir { FileType::Directory } else { FileType::RegularFile },
        perm: if dir { 0o755 } else { 0o644 },
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        flags: 0,
        blksize: 4096,
    }
}

const TTL: Duration = Duration::from_secs(60);

impl Filesystem for StallFs {
    fn lookup(&self, _req: &Request, _parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if name == "disk" {
            reply.entry(&TTL, &attr(2), Generation(0));
        } else {
            reply.error(Errno::ENOENT);
        }
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&TTL, &attr(ino.0));
    }

    fn open(&self, _req: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO);
    }

    fn read(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        // The lock makes it one channel: requests are served one at a time.
        let mut server = self.server.lock().unwrap();
        if server.first.is_none() {
            let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
            server.first_ns = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
        }
        let first = *server.first.get_or_insert_with(Instant::now);
        let now = first.elapsed();
        for (from, to) in &self.stalls {
            if (*from..*to).contains(&now) {
                std::thread::sleep(*to - now);
            }
        }
        reply.data(&vec![0; size as usize]);
        server.answered.push(first.elapsed());
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
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        self.server.lock().unwrap().seen.push(Seen::Write { offset, bytes: data.len() });
        reply.written(data.len() as u32);
    }

    fn fsync(&self, _req: &Request, _ino: INodeNo, _fh: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        self.server.lock().unwrap().seen.push(Seen::Flush);
        std::thread::sleep(FLUSH);
        reply.ok();
    }
}

/// A loop device over a file, without the page cache.
pub fn loop_device(file: &Path) -> LoopDevice {
    LoopDevice::with_options(file, &["--direct-io=on"]).expect("losetup")
}

/// Directory of a loop device in sysfs.
pub fn sysfs(device: &LoopDevice) -> PathBuf {
    Path::new("/sys/block").join(device.0.file_name().unwrap())
}

pub fn set_elevator(device: &LoopDevice, elevator: &str) -> std::io::Result<()> {
    std::fs::write(sysfs(device).join("queue/scheduler"), elevator)
}
