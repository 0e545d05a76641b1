//! Memory traffic of a VM: counters of the groups that hold its threads and no others.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use super::{Counter, GroupCounters, Offer, Resctrl, USUAL_MOUNT, find, is_virtual, rate};
use crate::{HostError, Root};

/// Groups with their threads and counters at one moment.
#[derive(Clone, Debug)]
pub struct MemoryLook {
    pub(super) at: Instant,
    counters: Vec<GroupCounters>,
    /// Threads of each group, by its path below the mount point. Threads of a monitoring group are
    /// in the control group above it too, as are their bytes.
    threads: BTreeMap<String, BTreeSet<u32>>,
}

/// The mounted resctrl, or the reason why no bandwidth of a VM can be counted here at all.
pub fn uncounted(root: &Root) -> Result<Result<Resctrl, String>, HostError> {
    Ok(match find(root)? {
        Offer::Absent => Err(absent(root)),
        Offer::NotMounted => Err(format!("resctrl is not mounted: mount -t resctrl resctrl {USUAL_MOUNT}")),
        Offer::Mounted(resctrl) if !resctrl.counts_bandwidth() => {
            Err("this CPU limits memory bandwidth and does not count it".to_owned())
        }
        Offer::Mounted(resctrl) => Ok(resctrl),
    })
}

/// Reason why there is no resctrl, for users.
#[must_use]
pub fn absent(root: &Root) -> String {
    let guest = root.read("/proc/cpuinfo").is_ok_and(|text| is_virtual(&text));
    let place = if guest {
        "this is a virtual machine, and its hypervisor hides it"
    } else {
        "this kernel or CPU has no resctrl"
    };
    format!("not visible, neither per VM nor as a whole: {place}")
}

impl MemoryLook {
    /// Reads all groups.
    pub fn now(root: &Root, resctrl: &Resctrl) -> Result<Self, HostError> {
        let at = Instant::now();
        let counters = resctrl.counters(root)?;
        let mut threads = BTreeMap::new();
        for group in &counters {
            match root.read(resctrl.mount.join(&group.group).join("tasks")) {
                Ok(text) => {
                    let of = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
                    threads.insert(group.group.clone(), of);
                }
                // Removed meanwhile.
                Err(e) if e.is_gone() && !group.group.is_empty() => {}
                Err(e) => return Err(e),
            }
        }
        Ok(Self { at, counters, threads })
    }

    #[must_use]
    pub fn counters(&self) -> &[GroupCounters] {
        &self.counters
    }

    /// Groups that hold these threads and no others, none inside another.
    ///
    /// # Errors
    /// Text with the reason why their bytes cannot be told from those of other threads.
    fn own_groups(&self, of: &BTreeSet<u32>) -> Result<Vec<&str>, String> {
        // Monitoring groups before the control group that they are in.
        let mut by_depth: Vec<(&String, &BTreeSet<u32>)> = self.threads.iter().collect();
        by_depth.sort_by_key(|(name, _)| std::cmp::Reverse(name.len()));
        let mut left = of.clone();
        let mut own: Vec<&str> = Vec::new();
        for (name, threads) in by_depth {
            if threads.is_disjoint(&left) {
                continue;
            }
            let others = threads.difference(of).count();
            if others > 0 {
                let name = if name.is_empty() { "the default group" } else { name };
                return Err(format!(
                    "not visible: its threads are in {name} of resctrl together with {others} of others; a group with its threads alone shows it"
                ));
            }
            left = &left - threads;
            own.retain(|inner| !inner.starts_with(&format!("{name}/")) && !name.is_empty());
            own.push(name);
        }
        if own.is_empty() { Err("not visible: it has no threads in any group".to_owned()) } else { Ok(own) }
    }

    /// Bytes per second that these threads moved to and from memory since an earlier look.
    ///
    /// # Errors
    /// Text with the reason why the rate is not known.
    pub fn rate_since(&self, before: &Self, threads: &BTreeSet<u32>) -> Result<f64, String> {
        let groups = self.own_groups(threads)?;
        if before.own_groups(threads).as_ref() != Ok(&groups) {
            return Err(
                "not known yet: its threads have come into their group since the last sample".to_owned()
            );
        }
        let total = |look: &Self, group: &str| {
            look.counters.iter().find(|c| c.group == group).and_then(|c| c.total.clone())
        };
        let time = self.at.duration_since(before.at);
        let mut sum = 0.0;
        for group in groups {
            let now = total(self, group);
            match (rate(total(before, group).as_ref(), now.as_ref(), time), now) {
                (Some(rate), _) => sum += rate,
                (None, Some(Counter::No(why))) => return Err(format!("not counted: resctrl shows {why}")),
                (None, Some(Counter::Bytes(_))) => {
                    return Err("not known: its counter started anew".to_owned());
                }
                (None, None) => return Err("not counted: no mbm_total_bytes here".to_owned()),
            }
        }
        Ok(sum)
    }
}
