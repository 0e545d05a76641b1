//! Memory that is taken away while the engine reads it.
//!
//! A front end that is trusted with its memory can truncate the file behind it, and one with huge
//! pages can free a page for which there is no other. The next access raises SIGBUS, which would
//! end the process and so stop all VMs. The handler puts anonymous pages in place of such a
//! mapping and marks it as lost; the engine then gives the VM's queues up. Other accesses, and
//! errors of the memory itself (`BUS_MCEERR_AR`), end the process as ever.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, Once, PoisonError};

/// Mappings that can be watched at a time: more than the kernel gives a process.
pub(super) const MOST_WATCHED: usize = 65_536;

/// A place of a mapping. The length is 0 while it is free.
struct Place {
    start: AtomicUsize,
    len: AtomicUsize,
    /// Size of its pages, in bytes.
    page: AtomicUsize,
    lost: AtomicBool,
}

impl Place {
    const fn free() -> Self {
        Self {
            start: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            page: AtomicUsize::new(0),
            lost: AtomicBool::new(false),
        }
    }
}

static PLACES: [Place; MOST_WATCHED] = [const { Place::free() }; MOST_WATCHED];

/// Serializes changes of the places; the handler only reads them.
static CHANGES: Mutex<()> = Mutex::new(());

/// Number of mappings that were lost so far, so that a check costs one load while there is none.
static LOSSES: AtomicUsize = AtomicUsize::new(0);

/// Whether any mapping was lost since the start.
pub(super) fn has_losses() -> bool {
    LOSSES.load(Ordering::Relaxed) != 0
}

/// A mapping that the handler knows, until this is dropped.
#[derive(Debug)]
pub(super) struct Watched {
    place: usize,
}

impl Watched {
    /// Watches a mapping of whole pages; `None` when too many are watched.
    pub(super) fn new(start: usize, len: usize, page: usize) -> Option<Self> {
        static INSTALLED: Once = Once::new();
        INSTALLED.call_once(install);
        let _guard = CHANGES.lock().unwrap_or_else(PoisonError::into_inner);
        let (place, free) = PLACES.iter().enumerate().find(|(_, p)| p.len.load(Ordering::Relaxed) == 0)?;
        free.lost.store(false, Ordering::Relaxed);
        free.page.store(page, Ordering::Release);
        free.start.store(start, Ordering::Release);
        free.len.store(len, Ordering::Release);
        Some(Self { place })
    }

    /// Whether the mapping was replaced.
    pub(super) fn is_lost(&self) -> bool {
        PLACES[self.place].lost.load(Ordering::Relaxed)
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let _guard = CHANGES.lock().unwrap_or_else(PoisonError::into_inner);
        PLACES[self.place].len.store(0, Ordering::Release);
    }
}

/// The place whose mapping has this address, with its extent. The thread that asks uses the
/// mapping, so its place does not change; others may, so an extent counts only when it is the same
/// twice.
fn find(address: usize) -> Option<(&'static Place, usize, usize)> {
    PLACES.iter().find_map(|place| {
        let extent = || (place.start.load(Ordering::Acquire), place.len.load(Ordering::Acquire));
        let (start, len) = extent();
        let is_there = address.wrapping_sub(start) < len && extent() == (start, len);
        is_there.then_some((place, start, len))
    })
}

fn install() {
    let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = on_sigbus;
    // SAFETY: a zeroed structure is valid; the handler makes calls that a signal handler may make.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut());
    }
}

/// Replaces the mapping that was accessed; otherwise restores the default action, which ends the
/// process as soon as the access is made again.
extern "C" fn on_sigbus(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid structure with the address of the access.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    let found = if code == libc::BUS_ADRERR { find(address) } else { None };
    if let Some((place, start, len)) = found {
        let page = place.page.load(Ordering::Acquire).max(1);
        // A host that commits no more memory may refuse the whole.
        if replace(start, len) || replace(address - (address - start) % page, page) {
            place.lost.store(true, Ordering::Relaxed);
            LOSSES.fetch_add(1, Ordering::Relaxed);
            return;
        }
    }
    // SAFETY: as in `install`.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = libc::SIG_DFL;
        libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut());
        // From kill(2), or a memory error found without an access: no access would repeat it.
        if code <= 0 || code == libc::BUS_MCEERR_AO {
            libc::raise(libc::SIGBUS);
        }
    }
}

/// Puts anonymous memory in place of a part of a mapping; makes only calls that a signal handler
/// may make.
fn replace(start: usize, len: usize) -> bool {
    let flags = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: whole pages of a mapping of guest memory, which is accessed by volatile accesses
    // only; they stay mapped.
    let at = unsafe { libc::mmap(start as *mut libc::c_void, len, access, flags, -1, 0) };
    at != libc::MAP_FAILED
}
