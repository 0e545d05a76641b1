//! When requests are due.

use rtvirtio_sched::{Op, Priority};
use rtvirtio_stats::Random;
use rtvirtio_units::Nanos;

/// How the requests of a load come.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrival {
    /// One every `period`, from `phase` on.
    Periodic {
        /// Between two.
        period: Nanos,
        /// The first.
        phase: Nanos,
    },
    /// At random, so many per second on average.
    Poisson {
        /// Requests per second.
        rate: f64,
    },
    /// `count` at once every `period`: the worst that a token bucket allows.
    Bursts {
        /// Requests at once.
        count: u32,
        /// Between two bursts.
        period: Nanos,
    },
    /// So many outstanding always: a flood.
    Closed {
        /// Outstanding.
        depth: u32,
    },
    /// A flood for `on`, nothing for `off`, in turn.
    OnOff {
        /// Outstanding.
        depth: u32,
        /// How long it floods.
        on: Nanos,
        /// How long it rests.
        off: Nanos,
    },
}

/// A stream of requests of one VM.
#[derive(Clone, Debug, PartialEq)]
pub struct Load {
    /// For the result.
    pub name: String,
    /// Whose.
    pub vm: usize,
    /// When.
    pub arrival: Arrival,
    /// Share of writes, 0 to 1.
    pub writes: f64,
    /// Bytes each.
    pub len: u64,
    /// One after the other on the device, or anywhere.
    pub sequential: bool,
    /// As the guest says.
    pub priority: Priority,
    /// What counts as too late.
    pub deadline: Option<Nanos>,
}

impl Load {
    /// 4 KiB random reads of normal priority.
    #[must_use]
    pub fn reads(vm: usize, arrival: Arrival) -> Self {
        Self {
            name: format!("vm{vm}"),
            vm,
            arrival,
            writes: 0.0,
            len: 4096,
            sequential: false,
            priority: Priority::NORMAL,
            deadline: None,
        }
    }
}

/// A load under way.
#[derive(Debug)]
pub struct Source {
    pub load: Load,
    random: Random,
    next: Nanos,
    /// Where a sequential load goes on.
    position: u64,
    arrivals: u64,
}

impl Source {
    pub fn new(load: Load, seed: u64) -> Self {
        let mut source = Self { load, random: Random::new(seed), next: Nanos(0), position: 0, arrivals: 0 };
        source.next = match source.load.arrival {
            Arrival::Periodic { phase, .. } => phase,
            Arrival::Poisson { rate } => source.gap(rate),
            _ => Nanos(0),
        };
        source
    }

    fn gap(&mut self, rate: f64) -> Nanos {
        Nanos((-(1.0 - self.random.unit()).ln() / rate.max(1e-9) * 1e9) as u64)
    }

    /// Of an open loop: when its next request comes.
    pub fn next_arrival(&self) -> Option<Nanos> {
        match self.load.arrival {
            Arrival::Closed { .. } | Arrival::OnOff { .. } => None,
            _ => Some(self.next),
        }
    }

    /// Of an open loop: one has come, so the next is due later.
    pub fn advance(&mut self) {
        self.arrivals += 1;
        match self.load.arrival {
            Arrival::Periodic { period, .. } => self.next.0 += period.0.max(1),
            Arrival::Poisson { rate } => self.next.0 += self.gap(rate).0,
            Arrival::Bursts { count, period } => {
                if self.arrivals % u64::from(count.max(1)) == 0 {
                    self.next.0 += period.0.max(1);
                }
            }
            Arrival::Closed { .. } | Arrival::OnOff { .. } => {}
        }
    }

    /// Of a closed loop: how many are made at the beginning.
    pub fn outstanding(&self) -> u32 {
        match self.load.arrival {
            Arrival::Closed { depth } | Arrival::OnOff { depth, .. } => depth,
            _ => 0,
        }
    }

    /// Of a closed loop: when an answer at `now` leads to the next request.
    pub fn resubmit_at(&self, now: Nanos) -> Option<Nanos> {
        match self.load.arrival {
            Arrival::Closed { .. } => Some(now),
            Arrival::OnOff { on, off, .. } => {
                let cycle = (on.0 + off.0).max(1);
                let within = now.0 % cycle;
                Some(if within < on.0 { now } else { Nanos(now.0 - within + cycle) })
            }
            _ => None,
        }
    }

    /// What the next request asks, on a device of `size` bytes.
    pub fn next_request(&mut self, size: u64) -> (Op, u64) {
        let op = if self.load.writes > 0.0 && self.random.unit() < self.load.writes {
            Op::Write
        } else {
            Op::Read
        };
        let len = self.load.len.max(1);
        let places = (size / len).max(1);
        let place = if self.load.sequential {
            self.position += 1;
            self.position % places
        } else {
            self.random.below(places as usize) as u64
        };
        (op, place * len)
    }
}
