use super::*;

/// Half a minute at 100/s, of which 2000 were late for 20 ms; a device that answered at once.
fn facts() -> Facts {
    Facts {
        vm: "plc".to_owned(),
        seconds: 30.0,
        rate: 100.0,
        declared: None,
        n: 3000,
        late: 2000,
        target: Nanos::from_millis(20),
        median: Nanos::from_millis(40),
        limits: Some(Vec::new()),
        quota: Some(Stops { count: 0, total: Nanos(0) }),
        ready: Some(0.01),
        stolen: Some(0.0),
        host: Some(Stops { count: 3, total: Nanos::from_millis(15) }),
        disk: Some(Stops { count: 0, total: Nanos(0) }),
        device: Some(DeviceUse {
            requests: 3000.0,
            waited: 0.6,
            shares: Some(vec![("plc".to_owned(), 1.0), ("bulk".to_owned(), 0.0)]),
        }),
    }
}

fn kinds(facts: &Facts) -> Vec<CauseKind> {
    causes(facts).iter().map(|cause| cause.kind).collect()
}

fn stops(count: u64, ms: u64) -> Option<Stops> {
    Some(Stops { count, total: Nanos::from_millis(ms) })
}

fn waiting_at_device(shares: Option<Vec<(String, f64)>>) -> Facts {
    let device = Some(DeviceUse { requests: 30_000.0, waited: 1500.0, shares });
    Facts { device, ready: Some(0.9), ..facts() }
}

#[test]
fn nothing_read_or_nothing_unusual_names_nothing() {
    assert_eq!(kinds(&facts()), []);
    let unread = Facts { vm: "plc".to_owned(), seconds: 30.0, n: 9, late: 9, ..Facts::default() };
    assert_eq!(kinds(&unread), []);
    assert_eq!(kinds(&Facts::default()), []);
}

#[test]
fn what_was_not_read_is_told() {
    assert_eq!(facts().unread(), Vec::<String>::new());
    assert_eq!(
        Facts { limits: None, disk: None, ..facts() }.unread(),
        ["its limits", "standstills of the disk"]
    );
    assert_eq!(waiting_at_device(None).unread(), ["who uses the device"]);
    assert_eq!(Facts::default().unread().len(), 7, "users of a device that was not read are part of it");
}

#[test]
fn a_limit_is_named_only_where_it_is_reached_and_too_low() {
    let limit =
        |used, asked| Limit { by: Limiter::Kernel, file: "io.max".to_owned(), value: 50.0, used, asked };
    let with = |limit| Facts { limits: Some(vec![limit]), ready: Some(0.9), ..facts() };
    assert_eq!(kinds(&with(limit(49.0, 100.0))), [CauseKind::KernelLimit]);
    assert_eq!(kinds(&with(limit(49.0, f64::INFINITY))), [CauseKind::KernelLimit]);
    assert_eq!(kinds(&with(limit(42.0, 100.0))), [CauseKind::CpuOthers], "less than it allows");
    assert_eq!(kinds(&with(limit(20.0, 100.0))), [CauseKind::CpuOthers], "something else holds it");
    assert_eq!(kinds(&Facts { ready: None, ..with(limit(49.0, 49.0)) }), [], "it asks for no more");
}

#[test]
fn throttling_by_qemu_is_told_from_a_limit_of_the_kernel() {
    let limit = Limit {
        by: Limiter::Qemu,
        file: "iops-total of drive d".to_owned(),
        value: 50.0,
        used: 49.0,
        asked: 100.0,
    };
    let found = causes(&Facts { limits: Some(vec![limit]), ..facts() });
    assert_eq!((found.len(), found[0].kind), (1, CauseKind::QemuThrottle));
    assert!(found[0].evidence.contains("iops-total of drive d"), "{found:?}");
}

#[test]
fn a_load_above_the_declaration_is_its_own_cause_where_it_waits_for_itself() {
    let limit =
        |value, used, asked| Limit { by: Limiter::Kernel, file: "io.max".to_owned(), value, used, asked };
    let of = |limit, declared| Facts { limits: Some(vec![limit]), declared: Some(declared), ..facts() };
    // 100/s arrive.
    assert_eq!(kinds(&of(limit(100.0, 100.0, 50.0), 50.0)), [CauseKind::Load]);
    assert_eq!(kinds(&of(limit(100.0, 100.0, 95.0), 95.0)), [], "hardly more than it declares");
    assert_eq!(kinds(&of(limit(200.0, 100.0, 50.0), 50.0)), [], "the limit has room");
    let below = of(limit(40.0, 40.0, 50.0), 50.0);
    assert_eq!(kinds(&below), [CauseKind::KernelLimit], "the limit is below what it declares");
    let alone = waiting_at_device(Some(vec![("plc".to_owned(), 0.95), ("bulk".to_owned(), 0.05)]));
    assert_eq!(kinds(&Facts { declared: Some(50.0), ..alone.clone() }), [CauseKind::Load]);
    assert_eq!(kinds(&Facts { declared: Some(100.0), ..alone }), [CauseKind::Device]);
    let flood = waiting_at_device(Some(vec![("plc".to_owned(), 0.1), ("bulk".to_owned(), 0.9)]));
    assert_eq!(kinds(&Facts { declared: Some(50.0), ..flood }), [CauseKind::Neighbour]);
}

