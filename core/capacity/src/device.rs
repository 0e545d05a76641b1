//! Device model of the I/O domain's scheduler.

use rtvirtio_model::{ModelError, Profile, Service, ServiceLine, service};
use rtvirtio_sched::bound::{Deallocations, Device};
use rtvirtio_sched::{Cost, Line, Op};
use rtvirtio_twin::{Timing, TwinProfile};
use rtvirtio_units::{Bytes, Nanos};

const MIB: f64 = (1u64 << 20) as f64;
/// Largest piece of a plan, in bytes.
const LARGEST_PIECE: u64 = 64 << 10;

/// Cost of requests, smallest window at full throughput, and longest stall.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceModel {
    /// Device name in messages.
    pub name: String,
    /// Capacity of the device.
    pub size: Bytes,
    /// Device time of a request, on one of its servers.
    pub cost: Cost,
    /// Pieces served at once.
    pub parallel: u32,
    /// Smallest window at full throughput.
    pub window: u32,
    /// T: longest time without progress, including latency beyond device time.
    pub latency: Nanos,
    /// Emulated device for a simulation, without stalls of the host.
    pub twin: TwinProfile,
    /// Measured throughput at small windows.
    measured: Option<Service>,
}

/// A device for which no bound holds.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The profile has no usable numbers.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Any VM may write, and the cost of writes is unknown.
    #[error(
        "the profile of {device} has no writes, and without them no bound holds with a neighbour that writes: measure them on a device of the same kind without data \
         (`rtvirtio profile DEVICE --destroy-data -o FILE`) and plan with --profile FILE"
    )]
    NoWrites {
        /// Name in the profile.
        device: String,
    },
}

impl DeviceModel {
    /// From a declared twin: each service at the upper end of its jitter, writes at the drain rate
    /// of a full cache, seeks over the whole stroke.
    #[must_use]
    pub fn declared(name: &str, twin: &TwinProfile, size: Bytes) -> Self {
        let channels = f64::from(twin.channels.max(1));
        let jitter = 1.0 + twin.jitter.0;
        // Ruemmler and Wilkes' square root over the whole stroke is 15/8 of the mean beyond the
        // settling time; one revolution at most.
        let arm = twin.arm.as_ref().map_or(0.0, |a| {
            a.settle.0 as f64
                + (a.average_seek.0 as f64 - a.settle.0 as f64) * 15.0 / 8.0
                + a.revolution.0 as f64
        });
        let line = |t: &Timing, least_per_byte: f64, extra_per_byte: f64| Line {
            base_ns: (t.base.0 as f64 * jitter + arm).ceil() as u64,
            per_mib_ns: (((t.per_byte_ns * jitter).max(least_per_byte) + extra_per_byte) * MIB).ceil() as u64,
        };
        let drain_per_byte = twin.write_cache.as_ref().map_or(0.0, |c| 1e9 * channels / c.drain.0);
        // Garbage collection stops all servers; its time is charged to the bytes that cause it, and
        // once to the latency.
        let (gc_per_byte, pause) = twin
            .garbage_collection
            .as_ref()
            .map_or((0.0, Nanos(0)), |g| (g.pause.0 as f64 * channels / g.every.0 as f64, g.pause));
        let write = line(&twin.write, drain_per_byte, gc_per_byte);
        let cost = Cost {
            read: line(&twin.read, 0.0, 0.0),
            write,
            flush_ns: write.base_ns,
            discard_ns: write.time_of(LARGEST_PIECE),
        };
        Self {
            name: name.to_owned(),
            size,
            cost,
            parallel: twin.channels.max(1),
            window: twin.channels.max(1),
            latency: pause,
            twin: twin.clone(),
            measured: None,
        }
    }

    pub fn measured(profile: &Profile) -> Result<Self, DeviceError> {
        let s = service(profile)?;
        let Some(write) = s.write else {
            return Err(DeviceError::NoWrites { device: profile.device.clone() });
        };
        let base = |l: &ServiceLine| (l.occupancy - l.per_byte * s.block.0 as f64).max(0.0);
        let line = |l: &ServiceLine| Line {
            base_ns: (base(l) * 1e9).ceil() as u64,
            per_mib_ns: (l.per_byte * 1e9 * MIB).ceil() as u64,
        };
        let cost = Cost {
            read: line(&s.read),
            write: line(&write),
            flush_ns: flush_ns(profile, &write).max(line(&write).time_of(s.block.0)),
            // Not measured: the I/O domain sizes pieces to take no longer than the largest write.
            discard_ns: line(&write).time_of(LARGEST_PIECE),
        };
        // Seen from outside, k servers are one server of k times the speed with an additional
        // latency (see [`rtvirtio_model::Service`]), here that of the largest piece.
        let largest = (LARGEST_PIECE as f64 - s.block.0 as f64).max(0.0);
        let extra_latency = |l: &ServiceLine| {
            let more = (l.alone_per_byte - l.per_byte).max(0.0) * largest;
            (l.alone - l.occupancy).max(0.0) + more
        };
        let extra_latency = extra_latency(&s.read).max(extra_latency(&write));
        let channels = (s.read.alone / s.read.occupancy).round().clamp(1.0, 64.0);
        let timing = |l: &ServiceLine| Timing {
            base: Nanos::from_secs_f64(base(l) * channels),
            per_byte_ns: l.per_byte * 1e9 * channels,
        };
        Ok(Self {
            name: profile.device.clone(),
            size: profile.size,
            cost,
            parallel: 1,
            window: s.depth,
            latency: Nanos(Nanos::from_secs_f64(extra_latency).0.saturating_add(s.stall.0)),
            twin: TwinProfile {
                description: format!("{} as measured", profile.device),
                channels: channels as u32,
                read: timing(&s.read),
                write: timing(&write),
                jitter: rtvirtio_units::Ratio(0.0),
                write_cache: None,
                garbage_collection: None,
                arm: None,
            },
            measured: Some(s),
        })
    }

