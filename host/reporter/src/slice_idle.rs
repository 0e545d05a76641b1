//! Raises BFQ's `slice_idle` in this machine while a program starts.
//!
//! A program computes between the reads of its start-up. When that takes longer than BFQ's
//! `slice_idle` (8 ms), other programs of this machine get the disk meanwhile. So the value is
//! raised while a program starts, and restored after the last of several starts that overlap: the
//! first of these determines the value. The original values are recorded in `/run`, which is lost
//! at a reboot as they are: after a start that was killed, the next one restores them.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::ReporterError;

/// Directory in which the kernel lists disks, and directory of the record.
pub(crate) const SYS_BLOCK: &str = "/sys/block";
pub(crate) const RUN: &str = "/run/rtvirtio-guest";
/// Locked exclusively while the record or a value is changed.
const LOCK: &str = "lock";
/// Locked shared by each start with a raised value: an exclusive lock shows that it is the only
/// one.
const STARTS: &str = "starts";
/// Record with a line for each disk: its name, its original value and the raised one.
const RECORD: &str = "slice_idle";
/// Longest wait for another start's lock, which it holds for some microseconds: a process that is
/// stopped in that moment must not stop all others.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(10);

/// Disk whose value is raised; both values in ms.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Change {
    disk: String,
    before: u32,
    raised: u32,
}

/// Raised values, until `Raised::end`.
#[derive(Debug)]
pub(crate) struct Raised {
    sys_block: PathBuf,
    dir: PathBuf,
    starts: File,
}

impl Raised {
    /// Raises the value to `to` ms on each disk where it is lower but not 0; where another start
    /// has raised it, it stays as that one set it. `None` where there is no such disk, and no
    /// record of a killed start. `note` gets a text for each value that was left alone.
    ///
    /// # Errors
    /// When a value or the record cannot be read or written, which requires root.
    pub(crate) fn begin(
        sys_block: &Path,
        dir: &Path,
        to: u32,
        note: &mut dyn FnMut(&str),
    ) -> Result<Option<Self>, ReporterError> {
        let record = dir.join(RECORD);
        // In this order: another start removes its record after the values are restored.
        if candidates(sys_block, to)?.is_empty() && !exists(&record)? {
            return Ok(None);
        }
        DirBuilder::new().recursive(true).mode(0o755).create(dir).map_err(ReporterError::io("make", dir))?;
        let _held = locked(&dir.join(LOCK))?;
        let path = dir.join(STARTS);
        let starts = open(&path)?;
        if is_alone(&starts, &path)? {
            put_back(sys_block, &record, note)?;
        }
        flock(&starts, FlockOperation::LockShared).map_err(|e| ReporterError::io("lock", &path)(e.into()))?;
        let raised = Self { sys_block: sys_block.to_owned(), dir: dir.to_owned(), starts };
        if !exists(&record)? {
            let changes = candidates(sys_block, to)?;
            save(&record, &changes)?;
            let write = |change: &Change| {
                let path = value_of(sys_block, &change.disk);
                fs::write(&path, change.raised.to_string()).map_err(ReporterError::io("write", &path))
            };
            if let Err(e) = changes.iter().try_for_each(write) {
                if let Err(left) = put_back(sys_block, &record, note) {
                    note(&left.to_string());
                }
                return Err(e);
            }
        }
        Ok(Some(raised))
    }

    /// Restores the values, unless another start still needs them. `note` gets a text for each
    /// value that another program has set meanwhile, which is left alone.
    ///
    /// # Errors
    /// When a value cannot be written; the record stays then, for the next start.
    pub(crate) fn end(self, note: &mut dyn FnMut(&str)) -> Result<(), ReporterError> {
        let _held = locked(&self.dir.join(LOCK))?;
        if is_alone(&self.starts, &self.dir.join(STARTS))? {
            put_back(&self.sys_block, &self.dir.join(RECORD), note)?;
        }
        Ok(())
    }
}

fn value_of(sys_block: &Path, disk: &str) -> PathBuf {
    sys_block.join(disk).join("queue/iosched/slice_idle")
}

/// Disks whose `slice_idle` is lower than `to`, but not 0. A value with a fraction of a
/// millisecond, which would be lost, is left out.
fn candidates(sys_block: &Path, to: u32) -> Result<Vec<Change>, ReporterError> {
    let list = || ReporterError::io("list", sys_block);
    let mut found = Vec::new();
    for entry in fs::read_dir(sys_block).map_err(list())? {
        let Ok(disk) = entry.map_err(list())?.file_name().into_string() else { continue };
        let path = value_of(sys_block, &disk);
        let Some(before) = read(&path)?.filter(|before| (1..to).contains(before)) else { continue };
        if read(&path.with_file_name("slice_idle_us"))?.is_none_or(|us| us == before * 1_000) {
            found.push(Change { disk, before, raised: to });
        }
    }
    Ok(found)
}

