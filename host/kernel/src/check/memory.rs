//! Memory bandwidth: what of it can be seen and limited here.

use std::thread;
use std::time::Duration;

use super::Finding;
use crate::Root;
use crate::resctrl::{Counter, Offer, USUAL_MOUNT, find, is_virtual, rate};

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

fn absent(root: &Root) -> String {
    let guest = root.read("/proc/cpuinfo").is_ok_and(|text| is_virtual(&text));
    let place = if guest {
        "this is a virtual machine, and its hypervisor hides it"
    } else {
        "this kernel or CPU has no resctrl"
    };
    format!("not visible, neither per VM nor as a whole: {place}")
}

/// What each group of resctrl moves to and from memory, watched for some time; nothing where it
/// cannot be counted.
#[must_use]
pub fn traffic(root: &Root, time: Duration) -> Vec<Finding> {
    const ID: &str = "memory.traffic";
    let resctrl = match find(root) {
        Ok(Offer::Mounted(resctrl)) if resctrl.counts_bandwidth() => resctrl,
        // `check` has said why.
        Ok(_) | Err(_) => return Vec::new(),
    };
    let before = match resctrl.counters(root) {
        Ok(counters) => counters,
        Err(e) => return vec![Finding::unknown(ID, &e, WHY)],
    };
    thread::sleep(time);
    let after = match resctrl.counters(root) {
        Ok(counters) => counters,
        Err(e) => return vec![Finding::unknown(ID, &e, WHY)],
    };
    let known = |group: &str| before.iter().find(|counters| counters.group == group);
    after
        .iter()
        .filter_map(|now| Some((now, known(&now.group)?)))
        .map(|(now, then)| {
            let total = shown(rate(then.total.as_ref(), now.total.as_ref(), time), now.total.as_ref());
            let local = shown(rate(then.local.as_ref(), now.local.as_ref(), time), now.local.as_ref());
            let group = if now.group.is_empty() { "all threads in no other group" } else { &now.group };
            Finding::ok(ID, format!("{group}: {total}, of it {local} to this node's memory"), WHY)
        })
        .collect()
}

fn shown(rate: Option<f64>, counter: Option<&Counter>) -> String {
    match (rate, counter) {
        (Some(rate), _) => format!("{:.0} MB/s", rate / 1e6),
        (None, Some(Counter::No(why))) => format!("not counted ({why})"),
        (None, Some(Counter::Bytes(_))) => "not known (its counter started anew)".to_owned(),
        (None, None) => "not counted".to_owned(),
    }
}
