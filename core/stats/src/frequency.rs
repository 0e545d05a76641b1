//! Sequential test of whether an event has become more frequent.
//!
//! An e-detector in CUSUM form (Shin, Ramdas and Rinaldo, *E-detectors: a nonparametric framework
//! for sequential change detection*, arXiv:2203.03532, 2022; the recursion is that of Page,
//! *Continuous inspection schemes*, Biometrika 41, 1954). Each trial bets a share `b` that the
//! event occurs:
//!
//! ```text
//! e = 1 - b + b [event] / rate        M <- max(M, 1) e        alarm: mean of M over all b >= A
//! ```
//!
//! While an event follows every past with probability `rate` at most, `E[e | past] <= 1`. `M` never
//! exceeds the Shiryaev-Roberts sum `S <- (S + 1) e`, and `S - trials` is a supermartingale, so the
//! expected number of trials until an alarm is at least A. Trials need not be independent, and
//! nothing is assumed of their distribution.

/// Shares of the stake, from an event at every trial to one at every hundredth.
const BETS: [f64; 4] = [0.5, 0.1, 0.02, 0.005];

/// Test of whether an event is more frequent than a declared rate.
#[derive(Clone, Debug, PartialEq)]
pub struct FrequencyTest {
    rate: f64,
    run_length: f64,
    stakes: [f64; BETS.len()],
}

impl FrequencyTest {
    /// A test against `rate`, inside (0, 1), that gives a false alarm every `run_length` trials on
    /// average at most.
    #[must_use]
    pub fn new(rate: f64, run_length: f64) -> Self {
        Self { rate: rate.clamp(1e-9, 1.0), run_length, stakes: [1.0; BETS.len()] }
    }

    /// Takes a trial; returns whether the event is more frequent than the rate. The test then goes
    /// on until [`FrequencyTest::restart`].
    pub fn see(&mut self, event: bool) -> bool {
        let won = if event { 1.0 / self.rate } else { 0.0 };
        for (stake, bet) in self.stakes.iter_mut().zip(BETS) {
            *stake = (stake.max(1.0) * (1.0 - bet + bet * won)).min(f64::MAX);
        }
        self.evidence() >= self.run_length
    }

    /// Value of the statistic, to be compared with the run length.
    #[must_use]
    pub fn evidence(&self) -> f64 {
        self.stakes.iter().map(|stake| stake / BETS.len() as f64).sum()
    }

    /// Whether nothing since the last change speaks for one.
    #[must_use]
    pub fn is_at_rest(&self) -> bool {
        self.stakes.iter().all(|stake| *stake <= 1.0)
    }

    /// Forgets all trials.
    pub fn restart(&mut self) {
        self.stakes = [1.0; BETS.len()];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Random;

    const RATE: f64 = 0.005;

    /// Trials until an alarm; `None` without one.
    fn alarm_after(frequency: f64, trials: usize, run_length: f64, seed: u64) -> Option<usize> {
        let (mut test, mut random) = (FrequencyTest::new(RATE, run_length), Random::new(seed));
        (1..=trials).find(|_| test.see(random.unit() < frequency))
    }

    #[test]
    fn an_event_at_every_trial_is_found_at_the_third() {
        let mut test = FrequencyTest::new(RATE, 50_000.0);
        assert!(test.is_at_rest() && !test.see(true) && !test.is_at_rest());
        assert!(!test.see(true) && test.see(true));
        test.restart();
        assert!(test.is_at_rest() && !test.see(true));
        // One event is forgotten in time.
        (0..1_000).for_each(|_| assert!(!test.see(false)));
        assert!(test.is_at_rest());
    }

    #[test]
    fn rare_events_are_found_if_they_are_more_frequent() {
        for seed in 0..20 {
            let often = alarm_after(0.3, 1_000, 50_000.0, seed);
            assert!(often.is_some_and(|at| at < 60), "{seed}: {often:?}");
            assert!(alarm_after(0.04, 5_000, 50_000.0, seed).is_some(), "{seed}");
        }
    }

    /// The mean run of 200 tests is no shorter than declared, with an event at exactly the rate.
    #[test]
    fn false_alarms_are_as_rare_as_declared() {
        const RUN: f64 = 500.0;
        let most = 20_000;
        let runs = (0..200).map(|seed| alarm_after(RATE, most, RUN, seed).unwrap_or(most) as f64);
        let mean = runs.sum::<f64>() / 200.0;
        assert!(mean >= RUN, "{mean}");
    }

    #[test]
    fn evidence_stays_finite() {
        let mut test = FrequencyTest::new(RATE, f64::INFINITY);
        (0..2_000).for_each(|_| assert!(!test.see(true)));
        assert!(test.evidence().is_finite());
    }
}
