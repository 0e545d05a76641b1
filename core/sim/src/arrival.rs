//! Arrival processes: times at which requests are due.

use rtvirtio_sched::{Op, Priority};
use rtvirtio_stats::Random;
use rtvirtio_units::Nanos;

/// Arrival process of a load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrival {
    /// A request every `period`, from `phase` on.
    Periodic {
        /// Time between two requests.
        period: Nanos,
        /// Time of the first request.
        phase: Nanos,
    },
    /// Poisson process: exponential gaps.
    Poisson {
        /// Mean requests per second.
        rate: f64,
    },
    /// `count` requests at once every `period`: the worst case of a token bucket.
    Bursts {
        /// Requests in a burst.
        count: u32,
        /// Time between two bursts.
        period: Nanos,
    },
    /// A closed loop: `depth` always outstanding.
    Closed {
        /// Requests outstanding all the time.
        depth: u32,
    },
    /// Single requests, due every `period`: a request that is due while the one before it is
    /// outstanding, or while the guest stands still, follows as soon as it may. Its latency counts
    /// from when it was due.
    Paced {
        /// Time between two requests.
        period: Nanos,
        /// Length of the guest's stalls; 0 for none.
        stall: Nanos,
        /// Time from the start of one stall to the next; the first is after as long.
        every: Nanos,
    },
    /// A closed loop for `on`, idle for `off`, in turn.
    OnOff {
        /// Requests outstanding while active.
        depth: u32,
        /// Length of an active phase.
        on: Nanos,
        /// Length of an idle phase.
        off: Nanos,
    },
}

/// A stream of requests of one VM.
#[derive(Clone, Debug, PartialEq)]
pub struct Load {
    /// Name in the result.
    pub name: String,
    pub vm: usize,
    /// Times at which requests are due.
    pub arrival: Arrival,
    /// Share of writes, 0 to 1.
    pub writes: f64,
    /// Bytes of a request.
    pub len: u64,
    /// Sequential offsets, or random ones.
    pub sequential: bool,
    /// Priority of its requests.
    pub priority: Priority,
    /// Latency beyond which a completion counts as late.
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

/// A load with its state.
#[derive(Debug)]
pub struct Source {
    pub load: Load,
    random: Random,
    next: Nanos,
    /// Position of a sequential load.
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

    /// Time of the next request of an open loop; `None` for a closed loop.
    pub fn next_arrival(&self) -> Option<Nanos> {
        match self.load.arrival {
            Arrival::Closed { .. } | Arrival::OnOff { .. } | Arrival::Paced { .. } => None,
            _ => Some(self.next),
        }
    }

    /// Open loop: schedules the request after this one.
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
            Arrival::Closed { .. } | Arrival::OnOff { .. } | Arrival::Paced { .. } => {}
        }
    }

    /// Closed loop: requests due at the start.
    pub fn outstanding(&self) -> u32 {
        match self.load.arrival {
            Arrival::Closed { depth } | Arrival::OnOff { depth, .. } => depth,
            Arrival::Paced { .. } => 1,
            _ => 0,
        }
    }

    /// Time at which the request that is submitted now was due.
    pub fn due(&mut self, now: Nanos) -> Nanos {
        let Arrival::Paced { period, .. } = self.load.arrival else { return now };
        let due = self.next;
        self.next.0 += period.0.max(1);
        due
    }

    /// Submission time of the next request after a completion at `now`; `None` for an open loop.
    pub fn resubmit_at(&self, now: Nanos) -> Option<Nanos> {
        match self.load.arrival {
            Arrival::Closed { .. } => Some(now),
            Arrival::OnOff { on, off, .. } => {
                let cycle = (on.0 + off.0).max(1);
                let within = now.0 % cycle;
                Some(if within < on.0 { now } else { Nanos(now.0 - within + cycle) })
            }
            Arrival::Paced { stall, every, .. } => {
                let at = now.max(self.next);
                let within = at.0 % every.0.max(1);
                let is_stalled = at >= every && within < stall.0;
                Some(if is_stalled { Nanos(at.0 - within + stall.0) } else { at })
            }
            _ => None,
        }
    }

    /// Operation and offset of the next request, on a device of `size` bytes.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_paced_loop_makes_up_for_what_was_due_in_a_stall() {
        let ms = Nanos::from_millis;
        let arrival = Arrival::Paced { period: ms(2), stall: ms(5), every: ms(10) };
        let mut source = Source::new(Load::reads(0, arrival), 1);
        assert_eq!((source.outstanding(), source.next_arrival()), (1, None));
        assert_eq!(source.due(ms(0)), ms(0));
        assert_eq!(source.resubmit_at(ms(1)), Some(ms(2)), "it is not due yet");
        // Late behind its predecessor, and then behind the stall from 10 to 15 ms.
        assert_eq!((source.due(ms(9)), source.resubmit_at(ms(9))), (ms(2), Some(ms(9))));
        assert_eq!((source.due(ms(9)), source.resubmit_at(ms(12))), (ms(4), Some(ms(15))));
        assert_eq!(source.due(ms(15)), ms(6));
    }
}
