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

use rtvirtio_units::Nanos;

use crate::split::EVEN;
use crate::{Backend, Contract};

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
    /// take `8/7 C P/Q`; how much of 2P each of the three waits is not known and counts in full.
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

/// Tick of this kernel: the resolution of its coarse clock (`posix_get_coarse_res()`,
/// `kernel/time/posix-timers.c`).
#[must_use]
pub fn tick() -> Nanos {
    let tick = rustix::time::clock_getres(rustix::time::ClockId::MonotonicCoarse);
    let ns = tick.tv_sec.saturating_mul(1_000_000_000).saturating_add(tick.tv_nsec);
    Nanos(u64::try_from(ns).unwrap_or(0))
}
