//! Level of one part of a device: up by a sequential test, down by long evidence.

use std::collections::VecDeque;

use rtvirtio_stats::FrequencyTest;

use super::window::Ratio;
use super::{EXCEEDING, FOLLOW, LOWER_AFTER, RUN_LENGTH, SPARE, STEP, TOLERANCE};

/// Lowest and highest level: a sixth, and a thousand times, of the profile.
const LEVELS: [i8; 2] = [-8, 31];
/// Upper end of a ratio over its lower one, beyond which a level is not raised by the upper end:
/// that of a long wait says little.
const WIDEST: f64 = 1.5;

/// Use of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Finding {
    /// The window is evidence.
    Counted,
    /// The level is between the ends of the window's ratio.
    CannotTell,
}

/// Level of one part, with the evidence for it.
#[derive(Clone, Debug)]
pub(super) struct Channel {
    level: i8,
    lowest: i8,
    test: FrequencyTest,
    /// Highest level needed since the test began to find something.
    most: i8,
    /// Level that each of the last [`LOWER_AFTER`] windows of evidence needed, since it was raised.
    needs: VecDeque<i8>,
    /// Upper ends of the last [`FOLLOW`] ratios.
    ratios: VecDeque<f64>,
    /// Number of the window that changed the level last; 0 before.
    changed: u64,
    evidence: f64,
}

/// Lowest level that a ratio does not exceed.
fn need(ratio: f64) -> i8 {
    let level = ((ratio.max(f64::MIN_POSITIVE) / TOLERANCE).ln() / STEP.ln()).ceil();
    // A cast from float saturates.
    (level as i8).clamp(LEVELS[0], LEVELS[1])
}

impl Channel {
    /// A part as profiled. One that `may_improve` may come to have a factor below 1.
    pub fn new(may_improve: bool) -> Self {
        Self {
            level: 0,
            lowest: if may_improve { LEVELS[0] } else { 0 },
            test: FrequencyTest::new(EXCEEDING, RUN_LENGTH),
            most: LEVELS[0],
            needs: VecDeque::new(),
            ratios: VecDeque::new(),
            changed: 0,
            evidence: 0.0,
        }
    }

    /// Takes the ratio of window number `now`.
    pub fn see(&mut self, ratio: Ratio, now: u64) -> Finding {
        let exceeds = need(ratio.low) > self.level;
        if !exceeds && need(ratio.high) > self.level {
            return Finding::CannotTell;
        }
        let upper = if exceeds { ratio.high.min(ratio.low * WIDEST) } else { ratio.high };
        push(&mut self.needs, need(upper), LOWER_AFTER);
        push(&mut self.ratios, upper, FOLLOW);
        if exceeds {
            self.most = self.most.max(need(upper));
        }
        if self.test.see(exceeds) {
            let evidence = self.test.evidence();
            self.set(self.most, evidence, now);
            // A lower level takes evidence from after the change.
            self.needs.clear();
        } else if self.test.is_at_rest() {
            self.most = LEVELS[0];
        }
        if let Some(lower) = self.enough().filter(|lower| *lower < self.level) {
            self.set(lower, 0.0, now);
        }
        Finding::Counted
    }

    fn set(&mut self, level: i8, evidence: f64, now: u64) {
        (self.level, self.evidence, self.changed) = (level, evidence, now);
        self.test.restart();
        self.most = LEVELS[0];
    }

    /// Lowest level that all of the last [`LOWER_AFTER`] windows but [`SPARE`] needed; `None` while
    /// there are fewer.
    fn enough(&self) -> Option<i8> {
        if self.needs.len() < LOWER_AFTER {
            return None;
        }
        let mut needs: Vec<i8> = self.needs.iter().copied().collect();
        let (_, level, _) = needs.select_nth_unstable_by(SPARE, |a, b| b.cmp(a));
        Some((*level).max(self.lowest))
    }

    /// Takes a level of an earlier process.
    pub fn restore(&mut self, level: i8) {
        self.level = level.min(LEVELS[1]);
    }

    pub fn level(&self) -> i8 {
        self.level
    }

    pub fn factor(&self) -> f64 {
        STEP.powi(i32::from(self.level))
    }

    /// Median of the upper ends of the last ratios.
    pub fn median(&self) -> Option<f64> {
        let mut ratios: Vec<f64> = self.ratios.iter().copied().collect();
        ratios.sort_unstable_by(f64::total_cmp);
        ratios.get(ratios.len() / 2).copied()
    }

    /// Windows of evidence, [`LOWER_AFTER`] at most.
    pub fn windows(&self) -> usize {
        self.needs.len()
    }

    pub fn changed(&self) -> u64 {
        self.changed
    }

    pub fn evidence(&self) -> f64 {
        self.evidence
    }
}

/// Adds a value to the last `most` ones.
fn push<T>(all: &mut VecDeque<T>, value: T, most: usize) {
    all.push_back(value);
    if all.len() > most {
        all.pop_front();
    }
}
