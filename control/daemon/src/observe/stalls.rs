//! Whether host and disks stood still while targets were judged. Probes run only while a VM with
//! targets sends requests: a host at rest is not woken.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Instant;

use rtvirtio_kernel::{BlockDevice, Root};
use rtvirtio_measure::late::StallTotal;
use rtvirtio_measure::noise::NoiseProbe;
use rtvirtio_measure::standstill::{DiskWatch, Standstills};
use rtvirtio_units::Nanos;
use serde::Serialize;

/// A stall of the host that is shorter matters to no target, and a stock kernel has many.
const SHORTEST: Nanos = Nanos(1_000_000);

/// Stalls of the host or of a disk since the last sample.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StallsObservation {
    /// Number of stalls; of the host, those longer than 1 ms.
    pub count: u64,
    /// Share of the time spent in stalls.
    pub share: f64,
    /// Longest stall; of the host the largest wake-up delay.
    pub longest_ns: Nanos,
}

/// Stalls since the last sample.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Stalls {
    pub host: Option<StallsObservation>,
    /// Reason why the host's stalls are not known.
    pub unseen: Option<String>,
    /// Standstills of disks by the device's path.
    pub disks: BTreeMap<PathBuf, StallsObservation>,
    seconds: f64,
}

impl Stalls {
    /// The host's stalls, for the causes of late requests.
    pub fn of_host(&self) -> Option<StallTotal> {
        self.host.map(|one| self.stood(one))
    }

    /// Standstills of a disk, for the causes of late requests.
    pub fn of_disk(&self, path: &PathBuf) -> Option<StallTotal> {
        self.disks.get(path).map(|one| self.stood(*one))
    }

    fn stood(&self, seen: StallsObservation) -> StallTotal {
        StallTotal { total: Nanos((seen.share * self.seconds * 1e9) as u64), count: seen.count }
    }
}

/// Probes that run since the last sample.
#[derive(Debug, Default)]
pub(super) struct StallWatch {
    probe: Option<(Instant, NoiseProbe)>,
    disks: BTreeMap<PathBuf, DiskWatch>,
}

impl StallWatch {
    /// Ends the probes, and returns what they measured.
    pub fn take(&mut self) -> Stalls {
        let disks = std::mem::take(&mut self.disks);
        let Some((begin, probe)) = self.probe.take() else {
            let unseen = "nothing with a target has sent requests since the last sample".to_owned();
            return Stalls { unseen: Some(unseen), ..Stalls::default() };
        };
        let (noise, stalls) = probe.finish();
        let seconds = begin.elapsed().as_secs_f64().max(f64::MIN_POSITIVE);
        let disks = disks.into_iter().map(|(path, watch)| {
            let Standstills { longest_ns, count, total_ns, .. } = watch.finish(stalls.as_ref());
            (path, StallsObservation { count, share: total_ns.0 as f64 / 1e9 / seconds, longest_ns })
        });
        let disks = disks.collect();
        let host = stalls.map(|stalls| {
            let (count, total) = stalls.longer_than(SHORTEST);
            StallsObservation { count, share: total.0 as f64 / 1e9 / seconds, longest_ns: noise.max_ns }
        });
        let why = if noise.realtime {
            "some CPU was stalled for more than a twentieth of the time, or could not be monitored"
        } else {
            "probes under SCHED_FIFO are not available: the service's cgroup has no real-time budget"
        };
        let unseen = host.is_none().then(|| why.to_owned());
        Stalls { host, unseen, disks, seconds }
    }

    /// Starts probes until the next sample: of the host, and of these disks as far as the kernel
    /// counts them.
    pub fn start(&mut self, devices: &BTreeSet<PathBuf>, root: &Root) {
        for path in devices {
            let Ok(device) = BlockDevice::find(root, path) else { continue };
            if let Some(watch) = DiskWatch::start(&root.at(device.sysfs()), true) {
                self.disks.insert(path.clone(), watch);
            }
        }
        self.probe = Some((Instant::now(), NoiseProbe::start_sparse()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probes_see_until_the_next_look_and_rest_without_requests() {
        let mut watch = StallWatch::default();
        let none = watch.take();
        assert!(none.of_host().is_none() && none.unseen.is_some());
        watch.start(&BTreeSet::from([PathBuf::from("/dev/no-such-disk")]), &Root::default());
        std::thread::sleep(std::time::Duration::from_millis(50));
        let seen = watch.take();
        // What it saw depends on the machine; that it tells what it does not know does not.
        assert_eq!(seen.host.is_none(), seen.unseen.is_some(), "{seen:?}");
        assert!(seen.disks.is_empty() && seen.seconds >= 0.05);
        if let Some(stood) = seen.of_host() {
            assert!(stood.total.0 as f64 <= seen.seconds * 1e9);
        }
        assert!(watch.take().unseen.unwrap().contains("since the last sample"));
    }
}
