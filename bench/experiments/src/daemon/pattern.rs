//! A catalogue of what VMs and a device do in a month.

use serde::{Deserialize, Serialize};

/// What the VMs and the device do in a month.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pattern {
    /// As declared.
    Steady,
    /// Twice as much in working hours.
    Daily,
    /// Three times as much on two days of a week.
    Weekly,
    /// Between nothing and four times as much, another each five minutes.
    Noise,
    /// Just at a border between two levels, now on one side and now on the other.
    Border,
    /// Five times as much for seven minutes, at any time.
    Bursts,
    /// From the declared load to six times as much within the month.
    Ramp,
    /// Once and for all three times as much.
    Step,
    /// Three times as much for a day, of every eleven.
    Square,
    /// A device that is slow for some hours of most days, as with its own upkeep.
    SlowDevice,
    /// Targets that are missed for an hour now and then, whatever is set.
    Misses,
    /// A target that is missed as long as no caution is taken, and met with it.
    Cautious,
    /// VMs that end and start again all day long.
    Restarts,
    /// A load that is low as long as much is planned for, and high otherwise.
    Contrary,
    /// All of it at any time.
    Chaos,
}

impl Pattern {
    /// The catalogue.
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
