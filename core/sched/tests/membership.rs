//! VMs come and go while others run.

use rtvirtio_sched::{
    Cap, Config, Cost, Line, MembershipError, Next, Op, Piece, Policy, Priority, Request, Reservation,
    Scheduler, Tspec, VmConfig, VmId, WindowConfig,
};
use rtvirtio_units::Nanos;

const COST: Cost = Cost {
    read: Line { base_ns: 50_000, per_mib_ns: 1_000_000 },
    write: Line { base_ns: 50_000, per_mib_ns: 1_000_000 },
    flush_ns: 50_000,
    discard_ns: 500_000,
};

fn config(policy: Policy, vms: usize) -> Config {
    let deadline = Nanos::from_millis(5);
    let reserved = VmConfig {
        normal: Some(Reservation { rate: 300_000_000, burst: 1_000_000, deadline }),
        ..VmConfig::default()
    };
    let mut all = vec![VmConfig { weight: 300, ..VmConfig::default() }; vms];
    if let Some(first) = all.first_mut() {
        *first = reserved;
    }
    Config { policy, cost: COST, window: WindowConfig::fixed(2), vms: all, ..Config::default() }
}

fn request(tag: u64, now: Nanos) -> Request {
    Request { tag, op: Op::Read, len: 4_096, priority: Priority::NORMAL, arrival: now }
}

/// Serves one piece at a time until nothing is queued; the tags of completed requests, in order.
fn drain(s: &mut Scheduler, now: &mut Nanos) -> Vec<u64> {
    let mut done = Vec::new();
    loop {
        match s.next(*now) {
            Next::Piece(piece) => {
                now.0 += piece.cost;
                done.extend(s.complete(*now, &piece).unwrap().map(|c| c.request.tag));
            }
            Next::Wait(at) => {
                assert!(at.0 < u64::MAX);
                *now = at;
            }
            Next::Full => panic!("one piece at a time"),
            Next::Idle => return done,
        }
    }
}

/// VM 0 keeps its order and each of its completions while VM 1 comes and goes a hundred times, with
/// requests and without; the number of places does not grow.
#[test]
fn others_keep_their_requests_and_order() {
    for policy in Policy::ALL {
        let mut s = Scheduler::new(&config(policy, 1)).unwrap();
        let mut now = Nanos(0);
        let (mut submitted, mut done, mut guests) = (0u64, Vec::new(), 0);
        for turn in 0..100u64 {
            for _ in 0..3 {
                s.submit(VmId(0), request(submitted, now)).unwrap();
                submitted += 1;
            }
            let prepared = Scheduler::prepare(&config(policy, 2), VmId(1)).unwrap();
            s.attach(VmId(1), prepared).unwrap();
            assert_eq!(s.places(), 2, "{policy:?}");
            if turn % 2 == 0 {
                s.submit(VmId(1), request(1_000_000 + turn, now)).unwrap();
                assert_eq!(s.detach(VmId(1)).unwrap_err(), MembershipError::Busy(VmId(1)));
                guests += 1;
            }
            done.extend(drain(&mut s, &mut now));
            s.detach(VmId(1)).unwrap();
            assert_eq!(s.detach(VmId(1)).unwrap_err(), MembershipError::Vacant(VmId(1)));
            s.submit(VmId(1), request(0, now)).unwrap_err();
        }
        let ours: Vec<u64> = done.iter().copied().filter(|tag| *tag < 1_000_000).collect();
        assert_eq!(ours, (0..submitted).collect::<Vec<_>>(), "{policy:?}");
        assert_eq!(done.len() - ours.len(), guests, "{policy:?}");
    }
}

