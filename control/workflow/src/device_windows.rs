//! Time of a device's requests, compared with that when it was measured.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rtvirtio_kernel::device_io::DeviceIo;
use rtvirtio_kernel::{BlockDevice, Root};
use rtvirtio_model::{Service, ServiceLine, service};
use rtvirtio_spec::{Device, Spec};

use crate::dirs::Dirs;
use crate::plan::load_profile;

/// Length of a window.
const WINDOW: Duration = Duration::from_secs(300);
/// Least requests in a window that are judged.
const FEWEST: u64 = 1_000;
/// Mean requests in flight above which latency includes waits for other requests.
const MOST_IN_FLIGHT: f64 = 1.5;
/// Largest share of writes that are judged by a profile without writes.
const MOST_UNKNOWN: f64 = 0.1;

/// I/O counters of devices over sliding windows.
#[derive(Debug, Default)]
pub struct DeviceWindows(BTreeMap<PathBuf, VecDeque<(Instant, DeviceIo)>>);

impl DeviceWindows {
    /// Samples some devices; returns how slow they are, where known: time of requests as a multiple
    /// of what they took when each was alone. With `also_loaded` also for devices with many
    /// requests in flight: there the multiple is a lower bound, so the device is at least as slow.
    pub fn sample(
        &mut self,
        devices: &BTreeSet<PathBuf>,
        also_loaded: bool,
        root: &Root,
        dirs: &Dirs,
        now: Instant,
    ) -> BTreeMap<String, f64> {
        let judge = |(done, service): (DeviceIo, Service)| {
            let least = || least_slowness(&done, &service).filter(|_| also_loaded);
            slowness(&done, &service).or_else(least)
        };
        self.0.retain(|path, _| devices.contains(path));
        let mut out = BTreeMap::new();
        for path in devices {
            let window = self.0.entry(path.clone()).or_default();
            // A device that is gone, or was never measured, says nothing.
            if let Some(factor) = sample_device(path, window, (root, dirs), now).and_then(judge) {
                out.insert(path.display().to_string(), factor);
            }
        }
        out
    }
}

/// Requests of a device's window, and its service times by its profile.
fn sample_device(
    path: &Path,
    window: &mut VecDeque<(Instant, DeviceIo)>,
    (root, dirs): (&Root, &Dirs),
    now: Instant,
) -> Option<(DeviceIo, Service)> {
    let device = BlockDevice::find(root, path).ok()?;
    let seen = DeviceIo::read(root, &device).ok()?;
    // Time under idling is in no later window either.
    if idles(&device, root) {
        window.clear();
        return None;
    }
    if window.back().is_some_and(|(_, last)| seen.since(last).is_none()) {
        window.clear();
    }
    window.push_back((now, seen));
    while window.get(1).is_some_and(|(at, _)| now.duration_since(*at) >= WINDOW) {
        window.pop_front();
    }
    let done = seen.since(&window.front()?.1)?;
    let spec = Spec { device: Device::Path(path.to_owned()), vms: Vec::new() };
    let profile = load_profile(&spec, None, dirs).ok()?;
    Some((done, service(&profile).ok()?))
}

/// Whether requests wait while the elevator idles: then their time is not the device's.
pub(crate) fn idles(device: &BlockDevice, root: &Root) -> bool {
    bfq_idles(device, root).unwrap_or(true)
}

/// Whether the elevator is BFQ and idles; `None` where that cannot be read.
pub(crate) fn bfq_idles(device: &BlockDevice, root: &Root) -> Option<bool> {
    if device.elevators(root).ok()?.current != "bfq" {
        return Some(false);
    }
    let is_zero = |file: &str| Some(root.read(device.tunable(file)).ok()?.trim() == "0");
    Some(!(is_zero("slice_idle")? && is_zero("strict_guarantees")?))
}

/// Time of requests as a multiple of what they took when each was alone; `None` where requests were
/// few, or waited for each other.
fn slowness(done: &DeviceIo, service: &Service) -> Option<f64> {
    if in_flight(done) > MOST_IN_FLIGHT {
        return None;
    }
    let (found, expected) = found_and_expected(done, service)?;
    (expected > 0.0).then(|| found.as_secs_f64() / expected)
}

