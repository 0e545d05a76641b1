//! Latencies as counts, and the output of cyclictest.

use serde::{Deserialize, Serialize};

use super::LARGEST_US;

/// Histogram of wake-up latencies.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Latencies {
    /// Latency in us and count, by rising latency. From 1 ms on latencies are rounded up to three
    /// figures.
    pub counts: Vec<(u64, u64)>,
    /// Number of latencies of [`LARGEST_US`] or more.
    pub above: u64,
    /// The longest, in us.
    pub max_us: u64,
    /// Length of the measurement, s.
    pub seconds: f64,
    /// Part of `seconds` in which the hypervisor below the host gave the core to others (steal
    /// time), s, which no setting here changes. Absent where it was not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stolen: Option<f64>,
    /// Latencies of a thread of the host on the same core at the same time and the highest
    /// priority: those of the core itself. Absent for the host's own runs, and where it was not
    /// measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub floor: Option<Box<Self>>,
}

/// Rounds up to three figures, but to single microseconds below 1 ms.
fn rounded(us: u64) -> u64 {
    let step = match us {
        0..1_000 => 1,
        1_000..10_000 => 10,
        _ => 100,
    };
    us.div_ceil(step) * step
}

impl Latencies {
    /// Number of latencies, those beyond the histogram included.
    #[must_use]
    pub fn n(&self) -> u64 {
        self.above + self.counts.iter().map(|c| c.1).sum::<u64>()
    }

    /// Percentile by nearest rank, us: the latency that the share `p` of all does not exceed.
    /// Beyond the histogram it is the longest.
    #[must_use]
    pub fn at(&self, p: f64) -> u64 {
        let rank = ((self.n() as f64 * p).ceil() as u64).max(1);
        let mut counted = 0;
        for (us, count) in &self.counts {
            counted += count;
            if counted >= rank {
                return *us;
            }
        }
        self.max_us
    }

    pub fn add(&mut self, us: u64) {
        self.max_us = self.max_us.max(us);
        self.add_many(us, 1);
    }

    fn add_many(&mut self, us: u64, n: u64) {
        if us >= LARGEST_US {
            self.above += n;
            return;
        }
        let us = rounded(us);
        match self.counts.binary_search_by_key(&us, |c| c.0) {
            Ok(i) => self.counts[i].1 += n,
            Err(i) => self.counts.insert(i, (us, n)),
        }
    }

    /// Adds the latencies of another run.
    pub fn merge(&mut self, other: &Self) {
        // An empty histogram is not a run without this measurement.
        let begun = self.n() > 0;
        self.stolen = if begun { self.stolen.zip(other.stolen).map(|(a, b)| a + b) } else { other.stolen };
        self.floor = match (self.floor.take(), &other.floor) {
            (Some(mut mine), Some(theirs)) => {
                mine.merge(theirs);
                Some(mine)
            }
            (None, Some(theirs)) if !begun => Some(theirs.clone()),
            _ => None,
        };
        other.counts.iter().for_each(|(us, n)| self.add_many(*us, *n));
        self.above += other.above;
        self.max_us = self.max_us.max(other.max_us);
        self.seconds += other.seconds;
    }

    /// The latency, in us, above which no more than the share `1 - p` of wake-ups lie while the
    /// core itself is late by no more than that. Each lateness of the core makes the guest's thread
    /// late once at most, and the probe's too, so the probe's rate above the same latency is
    /// subtracted. Above the result this holds for all latencies. `None` without
    /// [`Latencies::floor`].
    #[must_use]
    pub fn at_beyond_floor(&self, p: f64) -> Option<u64> {
        let floor = self.floor.as_ref()?;
        let a_second = |l: &Self, us: u64| {
            let above = l.above + l.counts.iter().filter(|c| c.0 > us).map(|c| c.1).sum::<u64>();
            above as f64 / l.seconds.max(1e-9)
        };
        let allowed = (1.0 - p) * self.n() as f64 / self.seconds.max(1e-9);
        let holds = |us: u64| a_second(self, us) - a_second(floor, us) <= allowed;
        let last = self.counts.iter().rev().map(|c| c.0).take_while(|us| holds(*us)).last();
        Some(last.unwrap_or(self.max_us))
    }

    /// Mean in us; those above the histogram count as its end.
    #[must_use]
    pub fn mean(&self) -> f64 {
        let sum: u64 = self.counts.iter().map(|(us, n)| us * n).sum::<u64>() + self.above * LARGEST_US;
        sum as f64 / self.n().max(1) as f64
    }
}

