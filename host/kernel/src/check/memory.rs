//! Memory bandwidth: whether it can be counted and limited here.

use std::thread;
use std::time::Duration;

use super::{Finding, realtime};
use crate::resctrl::{Counter, MemoryLook, Offer, USUAL_MOUNT, absent, find, rate, uncounted};
use crate::{Root, task};

const ID: &str = "memory.bandwidth";
const WHY: &str = "a VM that fills the memory bus slows the I/O of all others, whatever their contracts";

pub(super) fn check(root: &Root, found: &mut Vec<Finding>) {
    found.push(match find(root) {
        Err(e) => Finding::unknown(ID, &e, WHY),
        Ok(Offer::Absent) => Finding::ok(ID, absent(root), WHY),
        Ok(Offer::NotMounted) => Finding::warn(
            ID,
            "this CPU counts or limits memory bandwidth, and resctrl is not mounted",
            WHY,
            format!("mount -t resctrl resctrl {USUAL_MOUNT}"),
        ),
        Ok(Offer::Mounted(resctrl)) => {
            let can =
                |yes, what: &str| if yes { format!("can be {what}") } else { format!("cannot be {what}") };
            let what = format!(
                "bandwidth of a group {}, and {}; L3 ways {}; DMA of devices is in no group",
                can(resctrl.counts_bandwidth(), "counted"),
                can(resctrl.memory.is_some(), "limited"),
                can(resctrl.cache.is_some(), "limited"),
            );
            Finding::ok(ID, what, WHY)
        }
    });
}

/// Memory traffic of each resctrl group and each running VM, over `time`. Without counters a
/// finding for each VM has the reason.
#[must_use]
pub fn traffic(root: &Root, time: Duration) -> Vec<Finding> {
    const ID: &str = "memory.traffic";
    let of_vm = |pid: u32, what: &str| Finding::ok(&format!("{ID}.{pid}"), format!("VM {pid}: {what}"), WHY);
    let unknown = |e: &crate::HostError| vec![Finding::unknown(ID, e, WHY)];
    let vms = match realtime::vmms(root) {
        Ok(vms) => vms,
        Err(e) => return unknown(&e),
    };
    let resctrl = match uncounted(root) {
        Ok(Ok(resctrl)) => resctrl,
        Ok(Err(why)) => return vms.iter().map(|pid| of_vm(*pid, &why)).collect(),
        Err(e) => return unknown(&e),
    };
    let before = match MemoryLook::now(root, &resctrl) {
        Ok(look) => look,
        Err(e) => return unknown(&e),
    };
    thread::sleep(time);
    let after = match MemoryLook::now(root, &resctrl) {
        Ok(look) => look,
        Err(e) => return unknown(&e),
    };
    let known = |group: &str| before.counters().iter().find(|counters| counters.group == group);
    let mut found: Vec<Finding> = after
        .counters()
        .iter()
        .filter_map(|now| Some((now, known(&now.group)?)))
        .map(|(now, then)| {
            let total = shown(rate(then.total.as_ref(), now.total.as_ref(), time), now.total.as_ref());
            let local = shown(rate(then.local.as_ref(), now.local.as_ref(), time), now.local.as_ref());
            let group = if now.group.is_empty() { "all threads in no other group" } else { &now.group };
            Finding::ok(ID, format!("{group}: {total}, of it {local} to this node's memory"), WHY)
        })
        .collect();
    for pid in vms {
        // A VM that has ended has no threads.
        let threads = task::tids(root, pid).unwrap_or_default().into_iter().collect();
        found.push(match after.rate_since(&before, &threads) {
            Ok(rate) => of_vm(pid, &format!("{:.0} MB/s by its threads", rate / 1e6)),
            Err(why) => of_vm(pid, &why),
        });
    }
    found
}

fn shown(rate: Option<f64>, counter: Option<&Counter>) -> String {
    match (rate, counter) {
        (Some(rate), _) => format!("{:.0} MB/s", rate / 1e6),
        (None, Some(Counter::No(why))) => format!("not counted ({why})"),
        (None, Some(Counter::Bytes(_))) => "not known (its counter started anew)".to_owned(),
        (None, None) => "not counted".to_owned(),
    }
}
