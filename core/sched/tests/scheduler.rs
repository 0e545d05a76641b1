//! The scheduler alone, step by step.

use rtvirtio_sched::{
    Cap, Class, Config, ConfigError, Cost, Line, Next, Op, Policy, Priority, PriorityRule, Request,
    Reservation, Scheduler, Tspec, VmConfig, VmId, WindowConfig,
};
use rtvirtio_units::Nanos;

const COST: Cost = Cost {
    read: Line { base_ns: 62_000, per_mib_ns: 1_000_000 },
    write: Line { base_ns: 25_000, per_mib_ns: 420_000 },
    flush_ns: 25_000,
    discard_ns: 25_000,
};

fn request(tag: u64, op: Op, len: u64, now: Nanos) -> Request {
    Request { tag, op, len, priority: Priority::NORMAL, arrival: now }
}

fn config(policy: Policy, window: u32, vms: Vec<VmConfig>) -> Config {
    Config { policy, cost: COST, window: WindowConfig::fixed(window), vms, ..Config::default() }
}

fn edf(window: u32, vms: Vec<VmConfig>) -> Scheduler {
    Scheduler::new(&config(Policy::Edf, window, vms)).unwrap()
}

/// VMs without caps.
fn plain(vms: usize) -> Vec<VmConfig> {
    vec![VmConfig::default(); vms]
}

/// Serves the backlog one piece at a time; returns the number of pieces and the end.
fn drain(s: &mut Scheduler, mut now: Nanos) -> (u32, Nanos) {
    let mut pieces = 0;
    loop {
        match s.next(now) {
            Next::Piece(piece) => {
                // A deallocation takes as long as declared.
                let took = if matches!(piece.op, Op::Discard | Op::WriteZeroes) {
                    COST.discard_ns
                } else {
                    piece.cost
                };
                now = Nanos(now.0 + took);
                s.complete(now, &piece).unwrap();
                pieces += 1;
            }
            Next::Wait(at) => {
                assert!(at.0 < u64::MAX, "something waits for ever, after {pieces} pieces");
                now = at;
            }
            Next::Full => panic!("one piece at a time"),
            Next::Idle => return (pieces, now),
        }
    }
}

/// A cap on bytes counts zeroes as written, in pieces within its burst; under every cap zeroing
/// makes progress.
#[test]
fn zeroes_count_as_written_where_bytes_are_limited() {
    for policy in Policy::ALL {
        let cap =
            Cap { bytes: Some(Tspec { rate: 80_000_000, burst: 65_536, peak: None }), ..Cap::default() };
        let time =
            Cap { time: Some(Tspec { rate: 500_000_000, burst: 100_000, peak: None }), ..Cap::default() };
        for write in [Cap::default(), cap, time] {
            let vm = VmConfig { caps: [Cap::default(), write], ..VmConfig::default() };
            let vms = vec![vm, VmConfig { weight: 7, ..VmConfig::default() }];
            let mut s = Scheduler::new(&config(policy, 2, vms)).unwrap();
            s.submit(VmId(0), request(1, Op::WriteZeroes, 64 << 20, Nanos(0))).unwrap();
            let (pieces, end) = drain(&mut s, Nanos(0));
            assert_eq!(pieces, 1_024);
            if write.bytes.is_some() {
                // 64 MiB less the burst at 80 MB/s.
                assert!(end.0 >= (64 << 20) - 65_536 * 2 / 80 * 1_000, "{end}");
                assert!(end.as_secs_f64() > 0.83, "{end}");
            }
        }
    }
}

