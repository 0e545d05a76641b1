//! Waiting of each VM by cause: the time in which a VM had requests queued while pieces of another
//! were at the device. Exact, from the times at which requests are queued and pieces come and go.
//!
//! For each VM a clock runs while pieces of it are at the device. When a VM begins to wait, all
//! clocks are read; when its wait ends, their progress is added to its row. So a request that finds
//! others queued, and a piece that finds others at the device, cost nothing but a count.

use oxc_index::Idx;
use rtvirtio_units::Nanos;

use crate::id::VmId;

/// Number of columns; the last one is the sum of all places from there on.
pub const WATCHED: usize = 64;

/// Waiting time of one VM, since the matrix was made or the VM was attached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waits {
    /// Time in which the VM had requests that were not completely submitted.
    pub queued: Nanos,
    /// Part of it in which no piece of any VM was at the device: caps and pacing.
    pub idle: Nanos,
    /// Part of it in which pieces of each place were at the device, its own included. Pieces of
    /// several VMs at once count for each.
    pub by: Vec<Nanos>,
}

/// Clock that runs while at least one piece is at the device.
#[derive(Clone, Copy, Debug, Default)]
struct Clock {
    /// Reading at the last stop, in ns.
    stopped_at: u64,
    /// Time of the last start; `None` while stopped.
    since: Option<Nanos>,
    inflight: u32,
}

impl Clock {
    fn read(&self, now: Nanos) -> u64 {
        self.stopped_at + self.since.map_or(0, |since| now.0 - since.0)
    }

    fn on_submit(&mut self, now: Nanos) {
        self.inflight += 1;
        self.since.get_or_insert(now);
    }

    fn on_complete(&mut self, now: Nanos) {
        self.inflight = self.inflight.saturating_sub(1);
        if self.inflight == 0 {
            self.stopped_at = self.read(now);
            self.since = None;
        }
    }
}

#[derive(Clone, Debug)]
struct Row {
    /// Begin of the present wait, with the reading of the clock of all VMs.
    since: Option<(Nanos, u64)>,
    /// Readings of all clocks at that time.
    begin: [u64; WATCHED],
    queued: u64,
    /// Time of waits in which any VM had pieces at the device.
    busy: u64,
    by: [u64; WATCHED],
}

impl Row {
    const EMPTY: Self = Self { since: None, begin: [0; WATCHED], queued: 0, busy: 0, by: [0; WATCHED] };
}

/// Waiting of all VMs of a device, in memory of a fixed size.
#[derive(Clone, Debug)]
pub struct WaitMatrix {
    /// Latest time seen, because time must not run backwards.
    now: Nanos,
    places: usize,
    clocks: [Clock; WATCHED],
    any: Clock,
    rows: Box<[Row]>,
}

/// Column of a VM.
fn slot(vm: VmId) -> usize {
    vm.index().min(WATCHED - 1)
}

impl WaitMatrix {
    /// Matrix of a device without pieces and requests, with so many places.
    #[must_use]
    pub fn new(places: usize) -> Self {
        Self {
            now: Nanos(0),
            places,
            clocks: [Clock::default(); WATCHED],
            any: Clock::default(),
            rows: vec![Row::EMPTY; WATCHED].into_boxed_slice(),
        }
    }

    fn seen(&mut self, now: Nanos) -> Nanos {
        self.now = self.now.max(now);
        self.now
    }

    /// Whether the place has a row and a column of its own.
    fn has_row(&self, vm: VmId) -> bool {
        vm.index() < self.places && (vm.index() < WATCHED - 1 || self.places <= WATCHED)
    }

    /// Records that a VM without queued requests has some now.
    pub fn begin(&mut self, vm: VmId, now: Nanos) {
        let now = self.seen(now);
        if !self.has_row(vm) {
            return;
        }
        let Some(row) = self.rows.get_mut(vm.index()).filter(|row| row.since.is_none()) else { return };
        row.since = Some((now, self.any.read(now)));
        for (begin, clock) in row.begin.iter_mut().zip(&self.clocks).take(self.places) {
            *begin = clock.read(now);
        }
    }

