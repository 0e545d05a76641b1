//! Ageing of devices: windows of the kernel's counters against their profiles.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rtvirtio_kernel::device_io::DeviceIo;
use rtvirtio_kernel::{BlockDevice, Root, trusted};
use rtvirtio_model::ageing::{Ageing, AgeingWindow, Completed, Part, Profiled, WINDOW_S};
use rtvirtio_model::fingerprint;
use rtvirtio_spec::{Device, Spec};
use serde::{Deserialize, Serialize};

use crate::device_windows::idles;
use crate::dirs::{Dirs, write_state};
use crate::plan::load_profile;

/// Name of the file in the state directory.
const FILE: &str = "ageing.json";

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

/// Levels of a device as saved, with its profile.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Kept {
    /// Fingerprint of the part of the profile that counts.
    profile: String,
    levels: [i8; Part::ALL.len()],
}

impl Kept {
    fn from_ageing(ageing: &Ageing) -> Self {
        Self { profile: name_of(ageing.profiled()), levels: ageing.levels() }
    }
}

/// Name of the part of a profile that windows are compared with.
fn name_of(profiled: &Profiled) -> String {
    fingerprint(format!("{profiled:?}").as_bytes())
}

/// Devices against their profiles. Levels are kept in a file, so that a restart of the service
/// forgets no slower device.
#[derive(Debug, Default)]
pub struct DeviceAgeing {
    watched: BTreeMap<PathBuf, Watched>,
    /// Levels as saved; `None` before the first sample.
    kept: Option<BTreeMap<PathBuf, Kept>>,
}

impl DeviceAgeing {
    /// Samples some devices. Of others no window goes on, and what is known stays.
    pub fn sample(
        &mut self,
        devices: &BTreeMap<PathBuf, SampleStalls>,
        root: &Root,
        dirs: &Dirs,
        now: Instant,
    ) {
        for (path, watched) in &mut self.watched {
            if !devices.contains_key(path) {
                watched.begin = None;
            }
        }
        // Without the file, or with one that cannot be read, all is to be found anew.
        let kept = self.kept.get_or_insert_with(|| read(&dirs.state).unwrap_or_default());
        for (path, stalls) in devices {
            let watched = self.watched.entry(path.clone()).or_default();
            watched.sample((path, kept.get(path)), *stalls, (root, dirs), now);
        }
        let mut known = kept.clone();
        for (path, ageing) in all(&self.watched) {
            known.insert(path.to_owned(), Kept::from_ageing(ageing));
        }
        known.retain(|_, kept| kept.levels.iter().any(|level| *level > 0));
        // Tried again with the next sample where it fails.
        if known != *kept && save(&dirs.state, &known) {
            *kept = known;
        }
    }

    /// Devices of which windows have been seen, by path.
    pub fn all(&self) -> impl Iterator<Item = (&Path, &Ageing)> {
        all(&self.watched)
    }
}

fn all(watched: &BTreeMap<PathBuf, Watched>) -> impl Iterator<Item = (&Path, &Ageing)> {
    watched.iter().filter_map(|(path, watched)| Some((path.as_path(), watched.ageing.as_ref()?)))
}

fn read(state: &Path) -> Option<BTreeMap<PathBuf, Kept>> {
    let text = trusted::read_config(state.join(FILE), trusted::CONFIG_LIMIT).ok()?;
    serde_json::from_slice(&text).ok()
}

fn save(state: &Path, known: &BTreeMap<PathBuf, Kept>) -> bool {
    serde_json::to_vec_pretty(known).is_ok_and(|text| write_state(state, FILE, &text).is_ok())
}

impl Watched {
    fn sample(
        &mut self,
        (path, kept): (&Path, Option<&Kept>),
        stalls: SampleStalls,
        (root, dirs): (&Root, &Dirs),
        now: Instant,
    ) {
        let Some(seen) = counters(path, root) else {
            self.begin = None;
            return;
        };
        let Some((at, first)) = self.begin else {
            self.begin_at(now, seen);
            if let (None, Some(kept)) = (&self.ageing, kept) {
                let profiled = profiled_of(path, dirs).filter(|of| name_of(of) == kept.profile);
                self.ageing = profiled.map(|profiled| Ageing::restored(profiled, kept.levels));
            }
            return;
        };
        self.stalls.host_s += stalls.host_s;
        let standstills = self.stalls.standstill_s.into_iter().chain(stalls.standstill_s);
        self.stalls.standstill_s = standstills.reduce(f64::max);
        let seconds = now.saturating_duration_since(at).as_secs_f64();
        if seconds < WINDOW_S {
            return;
        }
        // While the profile cannot be read, what is known stays.
        if let (Some(done), Some(profiled)) = (seen.since(&first), profiled_of(path, dirs)) {
            self.end(&done, seconds, profiled);
        }
        self.begin_at(now, seen);
    }

    fn begin_at(&mut self, now: Instant, seen: DeviceIo) {
        (self.begin, self.stalls) = (Some((now, seen)), SampleStalls::default());
    }

    /// Ends a window. A new profile begins anew.
    fn end(&mut self, done: &DeviceIo, seconds: f64, profiled: Profiled) {
        let ageing = self.ageing.take().filter(|ageing| *ageing.profiled() == profiled);
        let ageing = self.ageing.insert(ageing.unwrap_or_else(|| Ageing::new(profiled)));
        ageing.see(&window(done, seconds, self.stalls));
    }
}

/// Profile of a device; `None` where there is none that can be used.
fn profiled_of(path: &Path, dirs: &Dirs) -> Option<Profiled> {
    let spec = Spec { device: Device::Path(path.to_owned()), vms: Vec::new() };
    Profiled::new(&load_profile(&spec, None, dirs).ok()?).ok()
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
        flushes: done.flushes,
        flush_s: done.flush_time.as_secs_f64(),
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
        let of = |profile: &Profile| Profiled::new(profile).unwrap();
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
        assert_eq!((all.all().count(), all.watched.len(), dirs.state.exists()), (0, 1, false));
    }

    #[test]
    fn levels_are_read_as_they_were_saved_and_damage_is_none() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let profile: Profile = serde_json::from_str(PROFILE).unwrap();
        let mut ageing = Ageing::new(Profiled::new(&profile).unwrap());
        for _ in 0..FOLLOW {
            ageing.see(&window(&reads(3_966), WINDOW_S, SampleStalls::default()));
        }
        let known = BTreeMap::from([(PathBuf::from("/dev/sdz"), Kept::from_ageing(&ageing))]);
        assert!(save(dir.path(), &known));
        let read_back = read(dir.path()).unwrap();
        assert_eq!(read_back, known);
        let kept = &read_back[Path::new("/dev/sdz")];
        assert_eq!(kept.profile, name_of(&Profiled::new(&profile).unwrap()));
        assert_ne!(kept.profile, name_of(&Profiled::new(&profile.slowed(3.0)).unwrap()));
        let restored = Ageing::restored(Profiled::new(&profile).unwrap(), kept.levels);
        assert_eq!(restored.alarm(), ageing.alarm());
        std::fs::write(dir.path().join(FILE), "{").unwrap();
        assert_eq!(read(dir.path()), None);
    }
}
