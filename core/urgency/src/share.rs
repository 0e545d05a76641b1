//! Deducts the CPU time of a VM's vCPUs above the floor from their fair share at it.
//!
//! The kernel's fair scheduler splits the time that real-time threads leave. A VM that is above its
//! floor for a part of the time would get that part and its whole share of the rest, at the expense
//! of its neighbours. So its weight at the floor is reduced, until its total time is the share of
//! its own weight.
//!
//! With `b` boosted, `f` run at the floor and `w` waited for a CPU, a weight of `W` at the floor
//! means that the others weigh `W_o = W w / f`. With its own weight `W_0` the VM's fair share is
//! `s = W_0 / (W_0 + W_o)` of `b + f + w`. The weight that leaves it `s (b + f + w) - b` of `f + w`
//! is `W_0 - b / (b + f + w) (W_0 + W_o)`.

use rtvirtio_units::Nanos;

/// Length of a window over which use is summed; a neighbour may come or go within it.
const WINDOW: Nanos = Nanos::from_millis(250);
/// The least weight, as a share of the VM's own: helper threads of the VM, such as its AIO workers,
/// may be in the same group.
pub const LEAST: f64 = 1.0 / 32.0;
/// Weight of a new window in the moving average.
const NEW: f64 = 0.5;

/// Scheduling statistics of threads since the last query.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// CPU time that they used.
    pub ran: Nanos,
    /// Time for which they were runnable and waited for a CPU.
    pub waited: Nanos,
}

/// Weight at the floor of one VM, relative to its own.
#[derive(Clone, Debug)]
pub struct FairShare {
    begin: Nanos,
    boosted: Nanos,
    at_floor: Nanos,
    waited: Nanos,
    /// `W_o / W_0`, as a moving average.
    others: f64,
    /// `W / W_0`, the present weight.
    weight: f64,
}

impl FairShare {
    /// The VM's own weight, from `now`.
    #[must_use]
    pub fn new(now: Nanos) -> Self {
        let none = Nanos(0);
        Self { begin: now, boosted: none, at_floor: none, waited: none, others: 0.0, weight: 1.0 }
    }

    /// Adds a vCPU's use since the last call.
    pub fn used(&mut self, usage: Usage, is_boosted: bool) {
        let to = if is_boosted { &mut self.boosted } else { &mut self.at_floor };
        to.0 = to.0.saturating_add(usage.ran.0);
        // The wait of a vCPU at its floor until it is raised shows only when it runs.
        self.waited.0 = self.waited.0.saturating_add(usage.waited.0);
    }

    /// At the end of a window, the weight from now on as a share of the VM's own, from [`LEAST`] to
    /// 1; `None` within a window.
    pub fn weight(&mut self, now: Nanos) -> Option<f64> {
        if now.0.saturating_sub(self.begin.0) < WINDOW.0 {
            return None;
        }
        let (b, f, w) = (self.boosted.0 as f64, self.at_floor.0 as f64, self.waited.0 as f64);
        (self.begin, self.boosted, self.at_floor, self.waited) = (now, Nanos(0), Nanos(0), Nanos(0));
        let share = b / (b + f + w).max(1.0);
        // Without time at the floor there is no estimate of the others' weight.
        if f > 0.0 {
            let seen = (self.weight * w / f).min(1.0 / LEAST);
            self.others += NEW * (seen - self.others);
        }
        self.weight = (1.0 - share * (1.0 + self.others)).clamp(LEAST, 1.0);
        Some(self.weight)
    }

    /// Records the weight that is in force, where it differs from the last one of
    /// [`FairShare::weight`].
    pub fn set(&mut self, weight: f64) {
        self.weight = weight;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The fair scheduler next to a neighbour of this weight, which takes all it gets, and a VM
    /// that is boosted for this share of each 10 ms; what the VM gets after some seconds.
    fn settled(boosted: f64, neighbour: f64) -> (f64, f64) {
        let mut fair = FairShare::new(Nanos(0));
        let mut weight = 1.0;
        let (mut got, mut asked) = (0.0, 0.0);
        for step in 1..=1000_u64 {
            let rest = 1.0 - boosted;
            let at_floor = rest * weight / (weight + neighbour);
            let of = |share: f64| Nanos((share * 1e7) as u64);
            fair.used(Usage { ran: of(boosted), waited: Nanos(0) }, true);
            fair.used(Usage { ran: of(at_floor), waited: of(rest - at_floor) }, false);
            if let Some(new) = fair.weight(Nanos(step * 10_000_000)) {
                weight = new;
            }
            if step > 500 {
                (got, asked) = (got + boosted + at_floor, asked + 1.0);
            }
        }
        (got / asked, weight)
    }

    #[test]
    fn what_is_urgent_comes_off_the_fair_share() {
        // With less urgent work than its share a VM gets its share, the neighbour the rest.
        for (boosted, neighbour) in [(0.1, 1.0), (0.31, 1.0), (0.2, 2.0), (0.5, 0.5)] {
            let (got, _) = settled(boosted, neighbour);
            let share = 1.0 / (1.0 + neighbour);
            assert!((got - share).abs() < 0.01, "{boosted} beside {neighbour}: {got}, not {share}");
        }
    }

    #[test]
    fn one_that_is_urgent_for_more_than_its_share_has_the_least_weight_else() {
        assert!((settled(0.7, 1.0).1 - LEAST).abs() < 1e-9);
    }

    #[test]
    fn without_anything_urgent_the_weight_is_its_own() {
        assert_eq!(settled(0.0, 1.0), (0.5, 1.0));
        // An idle VM keeps its weight.
        let mut idle = FairShare::new(Nanos(0));
        assert_eq!(idle.weight(WINDOW), Some(1.0));
        assert_eq!(idle.weight(Nanos(WINDOW.0 + 1)), None);
    }

    #[test]
    fn it_comes_back_when_the_urgent_work_ends() {
        let mut fair = FairShare::new(Nanos(0));
        let ms = Nanos::from_millis;
        fair.used(Usage { ran: ms(100), waited: ms(0) }, true);
        fair.used(Usage { ran: ms(75), waited: ms(75) }, false);
        assert!(fair.weight(ms(250)).is_some_and(|w| w < 0.5));
        fair.used(Usage { ran: ms(125), waited: ms(125) }, false);
        assert_eq!(fair.weight(ms(500)), Some(1.0));
    }
}
