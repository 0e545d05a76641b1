//! Correction of a device profile by later counters, which separate a worn or throttling drive from
//! noise and load.
//!
//! Counters of a window, such as those of `/sys/block/*/stat`, give the time of all requests of a
//! direction, `T`, and the time that all requests waited for each other, `W`, at most the time of
//! all requests in flight less the time in which the device was busy; flushes and stalls of the
//! host add to it. What a request took alone is then inside `[(T - W) / n, T / n]`, and its ratio
//! to the profile's time between the ratios of these ends. A window whose ends are on both sides of
//! the question is no evidence.
//!
//! Ratios are compared with levels, powers of [`STEP`]. A level is raised once a sequential test
//! ([`rtvirtio_stats::FrequencyTest`]) finds that windows exceed it by more than [`TOLERANCE`] more
//! often than [`EXCEEDING`]: after [`FOLLOW`] windows if all do, and falsely once in [`RUN_LENGTH`]
//! windows at most, on average. It is lowered only when of [`LOWER_AFTER`] windows of evidence no
//! more than four needed it. Where windows need a level independently, and at twice the share
//! [`EXCEEDING`] or more often, a week of them is that good with a probability below 0.03.

mod channel;
mod profiled;
mod window;

use rtvirtio_units::Nanos;

use channel::{Channel, Finding};
pub use profiled::Profiled;
pub use window::{AgeingWindow, Completed};

/// Ratio between two levels.
pub const STEP: f64 = 1.25;
/// Largest ratio to a level that does not exceed it: noise of a device as profiled.
pub const TOLERANCE: f64 = 1.1;
/// Share of windows that may exceed a level.
pub const EXCEEDING: f64 = 0.005;
/// Length of a window, s.
pub const WINDOW_S: f64 = 600.0;
/// Windows without a false alarm on average, at least: a year.
pub const RUN_LENGTH: f64 = 365.0 * 86_400.0 / WINDOW_S;
/// Windows until a level is raised that every window exceeds.
pub const FOLLOW: usize = 3;
/// Windows of evidence until a level is lowered: a week, as load and heat have daily and weekly
/// cycles.
pub const LOWER_AFTER: usize = 1_008;
/// Windows of these that may need the level that is lowered.
const SPARE: usize = 4;
/// Windows of evidence below which nothing is said of a device: an hour.
const FEWEST_WINDOWS: usize = 6;

/// Part of a device's behaviour whose change is followed by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// Service time of reads.
    Reads,
    /// Service time of writes.
    Writes,
    /// Longest time without a completion while requests are in the device.
    Standstills,
}

impl Part {
    /// Parts in the order of declaration.
    pub const ALL: [Self; 3] = [Self::Reads, Self::Writes, Self::Standstills];

    /// Name in texts and labels.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Reads => "reads",
            Self::Writes => "writes",
            Self::Standstills => "standstills",
        }
    }
}

/// A part that is slower, or faster, than profiled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Change {
    pub part: Part,
    /// Factor that covers it: a power of [`STEP`].
    pub factor: f64,
    /// Windows since the level was last changed.
    pub since: u64,
    /// Value of the test when the level was raised, [`RUN_LENGTH`] or more; 0 of a level that was
    /// lowered.
    pub evidence: f64,
}

/// State of a device against its profile.
#[derive(Clone, Debug, PartialEq)]
pub enum AgeingState {
    /// No part needs another factor.
    AsProfiled,
    /// Some parts are slower, the slowest first: bounds from the profile do not hold.
    Slower(Vec<Change>),
    /// Some parts are faster, and none is slower: a new profile would allow more.
    Faster(Vec<Change>),
    /// Too few windows could tell.
    Unclear {
        /// Windows of evidence so far.
        windows: usize,
    },
}

/// Number of windows that were no evidence, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Uncounted {
    /// Too few requests in either direction.
    pub few: u64,
    /// Requests waited for each other, a flush or a stall of the host, so that the ratio is not
    /// known closely enough.
    pub waited: u64,
}

/// A device against its profile, by the windows so far.
#[derive(Clone, Debug)]
pub struct Ageing {
    profiled: Profiled,
    channels: [Channel; Part::ALL.len()],
    windows: u64,
    uncounted: Uncounted,
}

impl Ageing {
    /// A device of which no window was seen.
    #[must_use]
    pub fn new(profiled: Profiled) -> Self {
        // A device that stands still less than it may is no better for it.
        let channels = [Channel::new(true), Channel::new(true), Channel::new(false)];
        Self { profiled, channels, windows: 0, uncounted: Uncounted::default() }
    }

