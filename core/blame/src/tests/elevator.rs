//! Elevator that holds requests back, and stops that do not make a device slow.

use super::*;

#[test]
fn an_elevator_that_holds_requests_back_is_named_where_no_user_of_the_device_is() {
    let of = |shares: &[(&str, f64)], held| {
        let shares = shares.iter().map(|(name, share)| ((*name).to_owned(), *share)).collect();
        Facts { held, ..waiting_at_device(Some(shares)) }
    };
    let thirds = [("plc", 0.35), ("bulk", 0.35), ("log", 0.3)];
    let found = causes(&of(&thirds, Some(0.45)));
    assert_eq!((found.len(), found[0].kind), (1, CauseKind::Elevator));
    assert!(found[0].evidence.contains("45 %"), "{found:?}");
    for held in [Some(0.2), None] {
        assert_eq!(kinds(&of(&thirds, held)), []);
    }
    assert_eq!(of(&thirds, None).unread(), ["BFQ's idling"]);
    assert_eq!(Facts { held: None, ..facts() }.unread(), Vec::<String>::new(), "nothing waits there");
    // A device that has nothing to do keeps up with the VM.
    let alone = [("plc", 0.95), ("bulk", 0.05)];
    assert_eq!(kinds(&of(&alone, Some(0.45))), [CauseKind::Elevator]);
    assert_eq!(kinds(&of(&alone, Some(0.1))), [CauseKind::Device]);
    let neighbour = [("plc", 0.1), ("bulk", 0.9)];
    assert_eq!(kinds(&of(&neighbour, Some(0.45))), [CauseKind::Neighbour]);
    // Requests that do not wait in the block layer are not held there.
    assert_eq!(kinds(&Facts { held: Some(0.9), ready: Some(0.9), ..facts() }), [CauseKind::CpuOthers]);
}

#[test]
fn a_device_that_stood_still_for_a_part_of_the_late_requests_is_not_too_slow() {
    // A limit in the guest of 27/s, and two stops of a device that takes 1 ms.
    let device =
        |waited| Some(DeviceUse { requests: 220.0, waited, shares: Some(vec![("plc".to_owned(), 0.98)]) });
    let of = |waited, stopped| Facts {
        seconds: 8.0,
        depth: Some(1),
        n: 218,
        late: 795,
        target: Nanos::from_millis(50),
        median: Nanos::from_millis(4_000),
        disk: stops(2, stopped),
        device: device(waited),
        below: Some(VmUse { requests: 218.0, waited, is_mixed: false }),
        ..facts()
    };
    assert_eq!(kinds(&of(1.96, 1_740)), []);
    assert_eq!(kinds(&of(6.0, 1_740)), [CauseKind::Device], "it takes 20 ms without them");
    assert_eq!(kinds(&of(1.96, 0)), [CauseKind::Device]);
}
