//! CPU contract: a budget in every period.

use std::fmt;

use rtvirtio_units::{Nanos, Ratio};
use serde::{Deserialize, Serialize};

/// Every CPU gives a VM's threads together `budget` in every `period`: (Q, P) of the reservations
/// paper, section 3.
///
/// Both are held in whole microseconds, because that is what cgroup files take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Contract {
    budget_us: u64,
    period_us: u64,
}

impl Contract {
    /// Rounded down to whole microseconds; `None` when the budget is 0 or longer than the period.
    #[must_use]
    pub fn new(budget: Nanos, period: Nanos) -> Option<Self> {
        let (budget_us, period_us) = (budget.0 / 1000, period.0 / 1000);
        (1..=period_us).contains(&budget_us).then_some(Self { budget_us, period_us })
    }

    /// Q, in microseconds, at least 1.
    #[must_use]
    pub fn budget_us(self) -> u64 {
        self.budget_us
    }

    /// P, in microseconds, at least Q.
    #[must_use]
    pub fn period_us(self) -> u64 {
        self.period_us
    }

    /// Share of each CPU: Q / P.
    #[must_use]
    pub fn share(self) -> Ratio {
        Ratio(self.budget_us as f64 / self.period_us as f64)
    }
}

impl fmt::Display for Contract {
    /// Form `4ms in 20ms`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in {}", Nanos(self.budget_us * 1000), Nanos(self.period_us * 1000))
    }
}
