//! Instructions of the kernel's virtual machine (RFC 9669), as much as small programs need.

use std::collections::BTreeMap;

/// Register number: 0 for results, 1 to 5 for arguments, 6 to 9 preserved over calls, 10 is the
/// read-only end of the stack.
pub type Register = u8;

/// Width of a load or store.
#[derive(Clone, Copy, Debug)]
pub enum Width {
    /// `BPF_W`, 32 bits wide.
    Word,
    /// `BPF_DW`, 64 bits wide.
    Double,
}

/// Condition of a 64-bit jump.
#[derive(Clone, Copy, Debug)]
pub enum If {
    /// `BPF_JEQ`, operands are equal.
    Equal = 0x10,
    /// `BPF_JNE`, operands not equal.
    Not = 0x50,
    /// `BPF_JGE`, greater or equal, unsigned.
    AtLeast = 0x30,
    /// `BPF_JLT`, less than, unsigned.
    Less = 0xa0,
}

/// Helper functions of the kernel (`include/uapi/linux/bpf.h`).
#[derive(Clone, Copy, Debug)]
pub enum Helper {
    /// `bpf_map_lookup_elem`: address of a map's value, 0 without one.
    Lookup = 1,
    /// `bpf_ktime_get_ns`: `CLOCK_MONOTONIC` in nanoseconds.
    Now = 5,
    /// `bpf_get_smp_processor_id`: number of the CPU.
    Processor = 8,
    /// `bpf_get_current_pid_tgid`: the thread id in the lower half.
    Thread = 14,
    /// `bpf_ringbuf_output`: copies a record into a ring.
    Output = 130,
}

/// Program under construction. Labels are names; each is placed once.
#[derive(Debug, Default)]
pub struct Assembler {
    code: Vec<u64>,
    labels: BTreeMap<&'static str, usize>,
    jumps: Vec<(usize, &'static str)>,
}

impl Assembler {
    fn push(&mut self, code: u8, to: Register, from: Register, offset: i16, value: i32) {
        let registers = u64::from(to & 0xf | from << 4);
        let offset = u64::from(u16::from_le_bytes(offset.to_le_bytes()));
        let value = u64::from(u32::from_le_bytes(value.to_le_bytes()));
        self.code.push(u64::from(code) | registers << 8 | offset << 16 | value << 32);
    }

    /// `to = value`, sign-extended to 64 bits.
    pub fn set(&mut self, to: Register, value: i32) {
        self.push(0xb7, to, 0, 0, value);
    }

    /// `to = from`, 64 bits.
    pub fn copy(&mut self, to: Register, from: Register) {
        self.push(0xbf, to, from, 0, 0);
    }

    /// `to += value`, 64 bits.
    pub fn add(&mut self, to: Register, value: i32) {
        self.push(0x07, to, 0, 0, value);
    }

    /// `to += from`, 64 bits.
    pub fn add_register(&mut self, to: Register, from: Register) {
        self.push(0x0f, to, from, 0, 0);
    }

    /// `to &= value`, 64 bits.
    pub fn and(&mut self, to: Register, value: i32) {
        self.push(0x57, to, 0, 0, value);
    }

    /// `to <<= bits`, 64 bits.
    pub fn shift_left(&mut self, to: Register, bits: i32) {
        self.push(0x67, to, 0, 0, bits);
    }

    /// `to -= from`, 64 bits.
    pub fn subtract(&mut self, to: Register, from: Register) {
        self.push(0x1f, to, from, 0, 0);
    }

    /// `to |= value`, 64 bits.
    pub fn or(&mut self, to: Register, value: i32) {
        self.push(0x47, to, 0, 0, value);
    }

    /// `to = value`, 64 bits.
    pub fn set_wide(&mut self, to: Register, value: u64) {
        self.wide(to, 0, value);
    }

    /// `to` = address of the first value of this descriptor's array (`BPF_PSEUDO_MAP_VALUE`).
    pub fn set_value_of(&mut self, to: Register, descriptor: i32) {
        self.wide(to, 2, u64::from(descriptor.unsigned_abs()));
    }

    /// `to` = the map of this descriptor, for helpers that take one (`BPF_PSEUDO_MAP_FD`).
    pub fn set_map(&mut self, to: Register, descriptor: i32) {
        self.wide(to, 1, u64::from(descriptor.unsigned_abs()));
    }

    fn wide(&mut self, to: Register, from: Register, value: u64) {
        let half = |v: u64| i32::from_le_bytes(((v & 0xffff_ffff) as u32).to_le_bytes());
        self.push(0x18, to, from, 0, half(value));
        self.push(0, 0, 0, 0, half(value >> 32));
    }

    /// `to = *(from + offset)`.
    pub fn load(&mut self, width: Width, to: Register, from: Register, offset: i16) {
        self.push(if matches!(width, Width::Word) { 0x61 } else { 0x79 }, to, from, offset, 0);
    }

    /// `*(to + offset) = from`.
    pub fn store(&mut self, width: Width, to: Register, offset: i16, from: Register) {
        self.push(if matches!(width, Width::Word) { 0x63 } else { 0x7b }, to, from, offset, 0);
    }

    /// Calls a helper function of the kernel.
    pub fn call(&mut self, helper: Helper) {
        self.push(0x85, 0, 0, 0, helper as i32);
    }

    /// Jumps to a label if `condition` holds between `register` and `value`.
    pub fn jump_if(&mut self, register: Register, condition: If, value: i32, label: &'static str) {
        self.jumps.push((self.code.len(), label));
        self.push(condition as u8 | 0x05, register, 0, 0, value);
    }

    /// Jumps to a label if `condition` holds between two registers.
    pub fn jump_if_register(
        &mut self,
        register: Register,
        condition: If,
        other: Register,
        label: &'static str,
    ) {
        self.jumps.push((self.code.len(), label));
        self.push(condition as u8 | 0x0d, register, other, 0, 0);
    }

    /// Jumps to a label if the lower 32 bits, as a signed number, are less than `value`.
    pub fn jump_if_signed_less(&mut self, register: Register, value: i32, label: &'static str) {
        self.jumps.push((self.code.len(), label));
        self.push(0xc6, register, 0, 0, value);
    }

    /// Jumps to a label unconditionally.
    pub fn jump(&mut self, label: &'static str) {
        self.jumps.push((self.code.len(), label));
        self.push(0x05, 0, 0, 0, 0);
    }

    /// Places a label at the next instruction.
    pub fn label(&mut self, label: &'static str) {
        self.labels.insert(label, self.code.len());
    }

    /// Ends the program, with register 0 as its result.
    pub fn exit(&mut self) {
        self.push(0x95, 0, 0, 0, 0);
    }

    /// The instructions.
    ///
    /// # Panics
    /// For a jump to a label that was not placed, or too far: a mistake in the program's text.
    #[must_use]
    pub fn finish(mut self) -> Vec<u64> {
        for (at, label) in self.jumps {
            let to = self.labels[label];
            let distance = i16::try_from(to as i64 - at as i64 - 1).expect("a short program");
            self.code[at] |= u64::from(u16::from_le_bytes(distance.to_le_bytes())) << 16;
        }
        self.code
    }
}
