//! Discards and zeroing: one piece at a time for the whole device, sized and paced by measured
//! time.
//!
//! The time of a deallocation depends on the file system and the device, not on its length: a hole
//! of 16 MiB may be a change in one extent, or a journal commit that sends discards to the device.
//! So no cost is assumed:
//!
//! - A piece holds no place in the window. One is at the device at a time, whatever the number of
//!   VMs.
//! - The size of a VM's pieces adapts: it halves after a piece that took longer than declared
//!   ([`crate::Cost::discard_ns`]) and doubles after one that took at most half of that, but for a
//!   minute does not return to a size that took too long. A guest chooses its ranges, so a piece
//!   can still take longer than declared: such overruns are counted, and bounds do not cover them.
//! - While other VMs use the device, the next piece waits until deallocations are within their
//!   share: a piece that took `t` is followed by a pause of `t (1 - s) / s`. In an interval of
//!   length T they take at most `C + s T`, with C one piece, which is what [`crate::bound`] charges
//!   for them.
//! - VMs take turns by virtual time, measured time over weight: the least goes next (start-time
//!   fair queueing, Goyal, Vin and Cheng, IEEE/ACM ToN 5(5), 1997).

use oxc_index::{IndexVec, index_vec};
use rtvirtio_units::Nanos;

use crate::id::VmId;

/// A VM whose last transfer completed this long ago does not use the device.
pub const IDLE_AFTER: Nanos = Nanos(10_000_000);

/// Statistics of measured deallocations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeallocationStatus {
    /// Number of pieces completed.
    pub pieces: u64,
    /// Longest time of a piece.
    pub longest: Nanos,
    /// Pieces that took longer than declared: bounds do not cover them.
    pub overruns: u64,
}

/// Time without an overrun after which pieces may double again.
const RECOVERY: Nanos = Nanos(60_000_000_000);
/// Piece sizes of one VM, in bytes.
#[derive(Clone, Copy, Debug)]
struct Size {
    next: u64,
    /// Upper limit of `next`.
    most: u64,
    /// Time of the last overrun, or of the last raise of `most`.
    since: Nanos,
}

/// Admits deallocations of a device, one piece at a time.
#[derive(Debug)]
pub struct DeallocationPacer {
    /// Submission time of the piece at the device.
    submitted_at: Option<Nanos>,
    /// End of the pause after the last piece.
    not_before: Nanos,
    /// No piece can go before this, unless [`DeallocationPacer::recheck_now`] is called.
    recheck_at: Nanos,
    /// Piece sizes of each VM.
    sizes: IndexVec<VmId, Size>,
    least: u64,
    most: u64,
    /// Declared longest time of one piece, in ns.
    declared: u64,
    /// Percent of the device's time while other VMs use it.
    share: u32,
    /// Virtual time of each VM: measured ns over weight, in thousandths.
    virtual_times: IndexVec<VmId, u64>,
    /// Virtual time of the VM that was served last.
    min_virtual_time: u64,
    status: DeallocationStatus,
}

impl DeallocationPacer {
    /// For `vms` VMs; pieces of `least` to `most` bytes that take no longer than `declared` ns;
    /// `share` in percent.
    pub fn new(vms: usize, (least, most): (u64, u64), declared: u64, share: u32) -> Self {
        let most = most.max(least);
        Self {
            submitted_at: None,
            not_before: Nanos(0),
            recheck_at: Nanos(0),
            sizes: index_vec![Size { next: least, most, since: Nanos(0) }; vms],
            least,
            most,
            declared,
            share: share.clamp(1, 100),
            virtual_times: index_vec![0; vms],
            min_virtual_time: 0,
            status: DeallocationStatus::default(),
        }
    }

    /// Sets the share; the piece at the device and all measurements stay.
    pub fn set_share(&mut self, share: u32) {
        self.share = share.clamp(1, 100);
        self.recheck_now();
    }

