//! Estimate of the wait of a guest's requests for CPUs that other programs use as well.
//!
//! A request wakes three threads in turn: QEMU's, which takes it from the guest; QEMU's again, when
//! the disk is done; and the vCPU, which gets the answer. Each finds a CPU, or waits for the turn
//! of the program that has it. The chance that all CPUs are taken is that of a queue with as many
//! servers (Erlang's C formula, "Solution of some problems in the theory of probabilities", 1917).
//!
//! Near saturation requests also wait for those before them: exponentially, with a mean of the time
//! of one over what is left of the CPUs (Kingman 1961).

use rtvirtio_units::{Nanos, Percentile};

/// Threads that a request wakes in turn.
const TURNS: f64 = 3.0;

/// Use of a host's CPUs by requests of guests and by other programs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CpuLoad {
    /// CPUs of the host.
    pub cpus: u32,
    /// CPUs that all guests' requests need.
    pub needed: f64,
    /// CPUs that other programs leave.
    pub free: f64,
    /// CPU time of one request.
    pub each: Nanos,
    /// Factor by which requests may need more CPU time than that.
    pub margin: f64,
    /// Longest turn of a program while others wait for its CPU.
    pub turn: Nanos,
}

impl CpuLoad {
    /// Estimated wait of a task's requests at a percentile, by its rate in 1/s: all of them pass
    /// one CPU of the guest. `None` where they may need more than others leave, or than one CPU:
    /// how long they wait is for the scheduler to choose.
    #[must_use]
    pub fn wait(&self, rate: f64, percentile: Percentile) -> Option<Nanos> {
        let beyond = beyond(percentile);
        let share = (self.needed / self.free).max(rate * self.each.as_secs_f64()) * self.margin;
        if self.free <= 0.0 || share >= 1.0 {
            return None;
        }
        let others = (f64::from(self.cpus) - self.free).max(0.0);
        let is_taken = all_taken(self.cpus, others + self.needed) > beyond;
        let turns = if others > 0.0 && is_taken { TURNS * self.turn.as_secs_f64() } else { 0.0 };
        let behind = self.each.as_secs_f64() / (1.0 - share) * (share / beyond).ln().max(0.0);
        Some(Nanos::from_secs_f64(turns + behind))
    }
}

/// Share of requests that a percentile leaves out; that of p99.9999 at the 100th.
pub(crate) fn beyond(percentile: Percentile) -> f64 {
    (1.0 - percentile.0 / 100.0).clamp(1e-6, 1.0)
}

/// Chance that all CPUs are taken, by the load in CPUs: Erlang's C formula.
fn all_taken(cpus: u32, load: f64) -> f64 {
    let n = f64::from(cpus);
    if load >= n {
        return 1.0;
    }
    // Erlang's B formula, which has a recurrence.
    let lost = (1..=cpus).fold(1.0, |lost, k| load * lost / (f64::from(k) + load * lost));
    lost / (1.0 - load / n * (1.0 - lost))
}

#[cfg(test)]
mod tests {
    use super::*;

    const P99: Percentile = Percentile(99.0);

    fn load(cpus: u32, needed: f64, free: f64) -> CpuLoad {
        CpuLoad {
            cpus,
            needed,
            free,
            each: Nanos::from_micros(700),
            margin: 1.2,
            turn: Nanos::from_millis(4),
        }
    }

    #[test]
    fn the_formula_of_erlang() {
        // One server is taken for its load; two with one of load for a third (1/3 = 0.5 / 1.5).
        for (cpus, load, chance) in [(1, 0.3, 0.3), (2, 1.0, 1.0 / 3.0), (2, 0.0, 0.0), (4, 4.0, 1.0)] {
            assert!((all_taken(cpus, load) - chance).abs() < 1e-12, "{cpus} {load}");
        }
        assert!(all_taken(64, 10.0) < 1e-9 && all_taken(64, 62.0) > 0.5);
    }

    #[test]
    fn turns_of_others_and_requests_before_it() {
        // A tenth of what is free counts as 12 %.
        let wait = load(2, 0.1, 1.0).wait(140.0, P99).unwrap();
        let expected = 0.012 + 0.0007 / 0.88 * 12f64.ln();
        assert!((wait.as_secs_f64() - expected).abs() < 1e-8, "{wait}");
        // No other program, or enough CPUs: a request waits only for those before it.
        let ms = |of: u64| Some(Nanos::from_millis(of));
        assert!(load(2, 0.1, 2.0).wait(140.0, P99) < ms(2));
        assert!(load(64, 0.1, 54.0).wait(140.0, P99) < ms(2));
        assert!(load(8, 1.1, 8.0).wait(1_100.0, P99) < ms(50));
        // Too much for what is free, and for one CPU of the guest.
        assert_eq!(load(2, 0.5, 0.5).wait(10.0, P99), None);
        assert_eq!(load(8, 1.1, 8.0).wait(1_200.0, P99), None);
        assert_eq!(load(2, 0.0, 0.0).wait(0.0, P99), None);
    }

    #[test]
    fn more_of_anything_waits_longer() {
        let mut before = Nanos(0);
        for tenths in 0..12 {
            let of = load(2, 0.6, 2.0 - f64::from(tenths) / 10.0);
            let wait = of.wait(900.0, P99).unwrap();
            assert!(wait >= before, "{tenths}: {wait} after {before}");
            assert!(of.wait(900.0, Percentile(99.9)).unwrap() > wait);
            before = wait;
        }
    }
}