/// A discard counts as one request, whatever its length, and as no bytes.
#[test]
fn discards_use_requests_only() {
    let cap = Cap {
        requests: Some(Tspec { rate: 10, burst: 1, peak: None }),
        bytes: Some(Tspec { rate: 65_536, burst: 65_536, peak: None }),
        ..Cap::default()
    };
    let mut s = edf(1, vec![VmConfig { caps: [Cap::default(), cap], ..VmConfig::default() }]);
    for tag in 0..3 {
        s.submit(VmId(0), request(tag, Op::Discard, 32 << 20, Nanos(0))).unwrap();
    }
    let (pieces, end) = drain(&mut s, Nanos(0));
    // Each takes as long as declared for the smallest size, so the size does not grow.
    assert_eq!(pieces, 3 * 512);
    assert!((0.2..0.25).contains(&end.as_secs_f64()), "{end}");
}

/// Two VMs on a device that takes `piece_ns` for each piece of a discard and 100 us for a read. VM
/// 1 keeps one read outstanding; VM 0 discards `mib` MiB. Returns the longest read, and the share
/// of the time that discards took.
fn reads_alongside_discards(piece_ns: u64, mib: u64) -> (u64, f64) {
    let cost = Cost { discard_ns: 400_000, ..COST };
    let config = Config { cost, ..config(Policy::Edf, 1, plain(2)) };
    let mut s = Scheduler::new(&config).unwrap();
    let mut now = Nanos(0);
    s.submit(VmId(1), request(7, Op::Read, 4_096, now)).unwrap();
    s.submit(VmId(0), request(1, Op::Discard, mib << 20, now)).unwrap();
    let (mut longest, mut discards, mut asked) = (0, 0, now);
    // One server: the device's queue is served in order.
    let mut at_device = Vec::new();
    let mut free_at = now;
    while now < Nanos(2_000_000_000) {
        match s.next(now) {
            Next::Piece(piece) => {
                let took = if piece.op == Op::Discard { piece_ns } else { 100_000 };
                discards += if piece.op == Op::Discard { took } else { 0 };
                free_at = Nanos(free_at.0.max(now.0) + took);
                at_device.push((free_at, piece));
            }
            rest if !at_device.is_empty() => {
                let (done, piece) = at_device.remove(0);
                if let Next::Wait(at) = rest {
                    if at < done {
                        now = at;
                        at_device.insert(0, (done, piece));
                        continue;
                    }
                }
                now = done;
                s.complete(now, &piece).unwrap();
                if piece.op == Op::Read {
                    longest = longest.max(now.0 - asked.0);
                    asked = now;
                    s.submit(VmId(1), request(7, Op::Read, 4_096, now)).unwrap();
                }
            }
            Next::Wait(at) => now = at,
            other => panic!("{other:?}"),
        }
    }
    (longest, discards as f64 / now.0 as f64)
}

/// A VM that discards delays its neighbour's requests by one piece, and stays within the share of
/// discards.
#[test]
fn discards_delay_a_neighbour_by_one_piece() {
    for piece_ns in [50_000, 400_000, 5_000_000] {
        let (longest, share) = reads_alongside_discards(piece_ns, 2_048);
        assert!(longest <= 100_000 + piece_ns, "{longest} ns with pieces of {piece_ns} ns");
        assert!(share <= 0.051, "{share} with pieces of {piece_ns} ns");
        assert!(
            share > 0.02 || piece_ns < 100_000,
            "{share}: they make progress, with pieces of {piece_ns} ns"
        );
    }
}

/// Discards of a VM alone are not paced, and hold no place in the window.
#[test]
fn discards_of_a_vm_alone_are_not_paced() {
    let mut s = edf(1, plain(2));
    s.submit(VmId(0), request(1, Op::Read, 4_096, Nanos(0))).unwrap();
    let Next::Piece(read) = s.next(Nanos(0)) else { panic!("the read goes") };
    s.submit(VmId(0), request(2, Op::Discard, 1 << 20, Nanos(0))).unwrap();
    // With a full window the discard goes all the same; its second piece waits for the first.
    let Next::Piece(discard) = s.next(Nanos(0)) else { panic!("the discard goes") };
    assert_eq!((discard.op, s.inflight()), (Op::Discard, 1));
    assert_eq!(s.next(Nanos(0)), Next::Full);
    s.complete(Nanos(1_000), &discard).unwrap();
    assert!(matches!(s.next(Nanos(1_000)), Next::Piece(p) if p.op == Op::Discard));
    s.complete(Nanos(2_000), &read).unwrap();
    // Cancelled half-way, only the piece at the device is left.
    let mut gone = 0;
    s.cancel_backlog(Nanos(2_000), VmId(0), |_| gone += 1);
    assert_eq!((gone, s.outstanding(VmId(0)), s.backlog()), (0, 1, 0));
    assert_eq!(s.next(Nanos(2_000)), Next::Idle);
}