/// Busy time per request as a multiple of the time of a request that is alone: with more in flight
/// a device completes no fewer of them, so one that is as it was measured has 1 at most. `None`
/// where few are in flight: the kernel counts busy time in ticks, which are longer than a fast
/// request.
fn least_slowness(done: &DeviceIo, service: &Service) -> Option<f64> {
    if in_flight(done) <= MOST_IN_FLIGHT {
        return None;
    }
    let (_, expected) = found_and_expected(done, service)?;
    (expected > 0.0).then(|| done.busy.as_secs_f64() / expected)
}

fn in_flight(done: &DeviceIo) -> f64 {
    done.in_flight.as_secs_f64() / done.busy.as_secs_f64().max(f64::MIN_POSITIVE)
}

/// Time that requests took, and that they would have taken one after the other, s; `None` where
/// they were few, or nothing is known of some.
fn found_and_expected(done: &DeviceIo, service: &Service) -> Option<(Duration, f64)> {
    let n = done.reads + done.writes;
    if n < FEWEST {
        return None;
    }
    let alone = |line: &ServiceLine, n: u64, bytes: u64| {
        let more = bytes.saturating_sub(n.saturating_mul(service.block.0));
        n as f64 * line.alone + more as f64 * line.alone_per_byte
    };
    let mut expected = alone(&service.read, done.reads, done.read_bytes);
    let mut found = done.read_time;
    match &service.write {
        Some(line) => {
            expected += alone(line, done.writes, done.write_bytes);
            found += done.write_time;
        }
        None if done.writes as f64 > MOST_UNKNOWN * n as f64 => return None,
        None => {}
    }
    Some((found, expected))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A drive's profile: 132 us for a read of 4 KiB, 100 us for a write.
    const PROFILE: &str = include_str!("../../learn/data/qlc-nvme.profile.json");

    fn done(reads: u64, read_ms: u64, writes: u64, write_ms: u64, in_flight: f64) -> DeviceIo {
        let time = Duration::from_millis(read_ms + write_ms);
        DeviceIo {
            reads,
            read_bytes: reads * 4096,
            read_time: Duration::from_millis(read_ms),
            writes,
            write_bytes: writes * 4096,
            write_time: Duration::from_millis(write_ms),
            busy: time.div_f64(in_flight),
            in_flight: time,
            ..DeviceIo::default()
        }
    }

    #[test]
    fn a_device_is_as_slow_as_its_requests_take_alone() {
        let profile = serde_json::from_str(PROFILE).unwrap();
        let mut service = service(&profile).unwrap();
        let of = |done: DeviceIo, service: &Service| slowness(&done, service);
        let factor = of(done(10_000, 1_322, 0, 0, 1.0), &service).unwrap();
        assert!((factor - 1.0).abs() < 0.01, "{factor}");
        let factor = of(done(10_000, 3_966, 0, 0, 1.2), &service).unwrap();
        assert!((factor - 3.0).abs() < 0.03, "{factor}");
        // Few, or waiting for each other.
        assert_eq!(of(done(900, 400, 0, 0, 1.0), &service), None);
        assert_eq!(of(done(10_000, 3_966, 0, 0, 2.0), &service), None);
        // Eight in flight that complete as fast as one alone, and ten times as slowly.
        let least = |ms: u64| least_slowness(&done(10_000, ms, 0, 0, 8.0), &service).unwrap();
        assert!((least(8 * 1_322) - 1.0).abs() < 0.01 && (least(80 * 1_322) - 10.0).abs() < 0.1);
        assert_eq!(least_slowness(&done(10_000, 1_322, 0, 0, 1.0), &service), None);
        // Writes as writes; of which nothing was measured, nothing is said.
        let factor = of(done(5_000, 661, 5_000, 2 * 500, 1.0), &service).unwrap();
        assert!((1.2..1.7).contains(&factor), "{factor}");
        service.write = None;
        assert_eq!(of(done(5_000, 661, 5_000, 1_000, 1.0), &service), None);
        assert!(of(done(9_900, 1_309, 100, 500, 1.0), &service).unwrap() < 1.05);
    }
}
