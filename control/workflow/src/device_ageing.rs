//! Ageing of devices: windows of the kernel's counters against their profiles.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rtvirtio_kernel::device_io::DeviceIo;
use rtvirtio_kernel::{BlockDevice, Root};
use rtvirtio_model::ageing::{Ageing, AgeingWindow, Completed, WINDOW_S};
use rtvirtio_model::{Service, service};
use rtvirtio_spec::{Device, Spec};

use crate::device_windows::idles;
use crate::dirs::Dirs;
use crate::plan::load_profile;

/// Stalls since the last sample.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SampleStalls {
    /// Time in which the host stood still, s; 0 where nothing watched.
    pub host_s: f64,
    /// Longest standstill of the device, s; `None` where nothing watched.
    pub standstill_s: Option<f64>,
}

/// A device with its current window.
#[derive(Debug, Default)]
struct Watched {
    /// Begin of the window; `None` before the first sample, and after a gap.
    begin: Option<(Instant, DeviceIo)>,
    stalls: SampleStalls,
    ageing: Option<Ageing>,
}

/// Devices against their profiles, since they were first sampled.
#[derive(Debug, Default)]
pub struct DeviceAgeing(BTreeMap<PathBuf, Watched>);

impl DeviceAgeing {
    /// Samples some devices. Of others no window goes on, and what is known stays.
    pub fn sample(
        &mut self,
        devices: &BTreeMap<PathBuf, SampleStalls>,
        root: &Root,
        dirs: &Dirs,
        now: Instant,
    ) {
        for (path, watched) in &mut self.0 {
            if !devices.contains_key(path) {
                watched.begin = None;
            }
        }
        for (path, stalls) in devices {
            self.0.entry(path.clone()).or_default().sample(path, *stalls, (root, dirs), now);
        }
    }

    /// Devices of which windows have been seen, by path.
    pub fn all(&self) -> impl Iterator<Item = (&Path, &Ageing)> {
        self.0.iter().filter_map(|(path, watched)| Some((path.as_path(), watched.ageing.as_ref()?)))
    }
}

impl Watched {
    fn sample(&mut self, path: &Path, stalls: SampleStalls, (root, dirs): (&Root, &Dirs), now: Instant) {
        let Some(seen) = counters(path, root) else {
            self.begin = None;
            return;
        };
        let Some((at, first)) = self.begin else {
            self.begin_at(now, seen);
            return;
        };
        self.stalls.host_s += stalls.host_s;
        let standstills = self.stalls.standstill_s.into_iter().chain(stalls.standstill_s);
        self.stalls.standstill_s = standstills.reduce(f64::max);
        let seconds = now.saturating_duration_since(at).as_secs_f64();
        if seconds < WINDOW_S {
            return;
        }
        let spec = Spec { device: Device::Path(path.to_owned()), vms: Vec::new() };
        // While the profile cannot be read, what is known stays.
        let of_profile = load_profile(&spec, None, dirs).ok().and_then(|profile| service(&profile).ok());
        if let (Some(done), Some(service)) = (seen.since(&first), of_profile) {
            self.end(&done, seconds, service);
        }
        self.begin_at(now, seen);
    }

    fn begin_at(&mut self, now: Instant, seen: DeviceIo) {
        (self.begin, self.stalls) = (Some((now, seen)), SampleStalls::default());
    }

    /// Ends a window. A new profile begins anew.
    fn end(&mut self, done: &DeviceIo, seconds: f64, service: Service) {
        let ageing = self.ageing.take().filter(|ageing| *ageing.service() == service);
        let ageing = self.ageing.insert(ageing.unwrap_or_else(|| Ageing::new(service)));
        ageing.see(&window(done, seconds, self.stalls));
    }
}

/// Counters of a device; `None` where it is gone, or its requests wait for the elevator, so that
/// their time is not the device's.
fn counters(path: &Path, root: &Root) -> Option<DeviceIo> {
    let device = BlockDevice::find(root, path).ok()?;
    let seen = DeviceIo::read(root, &device).ok()?;
    (!idles(&device, root)).then_some(seen)
}

fn window(done: &DeviceIo, seconds: f64, stalls: SampleStalls) -> AgeingWindow {
    let completed = |n, bytes, time: Duration| Completed { n, bytes, time_s: time.as_secs_f64() };
    AgeingWindow {
        seconds,
        read: completed(done.reads, done.read_bytes, done.read_time),
        write: completed(done.writes, done.write_bytes, done.write_time),
        busy_s: done.busy.as_secs_f64(),
        in_flight_s: done.in_flight.as_secs_f64(),
        standstill_s: stalls.standstill_s,
        host_stalled_s: stalls.host_s,
    }
}

#[cfg(test)]
mod tests {
    use rtvirtio_model::Profile;
    use rtvirtio_model::ageing::FOLLOW;

    use super::*;

    /// A drive's profile: 132 us for a read of 4 KiB.
    const PROFILE: &str = include_str!("../../learn/data/qlc-nvme.profile.json");

    fn reads(ms: u64) -> DeviceIo {
        let time = Duration::from_millis(ms);
        DeviceIo {
            reads: 10_000,
            read_bytes: 10_000 * 4096,
            read_time: time,
            busy: time,
            in_flight: time,
            ..DeviceIo::default()
        }
    }

    #[test]
    fn windows_of_the_kernels_counters_show_a_slower_device_and_a_new_profile_begins_anew() {
        let profile: Profile = serde_json::from_str(PROFILE).unwrap();
        let of = |profile: &Profile| service(profile).unwrap();
        let mut watched = Watched::default();
        let mut see = |ms: u64, profile: &Profile| {
            watched.end(&reads(ms), WINDOW_S, of(profile));
            watched.ageing.as_ref().and_then(Ageing::alarm)
        };
        for _ in 0..20 {
            assert_eq!(see(1_322, &profile), None);
        }
        for _ in 1..FOLLOW {
            assert_eq!(see(3_966, &profile), None);
        }
        let alarm = see(3_966, &profile).unwrap();
        assert!(alarm.contains("reads take up to 3"), "{alarm}");
        // Measured anew, the device is as it is.
        assert_eq!(see(3_966, &profile.slowed(3.0)), None);
    }

    #[test]
    fn a_device_that_is_gone_says_nothing_and_ends_nothing() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let dirs = Dirs { state: dir.path().join("s"), run: dir.path().join("r") };
        let root = Root::new(dir.path());
        let mut all = DeviceAgeing::default();
        let devices = BTreeMap::from([(PathBuf::from("/dev/gone"), SampleStalls::default())]);
        all.sample(&devices, &root, &dirs, Instant::now());
        assert_eq!((all.all().count(), all.0.len()), (0, 1));
    }
}