    /// A smaller window: a measured device that is not kept busy has less throughput, so each piece
    /// costs more.
    #[must_use]
    pub fn limited_to(&self, window: u32) -> Self {
        let Some(share) = self.measured.as_ref().map(|s| s.share_at(window)).filter(|s| *s > 0.0 && *s < 1.0)
        else {
            return self.clone();
        };
        let scaled = |ns: u64| (ns as f64 / share).ceil() as u64;
        let line = |l: Line| Line { base_ns: scaled(l.base_ns), per_mib_ns: scaled(l.per_mib_ns) };
        let c = self.cost;
        let cost = Cost {
            read: line(c.read),
            write: line(c.write),
            flush_ns: scaled(c.flush_ns),
            discard_ns: scaled(c.discard_ns),
        };
        Self { cost, ..self.clone() }
    }

    /// Parameters of the scheduler's bounds with this window.
    #[must_use]
    pub fn with_window(&self, window: u32) -> Device {
        let share = f64::from(rtvirtio_sched::Config::default().discard_share) / 100.0;
        let deallocations = Deallocations { piece: Nanos(self.cost.discard_ns), share };
        Device { parallel: self.parallel, window, latency: self.latency, stretch: 1.0, deallocations }
    }

    /// Device time of a request of `len` bytes that is served in pieces of `quantum` bytes, ns.
    #[must_use]
    pub fn request(&self, op: Op, len: Bytes, quantum: Bytes) -> f64 {
        let whole = len.0 / quantum.0.max(1);
        let rest = len.0 % quantum.0.max(1);
        let last = if rest > 0 || whole == 0 { self.cost.time_of(op, rest) } else { 0 };
        (whole * self.cost.time_of(op, quantum.0) + last) as f64
    }

    /// The most expensive piece of `quantum` bytes, in ns.
    #[must_use]
    pub fn max_piece_cost(&self, quantum: Bytes) -> f64 {
        self.cost.max_transfer(quantum.0) as f64
    }
}

/// Mean time of a flush beyond the write before it, ns; 0 where no syncs were measured.
fn flush_ns(profile: &Profile, write: &ServiceLine) -> u64 {
    let synced = profile.sync.iter().filter(|p| p.iops.0 > 0.0).min_by_key(|p| p.depth);
    synced.map_or(0, |p| ((f64::from(p.depth) / p.iops.0 - write.alone).max(0.0) * 1e9).ceil() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_declared_twin_is_charged_at_its_worst() {
        let twin = TwinProfile::parse(
            "t",
            "description='t'\nchannels=2\njitter='10%'\nread={base='100us',per_byte_ns=1.0}\nwrite={base='50us',per_byte_ns=1.0}\n\
             write_cache={size='1MiB',drain='100MB/s'}\ngarbage_collection={every='1MiB',pause='4ms'}",
        )
        .unwrap();
        let d = DeviceModel::declared("t", &twin, Bytes(1 << 30));
        assert!(d.cost.read.base_ns.abs_diff(110_000) <= 1, "{:?}", d.cost.read);
        assert!(d.cost.read.per_mib_ns.abs_diff((1.1 * MIB) as u64) <= 1, "{:?}", d.cost.read);
        // Two servers share 100 MB/s: 20 ns a byte on each, and 8 ms on each per MiB of garbage.
        let per_mib = 20.0 * MIB + 8e6;
        assert!((d.cost.write.per_mib_ns as f64 - per_mib).abs() < 2.0, "{:?} {per_mib}", d.cost.write);
        assert_eq!((d.latency, d.parallel, d.window), (Nanos::from_millis(4), 2, 2));
    }

    #[test]
    fn requests_are_charged_by_pieces() {
        let twin = TwinProfile::built_in("qlc-nvme").unwrap();
        let d = DeviceModel::declared("q", &twin, Bytes(1 << 30));
        let quantum = Bytes::from_kib(64);
        let piece = d.cost.time_of(Op::Read, 65_536) as f64;
        assert_eq!(d.request(Op::Read, Bytes::from_kib(128), quantum), 2.0 * piece);
        let odd = d.request(Op::Read, Bytes::from_kib(68), quantum);
        assert_eq!(odd, piece + d.cost.time_of(Op::Read, 4_096) as f64);
        assert_eq!(d.request(Op::Read, Bytes(512), quantum), d.cost.time_of(Op::Read, 512) as f64);
    }
}
