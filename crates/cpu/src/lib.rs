//! One CPU contract for all threads of a VM.
//!
//! A [`Contract`] is the (Q, P) of the reservations paper (section 3): every CPU gives the VM's threads together `budget` in every `period`.
//! Stock kernels have no such thing for a set of threads of any policy, so [`probe`] finds which of four mechanisms this one has, [`admit`]
//! refuses what would not fit, and [`settings`] turns contract, priorities and threads into writes that `rtvirtio-apply` journals and puts back.
//! [`control`] says of any thread what holds it now, and how firmly.

mod admission;
mod backend;
mod contract;
mod control;
mod error;
mod order;
mod settings;
mod split;

pub use admission::{Grant, Load, admit};
pub use backend::{Backend, Found, Probe, choose, probe};
pub use contract::Contract;
pub use control::{Control, control};
pub use error::CpuError;
pub use order::{Order, attr};
pub use settings::{Ask, Settings, settings};
pub use split::{Share, split};
