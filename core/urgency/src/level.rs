//! Scheduling policies and priorities of the guest and the host.

use serde::{Deserialize, Serialize};

/// A scheduling policy that a guest reports. The paper's section 5.1 has these three.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GuestPolicy {
    /// Not real-time, Linux's `SCHED_OTHER`.
    #[default]
    Other,
    /// Real-time, until it blocks (`SCHED_FIFO`).
    Fifo,
    /// Real-time, in time slices among equals (`SCHED_RR`).
    Rr,
}

impl GuestPolicy {
    /// Converts Linux's number (`include/uapi/linux/sched.h`); `None` for any other.
    #[must_use]
    pub fn of_number(number: u32) -> Option<Self> {
        [Self::Other, Self::Fifo, Self::Rr].into_iter().find(|p| p.number() == number)
    }

    /// Linux's number of the policy.
    #[must_use]
    pub fn number(self) -> u32 {
        match self {
            Self::Other => 0,
            Self::Fifo => 1,
            Self::Rr => 2,
        }
    }
}

/// Scheduling policy and priority of a vCPU's thread on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Level {
    /// Real-time priority 1 to 99; 0 for an ordinary thread.
    pub priority: u32,
    /// Whether the policy is `SCHED_RR`; false for an ordinary thread.
    pub round_robin: bool,
}

impl Level {
    /// Level of an ordinary thread.
    pub const ORDINARY: Self = Self { priority: 0, round_robin: false };

    /// `SCHED_FIFO` of this priority; ordinary for 0.
    #[must_use]
    pub const fn fifo(priority: u32) -> Self {
        Self { priority, round_robin: false }
    }

    /// The level for a guest's policy and priority, where `p_max` is the VM's ceiling:
    /// `p = floor(p_guest * p_max / 99)` (the paper's section 5.1), `p_guest` limited to 99. A
    /// real-time task gets at least 1: there is no real-time priority 0, and as ordinary work it
    /// would not be urgent at all under a low ceiling. `u64` holds the product of two `u32`.
    #[must_use]
    pub fn of_guest(policy: GuestPolicy, p_guest: u32, p_max: u32) -> Self {
        if policy == GuestPolicy::Other {
            return Self::ORDINARY;
        }
        let mapped = u64::from(p_guest.min(99)) * u64::from(p_max) / 99;
        // No more than `p_max`, which is 32 bits.
        let priority = u32::try_from(mapped).unwrap_or(p_max).max(1).min(p_max);
        Self { priority, round_robin: policy == GuestPolicy::Rr && priority > 0 }
    }
}

/// A change of a thread's level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// To a higher priority.
    Raise,
    /// To a lower one, or to the other policy at the same priority.
    Lower,
}

impl Change {
    /// Order in which the threads of a VM are changed: raises first, because a thread that is to be
    /// lowered may occupy the CPU that the others need.
    pub const IN_ORDER: [Self; 2] = [Self::Raise, Self::Lower];

    /// From one level to another; `None` for the same.
    #[must_use]
    pub fn between(old: Level, new: Level) -> Option<Self> {
        (old != new).then_some(if new.priority > old.priority { Self::Raise } else { Self::Lower })
    }
}
