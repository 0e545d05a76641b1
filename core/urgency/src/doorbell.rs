//! Notices from a guest, bounded.

use rtvirtio_units::Nanos;

/// The doorbell of one VM. A guest may ring as often as it likes: what exceeds [`Doorbell::MOST`]
/// notices in a [`Doorbell::WINDOW`] mutes the bell to the window's end, and is only counted. The
/// host then looks at its own times.
#[derive(Clone, Debug, Default)]
pub struct Doorbell {
    window: u64,
    in_window: u64,
    rung: u64,
    ignored: u64,
    floods: u64,
}

impl Doorbell {
    /// In which notices are counted together.
    pub const WINDOW: Nanos = Nanos::from_millis(10);
    /// Notices in it that are heard. A vCPU with an urgent task each 250 us rings 80 times, before
    /// and after it.
    pub const MOST: u64 = 200;

    /// Counts `n` notices at `now`; whether the host is to look.
    pub fn ring(&mut self, now: Nanos, n: u64) -> bool {
        let window = now.0 / Self::WINDOW.0;
        if window != self.window {
            (self.window, self.in_window) = (window, 0);
        }
        let before = self.in_window;
        self.in_window = before.saturating_add(n);
        self.rung = self.rung.saturating_add(n);
        let heard = n.min(Self::MOST.saturating_sub(before));
        self.ignored = self.ignored.saturating_add(n - heard);
        if before <= Self::MOST && self.in_window > Self::MOST {
            self.floods = self.floods.saturating_add(1);
        }
        heard > 0
    }

    /// Until when it is muted; `None` while it is heard.
    #[must_use]
    pub fn muted_until(&self, now: Nanos) -> Option<Nanos> {
        let is_muted = now.0 / Self::WINDOW.0 == self.window && self.in_window >= Self::MOST;
        is_muted.then(|| Nanos((self.window + 1).saturating_mul(Self::WINDOW.0)))
    }

    /// Notices so far.
    #[must_use]
    pub fn rung(&self) -> u64 {
        self.rung
    }

    /// Those of them that were ignored.
    #[must_use]
    pub fn ignored(&self) -> u64 {
        self.ignored
    }

    /// Windows in which there were too many.
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
        assert!(bell.ring(at(1), Doorbell::MOST - 1) && bell.muted_until(at(1)).is_none());
        assert!(bell.ring(at(2), 3), "one of them is heard");
        assert_eq!(bell.muted_until(at(2)), Some(at(10)));
        assert!(!bell.ring(at(9), u64::MAX), "and no overflow");
        assert!(bell.ring(at(10), 1) && bell.muted_until(at(10)).is_none());
        assert_eq!((bell.floods(), bell.rung(), bell.ignored()), (1, u64::MAX, u64::MAX));
    }
}
