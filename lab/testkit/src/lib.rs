//! What the tests of several crates share: skipping by name, and a QEMU without a system.

mod machine;
mod need;

pub use machine::Machine;
pub use need::{Need, has, skip};