/// When a VM leaves while its neighbour's piece is at the device, that piece is unaffected; a new
/// VM in the vacant place starts without history.
#[test]
fn a_place_is_taken_again_without_history() {
    let mut s = Scheduler::new(&config(Policy::Drr, 2)).unwrap();
    let mut now = Nanos(1_000);
    s.submit(VmId(1), request(7, now)).unwrap();
    drain(&mut s, &mut now);
    s.submit(VmId(0), request(8, now)).unwrap();
    let Next::Piece(piece @ Piece { vm: VmId(0), .. }) = s.next(now) else { panic!("a piece of VM 0") };
    s.detach(VmId(1)).unwrap();
    let prepared = Scheduler::prepare(&config(Policy::Drr, 2), VmId(1)).unwrap();
    s.attach(VmId(1), prepared).unwrap();
    assert_eq!(s.counters(VmId(1)).completed, [0, 0]);
    let done = s.complete(Nanos(now.0 + piece.cost), &piece).unwrap().expect("its only piece");
    assert_eq!((done.vm, done.request.tag), (VmId(0), 8));
    // A gap or a place with a VM is refused.
    let prepared = |vm| Scheduler::prepare(&config(Policy::Drr, 5), vm).unwrap();
    assert_eq!(s.attach(VmId(0), prepared(VmId(0))).unwrap_err(), MembershipError::Taken(VmId(0)));
    assert_eq!(s.attach(VmId(3), prepared(VmId(3))).unwrap_err(), MembershipError::Taken(VmId(3)));
    s.attach(VmId(2), prepared(VmId(2))).unwrap();
}

/// A device without VMs waits for its first one; a vacant place has no part in weights.
#[test]
fn the_first_vm_may_come_later() {
    let mut s = Scheduler::new(&config(Policy::Edf, 0)).unwrap();
    assert_eq!(s.next(Nanos(0)), Next::Idle);
    s.attach(VmId(0), Scheduler::prepare(&config(Policy::Edf, 1), VmId(0)).unwrap()).unwrap();
    let mut now = Nanos(0);
    s.submit(VmId(0), request(1, now)).unwrap();
    assert_eq!(drain(&mut s, &mut now), [1]);
    s.detach(VmId(0)).unwrap();
    assert_eq!(s.next(now), Next::Idle);
}

/// Each piece under a reservation has its deadline; others have none.
#[test]
fn promised_pieces_have_a_due_time() {
    let mut s = Scheduler::new(&config(Policy::Edf, 2)).unwrap();
    let now = Nanos(1_000_000);
    s.submit(VmId(0), request(1, now)).unwrap();
    s.submit(VmId(1), request(2, now)).unwrap();
    for _ in 0..2 {
        let Next::Piece(piece) = s.next(now) else { panic!("a piece") };
        let due = if piece.vm == VmId(0) { Nanos(now.0 + 5_000_000) } else { Nanos(u64::MAX) };
        assert_eq!((piece.reserved, piece.due), (piece.vm == VmId(0), due));
    }
}

/// Reads that wait for their cap put off no deadline of the VM's writes.
#[test]
fn a_cap_on_reads_leaves_the_deadlines_of_writes() {
    let mut config = config(Policy::Edf, 2);
    config.window = WindowConfig::fixed(1);
    config.vms[0].caps[0] = Cap { requests: Some(Tspec { rate: 1, burst: 1, peak: None }), ..Cap::default() };
    let mut s = Scheduler::new(&config).unwrap();
    let submitted = Nanos(1_000_000);
    // The second read waits for a second.
    for tag in [1, 2] {
        s.submit(VmId(0), request(tag, submitted)).unwrap();
    }
    let Next::Piece(read) = s.next(submitted) else { panic!("the first read") };
    s.submit(VmId(0), Request { op: Op::Write, ..request(3, submitted) }).unwrap();
    let now = Nanos(submitted.0 + 2_000_000);
    s.complete(now, &read).unwrap();
    let Next::Piece(write) = s.next(now) else { panic!("the write") };
    assert_eq!((write.op, write.reserved, write.eligible_at), (Op::Write, true, submitted));
    assert_eq!(write.due, Nanos(submitted.0 + 5_000_000));
}
