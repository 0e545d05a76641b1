//! What the tests of several crates share: skipping by name, the programs in directories of their
//! own, and a QEMU without a system.

mod machine;
mod need;
pub mod site;

pub use machine::Machine;
pub use need::{Need, has, skip};
