//! Waiting of VMs for each other on a device, over a window.
//!
//! With the I/O domain it is exact: it counts the time in which requests of a VM were queued while
//! pieces of another were at the device. With the kernel's block layer it is an estimate: the time
//! by which a VM's requests took longer than alone, interval by interval, shared out by the device
//! time of the others in the same interval, computed from their requests and bytes and the device's
//! profile. So a neighbour counts when it works while the VM waits, and not when it works at
//! another time.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Largest number of neighbours of a VM that are listed, the longest waited for; the rest are
/// [`WaitRow::others`].
pub const MOST_NEIGHBOURS: usize = 8;

/// Accuracy of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WaitKind {
    /// Counted as it happened, by the I/O domain.
    Exact,
    /// Estimated from statistics of cgroups.
    Estimate,
}

/// Neighbour that a VM waited for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WaitFor {
    /// Name of the neighbour.
    pub vm: String,
    /// Share of the waiting time, 0 to 1.
    pub share: f64,
}

/// Waiting of one VM on one device. Shares of an estimate add up to 1; of exact rows each neighbour
/// with pieces at the device at the same time counts in full.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WaitRow {
    pub vm: String,
    /// Path of the device, or its name in the I/O domain.
    pub device: String,
    /// Accuracy of the row.
    pub kind: WaitKind,
    /// Length of the window, in seconds.
    pub seconds: f64,
    /// Waiting time in the window, in seconds. Exact: time in which any request was queued.
    /// Estimate: sum over all requests; `None` where nothing counts their latency, and the shares
    /// are then those of the device's time.
    pub waited_s: Option<f64>,
    /// Share of it during which the VM waited for its own requests.
    pub own: f64,
    /// Share with nothing at the device, because of a cap or pacing; `None` for an estimate.
    pub idle: Option<f64>,
    /// Neighbours, the longest waited for first; at most [`MOST_NEIGHBOURS`].
    pub neighbours: Vec<WaitFor>,
    /// Share for anything else: further VMs, and processes without a contract.
    pub others: f64,
}

impl WaitRow {
    /// Neighbour that was waited for longest; `None` for a share of 0.
    #[must_use]
    pub fn longest(&self) -> Option<&WaitFor> {
        self.neighbours.first().filter(|one| one.share > 0.0)
    }
}

/// Use of a device by one VM in an interval.
#[derive(Clone, Debug, PartialEq)]
pub struct Use {
    pub vm: String,
    /// Device time of its requests, in seconds, as computed from its profile.
    pub device_s: f64,
    /// Time by which its requests took longer than alone, in seconds; `None` where nothing counts
    /// their latency.
    pub waited_s: Option<f64>,
}

/// Use of a device in an interval between two readings.
#[derive(Clone, Debug, PartialEq)]
pub struct Interval {
    /// Length of the interval, in seconds.
    pub seconds: f64,
    /// Use by each VM that is known.
    pub uses: Vec<Use>,
    /// Device time of all requests, from any source, in seconds.
    pub device_s: f64,
}

/// Splits the waiting of every VM by the others' use of the device meanwhile.
#[must_use]
pub fn estimate(device: &str, intervals: &[Interval]) -> Vec<WaitRow> {
    let mut names: Vec<&str> = intervals.iter().flat_map(|i| i.uses.iter().map(|u| u.vm.as_str())).collect();
    names.sort_unstable();
    names.dedup();
    names.iter().filter_map(|vm| estimate_of(vm, device, intervals)).collect()
}

fn estimate_of(vm: &str, device: &str, intervals: &[Interval]) -> Option<WaitRow> {
    let here = || {
        let of = |i: &'_ Interval| i.uses.iter().find(|u| u.vm == vm).map(|u| u.waited_s);
        intervals.iter().filter_map(move |i| Some((i, of(i)?)))
    };
    // One interval without its latencies would make the other intervals count as all.
    let is_known = here().all(|(_, waited)| waited.is_some());
    let (mut by, mut own, mut others, mut total, mut seconds) = (BTreeMap::new(), 0.0, 0.0, 0.0, 0.0);
    for (interval, waited) in here() {
        seconds += interval.seconds;
        let known: f64 = interval.uses.iter().map(|u| u.device_s).sum();
        let used = interval.device_s.max(known);
        let weight = if is_known { waited.unwrap_or(0.0).max(0.0) } else { used };
        if used <= 0.0 || weight <= 0.0 {
            continue;
        }
        total += weight;
        for one in &interval.uses {
            let part = weight * one.device_s / used;
            if one.vm == vm {
                own += part;
            } else {
                *by.entry(one.vm.clone()).or_insert(0.0) += part;
            }
        }
        others += weight * (used - known) / used;
    }
    if seconds <= 0.0 {
        return None;
    }
    let share = |part: f64| if total > 0.0 { part / total } else { 0.0 };
    let neighbours = by.into_iter().map(|(vm, part)| WaitFor { vm, share: share(part) });
    let (neighbours, rest) = longest(neighbours.collect());
    Some(WaitRow {
        vm: vm.to_owned(),
        device: device.to_owned(),
        kind: WaitKind::Estimate,
        seconds,
        waited_s: is_known.then_some(total),
        own: share(own),
        idle: None,
        neighbours,
        others: share(others) + rest,
    })
}

