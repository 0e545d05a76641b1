//! A level with hysteresis: up after a short confirmation, down after a long time without need.

use serde::{Deserialize, Serialize};

/// Highest level: greater needs count as this one.
pub const HIGHEST: u8 = 32;
/// A need that recurs within so many horizons of a fall shows that the horizon was too short.
const REGRET_HORIZONS: u64 = 4;
/// Growth of the horizon by such a need ...
const REGRET_GROWTH: u64 = 4;
/// ... and its limit in all.
const MOST_GROWTH: u64 = 16;

/// Time constants of a [`Hysteresis`], in ms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HysteresisTiming {
    /// Time for which a need must last without a break to count.
    pub confirm: u64,
    /// Time without need after which a level is left.
    pub horizon: u64,
}

/// State of a ladder's horizon, without times, so that a later process can restore it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Backoff {
    /// Factor of the horizon, 1 at first.
    pub growth: u64,
    /// Whether a level was left, and not needed since.
    pub fell: bool,
}

/// A level with hysteresis and a growing horizon.
///
/// A recurring need with any period below the horizon holds its level. With a longer period the
/// level falls once or a few times: each time that the need recurs soon after a fall, the horizon
/// becomes four times as long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hysteresis {
    level: u8,
    /// Time at which each level from 1 on was last needed, in ms.
    needed: Vec<u64>,
    /// A need above the level: its begin in ms, and the highest value since.
    rising: Option<(u64, u8)>,
    seen: Option<u64>,
    /// Factor of the horizon, 1 at first.
    growth: u64,
    fell: Option<u64>,
}

impl Hysteresis {
    /// A ladder at this level, which counts as needed now.
    #[must_use]
    pub fn at(level: u8, now: u64) -> Self {
        let level = level.min(HIGHEST);
        Self { level, needed: vec![now; usize::from(level)], rising: None, seen: None, growth: 1, fell: None }
    }

    /// Restores the state of an earlier process. A level that was left then counts as left now.
    #[must_use]
    pub fn with(self, patience: Backoff, now: u64) -> Self {
        Self { growth: patience.growth.clamp(1, MOST_GROWTH), fell: patience.fell.then_some(now), ..self }
    }

    /// State for a later process; `None` where it is the initial one.
    #[must_use]
    pub fn patience(&self) -> Option<Backoff> {
        let patience = Backoff { growth: self.growth, fell: self.fell.is_some() };
        (patience.growth > 1 || patience.fell).then_some(patience)
    }

    /// Present level, 0 to [`HIGHEST`].
    #[must_use]
    pub fn level(&self) -> u8 {
        self.level
    }

    /// Restarts the confirmation of a rise: earlier observations no longer apply.
    pub fn begin_anew(&mut self) {
        self.rising = None;
    }

    /// Records the need at one moment.
    pub fn see(&mut self, now: u64, need: u8, pace: HysteresisTiming) {
        let need = need.min(HIGHEST);
        // A need counts as interrupted where it was not observed.
        let watched = self.seen.is_some_and(|at| now.saturating_sub(at) <= pace.confirm);
        self.seen = Some(now);
        if self.needed.len() < usize::from(need) {
            self.needed.resize(usize::from(need), 0);
        }
        self.needed.iter_mut().take(usize::from(need)).for_each(|at| *at = now);
        if need > self.level {
            let (since, most) = self.rising.filter(|_| watched).unwrap_or((now, need));
            let most = most.max(need);
            self.rising = Some((since, most));
            if now.saturating_sub(since) >= pace.confirm {
                self.rise(now, most, pace);
            }
            return;
        }
        self.rising = None;
        let horizon = self.horizon(pace);
        let is_recent = |at: &u64| now.saturating_sub(*at) < horizon;
        let recent = self.needed.iter().rposition(is_recent).map_or(0, |place| place + 1);
        let recent = u8::try_from(recent).unwrap_or(HIGHEST);
        if recent < self.level {
            self.level = recent;
            self.fell = Some(now);
        }
    }

