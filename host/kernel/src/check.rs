//! Readiness checks of this host. Each finding has what was found, why it matters and a remedy.

mod cores;
mod cpu;
mod guest;
mod io;
mod memory;
mod placement;
mod realtime;
mod tools;

use serde::{Deserialize, Serialize};

use crate::{HostError, Root};

pub use cpu::preempt_rt;
pub use guest::guest_priority;
pub use memory::traffic as memory_traffic;
pub use realtime::{fair_server, least_fair_server, stops_fifo, vms};
pub use tools::qemu_program;

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Nothing has to be done.
    Ok,
    /// Tails will be longer, or a part of rtvirtio is not usable.
    Warn,
    /// Plans cannot be applied.
    Fail,
}

/// Result of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// Stable name, such as `cgroup.io`; for scripts.
    pub id: String,
    /// Severity of this finding.
    pub level: Level,
    /// State that was found.
    pub what: String,
    /// Reason why it matters for the tail.
    pub why: String,
    /// Remedy; empty when nothing has to be done.
    pub remedy: String,
}

impl Finding {
    /// Finding with nothing to do.
    #[must_use]
    pub fn ok(id: &str, what: impl Into<String>, why: &str) -> Self {
        Self { id: id.into(), level: Level::Ok, what: what.into(), why: why.into(), remedy: String::new() }
    }

    /// Finding that makes tails longer or a part unusable.
    #[must_use]
    pub fn warn(id: &str, what: impl Into<String>, why: &str, remedy: impl Into<String>) -> Self {
        Self { id: id.into(), level: Level::Warn, what: what.into(), why: why.into(), remedy: remedy.into() }
    }

    /// Finding that keeps plans from being applied.
    #[must_use]
    pub fn fail(id: &str, what: impl Into<String>, why: &str, remedy: impl Into<String>) -> Self {
        Self { id: id.into(), level: Level::Fail, what: what.into(), why: why.into(), remedy: remedy.into() }
    }

    /// Finding for a state that could not be read.
    fn unknown(id: &str, error: &HostError, why: &str) -> Self {
        Self::warn(
            id,
            format!("not known: {error}"),
            why,
            "run as root on the host itself, with /proc and /sys mounted",
        )
    }
}

/// Checks the host. `extra` are findings of the caller's own probes, such as whether KVM really
/// runs a guest; they come last.
///
/// Programs are asked for their version only on the real root. Never fails: a file that cannot be
/// read becomes a finding.
#[must_use]
pub fn check(root: &Root, extra: Vec<Finding>) -> Vec<Finding> {
    let mut found = Vec::new();
    io::check(root, &mut found);
    cpu::check(root, &mut found);
    cores::check(root, &mut found);
    cores::partitions(root, &mut found);
    memory::check(root, &mut found);
    realtime::check(root, &mut found);
    tools::check(root, &mut found);
    found.extend(extra);
    found
}

#[cfg(test)]
mod tests;
