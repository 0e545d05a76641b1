mod elevator;
mod paging;

use super::*;

/// Half a minute at 100/s, of which 2000 were late for 20 ms; a device that answered at once.
fn facts() -> Facts {
    Facts {
        vm: "plc".to_owned(),
        seconds: 30.0,
        rate: 100.0,
        load: None,
        depth: None,
        below: Some(VmUse { requests: 3000.0, waited: 0.6, is_mixed: false }),
        n: 3000,
        late: 2000,
        target: Nanos::from_millis(20),
        median: Nanos::from_millis(40),
        limits: Some(Vec::new()),
        has_throttling: true,
        quota: Some(Stops { count: 0, total: Nanos(0) }),
        ready: Some(0.01),
        stolen: Some(0.0),
        cpus: Some(2),
        own_cpus: Some(0.5),
        host: Some(Stops { count: 3, total: Nanos::from_millis(15) }),
        disk: Some(Stops { count: 0, total: Nanos(0) }),
        device: Some(DeviceUse {
            requests: 3000.0,
            waited: 0.6,
            shares: Some(vec![("plc".to_owned(), 1.0), ("bulk".to_owned(), 0.0)]),
        }),
        held: Some(0.0),
        // No fault of the VM, but as many of the host as may be its own.
        faults: Some(Faults { own: 0, host: 3000, may_be_compressed: false }),
        memory: None,
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
    assert_eq!(Facts::default().unread().len(), 9, "users of a device that was not read are part of it");
}

#[test]
fn a_limit_is_named_only_where_it_is_reached_and_too_low() {
    let limit = |used, asked| Limit {
        by: Limiter::Kernel,
        file: "io.max".to_owned(),
        value: 50.0,
        passes: 50.0,
        used,
        asked,
        others: OtherUsers::None,
    };
    let with = |limit| Facts { limits: Some(vec![limit]), ready: Some(0.9), ..facts() };
    assert_eq!(kinds(&with(limit(49.0, 100.0))), [CauseKind::KernelLimit]);
    assert_eq!(kinds(&with(limit(49.0, f64::INFINITY))), [CauseKind::KernelLimit]);
    assert_eq!(kinds(&with(limit(42.0, 100.0))), [CauseKind::CpuOthers], "less than it allows");
    assert_eq!(kinds(&with(limit(20.0, 100.0))), [CauseKind::CpuOthers], "something else holds it");
    assert_eq!(kinds(&Facts { ready: None, ..with(limit(49.0, 49.0)) }), [], "it asks for no more");
}

#[test]
fn a_limit_that_others_use_up_rules_nothing_out_and_names_nothing() {
    let limit = |used, asked, others| Limit {
        by: Limiter::Kernel,
        file: "/s (io.max)".to_owned(),
        value: 150.0,
        passes: 150.0,
        used,
        asked,
        others,
    };
    let with = |limit| Facts { limits: Some(vec![limit]), ready: Some(0.9), ..facts() };
    let declared = with(limit(150.0, 175.0, OtherUsers::Declared));
    let found = causes(&declared);
    assert_eq!((found.len(), found[0].kind), (1, CauseKind::KernelLimit));
    assert!(found[0].evidence.ends_with("holds it: it and others below ask for 175"), "{found:?}");
    // All of the load below is known, and no more than the limit.
    let room = with(limit(150.0, 150.0, OtherUsers::Declared));
    assert_eq!((kinds(&room), room.unread()), (vec![CauseKind::CpuOthers], vec![]));
    let unclear = with(limit(150.0, 150.0, OtherUsers::Undeclared));
    assert_eq!(kinds(&unclear), []);
    assert_eq!(unclear.unread(), ["what others ask of its limit"]);
    let load = Some(Load { sent: 100.0, declared: 50.0, bytes: false });
    assert_eq!(kinds(&Facts { load, ..unclear.clone() }), [], "nor is its own load the cause by this");
    let device = waiting_at_device(Some(vec![("plc".to_owned(), 0.1), ("bulk".to_owned(), 0.9)])).device;
    assert_eq!(kinds(&Facts { device, ..unclear }), []);
    // One that is not used up holds nothing, whoever uses it.
    assert_eq!(kinds(&with(limit(90.0, 100.0, OtherUsers::Undeclared))), [CauseKind::CpuOthers]);
}

#[test]
fn throttling_by_qemu_is_told_from_a_limit_of_the_kernel() {
    let limit = Limit {
        by: Limiter::Qemu,
        file: "iops-total of drive d".to_owned(),
        value: 50.0,
        passes: 50.0,
        used: 49.0,
        asked: 100.0,
        others: OtherUsers::None,
    };
    let found = causes(&Facts { limits: Some(vec![limit]), ..facts() });
    assert_eq!((found.len(), found[0].kind), (1, CauseKind::QemuThrottle));
    assert!(found[0].evidence.contains("iops-total of drive d"), "{found:?}");
}

#[test]
fn a_load_above_the_declaration_is_its_own_cause_where_it_waits_for_itself() {
    let limit = |value, used, asked| Limit {
        by: Limiter::Kernel,
        file: "io.max".to_owned(),
        value,
        passes: value,
        used,
        asked,
        others: OtherUsers::None,
    };
    let load = |declared| Some(Load { sent: 100.0, declared, bytes: false });
    let of = |limit, declared| Facts { limits: Some(vec![limit]), load: load(declared), ..facts() };
    assert_eq!(kinds(&of(limit(100.0, 100.0, 50.0), 50.0)), [CauseKind::Load]);
    assert_eq!(kinds(&of(limit(100.0, 100.0, 95.0), 95.0)), [], "hardly more than it declares");
    assert_eq!(kinds(&of(limit(200.0, 100.0, 50.0), 50.0)), [], "the limit has room");
    let below = of(limit(40.0, 40.0, 50.0), 50.0);
    assert_eq!(kinds(&below), [CauseKind::KernelLimit], "the limit is below what it declares");
    let alone = waiting_at_device(Some(vec![("plc".to_owned(), 0.95), ("bulk".to_owned(), 0.05)]));
    assert_eq!(kinds(&Facts { load: load(50.0), ..alone.clone() }), [CauseKind::Load]);
    assert_eq!(kinds(&Facts { load: load(100.0), ..alone }), [CauseKind::Device]);
    let flood = waiting_at_device(Some(vec![("plc".to_owned(), 0.1), ("bulk".to_owned(), 0.9)]));
    assert_eq!(kinds(&Facts { load: load(50.0), ..flood }), [CauseKind::Neighbour]);
    let bytes = Load { sent: 3e6, declared: 1.5e6, bytes: true };
    assert_eq!(bytes.cause().unwrap().evidence, "it sends 3000 kB/s and declares 1500 kB/s");
}

#[test]
fn a_limit_is_judged_by_the_time_in_which_nothing_stalled() {
    let limit = Limit {
        by: Limiter::Kernel,
        file: "io.max".to_owned(),
        value: 80.0,
        passes: 80.0,
        used: 60.0,
        asked: 100.0,
        others: OtherUsers::None,
    };
    let held = Facts { limits: Some(vec![limit]), ..facts() };
    assert_eq!(kinds(&held), []);
    // Standstills of 500 ms for 6 of 30 s, which alone delay less than is named.
    assert_eq!(kinds(&Facts { disk: stops(12, 6_000), late: 3_000, ..held }), [CauseKind::KernelLimit]);
}

#[test]
fn a_standstill_is_told_from_a_slow_device_and_from_an_idle_one() {
    // 100 requests a second of 3 ms each: an idle device completes nothing for 10 ms.
    let use_of = |requests, waited| {
        let shares = Some(vec![("plc".to_owned(), 1.0), ("bulk".to_owned(), 0.0)]);
        Some(DeviceUse { requests, waited, shares })
    };
    let stopped = |requests, waited, ms: u64| Facts {
        disk: stops(80, 80 * ms),
        device: use_of(requests, waited),
        ready: None,
        median: Nanos::from_millis(4),
        late: 900,
        ..facts()
    };
    assert_eq!(kinds(&stopped(3_000.0, 9.0, 100)), [CauseKind::DiskStall]);
    assert_eq!(kinds(&stopped(3_000.0, 9.0, 25)), []);
    // Of 64 at once each 15 ms.
    assert_eq!(kinds(&stopped(2_000.0, 1_900.0, 100)), []);
}

#[test]
fn some_late_requests_wait_at_the_device_where_nothing_else_held_them() {
    let shares = Some(vec![("plc".to_owned(), 0.1), ("bulk".to_owned(), 0.9)]);
    let below = |waited| Some(VmUse { requests: 3_000.0, waited, is_mixed: false });
    // 300 of 3000 were above 20 ms, the others took 2 ms.
    let some = |waited| Facts {
        device: waiting_at_device(shares.clone()).device,
        late: 300,
        median: Nanos::from_millis(2),
        below: below(waited),
        ..facts()
    };
    assert_eq!(kinds(&some(5.4 + 7.0)), [CauseKind::Neighbour]);
    assert_eq!(kinds(&Facts { ready: Some(0.2), ..some(22.4) }), [CauseKind::Neighbour]);
    assert_eq!(kinds(&some(5.4 + 2.0)), [], "they waited in the guest");
    assert_eq!(kinds(&Facts { below: None, ..some(0.0) }), []);
    for busy in [Facts { ready: Some(0.2), ..some(12.4) }, Facts { quota: None, ..some(12.4) }] {
        // 6 s of waiting, of which 7 are left otherwise.
        assert_eq!(kinds(&busy), [], "it may have waited for CPUs");
    }
    // 1200 of 3000 are late by a backlog, for 12 of 30 s; so are 12 s below the guest, not 9.
    let backlog =
        |waited| Facts { late: 1_200, depth: Some(1), median: Nanos::from_millis(18), ..some(waited) };
    assert_eq!(kinds(&backlog(12.0)), [CauseKind::Neighbour]);
    assert_eq!(kinds(&backlog(9.0)), []);
    let stalled = Facts { host: stops(30, 3_000), ..some(12.4) };
    assert_eq!(kinds(&stalled), [CauseKind::HostStall]);
}

#[test]
fn a_limit_says_what_the_kernel_lets_through() {
    let limit = Limit {
        by: Limiter::Kernel,
        file: "io.max".to_owned(),
        value: 78.0,
        passes: 70.0,
        used: 70.0,
        asked: 75.0,
        others: OtherUsers::None,
    };
    let found = causes(&Facts { limits: Some(vec![limit]), ..facts() });
    assert_eq!(found[0].evidence, "its limit 78 in io.max lets 70 through, and holds it: it asks for 75");
}

#[test]
fn the_device_is_the_cause_of_a_backlog_where_it_takes_the_time_of_a_request() {
    let device = waiting_at_device(Some(vec![("plc".to_owned(), 1.0)])).device;
    let backlog = |waited: f64, depth| Facts {
        device: device.clone().map(|of| DeviceUse { requests: 2_000.0, waited, ..of }),
        median: Nanos::from_millis(1_500),
        depth,
        below: None,
        ..facts()
    };
    let seen = |waited| Some(VmUse { requests: 2_000.0, waited, is_mixed: false });
    assert_eq!(
        kinds(&Facts { below: seen(30.0), late: 2_900, ..backlog(30.0, Some(1)) }),
        [CauseKind::Device]
    );
    assert_eq!(kinds(&Facts { below: seen(0.4), ..backlog(30.0, Some(1)) }), [], "its own are quick");
    // 15 ms each, one after the other, where one is due every 10 ms.
    assert_eq!(kinds(&backlog(30.0, Some(1))), [CauseKind::Device]);
    assert_eq!(kinds(&backlog(30.0, Some(4))), [], "four at once do it");
    assert_eq!(kinds(&backlog(30.0, None)), []);
    assert_eq!(kinds(&backlog(8.0, Some(1))), [], "4 ms each leave no backlog");
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
    let own = |own_cpus| Facts { ready: Some(0.9), own_cpus, ..facts() };
    assert_eq!(kinds(&own(Some(1.7))), [], "its own threads have the CPUs");
    assert_eq!((kinds(&own(None)), own(None).unread()), (vec![], vec!["its wait for CPUs".to_owned()]));
    assert_eq!(kinds(&Facts { cpus: Some(4), ..own(Some(1.7)) }), [CauseKind::CpuOthers]);
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

/// Eight seconds of a task at 100/s with one at once, of which 341 were above 50 ms, in a VM whose
/// other program reads with `depth` at once; each request took 10.2 ms below the guest.
fn own_load(depth: f64, own: f64) -> Facts {
    let requests = depth / 0.0102 * 8.0;
    Facts {
        seconds: 8.0,
        n: 800,
        late: 341,
        target: Nanos::from_millis(50),
        median: Nanos::from_millis(25),
        depth: Some(1),
        load: Some(Load { sent: 35.8e6, declared: 0.41e6, bytes: true }),
        below: Some(VmUse { requests, waited: 8.0 * depth, is_mixed: true }),
        device: Some(DeviceUse {
            requests,
            waited: 8.0 * depth,
            shares: Some(vec![("plc".to_owned(), own), ("bulk".to_owned(), 0.99 - own)]),
        }),
        ready: Some(0.3),
        ..facts()
    }
}

#[test]
fn a_load_of_another_program_in_the_vm_is_seen_where_many_requests_wait_at_once() {
    assert_eq!(kinds(&own_load(15.0, 0.99)), [CauseKind::Load]);
    // Of few at once each may be as long as it is by itself, and the task's are shorter.
    assert_eq!(kinds(&own_load(3.0, 0.99)), []);
    // A thread that has no CPU delays all of them.
    assert_eq!(kinds(&Facts { ready: Some(0.75), ..own_load(15.0, 0.99) }), []);
    assert_eq!(kinds(&Facts { ready: None, ..own_load(15.0, 0.99) }), []);
    // Few late ones say nothing by the mean of all tasks.
    assert_eq!(kinds(&Facts { late: 200, ..own_load(15.0, 0.99) }), []);
    assert_eq!(kinds(&Facts { depth: None, ..own_load(15.0, 0.99) }), []);
    let limit = Limit {
        by: Limiter::Kernel,
        file: "io.max".to_owned(),
        value: 5_000.0,
        passes: 5_000.0,
        used: 1_470.0,
        asked: f64::INFINITY,
        others: OtherUsers::None,
    };
    let limited = Facts { limits: Some(vec![limit]), ..own_load(15.0, 0.99) };
    assert_eq!(kinds(&limited), [], "it may hold bursts back");
    let declared = Some(Load { sent: 0.41e6, declared: 0.41e6, bytes: true });
    assert_eq!(kinds(&Facts { load: declared, ..own_load(15.0, 0.99) }), [], "nor that the device is slow");
    assert_eq!(kinds(&own_load(15.0, 0.3)), [], "nor that another one fills it");
}

#[test]
fn what_may_be_load_or_what_was_due_meanwhile_is_neither_named_nor_the_devices() {
    let alone = |sent, rate, bytes| Facts {
        rate,
        load: Some(Load { sent, declared: 100.0, bytes }),
        below: None,
        ..Facts { late: 795, ..own_load(15.0, 0.99) }
    };
    assert_eq!(kinds(&alone(100.0, 100.0, false)), [CauseKind::Device]);
    assert_eq!(kinds(&alone(200.0, 200.0, false)), [CauseKind::Load]);
    // At rest in the interval before, or stopped there.
    assert_eq!(kinds(&alone(100.0, 200.0, false)), []);
    // Requests of a direction are no share of the device's bytes.
    let shared = |bytes| Facts {
        load: Some(Load { sent: 300.0, declared: 100.0, bytes }),
        ..Facts { late: 795, n: 0, ..own_load(60.0, 0.72) }
    };
    assert_eq!(kinds(&shared(true)), [CauseKind::Load]);
    assert_eq!(kinds(&shared(false)), []);
}

#[test]
fn a_load_above_the_declaration_is_named_next_to_others_by_what_it_moves() {
    // One large read at a time takes long by itself, and the task's may be quick.
    let single = Facts { late: 795, n: 0, median: Nanos::from_millis(2_000), ..own_load(1.0, 0.99) };
    assert_eq!(kinds(&Facts { ready: Some(0.2), ..single }), []);
    let late = |own| Facts { late: 795, n: 0, ..own_load(60.0, own) };
    assert_eq!(kinds(&late(0.72)), [CauseKind::Load]);
    assert_eq!(kinds(&late(0.5)), [CauseKind::Neighbour, CauseKind::Load]);
    assert_eq!(kinds(&late(0.3)), [CauseKind::Neighbour]);
    // A fifth more than it declares is a sixth of what it sends.
    let little = Some(Load { sent: 0.49e6, declared: 0.41e6, bytes: true });
    assert_eq!(kinds(&Facts { load: little, ..late(0.72) }), []);
    assert_eq!(kinds(&Facts { load: None, ..late(0.72) }), []);
}

/// Facts of [`facts()`], where VM and host had so many page faults.
fn with_faults(own: u64, host: u64) -> Facts {
    Facts { faults: Some(Faults { own, host, may_be_compressed: false }), ..facts() }
}

#[test]
fn the_guest_is_named_where_all_below_it_was_quick() {
    let found = causes(&with_faults(0, 3));
    assert_eq!((found.len(), found[0].kind), (1, CauseKind::Guest));
    assert!(found[0].evidence.starts_with("its VMM answered a request in 200us on average"), "{found:?}");
    // A task with one request at a time: while one of a second is below the guest, a hundred come.
    let queued = |waited| Facts {
        below: Some(VmUse { requests: 3000.0, waited, is_mixed: false }),
        depth: Some(1),
        ..with_faults(0, 3)
    };
    assert_eq!(kinds(&queued(4.0)), [CauseKind::Guest]);
    assert_eq!(kinds(&queued(6.0)), [], "of the 20 s in which 2000 came at 100/s, its VMM had 6 s");
    assert_eq!(kinds(&Facts { depth: None, ..queued(6.0) }), [CauseKind::Guest], "of 40 s in sum");
}

#[test]
fn the_guest_is_not_named_where_something_else_may_be_the_cause() {
    let guest = || with_faults(0, 3);
    let few = Some(VmUse { requests: 2_600.0, waited: 0.6, is_mixed: false });
    let mixed = Some(VmUse { requests: 9_000.0, waited: 0.6, is_mixed: true });
    for (facts, why) in [
        (Facts { below: None, ..guest() }, "its VMM counts nothing"),
        (Facts { below: few, ..guest() }, "its VMM did not count all"),
        (Facts { below: mixed, ..guest() }, "its VMM counts others' requests for some that are not there"),
        (Facts { faults: None, ..guest() }, "faults"),
        (with_faults(0, 400), "faults of the host that may be the VM's"),
        (Facts { ready: None, ..guest() }, "waits for CPUs"),
        (Facts { ready: Some(0.2), ..guest() }, "6 s without a CPU, in which 600 of 2000 came"),
        (Facts { stolen: Some(0.2), ..guest() }, "steal"),
        (Facts { stolen: Some(0.04), cpus: Some(8), ..guest() }, "a third of one CPU"),
        (Facts { cpus: None, ..guest() }, "of how many CPUs the steal is"),
        (Facts { quota: None, ..guest() }, "quota"),
        (Facts { quota: stops(100, 3_000), ..guest() }, "3 s and more by the quota"),
        (Facts { quota: stops(4, 100), ..guest() }, "one thread's stops count for one CPU of many"),
        (Facts { host: None, ..guest() }, "stalls"),
        (Facts { host: stops(1_000, 4_000), ..guest() }, "4 s of stalls too short to make one late"),
        (Facts { disk: None, ..guest() }, "standstills"),
        (Facts { device: None, ..guest() }, "the device"),
        (Facts { limits: None, ..guest() }, "limits"),
        (Facts { has_throttling: false, ..guest() }, "QEMU's throttling"),
        (Facts { late: 0, ..guest() }, "nothing was late"),
    ] {
        assert_eq!(kinds(&facts), [], "{why}");
    }
    let little = Facts { stolen: Some(0.03), quota: stops(1, 25), ready: Some(0.0), ..guest() };
    assert_eq!(kinds(&little), [CauseKind::Guest], "1.8 s of steal and a stop of a second at most");
    // Where latencies are those below the guest, that is where they passed.
    let below = Some(VmUse { requests: 3000.0, waited: 50.0, is_mixed: false });
    assert_eq!(kinds(&Facts { below, ..guest() }), []);
}
