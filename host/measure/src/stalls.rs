//! Spans of time in which a CPU of the host stalled.

use rtvirtio_units::Nanos;

/// Start and end, in ns of CLOCK_MONOTONIC.
pub type Span = (u64, u64);

/// Spans of CLOCK_MONOTONIC in which a CPU of the host stalled; without overlap, rising.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stalls {
    spans: Vec<Span>,
    /// Sum of the lengths of all spans before each.
    before: Vec<u64>,
}

impl Stalls {
    /// Union of spans in any order, in ns.
    #[must_use]
    pub fn union(mut spans: Vec<Span>) -> Self {
        spans.sort_unstable();
        let mut merged: Vec<Span> = Vec::new();
        for (from, to) in spans {
            match merged.last_mut() {
                Some(last) if from <= last.1 => last.1 = last.1.max(to),
                _ if from < to => merged.push((from, to)),
                _ => {}
            }
        }
        let mut sum = 0;
        let before = merged
            .iter()
            .map(|(from, to)| {
                sum += to - from;
                sum - (to - from)
            })
            .collect();
        Self { spans: merged, before }
    }

    /// Stalls shifted by `by` ns: the effect of subtracting them where nothing stalled is the
    /// method's own error.
    #[must_use]
    pub fn shifted(&self, by: u64) -> Self {
        let spans = self.spans.iter().map(|(from, to)| (from + by, to + by)).collect();
        Self { spans, before: self.before.clone() }
    }

    /// Number of stalls longer than this, and the sum of their lengths.
    #[must_use]
    pub fn longer_than(&self, least: Nanos) -> (u64, Nanos) {
        let lengths = self.spans.iter().map(|(from, to)| to - from).filter(|length| *length > least.0);
        lengths.fold((0, Nanos(0)), |(n, sum), length| (n + 1, Nanos(sum.0 + length)))
    }

    /// Part of the time from `from` to `to` that lies in a stall, in ns.
    #[must_use]
    pub fn within(&self, from: u64, to: u64) -> u64 {
        self.until(to.max(from)) - self.until(from)
    }

    /// Stalled time before `t`.
    fn until(&self, t: u64) -> u64 {
        let i = self.spans.partition_point(|(from, _)| *from < t);
        let Some(last) = i.checked_sub(1) else { return 0 };
        let (from, to) = self.spans[last];
        self.before[last] + (t.min(to) - from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlap_is_counted_once() {
        // Two CPUs that stall at the same time are one stall.
        let stalls = Stalls::union(vec![(30, 40), (10, 20), (15, 25), (40, 45), (60, 60)]);
        assert_eq!(stalls.within(0, 100), 30);
        assert_eq!(stalls.within(12, 18), 6);
        assert_eq!(stalls.within(20, 35), 10);
        assert_eq!((stalls.within(25, 30), stalls.within(45, 99), stalls.within(50, 10)), (0, 0, 0));
        assert_eq!(Stalls::default().within(0, 10), 0);
        assert_eq!(stalls.longer_than(Nanos(14)), (2, Nanos(30)));
        assert_eq!(stalls.longer_than(Nanos(15)), (0, Nanos(0)));
    }
}
