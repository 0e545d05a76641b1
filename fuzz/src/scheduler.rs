//! The scheduler of one device under virtual time: every request is submitted whole, in order and
//! once, completes once, and never waits for ever; no VM exceeds its caps in any interval; the
//! device never holds more than the window; `Full` is returned only while pieces are in flight.
//!
//! Layout of the input: policy, number of VMs, quantum, window; 12 bytes for each VM (depth,
//! weight, caps on bytes, requests and time, two reservations); then steps of four bytes: action,
//! VM, and two bytes for length, priority or time.

use std::collections::BTreeMap;

use rtvirtio_sched::{
    Cap, Charge, Class, Config, Direction, Idx, IndexVec, Next, Op, Piece, Policy, Priority, Request,
    Reservation, Scheduler, Tspec, VmConfig, VmId, WindowConfig,
};
use rtvirtio_units::Nanos;

/// Most steps of one input.
const MOST: usize = 300;
/// Most pieces until all requests of an input are complete.
const MOST_PIECES: usize = 200_000;
const OPS: [Op; 5] = [Op::Read, Op::Write, Op::Flush, Op::Discard, Op::WriteZeroes];

/// An outstanding request.
struct Open {
    request: Request,
    vm: VmId,
    given: u64,
    at_device: u32,
    /// Its first piece was submitted.
    begun: bool,
    /// Its rest is cancelled.
    dropped: bool,
}

/// Tokens through a cap beyond its rate: never more than the burst, which is equivalent to at most
/// `burst + rate t` in every interval of length t (Lindley's recursion).
struct Envelope {
    rate: u64,
    burst: u64,
    /// In billionths of a token, at `at`.
    beyond: u128,
    at: u64,
}

impl Envelope {
    fn take(&mut self, now: u64, tokens: u64) {
        let gone = u128::from(now - self.at) * u128::from(self.rate);
        self.beyond = self.beyond.saturating_sub(gone) + u128::from(tokens) * 1_000_000_000;
        self.at = now;
        assert!(self.beyond <= u128::from(self.burst) * 1_000_000_000, "beyond a cap");
    }
}

/// Scheduler, device, and the expected state of the scheduler.
struct World {
    scheduler: Scheduler,
    config: Config,
    now: u64,
    tag: u64,
    open: BTreeMap<u64, Open>,
    at_device: Vec<Piece>,
    /// For each VM and direction, the admitted requests, bytes and time.
    envelopes: IndexVec<VmId, [[Option<Envelope>; 3]; 2]>,
}

fn power(byte: u8, most: u32) -> u64 {
    1 << (u32::from(byte) % (most + 1))
}

fn config(head: [u8; 4], bytes: &[u8]) -> Config {
    let quantum = [4 << 10, 16 << 10, 64 << 10, 1 << 20][usize::from(head[2] % 4)];
    let vms = bytes.chunks_exact(12).map(|b| vm(b, quantum)).collect();
    Config {
        policy: Policy::ALL[usize::from(head[0] % 4)],
        quantum,
        window: WindowConfig {
            shared: (head[3] & 0x80 != 0).then_some(1),
            ..WindowConfig::fixed(u32::from(head[3] % 8) + 1)
        },
        vms,
        ..Config::default()
    }
}

fn vm(b: &[u8], quantum: u64) -> VmConfig {
    let spec = |rate: u8, least: u64| {
        (rate & 0x80 != 0).then(|| Tspec {
            // Device time beyond the charge leaves a debt: at a rate of a millionth it is paid
            // within the range of time.
            rate: power(rate, 40).max(1 << 10),
            burst: least.saturating_add(power(b[5], 24)),
            peak: None,
        })
    };
    // Time of a piece: more than any costs.
    let cap = Cap {
        bytes: spec(b[2], quantum),
        requests: spec(b[3], 1),
        time: spec(b[4], 1 << 32),
        per_request: 1,
    };
    let reservation = |rate: u8, deadline: u8| {
        (rate & 0x80 != 0).then(|| Reservation {
            rate: power(rate, 30),
            burst: power(b[8], 33),
            deadline: Nanos(power(deadline, 40)),
        })
    };
    VmConfig {
        depth: u32::from(b[0] % 32) + 1,
        weight: u32::from(b[1]) * 3 + 1,
        caps: if b[11] & 1 == 0 { [cap, Cap::default()] } else { [cap, cap] },
        urgent: reservation(b[6], b[9]),
        normal: reservation(b[7], b[10]),
        ..VmConfig::default()
    }
}

