//! The page through which a guest says how urgent its vCPUs' work is, with a guest that writes what
//! it likes, at any time: each level stays within the VM's, time above the floor stays within its
//! budgets, and the next look lies ahead.
//!
//! Layout of the input: vCPUs (1 byte), then steps of a kind and its payload: bytes of the page
//! (offset 2 bytes, length 1, bytes); time (2 bytes, in units of 8 us); a look at a vCPU with what
//! its thread ran since (1 byte, in units of 64 us, never more than has passed); an interrupt (1
//! byte); a completion; an interrupt by KVM; the end of the guest's reports.

use std::cell::RefCell;

use rtvirtio_units::Nanos;
use rtvirtio_urgency::page::{BLOCK, Blocks, Host, LEAST_SIZE, Memory, Mode};
use rtvirtio_urgency::{Config, GuestClock, Interrupt, Step, Vcpu, VcpuSample};

/// Steps of one input.
const MAX_STEPS: usize = 400;
const CEILING: u32 = 40;
const FLOOR: u32 = 3;
const CONTRACT: u32 = 10;
/// Start of the host's clock in the run.
const START: Nanos = Nanos(1_000_000_000);

struct Page(RefCell<Vec<u8>>);

impl Memory for &Page {
    type Error = ();

    fn read(&self, at: usize, into: &mut [u8]) -> Result<(), ()> {
        let page = self.0.borrow();
        into.copy_from_slice(page.get(at..at + into.len()).ok_or(())?);
        Ok(())
    }

    fn write(&self, at: usize, from: &[u8]) -> Result<(), ()> {
        let mut page = self.0.borrow_mut();
        page.get_mut(at..at + from.len()).ok_or(())?.copy_from_slice(from);
        Ok(())
    }
}

struct Input<'d>(&'d [u8]);

impl<'d> Input<'d> {
    fn take(&mut self, n: usize) -> &'d [u8] {
        let (head, rest) = self.0.split_at(n.min(self.0.len()));
        self.0 = rest;
        head
    }

    fn byte(&mut self) -> u8 {
        self.take(1).first().copied().unwrap_or(0)
    }

    fn number(&mut self) -> u64 {
        u64::from(self.byte()) | u64::from(self.byte()) << 8
    }
}

/// A vCPU, its sequence number at the last look, and when that was.
struct Looked {
    vcpu: Vcpu,
    sequence: Option<u32>,
    at: Nanos,
    /// Counted period, and time above the floor at its beginning.
    period: (u64, Nanos),
    /// Most that one look added in this period.
    longest: Nanos,
}

/// Plays a guest against the host's side of its page.
///
/// # Panics
/// When a level is outside of the VM's, a budget is exceeded by more than the looks that crossed
/// its end, or a next look does not lie ahead.
pub fn play(data: &[u8]) {
    let mut input = Input(data);
    let config = Config::new(CEILING, FLOOR, CONTRACT);
    let page = Page(RefCell::new(vec![0; LEAST_SIZE]));
    let host = Host::new(&page, LEAST_SIZE).expect("a page of the least size");
    host.serve(Some(7)).expect("memory of our own");
    let count = usize::from(input.byte() % 4) + 1;
    let mut blocks = Blocks::new(&page, BLOCK, count);
    let mut now = START;
    let mut clock = GuestClock::default();
    let new = || Looked {
        vcpu: Vcpu::new(config, START),
        sequence: None,
        at: START,
        period: (0, Nanos(0)),
        longest: Nanos(0),
    };
    let mut all: Vec<Looked> = (0..count).map(|_| new()).collect();
    for _ in 0..MAX_STEPS {
        if input.0.is_empty() {
            break;
        }
        let kind = input.byte();
        let i = usize::from(kind >> 4) % count;
        let step = match kind % 7 {
            0 => {
                let at = input.number() as usize % LEAST_SIZE;
                let length = usize::from(input.byte()).min(LEAST_SIZE - at);
                let bytes = input.take(length);
                page.0.borrow_mut()[at..at + bytes.len()].copy_from_slice(bytes);
                continue;
            }
            1 => {
                now = Nanos(now.0 + input.number() * 8_000);
                continue;
            }
            2 => look(&mut all[i], i, &mut blocks, &mut clock, &host, now, input.byte()),
            3 => {
                let nonmaskable = input.byte() % 2 == 1;
                let kind = if nonmaskable { Interrupt::NonMaskable } else { Interrupt::Maskable };
                all[i].vcpu.interrupt(kind, now)
            }
            4 => all[i].vcpu.completion(now),
            5 => all[i].vcpu.kvm_interrupt(now),
            _ => all[i].vcpu.end(now),
        };
        check(&step, &all[i], &config, now);
        blocks.show(i, step.level).expect("memory of our own");
    }
}

fn look(
    of: &mut Looked,
    i: usize,
    blocks: &mut Blocks<&Page>,
    clock: &mut GuestClock,
    host: &Host<&Page>,
    now: Nanos,
    ran: u8,
) -> Step {
    let (mode, _) = host.mode().expect("memory of our own");
    let read = blocks.read(i).expect("memory of our own");
    let mut is_new = false;
    let report = read.map(|(sequence, raw)| {
        is_new = of.sequence.replace(sequence) != Some(sequence);
        clock.observe(now, Nanos(raw.written));
        let (report, _) = raw.checked(|guest| clock.to_host(guest));
        assert!(report.priority <= 99, "{report:?}");
        report
    });
    let ran = Nanos((u64::from(ran) * 64_000).min(now.0 - of.at.0));
    of.at = now;
    let before = of.vcpu.counters().boosted;
    let period = (now.0 - START.0) / Config::new(CEILING, FLOOR, CONTRACT).period.0;
    if of.period.0 != period {
        (of.period, of.longest) = ((period, before), Nanos(0));
    }
    let step = of.vcpu.observe(VcpuSample { report, is_new, alive: mode != Mode::Off, ran }, now);
    let added = Nanos(of.vcpu.counters().boosted.0 - before.0);
    of.longest = of.longest.max(added);
    step
}

fn check(step: &Step, of: &Looked, config: &Config, now: Nanos) {
    let most = config.ceiling.max(config.contract);
    assert!(step.level.priority <= most && step.level.priority >= config.floor, "{step:?}");
    assert_eq!((step.level, step.reason), (of.vcpu.level(), of.vcpu.reason()));
    assert!(step.next.is_none_or(|next| next > now), "{step:?} at {now:?}");
    let (task, critical) = of.vcpu.left();
    assert!(task <= config.task_budget && critical <= config.critical_budget);
    // Each budget may be exceeded by the look that finds it used up.
    let boosted = Nanos(of.vcpu.counters().boosted.0 - of.period.1.0);
    let most = config.task_budget.0 + config.critical_budget.0 + 2 * of.longest.0;
    assert!(boosted.0 <= most, "{boosted:?} above the floor in a period, {most} ns at most");
}
