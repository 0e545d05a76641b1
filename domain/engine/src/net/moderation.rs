//! Moderation of receive notifications.
//!
//! As `rx-usecs` of a network card (ethtool(8), `-C`): at least an interval lies between two
//! notifications, and the frames that arrive meanwhile are announced by the next one. The first one
//! after a pause is not delayed, and neither is one of an urgent frame.

use rtvirtio_units::Nanos;

/// The notifications of one VM.
#[derive(Debug, Default)]
pub struct Moderation {
    /// Earliest time of the next notification.
    not_before: Nanos,
    /// Whether it announces an urgent frame.
    urgent: bool,
}

impl Moderation {
    /// Notes an urgent frame in the VM's buffers.
    pub fn note_urgent(&mut self) {
        self.urgent = true;
    }

    /// End of the delay of a notification; `None` when it is sent now.
    pub fn holds_until(&self, now: Nanos, interval: Nanos) -> Option<Nanos> {
        // An interval that was shortened applies at once.
        let until = self.not_before.min(Nanos(now.0.saturating_add(interval.0)));
        (!self.urgent && until > now).then_some(until)
    }

    /// Records that a notification was due; `notified` when the VM wanted and got it.
    pub fn on_due(&mut self, now: Nanos, interval: Nanos, notified: bool) {
        self.urgent = false;
        if notified {
            self.not_before = Nanos(now.0.saturating_add(interval.0));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Nanos = Nanos(200);

    #[test]
    fn one_after_a_pause_goes_at_once_and_the_next_one_waits() {
        let mut moderation = Moderation::default();
        assert_eq!(moderation.holds_until(Nanos(1_000), INTERVAL), None);
        moderation.on_due(Nanos(1_000), INTERVAL, true);
        assert_eq!(moderation.holds_until(Nanos(1_001), INTERVAL), Some(Nanos(1_200)));
        assert_eq!(moderation.holds_until(Nanos(1_199), INTERVAL), Some(Nanos(1_200)));
        assert_eq!(moderation.holds_until(Nanos(1_200), INTERVAL), None);
    }

    /// A VM that polls its queue wants none: the next one is not delayed for it.
    #[test]
    fn one_that_the_vm_did_not_want_delays_none() {
        let mut moderation = Moderation::default();
        moderation.on_due(Nanos(1_000), INTERVAL, false);
        assert_eq!(moderation.holds_until(Nanos(1_001), INTERVAL), None);
    }

    #[test]
    fn one_of_an_urgent_frame_does_not_wait() {
        let mut moderation = Moderation::default();
        moderation.on_due(Nanos(1_000), INTERVAL, true);
        moderation.note_urgent();
        assert_eq!(moderation.holds_until(Nanos(1_001), INTERVAL), None);
        moderation.on_due(Nanos(1_001), INTERVAL, true);
        assert_eq!(moderation.holds_until(Nanos(1_002), INTERVAL), Some(Nanos(1_201)));
    }

    /// Under constant load one notification is sent in each interval.
    #[test]
    fn a_flood_is_announced_once_in_each_interval() {
        let (mut moderation, mut count) = (Moderation::default(), 0);
        for now in (0..100_000).step_by(50).map(Nanos) {
            if moderation.holds_until(now, INTERVAL).is_none() {
                moderation.on_due(now, INTERVAL, true);
                count += 1;
            }
        }
        assert_eq!(count, 100_000 / INTERVAL.0);
    }

    #[test]
    fn a_shorter_interval_holds_at_once() {
        let mut moderation = Moderation::default();
        moderation.on_due(Nanos(0), Nanos(10_000), true);
        assert_eq!(moderation.holds_until(Nanos(100), Nanos(50)), Some(Nanos(150)));
        assert_eq!(moderation.holds_until(Nanos(100), Nanos(0)), None);
    }
}