fn envelopes(vm: &VmConfig) -> [[Option<Envelope>; 3]; 2] {
    vm.caps.map(|cap| {
        [cap.requests, cap.bytes, cap.time]
            .map(|spec| spec.map(|s| Envelope { rate: s.rate, burst: s.burst, beyond: 0, at: 0 }))
    })
}

/// Runs the steps of an input, and then until no request is outstanding.
///
/// # Panics
/// The scheduler breaks one of the properties above.
pub fn play(data: &[u8]) {
    let Some((head, rest)) = data.split_first_chunk::<4>() else { return };
    let vms = usize::from(head[1] % 4) + 1;
    let (bytes, steps) = rest.split_at((vms * 12).min(rest.len()));
    let config = config(*head, bytes);
    let scheduler = match Scheduler::new(&config) {
        Ok(scheduler) => scheduler,
        Err(e) => return assert!(!e.to_string().is_empty()),
    };
    let envelopes = config.vms.iter().map(envelopes).collect();
    let mut world =
        World { scheduler, config, now: 1, tag: 0, open: BTreeMap::new(), at_device: Vec::new(), envelopes };
    for step in steps.chunks_exact(4).take(MOST) {
        let vm = VmId::from_usize(usize::from(step[1]) % world.config.vms.len());
        let value = u16::from_le_bytes([step[2], step[3]]);
        match step[0] % 8 {
            0 | 1 => world.submit(vm, step[0], value),
            2 | 3 => drop(world.next()),
            4 => world.complete(usize::from(value), step[0] & 0x80 != 0),
            5 => world.now += u64::from(value) << (step[1] % 24),
            6 if step[0] & 0x80 != 0 => world.cancel_discards(vm),
            6 => world.cancel_backlog(vm),
            _ => world.reconfigure(vm, value),
        }
        world.check();
    }
    world.drain();
}

impl World {
    fn submit(&mut self, vm: VmId, action: u8, value: u16) {
        let op = OPS[usize::from(action / 8) % OPS.len()];
        let len = if op == Op::Flush { 0 } else { (u64::from(value >> 3) % 512 + 1) * 512 };
        let class = [Class::RealTime, Class::BestEffort, Class::Idle][usize::from(action / 40) % 3];
        let priority = Priority { class, level: (value & 7) as u8 };
        let request = Request { tag: self.tag, op, len, priority, arrival: Nanos(self.now) };
        let full = self.scheduler.outstanding(vm) >= self.config.vms[vm.index()].depth as usize;
        let taken = self.scheduler.submit(vm, request);
        assert_eq!(taken.is_err(), full, "{taken:?}");
        if taken.is_ok() {
            let open = Open { request, vm, given: 0, at_device: 0, begun: false, dropped: false };
            self.open.insert(self.tag, open);
        }
        self.tag += 1;
    }

    fn next(&mut self) -> Next {
        let held = self.scheduler.inflight();
        let next = self.scheduler.next(Nanos(self.now));
        // A flush holds no place, and the window may have shrunk.
        assert!(self.scheduler.inflight() <= self.scheduler.window().max(held));
        match &next {
            Next::Piece(piece) => self.give(*piece),
            Next::Wait(at) => {
                assert!(at.0 > self.now && at.0 < u64::MAX, "waits until {at:?} at {}", self.now)
            }
            Next::Full => assert!(!self.at_device.is_empty(), "nothing is at the device"),
            Next::Idle => assert!(!self.open.values().any(Open::waits), "something waits"),
        }
        next
    }

    fn give(&mut self, piece: Piece) {
        let open = self.open.get_mut(&piece.tag).expect("a request that is not finished");
        let r = &open.request;
        assert_eq!(
            (piece.vm, piece.op, piece.offset, piece.priority),
            (open.vm, r.op, open.given, r.priority)
        );
        assert!(
            !open.dropped && piece.len <= open.rest() && (piece.len > 0 || r.op == Op::Flush),
            "{piece:?}"
        );
        if r.op.moves_data() {
            assert!(piece.len <= self.config.quantum, "{piece:?}");
        }
        let charge = Charge::for_piece(piece.op, piece.len, !open.begun, piece.cost);
        let direction = piece.op.direction().index();
        let tokens = [charge.requests, charge.bytes, charge.time];
        for (envelope, tokens) in self.envelopes[piece.vm][direction].iter_mut().zip(tokens) {
            if let Some(envelope) = envelope {
                envelope.take(self.now, tokens);
            }
        }
        open.given += piece.len;
        open.begun = true;
        open.at_device += 1;
        self.at_device.push(piece);
    }

