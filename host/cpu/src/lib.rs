//! One CPU contract for all threads of a VM.
//!
//! A [`Contract`] is the (Q, P) of the reservations paper (section 3): every CPU gives the VM's
//! threads together `budget` in every `period`. Stock kernels have no such thing for a set of
//! threads of any policy, so [`probe`] finds the mechanisms that this one has, [`admit`] refuses
//! contracts that do not fit, and [`settings`] turns contract, priorities and threads into writes
//! that `rtvirtio-apply` journals and puts back. [`control`] names the mechanism that limits a
//! thread now, and its strength.
//!
//! A demand, a rate of requests within a deadline, becomes a contract by [`find_all`], from a VM's
//! measured throughput over budget ([`CpuProfile`]).

mod admission;
mod ask;
mod backend;
mod contract;
mod control;
mod cores;
mod curve;
mod deadline;
mod demand;
mod ending;
mod error;
mod grant;
mod keep;
mod managed;
mod order;
mod partition;
mod probe;
mod profile;
mod settings;
mod split;
mod supply;
mod urgency;

pub use admission::admit;
pub use ask::{Ask, Settings};
pub use backend::Backend;
pub use contract::Contract;
pub use control::{Control, control};
pub use cores::Cores;
pub use curve::{Point, Run, points};
pub use deadline::{domain_of, has_part};
pub use demand::{Asked, Choice, CurveChoice, Demand, DemandError, MARGIN, Neighbours, find, find_all};
pub use ending::release_ending;
pub use error::CpuError;
pub use grant::{Grant, Load, Over};
pub use keep::{resplit, take_in};
pub use managed::{is_helper_process, room, room_beyond, room_load};
pub use order::{Level, Order, attr, going_before, levels};
pub use partition::{Partition, ancestor_writes, outside, partition_writes};
pub use probe::{KernelMechanism, Probe, choose, choose_pinned, probe};
pub use profile::{CPU_PROFILE_SCHEMA, CpuProfile, Neighbour, ProfileError, Setup};
pub use settings::{group_name, settings, settings_in};
pub use split::{Share, split};
pub use supply::{Surroundings, interference_us, tick, turn};
pub use urgency::{UrgencyRange, with_levels};
