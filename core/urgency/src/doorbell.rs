//! Rate limit on a guest's notifications.

use rtvirtio_units::Nanos;

/// The doorbell of one VM. A guest may ring it without limit: notifications beyond
/// [`Doorbell::MAX_PER_WINDOW`] in a [`Doorbell::WINDOW`] are only counted, to the window's end.
/// The host then polls by its own timers.
#[derive(Clone, Debug, Default)]
pub struct Doorbell {
    window: u64,
    in_window: u64,
    rung: u64,
    ignored: u64,
    floods: u64,
}

impl Doorbell {
    /// Length of a window of the limit.
    pub const WINDOW: Nanos = Nanos::from_millis(10);
    /// Notifications in a window that are handled. A vCPU with an urgent task each 250 us rings 80
    /// times, before and after it.
    pub const MAX_PER_WINDOW: u64 = 200;

    /// Counts `n` notifications at `now`; returns whether the host is to read the reports.
    pub fn ring(&mut self, now: Nanos, n: u64) -> bool {
        let window = now.0 / Self::WINDOW.0;
        if window != self.window {
            (self.window, self.in_window) = (window, 0);
        }
        let before = self.in_window;
        self.in_window = before.saturating_add(n);
        self.rung = self.rung.saturating_add(n);
        let heard = n.min(Self::MAX_PER_WINDOW.saturating_sub(before));
        self.ignored = self.ignored.saturating_add(n - heard);
        if before <= Self::MAX_PER_WINDOW && self.in_window > Self::MAX_PER_WINDOW {
            self.floods = self.floods.saturating_add(1);
        }
        heard > 0
    }

    /// End of the window where its limit is reached; `None` while notifications are handled.
    #[must_use]
    pub fn muted_until(&self, now: Nanos) -> Option<Nanos> {
        let is_muted = now.0 / Self::WINDOW.0 == self.window && self.in_window >= Self::MAX_PER_WINDOW;
        is_muted.then(|| Nanos((self.window + 1).saturating_mul(Self::WINDOW.0)))
    }

    /// Number of notifications so far.
    #[must_use]
    pub fn rung(&self) -> u64 {
        self.rung
    }

    /// Number of notifications that were ignored.
    #[must_use]
    pub fn ignored(&self) -> u64 {
        self.ignored
    }

    /// Number of windows in which the limit was exceeded.
    #[must_use]
    pub fn floods(&self) -> u64 {
        self.floods
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_counted_and_muted_to_the_end_of_its_window() {
        let mut bell = Doorbell::default();
        let at = |ms| Nanos::from_millis(ms);
        assert!(bell.ring(at(1), Doorbell::MAX_PER_WINDOW - 1) && bell.muted_until(at(1)).is_none());
        assert!(bell.ring(at(2), 3), "one of them is heard");
        assert_eq!(bell.muted_until(at(2)), Some(at(10)));
        assert!(!bell.ring(at(9), u64::MAX), "and no overflow");
        assert!(bell.ring(at(10), 1) && bell.muted_until(at(10)).is_none());
        assert_eq!((bell.floods(), bell.rung(), bell.ignored()), (1, u64::MAX, u64::MAX));
    }
}