/// Parses the output of `cyclictest -q -h N` for one thread.
///
/// # Errors
/// When it is no such output, or has no cycle.
pub fn parse(text: &str) -> Result<Latencies, String> {
    let mut all = Latencies::default();
    let (mut max, mut above) = (0, 0);
    let number = |t: &str| t.trim().parse::<u64>().ok();
    for line in text.lines() {
        if let Some(of) = line.strip_prefix("# Max Latencies:") {
            max = number(of).ok_or_else(|| format!("cyclictest: `{line}`"))?;
        } else if let Some(of) = line.strip_prefix("# Histogram Overflows:") {
            above = number(of).ok_or_else(|| format!("cyclictest: `{line}`"))?;
        } else if let Some((us, count)) = line.split_once(char::is_whitespace) {
            if let (Some(us), Some(count @ 1..)) = (number(us), number(count)) {
                all.add_many(us, count);
            }
        }
    }
    (all.max_us, all.above) = (max, above);
    if all.n() == 0 {
        return Err(format!("cyclictest printed no latency: {text:.200}"));
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "# /dev/cpu_dma_latency set to 0us\n# Histogram\n000000 000000\n000007 000090\n000050 000009\n\
                        # Min Latencies: 00007\n# Max Latencies: 250000\n# Histogram Overflows: 00001\n# Thread 0: 00042\n";

    #[test]
    fn a_histogram_is_read() {
        let l = parse(OUTPUT).unwrap();
        assert_eq!((l.n(), l.above, l.max_us), (100, 1, 250_000));
        assert_eq!((l.at(0.9), l.at(0.91), l.at(0.99), l.at(0.999)), (7, 50, 50, 250_000));
        assert!(parse("unable to get scheduling parameters\n").is_err());
        let mut same = Latencies::default();
        (0..90).for_each(|_| same.add(7));
        same.add(250_000);
        (0..9).for_each(|_| same.add(50));
        assert_eq!(same, l);
    }

    #[test]
    fn long_latencies_are_never_made_shorter() {
        for us in [0, 999, 1_000, 1_001, 9_999, 10_000, 10_001, 99_999] {
            let kept = rounded(us);
            assert!(kept >= us && kept as f64 <= us as f64 * 1.011 && rounded(kept) == kept, "{us}: {kept}");
        }
        let mut a = Latencies::default();
        a.add(1_001);
        let mut b = a.clone();
        b.merge(&a);
        assert_eq!((b.at(1.0), b.n(), b.max_us), (1_010, 2, 1_001));
    }

    #[test]
    fn what_the_core_itself_was_late_for_is_taken_off_once() {
        let of = |us: &[(u64, u64)]| {
            let mut all = Latencies::default();
            us.iter().for_each(|(us, n)| all.add_many(*us, *n));
            all.max_us = us.last().unwrap().0;
            all.seconds = 1.0;
            all
        };
        // The core stalls for 30 ms in 1 % of all wake-ups; the guest adds 2 ms in another 1 %.
        let floor = of(&[(5, 990), (30_000, 10)]);
        let mut guest = of(&[(50, 980), (2_000, 10), (30_000, 10)]);
        assert_eq!(guest.at_beyond_floor(0.99), None);
        guest.floor = Some(Box::new(floor));
        assert_eq!(guest.at(0.99), 2_000);
        assert_eq!(guest.at(0.999), 30_000);
        assert_eq!(guest.at_beyond_floor(0.98), Some(50));
        assert_eq!(guest.at_beyond_floor(0.99), Some(50));
        assert_eq!(guest.at_beyond_floor(0.999), Some(2_000));
        // Whether the guest's thread wakes as often as the watcher does not matter: a thread that
        // is late all the time wakes less often.
        let mut rare = of(&[(50, 480), (2_000, 10), (30_000, 10)]);
        rare.floor.clone_from(&guest.floor);
        assert_eq!((rare.at(0.98), rare.at_beyond_floor(0.98)), (2_000, Some(50)));
        // Two rounds are as one of twice the length.
        let mut twice = Latencies::default();
        twice.merge(&guest);
        twice.merge(&guest);
        assert_eq!((twice.n(), twice.at_beyond_floor(0.999)), (2_000, Some(2_000)));
        // A round without the probe has no floor to subtract.
        twice.merge(&of(&[(50, 1)]));
        assert_eq!(twice.floor, None);
    }
}
