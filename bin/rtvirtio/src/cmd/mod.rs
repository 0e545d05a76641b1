//! One module per command.

pub mod apply;
pub mod check;
pub mod discover;
pub mod domain;
pub mod iod;
pub mod keep;
pub mod plan;
pub mod profile;
pub mod profile_cpu;
pub mod revert;
pub mod simulate;
pub mod status;
pub mod threads;
pub mod tune;
pub mod verify;
