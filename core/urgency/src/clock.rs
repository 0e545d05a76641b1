//! Conversion of times of the guest's clock into the host's.

use rtvirtio_units::Nanos;

/// Number of windows that are kept.
const WINDOWS: usize = 8;

/// Estimates the difference between the host's clock and the guest's from times that the guest has
/// written. The host reads each some time after it was written, so the least difference in a window
/// is the best estimate, as in NTP's clock filter (RFC 5905, section 10). The guest's clock may run
/// at another rate, by the error of its calibration: the line through the first and the last window
/// is extrapolated.
///
/// A guest that writes false times spoils its own deadlines only.
#[derive(Clone, Debug, Default)]
pub struct GuestClock {
    /// Host time and least difference (host less guest) of each window, the oldest first.
    windows: Vec<(i64, i64)>,
    /// Number of the last window.
    current: u64,
}

impl GuestClock {
    pub const WINDOW: Nanos = Nanos::from_millis(250);

    /// Records that a time `guest` of the guest was read at `host`.
    pub fn observe(&mut self, host: Nanos, guest: Nanos) {
        let (Ok(host_ns), Ok(guest_ns)) = (i64::try_from(host.0), i64::try_from(guest.0)) else { return };
        let difference = host_ns - guest_ns;
        let window = host.0 / Self::WINDOW.0;
        match self.windows.last_mut() {
            Some(last) if self.current == window => {
                if difference < last.1 {
                    *last = (host_ns, difference);
                }
            }
            _ => {
                // Windows that old no longer show the rate.
                if window.saturating_sub(self.current) > WINDOWS as u64 {
                    self.windows.clear();
                }
                if self.windows.len() == WINDOWS {
                    self.windows.remove(0);
                }
                self.windows.push((host_ns, difference));
                self.current = window;
            }
        }
    }

    /// Converts a time of the guest into the host's. `None` before the first observation, and for a
    /// time before the host's clock began.
    #[must_use]
    pub fn to_host(&self, guest: Nanos) -> Option<Nanos> {
        let guest = i64::try_from(guest.0).ok()?;
        // The last window may hold few observations yet.
        let whole = &self.windows[..self.windows.len().saturating_sub(1)];
        let (first, last) = match whole {
            [first, .., last] => (*first, *last),
            [only] => (*only, *only),
            [] => self.windows.last().map(|last| (*last, *last))?,
        };
        let around = guest.checked_add(last.1)?;
        let span = last.0 - first.0;
        // The guest chooses its times, so differences may lie more than 2^63 apart.
        let drift = if span > 0 { last.1.saturating_sub(first.1) as f64 / span as f64 } else { 0.0 };
        let correction = drift * (around - last.0) as f64;
        u64::try_from(around.checked_add(correction as i64)?).ok().map(Nanos)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A guest's clock that started later and runs slow, read late by up to 900 us.
    #[test]
    fn an_offset_and_a_drift_are_found_through_late_reads() {
        let guest_at = |host: u64| ((host - 5_000_000_000) as f64 * (1.0 - 300e-6)) as u64;
        let mut clock = GuestClock::default();
        assert_eq!(clock.to_host(Nanos(1)), None);
        let mut late = 0;
        for i in 0..5000_u64 {
            let host = 7_000_000_000 + i * 1_000_000;
            late = (late + 37_000) % 900_000;
            clock.observe(Nanos(host + late), Nanos(guest_at(host)));
        }
        // The next millisecond, and one in half a second.
        for host in [12_001_000_000, 12_500_000_000] {
            let found = clock.to_host(Nanos(guest_at(host))).unwrap();
            assert!(found.0.abs_diff(host) < 60_000, "{found} for {host}");
        }
    }

    #[test]
    fn nonsense_does_no_harm() {
        let mut clock = GuestClock::default();
        for guest in [0, u64::MAX, i64::MAX as u64, 1] {
            clock.observe(Nanos(1_000), Nanos(guest));
            clock.observe(Nanos(u64::MAX), Nanos(guest));
            for asked in [0, u64::MAX, i64::MAX as u64] {
                let _ = clock.to_host(Nanos(asked));
            }
        }
    }

    /// False times in windows of their own, from which a rate is estimated.
    #[test]
    fn false_times_in_several_windows_do_no_harm() {
        for times in [[i64::MAX as u64, 0, 0], [0, i64::MAX as u64, 0], [i64::MAX as u64, 0, i64::MAX as u64]]
        {
            let mut clock = GuestClock::default();
            for (n, guest) in (1..).zip(times) {
                clock.observe(Nanos(n * 2 * GuestClock::WINDOW.0), Nanos(guest));
                for asked in [0, 1, i64::MAX as u64] {
                    let _ = clock.to_host(Nanos(asked));
                }
            }
        }
    }
}
