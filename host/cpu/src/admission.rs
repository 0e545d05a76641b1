//! May these contracts be promised together? Pure arithmetic over what the kernel grants.
//!
//! Every backend counts in shares of each CPU. The kernel makes the same test for its own mechanisms (`tg_rt_schedulable()` in
//! `kernel/sched/rt.c`, `__dl_overflow()` in `kernel/sched/deadline.c`), but says no more than `EINVAL` or `EBUSY`, and none for `cpu.max`.

use rtvirtio_units::Ratio;
use serde::{Deserialize, Serialize};

use crate::{Contract, CpuError};

/// What the kernel grants, as shares of each CPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Grant {
    /// Share for all real-time work: `sched_rt_runtime_us / sched_rt_period_us`, 0.95 unless changed; 1 for a cap.
    pub limit: Ratio,
    /// Share that is kept for ordinary threads and counts against `limit`: the fair server (`SCHED_DEADLINE` since Linux 6.12; the other
    /// mechanisms do not count it).
    pub fair_server: Ratio,
    /// Reservations that are there already and are not ours.
    pub taken: Vec<Load>,
}

/// Somebody's share of each CPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Load {
    /// Whose.
    pub name: String,
    /// How much.
    pub share: Ratio,
}

/// Rounding of shares: the kernel compares them with 20 binary digits (`BW_SHIFT`), so a sum that fits to this is let in.
const EPSILON: f64 = 1.0 / (1 << 20) as f64;

impl Grant {
    /// Share that is left for us.
    #[must_use]
    pub fn free(&self) -> f64 {
        let taken: f64 = self.taken.iter().map(|l| l.share.0).sum();
        (self.limit.0 - self.fair_server.0 - taken).max(0.0)
    }

    fn describe(&self, ours: &[(String, Contract)]) -> String {
        let percent = |share: f64| format!("{:.1} %", share * 100.0);
        let mut text = format!("the kernel grants {}", percent(self.limit.0));
        if self.fair_server.0 > 0.0 {
            text += &format!(", {} of it to its fair server", percent(self.fair_server.0));
        }
        let mine = ours.iter().map(|(name, c)| (name.as_str(), c.share().0));
        let all: Vec<String> = self
            .taken
            .iter()
            .map(|l| (l.name.as_str(), l.share.0))
            .chain(mine)
            .map(|(name, share)| format!("{} by {name}", percent(share)))
            .collect();
        if !all.is_empty() {
            text += &format!(", and is taken: {}", all.join(", "));
        }
        text
    }
}

/// Whether all contracts fit, in this order; returns the share of each CPU that stays free.
///
/// # Errors
/// [`CpuError::TooMuch`] for the first that does not, with the amount and the largest budget that would.
pub fn admit(grant: &Grant, contracts: &[(String, Contract)]) -> Result<Ratio, CpuError> {
    let mut free = grant.free();
    for (i, (vm, contract)) in contracts.iter().enumerate() {
        let share = contract.share().0;
        if share > free + EPSILON {
            // A millionth of a microsecond, so that 3999.999... from binary fractions counts as 4000.
            let most = (free * contract.period_us() as f64 + 1e-6).floor();
            let remedy = if most >= 1000.0 {
                format!("write budget = \"{}us\" at most", most as u64)
            } else {
                "take some from the others, or move the VM to another host".to_owned()
            };
            return Err(CpuError::TooMuch {
                vm: vm.clone(),
                contract: *contract,
                by: (share - free) * 100.0,
                grant: grant.describe(&contracts[..i]),
                remedy,
            });
        }
        free = (free - share).max(0.0);
    }
    Ok(Ratio(free))
}