/// A VM's cap on device time charges the measured time of its discards.
#[test]
fn discards_are_charged_what_they_take() {
    let time = Cap { time: Some(Tspec { rate: 10_000_000, burst: 100_000, peak: None }), ..Cap::default() };
    let mut s = edf(1, vec![VmConfig { caps: [Cap::default(), time], ..VmConfig::default() }]);
    s.submit(VmId(0), request(1, Op::Discard, 64 << 20, Nanos(0))).unwrap();
    let (mut now, mut used) = (Nanos(0), 0);
    while now < Nanos(5_000_000_000) {
        match s.next(now) {
            Next::Piece(piece) => {
                now = Nanos(now.0 + 2_000_000);
                used += 2_000_000;
                s.complete(now, &piece).unwrap();
            }
            Next::Wait(at) => now = at,
            other => panic!("{other:?}"),
        }
    }
    // One percent, and one piece whose time was not known at submission.
    let share = used as f64 / now.0 as f64;
    assert!((0.009..=0.0105).contains(&share), "{share}");
}

/// A cancelled backlog is gone, pieces in flight complete, and other VMs are not affected.
#[test]
fn a_cancelled_backlog_leaves_pieces_in_flight() {
    let mut s = edf(1, plain(2));
    for tag in 0..5 {
        s.submit(VmId(0), request(tag, Op::Read, 4_096, Nanos(0))).unwrap();
        s.submit(VmId(1), request(100 + tag, Op::Read, 4_096, Nanos(0))).unwrap();
    }
    let Next::Piece(running) = s.next(Nanos(0)) else { panic!("a piece goes") };
    let mut gone = Vec::new();
    s.cancel_backlog(Nanos(1), running.vm, |r| gone.push(r.tag));
    assert_eq!(gone.len(), 4);
    assert_eq!(s.outstanding(running.vm), 1);
    assert!(s.complete(Nanos(2), &running).unwrap().is_some());
    assert!(s.complete(Nanos(3), &running).is_err(), "a piece comes back once");
    assert_eq!(drain(&mut s, Nanos(4)).0, 5);
    // A request of the idle class alone is served at once.
    let idle = Priority { class: Class::Idle, level: 7 };
    s.submit(VmId(0), Request { priority: idle, ..request(9, Op::Flush, 0, Nanos(5)) }).unwrap();
    assert_eq!(drain(&mut s, Nanos(5)).0, 1);
}

