//! CPU share that the kernel grants to contracts, and the part of it that is taken.

use std::collections::BTreeSet;

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

/// CPUs of which a share is taken. The kernel sums deadline threads by root domain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Over {
    /// Every CPU, or those that a contract has.
    #[default]
    Every,
    /// CPUs that no partition has: the root domain of the root cgroup.
    Rest(BTreeSet<u32>),
    /// CPUs of another root domain: a partition, or isolated ones.
    Partition(BTreeSet<u32>),
}

/// Share of each CPU that is taken.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Load {
    /// Description of the holder, such as `cgroup machine` or the threads of a program.
    pub name: String,
    /// Share of each CPU.
    pub share: Ratio,
    /// CPUs of which it is a share.
    #[serde(skip)]
    pub over: Over,
    /// Process whose threads hold the share; `None` for a cgroup.
    #[serde(skip)]
    pub pid: Option<u32>,
}

impl Load {
    /// The load as a share of each of `cpus` CPUs, in place of those of its root domain.
    pub(crate) fn spread(self, cpus: usize) -> Self {
        let factor = match &self.over {
            Over::Every => 1.0,
            Over::Rest(of) | Over::Partition(of) => of.len().max(1) as f64 / cpus.max(1) as f64,
        };
        Self { share: Ratio(self.share.0 * factor), over: Over::Every, ..self }
    }
}

impl Grant {
    /// Grant to contracts in one root domain, once `partitions`, the CPUs of all new ones, are
    /// apart: in the new one of the CPUs `own`, else in what is left of that of the root cgroup.
    #[must_use]
    pub fn in_root_domain(&self, own: Option<&BTreeSet<u32>>, partitions: &BTreeSet<u32>) -> Self {
        let there = |load: &Load| match (&load.over, own) {
            (Over::Every, _) => Some(load.clone()),
            (Over::Rest(of) | Over::Partition(of), Some(own)) => {
                of.is_subset(own).then(|| load.clone().spread(own.len()))
            }
            (Over::Rest(of), None) => Some(load.clone().spread(of.difference(partitions).count())),
            (Over::Partition(_), None) => None,
        };
        Self { taken: self.taken.iter().filter_map(there).collect(), ..self.clone() }
    }

    /// Leaves out what threads of these processes hold, such as those of a VM whose contract is to
    /// be replaced.
    pub fn leave_out(&mut self, processes: &[ProcessId]) {
        self.taken.retain(|load| !processes.iter().any(|process| load.pid == Some(process.pid)));
    }

    /// Loads outside of partitions.
    fn outside(&self) -> impl Iterator<Item = &Load> {
        self.taken.iter().filter(|load| !matches!(load.over, Over::Partition(_)))
    }

    /// Share of each CPU that is taken outside of partitions.
    #[must_use]
    pub fn taken_share(&self) -> f64 {
        self.outside().map(|load| load.share.0).sum()
    }

    /// Share of each CPU that is still free outside of partitions.
    #[must_use]
    pub fn free(&self) -> f64 {
        (self.limit.0 - self.fair_server.0 - self.taken_share()).max(0.0)
    }

    /// Whether more is taken than the kernel grants.
    #[must_use]
    pub fn is_exceeded(&self) -> bool {
        self.taken_share() > self.limit.0 - self.fair_server.0 + 1e-9
    }

    /// Sentence on what is granted, and what is taken of it by others and by `ours`.
    #[must_use]
    pub fn describe(&self, ours: &[(String, Contract)]) -> String {
        let percent = |share: f64| format!("{:.1} %", share * 100.0);
        let mut text = format!("the kernel grants {}", percent(self.limit.0));
        if self.fair_server.0 > 0.0 {
            text += &format!(", {} of it to its fair server", percent(self.fair_server.0));
        }
        let mine = ours.iter().map(|(name, c)| (name.as_str(), c.share().0));
        // Processes of one program are one item.
        let mut others: Vec<(&str, f64)> = Vec::new();
        for load in self.outside() {
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