    fn complete(&mut self, which: usize, failed: bool) {
        if self.at_device.is_empty() {
            return;
        }
        let piece = self.at_device.swap_remove(which % self.at_device.len());
        if failed {
            self.scheduler.cancel_remainder(&piece);
            let open = self.open.get_mut(&piece.tag).expect("a request that is not finished");
            open.dropped |= open.rest() > 0;
        }
        let finished = self.scheduler.complete(Nanos(self.now), &piece).expect("a piece at the device");
        let open = self.open.get_mut(&piece.tag).expect("a request that is not finished");
        open.at_device -= 1;
        let through = open.at_device == 0 && (open.dropped || open.rest() == 0);
        assert_eq!(finished.map(|f| (f.vm, f.request)), through.then_some((open.vm, open.request)));
        if through {
            self.open.remove(&piece.tag);
        }
    }

    fn cancel_backlog(&mut self, vm: VmId) {
        let mut gone = Vec::new();
        self.scheduler.cancel_backlog(Nanos(self.now), vm, |request| gone.push(request.tag));
        for tag in gone {
            let open = self.open.remove(&tag).expect("a request that is not finished");
            assert!(open.vm == vm && open.at_device == 0);
        }
        for open in self.open.values_mut().filter(|o| o.vm == vm) {
            assert!(open.at_device > 0, "it is neither gone nor at the device");
            open.dropped |= open.rest() > 0;
        }
    }

    fn cancel_discards(&mut self, vm: VmId) {
        let mut gone = Vec::new();
        self.scheduler.cancel_discards(Nanos(self.now), vm, |request| gone.push(request.tag));
        for tag in gone {
            let open = self.open.remove(&tag).expect("a request that is not finished");
            assert!(open.vm == vm && open.at_device == 0 && open.request.op == Op::Discard);
        }
        let discards = |o: &&mut Open| o.vm == vm && o.request.op == Op::Discard;
        for open in self.open.values_mut().filter(discards) {
            assert!(open.at_device > 0, "it is neither gone nor at the device");
            open.dropped |= open.rest() > 0;
        }
    }

    /// Changes policy and window; weights and full buckets of one VM.
    fn reconfigure(&mut self, vm: VmId, value: u16) {
        let mut config = self.config.clone();
        config.policy = Policy::ALL[usize::from(value % 4)];
        config.window = WindowConfig::fixed(u32::from(value >> 2) % 8 + 1);
        config.vms[vm.index()].weight = u32::from(value >> 6) % 1_000 + 1;
        self.scheduler.reconfigure(&config, &[vm]).expect("of the same VMs");
        self.envelopes[vm] = envelopes(&config.vms[vm.index()]);
        self.config = config;
    }

    /// Checks the scheduler's counters.
    fn check(&self) {
        for vm in self.envelopes.indices() {
            let open = self.open.values().filter(|o| o.vm == vm).count();
            assert_eq!(self.scheduler.outstanding(vm), open, "VM {vm}");
        }
        let waiting = self.open.values().filter(|o| o.waits()).count();
        assert_eq!(self.scheduler.backlog(), waiting);
        for direction in Direction::ALL {
            let contract = self.scheduler.contract(VmId(0), direction, Nanos(self.now));
            assert!(!format!("{contract:?}").is_empty());
        }
    }

    /// Completes pieces at once, and advances time to the scheduler's wake-ups.
    fn drain(&mut self) {
        let mut waits = 0;
        for _ in 0..MOST_PIECES {
            match self.next() {
                Next::Piece(_) => waits = 0,
                // A device completes a piece sooner than a cap may release a request.
                Next::Wait(_) if !self.at_device.is_empty() => self.complete(0, false),
                Next::Wait(at) => {
                    waits += 1;
                    assert!(waits < 1_000, "nothing goes although time does");
                    self.now = at.0;
                }
                Next::Full => {
                    self.now += 1_000;
                    self.complete(0, false);
                }
                Next::Idle => {
                    if self.at_device.is_empty() {
                        self.check();
                        return assert!(self.open.is_empty(), "something is left");
                    }
                    self.complete(0, false);
                }
            }
        }
        panic!("requests do not come to an end");
    }
}

impl Open {
    fn rest(&self) -> u64 {
        self.request.len - self.given
    }

    /// Whether its rest is still to be submitted.
    fn waits(&self) -> bool {
        !self.dropped && (!self.begun || self.rest() > 0)
    }
}