/// The longest waited for, at most [`MOST_NEIGHBOURS`], and the share of the others.
#[must_use]
pub fn longest(mut all: Vec<WaitFor>) -> (Vec<WaitFor>, f64) {
    all.retain(|one| one.share > 0.0);
    all.sort_by(|a, b| b.share.total_cmp(&a.share).then_with(|| a.vm.cmp(&b.vm)));
    let rest = all.split_off(all.len().min(MOST_NEIGHBOURS));
    (all, rest.iter().map(|one| one.share).sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn used(vm: &str, device_s: f64, waited_s: Option<f64>) -> Use {
        Use { vm: vm.to_owned(), device_s, waited_s }
    }

    fn shares(row: &WaitRow) -> Vec<(&str, f64)> {
        row.neighbours.iter().map(|n| (n.vm.as_str(), (n.share * 1e6).round() / 1e6)).collect()
    }

    #[test]
    fn waiting_is_split_by_what_the_others_had_meanwhile() {
        let busy = Interval {
            seconds: 10.0,
            uses: vec![used("plc", 1.0, Some(4.0)), used("hist", 6.0, None), used("hmi", 1.0, Some(0.0))],
            device_s: 10.0,
        };
        // The history VM works too, and the controller does not wait: no share for it.
        let calm = Interval {
            seconds: 10.0,
            uses: vec![used("plc", 1.0, Some(0.0)), used("hist", 0.0, None), used("hmi", 8.0, Some(0.0))],
            device_s: 9.0,
        };
        let rows = estimate("/dev/a", &[busy, calm]);
        let plc = rows.iter().find(|row| row.vm == "plc").unwrap();
        assert_eq!((plc.kind, plc.seconds, plc.waited_s), (WaitKind::Estimate, 20.0, Some(4.0)));
        assert_eq!(shares(plc), [("hist", 0.6), ("hmi", 0.1)]);
        assert_eq!(((plc.own * 10.0).round(), (plc.others * 10.0).round(), plc.idle), (1.0, 2.0, None));
        assert_eq!(plc.longest().unwrap().vm, "hist");
        // Its latencies are not counted: shares of the device's time, and no waiting time.
        let hist = rows.iter().find(|row| row.vm == "hist").unwrap();
        assert_eq!(hist.waited_s, None);
        assert_eq!(
            shares(hist),
            [("hmi", 9.0 / 19.0), ("plc", 2.0 / 19.0)].map(|(vm, s)| (vm, (s * 1e6_f64).round() / 1e6))
        );
        // This VM waited for none.
        let hmi = rows.iter().find(|row| row.vm == "hmi").unwrap();
        assert_eq!((hmi.waited_s, hmi.longest(), hmi.own), (Some(0.0), None, 0.0));
        assert!(estimate("/dev/a", &[]).is_empty());
    }

    #[test]
    fn an_interval_without_a_look_at_a_vm_is_not_its() {
        let with = Interval {
            seconds: 5.0,
            uses: vec![used("a", 1.0, Some(1.0)), used("b", 1.0, Some(1.0))],
            device_s: 0.0,
        };
        let without = Interval { seconds: 5.0, uses: vec![used("b", 3.0, Some(9.0))], device_s: 3.0 };
        let rows = estimate("d", &[with, without]);
        let of = |vm: &str| rows.iter().find(|row| row.vm == vm).unwrap();
        assert_eq!((of("a").seconds, of("b").seconds), (5.0, 10.0));
        // The device's own counter may lag behind those of the cgroups.
        assert_eq!((shares(of("a")), of("a").others), (vec![("b", 0.5)], 0.0));
        assert_eq!(of("b").waited_s, Some(10.0));
    }

    #[test]
    fn neighbours_are_at_most_so_many_and_the_rest_is_kept() {
        let mut uses: Vec<Use> = (0..20).map(|i| used(&format!("n{i:02}"), 1.0, None)).collect();
        uses.push(used("plc", 0.0, Some(1.0)));
        let rows = estimate("d", &[Interval { seconds: 1.0, uses, device_s: 20.0 }]);
        let plc = rows.iter().find(|row| row.vm == "plc").unwrap();
        assert_eq!(plc.neighbours.len(), MOST_NEIGHBOURS);
        let all = plc.others + plc.neighbours.iter().map(|n| n.share).sum::<f64>();
        assert!((all - 1.0).abs() < 1e-9 && plc.others > 0.5, "{plc:?}");
    }
}
