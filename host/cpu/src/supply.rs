//! Least CPU time that a contract supplies, and so the worst-case response time of a request.
//!
//! A budget Q in every period P may come at the start of one period and at the end of the next:
//! nothing for 2(P - Q), and from then on Q in each P. That is the supply bound function of the
//! periodic resource model (I. Shin and I. Lee, "Periodic Resource Model for Compositional
//! Real-Time Guarantees", RTSS 2003, section 3), whose linear lower bound is
//! `lsbf(t) = Q/P (t - 2(P - Q))`. A request that needs the CPU time C is therefore answered within
//! `2(P - Q) + C P/Q`, and so is every later one of a stream whose rate r satisfies `r C <= Q/P`:
//! both sides grow by as much in each 1/r.
//!
//! The kernel detects only at a tick that a budget is used up (`task_tick_rt()`, `task_tick_dl()`;
//! `HRTICK` is off by default) and takes the excess from the periods that follow. That debt counts
//! as work: it is one tick for the VM, and one for each other VM whose tick may run into this one's
//! time.

use rtvirtio_kernel::Root;
use rtvirtio_units::Nanos;

use crate::split::EVEN;
use crate::{Backend, Contract};

/// Slice, and period of all threads that wait, on one CPU (`kernel/sched/fair.c`), ns.
const BASE_SLICE_NS: u64 = 750_000;
const LATENCY_NS: u64 = 6_000_000;
/// Most CPUs by which the kernel makes them longer.
const MOST_CPUS: u32 = 8;

/// Parameters of a mechanism and its host that add to a contract's own worst case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Surroundings {
    /// Mechanism that enforces the contract.
    pub backend: Backend,
    /// Length of the kernel's tick.
    pub tick: Nanos,
    /// Number of other VMs with a contract, each with a debt of a tick.
    pub others: u32,
}

impl Surroundings {
    /// Number of servers that a request passes in sequence. A group has one budget for all threads;
    /// under SCHED_DEADLINE each thread has its own, and a request goes from the device's thread to
    /// a vCPU and back.
    #[must_use]
    pub fn servers(self) -> u32 {
        if self.backend == Backend::Deadline { 3 } else { 1 }
    }

    /// Worst-case response time of a request of this much CPU time, counted from when it reaches
    /// the VM, while the VM answers no more requests than its budget carries. Waits of the request
    /// outside of the VM's CPU time (network, disk) are not included.
    ///
    /// Under SCHED_DEADLINE the split gives each thread the part of seven eighths of the budget
    /// that it has of the work ([`crate::split`]), so that both the device's thread and the vCPU
    /// take `8/7 C P/Q`; how much of 2P each of the three waits is not known and counts in full. It
    /// remains an estimate ([`Surroundings::is_estimate`]).
    #[must_use]
    pub fn latest(self, contract: Contract, work: Nanos) -> Nanos {
        let (budget, period) = (contract.budget_us() as f64 * 1e3, contract.period_us() as f64 * 1e3);
        let debt = (1.0 + f64::from(self.others)) * self.tick.0 as f64;
        let stretched = |work: f64| work * period / budget;
        let latest = match self.backend {
            Backend::Deadline => {
                let by_use = 1.0 - 1.0 / EVEN as f64;
                f64::from(self.servers()) * 2.0 * period + stretched(2.0 * work.0 as f64 + debt) / by_use
            }
            _ => 2.0 * (period - budget) + stretched(work.0 as f64 + debt),
        };
        // Rounded up; a float of this size converts without loss of more than a microsecond.
        Nanos(latest.ceil() as u64)
    }

    /// Whether [`Surroundings::latest`] is no bound. The kernel admits deadline threads by the sum
    /// of their shares, and on m CPUs of a root domain global EDF then meets deadlines only up to a
    /// tardiness. With n the sum of the shares rounded up, less one, it is at most
    ///
    /// ```text
    /// C_k + (sum of the n largest C_i - least C_i) / (m - sum of the n - 1 largest C_i/P_i)
    /// ```
    ///
    /// (U. C. Devi and J. H. Anderson, "Tardiness Bounds under Global EDF Scheduling on a
    /// Multiprocessor", Real-Time Systems 38 (2), 2008). On one CPU there is none; on many it may
    /// be more than the slack of 2P. The runtimes of all other deadline threads are not known here.
    #[must_use]
    pub fn is_estimate(self) -> bool {
        self.backend == Backend::Deadline
    }

