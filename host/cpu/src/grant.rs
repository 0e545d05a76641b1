//! CPU share that the kernel grants to contracts, and the part of it that is taken.

use rtvirtio_kernel::ProcessId;
use rtvirtio_units::Ratio;
use serde::{Deserialize, Serialize};

use crate::Contract;

/// Shares of each CPU that the kernel grants.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Grant {
    /// Share for all real-time work, where the kernel enforces it: `sched_rt_runtime_us /
    /// sched_rt_period_us`, or what the fair server leaves; 1 for a cap.
    pub limit: Ratio,
    /// Share that is kept for ordinary threads and counts against `limit`: the fair server
    /// (`SCHED_DEADLINE` since Linux 6.12; the other mechanisms do not count it).
    pub fair_server: Ratio,
    /// Reservations of other programs and other VMs.
    pub taken: Vec<Load>,
}

/// Share of each CPU that is taken.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Load {
    /// Description of the holder, such as `cgroup machine` or the threads of a program.
    pub name: String,
    /// Share of each CPU.
    pub share: Ratio,
    /// Process whose threads hold the share; `None` for a cgroup.
    #[serde(skip)]
    pub pid: Option<u32>,
}

impl Grant {
    /// Leaves out what threads of these processes hold, such as those of a VM whose contract is to
    /// be replaced.
    pub fn leave_out(&mut self, processes: &[ProcessId]) {
        self.taken.retain(|load| !processes.iter().any(|process| load.pid == Some(process.pid)));
    }

    /// Share of each CPU that is still free.
    #[must_use]
    pub fn free(&self) -> f64 {
        let taken: f64 = self.taken.iter().map(|l| l.share.0).sum();
        (self.limit.0 - self.fair_server.0 - taken).max(0.0)
    }

    pub(crate) fn describe(&self, ours: &[(String, Contract)]) -> String {
        let percent = |share: f64| format!("{:.1} %", share * 100.0);
        let mut text = format!("the kernel grants {}", percent(self.limit.0));
        if self.fair_server.0 > 0.0 {
            text += &format!(", {} of it to its fair server", percent(self.fair_server.0));
        }
        let mine = ours.iter().map(|(name, c)| (name.as_str(), c.share().0));
        // Processes of one program are one item.
        let mut others: Vec<(&str, f64)> = Vec::new();
        for load in &self.taken {
            match others.iter_mut().find(|(name, _)| *name == load.name) {
                Some((_, share)) => *share += load.share.0,
                None => others.push((&load.name, load.share.0)),
            }
        }
        let all: Vec<String> = others
            .into_iter()
            .chain(mine)
            .map(|(name, share)| format!("{} by {name}", percent(share)))
            .collect();
        if !all.is_empty() {
            text += &format!(", and is taken: {}", all.join(", "));
        }
        text
    }
}