    /// Records that a VM has no queued requests any more. Without effect where it had none.
    pub fn end(&mut self, vm: VmId, now: Nanos) {
        let now = self.seen(now);
        let Some(row) = self.rows.get_mut(vm.index()) else { return };
        let Some((since, busy)) = row.since.take() else { return };
        row.queued += now.0 - since.0;
        row.busy += self.any.read(now) - busy;
        let clocks = self.clocks.iter().take(self.places);
        for ((by, begin), clock) in row.by.iter_mut().zip(&row.begin).zip(clocks) {
            *by += clock.read(now) - begin;
        }
    }

    /// Records that a piece goes to the device.
    pub fn on_submit(&mut self, vm: VmId, now: Nanos) {
        let now = self.seen(now);
        self.any.on_submit(now);
        self.clocks[slot(vm)].on_submit(now);
    }

    /// Records that a piece completes.
    pub fn on_complete(&mut self, vm: VmId, now: Nanos) {
        let now = self.seen(now);
        self.any.on_complete(now);
        self.clocks[slot(vm)].on_complete(now);
    }

    /// Resets a place for another VM, of which nothing is queued or at the device: waits caused by
    /// the VM before it are dropped.
    pub fn attach(&mut self, vm: VmId) {
        let vm = vm.index();
        let places = self.places.max(vm + 1);
        let is_shared = vm >= WATCHED - 1 && places > WATCHED;
        self.places = places;
        if is_shared {
            return;
        }
        self.clocks[vm] = Clock::default();
        self.rows[vm] = Row::EMPTY;
        for row in &mut self.rows {
            (row.by[vm], row.begin[vm]) = (0, 0);
        }
    }