    /// A device at the levels of an earlier process. Those of a faster device are not taken over:
    /// they take evidence again.
    #[must_use]
    pub fn restored(profiled: Profiled, levels: [i8; Part::ALL.len()]) -> Self {
        let mut ageing = Self::new(profiled);
        for (channel, level) in ageing.channels.iter_mut().zip(levels) {
            channel.restore(level.max(0));
        }
        ageing
    }

    /// Levels of all parts, for a later process.
    #[must_use]
    pub fn levels(&self) -> [i8; Part::ALL.len()] {
        Part::ALL.map(|part| self.channels[part as usize].level())
    }

    /// Part of the profile that windows are compared with.
    #[must_use]
    pub fn profiled(&self) -> &Profiled {
        &self.profiled
    }

    /// Takes a window.
    pub fn see(&mut self, window: &AgeingWindow) {
        self.windows += 1;
        let (mut few, mut waited) = (0, 0);
        for part in Part::ALL {
            let Some(ratio) = window.ratio(part, &self.profiled) else {
                few += usize::from(part != Part::Standstills);
                continue;
            };
            if self.channels[part as usize].see(ratio, self.windows) == Finding::CannotTell {
                waited += usize::from(part != Part::Standstills);
            }
        }
        if few == 2 {
            self.uncounted.few += 1;
        } else if few + waited == 2 {
            self.uncounted.waited += 1;
        }
    }

    /// Factor by which the profile's service times are to be multiplied for a bound: that of the
    /// slower direction. Below 1 only after [`LOWER_AFTER`] windows of evidence in each direction
    /// that the profile has.
    #[must_use]
    pub fn factor(&self) -> f64 {
        let reads = self.factor_of(Part::Reads);
        if self.profiled.service().write.is_some() { reads.max(self.factor_of(Part::Writes)) } else { reads }
    }

    #[must_use]
    pub fn factor_of(&self, part: Part) -> f64 {
        self.channels[part as usize].factor()
    }

    /// Median ratio of the last windows of evidence to the profile; `None` without any.
    #[must_use]
    pub fn ratio_of(&self, part: Part) -> Option<f64> {
        self.channels[part as usize].median()
    }

    /// Longest standstill that a bound has to allow for beyond the profile's own; `None` where that
    /// one covers all.
    #[must_use]
    pub fn standstill(&self) -> Option<Nanos> {
        let factor = self.factor_of(Part::Standstills);
        let longest = self.profiled.longest_s().filter(|_| factor > 1.0)?;
        Some(Nanos::from_secs_f64(longest * factor * TOLERANCE))
    }

    /// Windows that were no evidence.
    #[must_use]
    pub fn uncounted(&self) -> Uncounted {
        self.uncounted
    }

    /// The state after the last window.
    #[must_use]
    pub fn state(&self) -> AgeingState {
        let change = |part: Part| {
            let channel = &self.channels[part as usize];
            let since = self.windows - channel.changed();
            Change { part, factor: channel.factor(), since, evidence: channel.evidence() }
        };
        let mut slower: Vec<Change> =
            Part::ALL.into_iter().map(change).filter(|change| change.factor > 1.0).collect();
        if !slower.is_empty() {
            slower.sort_by(|a, b| b.factor.total_cmp(&a.factor));
            return AgeingState::Slower(slower);
        }
        // Standstills alone say nothing of service times.
        let windows = self.channels[..2].iter().map(Channel::windows).max().unwrap_or(0);
        if windows < FEWEST_WINDOWS {
            return AgeingState::Unclear { windows };
        }
        let faster: Vec<Change> =
            Part::ALL.into_iter().map(change).filter(|change| change.factor < 1.0).collect();
        if faster.is_empty() { AgeingState::AsProfiled } else { AgeingState::Faster(faster) }
    }

    /// Reason of the alarm, for people; `None` where no part is slower than profiled.
    #[must_use]
    pub fn alarm(&self) -> Option<String> {
        let AgeingState::Slower(changes) = self.state() else { return None };
        let words = |change: &Change| match change.part {
            Part::Standstills => {
                let longest = self.standstill().unwrap_or(Nanos(0));
                format!("it now stands still for up to {longest}")
            }
            part => format!("{} take up to {:.1} times as long", part.name(), change.factor * TOLERANCE),
        };
        let words: Vec<String> = changes.iter().map(words).collect();
        Some(format!("against its profile, {}", words.join(", ")))
    }
}

#[cfg(test)]
mod tests;
