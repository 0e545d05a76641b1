//! Interrupts that KVM makes pending for vCPUs, reported by a BPF program in this host's kernel.
//!
//! A vCPU that is runnable and waits for a CPU at its floor takes no interrupt, and user space
//! cannot see that one is pending. KVM knows it: interrupts of devices and of other vCPUs that it
//! delivers itself pass `__apic_accept_irq` (`arch/x86/kvm/lapic.c`). Interrupts of a vCPU's own
//! timer do so on the vCPU's own thread, which is running then: these are ignored, as guests
//! announce timers. Interrupts that the processor delivers without KVM are not traced ([`UNSEEN`]).

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use rtvirtio_bpf::{
    Assembler, Btf, BtfError, Helper, If, Mapping, Place, Ring, TYPES, Width, array, attach, hash, module,
    remove, update,
};
use rtvirtio_units::Nanos;

use crate::UrgencyError;

/// Kernel module, and the function that interrupts pass through.
const MODULE: &str = "kvm";
const FUNCTION: &str = "__apic_accept_irq";
/// Bytes of a vCPU's slot: time of the last interrupt, and whether one wakes the follower.
const SLOT: usize = 16;
const SINCE: i16 = 0;
const ARMED: i16 = 8;
/// Number of vCPUs whose slots fit into a page. A power of two.
const MAX_VCPUS: usize = 4096 / SLOT;
/// `BPF_RB_FORCE_WAKEUP`: wakes even if the ring is not empty.
const WAKE: i32 = 2;

/// Byte offsets of members in KVM's structures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Layout {
    vcpu_of_apic: i16,
    pid_of_vcpu: i16,
    number_of_pid: i16,
}

impl Layout {
    fn from_btf(btf: &Btf<'_>) -> Result<Self, BtfError> {
        let offset = |structure, member| btf.offset(structure, member);
        Ok(Self {
            vcpu_of_apic: offset("kvm_lapic", "vcpu")?,
            pid_of_vcpu: offset("kvm_vcpu", "pid")?,
            // The first number is that of the initial namespace.
            number_of_pid: offset("pid", "numbers")? + offset("upid", "nr")?,
        })
    }
}

/// Program at `__apic_accept_irq(apic, ...)`: records the time, where the vCPU's thread is followed
/// and is not the one that runs here; and wakes the follower once, where it has armed the slot.
///
/// May also be used under the GPL version 2, which the kernel requires of programs that read its
/// structures.
fn on_interrupt(threads: i32, slots: i32, ring: i32, layout: Layout) -> Vec<u64> {
    const KEY: i16 = -8;
    let mut a = Assembler::default();
    a.load(Width::Double, 1, 1, 0);
    a.load(Width::Double, 1, 1, layout.vcpu_of_apic);
    a.load(Width::Double, 1, 1, layout.pid_of_vcpu);
    // A vCPU that has never run has no thread.
    a.jump_if(1, If::Equal, 0, "end");
    a.load(Width::Word, 6, 1, layout.number_of_pid);
    a.store(Width::Word, 10, KEY, 6);
    a.copy(2, 10);
    a.add(2, KEY.into());
    a.set_map(1, threads);
    a.call(Helper::Lookup);
    a.jump_if(0, If::Equal, 0, "end");
    // r7 = its slot. The number is below MAX_VCPUS anyway: this is for the verifier.
    a.load(Width::Word, 2, 0, 0);
    a.and(2, MAX_VCPUS as i32 - 1);
    a.shift_left(2, SLOT.trailing_zeros() as i32);
    a.set_value_of(7, slots);
    a.add_register(7, 2);
    // Lower half, as a number of 32 bits.
    a.call(Helper::Thread);
    a.store(Width::Word, 10, KEY, 0);
    a.load(Width::Word, 1, 10, KEY);
    a.jump_if_register(1, If::Equal, 6, "end");
    a.call(Helper::Now);
    a.store(Width::Double, 7, SINCE, 0);
    a.load(Width::Word, 1, 7, ARMED);
    a.jump_if(1, If::Equal, 0, "end");
    a.set(1, 0);
    a.store(Width::Word, 7, ARMED, 1);
    a.set_map(1, ring);
    a.copy(2, 10);
    a.add(2, KEY.into());
    a.set(3, 8);
    a.set(4, WAKE);
    // All bytes that the call copies must be initialised.
    a.store(Width::Double, 10, KEY, 6);
    a.call(Helper::Output);
    a.label("end");
    a.set(0, 0);
    a.exit();
    a.finish()
}

/// Parameters of KVM by which the processor delivers interrupts itself, where they are on: IPIs
/// between vCPUs, and interrupts of AMD's AVIC. Interrupts of passed-through devices never pass
/// KVM.
const UNSEEN: [&str; 2] =
    ["/sys/module/kvm_intel/parameters/enable_ipiv", "/sys/module/kvm_amd/parameters/avic"];

