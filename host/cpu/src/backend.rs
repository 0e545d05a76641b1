//! Mechanisms that hold a VM's threads to a contract.

use std::fmt;

use rtvirtio_planner::Enforcement;
use serde::{Deserialize, Serialize};

/// Kernel mechanism that holds a VM's threads to a contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Backend {
    /// `cpu.rt.max` of cgroup v2: real-time threads of a group behind one constant-bandwidth server
    /// for each CPU. Patches of 2026, not merged when this was written.
    Hcbs,
    /// `cpu.rt_runtime_us` of cgroup v1 (`CONFIG_RT_GROUP_SCHED`;
    /// `Documentation/scheduler/sched-rt-group.rst`).
    RtGroup,
    /// `SCHED_DEADLINE` for each thread, the budget split over them
    /// (`Documentation/scheduler/sched-deadline.rst`).
    Deadline,
    /// `cpu.max`, on v1 `cpu.cfs_quota_us`: an upper limit for ordinary threads
    /// (`Documentation/scheduler/sched-bwc.rst`).
    CpuMax,
    /// Real-time priorities with no budget for each VM, only the kernel's share for ordinary
    /// threads: RT throttling, or since Linux 6.12 the fair server.
    Throttle,
}

impl Backend {
    /// Guarantee, cap or hint.
    #[must_use]
    pub fn strength(self) -> Enforcement {
        match self {
            Self::Hcbs | Self::RtGroup | Self::Deadline => Enforcement::Guarantee,
            Self::CpuMax => Enforcement::Cap,
            Self::Throttle => Enforcement::Hint,
        }
    }

    /// Name that the kernel gives the mechanism.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Hcbs => "cpu.rt.max",
            Self::RtGroup => "cpu.rt_runtime_us",
            Self::Deadline => "SCHED_DEADLINE",
            Self::CpuMax => "cpu.max",
            Self::Throttle => "priorities",
        }
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