    /// Waiting of a VM until now; `None` for a place without a row of its own.
    #[must_use]
    pub fn waits_of(&self, vm: VmId, now: Nanos) -> Option<Waits> {
        let now = self.now.max(now);
        let row = self.rows.get(vm.index()).filter(|_| self.has_row(vm))?;
        let (queued, busy) =
            row.since.map_or((0, 0), |(since, busy)| (now.0 - since.0, self.any.read(now) - busy));
        let is_queued = row.since.is_some();
        let by = row.by.iter().zip(&row.begin).zip(&self.clocks).take(self.places);
        let by =
            by.map(|((by, begin), clock)| Nanos(by + if is_queued { clock.read(now) - begin } else { 0 }));
        let (queued, busy) = (row.queued + queued, row.busy + busy);
        Some(Waits { queued: Nanos(queued), idle: Nanos(queued - busy), by: by.collect() })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn by(matrix: &WaitMatrix, vm: u16, now: u64) -> (u64, u64, Vec<u64>) {
        let waits = matrix.waits_of(VmId(vm), Nanos(now)).unwrap();
        (waits.queued.0, waits.idle.0, waits.by.into_iter().map(|ns| ns.0).collect())
    }

    #[test]
    fn a_request_waits_for_those_whose_pieces_are_at_the_device() {
        let mut m = WaitMatrix::new(3);
        m.on_submit(VmId(1), Nanos(100));
        m.begin(VmId(0), Nanos(150));
        m.on_submit(VmId(2), Nanos(160));
        m.on_complete(VmId(1), Nanos(200));
        // Up to now, while it still waits.
        assert_eq!(by(&m, 0, 210), (60, 0, vec![0, 50, 50]));
        m.on_complete(VmId(2), Nanos(220));
        m.end(VmId(0), Nanos(230));
        m.on_submit(VmId(0), Nanos(230));
        // From 220 on a cap delayed it: nothing was at the device.
        assert_eq!(by(&m, 0, 900), (80, 10, vec![0, 50, 60]));
        assert_eq!(by(&m, 1, 900), (0, 0, vec![0, 0, 0]));
        // Time without queued requests does not count, however busy the device is.
        m.on_submit(VmId(2), Nanos(1_000));
        m.begin(VmId(0), Nanos(2_000));
        m.end(VmId(0), Nanos(2_005));
        assert_eq!(by(&m, 0, 3_000), (85, 10, vec![5, 50, 65]));
    }

    #[test]
    fn another_vm_in_a_place_has_waited_for_nobody_and_nobody_for_it() {
        let mut m = WaitMatrix::new(2);
        m.on_submit(VmId(1), Nanos(0));
        m.begin(VmId(0), Nanos(0));
        m.on_complete(VmId(1), Nanos(50));
        m.attach(VmId(1));
        m.on_submit(VmId(1), Nanos(60));
        assert_eq!(by(&m, 0, 70), (70, 10, vec![0, 10]));
        m.attach(VmId(2));
        m.on_submit(VmId(2), Nanos(70));
        m.end(VmId(0), Nanos(80));
        assert_eq!(by(&m, 0, 80), (80, 10, vec![0, 20, 10]));
        assert_eq!(m.waits_of(VmId(3), Nanos(80)), None);
    }

    #[test]
    fn time_that_runs_backwards_and_places_beyond_the_last() {
        let mut m = WaitMatrix::new(200);
        m.begin(VmId(5), Nanos(100));
        m.on_submit(VmId(150), Nanos(50));
        m.on_submit(VmId(199), Nanos(120));
        m.on_complete(VmId(150), Nanos(130));
        m.end(VmId(5), Nanos(0));
        let waits = m.waits_of(VmId(5), Nanos(0)).unwrap();
        assert_eq!((waits.queued, waits.by[WATCHED - 1]), (Nanos(30), Nanos(30)));
        m.begin(VmId(150), Nanos(200));
        m.end(VmId(150), Nanos(300));
        assert_eq!(m.waits_of(VmId(150), Nanos(300)), None);
        m.attach(VmId(150));
        assert_eq!(m.waits_of(VmId(5), Nanos(400)).unwrap().by[WATCHED - 1], Nanos(30));
    }

    proptest! {
        /// Equal to a count nanosecond by nanosecond.
        #[test]
        fn it_is_what_a_count_of_each_moment_gives(
            steps in prop::collection::vec((0usize..4, 0u8..4, 1u64..6), 1..80),
        ) {
            const N: usize = 4;
            let mut m = WaitMatrix::new(N);
            let (mut now, mut waiting, mut inflight) = (0, [false; N], [0u32; N]);
            let (mut queued, mut idle, mut by) = ([0; N], [0; N], [[0; N]; N]);
            for (vm, what, pause) in steps {
                match what {
                    0 if !waiting[vm] => { waiting[vm] = true; m.begin(VmId::from_usize(vm), Nanos(now)); }
                    1 => { waiting[vm] = false; m.end(VmId::from_usize(vm), Nanos(now)); }
                    2 => { inflight[vm] += 1; m.on_submit(VmId::from_usize(vm), Nanos(now)); }
                    3 if inflight[vm] > 0 => { inflight[vm] -= 1; m.on_complete(VmId::from_usize(vm), Nanos(now)); }
                    _ => {}
                }
                for _ in 0..pause {
                    now += 1;
                    for i in (0..N).filter(|i| waiting[*i]) {
                        queued[i] += 1;
                        idle[i] += u64::from(inflight == [0; N]);
                        for j in 0..N {
                            by[i][j] += u64::from(inflight[j] > 0);
                        }
                    }
                }
                for i in 0..N {
                    let waits = m.waits_of(VmId::from_usize(i), Nanos(now)).unwrap();
                    prop_assert_eq!((waits.queued.0, waits.idle.0), (queued[i], idle[i]));
                    prop_assert_eq!(waits.by.iter().map(|ns| ns.0).collect::<Vec<_>>(), by[i].to_vec());
                }
            }
        }
    }
}