/// Value of a setting; `None` where the disk's scheduler does not have it, or the disk is gone.
fn read(path: &Path) -> Result<Option<u32>, ReporterError> {
    // kernel file
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(e) if is_gone(&e) => return Ok(None),
        Err(e) => return Err(ReporterError::io("read", path)(e)),
    };
    let number = text.trim().parse().map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e));
    number.map(Some).map_err(ReporterError::io("read", path))
}

/// Whether the error means that the disk, or its scheduler, is gone.
fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ENODEV)
}

fn exists(path: &Path) -> Result<bool, ReporterError> {
    path.try_exists().map_err(ReporterError::io("look at", path))
}

fn open(path: &Path) -> Result<File, ReporterError> {
    rtvirtio_kernel::trusted::lock_file(path).map_err(ReporterError::io("open", path))
}

/// Opens and locks a file; the lock ends when it is closed.
fn locked(path: &Path) -> Result<File, ReporterError> {
    let file = open(path)?;
    let begin = Instant::now();
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(Errno::WOULDBLOCK | Errno::INTR) if begin.elapsed() < LOCK_TIMEOUT => {
                std::thread::sleep(PAUSE)
            }
            Err(e) => return Err(ReporterError::io("lock", path)(e.into())),
        }
    }
}

/// Whether no other start has the lock, which this one then has exclusively.
fn is_alone(starts: &File, path: &Path) -> Result<bool, ReporterError> {
    match flock(starts, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(e) => Err(ReporterError::io("lock", path)(e.into())),
    }
}

/// Writes the record atomically: a start that is killed leaves all of it or nothing.
fn save(record: &Path, changes: &[Change]) -> Result<(), ReporterError> {
    let new = record.with_extension("new");
    let mut file = File::create(&new).map_err(ReporterError::io("write", &new))?;
    for Change { disk, before, raised } in changes {
        writeln!(file, "{disk} {before} {raised}").map_err(ReporterError::io("write", &new))?;
    }
    fs::rename(&new, record).map_err(ReporterError::io("write", record))
}

fn load(record: &Path) -> Result<Vec<Change>, ReporterError> {
    // own file
    let text = match fs::read_to_string(record) {
        Ok(text) => text,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(ReporterError::io("read", record)(e)),
    };
    let change = |line: &str| {
        let [disk, before, raised] = line.split_whitespace().collect::<Vec<_>>().try_into().ok()?;
        Some(Change { disk: disk.to_owned(), before: before.parse().ok()?, raised: raised.parse().ok()? })
    };
    let changes: Option<Vec<Change>> = text.lines().map(change).collect();
    changes.ok_or_else(|| ReporterError::io("read", record)(io::ErrorKind::InvalidData.into()))
}

/// Restores the value of one disk.
fn put_back_one(sys_block: &Path, change: &Change, note: &mut dyn FnMut(&str)) -> Result<(), ReporterError> {
    let path = value_of(sys_block, &change.disk);
    match read(&path)? {
        Some(now) if now == change.raised => match fs::write(&path, change.before.to_string()) {
            Err(e) if !is_gone(&e) => return Err(ReporterError::io("write", &path)(e)),
            _ => {}
        },
        Some(now) if now != change.before => {
            note(&format!("{}: another program has set {now}, which stays", path.display()));
        }
        // The original value, or the disk or its scheduler is gone, and the value with it.
        _ => {}
    }
    Ok(())
}

