//! Measured service of a flow: the bounded-delay contract (alpha, Delta) of Mok, Feng and Chen
//! (RTAS 2001), as the I/O-domain paper uses it (section III-B2).

use rtvirtio_units::Nanos;
use serde::{Deserialize, Serialize};

/// Measured service of one flow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Contract {
    /// alpha: long-run bytes per second while the flow is backlogged.
    pub bytes_per_second: f64,
    /// Delta of the paper: longest time between two completed pieces while the flow is backlogged,
    /// in ns.
    pub longest_gap_ns: u64,
    /// Time in which the flow is backlogged, in ns.
    pub busy_ns: u64,
    /// Bytes completed in that time.
    pub bytes: u64,
}

/// Measures a flow online, in constant time and space. The default is an idle flow.
#[derive(Clone, Debug, Default)]
pub struct Meter {
    /// Start of the current backlogged period.
    busy_from: Option<Nanos>,
    last: Nanos,
    busy_total: u64,
    bytes: u64,
    longest_gap: u64,
}

impl Meter {
    /// Starts a backlogged period if the flow is idle.
    pub fn on_submit(&mut self, now: Nanos) {
        if self.busy_from.is_none() {
            self.busy_from = Some(now);
            self.last = now;
        }
    }

    /// Records the completion of a piece; `more` when requests are still outstanding.
    pub fn on_complete(&mut self, now: Nanos, bytes: u64, more: bool) {
        let Some(from) = self.busy_from else { return };
        let now = now.max(self.last);
        self.longest_gap = self.longest_gap.max(now.0 - self.last.0);
        self.last = now;
        self.bytes += bytes;
        if !more {
            self.busy_total += now.0 - from.0;
            self.busy_from = None;
        }
    }

    /// Measurements until `now`. The present gap of a backlogged flow counts too.
    #[must_use]
    pub fn contract(&self, now: Nanos) -> Contract {
        let waiting = self.busy_from.map_or(0, |_| now.0.saturating_sub(self.last.0));
        let busy = self.busy_total + self.busy_from.map_or(0, |from| now.0.saturating_sub(from.0));
        Contract {
            bytes_per_second: if busy > 0 { self.bytes as f64 / (busy as f64 / 1e9) } else { 0.0 },
            longest_gap_ns: self.longest_gap.max(waiting),
            busy_ns: busy,
            bytes: self.bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn a_steady_flow_has_its_rate_and_gaps_of_one_period() {
        let mut m = Meter::default();
        m.on_submit(Nanos(0));
        // 1000 bytes every millisecond are 1 MB/s.
        for i in 1..=1_000 {
            m.on_complete(Nanos(i * MS), 1_000, i < 1_000);
        }
        let c = m.contract(Nanos(5_000 * MS));
        assert!((c.bytes_per_second - 1e6).abs() < 1.0);
        assert_eq!((c.longest_gap_ns, c.busy_ns), (MS, 1_000 * MS));
    }

    #[test]
    fn a_gap_counts_and_idle_time_does_not() {
        let mut m = Meter::default();
        m.on_submit(Nanos(0));
        m.on_complete(Nanos(MS), 1_000, true);
        m.on_complete(Nanos(11 * MS), 1_000, false);
        m.on_submit(Nanos(500 * MS));
        m.on_complete(Nanos(501 * MS), 1_000, false);
        let c = m.contract(Nanos(900 * MS));
        assert_eq!((c.longest_gap_ns, c.busy_ns, c.bytes), (10 * MS, 12 * MS, 3_000));
    }

    #[test]
    fn a_backlogged_flow_has_waited_until_now() {
        let mut m = Meter::default();
        m.on_submit(Nanos(0));
        let c = m.contract(Nanos(30 * MS));
        assert_eq!((c.longest_gap_ns, c.bytes), (30 * MS, 0));
    }
}