    /// Resets a place for another VM, one of the known places or the next: its pieces start at the
    /// smallest size.
    pub fn replace(&mut self, vm: VmId) {
        let size = Size { next: self.least, most: self.most, since: Nanos(0) };
        if vm == self.sizes.next_idx() {
            self.sizes.push(size);
            self.virtual_times.push(self.min_virtual_time);
        } else if let (Some(sizes), Some(used)) = (self.sizes.get_mut(vm), self.virtual_times.get_mut(vm)) {
            (*sizes, *used) = (size, self.min_virtual_time);
        }
        self.recheck_now();
    }

    /// Whether a piece is at the device.
    pub fn is_busy(&self) -> bool {
        self.submitted_at.is_some()
    }

    /// Time at which the next piece may go, given that other VMs use the device until `idle_from`.
    pub fn ready_at(&self, idle_from: Nanos) -> Nanos {
        self.not_before.min(idle_from)
    }

    /// Time set by [`DeallocationPacer::recheck_after`]; `None` when a search is due.
    pub fn recheck_pending(&self, now: Nanos) -> Option<Nanos> {
        (now < self.recheck_at).then_some(self.recheck_at)
    }

    /// Skips searches until `until`, because no piece can go before.
    pub fn recheck_after(&mut self, until: Nanos) {
        self.recheck_at = until;
    }

    /// Lets the next call search again: a VM became idle, or has another deallocation.
    pub fn recheck_now(&mut self) {
        self.recheck_at = Nanos(0);
    }

    /// Size of a VM's next piece in bytes.
    pub fn piece_len(&self, vm: VmId) -> u64 {
        self.sizes.get(vm).map_or(self.least, |size| size.next)
    }

    /// Virtual time of a VM; the least goes next.
    pub fn virtual_time(&self, vm: VmId) -> u64 {
        self.virtual_times.get(vm).copied().unwrap_or(u64::MAX)
    }

    /// Records the first deallocation of a VM without any. An idle VM accumulates no credit.
    pub fn activate(&mut self, vm: VmId) {
        self.recheck_now();
        if let Some(used) = self.virtual_times.get_mut(vm) {
            *used = (*used).max(self.min_virtual_time);
        }
    }

    /// Records that a piece of this VM is submitted.
    pub fn submit(&mut self, vm: VmId, now: Nanos) {
        self.submitted_at = Some(now);
        self.min_virtual_time = self.min_virtual_time.max(self.virtual_time(vm).min(u64::MAX - 1));
    }

    /// Records the completion of this VM's piece of `len` bytes; returns its time.
    pub fn complete(&mut self, now: Nanos, (vm, weight): (VmId, u32), len: u64) -> Nanos {
        let Some(submitted_at) = self.submitted_at.take() else { return Nanos(0) };
        let took = now.0.saturating_sub(submitted_at.0);
        let pause = u128::from(took) * u128::from(100 - self.share) / u128::from(self.share);
        self.not_before = Nanos(now.0.saturating_add(u64::try_from(pause).unwrap_or(u64::MAX)));
        if let Some(used) = self.virtual_times.get_mut(vm) {
            let virtual_time = u128::from(took) * 1_000 / u128::from(weight.max(1));
            *used = used.saturating_add(u64::try_from(virtual_time).unwrap_or(u64::MAX));
        }
        self.recheck_now();
        self.status.pieces += 1;
        self.status.longest = self.status.longest.max(Nanos(took));
        self.status.overruns += u64::from(took > self.declared);
        self.adapt_piece_len(now, vm, took, len);
        Nanos(took)
    }

    fn adapt_piece_len(&mut self, now: Nanos, vm: VmId, took: u64, len: u64) {
        let Some(size) = self.sizes.get_mut(vm) else { return };
        if took > self.declared {
            // Sizes are the smallest one times a power of two, so that pieces end on block
            // boundaries of the device.
            while size.next > self.least && size.next > len / 2 {
                size.next /= 2;
            }
            (size.most, size.since) = (size.next, now);
        } else if took <= self.declared / 2 && len == size.next {
            if size.next >= size.most && now.0.saturating_sub(size.since.0) > RECOVERY.0 {
                (size.most, size.since) = (size.most.saturating_mul(2).min(self.most), now);
            }
            if size.next.saturating_mul(2) <= size.most {
                size.next *= 2;
            }
        }
    }