/// Restores all recorded values, as far as possible, and removes the record when all are restored.
fn put_back(sys_block: &Path, record: &Path, note: &mut dyn FnMut(&str)) -> Result<(), ReporterError> {
    let mut failed = None;
    for change in load(record)? {
        failed = failed.or(put_back_one(sys_block, &change, note).err());
    }
    if let Some(e) = failed {
        return Err(e);
    }
    match fs::remove_file(record) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(ReporterError::io("remove", record)(e)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{MutexGuard, PoisonError};

    use super::*;
    use crate::child::FORKS;

    /// Machine with three disks: with a value of 8 ms, with 0, and with a scheduler without such a
    /// setting.
    struct Disks(tempfile::TempDir, #[expect(dead_code, reason = "held")] MutexGuard<'static, ()>);

    impl Disks {
        fn new() -> Self {
            let alone = FORKS.lock().unwrap_or_else(PoisonError::into_inner);
            let disks = Self(rtvirtio_testkit::tempdir().unwrap(), alone);
            for disk in ["vda", "vdb", "vdc"] {
                fs::create_dir_all(disks.sys().join(disk).join("queue/iosched")).unwrap();
            }
            disks.set("vda", "8");
            disks.set("vdb", "0");
            disks
        }

        fn sys(&self) -> PathBuf {
            self.0.path().join("block")
        }

        fn run(&self) -> PathBuf {
            self.0.path().join("run")
        }

        fn set(&self, disk: &str, value: &str) {
            fs::write(value_of(&self.sys(), disk), format!("{value}\n")).unwrap();
        }

        fn has(&self, disk: &str) -> Option<u32> {
            read(&value_of(&self.sys(), disk)).unwrap()
        }

        fn begin(&self) -> Option<Raised> {
            Raised::begin(&self.sys(), &self.run(), 25, &mut |n| panic!("{n}")).unwrap()
        }

        fn record(&self) -> PathBuf {
            self.run().join(RECORD)
        }
    }

    #[test]
    fn the_last_of_several_starts_puts_back() {
        let disks = Disks::new();
        let first = disks.begin().unwrap();
        assert_eq!([disks.has("vda"), disks.has("vdb"), disks.has("vdc")], [Some(25), Some(0), None]);
        let second = disks.begin().unwrap();
        first.end(&mut |n| panic!("{n}")).unwrap();
        assert_eq!(disks.has("vda"), Some(25), "the second start needs it");
        second.end(&mut |n| panic!("{n}")).unwrap();
        assert_eq!(disks.has("vda"), Some(8));
        assert!(!disks.record().exists());
    }

    #[test]
    fn the_next_start_puts_back_what_a_killed_one_has_left() {
        let disks = Disks::new();
        drop(disks.begin().unwrap());
        assert_eq!(disks.has("vda"), Some(25));
        // Killed after the record was written, before the value.
        let next = disks.begin().unwrap();
        assert_eq!(fs::read_to_string(disks.record()).unwrap(), "vda 8 25\n");
        disks.set("vda", "8");
        drop(next);
        disks.begin().unwrap().end(&mut |n| panic!("{n}")).unwrap();
        assert_eq!(disks.has("vda"), Some(8));
        // The disk's value is higher than requested by now: nothing to raise, but one to restore.
        drop(disks.begin().unwrap());
        let low = Raised::begin(&disks.sys(), &disks.run(), 5, &mut |n| panic!("{n}")).unwrap();
        assert_eq!(disks.has("vda"), Some(8));
        low.unwrap().end(&mut |n| panic!("{n}")).unwrap();
        assert!(!disks.record().exists());
    }

    #[test]
    fn what_another_program_sets_stays() {
        let disks = Disks::new();
        let start = disks.begin().unwrap();
        disks.set("vda", "3");
        let mut notes = Vec::new();
        start.end(&mut |n| notes.push(n.to_owned())).unwrap();
        assert_eq!((disks.has("vda"), notes.len()), (Some(3), 1), "{notes:?}");
        // A disk that is gone needs no restore.
        let start = disks.begin().unwrap();
        fs::remove_dir_all(disks.sys().join("vda")).unwrap();
        start.end(&mut |n| panic!("{n}")).unwrap();
        assert!(!disks.record().exists());
    }

    #[test]
    fn a_disk_that_cannot_be_put_back_keeps_the_others_from_nothing() {
        let disks = Disks::new();
        disks.set("vdb", "6");
        let start = disks.begin().unwrap();
        assert_eq!([disks.has("vda"), disks.has("vdb")], [Some(25), Some(25)]);
        disks.set("vda", "many");
        assert!(start.end(&mut |n| panic!("{n}")).is_err());
        assert_eq!(disks.has("vdb"), Some(6));
        assert!(disks.record().exists(), "the next start tries again");
        disks.set("vda", "25");
        // A start that raises nothing restores too.
        let none = Raised::begin(&disks.sys(), &disks.run(), 0, &mut |n| panic!("{n}")).unwrap();
        none.unwrap().end(&mut |n| panic!("{n}")).unwrap();
        assert_eq!((disks.has("vda"), disks.record().exists()), (Some(8), false));
    }

    #[test]
    fn nothing_is_made_where_no_disk_waits() {
        let disks = Disks::new();
        disks.set("vda", "30");
        assert!(disks.begin().is_none());
        disks.set("vda", "8");
        let us = value_of(&disks.sys(), "vda").with_file_name("slice_idle_us");
        fs::write(&us, "8500\n").unwrap();
        assert!(disks.begin().is_none(), "half a millisecond would be lost");
        assert!(!disks.run().exists());
    }

    #[test]
    fn a_record_or_value_that_cannot_be_read_is_an_error() {
        let disks = Disks::new();
        let begin = || Raised::begin(&disks.sys(), &disks.run(), 25, &mut |n| panic!("{n}"));
        fs::create_dir_all(disks.run()).unwrap();
        fs::write(disks.record(), "vda 8\n").unwrap();
        let error = begin().unwrap_err().to_string();
        assert!(error.contains("run/slice_idle"), "{error}");
        assert_eq!(disks.has("vda"), Some(8));
        fs::remove_file(disks.record()).unwrap();
        disks.set("vda", "many");
        let error = begin().unwrap_err().to_string();
        assert!(error.contains("vda/queue/iosched/slice_idle"), "{error}");
    }
}