    /// Period for a deadline: the longest one whose wait takes no more than half of it, whatever
    /// the budget. The other half is for the work itself.
    #[must_use]
    pub fn period_for(self, deadline: Nanos) -> Nanos {
        let period = deadline.0 / (4 * u64::from(self.servers()));
        // Whole microseconds, as contracts are, and the spec's bounds.
        Nanos((period / 1000 * 1000).clamp(1_000_000, 1_000_000_000))
    }
}

/// CPU time that groups of higher fixed priority ([`crate::levels`]) may take in one period of
/// `own`, in microseconds. A group that has used up its budget at the end of its period may use the
/// next one at once, so in a time t they take `ceil((t + P - Q) / P) Q` (J. K. Strosnider, J. P.
/// Lehoczky and L. Sha, "The Deferrable Server Algorithm", IEEE Transactions on Computers 44 (1),
/// 1995).
#[must_use]
pub fn interference_us(own: Contract, others: &[Contract]) -> u64 {
    let one = |o: &Contract| {
        (own.period_us() + o.period_us() - o.budget_us())
            .div_ceil(o.period_us())
            .saturating_mul(o.budget_us())
    };
    others.iter().map(one).fold(0, u64::saturating_add)
}

/// Longest turn of a thread while others wait for its CPU: its slice, up to the next tick. The
/// slice is that of the scheduler's debugfs, or the kernel's default for so many CPUs.
#[must_use]
pub fn turn(root: &Root, cpus: u32) -> Nanos {
    up_to_tick(slice(root, cpus), tick())
}

fn up_to_tick(slice: u64, tick: Nanos) -> Nanos {
    Nanos(slice.div_ceil(tick.0.max(1)).saturating_mul(tick.0.max(1)))
}

/// Length of a slice, ns (`kernel/sched/fair.c`): the base slice since Linux 6.6; before it half of
/// the period in which each thread that waits has its turn, as two of them have it.
fn slice(root: &Root, cpus: u32) -> u64 {
    let read = |file: &str| {
        let text = root.read_optional(format!("/sys/kernel/debug/sched/{file}")).ok().flatten();
        text.and_then(|text| text.trim().parse::<u64>().ok())
    };
    let by_default = || {
        let longer = u64::from(1 + cpus.clamp(1, MOST_CPUS).ilog2());
        let has_base_slice = root.read("/proc/sys/kernel/osrelease").is_ok_and(|of| is_from_6_6(&of));
        longer * if has_base_slice { BASE_SLICE_NS } else { LATENCY_NS / 2 }
    };
    read("base_slice_ns").or_else(|| read("latency_ns").map(|all| all / 2)).unwrap_or_else(by_default)
}

fn is_from_6_6(release: &str) -> bool {
    let mut numbers = release.split(['.', '-']).map(|number| number.trim().parse::<u32>().ok());
    let version = numbers.next().flatten().zip(numbers.next().flatten());
    version.is_some_and(|version| version >= (6, 6))
}

/// Tick of this kernel: the resolution of its coarse clock (`posix_get_coarse_res()`,
/// `kernel/time/posix-timers.c`).
#[must_use]
pub fn tick() -> Nanos {
    let tick = rustix::time::clock_getres(rustix::time::ClockId::MonotonicCoarse);
    let ns = tick.tv_sec.saturating_mul(1_000_000_000).saturating_add(tick.tv_nsec);
    Nanos(u64::try_from(ns).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_is_a_slice_up_to_the_next_tick() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let root = Root::new(dir.path());
        let put = |path: &str, text: &str| {
            let path = root.at(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        put("/proc/sys/kernel/osrelease", "6.1.0-57-amd64\n");
        assert_eq!(
            [1, 2, 8, 256].map(|cpus| slice(&root, cpus)),
            [3_000_000, 6_000_000, 12_000_000, 12_000_000]
        );
        put("/proc/sys/kernel/osrelease", "6.18.3\n");
        assert_eq!([slice(&root, 2), slice(&root, 8)], [1_500_000, 3_000_000]);
        put("/sys/kernel/debug/sched/latency_ns", "24000000\n");
        assert_eq!(slice(&root, 8), 12_000_000);
        put("/sys/kernel/debug/sched/base_slice_ns", "2800000\n");
        assert_eq!(slice(&root, 8), 2_800_000);
        let (tick, ms) = (Nanos::from_millis(4), Nanos::from_millis);
        assert_eq!([1, 4_000_000, 4_000_001].map(|slice| up_to_tick(slice, tick)), [ms(4), ms(4), ms(8)]);
    }

    #[test]
    fn releases_are_compared_as_numbers() {
        let of = ["6.6.0", "6.10-rc1", "7.2.13-rt", "6.5.13", "5.15.0-91-generic", "odd"].map(is_from_6_6);
        assert_eq!(of, [true, true, true, false, false, false]);
    }
}
