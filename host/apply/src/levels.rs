//! Settings that move among levels which the journal names: threads, and files of the host.
//!
//! A write with [`levels`](crate::Write::levels) journals all values that its setting may have
//! while it is in force. A program may then change it thousands of times a second without touching
//! the journal: whenever it is killed, putting back knows each of these values as ours. What must
//! not happen is a change after the setting was put back, so each change is made under the lock of
//! the state directory, for some microseconds, and only while the journal is the one that was
//! read.

use std::fs::File;
use std::io;
use std::path::Path;

use rtvirtio_kernel::Root;
use rtvirtio_kernel::sched::{self, Attr};
use rustix::fs::{AtFlags, FlockOperation, flock};
use rustix::io::Errno;

use crate::error::ApplyError;
use crate::journal::{self, Entry, JOURNAL_FILE};
use crate::lock;
use crate::machine::{Fault, Machine, NoGuests};
use crate::session::Session;
use crate::state_dir::StateDir;
use crate::target::{Form, Place, Target};

/// A thread whose scheduling may be moved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Movable {
    /// The setting as users know it.
    pub knob: String,
    /// Process that the thread belongs to.
    pub pid: u32,
    /// Thread id, as in `/proc/PID/task/TID`.
    pub tid: u32,
    /// Start of the thread, in 1/100 s since boot.
    pub start: u64,
    /// Scheduling in the plan, in force unless a program moved the thread.
    pub contract: Attr,
    /// Further values that the journal allows.
    pub levels: Vec<Attr>,
}

impl Movable {
    fn from_entry(entry: &Entry) -> Option<Self> {
        let Place::Thread { pid, tid, start } = entry.target.place else { return None };
        let attr = |text: &String| text.parse::<Attr>().ok();
        if entry.target.form != Form::Scheduling || entry.levels.is_empty() {
            return None;
        }
        Some(Self {
            knob: entry.knob.clone(),
            pid,
            tid,
            start,
            contract: attr(entry.new.as_ref()?)?,
            levels: entry.levels.iter().filter_map(attr).collect(),
        })
    }

    /// Whether the value is one that the journal names for the thread.
    #[must_use]
    pub fn may_be(&self, attr: &Attr) -> bool {
        attr.is(&self.contract) || self.levels.iter().any(|level| attr.is(level))
    }
}

/// A file of the host whose value may be moved, such as a VM's weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MovableFile {
    /// The setting as users know it.
    pub knob: String,
    /// File on the host, with the form of its text.
    pub target: Target,
    /// Value in the plan, in force unless a program moved it.
    pub contract: String,
    /// Further values that the journal allows.
    pub levels: Vec<String>,
    /// Inode of its cgroup's directory.
    identity: Option<u64>,
}

impl MovableFile {
    fn from_entry(entry: &Entry) -> Option<Self> {
        if entry.target.place != Place::Host || entry.levels.is_empty() {
            return None;
        }
        Some(Self {
            knob: entry.knob.clone(),
            target: entry.target.clone(),
            contract: entry.new.clone()?,
            levels: entry.levels.clone(),
            identity: entry.identity,
        })
    }

    /// The setting's name where `file` has the weight of a VM's cgroup.
    #[must_use]
    pub fn weight_knob(file: &str, vm: &str) -> String {
        format!("{file} of {vm}")
    }

    /// Whether the file is the weight of this VM's cgroup.
    #[must_use]
    pub fn is_weight_of(&self, vm: &str) -> bool {
        let file = self.target.path.file_name().and_then(|name| name.to_str());
        file.is_some_and(|file| self.knob == Self::weight_knob(file, vm))
    }

    /// Whether the value is one that the journal names for the file.
    #[must_use]
    pub fn may_be(&self, value: &str) -> bool {
        let form = &self.target.form;
        form.is(value, &self.contract) || self.levels.iter().any(|level| form.is(value, level))
    }
}

/// Inode and modification time of a journal: each store writes a new file.
type Stamp = (u64, i64, i64);

/// Settings of the plan in force that may be moved.
#[derive(Debug)]
pub struct Levels {
    dir: StateDir,
    /// `None` where the caller has a [`Session`], which holds the lock.
    lock: Option<File>,
    stamp: Option<Stamp>,
    /// Process that applied the plan; `None` when none is in force.
    by: Option<u32>,
    movable: Vec<Movable>,
    files: Vec<MovableFile>,
    /// Settings with a single value, and files that change along with one.
    fixed: Vec<Target>,
}

/// Whether settings may be moved now, under the state directory's lock.
#[derive(Debug)]
pub enum Hold<'l> {
    /// Settings may be moved until the guard is dropped.
    Free(Guard<'l>),
    /// The lock is held by another rtvirtio process: try again in a moment.
    Busy,
    /// The journal has been replaced or removed: [`Levels::reload`].
    Changed,
}

impl Levels {
    /// Settings of the plan in force in a state directory; empty when none is in force.
    pub fn open(dir: &Path) -> Result<Self, ApplyError> {
        let dir = StateDir::open(dir)?;
        let lock = Some(lock::open(&dir)?);
        Self::of_dir(dir, lock)
    }

    /// Settings of a session, whose lock the caller holds for as long as they are moved.
    pub fn of_session(session: &Session) -> Result<Self, ApplyError> {
        Self::of_dir(StateDir::open(session.dir())?, None)
    }

    fn of_dir(dir: StateDir, lock: Option<File>) -> Result<Self, ApplyError> {
        let (movable, files, fixed) = (Vec::new(), Vec::new(), Vec::new());
        let mut levels = Self { dir, lock, stamp: None, by: None, movable, files, fixed };
        levels.reload()?;
        Ok(levels)
    }

