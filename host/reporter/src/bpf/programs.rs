//! BPF programs that report the task of each vCPU, and its next urgent timer.
//!
//! Both may also be used under the GPL version 2, which the kernel requires of programs that read
//! its structures.

use rtvirtio_bpf::{Assembler, Btf, BtfError, Helper, If, Width};
use rtvirtio_urgency::page::{BLOCK, flag, vcpu};

use super::MAX_VCPUS;

/// Timers further ahead are not announced, in ns: no vCPU waits at a level for so long, and timers
/// of another clock look like it.
const FARTHEST: i32 = 2_000_000_000;
/// `MAX_RT_PRIO`: a task's `prio` below it is real-time.
const REAL_TIME: i32 = 100;
/// Byte offset in a block of the guest's own double word: earliest timer of an urgent task.
const ARMED: i16 = 32;
const SEQUENCE: i16 = bytes(vcpu::SEQUENCE);
const POLICY: i16 = bytes(vcpu::POLICY);
const PRIORITY: i16 = bytes(vcpu::PRIORITY);
const FLAGS: i16 = bytes(vcpu::FLAGS);
const WRITTEN: i16 = bytes(vcpu::WRITTEN);
const DEADLINE: i16 = bytes(vcpu::DEADLINE);

const fn bytes(word: usize) -> i16 {
    (word * 4) as i16
}

/// Byte offsets of members in this kernel's structures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    prio: i16,
    pid: i16,
    /// `None` where tasks have no CPU number.
    processor: Option<i16>,
}

/// Byte offsets of members in this kernel's `struct hrtimer`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimerLayout {
    expires: i16,
    function: i16,
}

impl TimerLayout {
    /// Reads them from the kernel's type information. The type of the timer's node decides: Linux 7
    /// has another one, with `expires` elsewhere.
    pub fn from_btf(btf: &Btf<'_>) -> Result<Self, BtfError> {
        Ok(Self {
            expires: btf.offset_within("hrtimer", "node", "expires")?,
            function: btf.offset("hrtimer", "function")?,
        })
    }
}

impl Layout {
    /// Reads them from the kernel's type information.
    pub fn from_btf(btf: &Btf<'_>) -> Result<Self, BtfError> {
        let offset = |structure, member| btf.offset(structure, member);
        Ok(Self {
            prio: offset("task_struct", "prio")?,
            pid: offset("task_struct", "pid")?,
            processor: offset("task_struct", "thread_info")
                .and_then(|at| Ok(at + offset("thread_info", "cpu")?))
                .ok(),
        })
    }
}

/// r8 = address of the block of the CPU whose number is in r2. The array is one value, whose
/// address the kernel patches into the program: no look-up.
fn block(a: &mut Assembler, map: i32) {
    // The number is below MAX_VCPUS anyway: this is for the verifier.
    a.and(2, MAX_VCPUS as i32 - 1);
    a.shift_left(2, BLOCK.trailing_zeros() as i32);
    a.set_value_of(8, map);
    a.add_register(8, 2);
}

/// r2 = number of this CPU.
fn processor(a: &mut Assembler) {
    a.call(Helper::Processor);
    a.copy(2, 0);
}

/// Program at `sched_switch(preempt, prev, next, ...)`: writes the next task's state, where it
/// differs for the host. Most switches, between ordinary tasks, end after a few loads, without a
/// helper call or a store. Comparing with `prev` would not do: its priority may have changed since
/// it was reported.
#[must_use]
pub fn on_switch(map: i32, layout: Layout) -> Vec<u64> {
    let mut a = Assembler::default();
    a.load(Width::Double, 7, 1, 16);
    match layout.processor {
        Some(at) => a.load(Width::Word, 2, 7, at),
        None => processor(&mut a),
    }
    block(&mut a, map);
    a.load(Width::Word, 6, 7, layout.prio);
    a.jump_if_signed_less(6, REAL_TIME, "urgent");

    // r9 = flags: whether the task is the idle task, number 0.
    a.load(Width::Word, 1, 7, layout.pid);
    a.set(9, 0);
    a.jump_if(1, If::Not, 0, "ordinary");
    a.set(9, flag::IDLE as i32);
    a.label("ordinary");
    a.load(Width::Word, 1, 8, POLICY);
    a.jump_if(1, If::Not, 0, "ended");
    a.load(Width::Word, 1, 8, FLAGS);
    a.jump_if_register(1, If::Equal, 9, "end");
    a.label("ended");
    a.call(Helper::Now);
    // r7 = expiry of the armed timer, if it is in the future.
    a.load(Width::Double, 7, 8, ARMED);
    a.jump_if_register(7, If::AtLeast, 0, "armed");
    a.set(7, 0);
    a.label("armed");
    a.set(6, 0);
    a.set(5, 0);
    a.jump("write");

    // r9 = the guest's priority, 99 - prio; deadline and stop tasks are above all.
    a.label("urgent");
    a.set(9, 99);
    a.jump_if_signed_less(6, 0, "highest");
    a.subtract(9, 6);
    a.label("highest");
    a.load(Width::Word, 1, 8, POLICY);
    a.jump_if(1, If::Equal, 0, "begins");
    a.load(Width::Word, 1, 8, PRIORITY);
    a.jump_if_register(1, If::Equal, 9, "end");
    a.label("begins");
    a.call(Helper::Now);
    a.copy(5, 9);
    a.set(6, 1);
    a.set(7, 0);
    a.set(9, 0);

    // r0 = now, r5 = priority, r6 = policy, r7 = deadline, r9 = flags.
    a.label("write");
    a.load(Width::Word, 1, 8, SEQUENCE);
    a.or(1, 1);
    a.store(Width::Word, 8, SEQUENCE, 1);
    a.store(Width::Word, 8, POLICY, 6);
    a.store(Width::Word, 8, PRIORITY, 5);
    a.store(Width::Word, 8, FLAGS, 9);
    a.store(Width::Double, 8, WRITTEN, 0);
    a.store(Width::Double, 8, DEADLINE, 7);
    a.add(1, 1);
    a.store(Width::Word, 8, SEQUENCE, 1);
    a.label("end");
    a.set(0, 0);
    a.exit();
    a.finish()
}

/// Program at `hrtimer_start(timer, mode)`: while an urgent task runs, records the earliest timer
/// that wakes a sleeping task. `wake` is the address of `hrtimer_wakeup`.
#[must_use]
pub fn on_timer(map: i32, layout: TimerLayout, wake: u64) -> Vec<u64> {
    let mut a = Assembler::default();
    a.load(Width::Double, 7, 1, 0);
    a.load(Width::Double, 1, 7, layout.function);
    a.set_wide(2, wake);
    a.jump_if_register(1, If::Not, 2, "end");
    processor(&mut a);
    block(&mut a, map);
    a.load(Width::Word, 1, 8, POLICY);
    a.jump_if(1, If::Equal, 0, "end");
    a.load(Width::Double, 6, 7, layout.expires);
    a.call(Helper::Now);
    // Expired, or too far ahead.
    a.jump_if_register(6, If::Less, 0, "end");
    a.copy(1, 6);
    a.subtract(1, 0);
    a.jump_if(1, If::AtLeast, FARTHEST, "end");
    // An earlier timer is armed and in the future.
    a.load(Width::Double, 1, 8, ARMED);
    a.jump_if_register(1, If::Less, 0, "arm");
    a.jump_if_register(6, If::AtLeast, 1, "end");
    a.label("arm");
    a.store(Width::Double, 8, ARMED, 6);
    a.label("end");
    a.set(0, 0);
    a.exit();
    a.finish()
}
