//! Waits of VMs for each other in the I/O domain, by its own counters.

use std::collections::BTreeMap;

use rtvirtio_domain_protocol::status::{DiskStatus, Waits};
use rtvirtio_measure::waits::{WaitFor, WaitKind, WaitRow, longest};

/// Wait counters by device and VM, for VMs whose waits are counted by neighbour.
pub(super) type DomainCounters = BTreeMap<(String, String), Waits>;

/// The counters of a status, by device and VM.
pub(super) fn domain_counters(vms: Vec<DiskStatus>) -> DomainCounters {
    vms.into_iter().filter_map(|vm| Some(((vm.device, vm.name), vm.waits?))).collect()
}

/// Waits in the interval that ends with the last sample; each sample has its time in seconds. For a
/// VM that came in between, or whose counters began anew, since then; for one in the last sample
/// only, nothing.
pub(super) fn exact(looks: &[(f64, DomainCounters)]) -> Vec<WaitRow> {
    let Some(((end, last), earlier)) = looks.split_last() else { return Vec::new() };
    let row = |(key, now): (&(String, String), &Waits)| {
        // The counters of one start only rise, so that a later sample is never above this one.
        let since =
            earlier.iter().rposition(|(_, look)| !look.get(key).is_some_and(|then| precedes(then, now)));
        let (begin, first) = earlier.get(since.map_or(0, |place| place + 1))?;
        exact_row(key, first.get(key)?, now, end - begin)
    };
    last.iter().filter_map(row).collect()
}

/// Whether `earlier` may be an older sample of the same counters.
fn precedes(earlier: &Waits, later: &Waits) -> bool {
    earlier.queued_ns <= later.queued_ns && earlier.own_ns <= later.own_ns && earlier.idle_ns <= later.idle_ns
}

fn exact_row((device, vm): &(String, String), then: &Waits, now: &Waits, seconds: f64) -> Option<WaitRow> {
    let queued = now.queued_ns.checked_sub(then.queued_ns)?;
    let share = |ns: u64| if queued > 0 { ns as f64 / queued as f64 } else { 0.0 };
    let mut neighbours = Vec::new();
    let mut others = 0.0;
    for one in &now.neighbours {
        let earlier = then.neighbours.iter().find(|n| n.name == one.name).map_or(0, |n| n.ns);
        // Another VM in its place counts from 0.
        let ns = one.ns.checked_sub(earlier).unwrap_or(one.ns);
        match one.name.as_str() {
            "others" => others += share(ns),
            name => neighbours.push(WaitFor { vm: name.to_owned(), share: share(ns) }),
        }
    }
    let (neighbours, rest) = longest(neighbours);
    Some(WaitRow {
        vm: vm.clone(),
        device: device.clone(),
        kind: WaitKind::Exact,
        seconds,
        waited_s: Some(queued as f64 / 1e9),
        own: share(now.own_ns.checked_sub(then.own_ns)?),
        idle: Some(share(now.idle_ns.checked_sub(then.idle_ns)?)),
        neighbours,
        others: others + rest,
    })
}

#[cfg(test)]
mod tests {
    use rtvirtio_domain_protocol::status::Neighbour;

    use super::*;

    fn shares(row: &WaitRow) -> Vec<(&str, f64)> {
        row.neighbours.iter().map(|n| (n.vm.as_str(), (n.share * 1e6).round() / 1e6)).collect()
    }

    #[test]
    fn the_domains_counters_between_two_looks() {
        let status = |queued: u64, bulk: u64, others: u64| {
            let neighbours = vec![
                Neighbour { name: "bulk".to_owned(), ns: bulk },
                Neighbour { name: "others".to_owned(), ns: others },
            ];
            let waits = Waits { queued_ns: queued, idle_ns: 10, own_ns: 0, neighbours };
            DomainCounters::from([(("d".to_owned(), "plc".to_owned()), waits)])
        };
        let between = |before, after| exact(&[(0.0, before), (10.0, after)]);
        let rows = between(status(1_000, 100, 0), status(1_000_001_000, 900_000_100, 100_000_000));
        let [plc] = rows.as_slice() else { panic!("{rows:?}") };
        assert_eq!((plc.kind, plc.waited_s, plc.idle), (WaitKind::Exact, Some(1.0), Some(0.0)));
        assert_eq!((shares(plc), plc.others), (vec![("bulk", 0.9)], 0.1));
        // The I/O domain was started anew: no difference before the next look.
        assert!(between(status(1_000, 100, 0), status(10, 5, 0)).is_empty());
        // And from then on since its start.
        let rows = exact(&[(0.0, status(900, 9, 0)), (10.0, status(20, 5, 0)), (30.0, status(120, 55, 0))]);
        assert_eq!((rows[0].seconds, shares(&rows[0])), (20.0, vec![("bulk", 0.5)]));
        assert!(exact(&[(0.0, status(1, 1, 0))]).is_empty() && exact(&[]).is_empty());
        // Another VM in the neighbour's place.
        let rows = between(status(1_000, 100, 0), status(1_100, 50, 0));
        assert_eq!(shares(&rows[0]), [("bulk", 0.5)]);
        // Nothing waited.
        assert_eq!(between(status(70, 1, 0), status(70, 1, 0))[0].longest(), None);
    }
}
