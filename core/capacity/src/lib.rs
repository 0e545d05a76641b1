//! Whether a contract fits a host on top of those in force: [`admit`], one pure function of the
//! host's measured devices, the contracts and a candidate.
//!
//! A *contract* is what one VM is promised: the I/O domain's reservation for its targets on each
//! disk ([`reserve()`]) and of each network's link ([`link_reserve()`]), and a share of each CPU.
//! The tests of disks and networks are the scheduler's own admission (`rtvirtio_sched::bound`); so
//! the answer is about disks and networks that the I/O domain serves, and about CPU contracts. The
//! kernel's knobs (weights, elevators) guarantee nothing that could be admitted; the planner
//! predicts their effect.
//!
//! Cluster schedulers know capacity as integers that they add up. [`Scalars`] are such integers,
//! per disk, per network and for the CPU, with one property: contracts whose sum is within the
//! limits are admitted. The reverse does not hold; [`Ledger`] makes the exact test, in time that
//! grows with the contracts of one host.

mod contract;
mod cpu;
mod device;
mod disk;
mod ledger;
mod network;
mod node;
mod refused;
mod reserve;
mod scalar;

pub use contract::{Contract, OnDisk, Unpromised};
pub use cpu::{ROUNDING, fits};
pub use device::{DeviceError, DeviceModel};
pub use disk::DiskCapacity;
pub use ledger::Ledger;
pub use network::{
    LINK_HEADROOM, LinkReserve, Network, NoPromise, OnNetwork, frame_limits, frames_held_back, link_reserve,
};
pub use node::{Admission, Disk, Node, Resource, admit};
pub use refused::Refused;
pub use reserve::{
    Options, Reserve, Shape, counted_delay, has_closed_loop_target, longest_from_intended, longest_stall,
    missed_turn, promised, replenishment, reserve, tightest,
};
pub use scalar::{Permille, Scalars, WHOLE};
