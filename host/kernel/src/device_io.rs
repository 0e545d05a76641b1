//! Counters of a block device: `/sys/block/*/stat` (`Documentation/block/stat.rst`) and `inflight`.

use std::time::Duration;

use crate::{BlockDevice, HostError, Root};

/// Indices in `stat` of completed requests: reads, writes, discards (since Linux 4.18), flushes
/// (since 5.5).
const COMPLETED: [usize; 4] = [0, 4, 11, 15];
/// Index in `stat` of the requests in flight.
const IN_FLIGHT: usize = 8;

/// Counters since the device appeared. Times contain only the kernel's own part of a request: from
/// its allocation, before the elevator, to its completion.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceIo {
    /// Number of reads completed.
    pub reads: u64,
    /// Bytes of these reads.
    pub read_bytes: u64,
    /// Sum of the times of all reads.
    pub read_time: Duration,
    /// Number of writes completed.
    pub writes: u64,
    /// Bytes of these writes.
    pub write_bytes: u64,
    /// Sum of the times of all writes.
    pub write_time: Duration,
    /// Time in which at least one request was in flight.
    pub busy: Duration,
    /// Sum of the times of all requests, those in flight included.
    pub in_flight: Duration,
    /// Number of flushes completed; 0 before Linux 5.5, which does not count them.
    pub flushes: u64,
    /// Sum of the times of all flushes.
    pub flush_time: Duration,
}

impl DeviceIo {
    /// Current counters of a device.
    pub fn read(root: &Root, device: &BlockDevice) -> Result<Self, HostError> {
        let path = device.sysfs().join("stat");
        let text = root.read(&path)?;
        Self::parse(&text).ok_or(HostError::Form { path, text, expected: "at least 11 numbers" })
    }

    /// Fields 1, 3, 4 of reads, 5, 7, 8 of writes, 10 and 11; later kernels have more fields, of
    /// which 16 and 17 are of flushes.
    fn parse(text: &str) -> Option<Self> {
        let fields = numbers(text)?;
        let at = |field: usize| fields.get(field - 1).copied();
        let bytes = |field| Some(at(field)?.saturating_mul(512));
        let time = |field| Some(Duration::from_millis(at(field)?));
        Some(Self {
            reads: at(1)?,
            read_bytes: bytes(3)?,
            read_time: time(4)?,
            writes: at(5)?,
            write_bytes: bytes(7)?,
            write_time: time(8)?,
            busy: time(10)?,
            in_flight: time(11)?,
            flushes: at(16).unwrap_or(0),
            flush_time: time(17).unwrap_or_default(),
        })
    }

    /// Difference to `earlier`; `None` when the counters were reset in between.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Option<Self> {
        Some(Self {
            reads: self.reads.checked_sub(earlier.reads)?,
            read_bytes: self.read_bytes.checked_sub(earlier.read_bytes)?,
            read_time: self.read_time.checked_sub(earlier.read_time)?,
            writes: self.writes.checked_sub(earlier.writes)?,
            write_bytes: self.write_bytes.checked_sub(earlier.write_bytes)?,
            write_time: self.write_time.checked_sub(earlier.write_time)?,
            busy: self.busy.checked_sub(earlier.busy)?,
            in_flight: self.in_flight.checked_sub(earlier.in_flight)?,
            flushes: self.flushes.checked_sub(earlier.flushes)?,
            flush_time: self.flush_time.checked_sub(earlier.flush_time)?,
        })
    }
}

/// Requests of a device, of every kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Requests {
    /// Completed since the device appeared.
    pub completed: u64,
    /// In flight: from Linux 6.16 on above the driver too, before only those in it.
    pub in_flight: u64,
}

impl Requests {
    /// Parses a `stat`, with as many kinds as the kernel counts; `None` for a text that is none.
    #[must_use]
    pub fn parse(stat: &str) -> Option<Self> {
        let fields = numbers(stat)?;
        let completed = COMPLETED.iter().filter_map(|at| fields.get(*at)).sum();
        Some(Self { completed, in_flight: *fields.get(IN_FLIGHT)? })
    }
}

/// Requests that the driver has, by an `inflight`; `None` for a text that is none.
#[must_use]
pub fn in_driver(inflight: &str) -> Option<u64> {
    Some(numbers(inflight)?.iter().sum())
}

fn numbers(text: &str) -> Option<Vec<u64>> {
    text.split_ascii_whitespace().map(|word| word.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fields_of_the_kernel_and_what_came_between_two_looks() {
        let old = "   10  0  80  5  4 0 64 20  0  17  25";
        let new = "  110 10 880 55 14 3 128 90 2 117 225 0 0 0 0 3 9\n";
        assert_eq!(Requests::parse(new), Some(Requests { completed: 110 + 14 + 3, in_flight: 2 }));
        assert_eq!((Requests::parse("1 2 3"), Requests::parse("none")), (None, None));
        let (old, new) = (DeviceIo::parse(old).unwrap(), DeviceIo::parse(new).unwrap());
        assert_eq!((old.reads, old.read_bytes, old.busy.as_millis()), (10, 80 * 512, 17));
        let all = new.since(&old).unwrap();
        assert_eq!((all.reads, all.writes, all.write_bytes), (100, 10, 64 * 512));
        assert_eq!((all.read_time.as_millis(), all.in_flight.as_millis()), (50, 200));
        assert_eq!((all.flushes, all.flush_time.as_millis()), (3, 9));
        assert_eq!(old.since(&new), None);
        assert_eq!((in_driver("       1        2\n"), in_driver("none")), (Some(3), None));
        for bad in ["", "1 2 3", "1 2 3 4 5 6 7 8 9 10 x"] {
            assert_eq!(DeviceIo::parse(bad), None, "{bad}");
        }
    }
}
