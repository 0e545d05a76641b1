use std::time::Duration;

use super::*;

#[test]
fn shares_of_a_device_need_every_vm() {
    let at = |plc, bulk, bytes| Counters {
        vms: [("plc", plc), ("bulk", bulk)]
            .map(|(name, bytes)| (name.to_owned(), VmCounters { bytes, ..VmCounters::default() }))
            .into(),
        device: Some(DeviceIo { reads: bytes as u64, read_bytes: bytes as u64, ..DeviceIo::default() }),
        ..Counters::default()
    };
    let found = device_use(&at(Some(0.0), Some(0.0), 0.0), &at(Some(10.0), Some(90.0), 100.0)).unwrap();
    assert_eq!(found.shares.unwrap(), [("bulk".to_owned(), 0.9), ("plc".to_owned(), 0.1)]);
    let unseen = device_use(&at(Some(0.0), None, 0.0), &at(Some(10.0), Some(90.0), 100.0)).unwrap();
    assert_eq!((unseen.shares, unseen.requests), (None, 100.0));
    assert_eq!(device_use(&Counters::default(), &at(None, None, 1.0)), None);
}

#[test]
fn counters_of_the_measured_part_count_and_those_of_the_warm_up_where_a_load_is_judged() {
    let now = Instant::now();
    let at = |seconds, bytes| Counters {
        at: Some(now + Duration::from_secs(seconds)),
        vms: [("plc".to_owned(), VmCounters { bytes: Some(bytes), ..VmCounters::default() })].into(),
        ..Counters::default()
    };
    let (first, start, begin, end) = (at(0, 0.0), at(9, 50.0), at(11, 100.0), at(19, 1_000.0));
    let window = Window::new(&first, Some(&start), Some(&begin), &end);
    assert_eq!((window.seconds, window.with_warm_up()), (8.0, 10.0));
    assert_eq!(window.after.bytes_since(window.start, "plc"), Some(950.0));
    let disk = Standstills { count: 6, total_ns: Nanos::from_millis(5_000), ..Standstills::default() };
    assert_eq!(window.of_disk(&disk), Stops { count: 5, total: Nanos::from_millis(4_000) });
    // Without these readings the window is all of the run.
    let window = Window::new(&first, None, None, &end);
    assert_eq!((window.seconds, window.with_warm_up()), (19.0, 19.0));
    assert_eq!(window.of_disk(&disk), Stops { count: 6, total: Nanos::from_millis(5_000) });
}

#[test]
fn limits_that_changed_in_the_window_are_not_known() {
    let at = |value: &[u64]| {
        let limit = |value: &u64| SetLimit {
            cgroup: "/s/plc".into(),
            file: "io.max",
            limit: rtvirtio_kernel::cgroup::Limit::ReadIops,
            value: *value,
        };
        let limits = BTreeMap::from([("plc".to_owned(), value.iter().map(limit).collect::<Vec<_>>())]);
        Counters { limits, ..Counters::default() }
    };
    let of = |then: &Counters, now: &Counters| {
        Window::new(then, None, None, now).limits_of("plc").map(<[SetLimit]>::len)
    };
    assert_eq!((of(&at(&[50]), &at(&[50])), of(&at(&[]), &at(&[]))), (Some(1), Some(0)));
    // Set anew, taken away, or not read before.
    for (then, now) in [(at(&[50]), at(&[70])), (at(&[50]), at(&[])), (Counters::default(), at(&[50]))] {
        assert_eq!(of(&then, &now), None);
    }
}

#[test]
fn stalls_count_only_where_load_does_not_delay_the_probes() {
    let noise =
        Noise { stalls: 2, stalled_ns: Nanos::from_millis(30), stood_still: Some(0.001), ..Noise::default() };
    assert_eq!(of_noise(&noise, 10.0), None);
    let noise = Noise { realtime: true, ..noise };
    assert_eq!(of_noise(&noise, 10.0), Some(Stops { count: 2, total: Nanos::from_millis(10) }));
    assert_eq!(of_noise(&Noise { stood_still: None, ..noise }, 10.0), None);
}

#[test]
fn steal_is_that_of_the_measured_part_and_needs_no_probe() {
    let (_dir, root) = crate::fixtures::root();
    let at = |steal: u64, busy: u64| {
        crate::fixtures::put(&root, "/proc/stat", &format!("cpu  {busy} 0 0 0 0 0 0 {steal}\n"));
        Counters { cpus: Some(StealWatch::start(&root).unwrap()), ..Counters::default() }
    };
    let (first, begin, end) = (at(0, 0), at(500, 500), at(600, 800));
    assert_eq!(Window::new(&first, None, Some(&begin), &end).stolen(), Some(0.25));
    assert_eq!(Window::new(&first, None, None, &end).stolen(), Some(600.0 / 1400.0));
    let unread = Counters::default();
    assert_eq!(Window::new(&first, None, Some(&unread), &end).stolen(), None);
}

#[test]
fn idling_is_known_where_it_was_seen_or_cannot_be() {
    let at = |idles| Counters { idles, ..Counters::default() };
    let disk = |held| Standstills { n: 400, held, ..Standstills::default() };
    let of = |then, now, held| Window::new(&at(then), None, None, &at(now)).held(&disk(held));
    assert_eq!(of(Some(true), Some(true), 100), Some(0.25));
    assert_eq!(of(Some(false), Some(false), 100), Some(0.0), "another elevator, or one that does not idle");
    // Kernels before 6.16, an elevator that was changed meanwhile, or could not be read.
    for (then, now, held) in
        [(Some(true), Some(true), 0), (Some(true), Some(false), 9), (None, Some(true), 9)]
    {
        assert_eq!(of(then, now, held), None);
    }
}
