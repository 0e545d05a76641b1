//! A traffic specification with its unit.

use rtvirtio_spec::{RequestLimit, Traffic, TrafficSpec, TrafficUnit};
use serde::{Deserialize, Serialize};

use crate::curve::Arrival;

/// Default of the I/O domain for the largest piece of a disk's request, in bytes.
const DISK_PIECE: u64 = 64 << 10;
/// Largest Ethernet frame of 1500 bytes of payload, without FCS.
const FRAME: u64 = 1_514;
/// Largest burst and rate of the I/O domain's regulators (`rtvirtio_sched`).
const MAX_BURST: u64 = 1 << 34;
const MAX_RATE: u64 = 1 << 50;

/// Counted unit of traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// Bytes of data.
    Bytes,
    /// Requests of disks, frames of networks.
    Requests,
}

/// Direction of a VM's traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// Read from a disk: the device writes into memory.
    Read,
    /// Written to a disk: the device reads from memory.
    Write,
    /// Received from a network: the device writes into memory.
    Rx,
    /// Sent to a network: the device reads from memory.
    Tx,
}

impl Direction {
    /// Directions of disks, then those of networks.
    pub const ALL: [Self; 4] = [Self::Read, Self::Write, Self::Rx, Self::Tx];

    /// Key in a spec.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Rx => "rx",
            Self::Tx => "tx",
        }
    }

    #[must_use]
    pub fn is_disk(self) -> bool {
        matches!(self, Self::Read | Self::Write)
    }

    /// Whether the device writes into memory: AXI's write channel.
    #[must_use]
    pub fn writes_memory(self) -> bool {
        matches!(self, Self::Read | Self::Rx)
    }
}

/// A number of a specification is out of its range.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} is {value}; it must be {least} to {most}")]
pub struct TspecError {
    /// Name of the number.
    pub what: &'static str,
    /// Value as given by the caller.
    pub value: u64,
    /// Smallest value that is allowed.
    pub least: u64,
    /// Largest value that is allowed.
    pub most: u64,
}

/// Traffic limit: in any time t at most `min(peak t + largest, rate t + burst)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Tspec {
    /// Unit of all numbers.
    pub unit: Unit,
    /// Long-run rate, per second.
    pub rate: u64,
    /// Amount beyond the rate that may come at once.
    pub burst: u64,
    /// Largest rate within the burst, per second.
    pub peak: Option<u64>,
    /// M of RFC 2215: one unit of service, such as the largest frame; 1 for requests.
    pub largest: u64,
}

impl Tspec {
    /// From a limit of a spec, with the direction's usual largest unit of service where bytes are
    /// counted.
    #[must_use]
    pub fn from_limit(spec: &TrafficSpec, direction: Direction) -> Self {
        let (unit, largest) = match (spec.unit, direction.is_disk()) {
            (TrafficUnit::Requests, _) => (Unit::Requests, 1),
            (TrafficUnit::Bytes, true) => (Unit::Bytes, DISK_PIECE),
            (TrafficUnit::Bytes, false) => (Unit::Bytes, FRAME),
        };
        // A bucket smaller than one unit of service would never pass one.
        let burst = spec.burst.unwrap_or(largest).max(largest);
        Self { unit, rate: spec.rate.max(1), burst, peak: spec.peak, largest }
    }

    /// A VM's limits: at most two of a direction, of bytes and then of requests.
    pub fn all(traffic: &Traffic) -> impl Iterator<Item = (Direction, Self)> {
        let specs = [traffic.read, traffic.write, traffic.rx, traffic.tx];
        let given = Direction::ALL.into_iter().zip(specs);
        let given = given.filter_map(|(direction, spec)| Some((direction, spec?)));
        given.flat_map(|(direction, spec)| {
            let requests = spec.requests.map(|RequestLimit { rate, burst }| {
                Self::from_limit(
                    &TrafficSpec { burst, ..TrafficSpec::new(TrafficUnit::Requests, rate) },
                    direction,
                )
            });
            std::iter::once(Self::from_limit(&spec, direction))
                .chain(requests)
                .map(move |tspec| (direction, tspec))
        })
    }

    /// Checks the ranges of all numbers.
    ///
    /// # Errors
    /// The first number that is out of its range.
    pub fn check(&self) -> Result<(), TspecError> {
        let range = |what, value, least, most| {
            if (least..=most).contains(&value) {
                Ok(())
            } else {
                Err(TspecError { what, value, least, most })
            }
        };
        range("the rate", self.rate, 1, MAX_RATE)?;
        range("the largest unit of service", self.largest, 1, MAX_BURST)?;
        range("the burst", self.burst, self.largest, MAX_BURST)?;
        self.peak.map_or(Ok(()), |peak| range("the peak", peak, self.rate, MAX_RATE))
    }

    /// Arrival curve of the limit.
    #[must_use]
    pub fn arrival(&self) -> Arrival {
        let peak = self.peak.map(|peak| (peak as f64, self.largest as f64));
        Arrival { rate: self.rate as f64, burst: self.burst as f64, peak }
    }

    /// Same limit for the I/O domain's regulators.
    #[must_use]
    pub fn tokens(&self) -> rtvirtio_sched::Tspec {
        rtvirtio_sched::Tspec { rate: self.rate, burst: self.burst, peak: self.peak }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_holds_one_unit_of_service() {
        let spec = TrafficSpec::new(TrafficUnit::Bytes, 1_000);
        assert_eq!(Tspec::from_limit(&spec, Direction::Read).burst, 65_536);
        assert_eq!(Tspec::from_limit(&spec, Direction::Rx).burst, 1_514);
        let small = TrafficSpec { burst: Some(100), ..spec };
        assert_eq!(Tspec::from_limit(&small, Direction::Tx).burst, 1_514);
        let requests = TrafficSpec { unit: TrafficUnit::Requests, ..spec };
        assert_eq!(Tspec::from_limit(&requests, Direction::Rx).burst, 1);
    }

    #[test]
    fn numbers_have_ranges() {
        let good = Tspec { unit: Unit::Bytes, rate: 10, burst: 4, peak: Some(10), largest: 4 };
        assert_eq!(good.check(), Ok(()));
        for bad in [
            Tspec { rate: 0, ..good },
            Tspec { burst: 3, ..good },
            Tspec { peak: Some(9), ..good },
            Tspec { largest: 0, ..good },
            Tspec { rate: (1 << 50) + 1, ..good },
        ] {
            assert!(bad.check().is_err(), "{bad:?}");
        }
    }
}
