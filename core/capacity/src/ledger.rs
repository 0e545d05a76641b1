//! The reservations on one device or link, ready for the exact test of one more.

use rtvirtio_sched::bound::EdfRoom;

use crate::Reserve;

/// Slack for rounding, ns: the test never admits what the scheduler's admission refuses.
const MARGIN: f64 = 1e-3;

/// The reservations of one device or link, by deadline.
///
/// The test of a candidate takes one pass: the full admission
/// ([`DiskCapacity::admit`](crate::DiskCapacity::admit)) computes every bound, and is cubic in the
/// reservations.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ledger {
    all: Vec<Entry>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Entry {
    deadline: f64,
    burst: f64,
    rate: f64,
    spare: f64,
}

impl From<&Reserve> for Entry {
    fn from(r: &Reserve) -> Self {
        let (deadline, burst) = (r.deadline.0 as f64, r.burst.0 as f64);
        Self { deadline, burst, rate: r.share.0, spare: r.spare.0 }
    }
}

/// Demand as a line in t: `base + rate t`.
#[derive(Clone, Copy, Default)]
struct Demand {
    base: f64,
    rate: f64,
}

impl Demand {
    fn add(&mut self, e: &Entry) {
        self.base += e.burst - e.rate * e.deadline;
        self.rate += e.rate;
    }

    fn at(self, t: f64) -> f64 {
        self.base + self.rate * t
    }
}

impl Ledger {
    /// Whether these reservations all fit together with the present ones.
    #[must_use]
    pub fn fit<'r>(&self, room: EdfRoom, all: impl IntoIterator<Item = &'r Reserve>) -> bool {
        let mut all = all.into_iter();
        let Some(first) = all.next() else { return true };
        if !self.fits(room, first) {
            return false;
        }
        let Some(second) = all.next() else { return true };
        let mut with = self.clone();
        with.insert(first);
        std::iter::once(second).chain(all).all(|r| {
            let fits = with.fits(room, r);
            with.insert(r);
            fits
        })
    }

    /// Whether the reservation fits together with the present ones. `room` is that of the device or
    /// the link.
    #[must_use]
    pub fn fits(&self, room: EdfRoom, r: &Reserve) -> bool {
        let new = Entry::from(r);
        let mut demand = Demand::default();
        let mut earlier = true;
        for e in &self.all {
            if earlier && new.deadline < e.deadline {
                earlier = false;
                demand.add(&new);
                if demand.at(new.deadline) > room.at(new.deadline) - MARGIN {
                    return false;
                }
            }
            demand.add(e);
            // Deadlines before the new one are unaffected.
            if !earlier && demand.at(e.deadline) > room.at(e.deadline) - MARGIN {
                return false;
            }
        }
        if earlier {
            demand.add(&new);
            if demand.at(new.deadline) > room.at(new.deadline) - MARGIN {
                return false;
            }
        }
        let spare = self.all.iter().map(|e| e.spare).fold(new.spare, f64::max);
        demand.rate + spare <= room.speed
    }

    /// Adds a reservation without a test.
    pub fn insert(&mut self, r: &Reserve) {
        let new = Entry::from(r);
        let at = self.all.partition_point(|e| e.deadline <= new.deadline);
        self.all.insert(at, new);
    }

    /// Removes one that was added; `false` where there is none.
    pub fn remove(&mut self, r: &Reserve) -> bool {
        let of = Entry::from(r);
        let at = self.all.iter().position(|e| *e == of);
        at.map(|at| self.all.remove(at)).is_some()
    }

    /// Number of reservations present.
    #[must_use]
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// Whether no reservation is present.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }
}
