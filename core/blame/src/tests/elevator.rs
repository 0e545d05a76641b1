//! Elevator that holds requests back.

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
