//! Patterns of the load and the device over a month.

use serde::{Deserialize, Serialize};

/// Pattern of the load and the device over a month.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pattern {
    /// Load and device as declared.
    Steady,
    /// Twice the load in working hours.
    Daily,
    /// Three times the load on two days of a week.
    Weekly,
    /// Zero to four times the load, drawn every five minutes.
    Noise,
    /// At the border between two load levels, alternately on either side.
    Border,
    /// Five times the load for seven minutes, at any time.
    Bursts,
    /// From the declared load to six times as much within the month.
    Ramp,
    /// Three times the load from one moment on.
    Step,
    /// Three times the load for one day of every eleven.
    Square,
    /// A device that is slow for some hours of most days, as with its own garbage collection.
    SlowDevice,
    /// Targets that are missed for an hour now and then, whatever the settings.
    Misses,
    /// A target that is missed until the planner's caution is raised, and met with it.
    Cautious,
    /// VMs that end and restart all day long.
    Restarts,
    /// A load that is low while a high one is planned for, and high otherwise.
    Contrary,
    /// All of these at any time.
    Chaos,
}

impl Pattern {
    /// All patterns, the steady one first.
    pub const ALL: [Self; 15] = [
        Self::Steady,
        Self::Daily,
        Self::Weekly,
        Self::Noise,
        Self::Border,
        Self::Bursts,
        Self::Ramp,
        Self::Step,
        Self::Square,
        Self::SlowDevice,
        Self::Misses,
        Self::Cautious,
        Self::Restarts,
        Self::Contrary,
        Self::Chaos,
    ];

    /// Whether the last third of a month shows nothing that the first two thirds did not.
    #[must_use]
    pub fn is_stationary(self) -> bool {
        !matches!(self, Self::Ramp | Self::Contrary | Self::Chaos | Self::Bursts | Self::Noise)
    }
}