/// A flush may take as long as the device's whole cache needs: no other request waits for it, and a
/// VM has one in flight at a time.
#[test]
fn a_flush_holds_no_place_and_a_vm_has_one_in_flight() {
    for policy in Policy::ALL {
        let mut s = Scheduler::new(&config(policy, 1, plain(2))).unwrap();
        let now = Nanos(1_000);
        for tag in 0..3 {
            s.submit(VmId(0), request(tag, Op::Flush, 0, now)).unwrap();
        }
        let Next::Piece(flush) = s.next(now) else { panic!("{}: the flush goes", policy.name()) };
        assert_eq!((flush.op, s.inflight()), (Op::Flush, 0));
        // The second flush of this VM waits for the first, not for a time.
        assert_eq!(s.next(now), Next::Full, "{}", policy.name());
        s.submit(VmId(1), request(9, Op::Read, 4_096, now)).unwrap();
        s.submit(VmId(0), request(8, Op::Read, 4_096, now)).unwrap();
        let Next::Piece(first) = s.next(now) else { panic!("{}: reads go alongside", policy.name()) };
        assert_eq!(s.next(now), Next::Full);
        s.complete(now, &first).unwrap();
        let Next::Piece(second) = s.next(now) else { panic!("{}: both of them", policy.name()) };
        assert_ne!(first.vm, second.vm, "also those of the VM that flushes");
        s.complete(now, &second).unwrap();
        assert_eq!(s.next(now), Next::Full);
        s.complete(now, &flush).unwrap().unwrap();
        assert!(matches!(s.next(now), Next::Piece(p) if p.op == Op::Flush));
        // Writes behind a queued flush go; cancelling the backlog cancels flushes too.
        s.submit(VmId(0), request(10, Op::Flush, 0, now)).unwrap();
        s.submit(VmId(0), request(11, Op::Write, 4_096, now)).unwrap();
        assert!(matches!(s.next(now), Next::Piece(p) if p.op == Op::Write), "{}", policy.name());
        s.cancel_backlog(now, VmId(0), |r| assert_eq!(r.op, Op::Flush));
        assert_eq!((s.backlog(), s.next(now)), (0, Next::Idle));
    }
}

/// The backlog behind a request beyond the reservation gets no deadlines in the past.
#[test]
fn a_backlog_behind_its_own_vm_gets_no_past_deadlines() {
    let read = COST.time_of(Op::Read, 4_096);
    // No 64 KiB request fits the reservation.
    let reserved = |deadline: u64| VmConfig {
        normal: Some(Reservation { rate: 400_000_000, burst: read, deadline: Nanos::from_micros(deadline) }),
        ..VmConfig::default()
    };
    let mut s = edf(1, vec![reserved(1_000), reserved(2_000)]);
    // The device is busy for 10 ms, while a large read of the first VM is queued, and 20 small ones
    // behind it.
    s.submit(VmId(1), request(0, Op::Read, 4_096, Nanos(0))).unwrap();
    let Next::Piece(slow) = s.next(Nanos(0)) else { panic!("it goes") };
    s.submit(VmId(0), request(0, Op::Read, 65_536, Nanos(0))).unwrap();
    for tag in 1..=20 {
        s.submit(VmId(0), request(tag, Op::Read, 4_096, Nanos(tag * 500_000))).unwrap();
    }
    let late = Nanos::from_millis(10);
    s.complete(late, &slow).unwrap();
    let Next::Piece(large) = s.next(late) else { panic!("it shares") };
    assert_eq!((large.vm, large.reserved), (VmId(0), false));
    let mut now = Nanos(late.0 + large.cost);
    s.complete(now, &large).unwrap();
    s.submit(VmId(1), request(99, Op::Read, 4_096, now)).unwrap();
    let mut before = 0;
    while let Next::Piece(p) = s.next(now) {
        now = Nanos(now.0 + p.cost);
        s.complete(now, &p).unwrap();
        if p.vm == VmId(1) {
            break;
        }
        before += 1;
    }
    assert!(before <= 2, "{before} went before");
}