    /// Threads whose scheduling may be moved.
    #[must_use]
    pub fn movable(&self) -> &[Movable] {
        &self.movable
    }

    /// The files of the host.
    #[must_use]
    pub fn files(&self) -> &[MovableFile] {
        &self.files
    }

    /// Whether the plan in force gives this setting a single value, or changes it along with
    /// another one.
    #[must_use]
    pub fn is_fixed(&self, target: &Target) -> bool {
        self.fixed.contains(target)
    }

    /// Process that applied the plan in force; `None` when none is, or when it is being put back.
    #[must_use]
    pub fn applied_by(&self) -> Option<u32> {
        self.by
    }

    /// Reads the journal anew.
    ///
    /// # Errors
    /// When it cannot be read as one; nothing may be moved then.
    pub fn reload(&mut self) -> Result<(), ApplyError> {
        (self.by, self.movable, self.files) = (None, Vec::new(), Vec::new());
        self.fixed = Vec::new();
        // Before the content: a journal that is written in between is seen as another one.
        self.stamp = self.stamp_now()?;
        let Some(journal) = journal::load(&self.dir)? else { return Ok(()) };
        let machine = Root::default();
        let whole = journal.complete && !journal.reverting && !journal.leftover;
        if whole && !journal.is_of_another_boot(&Machine::new(&machine, &NoGuests))? {
            self.by = Some(journal.pid);
            self.movable = journal.entries.iter().filter_map(Movable::from_entry).collect();
            self.files = journal.entries.iter().filter_map(MovableFile::from_entry).collect();
            // A setting with its old value and a single value moves under no plan.
            let is_fixed = |e: &&Entry| e.levels.is_empty() && (e.new.is_none() || e.new != e.old);
            self.fixed = journal.entries.iter().filter(is_fixed).map(|e| e.target.clone()).collect();
        }
        Ok(())
    }

    fn stamp_now(&self) -> Result<Option<Stamp>, ApplyError> {
        match rustix::fs::statat(self.dir.descriptor(), JOURNAL_FILE, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some((stat.st_ino, stat.st_mtime, stat.st_mtime_nsec as i64))),
            Err(Errno::NOENT) => Ok(None),
            Err(e) => {
                let path = journal::path(&self.dir);
                Err(ApplyError::State { action: "look at", path, source: e.into() })
            }
        }
    }

    /// Takes the lock without waiting, and compares the journal.
    pub fn hold(&self) -> Result<Hold<'_>, ApplyError> {
        if let Some(file) = &self.lock {
            match flock(file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK | Errno::INTR) => return Ok(Hold::Busy),
                Err(e) => {
                    let path = self.dir.path().join(lock::LOCK_FILE);
                    return Err(ApplyError::State { action: "lock", path, source: e.into() });
                }
            }
        }
        let guard = Guard { levels: self };
        let same = self.by.is_some() && self.stamp_now()? == self.stamp;
        Ok(if same { Hold::Free(guard) } else { Hold::Changed })
    }
}

/// The right to move settings.
#[derive(Debug)]
pub struct Guard<'l> {
    levels: &'l Levels,
}

impl Guard<'_> {
    /// Gives a thread one of the values that the journal names for it. That `movable` is still the
    /// same thread is the caller's to know, as from an open file of its directory in `/proc`.
    ///
    /// # Errors
    /// As `sched_setattr(2)`; kind `PermissionDenied` for a value that the journal does not name.
    pub fn set(&self, movable: &Movable, attr: &Attr) -> io::Result<()> {
        let same = |m: &&Movable| (m.pid, m.tid, m.start) == (movable.pid, movable.tid, movable.start);
        let known = self.levels.movable.iter().find(same);
        if !known.is_some_and(|known| known.may_be(attr)) {
            let text = format!("{}: `{attr}` is not in the journal", movable.knob);
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
        }
        sched::set(movable.tid, attr)
    }

    /// Gives a file one of the values that the journal names for it. Whether it had to be written.
    ///
    /// # Errors
    /// Kind `PermissionDenied` for a value that the journal does not name; `NotFound` when the file
    /// or its cgroup is gone, also where another cgroup has its name by now; `InvalidData` when
    /// another program has changed it, which is left alone; else as the system call reports.
    pub fn set_file(&self, file: &MovableFile, value: &str) -> io::Result<bool> {
        let known = self.levels.files.iter().find(|known| known.target == file.target);
        let denied = |kind, what: &str| Err(io::Error::new(kind, format!("{}: {what}", file.knob)));
        let Some(known) = known.filter(|known| known.may_be(value)) else {
            return denied(io::ErrorKind::PermissionDenied, &format!("`{value}` is not in the journal"));
        };
        let root = Root::default();
        let machine = Machine::new(&root, &NoGuests);
        if let (Some(identity), Some(dir)) = (known.identity, known.target.path.parent()) {
            if machine.host().identity(dir)? != identity {
                return denied(io::ErrorKind::NotFound, "its cgroup is another one");
            }
        }
        let (target, form) = (&known.target, &known.target.form);
        let text = machine.read(target).map_err(Fault::into_io)?;
        let Some(found) = form.value(&text).filter(|found| known.may_be(found)) else {
            return denied(io::ErrorKind::InvalidData, &format!("another program has set `{}`", text.trim()));
        };
        if form.is(&found, value) {
            return Ok(false);
        }
        machine.write(target, &form.text(value)).map_err(Fault::into_io)?;
        Ok(true)
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if let Some(file) = &self.levels.lock {
            // Unlocking an open file does not fail; closing it would unlock too.
            let _ = flock(file, FlockOperation::Unlock);
        }
    }
}