    fn horizon(&self, pace: HysteresisTiming) -> u64 {
        pace.horizon.saturating_mul(self.growth)
    }

    fn rise(&mut self, now: u64, level: u8, pace: HysteresisTiming) {
        let soon = self.horizon(pace).saturating_mul(REGRET_HORIZONS);
        if self.fell.take().is_some_and(|at| now.saturating_sub(at) < soon) {
            self.growth = (self.growth * REGRET_GROWTH).min(MOST_GROWTH);
        }
        self.level = level;
        self.rising = None;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PACE: HysteresisTiming = HysteresisTiming { confirm: 5, horizon: 100 };

    /// Levels over time, with one observation at each moment.
    fn levels(need: impl Fn(u64) -> u8, until: u64) -> Vec<u8> {
        let mut ladder = Hysteresis::at(0, 0);
        let see = |now| {
            ladder.see(now, need(now), PACE);
            ladder.level()
        };
        (0..until).map(see).collect()
    }

    fn changes(levels: &[u8]) -> usize {
        levels.windows(2).filter(|w| w[0] != w[1]).count()
    }

    #[test]
    fn a_need_that_lasts_counts_and_a_short_one_does_not() {
        let all = levels(|now| u8::from((10..14).contains(&now)) * 3, 50);
        assert_eq!(changes(&all), 0);
        let all = levels(|now| if now < 10 { 0 } else { 2 + u8::from(now == 12) }, 50);
        assert_eq!((all[14], all[15], changes(&all)), (0, 3, 1), "the highest of the while counts");
        // Needed at 12 for the last time, 2 at all times.
        let all = levels(|now| if now < 10 { 0 } else { 2 + u8::from(now == 12) }, 200);
        assert_eq!((all[111], all[112]), (3, 2));
    }

    #[test]
    fn what_was_not_watched_did_not_last() {
        let mut ladder = Hysteresis::at(0, 0);
        ladder.see(0, 2, PACE);
        ladder.see(50, 2, PACE);
        assert_eq!(ladder.level(), 0);
        ladder.see(55, 2, PACE);
        assert_eq!(ladder.level(), 2);
    }

    #[test]
    fn a_need_that_comes_again_soon_after_a_fall_makes_it_stay() {
        // Ten of every 150: longer than the horizon, which grows at the first recurrence.
        let all = levels(|now| u8::from(now % 150 < 10), 3_000);
        assert_eq!(changes(&all), 3, "up, down, up");
        // Ten of every 90: never left.
        assert_eq!(changes(&levels(|now| u8::from(now % 90 < 10), 3_000)), 1);
    }

    proptest! {
        #[test]
        fn no_need_makes_it_oscillate(
            needs in proptest::collection::vec((1u64..400, 0u8..5), 1..60),
        ) {
            let mut ladder = Hysteresis::at(0, 0);
            let (mut now, mut last) = (0, [0_u64; 5]);
            for (length, need) in needs {
                for _ in 0..length {
                    let before = ladder.level();
                    last.iter_mut().take(usize::from(need) + 1).for_each(|at| *at = now);
                    ladder.see(now, need, PACE);
                    // Up only with a need, down only long after the last one.
                    prop_assert!(ladder.level() <= before || need > before);
                    if ladder.level() < before {
                        prop_assert!(now - last[usize::from(before)] >= PACE.horizon);
                    }
                    now += 1;
                }
            }
        }

        #[test]
        fn any_period_settles(period in 12u64..380, busy in 6u64..200, high in 1u8..6) {
            let busy = busy.min(period - 1);
            let need = |now: u64| if now % period < busy { high } else { 0 };
            let all = levels(need, 12_000);
            let late = &all[6_000..];
            prop_assert_eq!(changes(late), 0, "period {} busy {}", period, busy);
            prop_assert!(changes(&all) <= 9);
        }
    }
}
