//! Readers and writers of kernel files under a root path, and host checks.
//!
//! Every function takes a [`Root`]; `/` on a real machine, a temporary directory in tests. The
//! readers return what the kernel reports in a form that can be compared by meaning ([`text`]),
//! because the kernel seldom prints what was written.

mod atomic_write;
pub mod block;
pub mod cgroup;
pub mod check;
pub mod child;
mod cpuset;
pub mod detached;
pub mod device_io;
mod error;
pub mod fair_server;
pub mod faults;
pub mod flock;
pub mod holders;
pub mod io_counters;
pub mod irq;
pub mod leftovers;
pub mod mounts;
mod partition;
pub mod pressure;
pub mod process;
pub mod queue_file;
pub mod resctrl;
mod root;
mod root_domain;
pub mod sched;
pub mod steal;
pub mod task;
#[cfg(test)]
mod test_root;
pub mod text;
mod topology;
pub mod trusted;
mod wait_limit;

pub use atomic_write::atomic_write;
pub use block::{BlockDevice, DriveModel, Stack};
pub use cgroup::{Cgroups, Hierarchy};
pub use check::{Finding, Level, check, guest_priority, preempt_rt};
pub use cpuset::{PinnedCpus, cpuset, pinned_cpus};
pub use error::{Gone, HostError, is_gone, unless_gone};
pub use holders::{Claim, ClaimError, Holder, Holders};
pub use partition::{
    PartitionError, PartitionFile, PartitionStep, ancestor_steps, partition_fault, partition_steps,
    partition_support,
};
pub use process::ProcessId;
pub use root::Root;
pub use root_domain::root_domain;
pub use topology::topology;
pub use wait_limit::WaitLimit;