/// Policy, window and caps change with requests queued and in flight: none is lost, the new cap
/// applies at once, counters continue.
#[test]
fn reconfigured_with_requests_in_flight() {
    for (from, to) in
        [(Policy::Fifo, Policy::Edf), (Policy::Edf, Policy::RoundRobin), (Policy::RoundRobin, Policy::Drr)]
    {
        let config = config(from, 4, plain(2));
        let mut s = Scheduler::new(&config).unwrap();
        for tag in 0..100 {
            s.submit(VmId((tag % 2) as u16), request(tag, Op::Read, 4_096, Nanos(0))).unwrap();
        }
        let Next::Piece(first) = s.next(Nanos(0)) else { panic!("something waits") };
        let cap = Cap { requests: Some(Tspec { rate: 100, burst: 1, peak: None }), ..Cap::default() };
        let mut new = Config { policy: to, window: WindowConfig::fixed(1), ..config.clone() };
        new.vms[0] = VmConfig { caps: [cap, Cap::default()], weight: 300, ..VmConfig::default() };
        // An invalid configuration changes nothing.
        let quantum = Config { quantum: 4_096, ..new.clone() };
        let refused = s.reconfigure(&quantum, &[VmId(0)]).unwrap_err();
        assert!(matches!(&refused, ConfigError::Range { what, value: 4_096, .. } if what == "quantum"));
        assert!(s.reconfigure(&new, &[VmId(2)]).is_err());
        assert!(s.reconfigure(&Config { vms: new.vms[..1].to_vec(), ..new.clone() }, &[VmId(0)]).is_err());
        assert_eq!(s.window(), 4);
        s.reconfigure(&new, &[VmId(0)]).unwrap();
        assert_eq!(s.next(Nanos(0)), Next::Full, "one piece is at the device, and that is the window now");
        s.complete(Nanos(10), &first).unwrap();
        let (pieces, end) = drain(&mut s, Nanos(10));
        assert_eq!(pieces, 99);
        assert_eq!([VmId(0), VmId(1)].map(|vm| s.counters(vm).completed[0]), [50, 50]);
        // 49 or 50 requests at 100 per second, the first of them at once.
        assert!((0.48..=0.5).contains(&end.as_secs_f64()), "{from:?} {to:?}: {end}");
        // The cap is lifted.
        s.reconfigure(&config, &[VmId(0), VmId(1)]).unwrap();
        for tag in 0..10 {
            s.submit(VmId(0), request(tag, Op::Read, 4_096, end)).unwrap();
        }
        let (_, later) = drain(&mut s, end);
        assert!(later.0 - end.0 < 10_000_000);
    }
}

/// Urgent requests go in pieces of their own size within their reservation, and are split as all
/// others beyond it.
#[test]
fn urgent_requests_use_their_own_quantum() {
    let urgent = |burst: u64| VmConfig {
        urgent: Some(Reservation { rate: 1, burst, deadline: Nanos::from_millis(10) }),
        urgent_quantum: Some(256 << 10),
        priority: PriorityRule { read: true, ..PriorityRule::default() },
        ..VmConfig::default()
    };
    // 62 us and 250 us for 256 KiB: enough for one piece of it.
    let mut s = edf(1, vec![urgent(312_000), VmConfig::default()]);
    let read = request(1, Op::Read, 320 << 10, Nanos(0));
    s.submit(VmId(0), Request { priority: Priority::URGENT, ..read }).unwrap();
    let (mut seen, mut now) = (Vec::new(), Nanos(0));
    while let Next::Piece(piece) = s.next(now) {
        seen.push(piece.len);
        now = Nanos(now.0 + piece.cost);
        s.complete(now, &piece).unwrap();
    }
    assert_eq!(seen, [256 << 10, 64 << 10]);
    let wrong = |quantum| {
        let vm = VmConfig { urgent_quantum: Some(quantum), ..urgent(1_000_000) };
        config(Policy::Edf, 4, vec![vm]).check()
    };
    assert!(wrong(32 << 10).is_err(), "smaller than the device's");
    assert!(wrong((64 << 10) + 512).is_err());
    assert!(wrong(32 << 20).is_err());
    assert_eq!(wrong(64 << 10), Ok(()));
    // A burst smaller than one such piece.
    let small = config(Policy::Edf, 4, vec![urgent(311_999)]);
    assert!(matches!(small.check(), Err(ConfigError::Burst { burst: 311_999, piece: 312_000, .. })));
}

