//! Memory of the VM that has to be read back.

use super::*;

#[test]
fn paging_is_named_where_the_vm_had_its_faults_itself() {
    let paged = with_faults(600, 600);
    let found = causes(&paged);
    assert_eq!((found.len(), found[0].kind), (1, CauseKind::Paging));
    assert!(found[0].evidence.contains("600 times"), "{found:?}");
    assert_eq!(kinds(&with_faults(599, 700)), [], "too few, and too many to name the guest");
    let may_be_compressed = true;
    let compressed = Facts { faults: Some(Faults { own: 600, host: 600, may_be_compressed }), ..facts() };
    assert_eq!(kinds(&compressed), [], "memory that the host keeps compressed is back at once");
    // Where a thread of the VMM waits for its memory, requests are below the guest.
    let below = Some(VmUse { requests: 3000.0, waited: 50.0, is_mixed: false });
    assert_eq!(kinds(&Facts { below, ..paged.clone() }), [CauseKind::Paging]);
    assert_eq!(kinds(&Facts { ready: Some(0.9), ..paged }), [CauseKind::CpuOthers]);
}

/// Half a minute at 100/s of which few were late, as under a limit of memory that comes and goes:
/// the VM faults and waits again and again, for 40 ms each. A wait for CPUs may have delayed as
/// many, by its sum.
fn squeezed(late: u64, waits: Option<Stops>) -> Facts {
    Facts { late, median: Nanos::from_millis(2), ready: Some(0.02), memory: waits, ..with_faults(900, 940) }
}

#[test]
fn few_late_requests_are_laid_to_waits_for_memory_by_their_time() {
    let found = causes(&squeezed(80, stops(120, 4_800)));
    assert_eq!((found.len(), found[0].kind, found[0].share), (1, CauseKind::Paging, Some(1.0)));
    assert!(found[0].evidence.ends_with("900 times, for which it waited 16 % of the time"), "{found:?}");
    assert_eq!(kinds(&squeezed(80, None)), [], "by their number alone the wait for CPUs may be it");
    let many = causes(&squeezed(1_000, stops(120, 4_800)));
    assert!(many[0].share.is_some_and(|share| (share - 0.4785).abs() < 1e-9), "{many:?}");
    // Where a thread of the VMM waits for its memory, the requests below it are no device's.
    let below = Some(VmUse { requests: 3000.0, waited: 50.0, is_mixed: false });
    let shares = Some(vec![("plc".to_owned(), 1.0)]);
    let slow = Facts { below, late: 1_600, ..waiting_at_device(shares) };
    assert_eq!(kinds(&slow), [CauseKind::Device]);
    let Facts { faults, memory, .. } = squeezed(0, stops(300, 12_000));
    assert_eq!(kinds(&Facts { faults, memory, ..slow }), [CauseKind::Paging]);
}

#[test]
fn memory_is_not_named_by_its_time_where_that_shows_nothing() {
    let waits = stops(120, 4_800);
    let none = Some(Faults { own: 0, host: 40, may_be_compressed: false });
    let compressed = Some(Faults { own: 900, host: 940, may_be_compressed: true });
    for (facts, why) in [
        (squeezed(2_000, waits), "less than a third of the late ones"),
        (squeezed(80, stops(960, 4_800)), "5 ms each make none late by 20"),
        (squeezed(80, stops(0, 0)), "no wait"),
        (Facts { faults: none, ..squeezed(80, waits) }, "no fault"),
        (Facts { faults: compressed, ..squeezed(80, waits) }, "memory that the host keeps compressed"),
        (Facts { faults: None, ..squeezed(80, waits) }, "faults were not read"),
    ] {
        assert_eq!(kinds(&facts), [], "{why}");
    }
    let stalled = Facts { host: stops(120, 4_790), ..squeezed(80, waits) };
    assert_eq!(kinds(&stalled), [CauseKind::HostStall], "the host stood still meanwhile");
    // As many faults as late requests, of which each took no time.
    let quick = Facts { memory: stops(2, 12), ..with_faults(2_000, 2_000) };
    assert_eq!(kinds(&quick), []);
    assert_eq!(kinds(&Facts { memory: None, ..quick }), [CauseKind::Paging]);
}