/// Loaded program for one VM, attached until this is dropped.
#[derive(Debug)]
pub struct KvmInterrupts {
    threads: OwnedFd,
    slots: Mapping,
    ring: Ring,
    /// Thread ids by slot.
    used: Vec<Option<u32>>,
    _program: [OwnedFd; 2],
    _slots: OwnedFd,
}

impl KvmInterrupts {
    /// Loads and attaches the program.
    ///
    /// # Errors
    /// [`UrgencyError::Kvm`] where there is no KVM of this kind, or no right to BPF.
    pub fn start() -> Result<Self, UrgencyError> {
        let lacks = |what: &str, e: &dyn std::fmt::Display| UrgencyError::Kvm { why: format!("{what}: {e}") };
        let read = |name: &str| {
            let path = format!("{TYPES}/{name}");
            // kernel file
            fs::read(&path).map_err(|e| lacks(&format!("{path} (CONFIG_DEBUG_INFO_BTF)"), &e))
        };
        let kernel_bytes = read("vmlinux")?;
        let kernel = Btf::new(&kernel_bytes).map_err(|e| lacks("vmlinux", &e))?;
        let module = module(MODULE).map_err(|e| lacks("types of modules", &e))?;
        let bytes = if module.is_some() { read(MODULE)? } else { Vec::new() };
        // KVM may be part of the kernel.
        let btf = if module.is_some() {
            &Btf::of_module(&bytes, &kernel).map_err(|e| lacks(MODULE, &e))?
        } else {
            &kernel
        };
        let function = btf.function(FUNCTION).map_err(|e| lacks("KVM for x86, loaded", &e))?;
        let layout = Layout::from_btf(btf).map_err(|e| lacks("KVM's structures", &e))?;
        let threads = hash(MAX_VCPUS as u32).map_err(|e| lacks("BPF maps", &e))?;
        let (page, maps) = (rustix::param::page_size(), |e: io::Error| lacks("BPF maps", &e));
        let array = array(1, page as u32).map_err(maps)?;
        let slots = Mapping::of_descriptor(&array, page).map_err(maps)?;
        let ring = Ring::new().map_err(maps)?;
        let [threads_fd, slots_fd, ring_fd] = [&threads, &array, ring.descriptor()].map(|fd| fd.as_raw_fd());
        let code = on_interrupt(threads_fd, slots_fd, ring_fd, layout);
        let program =
            attach(&code, Place::Entry(function, module.as_ref())).map_err(|e| lacks(FUNCTION, &e))?;
        Ok(Self { threads, slots, ring, used: Vec::new(), _program: program, _slots: array })
    }

    /// Parameters that are on here by which the processor delivers interrupts without KVM.
    #[must_use]
    pub fn unseen() -> Vec<&'static str> {
        // kernel file
        let is_on = |path: &&str| fs::read_to_string(path).is_ok_and(|text| text.starts_with(['Y', '1']));
        UNSEEN.into_iter().filter(is_on).collect()
    }

    /// Whether any armed thread has had an interrupt since the last call.
    pub(crate) fn take(&self) -> bool {
        self.ring.take()
    }

    /// Gives a thread a slot; `None` where all are in use.
    pub(crate) fn add(&mut self, thread: u32) -> io::Result<Option<Slot>> {
        let free = self.used.iter().position(Option::is_none).unwrap_or(self.used.len());
        if free == MAX_VCPUS {
            return Ok(None);
        }
        let slot = Slot(free);
        self.arm(&slot, false);
        self.since(&slot);
        update(&self.threads, thread, free as u32)?;
        self.used.resize(self.used.len().max(free + 1), None);
        self.used[free] = Some(thread);
        Ok(Some(slot))
    }

    /// Frees the slot of a thread that is no longer followed.
    pub(crate) fn remove(&mut self, slot: &Slot) {
        if let Some(thread) = self.used.get_mut(slot.0).and_then(Option::take) {
            // A missing entry does no harm.
            let _ = remove(&self.threads, thread);
        }
    }

    /// Time of the last interrupt of a slot's thread, by the host's clock; `None` without one since
    /// the last call.
    pub(crate) fn since(&self, slot: &Slot) -> Option<Nanos> {
        let since = self.slots.double(slot.0 * SLOT).swap(0, Ordering::AcqRel);
        (since != 0).then_some(Nanos(since))
    }

    /// Sets whether the next interrupt of a slot's thread wakes the follower.
    pub(crate) fn arm(&self, slot: &Slot, is_armed: bool) {
        let armed = &self.slots.as_words()[(slot.0 * SLOT + ARMED as usize) / 4];
        armed.store(is_armed.into(), Ordering::Release);
    }
}

impl AsFd for KvmInterrupts {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ring.as_fd()
    }
}

/// Index of a followed thread's slot.
#[derive(Debug)]
pub(crate) struct Slot(usize);