    /// Statistics of all measurements so far.
    pub fn status(&self) -> DeallocationStatus {
        self.status
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: VmId = VmId(0);
    const SECOND: VmId = VmId(1);

    /// Submits a piece of VM 0 that takes `took` ns.
    fn piece(pacer: &mut DeallocationPacer, at: u64, took: u64) -> u64 {
        let len = pacer.piece_len(FIRST);
        pacer.submit(FIRST, Nanos(at));
        pacer.complete(Nanos(at + took), (FIRST, 100), len);
        pacer.piece_len(FIRST)
    }

    #[test]
    fn pieces_shrink_when_they_take_long_and_grow_when_they_do_not() {
        let mut pacer = DeallocationPacer::new(2, (64, 1_024), 1_000, 10);
        for expected in [128, 256, 512, 1_024, 1_024] {
            assert_eq!(piece(&mut pacer, 0, 200), expected);
        }
        // The short last piece of a request is no evidence for longer pieces; each VM has sizes of
        // its own.
        pacer.submit(FIRST, Nanos(0));
        pacer.complete(Nanos(100), (FIRST, 100), 10);
        assert_eq!((pacer.piece_len(FIRST), pacer.piece_len(SECOND)), (1_024, 64));
        assert_eq!(piece(&mut pacer, 0, 5_000), 512);
        // A guest with cheap and expensive ranges does not get long pieces back at once.
        assert_eq!(piece(&mut pacer, 10_000, 10), 512);
        assert_eq!(piece(&mut pacer, RECOVERY.0 + 10_000, 10), 1_024);
        for _ in 0..6 {
            piece(&mut pacer, 2 * RECOVERY.0, 5_000);
        }
        assert_eq!((pacer.piece_len(FIRST), pacer.status().overruns), (64, 7));
        // A short piece that overran counts in full.
        let mut pacer = DeallocationPacer::new(1, (64, 1_024), 1_000, 10);
        (0..4).for_each(|_| assert!(piece(&mut pacer, 0, 1) > 64));
        pacer.submit(FIRST, Nanos(0));
        pacer.complete(Nanos(9_000), (FIRST, 100), 200);
        assert_eq!(pacer.piece_len(FIRST), 64);
    }

    #[test]
    fn the_pause_leaves_the_share() {
        let mut pacer = DeallocationPacer::new(1, (64, 64), 1_000, 20);
        pacer.submit(FIRST, Nanos(1_000));
        assert!(pacer.is_busy());
        pacer.complete(Nanos(2_000), (FIRST, 100), 64);
        // 1 us of 5.
        assert_eq!(pacer.ready_at(Nanos(u64::MAX)), Nanos(6_000));
        assert_eq!(pacer.ready_at(Nanos(3_000)), Nanos(3_000), "quiet before");
    }

    #[test]
    fn turns_follow_measured_time_over_weight() {
        let mut pacer = DeallocationPacer::new(2, (64, 64), 1_000, 100);
        let mut time = [0u64; 2];
        for _ in 0..1_000 {
            let is_second = pacer.virtual_time(SECOND) < pacer.virtual_time(FIRST);
            // The pieces of VM 0 take three times as long; it has twice the weight.
            let (vm, took, weight) = if is_second { (SECOND, 100, 100) } else { (FIRST, 300, 200) };
            pacer.submit(vm, Nanos(0));
            pacer.complete(Nanos(took), (vm, weight), 64);
            time[usize::from(is_second)] += took;
        }
        let ratio = time[0] as f64 / time[1] as f64;
        assert!((1.9..2.1).contains(&ratio), "{time:?}");
        // After its idle time a VM does not monopolise the device.
        let mut pacer = DeallocationPacer::new(2, (64, 64), 1_000, 100);
        for _ in 0..100 {
            pacer.submit(FIRST, Nanos(0));
            pacer.complete(Nanos(100), (FIRST, 100), 64);
        }
        pacer.activate(SECOND);
        assert!(pacer.virtual_time(FIRST) - pacer.virtual_time(SECOND) <= 1_000);
    }
}
