//! A locked state directory.

use std::path::{Path, PathBuf};

use crate::amend::{Amended, amend};
use crate::apply::{Applied, apply};
use crate::drift::{release, restore};
use crate::error::ApplyError;
use crate::journal::{self, KnownJournal};
use crate::lock::Lock;
use crate::machine::Machine;
use crate::observer::Observer;
use crate::outcome::Reverted;
use crate::resolve::Write;
use crate::revert::{OnConflict, revert};
use crate::state_dir::StateDir;

/// A locked state directory. The lock ends when this is dropped, or with the process.
#[derive(Debug)]
pub struct Session {
    dir: StateDir,
    _lock: Lock,
}

impl Session {
    /// Makes the state directory if need be, and locks it.
    ///
    /// # Errors
    /// [`ApplyError::Locked`] with the holder's process id; [`ApplyError::UntrustedState`] or
    /// [`ApplyError::State`] when the directory cannot be used.
    pub fn open(dir: impl Into<PathBuf>) -> Result<Self, ApplyError> {
        let dir = StateDir::open_or_create(dir)?;
        let lock = Lock::take(&dir)?;
        Ok(Self { dir, _lock: lock })
    }

    /// The state directory's path.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The state directory, for further files next to the journal.
    #[must_use]
    pub fn state(&self) -> &StateDir {
        &self.dir
    }

    /// Whether a journal is there: a plan is in force, or was cut off.
    pub fn in_force(&self) -> Result<bool, ApplyError> {
        Ok(journal::load(&self.dir)?.is_some())
    }

    /// Captures, journals, writes, reads back and compares. On any failure everything is put back.
    ///
    /// # Errors
    /// [`ApplyError::InForce`] when a journal is there; else before the first write the reason why
    /// nothing was touched, and after it [`ApplyError::RolledBack`] with what became of each knob.
    pub fn apply(
        &self,
        writes: &[Write],
        machine: &Machine<'_>,
        observer: &mut dyn Observer,
    ) -> Result<Applied, ApplyError> {
        apply(&self.dir, writes, machine, observer)
    }

    /// Process that applied the plan in force; `None` without one. A caller that adds to it
    /// compares the id.
    pub fn applied_by(&self) -> Result<Option<u32>, ApplyError> {
        Ok(journal::load(&self.dir)?.map(|j| j.pid))
    }

    /// Adds writes to threads and single files to the plan in force, or gives its settings another
    /// value: journaled first, so that [`Session::revert`] puts them back too. A write that the
    /// kernel refuses undoes nothing; it is reported in [`Amended`].
    ///
    /// # Errors
    /// [`ApplyError::NothingInForce`] or [`ApplyError::NotWhole`] when nothing can be added;
    /// [`ApplyError::CannotAct`] for a write that changes other files; nothing was touched then.
    /// When the journal cannot be written; only journaled values may have been written again.
    pub fn amend(
        &self,
        writes: &[Write],
        machine: &Machine<'_>,
        observer: &mut dyn Observer,
    ) -> Result<Amended, ApplyError> {
        self.amend_known(&mut KnownJournal::default(), writes, machine, observer)
    }

    /// Like [`Session::amend`], for one of many additions in a row: `known` saves reading the
    /// journal for each. Entries of threads that have ended are dropped when it is read.
    pub fn amend_known(
        &self,
        known: &mut KnownJournal,
        writes: &[Write],
        machine: &Machine<'_>,
        observer: &mut dyn Observer,
    ) -> Result<Amended, ApplyError> {
        amend(&self.dir, known, writes, machine, observer)
    }

    /// Writes the journal's value again to settings in force that another program has changed
    /// since, if `chosen` accepts their name and path. The journal, with the values from before the
    /// first write, does not change.
    ///
    /// # Errors
    /// As [`Session::amend`].
    pub fn restore(
        &self,
        chosen: &dyn Fn(&str, &str) -> bool,
        machine: &Machine<'_>,
    ) -> Result<Amended, ApplyError> {
        restore(&self.dir, chosen, machine)
    }

    /// Leaves settings that another program has changed since as they are, if `chosen` accepts
    /// their name and path: they are dropped and no longer put back. Returns their names.
    ///
    /// # Errors
    /// As [`Session::amend`].
    pub fn release(
        &self,
        chosen: &dyn Fn(&str, &str) -> bool,
        machine: &Machine<'_>,
    ) -> Result<Vec<String>, ApplyError> {
        release(&self.dir, chosen, machine)
    }

    /// Puts everything back that the journal names; `None` when there is no journal.
    ///
    /// # Errors
    /// When the journal cannot be used. What became of a single knob is in [`Reverted`].
    pub fn revert(
        &self,
        on_conflict: OnConflict,
        machine: &Machine<'_>,
        observer: &mut dyn Observer,
    ) -> Result<Option<Reverted>, ApplyError> {
        match journal::load(&self.dir)? {
            Some(journal) => revert(&self.dir, journal, on_conflict, machine, observer).map(Some),
            None => Ok(None),
        }
    }
}