/// A VM that discards and reads gets no more deallocation time than one that only discards.
#[test]
fn discards_of_two_vms_take_turns() {
    let mut s = edf(4, plain(2));
    let mut now = Nanos(0);
    for vm in [VmId(0), VmId(1)] {
        s.submit(vm, request(1, Op::Discard, 1 << 40, now)).unwrap();
    }
    let mut took = [0u64; 2];
    let mut next_read = now;
    while now < Nanos(1_000_000_000) {
        if now >= next_read {
            s.submit(VmId(1), request(2, Op::Read, 4_096, now)).unwrap();
            next_read = Nanos(now.0 + 5_000_000);
        }
        match s.next(now) {
            Next::Piece(piece) => {
                let time = if piece.op == Op::Read { 100_000 } else { 50_000 };
                took[usize::from(piece.vm.0)] += if piece.op == Op::Read { 0 } else { time };
                now = Nanos(now.0 + time);
                s.complete(now, &piece).unwrap();
            }
            Next::Wait(at) => now = at.min(next_read),
            other => panic!("{other:?}"),
        }
    }
    let ratio = took[0] as f64 / took[1] as f64;
    assert!((0.8..1.25).contains(&ratio), "{took:?}");
}

/// The rest of a failed request is not submitted, and does not count as backlog.
#[test]
fn the_rest_of_a_failed_request_is_cancelled() {
    for op in [Op::Read, Op::Write, Op::Discard, Op::WriteZeroes] {
        let mut s = edf(2, plain(1));
        s.submit(VmId(0), request(1, op, 1 << 30, Nanos(0))).unwrap();
        s.submit(VmId(0), request(2, op, 4_096, Nanos(0))).unwrap();
        let Next::Piece(first) = s.next(Nanos(0)) else { panic!("a piece goes") };
        s.cancel_remainder(&first);
        s.cancel_remainder(&first);
        assert_eq!(s.backlog(), 1, "{op:?}");
        assert_eq!(s.complete(Nanos(1), &first).unwrap().map(|f| f.request.tag), Some(1), "{op:?}");
        let Next::Piece(second) = s.next(Nanos(1)) else { panic!("{op:?}: the next one goes") };
        assert_eq!(second.tag, 2);
        assert!(s.complete(Nanos(2), &second).unwrap().is_some());
        assert_eq!((s.next(Nanos(3)), s.backlog(), s.outstanding(VmId(0))), (Next::Idle, 0, 0), "{op:?}");
    }
}

/// Queued discards can be cancelled; zeroing and transfers stay, in order.
#[test]
fn only_discards_can_be_cancelled() {
    let mut s = edf(2, plain(1));
    let ops = [Op::Discard, Op::WriteZeroes, Op::Discard, Op::Read, Op::WriteZeroes, Op::Discard];
    for (tag, op) in ops.into_iter().enumerate() {
        s.submit(VmId(0), request(tag as u64, op, 1 << 20, Nanos(0))).unwrap();
    }
    // The first one is in flight in part.
    let Next::Piece(running) = s.next(Nanos(0)) else { panic!("a piece goes") };
    assert_eq!((running.tag, running.op), (0, Op::Discard));
    let mut gone = Vec::new();
    s.cancel_discards(Nanos(1), VmId(0), |r| gone.push(r.tag));
    assert_eq!((gone.as_slice(), s.outstanding(VmId(0)), s.backlog()), (&[2, 5][..], 4, 3));
    assert_eq!(s.complete(Nanos(2), &running).unwrap().map(|f| f.request.tag), Some(0));
    let mut order = Vec::new();
    let mut now = Nanos(2);
    loop {
        match s.next(now) {
            Next::Piece(piece) => {
                now = Nanos(now.0 + 1_000);
                order.extend(s.complete(now, &piece).unwrap().map(|f| f.request.tag));
            }
            Next::Wait(at) => now = at,
            _ => break,
        }
    }
    order.retain(|tag| *tag != 3);
    assert_eq!((order, s.outstanding(VmId(0)), s.backlog()), (vec![1, 4], 0, 0));
}
