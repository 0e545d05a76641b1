//! Reports of the guest's scheduler, by two BPF programs in the guest's kernel.
//!
//! The programs write into a BPF array that is mapped here, so that its address in the guest's
//! memory can be found and passed to the host: a report costs a few stores, without a VM exit. The
//! array cannot move while it exists: the kernel allocates it with the map.

pub mod programs;

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicU32, Ordering};

use rtvirtio_urgency::page::{BLOCK, LEAST_SIZE, Mode};

use rtvirtio_bpf::{Btf, Mapping, Place, array, attach};

use crate::{Device, Reporter, ReporterError};
use programs::{Layout, TimerLayout, on_switch, on_timer};

const BTF: &str = "/sys/kernel/btf/vmlinux";
const SYMBOLS: &str = "/proc/kallsyms";
const PAGEMAP: &str = "/proc/self/pagemap";
/// Timer function that wakes a sleeping task.
const WAKE: &str = "hrtimer_wakeup";
/// Number of vCPUs whose blocks fit into one page, which is contiguous in the guest's memory. A
/// power of two.
const MAX_VCPUS: usize = LEAST_SIZE / BLOCK;

/// Loaded programs, attached until this is dropped.
#[derive(Debug)]
pub struct Watch {
    blocks: Mapping,
    timers: Result<(), String>,
    _descriptors: Vec<OwnedFd>,
}

impl Watch {
    /// Loads and attaches the programs.
    ///
    /// # Errors
    /// [`ReporterError::Kernel`] for a kernel without BPF or type information;
    /// [`ReporterError::TooSmall`] with more vCPUs than a page has blocks.
    pub fn start() -> Result<Self, ReporterError> {
        let lacks =
            |what: &str, e: &dyn std::fmt::Display| ReporterError::Kernel { what: format!("{what}: {e}") };
        let cpus = possible_cpus()?;
        if cpus > MAX_VCPUS {
            return Err(ReporterError::TooSmall { vcpu: MAX_VCPUS, blocks: MAX_VCPUS });
        }
        // kernel file
        let bytes = fs::read(BTF).map_err(|e| lacks(&format!("{BTF} (CONFIG_DEBUG_INFO_BTF)"), &e))?;
        let btf = Btf::new(&bytes).map_err(|e| lacks(BTF, &e))?;
        let layout = Layout::from_btf(&btf).map_err(|e| lacks(BTF, &e))?;
        let at_switch = btf.tracepoint("sched_switch").map_err(|e| lacks(BTF, &e))?;
        let map = array(1, LEAST_SIZE as u32).map_err(|e| lacks("BPF maps", &e))?;
        let blocks = Mapping::of_descriptor(&map, LEAST_SIZE).map_err(|e| lacks("a mapped array", &e))?;
        let number = map.as_raw_fd();
        let switch = attach(&on_switch(number, layout), Place::Tracepoint(at_switch));
        let mut descriptors: Vec<OwnedFd> = switch.map_err(|e| lacks("sched_switch", &e))?.into();
        let timers = watch_timers(&btf, number).map(|timer| descriptors.extend(timer));
        descriptors.push(map);
        Ok(Self { blocks, timers, _descriptors: descriptors })
    }

    /// Reason why no timers are announced; `None` where they are. The rest works without them.
    #[must_use]
    pub fn lacks_timers(&self) -> Option<&str> {
        self.timers.as_ref().err().map(String::as_str)
    }

    /// Blocks without a header: 16 words for each vCPU.
    #[must_use]
    pub fn as_words(&self) -> &[AtomicU32] {
        self.blocks.as_words()
    }

    /// Guest-physical address of the blocks.
    ///
    /// # Errors
    /// When the kernel does not reveal it: only root may read it.
    pub fn address(&self) -> Result<u64, ReporterError> {
        // A page that was never touched has no frame.
        let _ = self.as_words()[0].load(Ordering::Relaxed);
        let page = rustix::param::page_size();
        let mut entry = [0; 8];
        // kernel file
        let read = File::open(PAGEMAP)
            .and_then(|file| file.read_exact_at(&mut entry, (self.blocks.address() / page * 8) as u64));
        read.map_err(ReporterError::io("read", PAGEMAP))?;
        // Documentation/admin-guide/mm/pagemap.rst: the frame in bits 0 to 54, present in bit 63.
        let entry = u64::from_ne_bytes(entry);
        match (entry >> 63, entry & ((1 << 55) - 1)) {
            (1, frame @ 1..) => Ok(frame * page as u64),
            _ => Err(ReporterError::io("read", PAGEMAP)(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "the frame is hidden: run it as root",
            ))),
        }
    }

    /// Tells the host the address of the blocks, and starts the beat.
    ///
    /// # Errors
    /// As [`Watch::address`] and [`Reporter::begin`].
    pub fn report(&self, device: Device) -> Result<Reporter, ReporterError> {
        let reporter = Reporter::begin(device, Mode::GuestMemory { address: self.address()? })?;
        reporter.device().ring();
        Ok(reporter)
    }
}

/// Loads and attaches the program that announces timers. An error is the reason why there is none.
fn watch_timers(btf: &Btf<'_>, map: i32) -> Result<[OwnedFd; 2], String> {
    let layout = TimerLayout::from_btf(btf).map_err(|e| format!("{BTF}: {e}"))?;
    let place = btf.tracepoint("hrtimer_start").map_err(|e| format!("{BTF}: {e}"))?;
    // kernel file
    let symbols = fs::read_to_string(SYMBOLS).map_err(|e| format!("{SYMBOLS}: {e}"))?;
    let wake = symbol(&symbols, WAKE).ok_or_else(|| format!("{SYMBOLS} hides or lacks {WAKE}"))?;
    let program = on_timer(map, layout, wake);
    attach(&program, Place::Tracepoint(place)).map_err(|e| format!("the kernel refuses the program: {e}"))
}

/// Address of a function in the kernel's list of symbols; `None` where it is missing or hidden.
fn symbol(symbols: &str, name: &str) -> Option<u64> {
    let line = symbols.lines().find(|line| line.split_whitespace().nth(2) == Some(name))?;
    u64::from_str_radix(line.split_whitespace().next()?, 16).ok().filter(|address| *address != 0)
}

/// Largest number of CPUs: all CPU numbers are below this.
fn possible_cpus() -> Result<usize, ReporterError> {
    const POSSIBLE: &str = "/sys/devices/system/cpu/possible";
    // kernel file
    let text = fs::read_to_string(POSSIBLE).map_err(ReporterError::io("read", POSSIBLE))?;
    let last = text.trim().rsplit([',', '-']).next().and_then(|n| n.parse::<usize>().ok());
    last.map(|n| n + 1).ok_or_else(|| ReporterError::io("read", POSSIBLE)(io::ErrorKind::InvalidData.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_symbol_is_found_unless_it_is_hidden() {
        let list = "0000000000000000 t hidden\nffffffff81 T hrtimer_wakeup_x\nffffffff82 t hrtimer_wakeup\n";
        assert_eq!(symbol(list, WAKE), Some(0xff_ffff_ff82));
        assert_eq!(symbol(list, "hidden"), None);
        assert_eq!(symbol("", WAKE), None);
    }
}