#[test]
fn causes_in_words_have_their_remedy_and_no_cause_says_what_is_not_known() {
    assert_eq!(describe(&[], &[]), "cause not seen: no counter shows one");
    assert_eq!(describe(&[], &["steal".to_owned()]), "cause not seen: not known are steal");
    let found = causes(&Facts { quota: stops(200, 12_000), ..facts() });
    let text = describe(&found, &[]);
    assert!(text.contains("(about 60 % of the late requests): raise the quota"), "{text}");
}

#[test]
fn the_own_quota_is_not_others() {
    let own = Facts { quota: stops(200, 12_000), ready: Some(0.9), ..facts() };
    let found = causes(&own);
    assert_eq!(kinds(&own), [CauseKind::CpuQuota]);
    assert!((found[0].share.unwrap() - 0.6).abs() < 1e-9 && found[0].evidence.contains("40 %"), "{found:?}");
    assert_eq!(kinds(&Facts { quota: stops(3, 30), ..facts() }), [], "too little to explain it");
    assert_eq!(kinds(&Facts { quota: stops(9000, 9_000), ..facts() }), [], "each too short for this target");
}

#[test]
fn cpus_are_named_only_where_the_device_cannot_be_it() {
    assert_eq!(kinds(&Facts { ready: Some(0.9), ..facts() }), [CauseKind::CpuOthers]);
    assert_eq!(kinds(&Facts { ready: Some(0.9), stolen: Some(0.5), ..facts() }), [CauseKind::CpuSteal]);
    assert_eq!(kinds(&Facts { ready: Some(0.9), device: None, ..facts() }), [], "the device is not known");
    assert_eq!(kinds(&Facts { ready: Some(0.9), quota: None, ..facts() }), [], "nor is a quota");
    assert_eq!(kinds(&Facts { ready: Some(0.9), limits: None, ..facts() }), [], "nor are its limits");
    assert_eq!(kinds(&Facts { ready: Some(0.1), ..facts() }), []);
    assert_eq!(kinds(&waiting_at_device(None)), [], "requests wait at the device");
}

#[test]
fn stalls_are_named_by_the_requests_that_they_touch() {
    assert_eq!(kinds(&Facts { host: stops(9, 15_000), ..facts() }), [CauseKind::HostStall]);
    let disk = Facts { disk: stops(4, 10_000), ..facts() };
    assert_eq!(kinds(&disk), [CauseKind::DiskStall]);
    assert_eq!(kinds(&Facts { disk: stops(4, 1_000), ..facts() }), [], "it explains a twentieth");
    let slow = Some(DeviceUse { requests: 60.0, waited: 6.0, shares: None });
    assert_eq!(kinds(&Facts { disk: stops(40, 20_000), device: slow, ..facts() }), [], "each is that slow");
    let both = Facts { host: stops(9, 15_000), ..disk };
    assert_eq!(kinds(&both), [CauseKind::HostStall, CauseKind::DiskStall]);
}

#[test]
fn users_of_the_device_are_named_by_what_they_move() {
    let shares = |of: &[(&str, f64)]| Some(of.iter().map(|(vm, share)| ((*vm).to_owned(), *share)).collect());
    let at = |of: &[(&str, f64)]| causes(&waiting_at_device(shares(of)));
    let flood = at(&[("plc", 0.1), ("bulk", 0.9)]);
    assert_eq!((flood.len(), flood[0].kind), (1, CauseKind::Neighbour));
    assert!(flood[0].evidence.contains("bulk") && flood[0].remedy.contains("bulk"), "{flood:?}");
    assert_eq!(at(&[("plc", 0.1), ("bulk", 0.1)])[0].kind, CauseKind::OtherProgram);
    assert_eq!(at(&[("plc", 0.95), ("bulk", 0.05)])[0].kind, CauseKind::Device);
    let two = at(&[("plc", 0.1), ("bulk", 0.45), ("log", 0.45)]);
    assert_eq!(two.len(), 2, "{two:?}");
    assert_eq!(at(&[("plc", 0.5), ("bulk", 0.2), ("log", 0.2)]), [], "no one is most of it");
    // Few late ones say nothing about the mean.
    let few = Facts { late: 40, ..waiting_at_device(shares(&[("plc", 0.1), ("bulk", 0.9)])) };
    assert_eq!(kinds(&few), []);
}
