//! Applies a plan so that it can always be put back: capture, journal (fsync), write, read back,
//! compare, roll back.
//!
//! [`resolve()`] turns a plan into [`Write`]s, [`dry_run`] shows them, [`Session::apply`] carries
//! them out and [`Session::revert`] puts everything back, also after the process was killed between
//! any two writes. [`Session::amend`] adds threads that appear later, and
//! [`Levels`] moves threads among values that the journal names. `docs/explanation/safety.md`
//! states what is guaranteed and what is not.

mod amend;
mod apply;
mod asleep;
mod capture;
mod drift;
mod error;
mod journal;
mod levels;
mod lock;
mod machine;
mod observer;
mod outcome;
pub mod points;
mod readable;
mod resctrl;
mod resolve;
mod revert;
mod session;
mod state_dir;
mod status;
mod systemd;
mod target;
mod units;

pub use amend::Amended;
pub use apply::{Applied, Left, LeftCause};
pub use asleep::Pauses;
pub use capture::{Line, dry_run, unkept};
pub use error::ApplyError;
pub use journal::{JOURNAL_FILE, JOURNAL_SCHEMA, KnownJournal};
pub use levels::{Guard, Hold, Levels, Movable, MovableFile};
pub use lock::LOCK_FILE;
pub use machine::{GuestFiles, Guests, HostFiles, Machine, NoGuests};
pub use observer::{Observer, Silent, Step};
pub use outcome::{Fate, Outcome, Reverted};
pub use readable::{Readable, ReadableEntry};
pub use resolve::{
    Binding, RaiseWrites, Raised, VmBinding, Write, append, elevator_writes, merge, raise_writes, resolve,
};
pub use revert::OnConflict;
pub use session::Session;
pub use state_dir::{StateDir, syncs};
pub use status::{KnobState, KnobStatus, Status, status};
pub use target::{Form, Place, Target};
pub use units::{Unkept, Why, has_systemd, systemd_weight};
